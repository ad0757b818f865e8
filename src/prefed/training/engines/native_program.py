"""A model in C, and how it is called."""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from prefed.core.c_programs import CannotCompile, compiled, pointer
from prefed.core.layout import Layout
from prefed.training.engines import (
    native_chains,
    native_lstms,
    native_resnets,
    native_transformers,
)
from prefed.training.engines.native_writing import (
    MOST_COPIED,
    MOST_FIELDS,
    PAGE,
    TYPES,
    NotNative,
    Shape,
    Vectors,
    text,
)

WRITERS = native_transformers, native_resnets, native_lstms
"""Of models that are no chains of layers."""

NO_FIRSTS: Mapping[str, Tensor] = MappingProxyType({})


class Program:
    """For this model, samples of this shape and batches of about this size."""

    def __init__(
        self, module: nn.Module, layout: Layout, sample: Shape, dtype: torch.dtype, batch: int
    ) -> None:
        if dtype not in TYPES:
            raise NotNative(f"weights of type {dtype}")
        writers = (w for w in WRITERS if type(module) in w.MODELS)
        written = next(writers, native_chains).write(module, layout, sample, dtype, batch)
        self.source, self.memory = written.source(layout, sample, dtype), written.memory
        self.labels, self.compiling = written.labels, written.compiling
        """The shape of the labels of one sample; the seconds that a compiler takes, about."""
        self.classes = written.classes
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
        """Those of one batch of each client: w and g (C, d), x (C, B, ...), y (C, B, ...)."""
        failed = self.library.gradients(
            *map(ctypes.c_int64, y.shape[:2]), pointer(w), pointer(g), ctypes.c_int64(w.stride(0)),
            pointer(x), ctypes.c_int64(x.stride(0)), pointer(y), ctypes.c_int64(y.stride(0)),
            pointer(losses), pointer(scratch),
        )  # fmt: skip
        _raise_if(failed)

    def outputs(self, w: Tensor, x: Tensor, scratch: Tensor) -> Tensor:
        """The scores of samples (B, ...) with weights (d)."""
        found = w.new_empty(len(x), self.classes, *self.labels)
        failed = self.library.outputs(
            ctypes.c_int64(len(x)), pointer(w), pointer(x), pointer(found), pointer(scratch)
        )
        _raise_if(failed)
        return found

    def rule(self, lines: str, state: Sequence[str]) -> Any:
        """A step of a rule, as `steps` takes it."""
        if len(state) > MOST_FIELDS:
            raise CannotCompile(f"a rule with more than {MOST_FIELDS} fields")
        real, whole, size = TYPES[self.dtype]
        lanes, rows = Vectors.widest(size)
        head = {"REAL": real, "WHOLE": whole, "LANES": lanes, "ROWS": rows, "SIZE": self.size}
        files = ["vectors.c", "rule.c"]
        files += ["product.c", "orthogonal.c"] if "orthogonal(" in lines else []
        source = [
            *(f"#define {name} {value}" for name, value in head.items()),
            *map(text, files),
            "void rule(real *restrict w, const real *restrict g, real *const *state, real lr)",
            "{",
            *(f"    real *restrict {name} = state[{i}];" for i, name in enumerate(state)),
            lines,
            "}",
        ]
        return compiled("\n".join(source)).rule

    def room(self, state: Mapping[str, Tensor], batch: int) -> int:
        """How many numbers hold the gradient, a batch and, if they are copied, the weights and this
        state of one client in `steps`, each with two pages around it."""
        numbers = [self.size, batch * self.features]
        if self.size <= MOST_COPIED:
            numbers += [self.size, *(value[0].numel() for value in state.values())]
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
        firsts: Mapping[str, Tensor] = NO_FIRSTS,
    ) -> Callable[[Tensor, Tensor], None]:
        """Local steps of each client with a rule in C, on batches of these sizes that follow one
        another in y (C, ...) and in x, or whose samples in x have these numbers (C, ...). The sums
        of the losses are added to `losses`.

        Returns what does it, with memory for what `room` says and scratch memory. Several threads
        may call it, each with its own, and take clients in turn.

        firsts  what clients begin with, if that is not in their rows: "weights", whose rows are
                then how far they have moved, and fields of the state
        """
        starts = [0, *accumulate(sizes)][:-1]
        integers, fields = ctypes.c_int64 * len(sizes), list(state.values())
        begin = [firsts[n].data_ptr() if n in firsts else None for n in ("weights", *state)]
        given = (
            ctypes.c_int64(len(w)), ctypes.byref(ctypes.c_int64(0)), ctypes.c_int64(len(sizes)),
            integers(*starts), integers(*sizes), pointer(w), pointer(x),
            ctypes.c_int64(x.stride(0)), pointer(numbers), ctypes.c_int64(len(x)), pointer(y),
            ctypes.c_int64(y.stride(0)), pointer(losses), rule, len(fields),
            (ctypes.c_void_p * len(fields))(*(value.data_ptr() for value in fields)),
            (ctypes.c_int64 * len(fields))(*(value[0].numel() for value in fields)),
            (ctypes.c_void_p * (1 + len(fields)))(*begin), ctypes.c_double(lr),
            ctypes.c_double(decay),
        )  # fmt: skip
        library, held = self.library, (w, x, y, numbers, losses, fields, firsts)

        def work(memory: Tensor, scratch: Tensor) -> None:
            _raise_if(library.steps(*given, pointer(memory), pointer(scratch)))
            assert held  # whose memory it is

        return work


def _raise_if(failed: int) -> None:
    if failed:
        what = (
            "a label is none of the model's classes",
            "a client has a sample that is not there",
            "a symbol is none of the model's",
        )
        raise IndexError(what[-failed - 1])
