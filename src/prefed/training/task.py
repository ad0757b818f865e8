"""What is trained: a model as flat vectors, its loss, and how a batch becomes its input."""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prefed.core import batch
from prefed.core.batch import Inputs
from prefed.core.draws import torch_seed
from prefed.core.errors import PrefedError
from prefed.core.flat_model import FlatModel, freeze
from prefed.core.losses import (
    by_targets,
    count_correct,
    counted,
    cross_entropy,
    is_sum,
    make_loss,
    shares,
    tensor_of,
)
from prefed.data import FederatedData
from prefed.training import memory_format
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
        model = _copied(model, base).to(device)
        freeze(model, frozen)
        pool_before_relu(model)
        if channels_last and device.type == "cpu" and memory_format.is_narrow(model):
            raise PrefedError(
                "channels_last: on a CPU it needs convolutions whose channels are multiples of 16"
            )
        self.channels_last = channels_last or memory_format.likes_channels_last(model, device)
        if self.channels_last:
            memory_format.lay_out(model, torch.channels_last)
        self.flat = FlatModel(model, personal)
        self.precision = precision
        if isinstance(loss, type):
            raise PrefedError(f"loss: {loss.__name__} is a class; make one, {loss.__name__}()")
        self.loss = make_loss(loss) if isinstance(loss, str) else loss or by_targets
        if self.loss in (by_targets, cross_entropy) and data.ignored is not None:
            self.loss = make_loss("cross_entropy", ignore_index=data.ignored)
        self.transform = data.transform
        """`try_out` lets it have copies, if it or the model changes what it is given."""
        self.device, self.micro_batch = device, micro_batch
        self.randomness: Literal["none", "dropout", "generator"] = "none"
        """What the model draws in training: nothing; dropout masks, which have keys; or numbers
        from torch's global generator, which is seeded for each step. `try_out` finds out."""

        self.attends = False
        """The model calls scaled_dot_product_attention. `try_out` finds out."""
        self.numbers_out = 1
        """In the output for a sample. `try_out` finds out."""
        self.outputs: Callable[[Inputs], Tensor | None] | None = None
        """An engine's faster way to the output of a batch that is evaluated, None for some."""
        self._trains = False
        """All layers of the module were told to train."""
        self._in_pieces: bool | None = None
        """Images may be evaluated in pieces; None if that was not tried yet."""
        self.pooled = 0
        """Numbers of a sample in its largest max-pooling that has a faster way. `try_out` finds
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
        other.transform = self.transform
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
        memory_format.lay_out(module, torch.contiguous_format)
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

    def begin_training(self) -> None:
        """All layers of the module are to train, if they have not been told since it was
        evaluated."""
        module = self.flat.module
        if not (self._trains and module.training):
            module.train()
            self._trains = True

    def prepared(self, x: Inputs) -> Inputs:
        """A batch as the module takes it."""
        x = batch.moved(batch.padded(x), self.device)
        x = self.transform(x) if self.transform else x
        return batch.mapped(memory_format.channels_last, x) if self.channels_last else x

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
        """The same, a few samples at a time."""
        targets = batch.parts(batch.padded(y), size)
        parts = zip(batch.parts(x, size), targets, shares(self.loss, targets), strict=True)
        total = self.flat.weights.new_zeros(())
        for number, (x_part, y_part, share) in enumerate(parts):
            if not share:
                continue
            with self.seeded(seed + (number << 40)):  # another dropout in each
                output = self.forward(x_part)
            loss = self.loss(output, y_part.to(self.device)) * share
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
        loss, samples, right, labels, sums = 0.0, 0.0, 0, 0, is_sum(self.loss)
        size = self.evaluation_batch
        for x_part, y_part in zip(batch.parts(x, size), batch.parts(y, size), strict=True):
            output, target = self._evaluated(x_part), batch.padded(y_part).to(self.device)
            found, share = count_correct(self.loss, output, target), 1.0
            correct, of = found or (0, 0)
            weight = target.numel() if batch.is_ragged(y) else len(target)
            if not sums and (count := counted(self.loss, target)) is not None:
                share = count / target.numel()
            if share:
                loss += float(self.loss(output, target)) * (1 if sums else weight) * share
            samples, right, labels = samples + weight * share, right + correct, labels + of
            see(output, target)
        self.flat.module.train(training)
        loss = loss if sums else loss / samples if samples else math.nan
        return loss, right / labels if labels else None

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


def _copied(model: nn.Module, base: nn.Module | None) -> nn.Module:
    if any(p.is_meta for p in model.parameters()):
        raise PrefedError("model: it is on the device meta and has no values; make it on the CPU")
    try:
        return copy.deepcopy(model, _frozen(base))
    except Exception as error:
        raise PrefedError(
            f"model: it cannot be copied ({type(error).__name__}: {error}); workers and results "
            f"need copies, so leave out what copy.deepcopy cannot take"
        ) from error


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
