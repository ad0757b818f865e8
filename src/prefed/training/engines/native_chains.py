"""A chain of layers as a C program: the calls that stand below chain.c.

Taken are classifiers that are chains of linear layers, convolutions with stride 1, ReLU and
max-pooling without overlap; `write` says of any other model why not. Results equal those of the
modules up to rounding, and the engine compares both before it relies on it.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from prefed.core.layout import Entry, Layout, row_major
from prefed.training.engines.linear_chains import chain
from prefed.training.engines.native_writing import (
    TYPES,
    Memory,
    NotNative,
    Shape,
    Vectors,
    Written,
    check_layer,
)

KINDS = (nn.Identity, nn.Flatten, nn.Linear, nn.Conv2d, nn.ReLU, nn.MaxPool2d)
LARGEST_KERNEL, MOST_LAYERS = 7, 8
AT = "the gradient is at "
"""A line that is no line of C, and so is "swap": it has changed places with the other memory."""
POINTS = 6
"""In each direction, of convolutions in Winograd's form (winograd.c)."""
FEWEST_CHANNELS = 6
"""Of the input and of the output of such a convolution: with three the plain form is faster."""
LARGEST_UNROLLED = 1 << 16
"""Numbers between two layers of a sample, at most: beyond, what is between layers leaves the cache,
and torch's own convolutions are better at it."""


@dataclass
class Writer(Memory):
    """Collects the calls of a pass forward, and of the one back in reverse order."""

    lanes: int = 0
    width: int = 0
    forward: list[str] = field(default_factory=list)
    back: list[list[str]] = field(default_factory=list)
    widest: int = 0
    """Numbers of a sample's gradient on the way back, where it has no place of its own."""
    ends_with_weights: bool = False
    """The way back of the last layer so far does not look at its output."""

    def buffer(self, features: int) -> str:
        """Memory for so many numbers of each sample."""
        return self.numbers(features * self.width)

    def takes_turns(self, *features: int) -> None:
        """The way back of a layer leaves gradients of so many numbers in the memory for that."""
        self.widest = max(self.widest, *features)


def write(
    module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
) -> Written:
    vectors = Vectors.of(batch, TYPES[dtype][2])
    out = Writer(layout, lanes=vectors.lanes, width=vectors.width)
    shape, a = _layers(module, sample, out)
    out.check_all_used()
    if len(shape) != 1 or not out.ends_with_weights:
        raise NotNative("its last layer is not a linear one")
    (classes,) = shape
    turns = [out.buffer(out.widest), out.buffer(out.widest)]
    lines = [f"if (cross_entropy({classes}, count, of, y, (vec *){a}, loss)) return -1;"]
    d = a
    for step in reversed(out.back):
        other = turns[0] if d != turns[0] else turns[1]
        for line in step:
            if line == "swap":
                d, other = other, d if d in turns else turns[1]
            elif line.startswith(AT):
                d, other = line.removeprefix(AT), turns[0]
            else:
                lines.append(line.replace("DY", d).replace("DX", other))
    winograd = any("winograd(" in line for line in out.forward)
    files = ("chain.c", "winograd.c") if winograd else ("chain.c",)
    return Written(
        out.forward, lines, a, classes, out.size, vectors.lanes, vectors.width, vectors.rows,
        samples=vectors.width, files=files,
    )  # fmt: skip


def _layers(module: nn.Module, shape: Shape, out: Writer) -> tuple[Shape, str]:
    """All layers, one after another; the shape of the output, and where it lies."""
    a, first, layers = out.buffer(math.prod(shape)), True, chain(module)
    out.forward.append(f"samples_last({math.prod(shape)}, count, x, {a});")
    if sum(type(layer) in (nn.Linear, nn.Conv2d) for _, layer in layers) > MOST_LAYERS:
        raise NotNative(f"it has more than {MOST_LAYERS} layers, which take long to compile")
    for prefix, layer in layers:
        check_layer(prefix.rstrip("."), layer, KINDS)
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
    if not isinstance(layer.bias, Tensor):
        return "0", "0"
    place = out.parameter(prefix + "bias", tuple(layer.bias.shape)).offset
    return f"w + {place}", f"g + {place}"


