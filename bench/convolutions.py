"""One local step of small convolutional networks: what each idea gives, in shares of a plain step.

    python bench/convolutions.py [NAME ...]

The step is zeroing, forward, cross-entropy and back, of a model whose weights and gradients are
flat vectors, on one thread. All ideas take turns; times are those of the processor, the least and
the median of many. Every idea is checked: its gradient is the plain one's to rounding.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from prefed.core.flat_model import FlatModel
from prefed.models.cnn import cnn
from prefed.models.simple_cnn import simple_cnn
from prefed.training.pooling import FastPooling, pool_before_relu

PASSES = 40
Shape = tuple[int, ...]
MODELS: dict[str, tuple[Callable[[], nn.Module], Shape, bool]] = {
    "W2: cnn, 1 x 28 x 28, batch 20": (lambda: cnn((1, 28, 28), 62), (20, 1, 28, 28), True),
    "MNIST: simple-cnn, batch 64": (lambda: simple_cnn((1, 28, 28), 10), (64, 1, 28, 28), False),
    "CIFAR-10: simple-cnn, batch 20": (lambda: simple_cnn((3, 32, 32), 10), (20, 3, 32, 32), False),
}
"""Model, shape of a batch, and whether the channels are last, as prefed has them."""


class Unfolded(TorchFunctionMode):
    """Convolutions of stride 1 as columns and a product; all of them, or the first alone."""

    def __init__(self, first_alone: bool) -> None:
        super().__init__()
        self.first_alone = first_alone

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.conv2d or (self.first_alone and args[0].requires_grad):
            return func(*args, **(kwargs or {}))
        x, weight, bias, _, padding, *_ = args
        sizes = [
            n + 2 * p - k + 1
            for n, p, k in zip(x.shape[2:], padding, weight.shape[2:], strict=True)
        ]
        columns = functional.unfold(x, weight.shape[2:], padding=padding)
        return (weight.flatten(1) @ columns + bias.unsqueeze(1)).unflatten(2, sizes)


class _ConvolutionReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: list[int]) -> Tensor:
        one, ctx.padding = [1, 1], padding
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x, weight, bias, padding, one, one, 1, "relu", [], ""
        )
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, y = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
        one, mask = [1, 1], [ctx.needs_input_grad[0], True, True]
        found = torch.ops.aten.convolution_backward(
            gradient, x, weight, [len(weight)], one, ctx.padding, one, False, [0, 0], 1, mask
        )
        return *found, None


class ConvolutionReLU(nn.Module):
    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        own = self.convolution
        y: Tensor = _ConvolutionReLU.apply(x, own.weight, own.bias, list(own.padding))
        return y


def in_one_call(model: nn.Sequential) -> nn.Module:
    """The same layers, with each convolution and its ReLU as one."""
    layers: list[nn.Module] = []
    for layer in model:
        if isinstance(layer, nn.ReLU) and isinstance(layers[-1], nn.Conv2d):
            layers[-1] = ConvolutionReLU(layers[-1])
        else:
            layers.append(layer)
    return nn.Sequential(*layers)


def steps_of(name: str) -> dict[str, Callable[[], Tensor]]:
    """For each idea, a step that returns the flat gradient."""
    make, shape, channels_last = MODELS[name]
    torch.manual_seed(0)
    model = make()
    assert isinstance(model, nn.Sequential)
    x, y = torch.randn(shape), torch.arange(shape[0]) % 10
    usual = x
    if channels_last:
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    flat = FlatModel(model)
    own = dict(model.named_parameters())
    into = flat.layout.views(flat.gradient)

    def step(
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        module: nn.Module = model,
        x: Tensor = x,
        all_of_it: bool = False,
    ) -> Tensor:
        flat.gradient.zero_()
        with around():
            loss = functional.cross_entropy(module(x), y)
            if all_of_it:
                loss.backward()
        if not all_of_it:
            loss.backward()
        return flat.gradient

    def copied() -> Tensor:
        found = torch.autograd.grad(functional.cross_entropy(model(x), y), [*own.values()])
        torch._foreach_copy_([into[name] for name in own], [*found])
        return flat.gradient

    together, later = in_one_call(model), nn.Sequential(*model)
    pool_before_relu(later)
    off = lambda: torch.backends.mkldnn.flags(enabled=False)  # noqa: E731
    last = lambda: usual.to(memory_format=torch.channels_last)  # noqa: E731
    return {
        "plain": step,
        "ReLU behind max-pooling, neighbours (kept)": lambda: step(module=later),
        "ReLU and max-pooling caught, 2 x 2 by rows (kept)": lambda: step(FastPooling),
        "both": lambda: step(FastPooling, later),
        "convolution + bias + ReLU in one call": lambda: step(module=together),
        "unfold and a product": lambda: step(lambda: Unfolded(False)),
        "unfold and a product, first layer": lambda: step(lambda: Unfolded(True)),
        "without oneDNN": lambda: step(off, all_of_it=True),
        "gradients copied into the flat vector": copied,
        "batches in torch's usual format, turned": lambda: step(x=last() if channels_last else x),
    }


def main() -> None:
    torch.set_num_threads(1)
    for name in MODELS:
        if sys.argv[1:] and not any(name.startswith(given) for given in sys.argv[1:]):
            continue
        steps = steps_of(name)
        expected = steps["plain"]().clone()
        times: dict[str, list[float]] = {idea: [] for idea in steps}
        for idea, step in steps.items():
            off = float((step() - expected).abs().max() / expected.abs().max())
            assert off < 1e-5, f"{idea}: {off}"
        for _ in range(PASSES):
            for idea, step in steps.items():
                start = time.process_time()
                step()
                times[idea].append(time.process_time() - start)
        print(f"{name}: ms of a step, the least and the median of {PASSES}; shares of plain")
        least, middle = min(times["plain"]), statistics.median(times["plain"])
        for idea, taken in times.items():
            a, b = min(taken), statistics.median(taken)
            print(
                f"  {idea:<52} {1e3 * a:6.2f} {1e3 * b:6.2f}   {a / least:5.2f} {b / middle:5.2f}"
            )


if __name__ == "__main__":
    main()
