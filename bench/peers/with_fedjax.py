import sys

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
from problem import BATCH, LR, PROBLEMS, STEPS, serve

problem = PROBLEMS[sys.argv[1]]
x, y = problem.data()
names = [b"%06d" % c for c in range(problem.clients)]
clients = {n: {"x": x[c], "y": y[c]} for c, n in enumerate(names)}
data = fedjax.InMemoryFederatedData(clients)


def forward(batch):
    h = batch["x"]
    if h.ndim > 2:
        h = jnp.moveaxis(h, 1, -1)
        for channels in (32, 64):
            h = jax.nn.relu(hk.Conv2D(channels, 3)(h))
            h = hk.MaxPool(2, 2, "VALID")(h)
        h = h.reshape(h.shape[0], -1)
    h = jax.nn.relu(hk.Linear(128)(h))
    return hk.Linear(problem.classes)(h)


def loss(batch, logits):
    chosen = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(chosen, batch["y"][:, None], axis=1)[:, 0]


model = fedjax.create_model_from_haiku(
    transformed_forward_pass=hk.transform(forward),
    sample_batch={"x": x[0][:BATCH], "y": y[0][:BATCH]},
    train_loss=loss,
    eval_metrics={},
)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    fedjax.model_grad(model),
    fedjax.optimizers.sgd(LR),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=None, num_steps=STEPS),
)
sampler = fedjax.client_samplers.UniformGetClientSampler(data, problem.per_round, seed=0)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))


def run_round():
    global state
    state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)


serve(run_round)
