"""Parameters: their names, shapes and order (SPEC 1), and the flat memory that they live in.

Weights, gradients and optimizer moments of a model share one `Layout`, so that an optimizer or an
all-reduce works on a few long flat tensors instead of hundreds of small ones, while the model sees
each parameter as a view in its own shape. Everything is keyed by name, never by position.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig

__all__ = [
    "ALIGNMENT",
    "BLOCK_PARAMETERS",
    "DEFAULT_LORA_TARGETS",
    "Layout",
    "Param",
    "ParamStore",
    "Params",
    "Slabs",
    "bind",
    "model_layout",
    "param_matrix_shape",
    "parameter_count",
    "parameter_shapes",
    "shapes_in_order",
]

BLOCK_PARAMETERS = (
    "wInProj", "bInProj", "wConv", "bConv", "wXProj", "bXProj", "wDtProj", "bDtProj",
    "A_log", "D_vec", "wOutProj", "bOutProj", "normWeight",
)  # fmt: skip
"""Names of one block's parameters, in the order of `parameters()`."""

DEFAULT_LORA_TARGETS = ("wInProj", "wXProj", "wDtProj", "wOutProj")
"""What low-rank adapters attach to unless told otherwise: not the embedding, which may be the head
too, and not A_log, whose drift destabilises the state (SPEC 4)."""

ALIGNMENT = 64
"""Elements (256 bytes) that the start of every tensor in a slab is a multiple of: whole cache lines
for a CPU, and the strictest offset that a GPU asks for."""

_BYTES = 4  # one float32, the storage of every parameter


