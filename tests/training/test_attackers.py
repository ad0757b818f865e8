"""Clients that lie: what they send, who they are, and what means make of it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import prefed
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.experiments.config import load
from prefed.rules import State
from prefed.training.attackers import ATTACKS, Attackers
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model

TINY: dict[str, Any] = {
    "rounds": 2, "local_steps": 4, "batch_size": 3, "engine": "sequential", "seed": 3,
}  # fmt: skip
LIARS = draws.cohort(3, 0, 6, 2, "attackers")
"""A third of six clients, with the seed 3."""


class Listening(prefed.PreFed):
    """PreFed that keeps what its clients send, in the order of the cohort."""

    heard: ClassVar[list[State]] = []

    def before_mean(self, values: State) -> State:
        for row in range(len(values["weights"])):
            self.heard.append({n: v[row].clone() for n, v in values.items()})
        return values


def sent(attack: str | None, engine: str = "sequential", **options: Any) -> list[State]:
    """What the six clients send in the first round."""
    Listening.heard.clear()
    table = {"share": 1 / 3, "attack": attack, **options} if attack else None
    settings = prefed.Settings(**{**TINY, "engine": engine}, attackers=table)
    run = prefed.Run(Listening(client_lr=0.05), tiny_model(), tiny_data(), settings)
    record = run.run_round()
    assert record.get("attackers") == (2 if attack else None)
    return [*Listening.heard]


def expected(attack: str, honest: list[State], client: int) -> State:
    """What a liar sends, from what all would have sent."""
    change = honest[client]["weights"].numpy()
    others = np.stack([honest[c]["weights"].numpy() for c in range(6) if c not in LIARS])
    P = honest[client]["P"].numpy()
    lie: dict[str, Any] = {
        "sign_flip": {"weights": -5 * change},
        "scaled": {"weights": 10 * change},
        "alie": {"weights": others.mean(0) - 1.5 * others.std(0)},
        "huge_state": {"P": 1e6 * P},
        "tiny_state": {"P": 1e-6 * P},
    }[attack]
    return honest[client] | {name: torch.from_numpy(value) for name, value in lie.items()}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("attack", ["sign_flip", "scaled", "alie", "huge_state", "tiny_state"])
def test_liars_send_their_lie_and_others_what_they_have(attack: str, engine: str) -> None:
    honest, found = sent(None, engine), sent(attack, engine)
    assert len(found) >= 6
    for client, values in enumerate(found[-6:]):
        wanted = expected(attack, honest, client) if client in LIARS else honest[client]
        for name, value in wanted.items():
            np.testing.assert_allclose(values[name].numpy(), value.numpy(), rtol=1e-9, atol=1e-12)


def test_noise_is_as_long_as_it_should_be_and_has_a_key() -> None:
    honest, found, again = sent(None), sent("noise", factor=7.0), sent("noise", factor=7.0)
    for client in LIARS:
        change, lie = honest[client]["weights"], found[client]["weights"]
        assert torch.equal(lie, again[client]["weights"])
        drawn = draws.generator(3, "attack", 0, client).standard_normal(len(change))
        scale = 7 * float(change.norm()) / len(change) ** 0.5
        np.testing.assert_allclose(lie.numpy(), scale * drawn, rtol=1e-12)
    assert not torch.equal(*(found[client]["weights"] for client in LIARS))


class Pairs(Dataset[Any]):
    """Read on demand."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = torch.tensor(x), torch.tensor(y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        return self.x[number], int(self.y[number])


