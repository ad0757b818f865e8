"""The losses of many copies of a model at once, each with its own weights and batch."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.losses import WITH_CLASSES, are_labels, by_targets, squared_error, tensor_of
from prefed.rules import State
from prefed.training.engines import linear_chains
from prefed.training.keyed_dropout import KeyedDropout
from prefed.training.task import Loss, Task

Losses = Callable[[State, State, Inputs, Any, Tensor], Tensor]
"""(parameters, buffers, x, y, keys of dropout), each with a row a client -> losses (C)."""
Each = Callable[[Losses], Losses]
"""Makes losses of many clients of that of one: vmap, or `one_by_one`."""


def losses_of(task: Task, module: nn.Module | None = None, each: Each = vmap) -> Losses:
    """The fastest way there is for this model: batched products for a chain of linear layers,
    vmap for any other model.

    module   another instance than the task's
    """
    module = module or task.flat.module
    if (forward := linear_chains.plan(module)) is None:
        return by_vmap(task, module=module, each=each)
    prepare = transform_of_blocks(task)
    loss: Loss = vmap(task.loss)
    if task.loss in WITH_CLASSES:
        loss = _by_targets if task.loss is by_targets else _cross_entropy
    return lambda weights, buffers, x, y, keys: loss(forward(weights, prepare(x), keys), y)


def gradients_of(task: Task) -> linear_chains.Differentiate | None:
    """Losses and gradients without autograd, for the models and the loss that have such a way."""
    if task.loss not in WITH_CLASSES:
        return None
    if (differentiate := linear_chains.plan_gradient(task.flat.module)) is None:
        return None
    prepare = transform_of_blocks(task)
    return lambda weights, into, x, y: differentiate(weights, into, prepare(x), y)


def transform_of_blocks(task: Task) -> Callable[[Inputs], Inputs]:
    """The transform of the data, for a batch of each client of a block."""
    if (transform := task.transform) is None:
        return lambda x: x
    own = vars(type(transform))  # what a class inherits is of another transform
    return transform if own.get("takes_blocks", False) else vmap(transform)


def by_vmap(
    task: Task,
    loss: Callable[[Tensor, Any], Tensor] | None = None,
    module: nn.Module | None = None,
    each: Each = vmap,
) -> Losses:
    """loss   another than that of the task, of the output and of what stands in the place of y"""
    one, transform = one_client(task, module or task.flat.module, loss, True), task.transform

    def transformed(weights: State, buffers: State, x: Inputs, y: Any, key: Tensor) -> Tensor:
        return one(weights, buffers, transform(x) if transform else x, y, key)

    return each(transformed)


def one_by_one(loss: Losses) -> Losses:
    """In place of vmap, for models that it cannot run."""

    def losses(*given: Any) -> Tensor:
        rows = range(len(given[-1]))
        return torch.stack(
            [loss(*(batch.mapped(itemgetter(row), g) for g in given)) for row in rows]
        )

    return losses


def one_client(
    task: Task,
    module: nn.Module,
    loss: Callable[[Tensor, Any], Tensor] | None = None,
    plain: bool = False,
) -> Losses:
    """The same for one client, without rows: its loss on a batch that is what the module takes.

    module   the task's, or another instance of it
    plain    attention is computed in plain lines, as vmap wants it
    """
    caught = task.randomness == "dropout" or (plain and task.attends)
    others = other_names(module)

    def one(weights: State, buffers: State, x: Inputs, y: Any, key: Tensor) -> Tensor:
        values = {**weights, **buffers}
        values |= {name: values[first] for name, first in others.items() if first in values}
        model = partial(_functional, module, values)
        with KeyedDropout(key, plain) if caught else nullcontext():
            output = batch.call(model, x)
        return (loss or task.loss)(tensor_of(output), y)

    return one


def other_names(module: nn.Module) -> dict[str, str]:
    """Of tied parameters and buffers, each with its first. A layer that stands in several places
    has but one name here: torch, which would tie names by itself, does not put back what it had."""
    first: dict[int, str] = {}
    found = {}
    for owner, layer in module.named_modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            path = f"{owner}.{name}" if owner else name
            if tensor is not None and first.setdefault(id(tensor), path) != path:
                found[path] = first[id(tensor)]
    return found


def _functional(module: nn.Module, weights: State, *given: Tensor, **named: Tensor) -> Any:
    return functional_call(module, weights, given, named, tie_weights=False)


def _by_targets(output: Tensor, y: Tensor) -> Tensor:
    return (_cross_entropy if are_labels(y) else vmap(squared_error))(output, y)


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(output.flatten(0, 1), y.flatten(0, 1), reduction="none")
    return each.view(y.shape).flatten(1).mean(1)
