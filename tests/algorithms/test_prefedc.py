"""What PreFedC sends, and whose direction it is; that it is right, test_oracles.py says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.layout import Layout
from prefed.rules.common_direction import Common
from tests.helpers.problems import SIZES, tiny_data, tiny_model

WEIGHTS = (SIZES[0] + 1) * SIZES[1] + (SIZES[1] + 1) * SIZES[2]


def trained(algorithm: prefed.Algorithm, **settings: Any) -> prefed.Result:
    asked: dict[str, Any] = {"rounds": 4, "local_steps": 3, "device": "cpu", "batch_size": 4}
    return prefed.simulate(algorithm, tiny_model(), tiny_data(), **asked | settings)


def test_m_and_p_go_up_and_down_and_the_direction_does_not() -> None:
    record = trained(prefed.PreFedC(), clients_per_round=4).history[-1]
    for way in ("up", "down"):
        assert record[f"bytes_{way}_weights"] == 4 * 8 * WEIGHTS
        assert record[f"bytes_{way}_state"] == 4 * 8 * (2 * WEIGHTS + 2)


def test_the_lite_twin_sends_what_fedavg_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZES[0], 2000), nn.ReLU(), nn.Linear(2000, SIZES[2]))
    lite, plain = (
        prefed.simulate(
            algorithm, model, tiny_data(torch.float32), rounds=1, local_steps=1, device="cpu"
        ).history[-1]["bytes_up"]
        for algorithm in (prefed.PreFedCLite(), prefed.FedAvg())
    )
    assert 1.0 * plain < lite <= 1.05 * plain


def test_matrices_wait_for_the_first_p() -> None:
    """In the first round vectors move, and what is learnt of matrices is m and P."""
    first = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
    for rounds, moves in ((1, False), (2, True)):
        result = trained(prefed.PreFedC(mean_of_rounds=None), rounds=rounds)
        for name, parameter in result.model.named_parameters():
            stays = torch.equal(parameter, first[name])
            assert stays == (parameter.dim() == 2 and not moves), name


def test_clients_go_one_way_without_a_share_of_their_own() -> None:
    """Matrices are the same on all clients, so that nothing of them drifts."""
    model = nn.Linear(SIZES[0], SIZES[2], bias=False).double()
    result = prefed.simulate(
        prefed.PreFedC(own_lr=0.0), model, tiny_data(), rounds=3, local_steps=3, batch_size=4,
        device="cpu",
    )  # fmt: skip
    assert result.history[-1]["drift"] == pytest.approx(0.0, abs=1e-6)
    assert result.history[-1]["update_norm"] > 0


@pytest.mark.parametrize("kept", [("m",), ("P", "P_mass"), ("m", "P", "m_mass", "P_mass")])
def test_clients_with_state_of_their_own_have_directions_of_their_own(
    kept: tuple[str, ...],
) -> None:
    """Whoever shares a block."""
    share = dict.fromkeys(("m", "P", "m_mass", "P_mass"), "average") | dict.fromkeys(kept, "keep")
    pair = prefed.Pair(client="common", share=share, client_lr=0.02)
    asked: dict[str, Any] = {"clients_per_round": 3, "rounds": 6}
    one, block = (trained(pair, engine=name, **asked) for name in ("sequential", "vectorised"))
    torch.testing.assert_close(one.weights, block.weights, rtol=0, atol=1e-9)


def test_the_direction_is_remembered_for_what_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all clients of a round, and anew for another m, P or mass of theirs."""
    layout = Layout.of(tiny_model().named_parameters())
    rule, calls = Common().fit(layout), []
    real = Common.seen_from
    monkeypatch.setattr(Common, "seen_from", lambda *a: calls.append(1) or real(*a))  # type: ignore[func-returns-value]
    w = torch.zeros(3, layout.size).double()
    state = {name: field.new(w, 3) for name, field in rule.fields(layout).items()}
    state["m"].copy_(torch.randn(layout.size))
    for name in ("P", "m_mass", "P_mass"):
        state[name].fill_(0.5)
    rule.begin(w[:1], {name: value[:1] for name, value in state.items()})
    rule.begin(w[0], {name: value[0] for name, value in state.items()})
    assert len(calls) == 1
    for n, name in enumerate(("m", "P", "m_mass", "P_mass"), 2):
        state[name].mul_(0.5)
        rule.begin(w[:1], {name: value[:1] for name, value in state.items()})
        assert len(calls) == n


def test_no_server_steps_with_it() -> None:
    with pytest.raises(prefed.PrefedError, match="common is for clients"):
        prefed.Pair(server="common")
