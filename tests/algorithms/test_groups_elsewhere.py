"""Groups where an algorithm looks at gradients and tau outside of the client's own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prefed

X = torch.randn(4, 20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(80).view(4, 20) % 3


def run(algorithm: prefed.Algorithm, engine: str = "sequential") -> prefed.Result:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return prefed.simulate(
        algorithm, model, prefed.FederatedData([*zip(X, Y, strict=True)]), rounds=3,
        local_steps=3, batch_size=None, engine=engine, progress=False,
    )  # fmt: skip


def everything(**options: Any) -> list[dict[str, Any]]:
    return [{"params": "*", **options}]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("kind", [prefed.FedAvg, prefed.PreFed, prefed.MimeLite, prefed.PreFedSync])
def test_a_group_of_all_decays_as_all_do(kind: type[prefed.Algorithm], engine: str) -> None:
    """PreFedSync compares gradients with their mean, MimeLite needs one of all samples."""
    all_ = run(kind(client_lr=0.05, weight_decay=0.3), engine).weights
    group = run(kind(client_lr=0.05, groups=everything(weight_decay=0.3)), engine).weights
    assert torch.allclose(all_, group, rtol=0, atol=1e-14)
    none = run(kind(client_lr=0.05), engine).weights
    assert not torch.allclose(all_, none, rtol=0, atol=1e-4)


def test_records_know_the_tau_of_groups() -> None:
    one = run(prefed.PreFed(client_lr=0.05, tau=0.5)).history[-1]
    two = run(prefed.PreFed(client_lr=0.05, groups=everything(tau=0.5))).history[-1]
    for key in ("adaptive_share", "median_step"):
        assert one[key] == pytest.approx(two[key], rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (prefed.FedPM, {}),
        (prefed.PreFed, {"momentum": "derived"}),
        (prefed.PreFed, {"momentum": "derived", "P": "derived"}),
        (prefed.FedLADA, {}),
    ],
)
def test_one_tau_where_the_server_needs_it(kind: type[prefed.Algorithm], options: Any) -> None:
    with pytest.raises(prefed.PrefedError, match=r"groups.*tau"):
        run(kind(client_lr=0.05, groups=everything(tau=0.5), **options))


def test_the_norm_is_of_the_mean_change() -> None:
    """Also where something else is averaged, as FedNova's change over its steps."""
    plain, nova = (run(kind(client_lr=0.05)) for kind in (prefed.FedAvg, prefed.FedNova))
    assert torch.allclose(plain.weights, nova.weights, rtol=0, atol=1e-14)
    one, two = plain.history[-1], nova.history[-1]
    assert one["update_norm"] == pytest.approx(two["update_norm"], rel=1e-12)
    assert two["drift"] is None
    before = run(prefed.FedPM(client_lr=0.05, server_lr=1e-9)).history[-1]["update_norm"]
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    start = torch.cat([p.detach().flatten() for p in first.parameters()])
    data = prefed.FederatedData([*zip(X, Y, strict=True)])
    moved = prefed.simulate(
        prefed.FedPM(client_lr=0.05), first, data, rounds=1, local_steps=3, batch_size=None,
        engine="sequential", progress=False,
    )  # fmt: skip
    norm = float(torch.linalg.vector_norm(moved.weights - start))
    assert moved.history[0]["update_norm"] == pytest.approx(norm, rel=1e-9)
    assert before > 0


def test_the_median_step_with_tau_inside_of_the_root() -> None:
    options = {"client_lr": 0.3, "server_lr": 0.01, "tau": 0.05, "v0": 0.0}
    inside = run(prefed.FedAdam(**options, tau_inside=True)).history[0]["median_step"]
    outside = run(prefed.FedAdam(**options)).history[0]["median_step"]
    root = 0.01 / outside - 0.05
    assert inside == pytest.approx(0.01 / (root**2 + 0.05**2) ** 0.5, rel=1e-9)
