"""Rules against other people's optimisers, and fast arithmetic against the plain lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adabelief_pytorch import AdaBelief
from torch import Tensor

from prefed.core.layout import Layout
from prefed.rules import SGD, AdaGrad, Adam, Covariance, Rule, Yogi
from prefed.rules import rule as rules_base
from prefed.rules.wrapped import Decayed

D = 50


def gradients(steps: int, shape: tuple[int, ...] = (D,), dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-3, 1, shape[-1], dtype=dtype)
    return [torch.randn(shape, generator=generator, dtype=dtype) * scale for _ in range(steps)]


def layout(d: int = D) -> Layout:
    return Layout.of([("w", torch.empty(d))])


def follow(rule: Rule, grads: list[Tensor], lr: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and state after a round of these gradients, from zero."""
    w = torch.zeros_like(grads[0])
    clients = len(w) if w.dim() > 1 else None
    d = w.shape[-1]
    state = {n: f.new(w, clients) for n, f in rule.fields(layout(d)).items()}
    rule.begin(w, state)
    for k, g in enumerate(grads):
        rule.apply(w, g.clone(), state, lr(k) if callable(lr) else lr, k)
    rule.finish(w, state, 0.1, len(grads))
    return w, state


def follow_torch(make: Any, grads: list[Tensor]) -> Tensor:
    w = torch.zeros(D, dtype=torch.float64, requires_grad=True)
    optimiser = make([w])
    for g in grads:
        w.grad = g.clone()
        optimiser.step()
    return w.detach()


def test_adam_is_torchs() -> None:
    ours, _ = follow(Adam(beta2=0.99, tau=1e-8, bias_correction=True), gradients(20), 0.01)
    theirs = follow_torch(
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99), eps=1e-8), gradients(20)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_with_decoupled_decay_adam_is_torchs_adamw() -> None:
    adam = Adam(beta2=0.99, tau=1e-8, bias_correction=True)
    ours, _ = follow(Decayed(adam, 0.1), gradients(20), 0.01)
    theirs = follow_torch(
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
        gradients(20),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(ours, follow(adam, gradients(20), 0.01)[0], rtol=1e-6)


def test_nesterovs_momentum_is_torchs() -> None:
    ours, _ = follow(SGD(0.9, nesterov=True), gradients(20), 0.01)
    theirs = follow_torch(
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True), gradients(20)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_adagrad_is_torchs() -> None:
    ours, _ = follow(AdaGrad(tau=1e-3), gradients(20), 0.01)
    theirs = follow_torch(lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-3), gradients(20))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_momentum_is_torchs() -> None:
    ours, _ = follow(SGD(0.9), gradients(20), 0.01)
    theirs = follow_torch(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), gradients(20))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_covariance_is_adabelief() -> None:
    """AdaBelief corrects the bias; that package also adds its epsilon inside the root, so the
    epsilon is made too small to matter. Undone through the step size, the correction goes."""

    def adabelief(p: Any) -> Any:
        return AdaBelief(
            p, lr=0.01, betas=(0.9, 0.99), eps=1e-30, rectify=False, print_change_log=False
        )

    theirs = follow_torch(adabelief, gradients(20))
    corrected, _ = follow(Covariance(0.9, 0.99, 1e-30, bias_correction=True), gradients(20), 0.01)
    torch.testing.assert_close(corrected, theirs, rtol=1e-10, atol=1e-12)

    def undo(k: int) -> float:
        return float(0.01 * (1 - 0.99 ** (k + 1)) ** 0.5 / (1 - 0.9 ** (k + 1)))

    plain, _ = follow(Covariance(0.9, 0.99, 1e-30), gradients(20), undo)
    torch.testing.assert_close(plain, theirs, rtol=1e-10, atol=1e-12)


