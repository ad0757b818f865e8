"""A chain of layers as a C program: what stands below chain.c, and how it is called.

Taken are classifiers that are chains of linear layers, convolutions with stride 1, ReLU and
max-pooling without overlap; `write` says of any other model why not. Results equal those of the
modules up to rounding, and the engine compares both before it relies on it.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from prefed.core.c_programs import CannotCompile, compiled
from prefed.core.hooks import hooked
from prefed.core.layout import Entry, Layout, row_major
from prefed.training.engines.linear_chains import chain

TYPES = {torch.float32: ("float", "int32_t", 4), torch.float64: ("double", "int64_t", 8)}
KINDS = (nn.Identity, nn.Flatten, nn.Linear, nn.Conv2d, nn.ReLU, nn.MaxPool2d)
LARGEST_KERNEL, MOST_LAYERS, MOST_FIELDS = 7, 8, 16
PAGE = 4096
"""Bytes."""
LARGEST_UNROLLED = 1 << 16
"""Numbers between two layers of a sample, at most: beyond, what is between layers leaves the cache,
and torch's own convolutions are better at it."""

Shape = tuple[int, ...]


class NotNative(Exception):
    """Why a model cannot be written in C."""


@dataclass(frozen=True)
class Vectors:
    """How many samples the program takes at a time."""

    lanes: int
    """Numbers in a vector."""
    width: int
    """Samples, a multiple of the lanes."""
    rows: int
    """Vectors that a product holds in registers."""

    @classmethod
    def of(cls, batch: int, size: int, capability: str | None = None) -> "Vectors":
        """For batches of this size, of numbers of this many bytes: as few samples that are none as
        can be."""
        kinds = {"AVX512": [(64, 4, 24), (32, 8, 24)], "AVX2": [(32, 4, 12)]}
        capability = capability or torch.backends.cpu.get_cpu_capability()
        found = []
        for nbytes, most, rows in kinds.get(capability, [(16, 4, 16)]):
            lanes = nbytes // size
            parts = math.ceil(batch / (most * lanes))
            width = lanes * math.ceil(batch / (parts * lanes))
            found.append((parts * width, -lanes, cls(lanes, width, rows)))
        return min(found, key=lambda one: one[:2])[2]


@dataclass
class Writer:
    """Collects the calls of a pass forward, and of the one back in reverse order."""

    layout: Layout
    lanes: int
    width: int
    forward: list[str] = field(default_factory=list)
    back: list[list[str]] = field(default_factory=list)
    memory: int = 0
    """Numbers that a pass needs between its layers."""
    widest: int = 0
    used: set[str] = field(default_factory=set)
    """Parameters that have their place in the program."""
    ends_with_weights: bool = False
    """The way back of the last layer so far does not look at its output."""

    def buffer(self, features: int, width: int | None = None) -> str:
        """Memory for so many numbers of each sample."""
        self.widest = max(self.widest, features)
        start, self.memory = self.memory, self.memory + features * (width or self.width)
        self.memory += -self.memory % 16
        return f"(scratch + {start})"

    def parameter(self, name: str) -> Entry:
        """Where it lies in the flat vector."""
        entry = next((entry for entry in self.layout.entries if entry.name == name), None)
        if entry is None:
            raise NotNative(f"{name} is a parameter that stands in several places")
        self.used.add(name)
        return entry


