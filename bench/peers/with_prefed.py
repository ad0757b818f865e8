import sys

import torch
from problem import BATCH, LR, PROBLEMS, STEPS, serve

import prefed
from prefed.training.run import Simulation
from prefed.training.settings import Settings

problem, engine = PROBLEMS[sys.argv[1]], sys.argv[2]
x, y = problem.data()
data = prefed.FederatedData(list(zip(torch.from_numpy(x), torch.from_numpy(y), strict=True)))
settings = Settings(
    rounds=1_000_000, clients_per_round=problem.per_round, local_steps=STEPS, batch_size=BATCH,
    batches="epochs", engine=engine, workers=1, device="cpu",
)  # fmt: skip
algorithm = prefed.FedAvg(client_lr=LR)
serve(Simulation(algorithm, problem.torch_model(), data, settings).run_round)
