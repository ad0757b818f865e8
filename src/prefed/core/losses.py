"""Losses by name, and the one that targets stand for where none is named.

A loss is a function (output, y, **options) -> one number. A config names it: `loss = "bce"`,
`loss = {name = "cross_entropy", label_smoothing = 0.1}` or `loss = "module:function"`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from prefed.core.batch import Ragged
from prefed.core.errors import PrefedError
from prefed.core.registry import Registry

LOSSES: Registry[Callable[..., Tensor]] = Registry("loss", "prefed.core")


def make_loss(name: str, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of that name with these options."""
    return partial(LOSSES.get(name), **options) if options else LOSSES.get(name)


def given_to(loss: Callable[..., Tensor]) -> list[str]:
    """What a loss calls its first two parameters: all others are options."""
    return list(inspect.signature(loss).parameters)[:2]


def are_labels(y: Tensor | Ragged) -> bool:
    """Whole numbers stand for classes; but uint8, which images have, for pixels."""
    return not y.dtype.is_floating_point and y.dtype != torch.uint8


def by_targets(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy for labels, squared error for numbers and pixels."""
    return cross_entropy(output, y) if are_labels(y) else squared_error(output, y)


@LOSSES.register("cross_entropy")
def cross_entropy(
    output: Tensor,
    y: Tensor,
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Cross-entropy of scores (N, classes, ...) and labels (N, ...).

    label_smoothing  this share of each target is spread evenly over all classes
    ignore_index     targets with this label count neither in the loss nor in the accuracy; where
                     all of a batch are such, the loss is 0
    """
    smooth = nn.functional.cross_entropy
    if ignore_index is None:
        return smooth(output, y, label_smoothing=label_smoothing)
    total = smooth(
        output, y, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
    )
    return total / (y != ignore_index).sum().clamp(min=1)


@LOSSES.register("mse")
def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """The mean over samples and their numbers, in whatever shape these are. Pixels, which are
    uint8, are compared as value / 255."""
    given, numbers = _side_by_side("squared error", output, y)
    return mse_loss(given, numbers / 255 if y.dtype == torch.uint8 else numbers)


@LOSSES.register("bce")
def binary_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Yes or no: a logit for each y of 0 or 1 (or between), one for each sample or, for targets
    with several labels, as many as y has."""
    return binary_cross_entropy_with_logits(*_side_by_side("binary cross-entropy", output, y))


def _side_by_side(what: str, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    given, wanted = output.reshape(output.shape[0], -1), y.reshape(y.shape[0], -1)
    if given.shape != wanted.shape:
        pixels = "; uint8 y are pixels: for labels convert it with y.long()"
        raise PrefedError(
            f"model, loss: {what} needs as many outputs as targets, but {given.shape[0]} "
            f"samples have {given.shape[1]} outputs each and {wanted.shape[0]} targets "
            f"have {wanted.shape[1]} numbers each{pixels if y.dtype == torch.uint8 else ''}"
        )
    return given, wanted.to(given.dtype)


# What is known of a loss: of one that is not ours, nothing.

WITH_CLASSES = (by_targets, cross_entropy, nn.functional.cross_entropy)
"""Labels are the numbers of outputs, which lie in dimension 1."""
OF_NUMBERS = (squared_error, binary_cross_entropy)
"""y holds as many numbers as there are outputs."""
OURS = (*WITH_CLASSES, *OF_NUMBERS)


def tensor_of(output: Any) -> Tensor:
    """What losses are of, from what a model gives: a tensor as it is, the logits of a Hugging Face
    model. Those of sequences (N, T, C) get their classes where cross-entropy wants them."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", None) if logits is None else logits
    if not isinstance(logits, Tensor):
        raise PrefedError(
            f"model: its output should be a tensor, or have `logits` as those of Hugging Face "
            f"models do, but is a {type(output).__name__}; wrap it in a module that returns one"
        )
    return logits.transpose(1, 2) if logits.dim() == 3 else logits


def is_one_of(loss: Callable[..., Tensor], known: tuple[object, ...]) -> bool:
    return (loss.func if isinstance(loss, partial) else loss) in known


