"""What docs/security.md says P tells about a client: said because it is so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prefed
from tests.helpers.problems import local

NEVER = 3
"""The input that client 0 never has."""


def upload(client: int, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    """What a client of two sends in its first round, under the names of the server."""
    torch.manual_seed(0)
    x = torch.randn(2, 20, 6, dtype=torch.float64)
    x[0, :, NEVER] = 0
    y = torch.randint(3, (2, 20))
    data = prefed.FederatedData(list(zip(x, y, strict=True)))
    settings = prefed.Settings(rounds=1, local_steps=steps, batch_size=4, device="cpu")
    model = torch.nn.Linear(6, 3).double()
    simulation = prefed.Simulation(prefed.PreFed(**options), model, data, settings)
    if client < 0:
        simulation.run_round()
        return simulation.server.shared
    (update,) = local(simulation)._updates(simulation.server, [client], lambda _, u: u)
    return {name: value[0].clone() for name, value in update.values.items()}


def test_p_shows_which_inputs_a_client_never_has() -> None:
    for client in (0, 1):
        columns = upload(client, steps=8)["P"][:18].view(3, 6)
        unused = [column for column in range(6) if not columns[:, column].any()]
        assert unused == ([NEVER] if client == 0 else [])


def test_after_one_step_p_is_the_distance_of_the_gradient_from_m() -> None:
    """P starts at 0 and m as well: beta2 and m's own update are known to everybody."""
    sent = upload(1, steps=1, beta1=0.9, beta2=0.9)
    gradient = sent["m"] / (1 - 0.9)
    ratio = sent["P"] / gradient.square()
    assert ratio.min() == pytest.approx(ratio.max())
    assert ratio.min() > 0


def test_in_a_cohort_of_two_each_has_the_other_s_p() -> None:
    mean, mine, other = upload(-1, 5)["P"], upload(0, 5)["P"], upload(1, 5)["P"]
    assert torch.allclose(2 * mean - mine, other, rtol=1e-12, atol=0)
