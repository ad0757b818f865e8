"""Metrics of the test set, by name or of the user's own: F1, AUROC, top-5 accuracy, ...

A metric has the three methods of those of torchmetrics: `reset()`, `update(outputs, targets)` for
each batch, and `compute()`, which gives a number, a list of numbers, or a dict of such. Those that
only count hold counts; AUROC and plain functions need all outputs at once, which are held in memory
up to LIMIT numbers.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from prefed.core.errors import PrefedError, did_you_mean
from prefed.core.losses import Reading
from prefed.core.registry import Registry

LIMIT = 1 << 28
"""Outputs that a metric may hold, in numbers: a gigabyte of float32."""
IGNORED = -100
"""Targets with this label count for no metric, as for torch's losses."""


class Metric(Protocol):
    def reset(self) -> None: ...

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """A batch: what the model gave, and what was wanted."""

    def compute(self) -> Any:
        """Of all batches since `reset`."""


METRICS: Registry[Callable[..., Any]] = Registry("metric", "prefed.training")


def labelled(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N, classes) and labels (N), whatever shape they come in: classes are the second
    dimension of outputs; one output for each target is the logit of class 1 against class 0."""
    if outputs.numel() == targets.numel() == len(targets):
        logits = outputs.flatten()
        scores, labels = torch.stack([torch.zeros_like(logits), logits], 1), targets.flatten()
    elif outputs.dim() == targets.dim() + 1 and outputs.shape[1] > 1:
        scores, labels = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
    else:
        raise PrefedError(
            f"metrics: those with a name are for one label a target (accuracy, f1, auroc and "
            f"class_accuracy also for several of 0 or 1, with a logit each), but the outputs are "
            f"{list(outputs.shape)} and the targets {list(targets.shape)}; give a function "
            f"(outputs, targets) -> number"
        )
    counted = labels != IGNORED
    if labels.is_floating_point() and _are_numbers(labels[counted]):
        raise PrefedError(
            "metrics: those with a name count labels, and the targets are numbers of any size; "
            "give a function (outputs, targets) -> number"
        )
    return scores[counted], labels[counted].long()


def _are_numbers(targets: Tensor) -> bool:
    """Neither whole, as labels are, nor probabilities."""
    return bool(((targets < 0) | (targets > 1) & (targets != targets.round())).any())


def several(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits (N, L), and which labels hold, where each sample has several of 0 or 1."""
    if outputs.numel() != targets.numel() or outputs.numel() == len(targets):
        return None
    holds = targets.reshape(len(targets), -1)
    if not ((holds == 0) | (holds == 1)).all():
        return None
    return outputs.reshape(holds.shape), holds == 1


def _are_probabilities(outputs: Tensor, targets: Tensor) -> bool:
    """Targets of a cross-entropy with a number for each class, such as one-hot ones: they stand for
    the class with the highest."""
    same = outputs.shape == targets.shape and outputs.dim() > 1 and outputs.shape[1] > 1
    return same and targets.is_floating_point()


