"""Train, fine-tune and run Mamba language models on an ordinary machine.

    import mamba_fast as mf
    model = mf.MambaLM(mf.MambaConfig(vocab_size=258, d_model=128, n_layers=4))
    mf.train(model, "my_texts/", mf.TrainConfig(epochs=1, lr=2e-3), out="my_model")

Importing the package is cheap: each of the names below is imported when it is first used.
`mamba_fast.functional` has the single operations, for architectures of your own;
`mamba_fast.backend` and `mamba_fast.testing` are for authors of backends.
"""

from __future__ import annotations

import importlib
import sys
import types

TYPE_CHECKING = False  # not from typing, which takes longer to load than all of this
if TYPE_CHECKING:
    from mamba_fast import functional as functional
    from mamba_fast.config import MambaConfig as MambaConfig
    from mamba_fast.config import TrainConfig as TrainConfig
    from mamba_fast.environment import show_config as show_config
    from mamba_fast.evaluate import evaluate as evaluate
    from mamba_fast.generate import generate as generate
    from mamba_fast.model import MambaLM as MambaLM
    from mamba_fast.model import load_model as load_model
    from mamba_fast.registry import get_backend as get_backend
    from mamba_fast.registry import list_backends as list_backends
    from mamba_fast.tokenizer import load_tokenizer as load_tokenizer
    from mamba_fast.train import train as train

    __version__: str

__all__ = [
    "MambaConfig",
    "MambaLM",
    "TrainConfig",
    "__version__",
    "evaluate",
    "functional",
    "generate",
    "get_backend",
    "list_backends",
    "load_model",
    "load_tokenizer",
    "show_config",
    "train",
]

# Where each public name comes from; "" for a module.
_HOME = {
    "MambaConfig": "config",
    "MambaLM": "model",
    "TrainConfig": "config",
    "evaluate": "evaluate",
    "functional": "",
    "generate": "generate",
    "get_backend": "registry",
    "list_backends": "registry",
    "load_model": "model",
    "load_tokenizer": "tokenizer",
    "show_config": "environment",
    "train": "train",
}


class _Package(types.ModuleType):
    """This package: as any module, but `train`, `generate` and `evaluate` stay functions.

    The import system binds a submodule to its name in the package whenever it is first imported, by
    whoever it is. Three submodules are called like the function that they are for, and
    `mamba_fast.train` must not depend on which of the two came last. (The modules remain importable:
    `from mamba_fast.train import TrainResult`.)
    """

    def __setattr__(self, name: str, value: object) -> None:
        if _HOME.get(name) == name and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOME:
        home = _HOME[name]
        module = importlib.import_module(f"{__name__}.{home or name}")
        value = getattr(module, name) if home else module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("mamba-fast")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
