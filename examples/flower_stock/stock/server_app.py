"""Flower's template but for the strategy: its import and its constructor."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

import prefed.flower
from stock.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_train: float = context.run_config["fraction-train"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["lr"]

    torch.manual_seed(0)
    global_model = Net()
    arrays = ArrayRecord(global_model.state_dict())

    # In place of flwr.serverapp.strategy.FedAvg(fraction_train=fraction_train):
    if context.run_config["strategy"] == "PreFedOpt":
        strategy = prefed.flower.PreFedOpt(
            server_lr=0.003, per_step=False, fraction_train=fraction_train
        )
    else:
        strategy = prefed.flower.FedAdam(server_lr=0.003, beta1=0.0, fraction_train=fraction_train)

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
    )

    save_file(result.arrays.to_torch_state_dict(), context.run_config["model-file"])
    for number, metrics in result.evaluate_metrics_clientapp.items():
        print(f"round {number}: accuracy {metrics['eval_acc']:.3f}")