def _block_shapes(config: MambaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one block's parameters, those that the config switches off included."""
    d, e, n, r = config.d_model, config.d_inner, config.d_state, config.dt_rank
    assert isinstance(e, int)
    assert isinstance(r, int)  # the config resolved "auto"
    return {
        "wInProj": (2 * e, d),
        "bInProj": (2 * e,),
        "wConv": (e, config.d_conv),
        "bConv": (e,),
        "wXProj": (r + 2 * n, e),
        "bXProj": (r + 2 * n,),
        "wDtProj": (e, r),
        "bDtProj": (e,),
        "A_log": (e, n),
        "D_vec": (e,),
        "wOutProj": (d, e),
        "bOutProj": (d,),
        "normWeight": (d,),
    }


def parameter_shapes(config: MambaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name, in the order of `parameters()` (SPEC 1).

    `embedding`, then `layer{i}.{name}`, then `final_norm`, then `lm_head` unless it is tied to the
    embedding, then `lm_head_bias`. Biases that the config switches off are absent.
    """
    return dict(shapes_in_order(config))


def shapes_in_order(config: MambaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`parameter_shapes` one by one: nothing is made for layers that nobody gets to."""
    block = _present_in_block(config)
    yield "embedding", (config.vocab_size, config.d_model)
    for i in range(config.n_layers):
        for name, shape in block.items():
            yield f"layer{i}.{name}", shape
    yield "final_norm", (config.d_model,)
    if not config.tie_embeddings:
        yield "lm_head", (config.vocab_size, config.d_model)
    if config.use_lm_head_bias:
        yield "lm_head_bias", (config.vocab_size,)


def parameter_count(config: MambaConfig) -> int:
    """How many numbers the parameters of a model hold, whatever its size."""
    block = sum(math.prod(shape) for shape in _present_in_block(config).values())
    # Embedding, final norm and head do not depend on the depth.
    outside = sum(
        math.prod(shape) for name, shape in shapes_in_order(config.replace(n_layers=1)) if "." not in name
    )
    return outside + config.n_layers * block


def _present_in_block(config: MambaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of one block's parameters."""
    absent = set()
    if not config.use_bias:
        absent |= {"bInProj", "bOutProj"}
    if not config.use_conv_bias:
        absent.add("bConv")
    if not config.use_x_proj_bias:
        absent.add("bXProj")
    return {name: shape for name, shape in _block_shapes(config).items() if name not in absent}


def param_matrix_shape(name: str, config: MambaConfig) -> tuple[int, int] | None:
    """(rows, cols) of a matrix parameter, None for a vector.

    Parameters
    ----------
    name
        a whole name (`layer0.wInProj`, `embedding`) or a block's own (`wInProj`)
    config
        the model's; which biases and which head it switches on does not matter here

    Raises
    ------
    ValueError
        no Mamba model of this depth has a parameter of that name
    """
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.d_model),
        "final_norm": (config.d_model,),
        "lm_head": (config.vocab_size, config.d_model),
        "lm_head_bias": (config.vocab_size,),
        **_block_shapes(config),
    }
    prefix, dot, rest = name.rpartition(".")
    if dot and (rest not in BLOCK_PARAMETERS or prefix not in {f"layer{i}" for i in range(config.n_layers)}):
        rest = ""
    if rest not in shapes:
        raise ValueError(
            f"no parameter is named {name!r} in a model of {config.n_layers} layers; names are embedding, "
            f"layer0.wInProj to layer{config.n_layers - 1}.normWeight, final_norm, lm_head and lm_head_bias"
        )
    shape = shapes[rest]
    return (shape[0], shape[1]) if len(shape) == 2 else None


# ---- flat memory ------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a tensor lies: elements [start, stop) of a slab."""

    slab: int
    start: int
    stop: int


class Layout:
    """Names, shapes and which of them weight decay applies to.

    Parameters
    ----------
    shapes
        shape by name, in the order of `parameters()`
    decayed
        the names that weight decay applies to

    Attributes
    ----------
    shapes : dict of str to tuple
    decayed : frozenset of str
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], decayed: Collection[str]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.decayed = frozenset(decayed)
        unknown = self.decayed - self.shapes.keys()
        if unknown:
            raise ValueError(f"decayed names {sorted(unknown)} that have no shape")

    def places(
        self, max_bytes: int | None, slab_bytes: int | None = None
    ) -> tuple[dict[str, _Place], list[int]]:
        """Where every tensor goes, and the size in elements of every slab.

        Names that decay come first and never share a slab with the rest, so that a run of
        neighbours has one weight decay. A slab is closed when the next tensor would take it beyond
        `slab_bytes` (None: as `max_bytes`); a tensor larger than that has a slab of its own. ValueError when
        a single tensor is larger than `max_bytes` (None: no limit).
        """
        limit = math.inf if max_bytes is None else max_bytes // _BYTES
        full = limit if slab_bytes is None else min(limit, slab_bytes // _BYTES)
        places: dict[str, _Place] = {}
        sizes: list[int] = []
        for decays in (True, False):
            end: int | None = None  # of the open slab, None before the first
            for name, shape in self.shapes.items():
                if (name in self.decayed) != decays:
                    continue
                size = math.prod(shape)
                if size > limit:
                    raise ValueError(
                        f"parameter {name} of shape {shape} takes {size * _BYTES} bytes, more than the "
                        f"{max_bytes} that one tensor may have on this backend: use another backend"
                    )
                start = -(-(end or 0) // ALIGNMENT) * ALIGNMENT
                if end is None or start + size > full:
                    sizes.append(0)
                    start = 0
                end = start + size
                sizes[-1] = end
                places[name] = _Place(len(sizes) - 1, start, end)
        return places, sizes


def model_layout(config: MambaConfig) -> Layout:
    """The layout of a model's parameters. Weight decay is for matrices other than A_log (SPEC 5)."""
    shapes = parameter_shapes(config)
    decayed = {name for name, shape in shapes.items() if len(shape) == 2 and not name.endswith("A_log")}
    return Layout(shapes, decayed)


class Slabs:
    """One set of tensors in a layout's shapes, zero at first: weights, gradients or moments.

    `slabs[name]` is the tensor in its shape, a view into the flat memory.
    """

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._backend = backend
        self.layout = layout
        self._places, sizes = layout.places(backend.max_tensor_bytes, backend.max_slab_bytes)
        self._flat = [backend.zeros((size,)) for size in sizes]
        self._views = {
            name: backend.reshape(backend.view(self._flat[p.slab], 0, p.start, p.stop), layout.shapes[name])
            for name, p in self._places.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Copied one by one, the flat tensors and their views would no longer share memory.
        raise TypeError("slabs of parameters cannot be copied or pickled by themselves: copy the model")

    def zero(self) -> None:
        """Set every element to 0."""
        for flat in self._flat:
            self._backend.fill_(flat, 0.0)

    def runs(self, names: Collection[str]) -> list[tuple[Tensor, bool]]:
        """Flat views that cover exactly these tensors, as few as possible, and whether each decays.

        The padding between two neighbours may be covered; it is zero in every slab and stays zero
        under any elementwise update. Two slabs of one layout and backend give matching runs.
        """
        wanted = set(names)
        unknown = wanted - self._places.keys()
        if unknown:
            raise ValueError(f"no parameters are named {sorted(unknown)}")
        runs: list[list[str]] = []
        last: str | None = None  # the tensor before, where it was wanted
        for name, place in self._places.items():
            if name not in wanted:
                last = None
                continue
            if last is not None and self._places[last].slab == place.slab:
                runs[-1].append(name)
            else:
                runs.append([name])
            last = name
        return [(self._span(run[0], run[-1]), run[0] in self.layout.decayed) for run in runs]

    def _span(self, first: str, last: str) -> Tensor:
        place = self._places[first]
        return self._backend.view(self._flat[place.slab], 0, place.start, self._places[last].stop)


class ParamStore:
    """A model's weights and, from their first use on, its gradients.

    Attributes
    ----------
    layout : Layout
    trainable : set of str
        names whose gradients are wanted and that an optimizer may change; every name at first
    """

    def __init__(self, backend: Backend, layout: Layout) -> None:
        self._backend = backend
        self.layout = layout
        self.trainable = set(layout.shapes)
        self._values = Slabs(backend, layout)
        self._grads: Slabs | None = None
        self._weights: Params | None = None
        self._training: tuple[frozenset[str], Params] | None = None
        self._version = 0
        self._decays: tuple[int, tuple[Tensor, ...]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter's name, in the order of `parameters()`."""
        return tuple(self.layout.shapes)

    @property
    def values(self) -> Slabs:
        """The weights. Whoever asks for them may write to them, so this counts as `changed`.

        Who keeps a tensor of it and writes later calls `changed` after that, as an optimizer does.
        """
        self.changed()
        return self._values

    @property
    def grads(self) -> Slabs:
        """The gradients; allocated, as zeros, when first asked for."""
        if self._grads is None:
            self._grads = Slabs(self._backend, self.layout)
        return self._grads

    def changed(self) -> None:
        """Weights were written: drop what was computed from them."""
        self._version += 1
        self._decays = None

    def weights(self) -> Params:
        """The parameters without gradients; only to be read."""
        if self._weights is None:
            self._weights = bind(self._values)
        return self._weights

    def training(self) -> Params:
        """The parameters, those that are trainable now with `grads`."""
        if self._training is None or self._training[0] != self.trainable:
            names = frozenset(self.trainable)
            self._training = names, bind(self._values, self.grads, names)
        return self._training[1]

    def decays(self) -> tuple[Tensor, ...]:
        """A = -exp(clamp(A_log)) of every layer, (E, N), kept until the weights change; only to be read.

        For decoding, where a token is so little work that this would be a good part of it.
        """
        kept = self._decays
        version = self._version  # taken first: a write meanwhile, from another thread, makes the result old
        if kept is None or kept[0] != version:
            layers = self.weights().layers
            a = tuple(self._backend.decay(p["A_log"].value, grad=False)[0] for p in layers)  # type: ignore[union-attr]
            self._decays = kept = version, a
        return kept[1]


# ---- what the model's code works with ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Param:
    """A weight and the tensor that its gradient is added to; `grad=None` means frozen."""

    value: Tensor
    grad: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Params:
    """A model's parameters as its code asks for them."""

    top: Mapping[str, Param]
    """Those outside the blocks, by name: `embedding`, `final_norm` and what there is of the head."""
    layers: tuple[Mapping[str, Param | None], ...]
    """Each block's by short name; None for a bias that the config switches off."""


def bind(values: Slabs, grads: Slabs | None = None, names: Collection[str] | None = None) -> Params:
    """The parameters in `values`, with gradients for `names` (None: for all) where `grads` is given."""
    top: dict[str, Param] = {}
    layers: dict[str, dict[str, Param | None]] = {}
    for name in values.layout.shapes:
        wanted = grads is not None and (names is None or name in names)
        param = Param(values[name], grads[name] if wanted else None)  # type: ignore[index]
        layer, dot, short = name.partition(".")
        if dot:
            layers.setdefault(layer, dict.fromkeys(BLOCK_PARAMETERS))[short] = param
        else:
            top[name] = param
    return Params(top, tuple(layers.values()))
