"""FedCM, FedLADA, FedAdamW, FedLion and FedPM beside what they must be equal to. Their arithmetic
against independent code is in test_oracles.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefed
from tests.helpers import oracles
from tests.helpers.device import DEVICE
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model

EVERYONE: dict[str, Any] = {"batch_size": None, "local_steps": 3, "device": DEVICE}


def simulate(algorithm: prefed.Algorithm, **options: Any) -> prefed.Result:
    settings: dict[str, Any] = EVERYONE | {"rounds": 5, "clients_per_round": 4} | options
    return prefed.simulate(algorithm, tiny_model(), tiny_data(), **settings)


def first_weights() -> Any:
    return torch.nn.utils.parameters_to_vector(tiny_model().parameters()).detach().numpy()


def test_fedcm_is_fedavg_mixed_with_the_mean_change() -> None:
    """As long as the step size stands still: with a schedule the two differ, and FedCM is right."""
    one = simulate(prefed.FedCM(client_lr=0.1, alpha=0.3))
    two = simulate(prefed.FedAvg(client_lr=0.1, align=0.7, align_form="mixed"))
    once = simulate(prefed.FedCM(client_lr=0.1, alpha=0.3), rounds=1)
    torch.testing.assert_close(
        once.weights, simulate(prefed.FedAvg(client_lr=0.03), rounds=1).weights
    )
    torch.testing.assert_close(one.weights, two.weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedcm", "fedlada", "fedadamw"])
def test_the_direction_has_the_units_of_a_gradient(name: str) -> None:
    """So a step size that changes from round to round does not change it."""

    def falling(t: int) -> float:
        return 0.1 * 0.5**t

    result = simulate(prefed.ALGORITHMS.get(name)(client_lr=falling), clients_per_round=None)
    tensors = [(SIZES[1], SIZES[0]), (SIZES[1],), (SIZES[2], SIZES[1]), (SIZES[2],)]
    trace = oracles.run(
        name, {"client_lr": falling} | ({"tensors": tensors} if name == "fedadamw" else {}),
        lambda w, x, y: oracles.loss_and_grad(w, x, y, SIZES),
        first_weights(), arrays(), [[*range(6)]] * 5, 3, n_clients=6,
    )  # fmt: skip
    np.testing.assert_allclose(result.weights.cpu(), trace.weights[-1], rtol=1e-10, atol=1e-10)


def test_one_client_of_fedadamw_is_adamw_of_torch() -> None:
    """Of one client and one round nothing is left but AdamW."""
    model, (x, y) = tiny_model(), arrays()[0]
    data = prefed.FederatedData([(torch.tensor(x), torch.tensor(y))])
    algorithm = prefed.FedAdamW(client_lr=0.01, decoupled_weight_decay=0.1)
    ours = prefed.simulate(algorithm, model, data, rounds=1, **EVERYONE | {"local_steps": 7})
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(7):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y)).backward()
        optimiser.step()
    theirs = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(ours.weights.cpu(), theirs, rtol=0, atol=1e-12)


def test_a_mean_for_each_number_is_the_whole() -> None:
    """Of a model with vectors alone, a mean over a row is a mean over one number."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.linspace(-1, 1, SIZES[0], dtype=torch.float64))
            self.b = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.a)[:, :3] * self.b

    one, two = (
        prefed.simulate(prefed.FedAdamW(client_lr=0.01, means=means), Scales(), tiny_data(),
                        rounds=3, **EVERYONE)
        for means in ("row", "whole")
    )  # fmt: skip
    assert torch.equal(one.weights, two.weights)
    assert torch.equal(one.server.shared["v_means"], two.server.shared["v"])


def test_fedlions_change_is_a_whole_number_of_steps() -> None:
    """What the paper sends: how often each sign came up, from -K to K, before the mean."""
    result = simulate(prefed.FedLion(client_lr=1 / 1024), rounds=1, clients_per_round=1)
    counts = (result.weights.cpu() - torch.tensor(first_weights())) * 1024
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-12)
    assert counts.abs().max() == 3


@pytest.mark.parametrize("shape", ["diagonal", "full"])
def test_one_step_of_fedpm_is_a_step_of_all_together(shape: str) -> None:
    """The reason for the mixing: mean(S)^-1 mean(m), as if one had all the clients' state."""
    tau, lr = 0.05, 0.1
    algorithm = prefed.FedPM(client_lr=lr, tau=tau, shape=shape)
    one = simulate(algorithm, rounds=1, local_steps=1, clients_per_round=None)
    start = first_weights()
    gradients = [oracles.loss_and_grad(start, x, y, SIZES)[1] for x, y in arrays()]
    roots = []
    for g in gradients:
        residual = 0.9 * g  # g - m, with m = g/10 and a tenth of its square in P
        if shape == "diagonal":
            roots.append(np.diag(np.sqrt(0.1 * residual**2)) + tau * np.eye(len(g)))
        else:  # the root of r r^T is r r^T / |r|
            outer = np.sqrt(0.1) * np.outer(residual, residual) / np.linalg.norm(residual)
            roots.append(outer + tau * np.eye(len(g)))
    step = np.linalg.solve(np.mean(roots, axis=0), 0.1 * np.mean(gradients, axis=0))
    np.testing.assert_allclose(one.weights.cpu(), start - lr * step, rtol=1e-10, atol=1e-10)


def test_fedpm_is_the_mixing_of_contrib() -> None:
    one = simulate(prefed.FedPM(client_lr=0.01))
    two = simulate(prefed.ALGORITHMS.get("prefed")(client_lr=0.01, aggregate="sqrtP"))
    assert torch.equal(one.weights, two.weights)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: prefed.FedPM(shape="kronecker"), r'clients are mixed by "diagonal" or "full"'),
    (lambda: prefed.ALGORITHMS.get("fedpm")(aggregate="mean"), r"FedPM\.aggregate: unknown option"),
    (lambda: prefed.FedCM(alpha=0), r"FedCM\.alpha: should be greater than 0"),
    (lambda: prefed.FedAdamW(means="head"), r"FedAdamW\.means: should be 'tensor'"),
])  # fmt: skip
def test_what_is_wrong_is_told(make: Any, text: str) -> None:
    with pytest.raises(prefed.PrefedError, match=text):
        make()


def test_fedadamw_says_why_parts_cannot_stay() -> None:
    with pytest.raises(prefed.PrefedError, match=r"personal: v_m\w+ is "):
        simulate(prefed.FedAdamW(personal=("@last",)))


def test_weight_decay_of_fedadamw_is_written() -> None:
    """Its default is not everybody's, so a config says it."""
    assert prefed.FedAdamW().model_dump()["decoupled_weight_decay"] == 0.01
    without = prefed.FedAdamW(decoupled_weight_decay=0.0)
    assert prefed.FedAdamW(**without.model_dump()) == without
    assert "decoupled_weight_decay" not in prefed.FedCM().model_dump()
