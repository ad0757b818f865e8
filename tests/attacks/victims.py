"""Clients to be attacked, what the server sees of each, and what may stand in its way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import prefed
from prefed.data.digits import digits, to_unit_range
from prefed.training.mechanism import Mechanism
from prefed.training.round import Server
from tests.attacks.attacks import BETA1, BETA2, Seen
from tests.helpers.problems import local

CLIENTS = 20
COHORT = 10
NOISE = 1.0
"""The standard deviation of the noise, in units of what one client can change in its whole
upload."""


@dataclass(frozen=True)
class Victims:
    model: nn.Module
    samples: list[tuple[Tensor, Tensor]]
    sent: Seen
    uploads: list[Seen]
    algorithm: prefed.Algorithm
    server: Server


def attacked(
    model: nn.Module, samples: list[tuple[Tensor, Tensor]], *, rounds: int, steps: int, batch: int,
    momentum: str = "average", lr: float = 0.01,
) -> Victims:  # fmt: skip
    """PreFed with everybody for some rounds, and then what each client sends in the next."""
    algorithm = prefed.PreFed(client_lr=lr, beta1=BETA1, beta2=BETA2, momentum=momentum)
    settings = prefed.Settings(
        rounds=rounds + 1, local_steps=steps, batch_size=batch, device="cpu", engine="sequential"
    )
    run = prefed.Simulation(algorithm, model, prefed.FederatedData(samples), settings)
    trainer = local(run)
    for _ in range(rounds):
        run.run_round()
    sent = {"weights": run.server.weights, **run.server.shared}
    sent.setdefault("m", torch.zeros_like(sent["P"]))  # reset: known to everybody
    uploads = []
    for client in range(len(samples)):
        (update,) = trainer._updates(run.server, [client], lambda _, update: update)
        uploads.append({name: value[0].clone() for name, value in update.values.items()})
    known = {n: v.clone() for n, v in sent.items()}
    return Victims(model, samples, known, uploads, algorithm, run.server)


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()


def images() -> tuple[Tensor, Tensor]:
    data = digits()
    return to_unit_range(torch.as_tensor(data.x)).double(), torch.as_tensor(data.y)


def mechanism(victims: Victims, clips: dict[str, float], seed: int) -> Mechanism:
    """That of a private run with these clips, for a cohort of one."""
    shared = {name: clip for name, clip in clips.items() if name != "weights"}
    privacy = prefed.Privacy(
        noise_multiplier=NOISE, clip=clips["weights"], state_clip=shared, sampling="fixed"
    )
    return Mechanism(privacy, victims.algorithm, CLIENTS, 1, 1, 1, seed)


def behind_noise(victims: Victims) -> list[Seen]:
    """What an attacker who knows all other clients has of each of a private run: what is released
    of this client alone, every part clipped to the median of the clients' norms."""
    server, uploads = victims.server, victims.uploads
    names = ["weights", *(n for n in victims.server.shared if n in uploads[0])]
    free = mechanism(victims, dict.fromkeys(names, 1e100), 0)
    parts = [free.contribution(server, upload) for upload in uploads]
    clips = {n: float(torch.stack([part[n].norm() for part in parts]).median()) for n in names}
    seen = []
    for client, upload in enumerate(uploads):
        own = mechanism(victims, clips, seed=client)
        seen.append(own.release(server, own.contribution(server, upload), 1, 1))
    return seen


def within_a_sum(victims: Victims) -> list[Seen]:
    """What secure aggregation shows a server: for each client, the mean over a cohort with it. By
    plain sums, which is what the protocol computes."""
    seen = []
    for client in range(len(victims.uploads)):
        cohort = [victims.uploads[(client + k) % len(victims.uploads)] for k in range(COHORT)]
        seen.append({n: torch.stack([u[n] for u in cohort]).mean(0) for n in cohort[0]})
    return seen
