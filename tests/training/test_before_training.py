"""What is tried before the first round: the model's gradient, an evaluation, both rules. A run that
would train nothing, or fail rounds later, says so at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core.layout import Layout
from prefed.core.losses import LOSSES, make_loss
from tests.helpers.engine_runs import same

SETTINGS: dict[str, Any] = {"rounds": 2, "local_steps": 3, "batch_size": 8, "device": "cpu"}


def train(model: nn.Module, x: Tensor, y: Tensor, **more: Any) -> prefed.Result:
    algorithm = more.pop("algorithm", prefed.FedAvg(client_lr=0.1))
    data = prefed.FederatedData([(x, y), (x, y)], test=(x, y))
    return prefed.simulate(algorithm, model, data, **{**SETTINGS, **more})


def numbers(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def labels(classes: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, classes, shape))


class NotInPlace(prefed.Rule):
    def step(self, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, k: int) -> None:
        w = w - lr * g


class ReplacesState(prefed.Rule):
    def fields(self, layout: Layout) -> dict[str, prefed.Field]:
        return {"m": prefed.Field((layout.size,))}

    def step(self, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, k: int) -> None:
        state["m"] = 0.9 * state["m"] + g
        w.sub_(lr * state["m"])


class StepsAtTheEnd(prefed.Rule):
    """In place, though no single step moves the weights: they move when the round ends."""

    def fields(self, layout: Layout) -> dict[str, prefed.Field]:
        return {"sum": prefed.Field((layout.size,))}

    def step(self, w: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, k: int) -> None:
        state["sum"].add_(g)

    def finish(self, w: Tensor, state: dict[str, Tensor], lr: float, steps: int) -> None:
        w.sub_(lr * state["sum"])


def algorithm(client: type[prefed.Rule] | None, server: type[prefed.Rule] | None) -> Any:
    class Own(prefed.FedAvg):
        def client_rule(self) -> prefed.Rule:
            return client() if client else super().client_rule()

        def server_rule(self) -> prefed.Rule:
            return server() if server else super().server_rule()

    return Own(client_lr=0.1)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "auto"])
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_rule_that_is_not_in_place_is_refused(side: str, engine: str) -> None:
    own = algorithm(NotInPlace, None) if side == "client" else algorithm(None, NotInPlace)
    with pytest.raises(prefed.PrefedError, match=r"NotInPlace.step: .* changes w in place"):
        train(nn.Linear(5, 3), numbers(20, 5), labels(3, 20), algorithm=own, engine=engine)


def test_a_rule_that_replaces_its_state_is_refused() -> None:
    with pytest.raises(prefed.PrefedError, match=r"ReplacesState.step: .* state\['m'\]"):
        own = algorithm(ReplacesState, None)
        train(nn.Linear(5, 3), numbers(20, 5), labels(3, 20), algorithm=own)


@pytest.mark.parametrize("client_lr", [0.1, 1e-12])
def test_rules_in_place_are_let_be(client_lr: float) -> None:
    """Also one that moves the weights only at the end, and a step too small to be seen."""
    own = algorithm(StepsAtTheEnd, None).model_copy(update={"client_lr": client_lr})
    result = train(nn.Linear(5, 3), numbers(20, 5), labels(3, 20), algorithm=own)
    assert len(result.history) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_is_refused(how: str) -> None:
    plain = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    given = (plain,) if how == "script" else (plain, numbers(2, 5))
    made: Any = getattr(torch.jit, how)(*given)
    with pytest.raises(prefed.PrefedError, match=r"no gradient .* not TorchScript"):
        train(made, numbers(20, 5), labels(3, 20))


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(prefed.PrefedError, match=r"no gradient .* look for detach\(\)"):
        train(Detached(5, 3), numbers(20, 5), labels(3, 20))


def test_a_gradient_that_is_zero_is_one() -> None:
    result = train(nn.Linear(5, 3), numbers(20, 5), labels(3, 20), loss=lambda o, y: 0 * o.sum())
    assert result.history[-1]["train_loss"] == 0


class Drops(nn.Module):
    """All that a trial could disturb: dropout, statistics, and draws from the generator."""

    def __init__(self) -> None:
        super().__init__()
        drop = (nn.BatchNorm1d(6), nn.Dropout())
        self.layers = nn.Sequential(nn.Linear(5, 6), *drop, nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found + torch.rand(1) if self.training else found


def test_the_trial_leaves_no_trace() -> None:
    torch.manual_seed(3)
    model, data = Drops(), prefed.FederatedData([(numbers(20, 5), labels(3, 20))])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    run = prefed.Run(prefed.FedAvg(), model, data, prefed.Settings(**SETTINGS))
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in run.task.flat.module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not run.task.flat.gradient.any()
    assert run.task.flat.module.training


class Steps(nn.Module):
    """Gives (N, T, C): its classes are last."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(5, 3), first

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found.transpose(1, 2) if self.first else found


