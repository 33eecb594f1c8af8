"""A process of its own that runs one forward and backward pass and prints how much memory that took.

    python bench/memory_probe.py own|transformers VOCABULARY D_MODEL LAYERS LENGTH THREADS

Prints two numbers, in bytes: the largest resident size of the process, and its resident size before the
model was made (the interpreter and the libraries). Linux only: it reads /proc.
"""

from __future__ import annotations

import sys

import numpy as np
import own
import peers

from mamba_fast import MambaConfig


def resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))


def main(side: str, *numbers: str) -> None:
    vocabulary, width, layers, length, threads = map(int, numbers)
    config = MambaConfig.hf(vocabulary, width, layers)
    ids = np.random.default_rng(0).integers(0, vocabulary, size=(1, length))
    if side == "own":
        backend = own.default_backend(threads)
        before = resident("VmRSS")
        own.forward_backward(backend, config, ids, ids)()
    else:
        # A tiny model first, so that everything is imported.
        peers.transformers_model(MambaConfig.hf(8, 16, 1), None, threads)
        before = resident("VmRSS")
        peers.transformers_step(peers.transformers_model(config, None, threads), ids)()
    print(resident("VmHWM"), before)


if __name__ == "__main__":
    main(*sys.argv[1:])