def options_of_cross_entropy(loss: Callable[..., Tensor]) -> Mapping[str, Any] | None:
    """The options of a cross-entropy: ours, torch's function or torch's module; None for any other
    loss."""
    if isinstance(loss, nn.CrossEntropyLoss):
        as_it_is = type(loss).forward is nn.CrossEntropyLoss.forward
        return vars(loss) | {"weight": loss.weight} if as_it_is else None
    if not is_one_of(loss, (cross_entropy, nn.functional.cross_entropy)):
        return None
    given = loss.keywords if isinstance(loss, partial) else {}
    return given if is_one_of(loss, (cross_entropy,)) else {"ignore_index": -100} | given


def ignored_label(loss: Callable[..., Tensor]) -> int | None:
    """The label that stands for no class."""
    options = options_of_cross_entropy(loss)
    if options is None:
        options = loss.keywords if isinstance(loss, partial) else {}
    return options.get("ignore_index")


def is_sum(loss: Callable[..., Tensor]) -> bool:
    """Over the targets of a batch; losses are means otherwise."""
    options = loss.keywords if isinstance(loss, partial) else getattr(loss, "__dict__", {})
    return bool(options.get("reduction") == "sum")


def counted(loss: Callable[..., Tensor], y: Tensor) -> float | None:
    """What the mean over these targets is divided by: how many of them count, or the weights of
    their classes; None if each counts as one."""
    options, ignored = options_of_cross_entropy(loss) or {}, ignored_label(loss)
    if options and y.is_floating_point():  # probabilities of classes
        return None
    weight = options.get("weight")
    if weight is None:
        return None if ignored is None else int((y != ignored).sum())
    labels = (y if ignored is None else y[y != ignored]).long()
    return float(weight.detach().to(y.device, torch.float64)[labels].sum())


def shares(loss: Callable[..., Tensor], parts: Sequence[Tensor]) -> list[float]:
    """What the loss of each part of a batch is taken times, so that they add up to the loss of the
    batch; from the parts of its targets."""
    if is_sum(loss):
        return [1.0] * len(parts)
    counts = [len(y) if (count := counted(loss, y)) is None else count for y in parts]
    return [count / (sum(counts) or 1) for count in counts]


Reading = Literal["classes", "several", "numbers", "unknown"]
"""What a target means that has as many numbers as there are outputs: probabilities of classes,
several labels of 0 or 1, numbers, or what cannot be known."""


def reading(loss: Callable[..., Tensor]) -> Reading:
    if options_of_cross_entropy(loss) is not None:
        return "classes"
    if is_one_of(loss, (by_targets, squared_error)):
        return "numbers"
    of_torch = isinstance(loss, nn.BCEWithLogitsLoss)
    known = of_torch or is_one_of(loss, (binary_cross_entropy, binary_cross_entropy_with_logits))
    return "several" if known else "unknown"


def count_correct(loss: Callable[..., Tensor], output: Tensor, y: Tensor) -> tuple[int, int] | None:
    """How many targets the output is right about, and of how many; None if targets are no labels,
    or if it cannot be known: an output (N, T, C) of a loss of the user's fits y (N, T) in two ways
    if T is C. A label below 0 is of no class."""
    if is_one_of(loss, (binary_cross_entropy,)):
        decided, wanted = _side_by_side("accuracy", output > 0, y)
        return int((decided == wanted).sum()), wanted.numel()
    if not are_labels(y) or is_one_of(loss, (squared_error,)) or output.dim() != y.dim() + 1:
        return None
    last = output.dim() - 1
    first = is_one_of(loss, WITH_CLASSES) or options_of_cross_entropy(loss) is not None
    dims = {1} if first else {1, last}
    fits = [d for d in dims if (*output.shape[:d], *output.shape[d + 1 :]) == y.shape]
    if len(fits) != 1 or output.shape[fits[0]] < 2:
        return None
    counted = (y >= 0) & (y != ignored) if (ignored := ignored_label(loss)) is not None else y >= 0
    right = (output.argmax(fits[0]) == y) & counted
    return int(right.sum()), int(counted.sum())