def flattened(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


@pytest.mark.parametrize("length", [3, 4])
def test_classes_that_are_last_are_refused_by_the_usual_loss(length: int) -> None:
    """Also where there are as many steps as classes, and the loss would be that of nonsense."""
    with pytest.raises(prefed.PrefedError, match=r"classes .*last.*output.transpose\(1, -1\)"):
        train(Steps(), numbers(20, length, 5), labels(3, 20, length))
    x, y = numbers(20, length, 5), labels(3, 20, length)
    result = train(Steps(first=True), x, y)
    right = (result.model(x).argmax(1) == y).double().mean()
    assert result.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-12)


def test_classes_that_are_last_with_a_loss_for_them() -> None:
    x, y = numbers(20, 4, 5), labels(3, 20, 4)
    result = train(Steps(), x, y, loss=flattened)
    right = (result.model(x).argmax(2) == y).double().mean()
    assert result.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-12)
    x, y = numbers(20, 3, 5), labels(3, 20, 3)  # which are the classes cannot be seen
    assert train(Steps(), x, y, loss=flattened).history[-1]["test_accuracy"] is None


def test_a_test_set_that_does_not_fit_is_told_before_training() -> None:
    seen: list[int] = []

    class Watch(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            seen.append(record["round"])

    data = prefed.FederatedData(
        [(numbers(20, 5), labels(3, 20))], test=(numbers(20, 6), labels(3, 20))
    )
    with pytest.raises(prefed.PrefedError, match="they do not fit the data"):
        prefed.simulate(
            prefed.FedAvg(), nn.Linear(5, 3), data, callbacks=[Watch()], evaluate_every=2,
            **SETTINGS,
        )  # fmt: skip
    assert not seen


def channels_last() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3))
    return train(model, numbers(20, 8, 8, 3), labels(3, 20))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: train(nn.LazyLinear(3), numbers(20, 5), labels(3, 20)), r"call model\(x\[:2\]\)"),
        (lambda: train(nn.Linear(5, 4), numbers(20, 5), labels(2, 20, 4)), 'the loss is "bce"'),
        (channels_last, r"channels last \(8, 8, 3\).*x.permute\(0, 3, 1, 2\)"),
        (
            lambda: train(nn.Linear(5, 3), numbers(20, 5), labels(3, 20).to(torch.uint8)),
            r"uint8 y are pixels: .*y.long\(\)",
        ),
        (
            lambda: train(nn.Linear(5, 3), numbers(20, 5), labels(3, 20), engine="gpu"),
            "engine: 'gpu' is no engine; .*device=cuda",
        ),
    ],
    ids=["lazy layer", "several labels", "channels last", "labels as pixels", "engine"],
)
def test_clear_words(call: Any, message: str) -> None:
    with pytest.raises(prefed.PrefedError, match=message):
        call()


def test_nothing_is_second_guessed_with_a_loss_of_ones_own() -> None:
    """One logit, labels to be ignored, targets that are missing."""

    def one_logit(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output[:, 0], y.to(output.dtype))

    def known(output: Tensor, y: Tensor) -> Tensor:
        return ((output - y)[~y.isnan()] ** 2).mean()

    x, y = numbers(20, 5), labels(2, 20)
    result = train(nn.Linear(5, 1), x, y, loss=one_logit)
    assert result.history[-1]["test_accuracy"] is None  # a threshold is not ours to choose
    holes = numbers(20, 2)
    holes[::3, 0] = float("nan")
    assert np.isfinite(train(nn.Linear(5, 2), x, holes, loss=known).history[-1]["train_loss"])
    y[::4] = -100
    result = train(nn.Linear(5, 2), x, y, loss=nn.functional.cross_entropy)
    right = result.model(x).argmax(1) == y
    assert result.history[-1]["test_accuracy"] == pytest.approx(float(right.sum() / 15), abs=1e-7)
    wanted = nn.functional.cross_entropy(result.model(x), y).detach()
    assert result.history[-1]["test_loss"] == pytest.approx(float(wanted), rel=1e-6)
    with pytest.raises(prefed.PrefedError, match="labels reach from 0 to 9"):
        train(nn.Linear(5, 2), x, labels(2, 20) * 9, loss=nn.functional.cross_entropy)


