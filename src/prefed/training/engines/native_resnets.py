"""The ResNets of prefed.models with GroupNorm as C programs: what stands below resnet.c.

A convolution of one size is compiled once for all layers that have it. `write` says of other
ResNets why not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from prefed.core.layout import Layout
from prefed.models.resnet import Block, ResNet
from prefed.training.engines.native_chains import (
    LARGEST_UNROLLED,
    Winograd,
    few_products,
    weights_lie,
)
from prefed.training.engines.native_writing import (
    TYPES,
    Memory,
    NotNative,
    Shape,
    Vectors,
    Written,
    check_kinds,
    check_layer,
)

MODELS = (ResNet,)
KINDS = ResNet, Block, nn.Sequential, nn.Conv2d, nn.GroupNorm, nn.Identity, nn.Linear
MOST_WEIGHTS = 1 << 20
"""Beyond, the weights of a layer leave the cache, and torch is good at these."""
SHARED = ("u", "v", "at", "turned", "du")
"""Memory of convolutions in Winograd's form."""


@dataclass(frozen=True)
class Images:
    """Where they lie, in pointers of C; those with a border of one pixel are inputs of layers."""

    at: str
    channels: int
    high: int
    wide: int

    @property
    def sizes(self) -> str:
        return f"{self.channels}, {self.high}, {self.wide}"

    @property
    def pixels(self) -> int:
        return self.high * self.wide

    @property
    def places(self) -> str:
        """From row to row and from image to image, without a border."""
        return f"{self.wide} * N, {self.pixels} * N"

    @property
    def inside(self) -> str:
        """The first pixel behind the border."""
        return f"{self.at} + {self.wide + 3} * N"

    @property
    def inside_places(self) -> str:
        wide = self.wide + 2
        return f"{wide} * N, {(self.high + 2) * wide} * N"


@dataclass
class Writer(Memory):
    lanes: int = 0
    width: int = 0
    forward: list[str] = field(default_factory=list)
    back: list[list[str]] = field(default_factory=list)
    """Of each part of the network; the last comes first."""
    functions: dict[str, list[str]] = field(default_factory=dict)
    """Convolutions by their sizes."""
    shared: dict[str, int] = field(default_factory=dict)
    most: int = 0
    """Numbers of a sample in the largest images, with a border."""

    def images(self, channels: int, high: int, wide: int, border: int = 0) -> Images:
        count = channels * (high + 2 * border) * (wide + 2 * border)
        self.most = max(self.most, channels * (high + 2) * (wide + 2))
        return Images(f"(vec *){self.numbers(count * self.width)}", channels, high, wide)

    def convolution(self, layer: nn.Conv2d, name: str, x: Images) -> tuple[str, int]:
        """The name of the function for such a layer (3 x 3, with stride 1), and where its weights
        lie."""
        c, o, high, wide = layer.in_channels, layer.out_channels, x.high, x.wide
        by, place = self.weights(name)
        sizes = f"{c}, {high + 2}, {wide + 2}, {o}, 3, {by}"
        if sizes not in self.functions:
            self.functions[sizes] = [*self._functions(sizes, f"conv{len(self.functions)}", c, o, x)]
        return f"conv{[*self.functions].index(sizes)}", place

    def weights(self, name: str) -> tuple[str, int]:
        """How the weights of a convolution lie (`by_c, by_k`), and where."""
        entry = self.parameter(f"{name}.weight")
        by_c, by_k = weights_lie(entry)
        return f"{by_c}, {by_k}", entry.offset

    def _functions(self, sizes: str, name: str, c: int, o: int, x: Images) -> Iterator[str]:
        given = "const vec *dy, const vec *x, vec *dx, int count, int add, real *scratch"
        yield f"ONCE {name}(const real *w, const vec *x, vec *y, real *scratch) {{"
        back = f"ONCE {name}_back(const real *w, real *g, {given}) {{"
        if not few_products(c, (o, x.high, x.wide), 3):
            yield f"conv({sizes}, w, 0, x, y); }}"
            yield f"{back} conv_weight({sizes}, dy, x, g, 0, add);"
            yield f"if (dx) conv_input({sizes}, w, dy, dx); }}"
            return
        form = Winograd(c, o, self.lanes, self.width)
        inputs, outputs = form.apart
        for part, count in form.memory.items():
            self.shared[part] = max(self.shared.get(part, 0), count)
        by = sizes.split(", ", 5)[5]
        yield f"winograd({sizes}, {inputs}, w, 0, x, y, SHARED_U, (vec *)SHARED_V); }}"
        yield f"{back} weights_at_points({c}, {o}, 3, {by}, w, SHARED_U);"
        yield f"winograd_back({sizes}, {inputs}, {outputs}, {form.wide}, count, dy, x, g, 0, dx,"
        yield "add, SHARED_U, (vec *)SHARED_V, (vec *)SHARED_AT, SHARED_TURNED, SHARED_DU); }"

    def norm(self, layer: nn.GroupNorm, name: str, y: Images) -> tuple[str, str]:
        """Its weight and bias as arguments, and the call of its way back (of `DY`)."""
        shape = (y.channels,)
        weight, bias = (self.parameter(f"{name}.{n}", shape).offset for n in ("weight", "bias"))
        scale = f"(vec *){self.numbers(layer.num_groups * self.width)}"
        sizes = f"{y.channels}, {layer.num_groups}, {y.pixels}"
        self.forward.append(f"group_norm({sizes}, {layer.eps!r}, {y.at}, {scale});")
        back = f"group_norm_back({sizes}, w + {weight}, {y.at}, {scale}, DY, "
        return f"w + {weight}, w + {bias}", f"{back}g + {weight}, g + {bias}, add);"