@pytest.mark.parametrize("kind", ["arrays", "partition", "lazy"])
def test_flipped_labels_are_a_run_on_flipped_labels(kind: str) -> None:
    def made(flip: bool) -> prefed.FederatedData:
        classes, pairs = SIZES[2], []
        for client, (x, y) in enumerate(arrays()):
            pairs.append((x, classes - 1 - y if flip and client in LIARS else y))
        test = tuple(map(torch.tensor, arrays()[0]))
        if kind == "lazy":
            return prefed.FederatedData([Pairs(*pair) for pair in pairs], test)
        if kind == "arrays":
            return prefed.FederatedData(
                [(torch.tensor(x), torch.tensor(y)) for x, y in pairs], test
            )
        ends = np.cumsum([0, *(len(x) for x, _ in pairs)])
        parts = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
        whole = tuple(torch.tensor(np.concatenate(part)) for part in zip(*pairs, strict=True))
        return prefed.FederatedData(whole, test, parts=parts)

    options: dict[str, Any] = {"attackers": {"share": 1 / 3, "attack": "label_flip"}}
    for engine in ("sequential", "vectorised"):
        these = {**TINY, "engine": engine}
        found = prefed.simulate(prefed.FedAvg(), tiny_model(), made(False), **these, **options)
        wanted = prefed.simulate(prefed.FedAvg(), tiny_model(), made(True), **these)
        assert torch.equal(found.weights, wanted.weights)
        assert found.history[-1]["test_loss"] == wanted.history[-1]["test_loss"]


@pytest.mark.parametrize("attack", ["alie", "noise"])
def test_the_bits_do_not_depend_on_workers(attack: str) -> None:
    """Nor does the attack on what else there is: codecs, buckets, weights."""
    options: dict[str, Any] = {"attackers": {"share": 0.4, "attack": attack},
                               "mean": {"name": "trimmed", "bucket": 2, "share": 0.2},
                               "weighting": "samples", "rounds": 3}  # fmt: skip
    algorithm = prefed.PreFed(client_lr=0.05, upload="int8", P_codec="log8")
    for engine in ("sequential", "vectorised"):
        these = {**TINY, **options, "engine": engine}
        one, three = (
            prefed.simulate(algorithm, tiny_model(), tiny_data(), **these, workers=n)
            for n in (1, 3)
        )
        assert torch.equal(one.weights, three.weights)


def test_who_lies_is_drawn_once() -> None:
    settings = prefed.Settings(**TINY, attackers={"share": 0.2, "attack": "noise"})
    liars = Attackers.of(settings, 1000)
    assert liars is not None
    assert len(liars.liars) == 200
    assert sorted(liars.liars) == draws.cohort(3, 0, 1000, 200, "attackers")
    assert sorted(liars.liars) != draws.cohort(4, 0, 1000, 200, "attackers")
    none = Attackers.of(prefed.Settings(**TINY, attackers={"share": 0, "attack": "noise"}), 10)
    assert none is not None
    assert not none.liars


@pytest.mark.parametrize(("table", "words"), [
    ({"share": 0.2, "attack": "sign-flip"}, "attackers: unknown attack .sign-flip.; did you mean"),
    ({"share": 1.0, "attack": "noise"}, "attackers: share: should be at least 0 and below 1"),
    ({"attack": "noise"}, "attackers: share: should be at least 0 and below 1, not None"),
    ({"share": 0.2}, "attackers: should be a table such as"),
    ("noise", "attackers: should be a table such as"),
    ({"share": 0.2, "attack": "scaled", "factr": 2}, "attackers: factr: unknown option"),
    ({"share": 0.2, "attack": "noise", "factor": -1}, "attackers: factor: should be greater than"),
    ({"share": 0.2, "attack": "huge_state"}, "attackers: clients of FedAvg send no P, v"),
])  # fmt: skip
def test_what_cannot_be_is_told_before_the_first_round(table: Any, words: str) -> None:
    with pytest.raises(PrefedError, match=words):
        prefed.simulate(prefed.FedAvg(), tiny_model(), tiny_data(), **TINY, attackers=table)


