"""Single ops through the backend's interface, forward and backward, at the sizes that the trainer calls.

The label says what was timed; `extra_info` in the saved JSON has the amount of work, so that a rate
(state updates or bytes a second) can be set against the machine's limits.
"""

from __future__ import annotations

import numpy as np
import pytest

# B, L, E, N: a small model's step, a 130-million-parameter layer, and a long single sequence.
SCANS = [(16, 256, 256, 16), (1, 512, 1536, 16), (1, 4096, 512, 16)]
CONVS = [(16, 256, 256, 4), (1, 512, 1536, 4)]
ROWS = [(4096, 128), (512, 768)]
# Rows, inputs, outputs: projections in training, four sequences and one in decoding, the head for one.
PRODUCTS = [(4096, 128, 512), (512, 768, 3072), (4, 768, 3072), (1, 1536, 768), (1, 768, 50280)]
# The last has a small result and a long sum.
WEIGHT_GRADIENTS = [(4096, 128, 512), (512, 768, 3072), (8192, 64, 64)]


def name(shape) -> str:
    return "x".join(map(str, shape))


@pytest.fixture
def device(backend, rng):
    """device(*shape): normal numbers on the backend; device.like(array) for given ones."""

    class Device:
        def __call__(self, *shape, scale=1.0):
            return self.like(scale * rng.standard_normal(shape))

        def like(self, array):
            return backend.from_host(np.ascontiguousarray(array, dtype=np.float32))

    return Device()


@pytest.fixture
def scan_inputs(device, rng):
    def inputs(batch, length, width, states):
        steps = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size=width))
        return {
            "u": device(batch, length, width),
            "delta": device(batch, length, width),
            "a": device.like(-np.tile(np.arange(1, states + 1), (width, 1))),
            "b": device(batch, length, states),
            "c": device(batch, length, states),
            "d": device(width),
            "z": device(batch, length, width),
            "delta_bias": device.like(np.log(np.expm1(steps))),
        }

    return inputs


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
@pytest.mark.parametrize("shape", SCANS, ids=name)
def test_scan_forward(timed, backend, scan_inputs, shape, discretization):
    inputs = scan_inputs(*shape)
    timed(
        f"scan forward {name(shape)} {discretization}",
        lambda: backend.selective_scan(**inputs, discretization=discretization, grad=False),
        state_updates=int(np.prod(shape)),
    )


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
@pytest.mark.parametrize("shape", SCANS, ids=name)
def test_scan_backward(timed, backend, scan_inputs, device, shape, discretization):
    batch, length, width, states = shape
    inputs = scan_inputs(*shape)
    dy = device(batch, length, width)
    sums = {
        "d_a": backend.zeros((width, states)),
        "d_d": backend.zeros((width,)),
        "d_delta_bias": backend.zeros((width,)),
    }

    def forward():
        _, _, saved = backend.selective_scan(**inputs, discretization=discretization)
        return (dy, saved), sums

    timed(
        f"scan backward {name(shape)} {discretization}",
        backend.selective_scan_backward,
        setup=forward,
        state_updates=int(np.prod(shape)),
    )


@pytest.mark.parametrize("shape", CONVS, ids=name)
def test_conv_forward(timed, backend, device, shape):
    batch, length, width, taps = shape
    x, w, bias = device(batch, length, width), device(width, taps), device(width)
    timed(
        f"conv forward {name(shape)}",
        lambda: backend.conv1d(x, w, bias, grad=False),
        bytes=2 * 4 * batch * length * width,
    )


@pytest.mark.parametrize("shape", CONVS, ids=name)
def test_conv_backward(timed, backend, device, shape):
    batch, length, width, taps = shape
    x, w, bias = device(batch, length, width), device(width, taps), device(width)
    dy, dw, dbias = device(batch, length, width), backend.zeros((width, taps)), backend.zeros((width,))

    def forward():
        _, _, saved = backend.conv1d(x, w, bias)
        return (dy, saved, w), {"dw": dw, "dbias": dbias}

    timed(f"conv backward {name(shape)}", backend.conv1d_backward, setup=forward)


@pytest.mark.parametrize("shape", [(1, 1536, 4), (8, 512, 4)], ids=name)
def test_conv_step(timed, backend, device, shape):
    batch, width, taps = shape
    x, w, bias = device(batch, width), device(width, taps), device(width)
    state = backend.zeros((batch, taps - 1, width))
    timed(f"conv step {name(shape)}", lambda: backend.conv1d_step(x, state, w, bias))


@pytest.mark.parametrize("shape", [(1536, 16)], ids=name)
def test_decay(timed, backend, device, shape):
    a_log = device(*shape)
    timed(f"decay {name(shape)}", lambda: backend.decay(a_log, grad=False), bytes=2 * 4 * int(np.prod(shape)))


# Tokens, vocabulary, width.
EMBEDDINGS = [(4096, 258, 128), (512, 50280, 768)]


