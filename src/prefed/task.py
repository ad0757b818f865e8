"""What is trained: a model as flat vectors, its loss, and how a batch becomes its input."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from prefed.data import FederatedData
from prefed.errors import PrefedError
from prefed.layout import FlatModel

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
        loss: Loss,
        data: FederatedData,
        device: torch.device,
        channels_last: bool = False,
        precision: str = "float32",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PrefedError(f"model: should be a torch.nn.Module, not {type(model).__name__}")
        own = copy.deepcopy(model).to(device)
        if channels_last:
            own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.flat = FlatModel(own)
        self.channels_last, self.precision = channels_last, precision
        self.loss = loss
        self.transform = data.transform
        self.device = device

    def seed(self, seed: int) -> None:
        """Key what the model draws by itself, such as dropout."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        """The model's output, in the precision of its weights whatever the precision inside."""
        x = x.to(self.device)
        x = self.transform(x) if self.transform else x
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, self.precision == "bfloat16"):
            output: Tensor = self.flat.module(x)
        return output.to(self.flat.weights.dtype) if self.precision == "bfloat16" else output

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch; its gradient goes into `flat.gradient`."""
        self.flat.gradient.zero_()
        loss = self.loss(self.forward(x), y.to(self.device))
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float | None]:
        """Mean loss, and accuracy if the targets are labels. The model's mode is left as it was."""
        training = self.flat.module.training
        self.flat.module.eval()
        loss, correct, labels = 0.0, 0, not y.dtype.is_floating_point
        for x_part, y_part in zip(
            x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True
        ):
            output, target = self.forward(x_part), y_part.to(self.device)
            loss += float(self.loss(output, target)) * len(x_part)
            if labels:
                correct += int((output.argmax(1) == target).sum())
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
        except PrefedError:
            raise
        except Exception as error:
            raise PrefedError(f"model, loss: they do not fit the data: {error}") from error
        finally:
            self.flat.module.train(training)
            self.flat.write_buffers(buffers)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PrefedError("loss: should return one number for a batch")
