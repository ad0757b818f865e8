"""Pair: the algorithms that it can stand for, to the last bit; and how it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import prefed
from prefed import Pair, average, keep
from prefed.experiments.config import load
from prefed.rules import SGD, AdaGrad, Adam, Covariance, Yogi
from prefed.rules.adam import AdaGradM
from prefed.rules.covariance_kronecker import KroneckerCovariance
from tests.helpers.commands import prefed_here
from tests.helpers.device import DEVICE
from tests.helpers.engine_runs import chain, same
from tests.helpers.problems import tiny_data

LR, SLR = 0.01, 0.02
SAME: dict[str, tuple[prefed.Algorithm, Pair]] = {
    "FedAvg": (prefed.FedAvg(client_lr=LR), Pair(client_lr=LR)),
    "FedAvgM": (
        prefed.FedAvgM(client_lr=LR, client_momentum=0.5),
        Pair(client_lr=LR, client=SGD(0.5), server=SGD(0.9)),
    ),
    "FedAdam": (
        prefed.FedAdam(client_lr=LR, server_lr=SLR, bias_correction=True),
        Pair(client_lr=LR, server=Adam(v0=1e-6, bias_correction=True), server_lr=SLR),
    ),
    "FedYogi": (
        prefed.FedYogi(client_lr=LR, server_lr=SLR),
        Pair(client_lr=LR, server=Yogi(v0=1e-6), server_lr=SLR),
    ),
    "FedAdagrad": (
        prefed.FedAdagrad(client_lr=LR, server_lr=SLR),
        Pair(client_lr=LR, server=AdaGradM(v0=1e-6), server_lr=SLR),
    ),
    "AdaAlter": (
        prefed.AdaAlter(client_lr=LR, v0=0.1),
        Pair(client_lr=LR, client=AdaGrad(v0=0.1), share={"v": average()}),
    ),
    "LocalAdam": (
        prefed.LocalAdam(client_lr=LR),
        Pair(client_lr=LR, client=Adam(bias_correction=True)),
    ),
    "LocalAdam, average": (
        prefed.LocalAdam(client_lr=LR, state="average"),
        Pair(client_lr=LR, client=Adam(bias_correction=True),
             share={"m": average(), "v": average()}),
    ),
    "LocalAdam, keep": (
        prefed.LocalAdam(client_lr=LR, state="keep"),
        Pair(client_lr=LR, client=Adam(bias_correction=True), share={"m": keep(), "v": keep()}),
    ),
    "PreFed": (
        prefed.PreFed(client_lr=LR),
        Pair(client_lr=LR, client=Covariance(), share={"m": average(), "P": average()}),
    ),
    "PreFed, aligned": (
        prefed.PreFed(client_lr=LR, momentum="keep", align=0.3, align_form="mixed"),
        Pair(client_lr=LR, client=Covariance(), share={"m": keep(), "P": average()}, align=0.3,
             align_form="mixed"),
    ),
    "PreFed, kronecker": (
        prefed.PreFed(client_lr=LR, shape="kronecker", refresh=2, bias_correction=True,
                      momentum="reset"),
        Pair(client_lr=LR, client=KroneckerCovariance(bias_correction=True, refresh=2),
             share={"P": average()}),
    ),
    "PreFedLite": (
        prefed.PreFedLite(client_lr=LR),
        Pair(client_lr=LR, client=Covariance(), upload="bfloat16",
             share={"m": average(codec="int8"), "P": average(codec="log8")}),
    ),
    "PreFedOpt": (
        prefed.PreFedOpt(client_lr=LR, server_lr=SLR),
        Pair(client_lr=LR, server=Covariance(beta2=0.99, step_with="g"), server_lr=SLR,
             per_step=True),
    ),
    "PreFedOpt, block": (
        prefed.PreFedOpt(client_lr=LR, server_lr=SLR, shape="block", blocks="tensor",
                         per_step=False, step_with="m"),
        Pair(client_lr=LR, server_lr=SLR, server={"name": "covariance", "beta2": 0.99,
                                                  "shape": "block", "blocks": "tensor"}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("steps", [{"local_steps": 3}, {"local_epochs": 2}], ids=str)
def test_it_is_the_algorithm_to_the_last_bit(case: str, engine: str, steps: dict[str, int]) -> None:
    one, other = (
        prefed.simulate(
            algorithm, chain(), tiny_data(), rounds=5, clients_per_round=4, batch_size=4,
            weighting="samples", engine=engine, device=DEVICE, **steps,  # type: ignore[arg-type]
        )
        for algorithm in SAME[case]
    )  # fmt: skip
    same(one, other, 0.0)
    for a, b in ((one.server.shared, other.server.shared),
                 (one.server.optimiser, other.server.optimiser)):  # fmt: skip
        assert a.keys() == b.keys()
        assert all(torch.equal(value, b[name]) for name, value in a.items())
    for x, y in zip(one.history, other.history, strict=True):
        x, y = ({k: v for k, v in r.items() if k != "seconds"} for r in (x, y))
        assert x == y


@pytest.mark.parametrize("case", SAME)
def test_what_is_written_makes_it_again(case: str) -> None:
    pair = SAME[case][1]
    assert Pair(**json.loads(json.dumps(pair.model_dump(mode="json")))) == pair


CONFIG = """
rounds = 3
local_steps = 2
clients_per_round = 3
device = "cpu"
[algorithm]
name = "pair"
client = {name = "adam", beta1 = 0.8, bias_correction = true}
server = {name = "sgd", momentum = 0.9, nesterov = true}
share = {m = "reset", v = {kind = "average", codec = "log8"}}
align = 0.2
[data]
name = "digits"
split = {name = "iid", clients = 6}
[model]
name = "mlp"
hidden = [4]
"""


def test_in_a_config_and_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    made = load(str(tmp_path / "c.toml")).make_algorithm()
    assert made == Pair(
        client=Adam(beta1=0.8, bias_correction=True), server=SGD(0.9, nesterov=True),
        share={"v": average(codec="log8"), "m": prefed.reset()}, align=0.2,
    )  # fmt: skip
    changes = ["client.beta1=0.5", "server=yogi", "share.v=keep"]
    changed = load(str(tmp_path / "c.toml"), changes).make_algorithm()
    assert changed == Pair(
        client=Adam(beta1=0.5, bias_correction=True), server=Yogi(),
        share={"v": keep(), "m": prefed.reset()}, align=0.2,
    )  # fmt: skip
    sets = [word for change in changes for word in ("--set", change)]
    out = prefed_here("run", "c.toml", *sets, "--out", "out", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    again = load(str(tmp_path / "out" / "config.toml"))
    assert again.make_algorithm() == changed
    wrong = prefed_here("validate", "c.toml", "--set", "client.beta3=1", cwd=tmp_path)
    assert wrong.returncode == 2
    assert 'algorithm.client: beta3: unknown option; did you mean "beta' in wrong.stderr
    rule = prefed_here("cat", "covariance", cwd=tmp_path)
    assert "rule covariance" in rule.stdout
    assert "largest_side = 256" in rule.stdout


RULE = """
from dataclasses import dataclass
import prefed

