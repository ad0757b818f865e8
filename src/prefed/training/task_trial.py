"""The model, the loss and the data, tried on each other before anything is trained."""

import logging
import math
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor, nn

from prefed.core import batch, draws
from prefed.core.batch import Inputs, leaves
from prefed.core.errors import PrefedError
from prefed.core.losses import (
    OURS,
    WITH_CLASSES,
    are_labels,
    binary_cross_entropy,
    ignored_label,
    is_one_of,
    options_of_cross_entropy,
    shares,
    tensor_of,
)
from prefed.core.memory import all_finite
from prefed.data import FederatedData
from prefed.data.federated import Transform, of_other_shapes
from prefed.data.samples import Samples
from prefed.training.keyed_dropout import KeyedDropout, keys
from prefed.training.pooling import FastPooling
from prefed.training.task import Task

log = logging.getLogger("prefed")

COMPARED = 16
"""Samples whose loss is compared with that of their parts."""
KNOWN = 'loss="cross_entropy" or torch.nn.CrossEntropyLoss with ignore_index'
FIRST = ": cross-entropy wants them in dimension 1, as output.transpose(1, -1) has them"


def try_out(task: Task, data: FederatedData) -> None:
    """Try the model, the loss and the data on each other before anything is trained."""
    if not all_finite(task.flat.weights):
        raise PrefedError("model: some of its weights are not finite (NaN or infinity)")
    x, y = data.client(0).take(torch.arange(min(2, len(data.client(0)))))
    if len(y) == 0:
        raise PrefedError("clients[0]: it has no samples")
    x, y = batch.padded(x), batch.padded(y)
    own = batch.mapped(Tensor.clone, x)
    fed = _transformed(task, own)
    _try_augment(data, x)
    dtype = task.flat.weights.dtype
    for given in {leaf.dtype for leaf in leaves(fed)} - {dtype}:
        if given.is_floating_point:
            raise PrefedError(
                f"clients, model: mixed dtypes, x is {given} and the model {dtype}; "
                f"convert one of them"
            )
    training = task.flat.module.training
    try:
        with FastPooling() as pooling:
            output = tensor_of(
                batch.call(task.flat.module.eval(), batch.moved(fed, task.device))
            ).detach()
        if any(leaf._version for leaf in leaves(own)):  # data are read again, and must not change
            task.transform = _of_copies(task.transform)
        task.numbers_out = max(1, output.numel() // len(y))
        task.pooled = pooling.largest // len(y) if task.precision == "float32" else 0
        _check_targets(task, data, output, y)
        _check_classes(task, fed, output, y)
        with torch.no_grad():
            loss = task.loss(output, y.to(task.device))
            task.randomness = _find_randomness(task, x)
        if not isinstance(loss, Tensor) or loss.dim():
            shape = f", not {list(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise PrefedError(f"loss: should return one number for a batch, as loss.mean(){shape}")
        _check_gradient(task, x, y)
        _check_other_shapes(task, data)
        _check_parts(task, data)
        if data.test is not None:
            task.evaluate(*data.test.take(torch.arange(min(2, len(data.test)))))
    except PrefedError:
        raise
    except Exception as error:
        hint = _hint(task, fed, y)
        raise PrefedError(f"model, loss: they do not fit the data: {error}{hint}") from error
    finally:
        task.flat.module.train(training)


def _of_copies(transform: Transform | None) -> Transform:
    def copied(x: Inputs) -> Inputs:
        own = batch.mapped(Tensor.clone, x)
        return transform(own) if transform else own

    return copied


def _transformed(task: Task, x: Inputs) -> Inputs:
    fed = task.transform(x) if task.transform else x
    if not _are_tensors(fed):
        raise PrefedError(f"transform: should return tensors, not {type(fed).__name__}")
    return fed


def _are_tensors(x: object) -> bool:
    values = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x]
    return all(isinstance(value, Tensor) for value in values)


