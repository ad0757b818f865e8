"""A model as stock Flower apps send it, a state dict, and as flat vectors.

A state dict does not say what is a parameter and what a buffer. Integers and the statistics of
normalisation layers, known by their names, are buffers here; others can be named. Buffers are
averaged in float64, rounded if they count something, and go back in the type they had. What has no
mean (complex or boolean, infinite, integers that float64 cannot hold) is a constant: clients get it
as it was in the first arrays, and what they send in its place is not looked at. So are parameters
that stay with clients.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.flat_model import named_by
from prefed.core.layout import Layout
from prefed.flower.wire import pack, unpack
from prefed.training.admission import Spec, check_values

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
NONNEGATIVE = ("running_var", "num_batches_tracked")


class StateDict:
    """What the first arrays of a run look like, and so all that follow."""

    def __init__(
        self,
        arrays: ArrayRecord,
        buffers: Collection[str] = (),
        personal: Sequence[str] = (),
    ) -> None:
        """personal   patterns of the parameters that stay with each client. Of normalisation
        layers, those with statistics are known here
        """
        first = arrays.to_torch_state_dict()
        if unknown := sorted(set(buffers) - first.keys()):
            raise PrefedError(f"buffers: the model has no {unknown[0]!r}")
        self.specs = {
            name: Spec(tuple(value.shape), value.dtype, name.endswith(NONNEGATIVE))
            for name, value in first.items()
        }
        self.constants = {name: value for name, value in first.items() if _has_no_mean(value)}
        rest = {name: value for name, value in first.items() if name not in self.constants}
        self.buffers = [
            name
            for name, value in rest.items()
            if not value.dtype.is_floating_point or name.endswith(STATISTICS) or name in buffers
        ]
        names = [name for name in rest if name not in self.buffers]
        norms = {name.rpartition(".")[0] for name in first if name.endswith(STATISTICS)}
        self.personal = named_by(personal, names, norms)
        self.constants |= {name: first[name] for name in self.personal}
        self.weights = [name for name in names if name not in self.personal]
        dtypes = {first[name].dtype for name in self.weights}
        if len(dtypes) != 1:
            found = ", ".join(sorted(map(str, dtypes))) or "none"
            raise PrefedError(
                f"initial_arrays: parameters must share one floating-point dtype, found {found}"
            )
        self.layout = Layout.of((name, first[name].contiguous()) for name in self.weights)

    def read(self, record: object) -> tuple[Tensor, Tensor]:
        """Weights and buffers of a state dict; Refused if it is not like the first."""
        values = unpack(record, self.specs)
        changing = [*self.weights, *self.buffers]
        check_values({n: self.specs[n] for n in changing}, {n: values[n] for n in changing})
        return self.flatten(values)

    def flatten(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        weights = torch.cat([values[name].reshape(-1) for name in self.weights])
        buffers = [values[name].reshape(-1).double() for name in self.buffers]
        return weights, torch.cat(buffers) if buffers else weights.new_empty(0).double()

    def write(
        self, weights: Tensor, buffers: Tensor, counters: Tensor | None = None
    ) -> ArrayRecord:
        """A state dict in the order and the types of the first.

        counters   buffers that integers are taken from, if not from those
        """
        views = self.constants | self.layout.views(weights)
        offset = 0
        for name in self.buffers:
            spec = self.specs[name]
            counts = not spec.dtype.is_floating_point
            source = counters if counts and counters is not None else buffers
            part = source[offset : offset + spec.count].reshape(spec.shape)
            offset += spec.count
            views[name] = (part.round() if counts else part).to(spec.dtype)
        return pack({name: views[name] for name in self.specs})


def _has_no_mean(value: Tensor) -> bool:
    if value.dtype == torch.bool or value.is_complex():
        return True
    if value.is_floating_point():
        return bool(value.isinf().any())
    return value.numel() > 0 and int(value.abs().max()) > 1 << 53
