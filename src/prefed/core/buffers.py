"""What becomes of the buffers of a model in a run. Only what training changes may travel:

    statistics   floating-point buffers that a forward pass in training changes, such as the running
                 mean and variance of BatchNorm: one vector, in their own type, which clients send,
                 keep or reset (Algorithm.statistics)
    counters     integers that grow by the same number in each step (num_batches_tracked): never
                 sent, but worked out from the number of steps
    constants    all others, of any type: masks, tables. They are left as they are

A model names statistics that its first forward passes do not change by an attribute:
`model.prefed_statistics = ["ema.*"]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from prefed.core.batch import Inputs, joined
from prefed.core.errors import PrefedError
from prefed.core.layout import Layout

DECLARED = "prefed_statistics"

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Counter:
    first: Tensor
    step: Tensor
    """What one step adds."""


@dataclass
class Constant:
    seen: Tensor
    version: int
    value: Tensor


class Buffers:
    """The buffers of a module, told apart by the kinds of its layers until `watch` has looked.

    dtype   of the vector of statistics if there are none
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.layout = Layout((), 0)
        """Of the statistics."""
        self.counters: dict[str, Counter] = {}
        self.constants: dict[str, Constant] = {}
        everything = self._copies()
        self.everything = Layout.of(everything.items())
        self._sort([everything])

    @property
    def changing(self) -> list[str]:
        """The names of statistics and counters."""
        return [*(entry.name for entry in self.layout.entries), *self.counters]

    def watch(self, forward: Callable[[Inputs], object], x: Inputs) -> None:
        """Tell them apart by two forward passes in training mode, which leave them as they are."""
        passes = [self._copies()]
        try:
            for times in (2, 3):  # BatchNorm wants more than one sample
                forward(joined([x] * times))
                passes.append(self._copies())
        finally:
            for name, value in passes[0].items():
                self[name].copy_(value)
        self._sort(passes)

    def like(self, other: "Buffers") -> None:
        """Take over what is known of the buffers of another instance of the module."""
        self.layout, self.dtype, self.counters = other.layout, other.dtype, other.counters
        self.constants = {n: _constant(self[n], c.value) for n, c in other.constants.items()}

    def __getitem__(self, name: str) -> Tensor:
        """The buffer as it is now: a forward pass may put another tensor in its place."""
        owner, _, attribute = name.rpartition(".")
        return self.module.get_submodule(owner).get_buffer(attribute)

    def read(self) -> Tensor:
        """A new vector with the statistics."""
        parts = [self[e.name].detach().reshape(-1).to(self.dtype) for e in self.layout.entries]
        return torch.cat(parts) if parts else self._empty()

    def write(self, vector: Tensor, steps: Tensor) -> None:
        """Set the statistics, and the counters to what they are after so many steps."""
        for name, value in self.values(vector, steps).items():
            self[name].copy_(value)

    def values(self, rows: Tensor, steps: Tensor) -> Named:
        """Statistics in a vector and counters after so many steps, by name; or those of a block of
        clients, from rows (C, s) and steps (C)."""
        named = self.layout.views(rows)
        for name, counter in self.counters.items():
            many = steps.to(counter.step.device)
            many = many.reshape((*steps.shape, *[1] * counter.step.dim()))
            named[name] = counter.first + counter.step * many
        return named

    def check(self) -> None:
        """Raise an error if a buffer has changed that was taken for a constant."""
        for name, constant in self.constants.items():
            now = self[name]
            if now is constant.seen and now._version == constant.version:
                continue
            if now.shape == constant.value.shape and not _same(now, constant.value):
                raise PrefedError(
                    f"model: the buffer {name} changed in training, but not in a first forward "
                    f"pass, so it was taken for a constant; name it with "
                    f"model.{DECLARED} = [{name!r}] if clients are to share it"
                )
            self.constants[name] = _constant(now, now.detach().clone())

    def from_before(self, vector: Tensor) -> Tensor:
        """The statistics in a vector of all buffers, as earlier versions saved them."""
        if vector.numel() != self.everything.size:
            return vector
        found = self.everything.views(vector)
        parts = [found[entry.name].reshape(-1) for entry in self.layout.entries]
        return torch.cat(parts).to(self.dtype) if parts else self._empty().to(vector.device)

    def _sort(self, passes: Sequence[Named]) -> None:
        """Tell them apart by their values before and after each of some forward passes."""
        wanted, statistics = self._statistics(passes[-1]), []
        self.counters, self.constants = {}, {}
        for name, value in passes[-1].items():
            seen = [found[name] for found in passes if name in found]
            changed = not all(_same(seen[0], other) for other in seen)
            if value.is_floating_point() and (changed or name in wanted) and name in passes[0]:
                statistics.append((name, seen[0]))
            elif not changed:
                self.constants[name] = _constant(self[name], value)
            elif (step := _step(seen)) is not None and name in passes[0]:
                self.counters[name] = Counter(seen[0], step)
            else:
                raise PrefedError(
                    f"model: the buffer {name} ({value.dtype}) changes in a forward pass, and is "
                    f"neither floating point from the start nor a number that grows by the same in "
                    f"each step; make it a floating-point buffer to have clients share it"
                )
        self.layout = Layout.of(statistics)
        if statistics:
            self.dtype = reduce(torch.promote_types, (value.dtype for _, value in statistics))

    def _statistics(self, buffers: Named) -> set[str]:
        """Those of normalisation layers, whatever the samples do to them, and those that the model
        names."""
        found = set()
        for owner, layer in self.module.named_modules():
            if isinstance(layer, _NormBase) and layer.track_running_stats and layer.training:
                found |= {f"{owner}.{n}".lstrip(".") for n in ("running_mean", "running_var")}
        for pattern in getattr(self.module, DECLARED, ()):
            matching = {name for name in buffers if fnmatchcase(name, pattern)}
            if not matching or not all(buffers[name].is_floating_point() for name in matching):
                raise PrefedError(
                    f"model.{DECLARED}: {pattern!r} should name floating-point buffers; there are "
                    f"{', '.join(n for n, b in buffers.items() if b.is_floating_point()) or 'none'}"
                )
            found |= matching
        return found

    def _copies(self) -> Named:
        return {name: value.detach().clone() for name, value in self.module.named_buffers()}

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=next(self.module.parameters()).device)


def _constant(buffer: Tensor, value: Tensor) -> Constant:
    return Constant(buffer, buffer._version, value)


def _step(seen: Sequence[Tensor]) -> Tensor | None:
    """What each pass added to an integer, if always the same."""
    if seen[0].is_floating_point() or seen[0].is_complex() or seen[0].dtype == torch.bool:
        return None
    steps = [after - before for before, after in pairwise(seen)]
    return steps[0] if all(torch.equal(steps[0], step) for step in steps) else None


def _same(a: Tensor, b: Tensor) -> bool:
    if a is b or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
