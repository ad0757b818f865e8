"""Which runs can be private, and what comes of what clients send in one that is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError, did_you_mean
from prefed.training.mechanism import Mechanism
from prefed.training.messages import averaged, depends_on_steps
from prefed.training.privacy_setting import Privacy
from prefed.training.server_state import LOCAL_STEPS, Server, policy
from prefed.training.settings import Settings
from prefed.training.trainer import Arrived, Record

if TYPE_CHECKING:
    from prefed.training.run import Run


UNNOISED = ("update_norm", "drift", "left_out", "refused")
"""What a trainer says of single clients or of a mean without noise."""


def make_mechanism(
    algorithm: Algorithm, server: Server, settings: Settings, clients: int, secret: bool
) -> Mechanism | None:
    """The mechanism of a run, if it is to be private and can be."""
    privacy = settings.privacy
    if privacy is None:
        return None
    if settings.weighting != "uniform":
        raise PrefedError(
            'weighting: a client counts as much as any other under privacy; set it to "uniform"'
        )
    if settings.mean != "plain" or settings.state_mean not in (None, "plain"):
        raise PrefedError(
            "mean: the noise of privacy is made for the plain mean, on which a client has a "
            "bounded influence; leave mean and state_mean out"
        )
    for name in ("asynchronous", "devices"):
        if getattr(settings, name) is not None:
            raise PrefedError(
                f"{name}: who takes part then depends on how fast clients are, which the "
                f"accountant of privacy does not know; leave one of them out"
            )
    if settings.quorum > 1 and privacy.sampling == "poisson":
        raise PrefedError(
            'quorum: a cohort of privacy.sampling = "poisson" may be of any size; leave it at 1'
        )
    if settings.local_epochs is not None and depends_on_steps(algorithm, server):
        raise PrefedError(
            f"local_epochs: {type(algorithm).__name__} goes by how many local steps clients took, "
            f"which tells how many samples they have; set local_steps under privacy"
        )
    check_private(algorithm, server, privacy, settings.local_steps)
    if server.buffers.numel() and algorithm.statistics == "average":
        raise PrefedError(
            f"privacy: the statistics of BatchNorm and its like are of clients' samples, and noise "
            f'would take variances below zero; set {type(algorithm).__name__}.statistics to "keep" '
            f'or "reset", or take another normalisation such as GroupNorm'
        )
    cohort = settings.clients_per_round or clients
    run = settings.rounds, settings.local_steps, settings.seed
    return Mechanism(privacy, algorithm, clients, cohort, *run, secret)


def check_private(
    algorithm: Algorithm, server: Server, privacy: Privacy, local_steps: int | None
) -> None:
    """Raise if what clients of this algorithm send cannot be made private as asked for."""
    name = type(algorithm).__name__
    if algorithm.client_rule().lockstep:
        raise PrefedError(
            f"privacy: clients of {name} share the gradient of every step; take another algorithm"
        )
    sent = server.values(algorithm)
    if more := averaged(algorithm, server).keys() - sent.keys() - {LOCAL_STEPS}:
        raise PrefedError(
            f"privacy: {name} averages {', '.join(sorted(more))} besides what clients send; such "
            f"means are not made private"
        )
    if local_steps is None and any(n.endswith("_mass") for n in sent):
        raise PrefedError(
            f"local_steps: the bias correction of {name} goes by it, and what clients say of it "
            f"has no noise; set local_steps under privacy, or bias_correction=False"
        )
    fields = algorithm.client_rule().fields(server.layout)
    shared = [
        n for n in fields if policy(algorithm, n).kind == "average" and not n.endswith("_mass")
    ]
    for field_name in shared:
        if fields[field_name].shape != (server.layout.size,):
            if "shape" in type(algorithm).model_fields:
                raise PrefedError(
                    f"privacy: {field_name} of {name} is a matrix, and noise would make it none of "
                    f'a covariance; take shape="diagonal"'
                )
            raise PrefedError(
                f"privacy: {field_name} of {name} does not hold one number for each weight, and "
                f"how noise is to be added to it is not known; take another algorithm"
            )
    if shared and privacy.where == "client":
        raise PrefedError(
            f'privacy: clients of {name} share {_and(shared)}; with where="client" they send the '
            f"change of the weights alone{_derived(algorithm)}"
        )
    for field_name in privacy.state_clip:
        if field_name not in shared:
            raise PrefedError(
                f"privacy.state_clip: clients of {name} share no {field_name!r}"
                f"{did_you_mean(field_name, shared) if shared else '; leave it out'}"
            )
    if missing := [n for n in shared if n not in privacy.state_clip]:
        raise PrefedError(
            f"privacy.state_clip: clients of {name} share {_and(shared)}, which must be clipped "
            f"too: give {_and(missing)} a clip{_derived(algorithm)}"
        )


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _derived(algorithm: Algorithm) -> str:
    if "P" not in type(algorithm).model_fields:
        return ""
    return '; or set P = "derived", momentum = "derived", for which nothing is paid'


def release(
    run: "Run", record: Record, arrived: Arrived | None, cohort: list[int]
) -> Arrived | None:
    """What a private run goes on with: noise on what arrived, which may be nothing. The ledger
    comes first. Of what clients sent, records have what was noised and no more."""
    if (mechanism := run.mechanism) is None:
        return arrived
    for key in [key for key in record if key in UNNOISED]:
        del record[key]
    quorum = run.settings.quorum
    if quorum > 1 and (arrived is None or arrived.clients < quorum):
        return arrived
    record |= mechanism.spend(run.server.round + 1, cohort)
    here, asked = arrived or Arrived({}, 0.0, 0), mechanism.cohort
    mean = mechanism.release(run.server, here.mean, here.clients, asked)
    record["update_norm"] = float(torch.linalg.vector_norm(mean["weights"]))
    return replace(here, mean=mean, loss=0.0, clients=asked)