# Losses by name, against their formulas in NumPy


def test_the_named_losses_are_their_formulas() -> None:
    rng = np.random.default_rng(5)
    scores, y = rng.normal(size=(6, 4)), rng.integers(0, 4, 6)
    y[2] = 9
    log_shares = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    smooth = np.full((6, 4), 0.2 / 4)
    for i in range(6):
        if y[i] != 9:
            smooth[i, y[i]] += 0.8
    each = -(smooth * log_shares).sum(1)
    loss = LOSSES.get("cross_entropy")
    found = loss(torch.tensor(scores), torch.tensor(y), label_smoothing=0.2, ignore_index=9)
    assert float(found) == pytest.approx(np.delete(each, 2).mean(), abs=1e-13)
    nothing = loss(torch.tensor(scores), torch.full((6,), 9), ignore_index=9)
    assert float(nothing) == 0
    wanted = rng.integers(0, 2, (6, 4))
    shares = 1 / (1 + np.exp(-scores))
    formula = -(wanted * np.log(shares) + (1 - wanted) * np.log(1 - shares)).mean()
    found = LOSSES.get("bce")(torch.tensor(scores), torch.tensor(wanted))
    assert float(found) == pytest.approx(formula, abs=1e-13)
    one = LOSSES.get("bce")(torch.tensor(scores[:, :1]), torch.tensor(wanted[:, 0]))
    column = -(wanted * np.log(shares) + (1 - wanted) * np.log(1 - shares))[:, 0].mean()
    assert float(one) == pytest.approx(column, abs=1e-13)
    found = LOSSES.get("mse")(torch.tensor(scores), torch.tensor(wanted))
    assert float(found) == pytest.approx(((scores - wanted) ** 2).mean(), abs=1e-13)


def test_bce_decides_at_zero() -> None:
    x, y = numbers(20, 5), labels(2, 20)
    result = train(nn.Linear(5, 1), x, y, loss="bce")
    right = ((result.model(x)[:, 0] > 0) == (y == 1)).double().mean()
    assert result.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-12)
    several = labels(2, 20, 4)
    result = train(nn.Linear(5, 4), x, several, loss="bce")
    right = ((result.model(x) > 0) == (several == 1)).double().mean()
    assert result.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-12)


def test_evaluation_in_parts_is_that_of_the_whole() -> None:
    """2,000 samples are evaluated in two parts, of which one has more to ignore."""
    x, y = numbers(2000, 5), labels(3, 2000)
    y[:1000] = 2
    y[:900] = -1
    loss = make_loss("cross_entropy", ignore_index=-1)
    result = train(nn.Linear(5, 3), x, y, loss=loss)
    output = result.model(x)
    wanted = nn.functional.cross_entropy(output[900:], y[900:]).detach()
    assert result.history[-1]["test_loss"] == pytest.approx(float(wanted), rel=1e-5)
    right = (output.argmax(1) == y)[900:].double().mean()
    assert result.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-12)


@pytest.mark.parametrize("name", ["mse", "bce", "cross_entropy"])
def test_engines_agree_on_named_losses(name: str) -> None:
    x, classes = numbers(20, 5).double(), 1 if name != "cross_entropy" else 3
    y = labels(max(classes, 2), 20)
    options = {"label_smoothing": 0.1, "ignore_index": 0} if classes == 3 else {}
    loss = make_loss(name, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes)).double()
    one, other = (
        train(model, x, y, loss=loss, engine=engine) for engine in ("sequential", "vectorised")
    )
    same(one, other, 1e-9)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU])
def test_engines_agree_on_targets_that_do_not_count(activation: Any) -> None:
    """-100, as torch has it, in none of the samples that an engine is tried on."""
    x, y = numbers(20, 5).double(), labels(3, 20)
    y[4::3] = -100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), activation(), nn.Linear(4, 3)).double()
    one, other = (
        train(model, x, y, loss=nn.functional.cross_entropy, engine=engine)
        for engine in ("sequential", "vectorised")
    )
    same(one, other, 1e-9)


def test_a_part_in_which_no_target_counts() -> None:
    x, y = numbers(2000, 5), labels(3, 2000)
    y[1024:] = -100
    result = train(nn.Linear(5, 3), x, y, loss=nn.functional.cross_entropy, batch_size=None)
    wanted = nn.functional.cross_entropy(result.model(x), y).detach()
    assert result.history[-1]["test_loss"] == pytest.approx(float(wanted), rel=1e-5)
