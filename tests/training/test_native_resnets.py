"""Residual networks in C, against autograd and the sequential engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.layout import Layout
from prefed.models.resnet import ResNet, resnet8
from prefed.training.engines.native_program import Program
from prefed.training.engines.native_writing import NotNative
from tests.helpers.engine_runs import run, same
from tests.helpers.native_gradients import compare

pytestmark = pytest.mark.process
SAMPLE = (2, 13, 9)


def resnet(width: int = 6, groups: int = 3, norm: Any = "group") -> nn.Module:
    """Two stages, the first of two blocks, on images whose sides are odd, so that the last tiles
    overlap; 13 and 7 rows."""
    torch.manual_seed(0)
    return ResNet(SAMPLE[0], 3, (2, 1), width, norm, groups)


def pictures() -> prefed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, *SAMPLE, dtype=torch.float64, generator=generator), torch.arange(n) % 3)
        for n in (7, 12, 9, 6)
    ]
    return prefed.FederatedData(clients, test=clients[0])


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("width", [4, 6], ids=["plain", "Winograd"])
def test_gradients_are_those_of_autograd(last: bool, width: int) -> None:
    """Of two clients, on batches that fit the vectors and on others; infinite weights end in
    NaN."""
    model = resnet(width, 2).double()
    for parameter in model.parameters() if last else ():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    layout = Layout.of(model.named_parameters())
    program = Program(model, layout, SAMPLE, torch.float64, 20)
    generator = torch.Generator().manual_seed(1)
    w = 0.3 * torch.randn(2, layout.size, dtype=torch.float64, generator=generator)
    for batch in (1, 20, 37):
        x = torch.randn(2, batch, *SAMPLE, dtype=torch.float64, generator=generator)
        y = torch.randint(3, (2, batch), generator=generator)
        compare(program, model, layout, w, (x, y), 1e-11)


@pytest.mark.parametrize("name", ["fedavg", "prefed", "prefeds"])
def test_runs_equal_those_of_the_sequential_engine(name: str) -> None:
    model = resnet().double()
    one, other = (
        run(name, model, engine, data=pictures(), rounds=2) for engine in ("sequential", "native")
    )
    same(one, other, 1e-9)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(resnet(norm="batch"), "statistics"), (resnet8((2, 40, 40), 3, width=64), "large")],
    ids=["BatchNorm", "large images"],
)
def test_what_has_no_c_trains_without_after_one_line(model: nn.Module, reason: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 2, 40, 40, generator=generator)
    data = prefed.FederatedData([(x, torch.arange(4) % 3)] * 2)
    with pytest.warns(prefed.EngineWarning, match=f"not in C .*{reason}"):
        run("fedavg", model, "native", data=data, rounds=1, clients_per_round=1)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a shortcut that is missing": lambda m: setattr(m.blocks[2], "shortcut", nn.Identity()),
    "a norm in place of a convolution": lambda m: setattr(m.blocks[0], "conv2", nn.Identity()),
    "another stride": lambda m: setattr(m.blocks[0].conv2, "stride", (2, 2)),
    "a head in a sequence": lambda m: setattr(m, "head", nn.Sequential(nn.Linear(12, 3))),
    "norms that divide by 0": lambda m: setattr(m.norm, "eps", 0.0),
    "no norm": lambda m: setattr(m.blocks[1], "norm1", nn.Identity()),
    "other channels": lambda m: setattr(m, "stem", nn.Conv2d(3, 6, 3, padding=1, bias=False)),
    "a layer behind the blocks": lambda m: m.blocks.append(nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_models_that_were_changed_are_not_written(change: Callable[[Any], object]) -> None:
    model = resnet()
    change(model)
    with pytest.raises(NotNative):
        Program(model, Layout.of(model.named_parameters()), SAMPLE, torch.float32, 4)