@pytest.mark.parametrize("shape", EMBEDDINGS, ids=name)
def test_embedding_forward(timed, backend, device, rng, shape):
    tokens, vocabulary, width = shape
    ids = backend.from_host(rng.integers(0, vocabulary, size=tokens), "i32")
    table = backend.zeros((vocabulary, width))
    timed(
        f"embedding forward {name(shape)}",
        lambda: backend.embedding(ids, table, grad=False),
        bytes=2 * 4 * tokens * width,
    )


@pytest.mark.parametrize("shape", EMBEDDINGS, ids=name)
def test_embedding_backward(timed, backend, device, rng, shape):
    tokens, vocabulary, width = shape
    ids = backend.from_host(rng.integers(0, vocabulary, size=tokens), "i32")
    table, d_table = backend.zeros((vocabulary, width)), backend.zeros((vocabulary, width))
    dy = device(tokens, width)
    timed(
        f"embedding backward {name(shape)}",
        backend.embedding_backward,
        setup=lambda: ((dy, backend.embedding(ids, table)[1]), {"d_table": d_table}),
        bytes=3 * 4 * tokens * width,
    )


@pytest.mark.parametrize("shape", PRODUCTS, ids=name)
def test_linear_forward(timed, backend, device, shape):
    rows, width, outputs = shape
    x, w = device(rows, width), device.like(np.full((outputs, width), 0.01, np.float32))
    timed(
        f"linear forward {name(shape)}",
        lambda: backend.linear(x, w, grad=False),
        multiplications=rows * width * outputs,
        bytes=4 * width * outputs,
    )


@pytest.mark.parametrize("shape", WEIGHT_GRADIENTS, ids=name)
def test_linear_weight_gradient(timed, backend, device, shape):
    rows, width, outputs = shape
    x, w, dy = device(rows, width), device(outputs, width), device(rows, outputs)
    dw = backend.zeros((outputs, width))
    _, saved = backend.linear(x, w)
    timed(
        f"linear weight gradient {name(shape)}",
        lambda: backend.linear_backward(dy, saved, w, dw=dw, need_dx=False),
        multiplications=rows * width * outputs,
    )


@pytest.mark.parametrize("shape", ROWS, ids=name)
def test_norm_forward(timed, backend, device, shape):
    x, w = device(*shape), device(shape[1])
    timed(
        f"norm forward {name(shape)}",
        lambda: backend.rms_norm(x, w, 1e-6, grad=False),
        bytes=2 * 4 * shape[0] * shape[1],
    )


@pytest.mark.parametrize("shape", ROWS, ids=name)
def test_norm_backward(timed, backend, device, shape):
    x, w, dy, dw = device(*shape), device(shape[1]), device(*shape), backend.zeros((shape[1],))

    def forward():
        _, saved = backend.rms_norm(x, w, 1e-6)
        return (dy, saved, w), {"dw": dw}

    timed(f"norm backward {name(shape)}", backend.rms_norm_backward, setup=forward)


@pytest.mark.parametrize("shape", [(4096, 258), (256, 50280)], ids=name)
def test_cross_entropy(timed, backend, device, rng, shape):
    rows, classes = shape
    targets = backend.from_host(rng.integers(0, classes, size=rows), "i32")
    logits = device(rows, classes)
    timed(
        f"cross-entropy {name(shape)}",
        backend.cross_entropy_,
        setup=lambda: ((logits, targets), {"scale": 1.0 / rows}),
        bytes=2 * 4 * rows * classes,
    )


@pytest.mark.parametrize("size", [1_000_000])
def test_global_norm(timed, backend, device, size):
    g = device(size)
    timed(f"global norm {size}", lambda: backend.global_norm([g]), bytes=4 * size)


@pytest.mark.parametrize("size", [1_000_000])
def test_add(timed, backend, device, size):
    a, b, out = device(size), device(size), backend.zeros((size,))
    timed(f"add {size}", lambda: backend.add(a, b, out=out), bytes=3 * 4 * size)


@pytest.mark.parametrize("size", [1_000_000])
def test_adamw(timed, backend, device, size):
    p, g, m = device(size), device(size, scale=1e-2), backend.zeros((size,))
    v, stats = backend.zeros((size,)), backend.zeros((4,))
    norm = backend.global_norm([g])
    timed(
        f"adamw {size}",
        lambda: backend.adamw_(
            [p], [g], [m], [v],
            lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=[0.01], step=1,
            grad_norm=norm, max_grad_norm=1.0, stats=stats,
        ),
        bytes=7 * 4 * size,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 1536, 16), (8, 512, 16)], ids=name)
def test_scan_step(timed, backend, device, shape):
    batch, width, states = shape
    u, delta, z = (device(batch, width) for _ in range(3))
    a = device.like(-np.tile(np.arange(1, states + 1), (width, 1)))
    b, c = device(batch, states), device(batch, states)
    d, bias = device(width), device(width)
    state = backend.zeros((batch, width, states))
    timed(
        f"scan step {name(shape)}",
        lambda: backend.selective_scan_step(u, delta, a, b, c, d, z, bias, state),
        state_updates=int(np.prod(shape)),
    )
