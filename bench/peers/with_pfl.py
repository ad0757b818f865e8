import os
import sys
import types

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module as ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from problem import BATCH, LR, PROBLEMS, Turns

problem, channels_last = PROBLEMS[sys.argv[1]], "channels_last" in sys.argv
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    torch.set_num_threads(1)
np.random.seed(0)
x, y = (torch.from_numpy(values) for values in problem.data())
model = problem.torch_model()
if channels_last:
    model = model.to(memory_format=torch.channels_last)


def loss(self, x, y, eval=False):
    return torch.nn.functional.cross_entropy(self(x), y)


model.loss = types.MethodType(loss, model)
model.metrics = types.MethodType(lambda self, *data, **_: {}, model)
sampler = get_user_sampler("random", range(problem.clients))
users = FederatedDataset(lambda user: Dataset([x[user], y[user]]), sampler)
turns = Turns()


class Turn(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        more = ops().distributed.global_rank != 0 or turns()
        if torch.distributed.is_initialized():  # or the other rank would go on while others run
            torch.distributed.barrier()
        return not more, Metrics()


FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=1_000_000,
        evaluation_frequency=1_000_000,
        train_cohort_size=problem.per_round,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=users, val_data=users),
    model=PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)),
    model_train_params=NNTrainHyperParams(
        local_num_epochs=problem.epochs, local_learning_rate=LR, local_batch_size=BATCH
    ),
    callbacks=[Turn()],
)
