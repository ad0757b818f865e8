"""Images are evaluated a few at a time where that changes no bit, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.training import task as tasks
from prefed.training.task import Task
from prefed.training.task_trial import try_out


class Centred(nn.Module):
    """What it gives for a sample depends on the others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer((x - x.mean(0)).flatten(1))
        return found


def make(model: nn.Module, samples: int) -> tuple[Task, Tensor, Tensor]:
    x = torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    y = torch.arange(samples) % 10
    data = prefed.FederatedData([(x[:20], y[:20])], (x, y))
    task = Task(model, None, data, torch.device("cpu"))
    try_out(task, data)
    return task, x, y


@pytest.mark.parametrize("samples", [1024, 1500, 2048])
def test_the_same_bits(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 49, 10)
    )
    task, x, y = make(model, samples)
    sizes: list[int] = []
    task.flat.module.register_forward_hook(lambda layer, given, out: sizes.append(len(out)))
    seen: list[Tensor] = []
    first = task.evaluate(x, y)  # tries both ways
    sizes.clear()
    again = task.evaluate(x, y, lambda output, target: seen.append(output))
    assert [size for size in sizes if size > tasks.PIECE] == [samples % 1024][: samples % 1024]
    whole = [len(part) for part in y.split(1024)]
    assert [len(output) for output in seen] == whole
    monkeypatch.setattr(tasks, "PIECE", 1 << 30)
    assert task.evaluate(x, y) == first == again


def test_a_model_that_looks_at_the_whole_batch_gets_it() -> None:
    task, x, y = make(Centred(), 1024)
    sizes: list[int] = []
    expected = torch.nn.functional.cross_entropy(task.flat.module(x).detach(), y)
    assert task.evaluate(x, y)[0] == pytest.approx(float(expected), abs=1e-6)
    task.flat.module.register_forward_hook(lambda layer, given, out: sizes.append(len(out)))
    task.evaluate(x, y)
    assert len(sizes) == 1
    assert sizes[-1] == 1024
