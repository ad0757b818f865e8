"""`update_norm` and `drift` of a record against NumPy, from what the clients sent."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import prefed
from prefed.rules import State
from tests.helpers.problems import CLIENT_SIZES, tiny_data, tiny_model


class Listening(prefed.FedAvg):
    """FedAvg that keeps the changes of its clients, in the order of the cohort."""

    heard: ClassVar[list[np.ndarray[Any, Any]]] = []

    def before_mean(self, values: State) -> State:
        self.heard.append(values["weights"].double().numpy().copy())
        return values


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("per_round", [None, 4, 1])
def test_they_are_those_of_the_clients_changes(
    engine: str, weighting: str, per_round: int | None
) -> None:
    Listening.heard.clear()
    result = prefed.simulate(
        Listening(client_lr=0.3), tiny_model(), tiny_data(), rounds=3, local_steps=4, batch_size=3,
        engine=engine, weighting=weighting, clients_per_round=per_round,
    )  # fmt: skip
    changes = np.concatenate(Listening.heard)
    for record in result.history:
        cohort = record["cohort"]
        mine, changes = changes[: len(cohort)], changes[len(cohort) :]
        sizes = np.array([CLIENT_SIZES[c] if weighting == "samples" else 1 for c in cohort])
        share = sizes / sizes.sum()
        mean = share @ mine
        apart = np.sqrt(share @ ((mine - mean) ** 2).sum(1))
        norm = np.linalg.norm(mean)
        assert record["update_norm"] == pytest.approx(norm, rel=1e-12)
        assert record["drift"] == pytest.approx(apart / norm, rel=1e-7, abs=1e-6)
    assert len(changes) == 0


def test_a_round_without_a_change_has_no_drift() -> None:
    data, model = tiny_data(), tiny_model()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.zeros(4, 5, dtype=torch.float64)
    still = prefed.FederatedData([(x, torch.zeros(4, 3, dtype=torch.float64))] * len(data))
    result = prefed.simulate(prefed.FedAvg(), model, still, rounds=1, local_steps=1)
    assert (result.history[0]["update_norm"], result.history[0]["drift"]) == (0, None)
