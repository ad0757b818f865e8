"""What our strategy costs on Flower, against Flower's own FedAvg on the same app in the same run.

    python bench/flower.py rounds    round times on a SuperLink and SuperNodes here, in turn
    python bench/flower.py server    time and peak memory of the server's part alone, by cohort

The first starts real processes and takes minutes. In the second, replies are made when they are
pulled and pass through Flower's serialisation; each figure comes from a process of its own.
"""

from __future__ import annotations

import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPEATS = 8
SIZE = 2_000_000
COHORTS = (4, 16, 64)

SERVER = """
import time, torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
import prefed.flower
from stock.task import Net

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = ArrayRecord(Net().state_dict())
    kinds = {"flower": FedAvg, "prefed": prefed.flower.FedAvg}
    for number in range(%d):
        for name, kind in list(kinds.items())[:: 1 if number %% 2 else -1]:
            strategy = kind(fraction_evaluate=0.0)
            start = time.perf_counter()
            strategy.start(grid, arrays, num_rounds=1, train_config=ConfigRecord({"lr": 0.1}))
            print(f"MEASURED {name} {time.perf_counter() - start:.3f}", flush=True)
"""


def rounds() -> None:
    from prefed.flower.local_deployment import LocalFlower

    logs = Path("bench-flower-logs")
    shutil.rmtree(logs, ignore_errors=True)
    with LocalFlower(logs.absolute()) as flower:
        app = flower.home / "bench"
        shutil.copytree(ROOT / "examples" / "flower_stock", app)
        (app / "stock" / "server_app.py").write_text(SERVER % REPEATS)
        flower.start_superlink()
        for number in range(2):
            place = {"partition-id": number, "num-partitions": 2}
            flower.add_supernode(f"supernode-{number}", place)
        flower.submit(app, {}).wait()
    found = re.findall(r"MEASURED (\w+) ([\d.]+)", (logs / "run.log").read_text())
    times = {name: [float(s) for n, s in found if n == name] for name in ("flower", "prefed")}
    times = {name: values[1:] for name, values in times.items()}  # the first install the app
    for name, values in times.items():
        print(f"{name}: median {statistics.median(values):.2f} s a round, all {values}")
    # Neighbours are compared: from minute to minute a machine changes more than strategies differ.
    ratios = [p / f for p, f in zip(times["prefed"], times["flower"], strict=True)]
    print(f"prefed / flower: median of {len(ratios)} pairs {statistics.median(ratios):.3f}")


def server() -> None:
    print(f"{SIZE:,} float32 parameters, one round; seconds and peak memory of the server")
    for cohort in COHORTS:
        for name in ("flower", "prefed"):
            command = [sys.executable, __file__, "one", name, str(cohort)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{cohort:4d} clients  {name}  {done.stdout.splitlines()[-1]}", flush=True)


def one(name: str, cohort: int) -> None:
    import logging

    sys.path.insert(0, str(ROOT))
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg
    from tests.helpers.loopback import LoopbackGrid

    import prefed.flower

    logging.getLogger("flwr").setLevel(logging.ERROR)
    app, spent = ClientApp(), 0.0

    @app.train()
    def train(message: Message, context: Context) -> Message:
        nonlocal spent
        start = time.perf_counter()
        value = torch.randn(SIZE, generator=torch.Generator().manual_seed(context.node_id))
        metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord({"w": value}), "metrics": metrics})
        spent += time.perf_counter() - start
        return Message(content, reply_to=message)

    grid = LoopbackGrid({n + 1: (app, {}) for n in range(cohort)})
    strategy = (FedAvg if name == "flower" else prefed.flower.FedAvg)(fraction_evaluate=0.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    strategy.start(grid, ArrayRecord({"w": torch.zeros(SIZE)}), num_rounds=1)
    seconds = time.perf_counter() - start - spent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{seconds:.2f} s  {peak / 1024 / (SIZE * 4 / 2**20):.1f} models of memory")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["server"]:
            server()
        case ["one", name, cohort]:
            one(name, int(cohort))
        case _:
            rounds()
