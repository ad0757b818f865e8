"""What FedPAC shares, refreshes and refuses; that it is right, test_oracles.py says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prefed
from tests.helpers.problems import SIZES, tiny_data, tiny_model

D = SIZES[0] * SIZES[1] + SIZES[1] + SIZES[1] * SIZES[2] + SIZES[2]
FACTORS = sum(n * n for n in (SIZES[1], SIZES[0], SIZES[2], SIZES[1]))
MATRICES = SIZES[0] * SIZES[1] + SIZES[1] * SIZES[2]


def trained(algorithm: prefed.Algorithm, **settings: Any) -> prefed.Result:
    asked: dict[str, Any] = {"rounds": 4, "local_steps": 3, "device": "cpu"}
    return prefed.simulate(algorithm, tiny_model(), tiny_data(), **asked | settings)


@pytest.mark.parametrize(("rule", "numbers"), [
    ("soap", FACTORS), ("sophia", D), ("muon", MATRICES), ("adam", D),
    ({"name": "adam", "bias_correction": True}, D + 1), ("covariance", D),
], ids=str)  # fmt: skip
def test_the_preconditioner_goes_up_and_comes_down(rule: Any, numbers: int) -> None:
    result = trained(prefed.FedPAC(rule=rule, client_lr=0.01))
    record = result.history[-1]
    assert record["bytes_up_state"] == 6 * 8 * numbers
    assert record["bytes_down_state"] == 6 * 8 * (numbers + D)  # and the mean change
    assert not result.kept


def test_it_is_a_pair() -> None:
    pair = prefed.Pair(
        client="sophia", share={"h": "average"}, client_lr=0.01, align=0.5, align_form="mixed"
    )
    ours = trained(prefed.FedPAC(rule="sophia", client_lr=0.01))
    assert torch.equal(ours.weights, trained(pair).weights)


def test_curvature_is_refreshed_in_every_round() -> None:
    """A server's h that stood still would be what the public code has."""
    run = prefed.Run(prefed.FedPAC(rule="sophia"), tiny_model(), tiny_data(),
                     prefed.Settings(rounds=3, local_steps=2, device="cpu"))  # fmt: skip
    seen = []
    for _ in range(3):
        run.run_round()
        seen.append(run.server.shared["h"].clone())
    assert all(h.any() for h in seen)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_what_cannot_be() -> None:
    with pytest.raises(prefed.PrefedError, match=r"FedPAC.rule: it has no preconditioner"):
        prefed.FedPAC(rule="sgd")
    with pytest.raises(prefed.PrefedError, match=r"FedPAC.personal: its client rule joins"):
        trained(prefed.FedPAC(personal=("@last",)))
    with pytest.raises(prefed.PrefedError, match="only clients have"):
        trained(prefed.Pair(server="sophia"))
    with pytest.raises(prefed.PrefedError, match="the state of all weights is the server's"):
        prefed.MimeLite(personal=("@last",))


def test_personal_parts_with_sophia() -> None:
    algorithm = prefed.FedPAC(rule="sophia", client_lr=0.01, personal=("@last",))
    one, other = (trained(algorithm, engine=name) for name in ("sequential", "vectorised"))
    for client in range(6):
        for a, b in zip(one.client_model(client).parameters(),
                        other.client_model(client).parameters(), strict=True):  # fmt: skip
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