def test_covariance_is_sdprop() -> None:
    """Ida et al.: with beta1 = beta2 = gamma and a start at zero, their c equals P / gamma."""
    gamma, mu = 0.9, torch.zeros(D, dtype=torch.float64)
    c = torch.zeros_like(mu)
    for g in gradients(20):
        c = gamma * c + gamma * (1 - gamma) * (g - mu) ** 2
        mu = gamma * mu + (1 - gamma) * g
    _, state = follow(Covariance(gamma, gamma, 1e-3), gradients(20), 0.01)
    torch.testing.assert_close(c, state["P"] / gamma, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shape", [(D,), (3, D)])
@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.999])
def test_fused_covariance_is_the_plain_one(shape: tuple[int, ...], beta1: float) -> None:
    rule = Covariance(beta1, 0.95, 1e-3)
    fast = rule.fused(torch.zeros(1))
    assert (fast is rule) == (beta1 == 0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        steps = gradients(300, shape, dtype)
        (w, state), (w_fast, state_fast) = follow(rule, steps, 0.01), follow(fast, steps, 0.01)
        torch.testing.assert_close(w_fast, w, rtol=tolerance, atol=tolerance)
        for name in ("m", "P"):
            error = (state_fast[name] - state[name]).norm() / state[name].norm().clamp(min=1e-30)
            assert error < tolerance


@pytest.mark.parametrize("shape", [(D,), (3, D), (3, 1001)])
@pytest.mark.parametrize("tau_relative", [None, 0.1])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_lean_covariance_is_the_plain_one(
    shape: tuple[int, ...],
    tau_relative: float | None,
    bias_correction: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = Covariance(0.9, 0.999, 1e-3, "ema", "g", bias_correction, tau_relative=tau_relative)
    monkeypatch.setattr("prefed.rules.covariance_fused.BLOCK", 2048)
    fast = rule.fused(torch.zeros(1))
    assert type(fast) is not Covariance
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        steps = gradients(300, shape, dtype)
        (w, state), (w_fast, state_fast) = follow(rule, steps, 0.01), follow(fast, steps, 0.01)
        torch.testing.assert_close(w_fast, w, rtol=tolerance, atol=10 * tolerance)
        for name in state:
            torch.testing.assert_close(
                state_fast[name], state[name], rtol=tolerance, atol=tolerance
            )


def test_fused_covariance_goes_on_from_given_state() -> None:
    """Two rounds of five steps are ten steps: begin and finish change nothing but units."""
    rule = Covariance(0.9, 0.9, 1e-3)
    once, _ = follow(rule, gradients(10), 0.01)
    fast = rule.fused(torch.zeros(1))
    w = torch.zeros(D, dtype=torch.float64)
    state = {name: field.new(w) for name, field in fast.fields(layout()).items()}
    for part in (gradients(10)[:5], gradients(10)[5:]):
        fast.begin(w, state)
        for k, g in enumerate(part):
            fast.apply(w, g, state, 0.01, k)
        fast.finish(w, state, 0.01, 5)
    torch.testing.assert_close(w, once, rtol=1e-12, atol=1e-12)


RULES = [
    SGD(),
    SGD(0.9),
    AdaGrad(),
    Adam(),
    Yogi(),
    Covariance(),
    Covariance().fused(torch.zeros(1)),
    Covariance(step_with="g").fused(torch.zeros(1)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_blocks_change_no_bit(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = gradients(5, (3, 1001), torch.float32)
    whole, _ = follow(rule, steps, 0.01)
    assert rules_base.BLOCK % 64 == 0  # whole vectors: the rest of a block is computed otherwise
    monkeypatch.setattr(rules_base, "BLOCK", 512)
    blocked, _ = follow(rule, steps, 0.01)
    assert torch.equal(whole, blocked)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_a_block_of_clients_is_each_of_them(rule: Rule) -> None:
    steps = gradients(5, (3, D))
    together, state = follow(rule, steps, 0.01)
    for row in range(3):
        alone, alone_state = follow(rule, [g[row] for g in steps], 0.01)
        torch.testing.assert_close(together[row], alone, rtol=1e-14, atol=1e-14)
        assert state.keys() == alone_state.keys()
