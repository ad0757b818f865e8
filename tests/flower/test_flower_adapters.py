"""Adapters on Flower: the bits of simulation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import prefed
import prefed.flower
from prefed.core.errors import PrefedError, RunFailed
from prefed.flower import protocol as p
from tests.helpers import ROOT
from tests.helpers.adapters import OPTIONS, adapted
from tests.helpers.federation import Federation, config_of, simulated, told_by_all
from tests.helpers.flower_apps import OPTIONS as STRATEGY
from tests.helpers.flower_apps import STEPS
from tests.helpers.loopback import LoopbackGrid
from tests.helpers.sentences import texts


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"freeze": ["*lora_A*"]}, {"state_dtype": "bfloat16"}])
def test_a_deployed_config_has_the_bits_of_simulation(more: dict[str, Any], tmp_path: Path) -> None:
    schedule = {"schedule": "warmup", "steps": 5, "then": 0.02}
    config = config_of(
        {"name": "prefed", **OPTIONS, **more, "client_lr": schedule},
        data={"name": "tests.helpers.sentences:texts", "split": {"name": "iid", "clients": 9}},
        model={"name": "tests.helpers.adapters:classifier"},
        micro_batch=3,
    )
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)


def peft_app(make: Any, helper: str, take: Any = None) -> ClientApp:
    """Steps on all samples of a partition; `take` gives what a loop of one's own sends."""
    app = ClientApp()
    prefed.flower.tell_partition(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = make()
        x, y = DATA.client(int(context.node_config[p.PARTITION])).all()
        batch: Any = {name: rows.padded() for name, rows in x.items()}
        if helper == "local_train":
            steps: Any = [batch | {"labels": y}] * STEPS
            reply: Message = prefed.flower.local_train(message, context, model, steps)
            return reply
        content: Any = message.content
        model.load_state_dict(content["arrays"].to_torch_state_dict(), strict=False)
        optimiser = prefed.optim.Covariance([w for w in model.parameters() if w.requires_grad], LR)
        prefed.flower.load_state(message, model, optimiser)
        for _ in range(STEPS):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(**batch).logits, y).backward()
            optimiser.step()
        answer = {
            "arrays": ArrayRecord(take(model)),
            p.STATE: prefed.flower.state_record(message, model, optimiser),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(RecordDict(answer), reply_to=message)

    return app


DATA = prefed.FederatedData((texts().x, texts().y), parts=torch.arange(60).split(20), pad=0)
LR = 0.02


def in_double() -> torch.nn.Module:
    return adapted().double()


@pytest.mark.parametrize("helper", ["local_train", "own"])
def test_adapters_alone_travel(helper: str, tmp_path: Path) -> None:
    """With the arrays as the documentation makes them."""
    text = (ROOT / "docs" / "flower.md").read_text()
    (block,) = re.findall(r"```python\n(model = Net\(\).*?)```", text, flags=re.S)

    def made(model: torch.nn.Module) -> dict[str, Any]:
        names: dict[str, Any] = {"Net": lambda: model, "ArrayRecord": ArrayRecord}
        exec(compile(block, "docs/flower.md", "exec"), names)
        return names

    app = peft_app(in_double, helper, lambda model: made(model)["trained"])
    strategy = prefed.flower.PreFed(client_lr=LR, **STRATEGY)
    found = strategy.start(nodes(app, tmp_path), made(in_double())["arrays"], 3, timeout=30)
    wanted = prefed.simulate(
        prefed.PreFed(client_lr=LR), in_double(), DATA, rounds=3, local_steps=STEPS,
        batch_size=None, weighting="samples", engine="sequential",
    ).model.state_dict()  # fmt: skip
    arrays = found.arrays.to_torch_state_dict()
    assert 0 < len(arrays) < len(wanted)
    for name, value in arrays.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("helper", "words"), [
    ("local_train", r"the model has no 'base_model.*lora_A\.weight'; send arrays under"),
    ("own", r"do not fit the model: \S*lora_A\.default\.weight, which is .*; send arrays under"),
])  # fmt: skip
def test_names_of_peft_are_refused(helper: str, words: str, tmp_path: Path) -> None:
    """They are not the model's own, so P and m would never be found again."""
    peft = pytest.importorskip("peft")
    app = peft_app(in_double, helper, peft.get_peft_model_state_dict)
    strategy = prefed.flower.PreFed(client_lr=LR, retries=0, **STRATEGY)
    first = ArrayRecord(peft.get_peft_model_state_dict(in_double()))
    with pytest.raises((PrefedError, RunFailed), match=words):
        strategy.start(nodes(app, tmp_path), first, 1, timeout=30)


def nodes(app: ClientApp, tmp_path: Path) -> LoopbackGrid:
    found = {n + 5: (app, {p.PARTITION: n, "state-dir": str(tmp_path / str(n))}) for n in range(3)}
    return LoopbackGrid(found, lambda node, message, reply: reply)


@pytest.mark.parametrize("option", [{"freeze": ("a",)}, {"state_dtype": "bfloat16"}])
def test_what_an_app_of_ones_own_cannot_know(option: dict[str, Any]) -> None:
    with pytest.raises(PrefedError, match=f"{next(iter(option))}: .* prefed deploy"):
        prefed.flower.PreFed(client_lr=0.01, **option)
