"""A model as C: what every program has, whatever the model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import nn

from prefed.core.hooks import hooked
from prefed.core.layout import Entry, Layout, row_major
from prefed.core.machine import halves_vectors

TYPES = {torch.float32: ("float", "int32_t", 4), torch.float64: ("double", "int64_t", 8)}
MOST_FIELDS = 16
"""Of the state of a rule."""
PAGE = 4096
"""Bytes."""
MOST_COPIED = 1 << 16
"""Weights of a client whose vectors are copied to where they are walked along fastest: larger ones
do not stay in the cache, and copies would cost more than they gain."""

Shape = tuple[int, ...]


class NotNative(Exception):
    """Why a model cannot be written in C."""


class Kind(NamedTuple):
    """Vectors of a processor."""

    bytes: int
    most: int
    """How many of them samples fill."""
    rows: int
    cost: int = 1
    """Of an operation, of the cheapest one's."""


def _kinds(capability: str | None, halves: bool) -> list[Kind]:
    """What the processor has, the best first. With twelve rows for two vectors, six weights are
    taken to each, and what they need stays nearest."""
    wide = Kind(64, 4, 24, cost=2 if halves else 1)
    kinds = {"AVX512": [wide, Kind(32, 8, 24)], "AVX2": [Kind(32, 2, 12), Kind(32, 4, 12)]}
    capability = capability or torch.backends.cpu.get_cpu_capability()
    return kinds.get(capability, [Kind(16, 4, 16)])


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
    def of(
        cls, batch: int, size: int, capability: str | None = None, halves: bool | None = None
    ) -> "Vectors":
        """For batches of this size, of numbers of this many bytes: as few operations as can be."""
        found = []
        for kind in _kinds(capability, halves_vectors() if halves is None else halves):
            lanes = kind.bytes // size
            parts = math.ceil(batch / (kind.most * lanes))
            vectors = math.ceil(batch / (parts * lanes))
            cost = parts * vectors * kind.cost
            found.append((cost, -lanes, cls(lanes, vectors * lanes, kind.rows)))
        return min(found, key=lambda one: one[:2])[2]

    @classmethod
    def widest(cls, size: int) -> tuple[int, int]:
        """Lanes for numbers of this many bytes, and rows."""
        kind = _kinds(None, False)[0]
        return kind.bytes // size, kind.rows


@dataclass(frozen=True)
class Written:
    """A model in C, for batches of a size."""

    forward: list[str]
    """For as many samples as are taken at a time."""
    back: list[str]
    """From the loss on, which comes first."""
    scores: str
    """Where the one leaves them for the other."""
    classes: int
    memory: int
    """Numbers that a pass needs."""
    lanes: int
    """Numbers in a vector."""
    width: int
    """Columns of what lies between layers, a multiple of the lanes."""
    rows: int
    """Vectors that a product holds in registers."""
    samples: int
    """In a pass."""
    files: tuple[str, ...] = ("chain.c",)
    """What stands above it, below vectors.c."""
    sizes: dict[str, object] = field(default_factory=dict)
    """Names of numbers in these files."""
    tables: Sequence[str] = ()
    """Lines between the files and `pass`."""
    labels: Shape = ()
    """The shape of the labels of one sample."""
    compiling: float = 4.0
    """Seconds that a compiler takes, about."""

    def source(self, layout: Layout, sample: Shape, dtype: torch.dtype) -> str:
        """The whole program."""
        real, whole, _ = TYPES[dtype]
        head: dict[str, object] = {"REAL": real, "WHOLE": whole, "LANES": self.lanes}
        head |= {"WIDTH": self.width, "ROWS": self.rows, "SAMPLES": self.samples}
        head |= {"FEATURES": math.prod(sample), "LABELS": math.prod(self.labels)}
        head |= {"SIZE": layout.size, "COPIED": int(layout.size <= MOST_COPIED)}
        head |= {"PAGE": PAGE, "MOST_FIELDS": MOST_FIELDS}
        head |= {"CLASSES": self.classes, "SCORES": self.scores}
        head |= {"SCORE(c, s, l)": "((c) * WIDTH + (s) * LABELS + (l))", **self.sizes}
        return "\n".join(
            [
                *(f"#define {name} {value}" for name, value in head.items()),
                *map(text, ("vectors.c", *self.files)),
                *self.tables,
                "static __attribute__((noinline)) int forward(const real *w, const real *x,",
                "                                             int count, real *scratch)",
                *_body(self.forward),
                "static int pass(const real *w, real *g, const real *x, const int64_t *y,",
                "                int count, int64_t of, int add, double *loss, real *scratch)",
                *_body(
                    [
                        "int failed = forward(w, x, count, scratch);",
                        "if (failed) return failed;",
                        *self.back,
                    ]
                ),
            ]
        )


def _body(lines: Sequence[str]) -> list[str]:
    return ["{", *(f"    {line}" for line in lines), "    return 0;", "}"]


@dataclass
class Memory:
    """Where the parameters of a model lie, and what a pass needs beside them."""

    layout: Layout
    size: int = 0
    """Numbers so far."""
    used: set[str] = field(default_factory=set)
    """Parameters that have their place in the program."""

    def numbers(self, count: int) -> str:
        """Memory for so many numbers."""
        start, self.size = self.size, self.size + count + -count % 16
        return f"(scratch + {start})"

    def parameter(self, name: str, shape: Shape | None = None) -> Entry:
        """Where it lies in the flat vector. The program knows its shape: no other is taken, and one
        that is named here has to lie row by row."""
        entry = next((entry for entry in self.layout.entries if entry.name == name), None)
        if entry is None:
            raise NotNative(f"{name} is missing, or a parameter that stands in several places")
        if shape is not None and not (entry.shape == shape and entry.lies_as(row_major(shape))):
            raise NotNative(f"{name} is not a contiguous {' x '.join(map(str, shape))}")
        self.used.add(name)
        return entry

    def check_all_used(self) -> None:
        unused = {entry.name for entry in self.layout.entries} - self.used
        if unused:
            raise NotNative(f"{min(unused)} is a parameter of no layer")


def check_layer(name: str, layer: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """It is one of these as it was written: subclasses may do otherwise."""
    if hooked(layer) or not all(p.requires_grad for p in layer.parameters()):
        raise NotNative(f"layer {name} is frozen, or somebody listens to it")
    if type(layer) not in kinds or "forward" in vars(layer):
        raise NotNative(f"no C is written for {type(layer).__name__}")


def check_kinds(layers: Sequence[object], kinds: Sequence[type[nn.Module]]) -> None:
    """Each is exactly of the kind that stands there."""
    if [type(layer) for layer in layers] != [*kinds]:
        raise NotNative(f"it has other layers than {', '.join(kind.__name__ for kind in kinds)}")


def check_embedding(table: nn.Embedding) -> None:
    """It is a table of rows and nothing more."""
    if (table.padding_idx, table.max_norm) != (None, None) or table.scale_grad_by_freq:
        raise NotNative("its embedding leaves symbols out, or limits them")


@cache
def text(name: str) -> str:
    return files("prefed.training.engines").joinpath(name).read_text()