class Program:
    """A chain in C: for this model, samples of this shape and batches of about this size."""

    def __init__(
        self, module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
    ) -> None:
        self.source, self.memory = write(module, layout, sample, dtype, batch)
        self.dtype, self.size, self.features = dtype, layout.size, math.prod(sample)

    @cached_property
    def library(self) -> ctypes.CDLL:
        """Compiled when it is first needed."""
        return compiled(self.source)

    def scratch(self) -> Tensor:
        """The memory of a pass, for one thread."""
        return torch.empty(self.memory, dtype=self.dtype)

    def gradients(
        self, w: Tensor, g: Tensor, x: Tensor, y: Tensor, losses: Tensor, scratch: Tensor
    ) -> None:
        """Those of one batch of each client: w and g (C, d), x (C, B, ...), y (C, B)."""
        failed = self.library.gradients(
            *map(ctypes.c_int64, y.shape), pointer(w), pointer(g), ctypes.c_int64(w.stride(0)),
            pointer(x), ctypes.c_int64(x.stride(0)), pointer(y), ctypes.c_int64(y.stride(0)),
            pointer(losses), pointer(scratch),
        )  # fmt: skip
        _raise_if(failed)

    def rule(self, lines: str, state: Sequence[str]) -> Any:
        """A step of a rule, as `steps` takes it."""
        if len(state) > MOST_FIELDS:
            raise CannotCompile(f"a rule with more than {MOST_FIELDS} fields")
        real, _, _ = TYPES[self.dtype]
        source = [
            f"#define REAL {real}",
            f"#define SIZE {self.size}",
            _text("rule.c"),
            "void rule(real *restrict w, const real *restrict g, real *const *state, real lr)",
            "{",
            *(f"    real *restrict {name} = state[{i}];" for i, name in enumerate(state)),
            lines,
            "}",
        ]
        return compiled("\n".join(source)).rule

    def room(self, state: Mapping[str, Tensor], batch: int) -> int:
        """How many numbers hold the weights, the gradient, a batch and this state of one client in
        `steps`, each with two pages around it."""
        own = [value[0].numel() for value in state.values()]
        numbers = [self.size, self.size, batch * self.features, *own]
        return sum(numbers) + 2 * PAGE // self.dtype.itemsize * len(numbers)

    def steps(
        self,
        rule: Any,
        w: Tensor,
        state: Mapping[str, Tensor],
        sizes: Sequence[int],
        x: Tensor,
        y: Tensor,
        numbers: Tensor | None,
        losses: Tensor,
        lr: float,
        decay: float,
        memory: Tensor,
        scratch: Tensor,
    ) -> None:
        """Local steps of each client with a rule in C, on batches of these sizes that follow one
        another in y (C, ...) and in x, or whose samples in x have these numbers (C, ...). The sums
        of the losses are added to `losses`. `memory` is for what `room` says."""
        starts = [0, *accumulate(sizes)][:-1]
        integers, fields = ctypes.c_int64 * len(sizes), list(state.values())
        failed = self.library.steps(
            ctypes.c_int64(len(w)), ctypes.c_int64(len(sizes)), integers(*starts),
            integers(*sizes), pointer(w), pointer(x), ctypes.c_int64(x.stride(0)),
            None if numbers is None else pointer(numbers), ctypes.c_int64(len(x)), pointer(y),
            ctypes.c_int64(y.stride(0)), pointer(losses), rule, len(fields),
            (ctypes.c_void_p * len(fields))(*(value.data_ptr() for value in fields)),
            (ctypes.c_int64 * len(fields))(*(value[0].numel() for value in fields)),
            ctypes.c_double(lr), ctypes.c_double(decay), pointer(memory), pointer(scratch),
        )  # fmt: skip
        _raise_if(failed)


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _raise_if(failed: int) -> None:
    if failed:
        what = "a label is none of the model's classes", "a client has a sample that is not there"
        raise IndexError(what[-failed - 1])


def _text(name: str) -> str:
    return files("prefed.training.engines").joinpath(name).read_text()


def write(
    module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
) -> tuple[str, int]:
    """The program, and the numbers of memory that a pass needs."""
    if dtype not in TYPES:
        raise NotNative(f"weights of type {dtype}")
    real, whole, size = TYPES[dtype]
    vectors = Vectors.of(batch, size)
    out = Writer(layout, vectors.lanes, vectors.width)
    shape, a = _layers(module, sample, out)
    unused = {entry.name for entry in layout.entries} - out.used
    if unused:
        raise NotNative(f"{min(unused)} is a parameter of no layer")
    if len(shape) != 1 or not out.ends_with_weights:
        raise NotNative("its last layer is not a linear one")
    (classes,) = shape
    turns = [out.buffer(out.widest), out.buffer(out.widest)]
    lines = [
        *out.forward,
        f"if (cross_entropy({classes}, count, of, y, (vec *){a}, loss)) return -1;",
    ]
    d = a
    for step in reversed(out.back):
        other = turns[0] if d != turns[0] else turns[1]
        for line in step:
            if line == "swap":
                d, other = other, d if d in turns else turns[1]
            else:
                lines.append(line.replace("DY", d).replace("DX", other))
    head = {"REAL": real, "WHOLE": whole, "LANES": vectors.lanes, "WIDTH": vectors.width}
    head |= {"ROWS": vectors.rows, "FEATURES": math.prod(sample), "SIZE": layout.size}
    head |= {"PAGE": PAGE, "MOST_FIELDS": MOST_FIELDS}
    program = "\n".join(
        [
            *(f"#define {name} {value}" for name, value in head.items()),
            _text("chain.c"),
            "static int pass(const real *w, real *g, const real *x, const int64_t *y, int count,",
            "                int64_t of, int add, double *loss, real *scratch)",
            "{",
            *(f"    {line}" for line in lines),
            "    return 0;",
            "}",
        ]
    )
    return program, out.memory


def _layers(module: nn.Module, shape: Shape, out: Writer) -> tuple[Shape, str]:
    """All layers, one after another; the shape of the output, and where it lies."""
    a, first, layers = out.buffer(math.prod(shape)), True, chain(module)
    out.forward.append(f"samples_last({math.prod(shape)}, count, x, {a});")
    if sum(type(layer) in (nn.Linear, nn.Conv2d) for _, layer in layers) > MOST_LAYERS:
        raise NotNative(f"it has more than {MOST_LAYERS} layers, which take long to compile")
    for prefix, layer in layers:
        if hooked(layer) or not all(p.requires_grad for p in layer.parameters()):
            raise NotNative(f"layer {prefix.rstrip('.')} is frozen, or somebody listens to it")
        if type(layer) not in KINDS or "forward" in vars(layer):  # subclasses may do otherwise
            raise NotNative(f"no C is written for {type(layer).__name__}")
        match layer:
            case nn.Identity():
                continue
            case nn.Flatten(start_dim=1, end_dim=-1):
                shape = (math.prod(shape),)
                continue
            case nn.Linear():
                shape, a = _linear(layer, prefix, shape, a, first, out)
            case nn.Conv2d():
                shape, a = _conv(layer, prefix, shape, a, first, out)
            case nn.ReLU() if not first:
                features = math.prod(shape)
                out.forward.append(f"relu({features}, (vec *){a});")
                out.back.append([f"relu_input({features}, (vec *){a}, (vec *)DY);"])
            case nn.MaxPool2d() if not first:
                shape, a = _pool(layer, shape, a, out)
            case _:
                raise NotNative(f"no C is written for {type(layer).__name__} there")
        first, out.ends_with_weights = False, isinstance(layer, nn.Linear | nn.Conv2d)
    return shape, a


