"""What is trained: a model as flat vectors, its loss, and how a batch becomes its input."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from prefed.core.draws import torch_seed
from prefed.core.errors import PrefedError
from prefed.core.layout import FlatModel
from prefed.core.losses import are_labels, by_targets
from prefed.data import FederatedData
from prefed.training.keyed_dropout import KeyedDropout, keys

Loss = Callable[[Tensor, Tensor], Tensor]

EVALUATION_BATCH = 1024


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
        loss: Loss | None,
        data: FederatedData,
        device: torch.device,
        channels_last: bool = False,
        precision: str = "float32",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PrefedError(f"model: should be a torch.nn.Module, not {type(model).__name__}")
        model = copy.deepcopy(model).to(device)
        if channels_last and device.type == "cpu" and _narrow(model):
            raise PrefedError(
                "channels_last: on a CPU it needs convolutions whose channels are multiples of 16"
            )
        self.channels_last = channels_last or _likes_channels_last(model, device)
        if self.channels_last:
            _lay_out(model, torch.channels_last)
        self.flat = FlatModel(model)
        self.precision = precision
        self.loss = loss or by_targets
        self.transform = data.transform
        self.device = device
        self.randomness: Literal["none", "dropout", "generator"] = "none"
        """What the model draws in training: nothing; dropout masks, which have keys; or numbers
        from torch's global generator, which is seeded for each step. `check` finds out."""

    def copy(self, data: FederatedData) -> "Task":
        """Another instance of the model, for another thread."""
        other = Task(
            self.flat.module, self.loss, data, self.device, self.channels_last, self.precision
        )
        other.randomness = self.randomness
        return other

    def model(self) -> nn.Module:
        """A copy of the module as it is now, in torch's usual memory format, to give away."""
        module = copy.deepcopy(self.flat.module).eval()
        _lay_out(module, torch.contiguous_format)
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

    def forward(self, x: Tensor) -> Tensor:
        """The model's output, in the precision of its weights whatever the precision inside."""
        x = x.to(self.device)
        x = self.transform(x) if self.transform else x
        if self.channels_last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, self.precision == "bfloat16"):
            output: Tensor = self.flat.module(x)
        return output.to(self.flat.weights.dtype) if self.precision == "bfloat16" else output

    def gradient(self, x: Tensor, y: Tensor, seed: int) -> Tensor:
        """The loss of a batch; its gradient goes into `flat.gradient`."""
        self.flat.gradient.zero_()
        with self.seeded(seed):
            output = self.forward(x)
        loss = self.loss(output, y.to(self.device))
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(
        self, x: Tensor, y: Tensor, see: Callable[[Tensor, Tensor], None] = lambda output, y: None
    ) -> tuple[float, float | None]:
        """Mean loss, and accuracy if the targets are labels. The model's mode is left as it was.

        see   is shown the output and the targets of each batch
        """
        training = self.flat.module.training
        self.flat.module.eval()
        loss, correct, labels = 0.0, 0, are_labels(y)
        for x_part, y_part in zip(
            x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True
        ):
            output, target = self.forward(x_part), y_part.to(self.device)
            loss += float(self.loss(output, target)) * len(x_part)
            if labels:
                correct += int((output.argmax(1) == target).sum())
            see(output, target)
        self.flat.module.train(training)
        return loss / len(x), correct / y.numel() if labels else None

    def check(self, data: FederatedData) -> None:
        """Try the model, the loss and the data on each other before anything is trained."""
        x, y = data.client(0).take(torch.arange(min(2, len(data.client(0)))))
        if len(x) == 0:
            raise PrefedError("clients[0]: it has no samples")
        dtype, fed = self.flat.weights.dtype, self.transform(x) if self.transform else x
        if fed.dtype.is_floating_point and fed.dtype != dtype:
            raise PrefedError(
                f"clients, model: mixed dtypes, x is {fed.dtype} and the model {dtype}; "
                f"convert one of them"
            )
        training, buffers = self.flat.module.training, self.flat.read_buffers()
        try:
            with torch.no_grad():
                output = self.flat.module.eval()(fed.to(self.device))
            classes = output.shape[1] if output.dim() > 1 else None
            data.check(classes)
            with torch.no_grad():
                loss = self.loss(output, y.to(self.device))
                self.randomness = self._find_randomness(x)
        except PrefedError:
            raise
        except Exception as error:
            raise PrefedError(f"model, loss: they do not fit the data: {error}") from error
        finally:
            self.flat.module.train(training)
            self.flat.write_buffers(buffers)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PrefedError("loss: should return one number for a batch")

    def _find_randomness(self, x: Tensor) -> Literal["none", "dropout", "generator"]:
        """Watch one forward pass in training mode."""
        mode = KeyedDropout(keys([0], self.device)[0])
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            before = _generator_states(self.device)
            self.flat.module.train()
            with mode:
                self.forward(torch.cat([x, x]))  # BatchNorm wants more than one sample
            after = _generator_states(self.device)
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            return "generator"
        return "dropout" if mode.calls else "none"


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
