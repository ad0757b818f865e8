"""For ClientApps of the user's own: a few lines that make them clients of any prefed algorithm.

    @app.train()
    def train(message, context):
        model, batches = Net(), load_batches(context)
        return prefed.flower.local_train(message, context, model, batches)

or, with a training loop of one's own around prefed.optim.Covariance, `load_state` before it and
`state_record` after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from prefed.algorithms import Algorithm
from prefed.core import batch
from prefed.core.batch import Inputs, to_inputs
from prefed.core.errors import PrefedError
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.core.losses import by_targets, make_loss, tensor_of
from prefed.data.samples import wide
from prefed.flower import protocol as p
from prefed.flower.kept_state import KeptState, state_directory
from prefed.flower.strategy_message import Asked
from prefed.flower.wire import pack
from prefed.optim import Covariance, new_mass
from prefed.rules import Covariance as CovarianceRule
from prefed.rules import Field, State
from prefed.training.admission import Spec
from prefed.training.block import Block
from prefed.training.block_state import first_kept
from prefed.training.round import local_update
from prefed.training.server_state import BUFFERS, PERSONAL, STEPS, Server, policy
from prefed.training.task import Loss

Batch = tuple[Inputs, Tensor]


def local_train(
    message: Message,
    context: Context,
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss | str | None = None,
    samples: int | None = None,
    algorithm: Algorithm | None = None,
) -> Message:
    """Train `model` from the message's arrays on the batches, one step each, by the algorithm of
    the server's strategy, and answer with all that it wants to know. The model is changed.

    loss        (output, y) -> one number, or the name of one, as "bce"; None is the one that
                prefed.simulate has for such y
    samples     the number for the server's weighting; by default all samples in the batches
    algorithm   for one that is not prefed's own, which a server cannot name
    """
    asked = Asked(message.content)
    algorithm = algorithm or asked.algorithm()
    loss = make_loss(loss) if isinstance(loss, str) else loss or by_targets
    steps = [_pair(of_step) for of_step in batches]
    if not steps:
        raise PrefedError("batches: there is none")
    count = samples if samples is not None else sum(len(y) for _, y in steps)
    metrics = MetricRecord({p.SAMPLES: count, p.STEPS: len(steps), p.TRAINED: asked.round})
    flat, size = asked.load(model, algorithm)
    order = asked.order(algorithm, model, flat.shared)
    shared = asked.shared(algorithm)
    held = {n: order.to_model(v).to(flat.weights.device) for n, v in shared.items()}
    if asked.question:
        answer = {"arrays": asked.arrays, p.STATE: asked.state, "metrics": metrics}
        return Message(RecordDict(answer), reply_to=message)
    with torch.no_grad(), torch.random.fork_rng():
        some = batch.moved(batch.part(steps[0][0], slice(0, 2)), flat.weights.device)
        flat.buffers.watch(partial(batch.call, model), some)
    asked.check_whole(flat)
    start = flat.weights.clone()
    server = Server(
        asked.round,
        start[:size],
        flat.read_buffers(),
        {},
        held,
        flat.shared,
        start.new_zeros((), dtype=torch.int64),
        start[size:],
    )
    keeps, began = _kept(context, asked, algorithm, flat)
    kept = {0: began} if began else {}

    update = local_update(algorithm, server, _Block(flat, steps, loss), kept)
    flat.buffers.check()
    if keeps:
        stays = {name: value[0] for name, value in update.kept.items()}
        _store(context).write(context.node_id, asked.round, stays)
    change = update.values["weights"][0].clone()
    flat.weights.copy_(start)[:size].add_(change)  # what stays here goes back as it came
    if algorithm.statistics != "average":
        flat.write_buffers(server.buffers, server.steps)
    asked_for = {n: value for n, value in model.state_dict().items() if n in asked.arrays}
    reply = RecordDict({"arrays": ArrayRecord(_plain(asked_for))})
    if shared:
        sent = {n: v for n, v in shared.items() if n in update.values}
        back = {n: order.to_server(update.values[n][0].cpu(), v) for n, v in sent.items()}
        reply[p.STATE] = pack(back)
    metrics[p.LOSS] = float(update.losses[0])
    reply["metrics"] = metrics
    return Message(reply, reply_to=message)


def load_model(message: Message, context: Context, model: nn.Module) -> None:
    """Load what this client would use: the message's arrays, with the parts of the model and the
    statistics that it keeps. For the evaluate function of an app whose train function ends in
    `local_train`."""
    asked = Asked(message.content)
    algorithm = asked.algorithm()
    training = model.training
    flat, size = asked.load(model, algorithm)
    _, kept = _kept(context, asked, algorithm, flat)
    if PERSONAL in kept:
        flat.weights[size:].copy_(kept[PERSONAL])
    if BUFFERS in kept:
        flat.write_buffers(kept[BUFFERS], kept[STEPS])
    model.train(training)


def _store(context: Context) -> KeptState:
    return KeptState(state_directory(dict(context.node_config)), f"{context.run_id:016x}")


def _kept(
    context: Context, asked: Asked, algorithm: Algorithm, flat: FlatModel
) -> tuple[State, State]:
    """What a client keeps before it has taken part, and what this one has kept."""
    first = first_kept(algorithm, flat)
    specs = {n: Spec(tuple(v.shape), v.dtype) for n, v in first.items()}
    found = _store(context).read(context.node_id, asked.after, specs) if first else None
    return first, {n: v.to(flat.weights.device) for n, v in (found or {}).items()}


def load_state(message: Message, model: nn.Module, optimiser: Covariance) -> None:
    """Give the optimiser the m and P that the server sent; what it did not send begins at zero. Its
    options have to be those of the strategy."""
    asked = Asked(message.content)
    held, algorithm = asked.vectors(), asked.algorithm()
    rule = algorithm.client_rule()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if held:
        asked.order(algorithm, model, Layout.of(trained))
    if held and isinstance(rule, CovarianceRule):
        _compare(rule, algorithm.weight_decay, optimiser)
    views = {n: asked.shape.layout.views(v) for n, v in held.items() if n in ("m", "P")}
    for name, parameter in trained:
        state: dict[str, Any] = optimiser.state[parameter]
        for field in ("m", "P"):
            state[field] = torch.zeros_like(parameter)
            if field in views:
                state[field].copy_(views[field][name])
        for mass in rule.masses() if isinstance(rule, CovarianceRule) else ():
            state[mass] = new_mass(parameter)
            if mass in held:
                state[mass].copy_(held[mass])


def _compare(rule: CovarianceRule, weight_decay: float, optimiser: Covariance) -> None:
    """The loop's optimiser steps as the strategy says."""
    wanted = {
        "betas": (rule.beta1, rule.beta2),
        "tau": rule.tau,
        "accumulate": rule.accumulate,
        "bias_correction": rule.bias_correction,
        "weight_decay": weight_decay,
    }
    for group in optimiser.param_groups:
        for option, value in wanted.items():
            own = tuple(group[option]) if option == "betas" else group[option]
            if own != value:
                raise PrefedError(
                    f"{option}: the optimiser has {own}, and the strategy of the server {value}; "
                    f"give both the same"
                )


