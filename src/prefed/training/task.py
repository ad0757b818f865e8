"""What is trained: a model as flat vectors, its loss, and how a batch becomes its input."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prefed.core import batch
from prefed.core.batch import Inputs, leaves
from prefed.core.draws import torch_seed
from prefed.core.errors import PrefedError
from prefed.core.flat_model import FlatModel, freeze
from prefed.core.losses import (
    OURS,
    WITH_CLASSES,
    are_labels,
    by_targets,
    count_correct,
    cross_entropy,
    ignored_label,
    is_one_of,
    make_loss,
    tensor_of,
)
from prefed.data import FederatedData
from prefed.data.federated import of_other_shapes
from prefed.training.keyed_dropout import KeyedDropout, keys
from prefed.training.pooling import WORTH_IT, FastPooling, as_written, pool_before_relu

Loss = Callable[[Tensor, Tensor], Tensor]

EVALUATION_BATCH = 1024
"""Samples that are evaluated at a time, if their outputs are not larger than LARGEST_OUTPUT."""
PIECE = 128
"""Images of such a batch that go through the model at a time, where that gives the same bits: what
is between layers stays in the cache, and a CNN takes half to two thirds of the time."""
LARGEST_OUTPUT = 1 << 26
"""Numbers in the output of a batch: 256 MB of float32."""

FIRST = ": cross-entropy wants them in dimension 1, as output.transpose(1, -1) has them"


def choose_device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise PrefedError(f"device: {name!r} cannot be used here: {error}") from None
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class Task:
    """One instance of the model, and the three things that are done with it."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | str | None,
        data: FederatedData,
        device: torch.device,
        channels_last: bool = False,
        precision: str = "float32",
        personal: Sequence[str] = (),
        base: nn.Module | None = None,
        micro_batch: int | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        """The model is copied; its frozen parameters are not, if it is `base` whose they are.

        frozen   patterns of more that are to be so
        """
        if not isinstance(model, nn.Module):
            raise PrefedError(f"model: should be a torch.nn.Module, not {type(model).__name__}")
        _refuse_lazy(model)
        model = copy.deepcopy(model, _frozen(base)).to(device)
        freeze(model, frozen)
        pool_before_relu(model)
        if channels_last and device.type == "cpu" and _narrow(model):
            raise PrefedError(
                "channels_last: on a CPU it needs convolutions whose channels are multiples of 16"
            )
        self.channels_last = channels_last or _likes_channels_last(model, device)
        if self.channels_last:
            _lay_out(model, torch.channels_last)
        self.flat = FlatModel(model, personal)
        self.precision = precision
        self.loss = make_loss(loss) if isinstance(loss, str) else loss or by_targets
        if self.loss in (by_targets, cross_entropy) and data.ignored is not None:
            self.loss = make_loss("cross_entropy", ignore_index=data.ignored)
        self.transform = data.transform
        self.device, self.micro_batch = device, micro_batch
        self.randomness: Literal["none", "dropout", "generator"] = "none"
        """What the model draws in training: nothing; dropout masks, which have keys; or numbers
        from torch's global generator, which is seeded for each step. `check` finds out."""

        self.attends = False
        """The model calls scaled_dot_product_attention. `check` finds out."""
        self.numbers_out = 1
        """In the output for a sample. `check` finds out."""
        self.outputs: Callable[[Inputs], Tensor | None] | None = None
        """An engine's faster way to the output of a batch that is evaluated, None for some."""
        self._in_pieces: bool | None = None
        """Images may be evaluated in pieces; None if that was not tried yet."""
        self.pooled = 0
        """Numbers of a sample in its largest max-pooling that has a faster way. `check` finds
        out."""

    @property
    def evaluation_batch(self) -> int:
        """Samples that are evaluated at a time."""
        return max(1, min(EVALUATION_BATCH, LARGEST_OUTPUT // self.numbers_out))

    def copy(self, data: FederatedData) -> "Task":
        """Another instance of the model, for another thread. What is frozen is there once."""
        kind = self.device, self.channels_last, self.precision, self.flat.personal
        held: dict[str, Any] = {"base": self.flat.module, "micro_batch": self.micro_batch}
        other = Task(self.flat.module, self.loss, data, *kind, **held)
        other.randomness, other.attends = self.randomness, self.attends
        other.numbers_out, other.pooled = self.numbers_out, self.pooled
        other.flat.buffers.like(self.flat.buffers)
        return other

    def model(self) -> nn.Module:
        """A copy of the module as it is now, in torch's usual memory format, to give away. What is
        frozen is shared with the run, unless its memory format is another."""
        shared: dict[int, Any] = {}
        if not self.channels_last:  # the memory, not the object: what is given away may be changed
            frozen = [p for p in self.flat.module.parameters() if not p.requires_grad]
            shared = {id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen}
        module = copy.deepcopy(self.flat.module, shared).eval()
        _lay_out(module, torch.contiguous_format)
        as_written(module)
        module.zero_grad(set_to_none=True)
        return module

    def seeds(self, seed: int, round: int, clients: Sequence[int]) -> list[int]:
        """The seed of each client for what the model draws in a round; step k adds k."""
        if self.randomness == "none":
            return [0] * len(clients)
        return [torch_seed(seed, "dropout", round, client) for client in clients]

    def seeded(self, seed: int) -> AbstractContextManager[object]:
        """Key what the model draws in the forward pass of a step."""
        if self.randomness == "none":
            return nullcontext()
        if self.randomness == "generator":
            torch.default_generator.manual_seed(seed)
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
        return KeyedDropout(keys([seed], self.device)[0])

    def prepared(self, x: Inputs) -> Inputs:
        """A batch as the module takes it."""
        x = batch.moved(batch.padded(x), self.device)
        x = self.transform(x) if self.transform else x
        return batch.mapped(_channels_last, x) if self.channels_last else x

    def forward(self, x: Inputs) -> Tensor:
        """The model's output, in the precision of its weights whatever the precision inside."""
        x = self.prepared(x)
        half = torch.autocast(self.device.type, torch.bfloat16, self.precision == "bfloat16")
        worth_it = self.pooled * batch.size(x) >= WORTH_IT
        with half, FastPooling() if worth_it else nullcontext():
            output = tensor_of(batch.call(self.flat.module, x))
        return output.to(self.flat.weights.dtype) if self.precision == "bfloat16" else output

    def gradient(self, x: Inputs, y: Tensor, seed: int, loss: Loss | None = None) -> Tensor:
        """The loss of a batch (another, if it is given); its gradient goes into `flat.gradient`."""
        self.flat.gradient.zero_()
        if loss is None and self.micro_batch is not None and len(y) > self.micro_batch:
            return self._gradient_in_parts(x, y, seed, self.micro_batch)
        with self.seeded(seed):
            output = self.forward(x)
        found = (loss or self.loss)(output, batch.padded(y).to(self.device))
        found.backward()
        return found.detach()

    def _gradient_in_parts(self, x: Inputs, y: Tensor, seed: int, size: int) -> Tensor:
        """The same, a few samples at a time: the loss of a batch is the mean over its samples, or
        over those of its targets that count."""
        ignored = ignored_label(self.loss)
        parts = [*zip(batch.parts(x, size), batch.parts(batch.padded(y), size), strict=True)]
        counts = [len(t) if ignored is None else int((t != ignored).sum()) for _, t in parts]
        total = self.flat.weights.new_zeros(())
        for number, ((x_part, y_part), count) in enumerate(zip(parts, counts, strict=True)):
            if not count:
                continue
            with self.seeded(seed + (number << 40)):  # another dropout in each
                output = self.forward(x_part)
            loss = self.loss(output, y_part.to(self.device)) * (count / max(1, sum(counts)))
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(
        self, x: Inputs, y: Any, see: Callable[[Tensor, Tensor], None] = lambda output, y: None
    ) -> tuple[float, float | None]:
        """Mean loss, and accuracy if the targets are labels. The model's mode is left as it was.

        see   is shown the output and the targets of each batch
        """
        training = self.flat.module.training
        self.flat.module.eval()
        loss, samples, right, counted = 0.0, 0.0, 0, 0
        size = self.evaluation_batch
        for x_part, y_part in zip(batch.parts(x, size), batch.parts(y, size), strict=True):
            output, target = self._evaluated(x_part), batch.padded(y_part).to(self.device)
            found, share = count_correct(self.loss, output, target), 1.0
            correct, of = found or (0, 0)
            weight = target.numel() if batch.is_ragged(y) else len(target)
            if found is not None and ignored_label(self.loss) is not None:
                share = of / target.numel()
            if share:
                loss += float(self.loss(output, target)) * weight * share
            samples, right, counted = samples + weight * share, right + correct, counted + of
            see(output, target)
        self.flat.module.train(training)
        return loss / samples if samples else math.nan, right / counted if counted else None

    def _evaluated(self, x: Inputs) -> Tensor:
        """The model's output for a batch that is evaluated. Which kernel torch takes may depend on
        the size of a batch, and the bits on the kernel: the first full batch is tried both ways."""
        if self.outputs is not None and (found := self.outputs(x)) is not None:
            return found
        images = isinstance(x, Tensor) and x.dim() == 4 and len(x) == self.evaluation_batch
        if not images or len(x) <= PIECE or self.device.type != "cpu" or self._in_pieces is False:
            return self.forward(x)
        pieces = batch.parts(x, PIECE)
        output = torch.cat([self.forward(piece) for piece in pieces])
        if self._in_pieces is None:
            whole = self.forward(x)
            self._in_pieces = torch.equal(output, whole)
            return whole
        return output

    @torch.no_grad()
    def operations(self, data: FederatedData) -> float:
        """Floating-point operations of a forward pass of one sample, about: two for each weight of
        a layer at each position of its output (a convolution has one for each pixel)."""
        total = 0.0

        def count(layer: nn.Module, _: object, output: object) -> None:
            nonlocal total
            first = output[0] if isinstance(output, tuple) and output else output
            for weight in layer.parameters(recurse=False):
                size = first.numel() if isinstance(first, Tensor) else 0
                rows = weight.shape[0] if weight.dim() else 1
                total += 2 * weight.numel() * max(1.0, size / max(1, rows))

        module, training = self.flat.module, self.flat.module.training
        handles = [layer.register_forward_hook(count) for layer in module.modules()]
        try:
            module.eval()
            x, _ = data.client(0).take(torch.arange(1))
            self.forward(batch.joined([x, x]))  # BatchNorm wants more than one sample
        finally:
            for handle in handles:
                handle.remove()
            module.train(training)
        return total / 2

    def check(self, data: FederatedData) -> None:
        """Try the model, the loss and the data on each other before anything is trained."""
        x, y = data.client(0).take(torch.arange(min(2, len(data.client(0)))))
        if len(y) == 0:
            raise PrefedError("clients[0]: it has no samples")
        x, y = batch.padded(x), batch.padded(y)
        dtype, fed = self.flat.weights.dtype, self.transform(x) if self.transform else x
        for given in {leaf.dtype for leaf in leaves(fed)} - {dtype}:
            if given.is_floating_point:
                raise PrefedError(
                    f"clients, model: mixed dtypes, x is {given} and the model {dtype}; "
                    f"convert one of them"
                )
        training = self.flat.module.training
        try:
            with FastPooling() as pooling:
                output = tensor_of(
                    batch.call(self.flat.module.eval(), batch.moved(fed, self.device))
                ).detach()
            self.numbers_out = max(1, output.numel() // len(y))
            self.pooled = pooling.largest // len(y) if self.precision == "float32" else 0
            self._check_targets(data, output, y)
            self._check_classes(fed, output, y)
            with torch.no_grad():
                loss = self.loss(output, y.to(self.device))
                self.randomness = self._find_randomness(x)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise PrefedError("loss: should return one number for a batch")
            self._check_gradient(x, y)
            self._check_other_shapes(data)
            if data.test is not None:
                self.evaluate(*data.test.take(torch.arange(min(2, len(data.test)))))
        except PrefedError:
            raise
        except Exception as error:
            hint = _hint(self, fed, y)
            raise PrefedError(f"model, loss: they do not fit the data: {error}{hint}") from error
        finally:
            self.flat.module.train(training)

    def _check_other_shapes(self, data: FederatedData) -> None:
        for where, samples in of_other_shapes(data):
            x = samples.take(torch.arange(min(2, len(samples))))[0]
            try:
                with torch.no_grad():
                    self.flat.module.eval()
                    self.forward(x)
            except Exception as error:
                shapes = " and ".join(str(tuple(leaf.shape[1:])) for leaf in leaves(x))
                raise PrefedError(
                    f"{where}: its samples are of shape {shapes}, unlike those of clients[0]; "
                    f"model, loss: they do not fit the data there: {error}"
                ) from error

    def _check_targets(self, data: FederatedData, output: Tensor, y: Tensor) -> None:
        """What a loss of ours says of targets; a loss of the user's own knows its targets best."""
        if not is_one_of(self.loss, OURS):
            data.check(None, targets=False)
            return
        classes = output.shape[1] if output.dim() > 1 else None
        with_classes = is_one_of(self.loss, WITH_CLASSES)
        data.check(classes if with_classes else None, ignored_label(self.loss))

    def _check_classes(self, x: Inputs, output: Tensor, y: Tensor) -> None:
        """An output (N, T, C) is no error where T is C, but trains on nonsense: see whether it gets
        shorter with its input where the classes should be."""
        square = output.dim() == 3 and output.shape[1] == output.shape[2] == y.shape[-1] > 1
        if not square or not is_one_of(self.loss, WITH_CLASSES) or not are_labels(y):
            return
        with torch.no_grad(), suppress(Exception):
            less = batch.mapped(lambda leaf: leaf[:, :-1].to(self.device), x)
            shorter = tensor_of(batch.call(self.flat.module, less))
            if shorter.shape[1:] == (output.shape[1] - 1, output.shape[2]):
                output = shorter
        if output.shape[1] != output.shape[2]:
            raise PrefedError(f"model: its classes are last, as in {tuple(output.shape)}{FIRST}")

    def _check_gradient(self, x: Inputs, y: Tensor) -> None:
        """One backward pass, which must reach the flat vector: TorchScript holds parameters of its
        own. A gradient that is 0 may be right, if there is one."""
        flat, devices = self.flat, [self.device] if self.device.type == "cuda" else []
        x, y = batch.joined([x, x]), torch.cat([y, y])  # BatchNorm wants more than one sample
        statistics = flat.read_buffers()
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            flat.module.train()
            with self.seeded(0):
                loss = self.loss(self.forward(x), y.to(self.device))
            reached = loss.requires_grad
            if reached:
                flat.gradient.zero_()
                loss.backward(retain_graph=True)
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

    def _find_randomness(self, x: Inputs) -> Literal["none", "dropout", "generator"]:
        """Watch forward passes in training mode, which also tell what buffers are."""
        mode = KeyedDropout(keys([0], self.device)[0])
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            before = _generator_states(self.device)
            self.flat.module.train()
            with mode:
                self.flat.buffers.watch(self.forward, x)
            after = _generator_states(self.device)
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            return "generator"
        self.attends = mode.attends
        return "dropout" if mode.calls else "none"


def _frozen(model: nn.Module | None) -> dict[int, nn.Parameter]:
    """What copy.deepcopy is to take for copied: the parameters that are not trained."""
    parameters = [] if model is None else model.parameters()
    return {id(p): p for p in parameters if not p.requires_grad}


def _refuse_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise PrefedError(
                f"model: {name} has no shape yet, since a lazy layer has seen no input; call "
                f"model(x[:2]) once before, or give the size of its input"
            )


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
    with torch.no_grad(), suppress(Exception):
        output = task.forward(x)
        if is_one_of(task.loss, WITH_CLASSES) and are_labels(y) and y.dim() > 1:
            if output.dim() == y.dim() == 2 and int(y.max()) < 2:
                return '; for several labels of 0 or 1 each, the loss is "bce"'
            if output.shape[:-1] == y.shape:
                return f"; the output {tuple(output.shape)} has its classes last{FIRST}"
    return ""


def _channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def _lay_out(module: nn.Module, format: torch.memory_format) -> None:
    """Not by contiguous(): it leaves the strides of a single channel as they are, and they decide
    the format of all that follows."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=format)


def _likes_channels_last(model: nn.Module, device: torch.device) -> bool:
    """On a CPU, float32 convolutions are up to 1.5 times faster with the channels last. This is a
    rule, not a measurement: it decides where a weight lies in the flat vector."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    single = any(w.dtype == torch.float32 for w in weights)
    return device.type == "cpu" and single and not _narrow(model)


def _narrow(model: nn.Module) -> bool:
    """Networks with few channels crash torch 2.13 or hang it, channels last, on a CPU."""
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return any(m.out_channels % 16 for m in convolutions)


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.random.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