def _linear(
    layer: nn.Linear, prefix: str, shape: Shape, x: str, first: bool, out: Writer
) -> tuple[Shape, str]:
    if shape != (layer.in_features,):
        raise NotNative("a linear layer stands before the samples are flat")
    sizes = f"{layer.in_features}, {layer.out_features}"
    here = out.parameter(prefix + "weight", (layer.out_features, layer.in_features))
    w, (bias, into) = here.offset, _bias(layer, prefix, out)
    y = out.buffer(layer.out_features)
    out.forward.append(f"linear({sizes}, w + {w}, {bias}, (vec *){x}, (vec *){y});")
    if first and layer.in_features % out.lanes == 0:
        rows, stride, lines = "x", layer.in_features, []
    else:
        stride = layer.in_features + -layer.in_features % out.lanes
        rows = out.buffer(stride)
        lines = [f"samples_first({layer.in_features}, {stride}, (vec *){x}, {rows});"]
    lines.append(f"linear_weight({sizes}, {stride}, count, DY, {rows}, g + {w}, {into}, add);")
    if not first:
        out.takes_turns(layer.in_features)
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
    by_c, by_k = weights_lie(entry)
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
    if few_products(c, shape, k):
        lines = _winograd(sizes, c, shape, here, bias, into, x, y, first, out)
    else:
        out.forward.append(f"conv({sizes}, w + {here}, {bias}, (vec *){x}, (vec *){y});")
        lines = [f"conv_weight({sizes}, (vec *)DY, (vec *){x}, g + {here}, {into}, add);"]
        if not first:
            lines.append(f"conv_input({sizes}, w + {here}, (vec *)DY, (vec *)DX);")
    if not first:
        out.takes_turns(c * high * wide)
        lines.append("swap")
        if p:
            lines += [f"without_border({c}, {h}, {w}, {p}, (vec *)DY, (vec *)DX);", "swap"]
    out.back.append(lines)
    return shape, y


def weights_lie(entry: Entry) -> tuple[int, int]:
    """How the weights of a convolution lie: numbers from one input channel to the next, and from
    one pixel to the next. Channels first, or last."""
    o, c, k, _ = entry.shape
    if entry.lies_as(row_major(entry.shape)):
        return k * k, 1
    last = row_major((o, k, k, c))
    if not entry.lies_as((last[0], last[3], last[1], last[2])):
        raise NotNative(f"{entry.name} lies neither with its channels first nor last")
    return 1, c


def few_products(channels: int, shape: Shape, k: int) -> bool:
    """Winograd's form pays: enough channels to share what is done for a tile, and whole tiles."""
    outputs, high, wide = shape
    tile = POINTS + 1 - k
    return k in (3, 5) and min(channels, outputs) >= FEWEST_CHANNELS and min(high, wide) >= tile


@dataclass(frozen=True)
class Winograd:
    """What a convolution in Winograd's form needs beside its images."""

    inputs: int
    outputs: int
    lanes: int
    width: int

    @property
    def apart(self) -> tuple[int, int]:
        """Vectors from one pair of points to the next, of the input and of the output: never a
        power of two, whose places in the cache would be the same."""
        vectors = self.width // self.lanes
        return self.inputs * vectors + 1, self.outputs * vectors + 1

    @property
    def wide(self) -> int:
        """Numbers from one sample to the next where its channels lie together."""
        return self.inputs + -self.inputs % self.lanes

    @property
    def memory(self) -> dict[str, int]:
        """Numbers."""
        pairs, products = POINTS * POINTS, POINTS * POINTS * self.inputs * self.outputs
        v, at = (pairs * apart * self.lanes for apart in self.apart)
        return {"u": products, "v": v, "at": at, "turned": self.wide * self.width, "du": products}


def _winograd(
    sizes: str, c: int, shape: Shape, here: int, bias: str, into: str, x: str, y: str, first: bool,
    out: Writer,
) -> list[str]:  # fmt: skip
    """A convolution in Winograd's form; the lines of its way back."""
    form = Winograd(c, shape[0], out.lanes, out.width)
    inputs, outputs = form.apart
    u, v, at, turned, du = map(out.numbers, form.memory.values())
    out.forward.append(
        f"winograd({sizes}, {inputs}, w + {here}, {bias}, (vec *){x}, (vec *){y}, {u}, (vec *){v});"
    )
    dx = "0" if first else "(vec *)DX"
    return [
        f"winograd_back({sizes}, {inputs}, {outputs}, {form.wide}, count, (vec *)DY, (vec *){x}, "
        f"g + {here}, {into}, {dx}, add, {u}, (vec *){v}, (vec *){at}, {turned}, {du});"
    ]


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
    back = f"pool_input({sizes}, (vec *){x}, (vec *){y}, (vec *)DY, (vec *)"
    if out.ends_with_weights:  # nobody looks at x behind that
        out.back.append([f"{back}{x});", AT + x])
    else:
        out.takes_turns(c * h * w)
        out.back.append([f"{back}DX);", "swap"])
    return shape, y