class Ratio:
    """A sum over samples, divided by their number."""

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        scores, labels = labelled(outputs, targets)
        self.sum += float(self.of(scores, labels).double().sum())
        self.count += len(labels)

    def of(self, scores: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def compute(self) -> float:
        return self.sum / self.count if self.count else math.nan


@METRICS.register("accuracy")
class Accuracy(Ratio):
    """The share of samples whose highest score is that of their label; of several labels, the share
    of right decisions."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if (found := several(outputs, targets)) is None:
            super().update(outputs, targets)
        else:
            logits, holds = found
            self.sum += int(((logits > 0) == holds).sum())
            self.count += holds.numel()

    def of(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores.argmax(1) == labels


class TopK(Ratio):
    """The share of samples whose label is among the k highest scores."""

    def __init__(self, k: int) -> None:
        self.k = k

    def of(self, scores: Tensor, labels: Tensor) -> Tensor:
        if not 1 <= self.k <= scores.shape[1]:
            raise PrefedError(
                f"metrics: top_{self.k} needs at least {self.k} classes and at least top_1, the "
                f"model has {scores.shape[1]}"
            )
        return (scores.topk(self.k).indices == labels[:, None]).any(1)


@METRICS.register("perplexity")
class Perplexity(Ratio):
    """The exponential of the mean cross-entropy."""

    def of(self, scores: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(scores, labels, reduction="none")

    def compute(self) -> float:
        mean = super().compute()
        return math.exp(mean) if mean < 700 else math.inf


class Counts:
    """For each class, or each of several labels, how often it was given, wanted, and both."""

    def reset(self) -> None:
        self.given = self.wanted = self.both = torch.zeros(0, dtype=torch.int64)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if (found := several(outputs, targets)) is not None:
            given, holds = found[0] > 0, found[1]
            counts = [kind.sum(0).cpu() for kind in (given, holds, given & holds)]
        else:
            scores, labels = labelled(outputs, targets)
            classes, best = scores.shape[1], scores.argmax(1)
            counts = [torch.bincount(kind, minlength=classes).cpu()
                      for kind in (best, labels, labels[best == labels])]  # fmt: skip
        if len(self.given):
            counts = [
                a + b for a, b in zip((self.given, self.wanted, self.both), counts, strict=True)
            ]
        self.given, self.wanted, self.both = counts


@METRICS.register("f1")
class F1(Counts):
    """The mean of the F1 of each class, or of each of several labels, that is given or wanted at
    least once (macro)."""

    def compute(self) -> float:
        total = self.given + self.wanted
        return float((2 * self.both[total > 0].double() / total[total > 0]).mean())


@METRICS.register("class_accuracy")
class ClassAccuracy(Counts):
    """The accuracy on the samples of each class, as a list; null for a class without samples. Of
    several labels, the share of the samples that have it for which it is given."""

    def compute(self) -> list[float | None]:
        pairs = zip(self.both.tolist(), self.wanted.tolist(), strict=True)
        return [both / wanted if wanted else None for both, wanted in pairs]


class OfAll:
    """A function of all outputs and all targets."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        self.function = function

    def reset(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.held = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.held += outputs.numel()
        if self.held > LIMIT:
            name = getattr(self.function, "__name__", "a function")
            raise PrefedError(
                f"metrics: {name} needs all outputs for the test set at once, and they are more "
                f"than {LIMIT:,} numbers; use a smaller test set or a metric that accumulates"
            )
        self.batches.append((outputs.cpu(), targets.cpu()))

    def compute(self) -> Any:
        batches, self.batches = self.batches, []
        outputs, targets = zip(*batches, strict=True)
        return self.function(torch.cat(outputs), torch.cat(targets))


@METRICS.register("auroc")
def auroc(outputs: Tensor, targets: Tensor) -> float:
    """The area under the ROC curve; of more than two classes, the mean over classes of each against
    the rest, by softmax probabilities; of several labels, the mean over these. Those that no sample
    has, or all have, are left out."""
    if (found := several(outputs, targets)) is not None:
        columns = list(zip(*(part.unbind(1) for part in found), strict=True))
    elif (both := labelled(outputs, targets))[0].shape[1] == 2:
        columns = [(both[0][:, 1] - both[0][:, 0], both[1] == 1)]
    else:
        probabilities, labels = both[0].double().softmax(1), both[1]
        columns = [(probabilities[:, c], labels == c) for c in range(probabilities.shape[1])]
    areas = [_area(score, mine) for score, mine in columns if mine.any() and not mine.all()]
    return sum(areas) / len(areas) if areas else math.nan


def _area(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive sample scores above a negative one; ties count half."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[place]
    ours, others = int(positive.sum()), int((~positive).sum())
    return (float(ranks[positive].sum()) - ours * (ours + 1) / 2) / (ours * others)


Given = str | Callable[..., Any]
"""A metric as users write it: a name, "module:attribute", a function of (outputs, targets), or an
object with the three methods."""


def by_name(given: Any) -> dict[str, Given]:
    """The metrics that a user names in a list, or in a table under names of their own."""
    if isinstance(given, str) or callable(given):
        given = [given]
    if not isinstance(given, Mapping | Iterable):
        raise ValueError("should be a list of names or functions, or a table of them")
    items = given.items() if isinstance(given, Mapping) else [(_name(g), g) for g in given]
    found: dict[str, Given] = {}
    for name, thing in items:
        if not re.fullmatch(r"[A-Za-z]\w*", name) or name == "loss":
            if "," in name:
                names = ", ".join(f'"{part.strip()}"' for part in name.split(","))
                raise ValueError(f"several names are a list: [{names}]")
            raise ValueError(f"{name!r} cannot be a key of records; write {{'name': metric}}")
        if name in found:
            raise ValueError(f"{name} is there twice; write {{'name': metric}}")
        make(thing)
        found[name] = thing
    return found


def _name(given: Any) -> str:
    if isinstance(given, str):
        return given.rpartition(":")[2]
    return str(getattr(given, "__name__", type(given).__name__))


def word(given: Given) -> str:
    """What a config on disk calls it."""
    return given if isinstance(given, str) else METRICS.name_of(given)


def make(given: Given) -> Metric:
    """The metric itself, apart from those of other runs."""
    thing: Any = given
    if isinstance(given, str):
        if top := re.fullmatch(r"top_(\d+)", given):
            return TopK(int(top[1]))
        try:
            thing = METRICS.get(given)
        except PrefedError as error:
            known = [*METRICS.names(), "top_5"]
            text = (
                str(error)
                if ":" in given
                else f"unknown metric {given!r}" + did_you_mean(given, known)
            )
            raise ValueError(text) from None
    if isinstance(thing, type):
        thing = thing()
    if all(callable(getattr(thing, method, None)) for method in ("reset", "update", "compute")):
        return copy.deepcopy(thing)  # type: ignore[no-any-return]
    if not callable(thing):
        raise ValueError(f"{given!r} is neither a name nor a function (outputs, targets) -> number")
    return OfAll(thing)


class Metrics:
    """The metrics of a run."""

    def __init__(
        self,
        given: Any,
        device: torch.device,
        ignored: int | None = None,
        reading: Reading = "several",
    ) -> None:
        """ignored   the label that does not count in the loss, nor in the metrics of this module
        reading   what several numbers in a target mean to the loss, even if all are 0 or 1
        """
        self.reading = reading
        named, self.ignored = by_name(given), IGNORED if ignored is None else ignored
        self.metrics = {name: make(thing) for name, thing in named.items()}
        self.ours = {n for n, thing in named.items() if isinstance(thing, str) and ":" not in thing}
        for metric in self.metrics.values():
            if callable(move := getattr(metric, "to", None)):
                move(device)

    def reset(self) -> None:
        for metric in self.metrics.values():
            metric.reset()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        counted = targets
        if self.ignored != IGNORED and not targets.is_floating_point():
            counted = targets.long().masked_fill(targets == self.ignored, IGNORED)
        if self.reading == "classes" and _are_probabilities(outputs, targets):
            counted = targets.argmax(1)
        elif self.ours and self._is_doubtful(outputs, targets):
            raise PrefedError(
                "metrics: those with a name are for one label a target, or several by their "
                'logits, which of the losses bce alone is known to train; set loss="bce", or give '
                "a function (outputs, targets) -> number"
            )
        for name, metric in self.metrics.items():
            self._call(name, metric.update, outputs, counted if name in self.ours else targets)

    def _is_doubtful(self, outputs: Tensor, targets: Tensor) -> bool:
        """Targets of 0 and 1 are several labels to some losses, and one to others. To a loss that
        nobody knows they may be one where each sample has exactly one."""
        if self.reading == "several" or (found := several(outputs, targets)) is None:
            return False
        return self.reading != "unknown" or bool((found[1].sum(1) == 1).all())

    def compute(self) -> dict[str, Any]:
        """For the record of a round: test_NAME, or test_NAME_KEY for each key of a dict."""
        found: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            value = self._call(name, metric.compute)
            several = isinstance(value, Mapping)
            for key, v in value.items() if several else [("", value)]:
                plain = self._call(name, _plain, name, v)
                found[f"test_{name}_{key}" if several else f"test_{name}"] = plain
        return found

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except PrefedError:
            raise
        except Exception as error:
            raise PrefedError(f"metrics: {name} failed: {type(error).__name__}: {error}") from error


def _plain(name: str, value: Any) -> float | list[float | None] | None:
    """A number, or a list of numbers."""
    if isinstance(value, Tensor) or hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and not any(isinstance(v, list | tuple) for v in value):
        return [None if v is None else float(v) for v in value]
    if isinstance(value, bool | int | float):
        return float(value)
    raise PrefedError(
        f"metrics: {name} should give a number, a list of numbers or a dict of them, "
        f"not {'a table' if isinstance(value, list | tuple) else type(value).__name__}"
    )
