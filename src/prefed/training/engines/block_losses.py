"""The losses of many copies of a model at once, each with its own weights and batch."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

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


def losses_of(task: Task) -> Losses:
    """The fastest way there is for this model: batched products for a chain of linear layers,
    vmap for any other model."""
    if (forward := linear_chains.plan(task.flat.module)) is None:
        return by_vmap(task)
    prepare = vmap(task.transform) if task.transform else (lambda x: x)
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
    prepare = vmap(task.transform) if task.transform else (lambda x: x)
    return lambda weights, into, x, y: differentiate(weights, into, prepare(x), y)


def by_vmap(task: Task, loss: Callable[[Tensor, Any], Tensor] | None = None) -> Losses:
    """loss   another than that of the task, of the output and of what stands in the place of y"""
    caught = task.randomness == "dropout" or task.attends

    def one(weights: State, buffers: State, x: Inputs, y: Any, key: Tensor) -> Tensor:
        if task.transform:
            x = task.transform(x)
        model = partial(_functional, task.flat.module, {**weights, **buffers})
        with KeyedDropout(key, plain=True) if caught else nullcontext():
            output = batch.call(model, x)
        return (loss or task.loss)(tensor_of(output), y)

    mapped: Losses = vmap(one)
    return mapped


def _functional(module: nn.Module, weights: State, *given: Tensor, **named: Tensor) -> Any:
    return functional_call(module, weights, given, named)


def _by_targets(output: Tensor, y: Tensor) -> Tensor:
    return (_cross_entropy if are_labels(y) else vmap(squared_error))(output, y)


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(output.flatten(0, 1), y.flatten(0, 1), reduction="none")
    return each.view(y.shape).flatten(1).mean(1)