def write(
    module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
) -> Written:
    assert isinstance(module, ResNet)
    for name, layer in module.named_modules():
        check_layer(name or "model", layer, KINDS)
    if layout.size > MOST_WEIGHTS:
        raise NotNative("it is large, and torch is good at these")
    vectors = Vectors.of(batch, TYPES[dtype][2])
    out = Writer(layout, lanes=vectors.lanes, width=vectors.width)
    check_kinds([module.stem, module.head], [nn.Conv2d, nn.Linear])
    if len(sample) != 3:
        raise NotNative("its samples are no images")
    channels, high, wide = sample
    if module.stem.out_channels * (high + 2) * (wide + 2) > LARGEST_UNROLLED:
        raise NotNative("its images are large, and torch is better at these")
    x = _stem(module, channels, high, wide, out)
    for i, block in enumerate(module.blocks):
        if not isinstance(block, Block):
            raise NotNative(f"no C is written for {type(block).__name__} there")
        x = _block(block, f"blocks.{i}", x, out)
    scores, head, lines = _head(module, x, out)
    for part in reversed(out.back):
        lines += part
    out.check_all_used()
    # where gradients lie: as a convolution takes them, of the sum, before it is thinned out, of x
    for place in ("DY", "DSUM", "DFULL", "DX"):
        at = f"((vec *){out.numbers(out.most * out.width)})"
        lines = [line.replace(place, at) for line in lines]
    shared = [
        f"#define SHARED_{part.upper()} {out.numbers(out.shared.get(part, 1))}" for part in SHARED
    ]
    functions = [line for of in out.functions.values() for line in of]
    files, width = ("chain.c", "winograd.c", "resnet.c"), vectors.width
    return Written(
        [*out.forward, *head], lines, scores, module.head.out_features, out.size, vectors.lanes,
        width, vectors.rows, width, files,
        tables=[*shared, *functions], compiling=2.0 * len(out.functions),
    )  # fmt: skip


