"""Gradients that rules ask for besides those of their steps (`Rule.other`): what engines share."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import batch, draws
from prefed.core.errors import PrefedError
from prefed.core.losses import (
    WITH_CLASSES,
    are_labels,
    binary_cross_entropy,
    by_targets,
    ignored_label,
    is_one_of,
)
from prefed.data import FederatedData
from prefed.training.settings import Settings
from prefed.training.task import Loss, Task

SEEDS = 1 << 61
"""Added to the seeds of steps, for what the model draws in another gradient."""
TOGETHER = 1024
"""Samples of a client whose gradient is computed at a time; the whole one is a mean over these."""


def pieces(samples: int) -> list[slice]:
    """All samples of a client, cut into pieces of about one size."""
    count = math.ceil(samples / TOGETHER)
    ends = [samples * n // count for n in range(count + 1)]
    return [slice(*ends[n : n + 2]) for n in range(count)]


def numbers(settings: Settings, round: int, clients: Sequence[int], k: int, like: Tensor) -> Tensor:
    """Random numbers to draw the labels of step k with, for targets `like` (C, batch, ...)."""
    key = settings.seed, "labels", round
    found = [draws.uniform(*key, client, k, like.shape[1:]) for client in clients]
    drawn: Tensor = batch.moved(torch.stack(found), like.device)
    return drawn


def loss_of_drawn(loss: Loss, output: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """The loss of labels drawn from the output by numbers u in [0, 1), one for each target, times
    the root of their number. Targets of no class stay what they are."""
    seen, u = output.detach(), u.to(output.dtype)
    if is_one_of(loss, (binary_cross_entropy,)):
        labels = (u < seen.sigmoid().reshape(u.shape)).to(y.dtype)
        return loss(output, labels) * math.sqrt(y.numel())
    below = seen.softmax(1).cumsum(1)[:, :-1]
    labels = (below <= u.unsqueeze(1)).sum(1)
    if (ignored := ignored_label(loss)) is None:
        return loss(output, labels) * math.sqrt(y.numel())
    counted = y != ignored
    return loss(output, torch.where(counted, labels, y)) * counted.sum().to(output.dtype).sqrt()


def check_other(algorithm: Algorithm, task: Task, data: FederatedData) -> None:
    """Refuse losses that do not say how labels are drawn."""
    if algorithm.client_rule().other(0) != "drawn":
        return
    numbers = is_one_of(task.loss, (by_targets,)) and not are_labels(data.client(0).y)
    if numbers or not is_one_of(task.loss, (*WITH_CLASSES, binary_cross_entropy)):
        raise PrefedError(
            f"{type(algorithm).__name__}: its client rule draws labels from the model's output, so "
            f"the loss has to be cross_entropy or bce; for other losses take another rule"
        )