def test_attacks_that_have_nothing_to_lie_in() -> None:
    options: dict[str, Any] = {"attackers": {"share": 0.2, "attack": "label_flip"}}
    numbers = [(torch.tensor(x), torch.tensor(x[:, :3])) for x, _ in arrays()]
    with pytest.raises(PrefedError, match="label_flip: the targets are no labels"):
        prefed.simulate(
            prefed.FedAvg(), tiny_model(), prefed.FederatedData(numbers), **TINY, **options
        )
    with pytest.raises(PrefedError, match="attackers: clients of PreFedSync average every"):
        prefed.simulate(prefed.PreFedSync(), tiny_model(), tiny_data(), **TINY, **options)


def test_every_attack_is_tried_here() -> None:
    tried = {"sign_flip", "scaled", "alie", "huge_state", "tiny_state", "noise", "label_flip"}
    assert tried == {*ATTACKS.names()}


def test_a_config_says_it_and_a_run_can_be_made_of_what_is_written(tmp_path: Path) -> None:
    changes = ['attackers={share=0.25, attack="scaled"}', "attackers.factor=3", "mean=trimmed",
               "mean.share=0.1", "state_mean=median", "rounds=2", "engine=sequential",
               "clients_per_round=4"]  # fmt: skip
    config = load("digits-noniid", changes)
    assert config.attackers == {"share": 0.25, "attack": "scaled", "factor": 3}
    assert config.mean == {"name": "trimmed", "share": 0.1}
    assert load(config.to_dict()) == config
    with pytest.raises(PrefedError) as told:
        load("digits-noniid", ["attackers.attack=scaled", "mean=medain", "state_mean.share=1"])
    assert str(told.value).count("\n") == 2


# The claims: with liars the plain mean fails, and the others stay near the run without liars.

FEW = ["clients_per_round=all", "data.split.clients=20", "rounds=25", "model.hidden=[32]"]
ALL_50 = ["clients_per_round=all", "rounds=30"]
FLIP = 'attackers={share=0.2, attack="sign_flip"}'


def accuracy(algorithm: str, *changes: str) -> float:
    """In percent, on digits that are divided evenly; below any other if it diverged."""
    given = [f"algorithm={algorithm}", "engine=vectorised", "evaluate_every=100", *changes]
    try:
        history = load("digits-iid", given).make_run().run().history
    except prefed.Diverged:
        return -1.0
    return 100 * float(history[-1]["test_accuracy"])


@pytest.mark.long
def test_sign_flippers_spoil_the_plain_mean_and_not_robust_ones() -> None:
    """The other means are in the long case below."""
    alone = accuracy("fedavg", *FEW)
    assert alone > 95
    assert accuracy("fedavg", *FEW, FLIP) < 30
    for mean in ("geometric", "multi-krum"):
        assert accuracy("fedavg", *FEW, FLIP, f"mean={mean}") > alone - 3, mean


@pytest.mark.slow
def test_sign_flippers_and_all_means() -> None:
    """50 clients. Krum follows one client at a time, which costs it as much without liars."""
    alone = accuracy("fedavg", *ALL_50)
    assert accuracy("fedavg", *ALL_50, FLIP) < 30
    for mean in ("median", "trimmed", "clipped", "multi-krum", "geometric"):
        assert accuracy("fedavg", *ALL_50, FLIP, f"mean={mean}") > alone - 3, mean
    krum = accuracy("fedavg", *ALL_50, "mean=krum")
    assert krum < alone - 3
    assert accuracy("fedavg", *ALL_50, FLIP, "mean=krum") > krum - 5


@pytest.mark.long
@pytest.mark.parametrize(
    "state_mean", ["median", *(pytest.param(m, marks=pytest.mark.slow) for m in (
        "trimmed", "clipped", "krum", "multi-krum", "geometric"))]
)  # fmt: skip
def test_a_lie_in_p_alone_stops_all_clients_unless_its_mean_is_robust(state_mean: str) -> None:
    few = [*FEW, "rounds=15"]
    lie = 'attackers={share=0.2, attack="huge_state"}'
    alone = accuracy("prefed", *few)
    assert alone > 95
    assert accuracy("prefed", *few, lie) < 80
    assert accuracy("prefed", *few, lie, f"state_mean={state_mean}") > alone - 3
