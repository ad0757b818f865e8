"""What PreFedS sends, and what it becomes at its limits; that it is right, test_oracles.py says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.rules.spectral import Spectral
from tests.helpers.problems import SIZES, tiny_data, tiny_model

WEIGHTS = (SIZES[0] + 1) * SIZES[1] + (SIZES[1] + 1) * SIZES[2]


def trained(algorithm: prefed.Algorithm, model: nn.Module, **settings: Any) -> prefed.Result:
    asked: dict[str, Any] = {"rounds": 6, "local_steps": 3, "device": "cpu", "batch_size": 4}
    return prefed.simulate(algorithm, model, tiny_data(), **asked | settings)


def test_m_and_p_go_up_and_down() -> None:
    record = trained(prefed.PreFedS(), tiny_model(), clients_per_round=4).history[-1]
    for way in ("up", "down"):
        assert record[f"bytes_{way}_weights"] == 4 * 8 * WEIGHTS
        assert record[f"bytes_{way}_state"] == 4 * 8 * (2 * WEIGHTS + 2)


def test_the_lite_twin_sends_what_fedavg_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZES[0], 2000), nn.ReLU(), nn.Linear(2000, SIZES[2]))
    full, lite, plain = (
        prefed.simulate(
            algorithm, model, tiny_data(torch.float32), rounds=1, local_steps=1, device="cpu"
        ).history[-1]["bytes_up"]
        for algorithm in (prefed.PreFedS(), prefed.PreFedSLite(), prefed.FedAvg())
    )
    assert full == pytest.approx(3 * plain, rel=0.001)
    assert 1.0 * plain < lite <= 1.05 * plain


def test_a_large_tau_makes_it_muon() -> None:
    """On a model without biases, and with momenta that are averaged."""
    torch.manual_seed(0)
    layers = nn.Linear(SIZES[0], 4, bias=False), nn.Tanh(), nn.Linear(4, SIZES[2], bias=False)
    model = nn.Sequential(*layers).double()
    ours = trained(prefed.PreFedS(client_lr=0.02, tau_relative=1e12, mean_of_rounds=None), model)
    muon = trained(prefed.FedMuon(client_lr=0.02, momentum="average"), model)
    torch.testing.assert_close(ours.weights, muon.weights, rtol=0, atol=1e-9)


def test_gradients_that_are_zero_move_nothing() -> None:
    """A unit that never fires, and a model whose samples are all zero."""
    model = tiny_model()
    clients = [(torch.zeros(8, SIZES[0]).double(), torch.arange(8) % SIZES[2]) for _ in range(3)]
    data = prefed.FederatedData(clients, test=clients[0])
    result = prefed.simulate(
        prefed.PreFedS(), model, data, rounds=3, local_steps=2, batch_size=None, device="cpu"
    )
    assert result.weights.isfinite().all()
    first = next(model.parameters())
    torch.testing.assert_close(result.weights[: first.numel()], first.detach().flatten())


def test_embeddings_are_no_matrices() -> None:
    rule = prefed.PreFedS(plain=("0.*",)).client_rule()
    fitted = rule.fit(Layout.of(tiny_model().named_parameters()))
    whole, embeddings, vectors = fitted.places  # type: ignore[attr-defined]
    assert [len(part) for part in (whole, embeddings, vectors)] == [1, 1, 2]


def test_embeddings_are_told_by_their_layers() -> None:
    """Names are looked at where a layer is none of torch's own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(7, 4)
            self.embed = nn.Linear(4, 5)
            self.positions = nn.Parameter(torch.zeros(3, 4))
            self.table = nn.Parameter(torch.zeros(3, 4))
            self.tied = nn.Linear(4, 7, bias=False)
            self.tied.weight = nn.Embedding(7, 4).weight
            self.lookup = nn.Embedding(7, 4)
            self.lookup.weight = self.tied.weight

    layout = FlatModel(Model()).layout
    rule = prefed.PreFedS(plain=["table"]).client_rule()
    assert isinstance(rule, Spectral)
    names = {entry.name for entry in layout.entries if rule.is_embedding(entry)}
    assert names == {"emb.weight", "positions", "table", "tied.weight"}
    kinds = {entry.name: entry.kind for entry in layout.entries}
    assert kinds["embed.weight"] == "matrix"
    assert kinds["positions"] == ""


def test_a_gradient_that_explodes_is_soon_forgotten() -> None:
    """One of a hundred thousand times the length, on one client: after it m points elsewhere for as
    long as it is remembered, unless it is clipped."""
    model = nn.Linear(SIZES[0], SIZES[2]).double()
    rule = prefed.PreFedS().client_rule().fit(Layout.of(model.named_parameters()))
    freely = prefed.PreFedS(clip_relative=None).client_rule().fit(rule.layout)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(
        30, sum(p.numel() for p in model.parameters()), generator=generator
    ).double()
    usual[:, 0] += 3.0
    spoilt = usual.clone()
    spoilt[10] *= -1e5
    ends = []
    for own, gradients in ((rule, usual), (rule, spoilt), (freely, spoilt)):
        w = torch.zeros(usual.shape[1]).double()
        state = {n: f.new(w) for n, f in own.fields(own.layout).items()}  # type: ignore[attr-defined]
        for k, g in enumerate(gradients):
            own.step(w, g.clone(), state, 0.01, k)
        ends.append(state["m"])
    whole, clipped, free = ends
    assert torch.cosine_similarity(clipped, whole, dim=0) > 0
    assert torch.cosine_similarity(free, whole, dim=0) < 0
    assert clipped.norm() < 10 * whole.norm()
    assert free.norm() > 1000 * whole.norm()


def test_none_in_a_config_is_none() -> None:
    """Whatever the algorithm does by default."""
    for kind in (prefed.PreFedS, prefed.FedMuon):
        assert kind.model_validate({"mean_of_rounds": "none"}).mean_of_rounds is None