def state_record(message: Message, model: nn.Module, optimiser: Covariance) -> ArrayRecord:
    """The optimiser's m and P for the reply, as reply["prefed-state"] = state_record(...)."""
    asked = Asked(message.content)
    algorithm, held = asked.algorithm(), asked.vectors()
    vectors = {n: v for n, v in held.items() if policy(algorithm, n).sent(asked.round)}
    for field, vector in vectors.items():
        if field not in ("m", "P"):  # one number for all
            first = next(p for p in model.parameters() if p.requires_grad)
            vector.copy_(optimiser.state[first][field])
            continue
        views = asked.shape.layout.views(vector)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                views[name].copy_(optimiser.state[parameter][field])
    return pack(vectors)


def tell_partition(app: ClientApp) -> None:
    """Let a ClientApp say its partition id when it is asked, for cohorts that can be repeated."""

    @app.query()
    def query(message: Message, context: Context) -> Message:
        number = context.node_config.get(p.PARTITION)
        if not isinstance(number, int):
            raise PrefedError(f"start this SuperNode with --node-config '{p.PARTITION}=0'")
        return Message(RecordDict({p.NODE: ConfigRecord({p.PARTITION: number})}), reply_to=message)


def _pair(found: Any) -> Batch:
    """x and y of a batch: a pair, or a dict with "labels", as loaders of Hugging Face have."""
    if isinstance(found, Mapping) and "labels" in found:
        x, y = {name: value for name, value in found.items() if name != "labels"}, found["labels"]
        return to_inputs("batches: x", x), wide(to_inputs("batches: y", y))
    if isinstance(found, tuple | list) and len(found) == 2:
        return to_inputs("batches: x", found[0]), wide(to_inputs("batches: y", found[1]))
    raise PrefedError(
        f'batches: should be pairs (x, y) or dicts with "labels", not {type(found).__name__}; from '
        f'other dicts make pairs: [(batch["img"], batch["label"]) for batch in trainloader]'
    )


class _Block(Block):
    """One client, on batches that the user made."""

    def __init__(self, flat: FlatModel, batches: Sequence[Batch], loss: Loss) -> None:
        self.clients, self.steps = [0], [len(batches)]
        self.layout = flat.layout
        self.flat, self.batches, self.loss = flat, batches, loss
        self.weights, self.gradient = flat.weights[None], flat.gradient[None]

    def differentiate(self, k: int) -> Tensor:
        x, y = (batch.moved(part, self.weights.device) for part in self.batches[k])
        self.flat.gradient.zero_()
        loss = self.loss(tensor_of(batch.call(self.flat.module, x)), y)
        loss.backward()
        return loss.detach()[None]

    def state(self, name: str, field: Field) -> Tensor:
        return field.new(self.weights, 1)

    def read_buffers(self) -> Tensor:
        return self.flat.read_buffers()[None]

    def write_buffers(self, buffers: Tensor, steps: Tensor) -> None:
        self.flat.write_buffers(buffers[0], steps[0])

    def cohort_mean(self, rows: Tensor) -> Tensor:
        raise PrefedError("clients cannot meet in every step on Flower")


def _plain(tensors: dict[str, Tensor]) -> Any:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
