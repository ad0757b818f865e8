"""Which updates from other machines are accepted.

Whoever collects updates of a round trusts nobody: an update counts only if it is just what was
asked for. The decision is made before anything of the update is added up, so a round with a
refused update is bit for bit the round without that client.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core.layout import Layout
from prefed.training.server_state import Server

LARGEST_COUNT = 10_000_000
"""Samples of one client that are believed, if nothing better is known."""


@dataclass(frozen=True)
class Spec:
    """What one named array has to be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nonnegative: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class UntrustedUpdate:
    """An update as it came in. Nothing in it is known to be true."""

    client: Any
    round: Any
    samples: Any
    loss: Any
    values: Mapping[str, Any]
    steps: Any = None
    """The local steps, where they are not known here."""


class Refused(Exception):
    """Why an update is not accepted."""


class NotFinite(Refused):
    """It holds NaN, infinity or nearly so, as the update of an honest client does whose training
    diverged."""


def expected(algorithm: Algorithm, server: Server) -> dict[str, Spec]:
    """What a client sends in this round, once it is decoded: the change of the weights, the
    statistics if they are averaged, the averaged fields that are due."""
    return _specs(algorithm, server.layout, server.values(algorithm))


def broadcast(algorithm: Algorithm, server: Server) -> dict[str, Spec]:
    """What a client gets: the weights, the statistics if they are averaged, all fields that the
    server has a copy of."""
    return _specs(algorithm, server.layout, server.broadcast(algorithm))


def _specs(algorithm: Algorithm, layout: Layout, held: Mapping[str, Tensor]) -> dict[str, Spec]:
    fields = algorithm.client_rule().fields(layout)
    return {
        name: Spec(tuple(value.shape), value.dtype, name in fields and fields[name].nonnegative)
        for name, value in held.items()
    }


@dataclass(eq=False)
class Admission:
    """Decides on the updates of one round.

    specs    what an update consists of
    round    counted from 0
    asked    the clients of which an update is wanted
    samples  how many samples each client has, where that is known; others may claim up to
             `largest_count`
    norm_cap the largest norm of the change of the weights that is accepted
    """

    specs: Mapping[str, Spec]
    round: int
    asked: Collection[int]
    _: KW_ONLY
    samples: Mapping[int, int] = field(default_factory=dict)
    largest_count: int = LARGEST_COUNT
    norm_cap: float | None = None
    admitted: set[int] = field(default_factory=set, init=False)

    def admit(self, update: UntrustedUpdate) -> None:
        """Accept the update, or raise Refused with the reason."""
        self._check_origin(update)
        self._check_numbers(update)
        check_values(self.specs, update.values)
        if self.norm_cap is not None:
            norm = float(torch.linalg.vector_norm(update.values["weights"].double()))
            if not norm <= self.norm_cap:
                raise Refused(
                    f"the change of the weights has length {norm:.4g}, over the cap of "
                    f"{self.norm_cap:g}"
                )
        self.admitted.add(update.client)

    def _check_origin(self, update: UntrustedUpdate) -> None:
        client, round = update.client, update.round
        if not _is_int(client) or client not in self.asked:
            raise Refused(f"client {client!r} was not asked")
        if client in self.admitted:
            raise Refused(f"client {client} has sent its update already")
        if not _is_int(round) or round != self.round:
            raise Refused(f"it is of round {round!r}, not {self.round}")

    def _check_numbers(self, update: UntrustedUpdate) -> None:
        samples, known = update.samples, self.samples.get(update.client)
        if not _is_int(samples) or not 1 <= samples <= self.largest_count:
            raise Refused(f"a sample count of {samples!r}")
        if known is not None and samples != known:
            raise Refused(f"a sample count of {samples}; it has {known}")
        if not isinstance(update.loss, float):
            raise Refused(f"a loss of {update.loss!r}")
        if not math.isfinite(update.loss):
            raise NotFinite(f"a loss of {update.loss}")


def check_values(specs: Mapping[str, Spec], values: Mapping[str, Any]) -> None:
    """Raise Refused unless there is exactly what the specs say."""
    for name in values.keys() - specs.keys():
        raise Refused(f"there is an array {name!r} that was not asked for")
    for name in specs.keys() - values.keys():
        raise Refused(f"the array {name!r} is missing")
    for name, spec in specs.items():
        _check_value(name, spec, values[name])


def _check_value(name: str, spec: Spec, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise Refused(f"{name}: a {type(value).__name__} in place of an array")
    if value.dtype != spec.dtype:
        raise Refused(f"{name}: {value.dtype}, not {spec.dtype}")
    if tuple(value.shape) != spec.shape:
        raise Refused(f"{name}: shape {tuple(value.shape)}, not {spec.shape}")
    if value.numel() == 0 or value.dtype == torch.bool:
        return
    low, high = (float(bound) for bound in torch.aminmax(value))  # NaN if there is one
    if spec.dtype.is_floating_point:
        limit = largest(spec.dtype)
        if not (-limit <= low and high <= limit):
            raise NotFinite(f"{name}: values that are not finite, or beyond all reason")
    if spec.nonnegative and low < 0 and value.dim() < 2:
        raise Refused(f"{name}: values below 0")
    if spec.nonnegative and value.dim() == 2:
        _check_covariance(name, value)


def largest(dtype: torch.dtype) -> float:
    """Numbers of any cohort up to here, times any sample count, add up to a finite sum."""
    return 1e4 if dtype == torch.float16 else math.sqrt(torch.finfo(dtype).max)


def _check_covariance(name: str, value: Tensor) -> None:
    P = value.double()
    if not torch.allclose(P, P.mT, rtol=1e-4, atol=1e-4 * float(P.abs().max())):
        raise Refused(f"{name}: not symmetric")
    eigenvalues = torch.linalg.eigvalsh(P)
    # Rounding takes a singular matrix a little below 0.
    if float(eigenvalues[0]) < -1e-4 * float(eigenvalues[-1].abs()):
        raise Refused(f"{name}: not positive semi-definite")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