def _try_augment(data: FederatedData, x: Inputs) -> None:
    if data.augment is None:
        return
    given = batch.mapped(Tensor.clone, x)
    try:
        found = data.augment(given, draws.generator(0, "trial"))
    except Exception as error:
        raise PrefedError(
            f"augment: it is called with a batch of x and a numpy.random.Generator, and fails: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not _are_tensors(found) or batch.size(found) != batch.size(x):
        raise PrefedError("augment: should return as many samples as it was given, as tensors")


def _check_other_shapes(task: Task, data: FederatedData) -> None:
    for where, samples in of_other_shapes(data):
        x = samples.take(torch.arange(min(2, len(samples))))[0]
        try:
            with torch.no_grad():
                task.flat.module.eval()
                task.forward(x)
        except Exception as error:
            shapes = " and ".join(str(tuple(leaf.shape[1:])) for leaf in leaves(x))
            raise PrefedError(
                f"{where}: its samples are of shape {shapes}, unlike those of clients[0]; "
                f"model, loss: they do not fit the data there: {error}"
            ) from error


def _check_targets(task: Task, data: FederatedData, output: Tensor, y: Tensor) -> None:
    """What a loss of ours says of targets; a loss of the user's own knows its targets best."""
    if y.dtype == torch.uint8 and options_of_cross_entropy(task.loss) is not None:
        raise PrefedError(
            "clients, loss: y is torch.uint8, which stands for pixels, and cross-entropy takes "
            "labels; convert it with y.long()"
        )
    if not is_one_of(task.loss, OURS):
        data.check(None, targets=False)
        return
    classes = output.shape[1] if output.dim() > 1 else None
    with_classes = is_one_of(task.loss, WITH_CLASSES)
    largest = 1.0 if is_one_of(task.loss, (binary_cross_entropy,)) else None
    data.check(classes if with_classes else None, ignored_label(task.loss), largest=largest)


def _check_classes(task: Task, x: Inputs, output: Tensor, y: Tensor) -> None:
    """An output (N, T, C) is no error where T is C, but trains on nonsense: see whether it gets
    shorter with its input where the classes should be."""
    square = output.dim() == 3 and output.shape[1] == output.shape[2] == y.shape[-1] > 1
    if not square or not is_one_of(task.loss, WITH_CLASSES) or not are_labels(y):
        return
    with torch.no_grad(), suppress(Exception):
        less = batch.mapped(lambda leaf: leaf[:, :-1].to(task.device), x)
        shorter = tensor_of(batch.call(task.flat.module, less))
        if shorter.shape[1:] == (output.shape[1] - 1, output.shape[2]):
            output = shorter
    if output.shape[1] != output.shape[2]:
        raise PrefedError(f"model: its classes are last, as in {tuple(output.shape)}{FIRST}")


def _check_parts(task: Task, data: FederatedData) -> None:
    """A loss of the user's own may be no mean over samples, as where some do not count."""
    if task.micro_batch is not None:
        whole, parts = _whole_and_parts(task, data.client(0), task.micro_batch)
        again, _ = _whole_and_parts(task, data.client(0), task.micro_batch)
        if not _close(whole, parts) and _close(whole, again):  # a loss may draw random numbers
            raise PrefedError(
                f"micro_batch, loss: the loss of a batch is {whole:.6g} and the mean of its parts "
                f"{parts:.6g}, so their gradients would not add up to that of the batch; leave "
                f"micro_batch out, or take a loss whose mean is known, as {KNOWN}"
            )
    if data.test is not None and len(data.test) > task.evaluation_batch:
        whole, parts = _whole_and_parts(task, data.test, task.evaluation_batch)
        if not _close(whole, parts):
            log.warning(
                "test_loss: the loss is no mean over samples, and will be the mean over batches of "
                "%d test samples; of a loss whose mean is known, as %s, it is that of the whole "
                "test set",
                task.evaluation_batch, KNOWN,
            )  # fmt: skip


@torch.no_grad()
def _whole_and_parts(task: Task, samples: Samples, size: int) -> tuple[float, float]:
    """The loss of a few samples from everywhere, and what those of their parts add up to."""
    count = min(len(samples), max(2, min(COMPARED, task.evaluation_batch)))
    x, y = samples.take(torch.linspace(0, len(samples) - 1, count).long())
    x, y = batch.padded(x), batch.padded(y)
    targets = batch.parts(y, min(size, (count + 1) // 2))
    task.flat.module.eval()
    outputs = torch.split(task.forward(x), [len(part) for part in targets])
    whole = float(task.loss(torch.cat(outputs), y.to(task.device)))
    each = zip(shares(task.loss, targets), outputs, targets, strict=True)
    return whole, sum(
        share * float(task.loss(output, target.to(task.device)))
        for share, output, target in each
        if share
    )


def _close(whole: float, parts: float) -> bool:
    """But for rounding; or nothing can be said, as of a mean over nothing."""
    return not math.isfinite(whole) or math.isclose(whole, parts, rel_tol=1e-3, abs_tol=1e-6)


def _check_gradient(task: Task, x: Inputs, y: Tensor) -> None:
    """One backward pass, which must reach the flat vector: TorchScript holds parameters of its
    own. A gradient that is 0 may be right, if there is one."""
    flat, devices = task.flat, [task.device] if task.device.type == "cuda" else []
    x, y = batch.joined([x, x]), torch.cat([y, y])  # BatchNorm wants more than one sample
    versions = [leaf._version for leaf in leaves(x)]
    statistics = flat.read_buffers()
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        flat.module.train()
        with task.seeded(0):
            loss = task.loss(task.forward(x), y.to(task.device))
        if versions != [leaf._version for leaf in leaves(x)]:  # in training alone
            task.transform = _of_copies(task.transform)
        reached = loss.requires_grad
        if reached:
            flat.gradient.zero_()
            _refuse_recomputed_dropout(loss, KeyedDropout(keys([0], task.device)[0]))
            if not flat.gradient.any():
                own = [p for p in flat.module.parameters() if p.requires_grad]
                found = torch.autograd.grad(loss, own, allow_unused=True)
                known = [g for g in found if g is not None]
                reached = bool(known) and not any(g.any() for g in known)
            flat.gradient.zero_()
    flat.write_buffers(statistics, torch.zeros((), dtype=torch.int64))
    if not reached:
        script = isinstance(flat.module, torch.jit.ScriptModule)
        raise PrefedError(
            "model: no gradient of the loss reaches its parameters, so nothing would be "
            "trained; "
            + (
                "hand in the torch.nn.Module it was made from, not TorchScript"
                if script
                else "look for detach(), no_grad() or .data on the way from them to the loss"
            )
        )


def _refuse_recomputed_dropout(loss: Tensor, mode: KeyedDropout) -> None:
    """Go backward. A call of dropout that is repeated there cannot know which number it had."""
    engine, ones = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    how = {"allow_unreachable": True, "accumulate_grad": True}
    with mode:  # which loss.backward() would not let see what is inside it
        engine.run_backward((loss,), (ones,), True, False, (), **how)
    if mode.calls:
        raise PrefedError(
            "model: its dropout is computed once more in the backward pass, as gradient "
            "checkpointing does, with other masks than in the forward pass; turn checkpointing off "
            "(model.gradient_checkpointing_disable() for Hugging Face's) and, where memory is "
            "short, set micro_batch; or set dropout to 0"
        )


def _find_randomness(task: Task, x: Inputs) -> Literal["none", "dropout", "generator"]:
    """Watch forward passes in training mode, which also tell what buffers are."""
    mode = KeyedDropout(keys([0], task.device)[0])
    devices = [task.device] if task.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        before = _generator_states(task.device)
        task.flat.module.train()
        with mode:
            task.flat.buffers.watch(task.forward, x)
        after = _generator_states(task.device)
    if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        return "generator"
    task.attends = mode.attends
    return "dropout" if mode.calls else "none"


def _hint(task: Task, x: Inputs, y: Tensor) -> str:
    """What is probably meant, where model, loss and data do not fit in a well-known way."""
    if isinstance(x, dict):
        return f"; x is a dict, and the model is given {', '.join(x)} as keywords"
    shape = x.shape if isinstance(x, Tensor) and x.dim() == 4 else ()
    if shape and shape[-1] in (1, 3, 4) and shape[1] not in (1, 3, 4):
        return (
            f"; x looks like images with the channels last {tuple(x.shape[1:])}: torch wants them "
            f"first, x.permute(0, 3, 1, 2)"
        )
    takes_symbols = any(isinstance(layer, nn.Embedding) for layer in task.flat.module.modules())
    if isinstance(x, Tensor) and not x.dtype.is_floating_point and not takes_symbols:
        return (
            f"; x is {x.dtype} and the model {task.flat.weights.dtype}: convert it with x.float(), "
            f"or on its way to the model with transform=lambda x: x.float()"
        )
    if y.dtype == torch.bool:
        return "; y is torch.bool: for labels convert it with y.long()"
    with torch.no_grad(), suppress(Exception):
        output = task.forward(x)
        if is_one_of(task.loss, WITH_CLASSES) and are_labels(y) and y.dim() > 1:
            if output.dim() == y.dim() == 2 and int(y.max()) < 2:
                return '; for several labels of 0 or 1 each, the loss is "bce"'
            if output.shape[:-1] == y.shape:
                return f"; the output {tuple(output.shape)} has its classes last{FIRST}"
    return ""


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
