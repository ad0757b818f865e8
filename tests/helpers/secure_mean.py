"""The plain mean of a first round, and how far a mean from fixed point may be from it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from prefed.experiments.config import Config
from prefed.flower.secure.vector import Form
from prefed.training.messages import receive, to_mean, upload
from prefed.training.run import Run
from tests.helpers.problems import local

Plain = dict[int, tuple[dict[str, np.ndarray], float, int]]


def plain(config: Config) -> tuple[Run, Plain]:
    """What each client would send in the first round, its loss and its weight, in float64."""
    here, found = config.make_run(), {}
    workers = local(here).workers
    assert workers is not None
    for client in here.draw_cohort():
        update = workers.engines[0].update(here.algorithm, here.server, [client], {})
        message, _ = upload(here.algorithm, here.server, update, [client], {}, config.seed)
        values = {n: v[0] for n, v in receive(here.algorithm, here.server, message).items()}
        samples = len(here.data.client(client))
        steps = torch.tensor([here.settings.steps(samples)], dtype=torch.float64)
        mean = to_mean(here.algorithm, values, steps)
        weight = int(here.settings.weight(client, samples))
        numbers = {n: v.double().numpy().reshape(-1) for n, v in mean.items()}
        found[client] = (numbers, float(update.losses[0]), weight)
    return here, found


def plain_mean(
    config: Config, without: Collection[int] = (), total: int | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By name the mean over all but some clients, and half a step of the fixed point with half of
    the last digit of the type that the mean is in.

    total   the most that all weights add up to; unless given, what they do
    """
    here, updates = plain(config)
    left = [updates[c] for c in updates if c not in without]
    weights = np.array([weight for _, _, weight in left], np.longdouble)
    form = Form(here.algorithm, here.server)
    asked = total or sum(weight for _, _, weight in updates.values())
    fixed = form.fixed_point(form.exponents(), asked)
    ends = np.cumsum([sum(value.sizes) for value in form.values.values()])
    found = {}
    for (name, value), steps in zip(
        form.values.items(), np.split(fixed.steps(), ends)[:-1], strict=True
    ):
        rows = [np.array([loss]) if name == "loss" else v[name] for v, loss, _ in left]
        exact = (np.array(rows, np.longdouble) * weights[:, None]).sum(0) / weights.sum()
        dtype = value.like.numpy().dtype
        last_digit = np.abs(np.spacing(exact.astype(dtype))).astype(np.float64) / 2
        found[name] = (exact, steps / 2 + last_digit + np.abs(exact) * 2.0**-51)
    return found
