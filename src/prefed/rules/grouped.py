"""Parameter groups: other step sizes, decays and taus for some of the parameters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from itertools import groupby
from typing import Annotated, Any

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.layout import Entry, Layout
from prefed.core.patterns import Patterns, named
from prefed.rules.rule import Field, Rule, State
from prefed.rules.wrapped import Wrapped

VECTORS = "@vectors"


class Group(BaseModel):
    """Some parameters, and what is other for them than for the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    params: Patterns
    """Their names, or patterns such as "head.*"; "@vectors" stands for all with fewer than two
    dimensions: biases and the parameters of normalisation layers."""
    lr_scale: NonNegativeFloat = 1.0
    """Their steps are those of the client rule times this."""
    weight_decay: NonNegativeFloat | None = None
    """In place of the algorithm's."""
    decoupled_weight_decay: NonNegativeFloat | None = None
    """In place of the algorithm's."""
    tau: PositiveFloat | None = None
    """In place of the client rule's."""

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is as for the rest."""
        table: dict[str, Any] = write(self)
        return {k: v for k, v in table.items() if v != type(self).model_fields[k].default}

    def has(self, entry: Entry) -> bool:
        return any(
            len(entry.shape) < 2 if pattern == VECTORS else fnmatchcase(entry.name, pattern)
            for pattern in self.params
        )


def _tables(given: Any) -> Any:
    """A single one is a list of one."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError('should be a list of tables such as {params = "head.*", lr_scale = 0.1}')
    return [given] if isinstance(given, dict | Group) else given


Groups = Annotated[tuple[Group, ...], BeforeValidator(_tables)]


def check_groups(groups: Groups, layout: Layout, rule: Rule) -> None:
    """Raise for patterns without a parameter, and for what the client rule does not have."""
    names = [entry.name for entry in layout.entries]
    for number, group in enumerate(groups):
        for pattern in group.params:
            if pattern != VECTORS or all(len(entry.shape) > 1 for entry in layout.entries):
                named(f"groups[{number}].params", pattern, names)
        if group.tau is not None and (getattr(rule, "tau", None) is None or not rule.elementwise):
            raise PrefedError(
                f"groups[{number}].tau: the client rule, {type(rule).__name__}, has no tau for "
                f"each coordinate"
            )
        if group.tau is not None and getattr(rule, "tau_relative", None) is not None:
            raise PrefedError(f"groups[{number}].tau: cannot stand beside tau_relative")
        if group.lr_scale != 1 and rule.lockstep:
            raise PrefedError(
                f"groups[{number}].lr_scale: clients of this algorithm meet in every step"
            )


def numbers(groups: Groups, layout: Layout, option: str, default: float) -> list[float]:
    """The option for each parameter: of the first group that has it."""
    found = []
    for entry in layout.entries:
        group = next((g for g in groups if g.has(entry)), None)
        own = None if group is None else getattr(group, option)
        found.append(default if own is None else own)
    return found


@cache
def by_coordinate(
    groups: Groups,
    layout: Layout,
    option: str,
    default: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The option for each coordinate (d)."""
    values = torch.empty(layout.size, dtype=dtype)
    of_each = numbers(groups, layout, option, default)
    for entry, number in zip(layout.entries, of_each, strict=True):
        entry.view(values).fill_(number)
    return values.to(device)


def unscaled(groups: Groups, layout: Layout, change: Tensor, first: int = 0) -> Tensor:
    """The change, from a first coordinate on, that steps would have made which no group scales; of
    those that stand still, none."""
    if all(group.lr_scale == 1 for group in groups):
        return change
    scale = by_coordinate(groups, layout, "lr_scale", 1.0, change.dtype, change.device)[first:]
    return torch.where(scale > 0, change / scale, 0.0)


@dataclass(frozen=True)
class Grouped(Wrapped):
    """A client rule with the decoupled decay and the groups of an algorithm. Weight decay that is
    part of the gradient is added before (training/block.py).

    rule     as it is without groups, fused or not
    plain    the same for taus of groups: its lines for each run of neighbours with the same tau
    """

    groups: Groups
    layout: Layout
    plain: Rule
    decoupled: float

    START = "group_start"

    @cached_property
    def scales(self) -> bool:
        return any(group.lr_scale != 1 for group in self.groups)

    @cached_property
    def taus(self) -> Sequence[tuple[slice, float]]:
        """Neighbouring coordinates with one tau, if there are several taus."""
        if all(group.tau is None for group in self.groups):
            return ()
        of_each = numbers(self.groups, self.layout, "tau", self.plain.tau)  # type: ignore[attr-defined]
        ends = [entry.offset for entry in self.layout.entries[1:]] + [self.layout.size]
        parts, first = [], 0
        for tau, same in groupby(zip(of_each, ends, strict=True), key=lambda pair: pair[0]):
            last = [end for _, end in same][-1]
            parts.append((slice(first, last), tau))
            first = last
        return parts

    @cached_property
    def inner(self) -> Rule:
        return self.plain if self.taus else self.rule

    def vector(self, option: str, default: float, w: Tensor) -> Tensor:
        return by_coordinate(self.groups, self.layout, option, default, w.dtype, w.device)

    def fields(self, layout: Layout) -> dict[str, Field]:
        fields = self.inner.fields(layout)
        return fields | {self.START: Field((layout.size,))} if self.scales else fields

    def begin(self, w: Tensor, state: State) -> None:
        if self.scales:
            state[self.START].copy_(w)
        self.inner.begin(w, state)

    def apply(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        before = w.clone() if self.scales else w
        if self.has("decoupled_weight_decay", self.decoupled):
            decay = self.vector("decoupled_weight_decay", self.decoupled, w)
            w.addcmul_(w, decay, value=-lr)
        own = {n: value for n, value in state.items() if n != self.START}
        if self.taus:
            self._by_tau(w, g, own, lr, k)
        else:
            self.rule.apply(w, g, own, lr, k)
        if self.scales:
            w.copy_(torch.lerp(before, w, self.vector("lr_scale", 1.0, w)))

    def _by_tau(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
        """Numbers that are of all coordinates, as the masses of bias correction, go on once."""
        last = self.taus[-1][0]
        for part, tau in self.taus:
            own = {
                name: value[..., part]
                if value.shape == w.shape
                else (value if part == last else value.clone())
                for name, value in state.items()
            }
            rule = replace(self.plain, tau=tau)  # type: ignore[type-var]
            rule.step(w[..., part], g[..., part], own, lr, k)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        """To a rule that looks back at how far it came, that is its own steps."""
        own = {n: value for n, value in state.items() if n != self.START}
        if not self.scales:
            self.inner.finish(w, own, lr, steps)
            return
        start, after = state[self.START], w.clone()
        w.sub_(start).copy_(unscaled(self.groups, self.layout, w)).add_(start)
        self.inner.finish(w, own, lr, steps)
        w.copy_(after)

    def has(self, option: str, default: float) -> bool:
        return bool(default) or any(getattr(group, option) for group in self.groups)
