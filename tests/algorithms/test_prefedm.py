"""PreFedM: what goes up, and that it is a pair with a mean over rounds. Its arithmetic is in
test_oracles.py."""

from __future__ import annotations

import pytest
import torch

import prefed
from prefed.core.flat_model import FlatModel
from prefed.training.server_state import Server
from prefed.training.traffic import traffic
from tests.helpers.device import DEVICE
from tests.helpers.problems import tiny_data, tiny_model


def test_upload() -> None:
    """Weights and P, with the mass of P; the twin in 16 and 8 bits, below FedAvg's."""
    flat = FlatModel(torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.Linear(100, 10)))
    sent, d = {}, flat.weights.numel()
    for algorithm in (prefed.PreFedM(), prefed.PreFedMLite(), prefed.FedAvg()):
        server = Server.start(algorithm, flat.layout, flat.weights, flat.read_buffers())
        sent[type(algorithm).__name__] = traffic(algorithm, server, 1, 1)
    assert sent["PreFedM"]["bytes_up"] == 4 * (2 * d + 1) == sent["PreFedM"]["bytes_down"]
    assert sent["PreFedMLite"]["bytes_up"] < 0.77 * sent["FedAvg"]["bytes_up"] < 4 * d


@pytest.mark.parametrize("mean_of_rounds", [None, 4.0])
def test_it_is_a_pair(mean_of_rounds: float | None) -> None:
    """To the bit."""
    rule = {"name": "covariance", "beta2": 0.999, "tau_relative": 0.1, "step_with": "g",
            "bias_correction": True}  # fmt: skip
    server = {"name": "sgd", "momentum": 0.7}
    options = {"client_lr": 0.01, "mean_of_rounds": mean_of_rounds}
    same = prefed.Pair(client=rule, server=server, share={"P": "average"}, **options)
    one, other = (
        prefed.simulate(
            algorithm, tiny_model(), tiny_data(), rounds=4, local_steps=3, clients_per_round=4,
            batch_size=4, device=DEVICE,
        )
        for algorithm in (prefed.PreFedM(**options), same)
    )  # fmt: skip
    assert torch.equal(one.weights, other.weights)
    assert one.history[-1]["train_loss"] == other.history[-1]["train_loss"]
