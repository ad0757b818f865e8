"""Warm-up by local steps, which goes on within a round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core.errors import PrefedError
from prefed.core.schedule import at
from prefed.experiments.config import load
from prefed.rules import SGD, State
from prefed.rules.wrapped import Rising

STEPS, LR, RISE = 4, 0.5, 6


def data() -> prefed.FederatedData:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 5, generator=draw, dtype=torch.float64)
    return prefed.FederatedData(list(zip(x, (x.sum(2) > 0).long(), strict=True)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 2).double()


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_it_trains_as_a_loop_by_hand(engine: str, decay: float) -> None:
    rate = prefed.schedule.warmup(LR, steps=RISE, local_steps=STEPS)
    algorithm = prefed.FedAvg(client_lr=rate, decoupled_weight_decay=decay)
    found = prefed.simulate(
        algorithm, model(), data(), rounds=3, local_steps=STEPS, batch_size=None, engine=engine
    )
    server = model()
    for round in range(3):
        ended = []
        for client in range(3):
            own = model()
            own.load_state_dict(server.state_dict())
            for k in range(STEPS):
                lr = LR * min(1.0, (round * STEPS + k + 1) / (RISE + 1))
                own.zero_grad()
                x, y = data().client(client).all()
                nn.functional.cross_entropy(own(x), y).backward()
                with torch.no_grad():
                    for p in own.parameters():
                        assert p.grad is not None
                        p.sub_(lr * decay * p)
                        p.sub_(lr * p.grad)
            ended.append(own.state_dict())
        server.load_state_dict({n: torch.stack([e[n] for e in ended]).mean(0) for n in ended[0]})
    wanted = torch.cat([p.detach().reshape(-1) for p in server.parameters()])
    torch.testing.assert_close(found.weights, wanted, rtol=0, atol=1e-10)
    means = [sum(min(1, (r * STEPS + k + 1) / 7) for k in range(STEPS)) / STEPS for r in range(3)]
    assert [r["client_lr"] for r in found.history] == pytest.approx([LR * m for m in means])


def test_what_follows_begins_when_it_has_risen() -> None:
    then = prefed.schedule.step(1.0, every=2, decay=0.5)
    rate = prefed.schedule.warmup(then, steps=5, local_steps=4)
    assert [at(rate, r) for r in range(2, 7)] == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert rate.at_step(1, 1) == 1.0
    assert rate.at_step(0, 0) == pytest.approx(1 / 6)


def test_in_a_config() -> None:
    text = 'client_lr={schedule = "warmup", steps = 30, then = 0.1}'
    config = load("digits-iid", ["algorithm=fedavg", text])
    assert config.algorithm.options["client_lr"]["local_steps"] == config.local_steps
    assert load(config.to_dict()) == config
    old = {"schedule": "warmup", "rounds": 3, "then": 0.1}
    written: Any = prefed.FedAvg(client_lr=old).model_dump()["client_lr"]
    assert written == old  # as in runs from before there was a choice


@pytest.mark.parametrize("given", [{}, {"rounds": 2, "steps": 3}, {"steps": 3}])
def test_what_is_wrong_is_said(given: dict[str, int]) -> None:
    with pytest.raises(PrefedError, match="client_lr"):
        prefed.FedAvg(client_lr={"schedule": "warmup", "then": 0.1, **given})


def test_a_client_that_stops_early_ends_with_the_mean_rate_of_its_own_steps() -> None:
    told: list[float] = []

    class Ends(SGD):
        def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
            told.append(lr)

    rising = Rising(Ends(), lambda k: k + 1.0)
    rising.finish(torch.zeros(2), {}, 0.1, 3)
    assert told == [pytest.approx(0.1 * 2)]
