"""What is measured: chains of layers, convolutions, transformers and an LSTM, small to large."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prefed.data import FederatedData, Partition
from prefed.models.chars import CharLSTM, CharTransformer
from prefed.models.cnn import cnn
from prefed.models.mlp import mlp
from prefed.models.resnet import resnet18
from prefed.models.vit import ViT


@dataclass(frozen=True)
class Workload:
    title: str
    model: Callable[[], nn.Module]
    data: FederatedData
    clients_per_round: int
    local_steps: int
    batch_size: int | None


def w1(clients: int = 1000) -> Workload:
    data = _random_data(clients, 20, (64,), 10)
    title = f"W1: 100 of {clients:,} clients, MLP 64-128-10, K=10, batch 20"
    return Workload(title, lambda: mlp((64,), 10), data, 100, 10, 20)


def w2() -> Workload:
    data = _random_data(200, 100, (1, 28, 28), 62)
    title = "W2: 20 of 200 clients, CNN on 1x28x28, K=10, batch 20"
    return Workload(title, lambda: cnn((1, 28, 28), 62), data, 20, 10, 20)


def w3() -> Workload:
    data = _random_data(20, 100, (3, 32, 32), 10)
    title = "W3: 4 of 20 clients, ResNet-18 of 16-32-64-128 channels, GroupNorm, K=5, batch 32"
    return Workload(title, lambda: _resnet18(16), data, 4, 5, 32)


def w4() -> Workload:
    title = "W4: 2 of 20 clients, ResNet-18 at full width, GroupNorm, K=2, batch 8"
    return Workload(title, lambda: _resnet18(64), w3().data, 2, 2, 8)


LENGTH, SYMBOLS = 80, 90
"""Of a sample of text, as those of Shakespeare's plays in LEAF."""


def w5() -> Workload:
    title = "W5: 10 of 100 clients, char-transformer of width 64, 2 layers, K=10, batch 10 x 80"
    model = partial(CharTransformer, (LENGTH,), SYMBOLS)
    return Workload(title, model, _random_text(100, 50), 10, 10, 10)


def w6() -> Workload:
    data = _random_data(80, 50, (3, 32, 32), 10)
    title = "W6: 8 of 80 clients, ViT of width 64, 4 layers, on 3x32x32, K=5, batch 10"
    return Workload(title, lambda: ViT((3, 32, 32), 10), data, 8, 5, 10)


def w7() -> Workload:
    title = "W7: 4 of 40 clients, char-LSTM of 2 x 256, K=2, batch 10 x 80"
    return Workload(title, lambda: CharLSTM(SYMBOLS), _random_text(40, 50), 4, 2, 10)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "W1": w1, "W2": w2, "W3": w3, "W4": w4, "W5": w5, "W6": w6, "W7": w7,
}  # fmt: skip


def _random_data(clients: int, each: int, shape: tuple[int, ...], classes: int) -> FederatedData:
    """Noise: the time of a step does not depend on what is learnt."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, *shape, generator=generator)
    return _parts(x, torch.randint(classes, (len(x),), generator=generator), clients)


def _random_text(clients: int, each: int) -> FederatedData:
    """Symbols, and after each of them the next."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(SYMBOLS, (clients * each, LENGTH + 1), generator=generator)
    return _parts(text[:, :-1].contiguous(), text[:, 1:].contiguous(), clients)


def _parts(x: Tensor, y: Tensor, clients: int) -> FederatedData:
    parts: list[np.ndarray[Any, Any]] = np.array_split(np.arange(len(x)), clients)
    return FederatedData(Partition(x, y, parts))


def _resnet18(width: int) -> nn.Module:
    return resnet18((3, 32, 32), 10, width, groups=8)
