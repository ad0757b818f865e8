import os
import sys

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from problem import BATCH, LR, PROBLEMS, Turns

problem = PROBLEMS[sys.argv[1]]
client_app, server_app = ClientApp(), ServerApp()
cache = {}


@client_app.train()
def train(msg, context):
    if not cache:
        cache["data"] = tuple(torch.from_numpy(values) for values in problem.data())
    x, y = (values[context.node_config["partition-id"]] for values in cache["data"])
    model = problem.torch_model()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(problem.epochs):
        order = torch.randperm(len(x)).split(BATCH)
        for batch in order:
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    metrics = MetricRecord({"num-examples": len(x)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@server_app.main()
def main(grid, context):
    turns = Turns()

    def after_round(number, arrays):
        if number > 0 and not turns():
            os._exit(0)

    strategy = FedAvg(fraction_train=problem.per_round / problem.clients, fraction_evaluate=0.0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(problem.torch_model().state_dict()),
        num_rounds=1_000_000,
        evaluate_fn=after_round,
    )


run_simulation(
    server_app,
    client_app,
    num_supernodes=problem.clients,
    backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
)
