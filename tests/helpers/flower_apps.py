"""ClientApps for the drop-in strategies, on a loopback grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch import nn

import prefed
import prefed.flower
from prefed.flower import protocol as p
from tests.helpers.loopback import LoopbackGrid, Tamper
from tests.helpers.problems import arrays, tiny_model

STEPS, LR = 3, 0.1


Make = Callable[[], nn.Module]


def tiny_app(
    samples: list[tuple[Any, Any]],
    helper: str = "plain",
    metrics: dict[str, Any] | None = None,
    make: Make = tiny_model,
    **options: Any,
) -> ClientApp:
    """Full-batch steps on the samples of a partition. metrics are added to the plain reply, options
    given to the optimiser of the helper "covariance"."""
    app = ClientApp()
    prefed.flower.tell_partition(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = samples[int(context.node_config[p.PARTITION])]
        batch = (torch.tensor(x), torch.tensor(y))
        model, content = make(), cast(Any, message.content)
        if helper == "local_train":
            reply: Message = prefed.flower.local_train(
                message, context, model, [batch] * STEPS, samples=len(x)
            )
            return reply
        model.load_state_dict(content["arrays"].to_torch_state_dict())
        optimiser: Any = torch.optim.SGD(model.parameters(), LR)
        if helper == "covariance":
            optimiser = prefed.optim.Covariance(model.parameters(), LR, **options)
            prefed.flower.load_state(message, model, optimiser)
        for _ in range(STEPS):
            optimiser.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimiser.step()
        answer = RecordDict({"arrays": ArrayRecord(model.state_dict())})
        if helper == "covariance":
            answer[p.STATE] = prefed.flower.state_record(message, model, optimiser)
        answer["metrics"] = MetricRecord({"num-examples": len(x), **(metrics or {})})
        return Message(answer, reply_to=message)

    return app


def tiny_grid(app: ClientApp, tmp_path: Path, tamper: Tamper | None = None) -> LoopbackGrid:
    nodes = {
        (37 * n + 5) % 11: (app, {p.PARTITION: n, "state-dir": str(tmp_path / str(n))})
        for n in range(len(arrays()))
    }
    return LoopbackGrid(nodes, tamper or (lambda node, message, reply: reply))


def run(strategy: Any, grid: LoopbackGrid, rounds: int = 4, make: Make = tiny_model) -> Result:
    first = ArrayRecord(make().state_dict())
    return strategy.start(grid, first, rounds, timeout=5)  # type: ignore[no-any-return]


def flat(record: ArrayRecord) -> torch.Tensor:
    return torch.cat([v.reshape(-1) for v in record.to_torch_state_dict().values()])


OPTIONS = {"fraction_evaluate": 0.0, "local_steps": STEPS, "ask_partitions": True}