def _bias(layer: nn.Module, prefix: str, out: Writer) -> tuple[str, str]:
    """Where the bias and its gradient are."""
    if layer.bias is None:
        return "0", "0"
    place = out.parameter(prefix + "bias").offset
    return f"w + {place}", f"g + {place}"


def _linear(
    layer: nn.Linear, prefix: str, shape: Shape, x: str, first: bool, out: Writer
) -> tuple[Shape, str]:
    if shape != (layer.in_features,):
        raise NotNative("a linear layer stands before the samples are flat")
    sizes = f"{layer.in_features}, {layer.out_features}"
    w, (bias, into) = out.parameter(prefix + "weight").offset, _bias(layer, prefix, out)
    y = out.buffer(layer.out_features)
    out.forward.append(f"linear({sizes}, w + {w}, {bias}, (vec *){x}, (vec *){y});")
    if first and layer.in_features % out.lanes == 0:
        rows, stride, lines = "x", layer.in_features, []
    else:
        stride = layer.in_features + -layer.in_features % out.lanes
        rows = out.buffer(stride)
        lines = [f"samples_first({layer.in_features}, {stride}, {x}, {rows});"]
    lines.append(f"linear_weight({sizes}, {stride}, count, DY, {rows}, g + {w}, {into}, add);")
    if not first:
        lines += [f"linear_input({sizes}, w + {w}, (vec *)DY, (vec *)DX);", "swap"]
    out.back.append(lines)
    return (layer.out_features,), y


def _conv(
    layer: nn.Conv2d, prefix: str, shape: Shape, x: str, first: bool, out: Writer
) -> tuple[Shape, str]:
    k, p = layer.kernel_size[0], layer.padding[0]
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
    square = layer.kernel_size == (k, k) and layer.padding == (p, p) and k <= LARGEST_KERNEL
    zeros = layer.padding_mode == "zeros" and len(shape) == 3
    if not (plain and square and zeros) or isinstance(p, str):
        raise NotNative("no C is written for such a convolution")
    c, h, w = shape
    high, wide = h + 2 * p, w + 2 * p
    entry = out.parameter(prefix + "weight")
    by_c, by_k = (k * k, 1) if entry.stride == row_major(entry.shape) else (1, c)
    sizes = f"{c}, {high}, {wide}, {layer.out_channels}, {k}, {by_c}, {by_k}"
    shape = layer.out_channels, high - k + 1, wide - k + 1
    if max(c * high * wide, math.prod(shape)) > LARGEST_UNROLLED:
        raise NotNative("its images are large, and torch is better at these")
    here, (bias, into) = entry.offset, _bias(layer, prefix, out)
    if p:
        bordered = out.buffer(c * high * wide)
        out.forward.append(f"with_border({c}, {h}, {w}, {p}, (vec *){x}, (vec *){bordered});")
        x = bordered
    y = out.buffer(math.prod(shape))
    out.forward.append(f"conv({sizes}, w + {here}, {bias}, (vec *){x}, (vec *){y});")
    lines = [f"conv_weight({sizes}, (vec *)DY, (vec *){x}, g + {here}, {into}, add);"]
    if not first:
        lines += [f"conv_input({sizes}, w + {here}, (vec *)DY, (vec *)DX);", "swap"]
        if p:
            lines += [f"without_border({c}, {h}, {w}, {p}, (vec *)DY, (vec *)DX);", "swap"]
    out.back.append(lines)
    return shape, y


def _pool(layer: nn.MaxPool2d, shape: Shape, x: str, out: Writer) -> tuple[Shape, str]:
    both = layer.kernel_size
    k = both if isinstance(both, int) else both[0]
    plain = (layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices) == (
        0, 1, False, False,
    )  # fmt: skip
    square = both in (k, (k, k)) and layer.stride in (k, (k, k))
    if not plain or not square or len(shape) != 3 or k > LARGEST_KERNEL:
        raise NotNative("no C is written for such a max-pooling")
    c, h, w = shape
    shape = c, h // k, w // k
    y = out.buffer(math.prod(shape))
    sizes = f"{c}, {h}, {w}, {k}"
    out.forward.append(f"pool({sizes}, (vec *){x}, (vec *){y});")
    out.back.append([f"pool_input({sizes}, (vec *){x}, (vec *){y}, (vec *)DY, (vec *)DX);", "swap"])
    return shape, y