@dataclass(frozen=True)
class SignMomentum(prefed.Rule):
    beta: float = 0.9

    def fields(self, layout):
        return {"m": prefed.Field((layout.size,))}

    def step(self, w, g, state, lr, k):
        w.sub_(state["m"].lerp_(g, 1 - self.beta).sign(), alpha=lr)
"""


def test_a_rule_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sign_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {"name": "sign_rule:SignMomentum", "beta": 0.5}
    pair = Pair(client_lr=0.001, client=table, share={"m": "average"})
    assert pair.model_dump()["client"] == table
    result = prefed.simulate(
        pair, chain(), tiny_data(), rounds=2, local_steps=2, engine="vectorised"
    )
    assert result.server.shared["m"].any()


@pytest.mark.parametrize(("options", "text"), [
    ({"client": "adm"}, r"Pair\.client: unknown rule 'adm'; did you mean \"adam\""),
    ({"client": {"beta1": 0.5}}, r"Pair\.client: needs the name of a rule; known: adagrad"),
    ({"server": {"name": "adam", "beta1": 1}}, r"Pair\.server: beta1: should be less than 1"),
    ({"server": SGD}, r"Pair\.server: should be an instance of Rule"),
    ({"share": {"v": "keep"}}, r"Pair\.share: v: the client rule has no such state; it has none"),
    ({"client": "adam", "share": {"P": "keep"}}, r"Pair\.share: P: .* it has m, v"),
    ({"client": "adam", "share": {"v": "mean"}}, r"Pair\.share\.v\.kind: should be 'reset'"),
    ({"client": "adam", "share": {"v": "derived"}}, r"Pair\.share: v: \"derived\" needs a class"),
    ({"client": "adam", "share": {"v": {"kind": "average", "evry": 2}}},
     r"Pair\.share\.v\.evry: unknown option"),
    ({"client": "soap", "share": {"steps_left": "average"}},
     r"Pair\.share: steps_left: clients work it out .*; let it be \"reset\" or \"keep\""),
    ({"client": "soap", "share": {"basis": "average"}}, "basis: clients work it out"),
    ({"client": {"name": "spectral", "refresh": 2}, "share": {"u": {"kind": "average", "every": 2,
      "between": "keep"}}}, "u: clients work it out"),
    ({"client": {"name": "covariance", "shape": "full", "refresh": 2},
      "share": {"root": "average"}}, "root: clients work it out"),
])  # fmt: skip
def test_what_is_wrong_is_told(options: dict[str, Any], text: str) -> None:
    with pytest.raises(prefed.PrefedError, match=text):
        Pair(**options)