def _stem(module: ResNet, channels: int, high: int, wide: int, out: Writer) -> Images:
    """The first convolution, its norm and ReLU."""
    _check(module.stem, (channels, module.stem.out_channels), (1, 1), 3)
    plain, x = (out.images(channels, high, wide, border) for border in (0, 1))
    y = out.images(module.stem.out_channels, high, wide)
    into = out.images(y.channels, high, wide, 1)
    function, weights = out.convolution(module.stem, "stem", x)
    out.forward += [
        f"samples_last({channels * plain.pixels}, count, x, (real *){plain.at});",
        f"with_border({plain.sizes}, 1, {plain.at}, {x.at});",
        f"{function}(w + {weights}, {x.at}, {y.at}, scratch);",
    ]
    own, norm_back = _norm(module.norm, "norm", y, out)
    out.forward.append(f"activate({y.sizes}, {own}, {y.at}, 0, 0, 0, 0, {into.at});")
    out.back.append(
        [
            f"activate_back({y.sizes}, {into.at}, DX, DY);",
            norm_back,
            f"{function}_back(w + {weights}, g + {weights}, DY, {x.at}, 0, count, add, scratch);",
        ]
    )
    return into


def _block(block: Block, name: str, x: Images, out: Writer) -> Images:
    """Two convolutions and a shortcut. The gradient of x is left at DX, with a border."""
    check_kinds([block.conv1, block.conv2], [nn.Conv2d, nn.Conv2d])
    stride, after = block.conv1.stride[0], block.conv1.out_channels
    _check(block.conv1, (x.channels, after), (stride, stride), 3)
    _check(block.conv2, (after, after), (1, 1), 3)
    high, wide = -(-x.high // stride), -(-x.wide // stride)
    full = out.images(after, x.high, x.wide) if stride == 2 else None
    y1, y2 = (out.images(after, high, wide) for _ in range(2))
    middle, into = (out.images(after, high, wide, 1) for _ in range(2))
    conv1, weights1 = out.convolution(block.conv1, f"{name}.conv1", x)
    out.forward.append(f"{conv1}(w + {weights1}, {x.at}, {(full or y1).at}, scratch);")
    if full:
        out.forward.append(f"thin({y1.sizes}, {full.places}, {full.at}, {y1.at});")
    own1, norm1_back = _norm(block.norm1, f"{name}.norm1", y1, out)
    out.forward.append(f"activate({y1.sizes}, {own1}, {y1.at}, 0, 0, 0, 0, {middle.at});")
    conv2, weights2 = out.convolution(block.conv2, f"{name}.conv2", middle)
    out.forward.append(f"{conv2}(w + {weights2}, {middle.at}, {y2.at}, scratch);")
    own2, norm2_back = _norm(block.norm2, f"{name}.norm2", y2, out)
    shortcut, shortcut_back = _shortcut(block, name, x, y2, stride, out)
    out.forward.append(f"activate({y2.sizes}, {own2}, {y2.at}, {shortcut}, {into.at});")
    to_full = f"memset(DFULL, 0, {after * x.pixels} * N * sizeof(vec));"
    widen = [to_full, f"thin_back({y1.sizes}, {full.places}, DY, DFULL);"] if full else []
    out.back.append(
        [
            f"activate_back({y2.sizes}, {into.at}, DX, DSUM);",
            f"memcpy(DY, DSUM, {after * y2.pixels} * N * sizeof(vec));",
            norm2_back,
            f"{conv2}_back(w + {weights2}, g + {weights2}, DY, {middle.at}, DX, "
            "count, add, scratch);",
            f"activate_back({y1.sizes}, {middle.at}, DX, DY);",
            norm1_back,
            *widen,
            f"{conv1}_back(w + {weights1}, g + {weights1}, {'DFULL' if full else 'DY'}, "
            f"{x.at}, DX, "
            "count, add, scratch);",
            *shortcut_back,
        ]
    )
    return into


def _shortcut(
    block: Block, name: str, x: Images, y: Images, stride: int, out: Writer
) -> tuple[str, list[str]]:
    """The last arguments of `activate` but one, and the way back from DSUM to DX."""
    if isinstance(block.shortcut, nn.Identity):
        if stride != 1 or x.channels != y.channels:
            raise NotNative("a shortcut is missing")
        return f"{x.at}, 0, 0, 0", [f"add_inside({x.sizes}, DSUM, DX);"]
    if not isinstance(block.shortcut, nn.Sequential):
        raise NotNative(f"no C is written for {type(block.shortcut).__name__}")
    check_kinds([*block.shortcut], [nn.Conv2d, nn.GroupNorm])
    project, norm = block.shortcut
    assert isinstance(project, nn.Conv2d)
    _check(project, (x.channels, y.channels), (2, 2), 1)
    thinned, found = (out.images(count, y.high, y.wide) for count in (x.channels, y.channels))
    by, weights = out.weights(f"{name}.shortcut.0")
    sizes = f"{thinned.sizes}, {y.channels}, 1, {by}"
    out.forward += [
        f"thin({thinned.sizes}, {x.inside_places}, {x.inside}, {thinned.at});",
        f"conv({sizes}, w + {weights}, 0, {thinned.at}, {found.at});",
    ]
    own, norm_back = _norm(norm, f"{name}.shortcut.1", found, out)
    inside = x.inside.replace(x.at, "DX")
    return f"0, {own}, {found.at}", [
        norm_back.replace("DY", "DSUM"),
        f"conv_weight({sizes}, DSUM, {thinned.at}, g + {weights}, 0, add);",
        f"conv_input({sizes}, w + {weights}, DSUM, DY);",
        f"thin_back({thinned.sizes}, {x.inside_places}, DY, {inside});",
    ]


def _head(module: ResNet, x: Images, out: Writer) -> tuple[str, list[str], list[str]]:
    """Where the scores are; the mean over pixels and the scores; the loss and the way back to
    DX."""
    c, classes = x.channels, module.head.out_features
    weight = out.parameter("head.weight", (classes, c)).offset
    bias = out.parameter("head.bias", (classes,)).offset
    stride = c + -c % out.lanes
    means, scores, d = (f"(vec *){out.numbers(n * out.width)}" for n in (c, classes, c))
    turned = out.numbers(stride * out.width)
    forward = [
        f"means({x.sizes}, {x.at}, {means});",
        f"linear({c}, {classes}, w + {weight}, w + {bias}, {means}, {scores});",
    ]
    back = [
        f"if (cross_entropy({classes}, count, of, y, {scores}, loss)) return -1;",
        f"samples_first({c}, {stride}, {means}, {turned});",
        f"linear_weight({c}, {classes}, {stride}, count, (real *){scores}, {turned}, "
        f"g + {weight}, g + {bias}, add);",
        f"linear_input({c}, {classes}, w + {weight}, {scores}, {d});",
        f"means_back({x.sizes}, {d}, DX);",
    ]
    return scores, forward, back


def _norm(layer: nn.Module, name: str, y: Images, out: Writer) -> tuple[str, str]:
    if not isinstance(layer, nn.GroupNorm) or not layer.eps > 0:
        raise NotNative(f"no C is written for such a {type(layer).__name__}")
    return out.norm(layer, name, y)


def _check(layer: nn.Conv2d, channels: Shape, stride: Shape, kernel: int) -> None:
    """It is what ResNet's constructor makes."""
    right = layer.stride == stride and layer.kernel_size == (kernel, kernel)
    right = right and (layer.in_channels, layer.out_channels) == channels
    plain = layer.dilation == (1, 1) and layer.groups == 1 and layer.bias is None
    border = layer.padding == (kernel // 2, kernel // 2) and layer.padding_mode == "zeros"
    if not (right and plain and border and stride[0] in (1, 2)):
        raise NotNative("no C is written for such a convolution")
