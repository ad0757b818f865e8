"""Rules that look at matrices or at second derivatives: against other people's code, and on tensors
that the algorithms' oracles do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules import Rule
from prefed.rules.muon import Muon, _by_squares, _by_steps, orthogonal
from prefed.rules.rule import OTHER
from prefed.rules.soap import SOAP, eigenvectors
from prefed.rules.sophia import Sophia
from prefed.rules.spectral import Spectral

CONV = torch.empty(16, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
TENSORS: list[tuple[str, Tensor]] = [
    ("conv.weight", CONV),
    ("conv.bias", torch.empty(16, dtype=torch.float64)),
    ("embed.weight", torch.empty(7, 5, dtype=torch.float64)),
    ("head.weight", torch.empty(3, 10, dtype=torch.float64)),
    ("scale", torch.empty((), dtype=torch.float64)),
]
LAYOUT = Layout.of(TENSORS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def follow(rule: Rule, grads: list[Tensor], w: Tensor, lr: float = 0.1) -> dict[str, Tensor]:
    """Steps in place, in a block or by one holder; the state after them."""
    clients = len(w) if w.dim() > 1 else None
    state = {n: f.new(w, clients) for n, f in rule.fields(LAYOUT).items()}
    rule = rule.fit(LAYOUT)
    rule.begin(w, state)
    for k, g in enumerate(grads):
        if rule.other(k) is not None:
            state[OTHER] = g.flip(-1)
        rule.apply(w, g.clone(), state, lr, k)
        state.pop(OTHER, None)
    return state


RULES: list[Rule] = [
    Muon(), Muon(nesterov=False, iterations=2, adam=()), SOAP(refresh=2, tau=1e-3),
    SOAP(largest_side=9), SOAP(largest_side=1), Sophia(refresh=2), Spectral(),
    Spectral(plain=(), iterations=2),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_block_of_clients_is_each_of_them(rule: Rule) -> None:
    w, grads = random(3, LAYOUT.size), [random(3, LAYOUT.size, seed=s) for s in range(1, 5)]
    block = w.clone()
    state = follow(rule, grads, block)
    for row in range(3):
        own = w[row].clone()
        kept = follow(rule, [g[row] for g in grads], own)
        torch.testing.assert_close(block[row], own, rtol=1e-12, atol=1e-12)
        for name, value in kept.items():
            torch.testing.assert_close(state[name][row], value, rtol=1e-12, atol=1e-12)


def test_iterations_bring_singular_values_near_one() -> None:
    for shape in ((2, 8, 5), (2, 5, 8), (1, 6, 6)):
        M = random(*shape)
        near = torch.linalg.svdvals(orthogonal(M, 5))
        assert 0.6 < float(near.min()) <= float(near.max()) < 1.25
        U, _, V = torch.linalg.svd(orthogonal(M, 5), full_matrices=False)
        whole, _, turned = torch.linalg.svd(M, full_matrices=False)
        torch.testing.assert_close(U @ V, whole @ turned, rtol=1e-8, atol=1e-8)  # polar factors
    assert not orthogonal(torch.zeros(1, 3, 2), 5).any()


def test_muon_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.double)  # which torch's iterates in
    w = torch.zeros(1, LAYOUT.size).double()
    grads = [1e6 * random(1, LAYOUT.size, seed=s) for s in (1, 2)]  # ours adds 1e-7 to their norm
    entry = LAYOUT.entries[3]
    theirs = torch.zeros(entry.shape, dtype=torch.float64, requires_grad=True)
    optimiser: Any = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0)
    for g in grads:
        theirs.grad = entry.view(g)[0].clone()
        optimiser.step()
    follow(Muon(), grads, w)
    torch.testing.assert_close(entry.view(w)[0], theirs.detach(), rtol=1e-10, atol=1e-12)


def test_a_convolution_is_a_matrix_and_an_embedding_is_none() -> None:
    w, g = torch.zeros(LAYOUT.size).double(), random(LAYOUT.size)
    follow(Muon(), [g], w)
    found, given = LAYOUT.views(w), LAYOUT.views(g)
    step = orthogonal(given["conv.weight"].flatten(1)[None], 5)[0].unflatten(1, (4, 3, 3))
    torch.testing.assert_close(found["conv.weight"], -0.1 * step)
    wide = orthogonal(given["head.weight"][None], 5)[0]
    torch.testing.assert_close(found["head.weight"], -0.1 * wide)
    for name in ("conv.bias", "embed.weight", "scale"):  # the first step of Adam is a sign
        torch.testing.assert_close(found[name], -0.01 * given[name].sign())
    w.zero_()
    follow(Muon(adam=()), [g], w)
    tall = orthogonal(given["embed.weight"][None], 5)[0]
    torch.testing.assert_close(LAYOUT.views(w)["embed.weight"], -0.1 * (7 / 5) ** 0.5 * tall)


def test_the_first_spectral_step_by_hand() -> None:
    """After it m is g and sqrt(P) is beta1*|g|, both corrected for their start."""
    w, g = torch.zeros(LAYOUT.size).double(), random(LAYOUT.size)
    rule = Spectral(beta1=0.9, tau_relative=0.5, plain_lr=0.2, embedding_lr=0.7)
    follow(rule, [g], w)
    found, given = LAYOUT.views(w), LAYOUT.views(g)
    for name in ("conv.weight", "head.weight"):
        matrix = given[name].flatten(1)
        whole, root = orthogonal(matrix[None], 5)[0], 0.9 * matrix.abs()
        u = whole / (root + 0.5 * root.square().mean().sqrt())
        u *= whole.norm() / u.norm()
        torch.testing.assert_close(found[name].flatten(1), -0.1 * u)
    for names, lr in ((("conv.bias", "scale"), 0.02), (("embed.weight",), 0.07)):
        rest = torch.cat([given[name].flatten() for name in names])
        step = rest / (0.9 * rest.abs() + 0.5 * 0.9 * rest.square().mean().sqrt())
        torch.testing.assert_close(torch.cat([found[n].flatten() for n in names]), -lr * step)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-24])
def test_spectral_steps_of_what_underflows_are_small(scale: float) -> None:
    """P is zero there: vectors have an absolute tau, and nothing grows without bound."""
    tensors = [("w", torch.empty(3, 2)), ("b", torch.empty(3)), ("none", torch.empty(4, 0))]
    layout = Layout.of(tensors)
    rule = Spectral().fit(layout)
    w, g = torch.zeros(layout.size), scale * random(layout.size).float()
    state = {name: field.new(w) for name, field in rule.fields(layout).items()}
    for k in range(3):
        rule.step(w, g.clone(), state, 0.1, k)
    assert w[-3:].abs().max() <= 1e3 * scale
    assert w.isfinite().all()


def test_without_factors_soap_is_adam() -> None:
    w, grads = torch.zeros(LAYOUT.size).double(), [random(LAYOUT.size, seed=s) for s in range(5)]
    own, theirs = w.clone(), w.clone().requires_grad_()
    follow(SOAP(largest_side=1), grads, own)
    optimiser = torch.optim.Adam([theirs], lr=0.1, betas=(0.95, 0.95), eps=1e-8)
    for g in grads:
        theirs.grad = g.clone()
        optimiser.step()
    torch.testing.assert_close(own, theirs.detach(), rtol=1e-9, atol=1e-11)


def test_soap_is_adam_in_another_basis() -> None:
    """If all factors are diagonal, their eigenvectors only change the order of coordinates."""
    w, rule = torch.zeros(LAYOUT.size).double(), SOAP(refresh=1, tau=1e-3)
    state = {n: f.new(w) for n, f in rule.fields(LAYOUT).items()}
    fitted = rule.fit(LAYOUT)
    for side in fitted.sides:
        side.inside(state["P"][None])[0].copy_(torch.diag(torch.arange(side.size, 0, -1.0)))
    g, adam = random(LAYOUT.size), w.clone()
    fitted.apply(w, g, state, 0.1, 0)
    follow(SOAP(largest_side=1, tau=1e-3), [g], adam)
    torch.testing.assert_close(w, adam)
    assert not torch.equal(state["v"], 0.05 * g.square())  # which are in that other order


def test_eigenvectors_of_nothing_and_of_all_alike() -> None:
    assert torch.equal(eigenvectors(torch.zeros(2, 3, 3)), torch.eye(3).expand(2, 3, 3))
    P = random(1, 4, 4) @ random(1, 4, 4).mT
    alike, apart = eigenvectors(P.expand(3, 4, 4)), eigenvectors(torch.cat([P, 2 * P, P]))
    assert torch.equal(alike[0], alike[2])
    assert torch.equal(alike[0], apart[0])
    assert eigenvectors(torch.full((2, 3, 3), torch.nan)).isfinite().all()


def test_sophia_refreshes_and_clips() -> None:
    rule = Sophia(beta1=0.0, beta2=0.5, gamma=2.0, refresh=3)
    assert [rule.other(k) for k in range(5)] == ["drawn", None, None, "drawn", None]
    w, h = torch.zeros(3).double(), torch.zeros(3).double()
    state = {"m": torch.zeros(3).double(), "h": h, OTHER: torch.tensor([1.0, 2.0, 0.0]).double()}
    rule.step(w, torch.tensor([0.1, -8.0, 0.3]).double(), state, 0.1, 0)
    assert h.tolist() == [0.5, 2.0, 0.0]
    torch.testing.assert_close(w, torch.tensor([-0.01, 0.1, -0.1]).double())
    del state[OTHER]
    rule.step(w, torch.ones(3).double(), state, 0.1, 1)
    assert h.tolist() == [0.5, 2.0, 0.0]


@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-4)])
def test_wide_matrices_by_their_squares(
    iterations: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Singular values from 1 to 1e-6, in which squares lose half the digits."""
    generator = torch.Generator().manual_seed(0)
    U, _, V = torch.linalg.svd(
        torch.randn(2, 9, 70, dtype=torch.float64, generator=generator), full_matrices=False
    )
    X = (U * torch.logspace(0, -6, 9, dtype=torch.float64)) @ V / 1.5
    found, expected = _by_squares(X.to(dtype), iterations), _by_steps(X, iterations)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_bases_do_not_depend_on_how_they_were_computed() -> None:
    """Of a factor without full rank: turned inside of what it does not reach, it is the same."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(2, 12, 3, dtype=torch.float64, generator=generator)
    P = few @ few.mT
    vectors = eigenvectors(P)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(12).double().expand(2, 12, 12))
    torch.testing.assert_close(vectors.mT @ P @ vectors, torch.linalg.eigvalsh(P).diag_embed())
    noise = 1e-16 * torch.randn(2, 12, 12, dtype=torch.float64, generator=generator)
    assert not torch.allclose(torch.linalg.eigh(P)[1].abs(), torch.linalg.eigh(P + noise)[1].abs())
    torch.testing.assert_close(
        eigenvectors(P + noise + noise.mT).abs(), vectors.abs(), rtol=0, atol=1e-10
    )
