"""The fast way to run many copies of a small network: batched matrix products.

vmap runs any model, but for a chain of linear layers it is half as fast as writing the products
down. Here y^T = W x^T for all clients at once; in this orientation the gradient of W leaves the
product in the layout of W, so that it goes into the flat vector without being transposed.

Only chains of the layers named here are taken, and `plan` returns None for any other model. Results
equal those of the modules up to rounding; the engine compares both before it relies on it.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from prefed.core.hooks import hooked
from prefed.training.keyed_dropout import dropout
from prefed.training.pooling import PoolsFirst

Forward = Callable[[Mapping[str, Tensor], Tensor, Tensor | None], Tensor]
"""(parameters (C, ...), x (C, B, ...), keys of dropout (C, 2)) -> outputs (C, B, ...)"""

ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus,
)  # fmt: skip


def plan(module: nn.Module) -> Forward | None:
    layers, names = chain(module), dict(module.named_parameters())
    for prefix, layer in layers:  # a layer that stands twice in the chain has one name only
        if not _known(layer) or any(prefix + n not in names for n, _ in layer.named_parameters()):
            return None

    def forward(parameters: Mapping[str, Tensor], x: Tensor, key: Tensor | None) -> Tensor:
        drops = 0
        for prefix, layer in layers:
            if isinstance(layer, nn.Linear):
                x = _linear(x, parameters[prefix + "weight"], parameters.get(prefix + "bias"))
            elif isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            elif isinstance(layer, nn.Dropout):
                if layer.p > 0 and layer.training:
                    assert key is not None
                    drops += 1
                    x = dropout(x, layer.p, key, drops)
            else:
                x = layer(x)
        return x

    return forward


Differentiate = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(parameters, where their gradients go, x, labels (C, B)) -> losses (C)"""

OUTPUT_TELLS: dict[type[nn.Module], tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    nn.ReLU: (torch.relu_, partial(torch.ops.aten.threshold_backward.grad_input, threshold=0)),
    nn.Tanh: (torch.tanh_, torch.ops.aten.tanh_backward.grad_input),
    nn.Sigmoid: (torch.sigmoid_, torch.ops.aten.sigmoid_backward.grad_input),
}
"""Activations whose derivative follows from their output, forward and back, both in place."""


def plan_gradient(module: nn.Module) -> Differentiate | None:
    """Forward and back by hand, for a classifier that is a chain of linear layers with such
    activations between them: gradients go straight to where they belong, and no graph is kept.
    A third faster than autograd for small layers."""
    layers = [pair for pair in chain(module) if type(pair[1]) is not nn.Identity]
    while layers and type(layers[0][1]) is nn.Flatten:
        layers = layers[1:]
    ends = [type(layer) for _, layer in (layers[:1] + layers[-1:])]
    if plan(module) is None or ends != [nn.Linear, nn.Linear]:
        return None
    if any(type(layer) not in (nn.Linear, *OUTPUT_TELLS) for _, layer in layers):
        return None

    kept: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}

    def workspace(like: Tensor, what: str, place: int, shape: tuple[int, ...]) -> Tensor | None:
        """For a result, kept from step to step: a new one each time would cost as much as a
        product. A compiler reuses memory by itself."""
        if torch.compiler.is_compiling():
            return None
        if (key := (what, place, shape)) not in kept:
            kept[key] = like.new_empty(shape)
        return kept[key]

    @torch.no_grad()
    def differentiate(
        parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> Tensor:
        value, seen = x.flatten(2), []  # (C, B, numbers) all the way, but for the outputs
        for place, (prefix, layer) in enumerate(layers):
            seen.append(value)
            if isinstance(layer, nn.Linear):
                last = place == len(layers) - 1
                weight, bias = parameters[prefix + "weight"], parameters.get(prefix + "bias")
                a, b = (weight, value.mT) if last else (value, weight.mT)
                out = workspace(value, "y", place, (len(a), a.shape[1], b.shape[2]))
                if bias is None:
                    value = torch.bmm(a, b, out=out)
                else:
                    value = torch.baddbmm(bias.unsqueeze(2 if last else 1), a, b, out=out)
            else:
                value = OUTPUT_TELLS[type(layer)][0](value)
        log_p, y = value.log_softmax(1), y.unsqueeze(1)  # (C, classes, B)
        losses = log_p.gather(1, y).squeeze(1).mean(1).neg_()
        d = log_p.exp_().scatter_add_(1, y, value.new_full((), -1.0).expand_as(y))
        d = d.div_(y.shape[-1]).mT
        for place in reversed(range(len(layers))):
            prefix, layer = layers[place]
            if isinstance(layer, nn.Linear):
                weight, into = parameters[prefix + "weight"], gradients[prefix + "weight"]
                # A product straight into rows of (C, d) would go client by client.
                into.copy_(torch.bmm(d.mT, seen[place], out=workspace(d, "dw", place, into.shape)))
                if layer.bias is not None:
                    gradients[prefix + "bias"].copy_(d.sum(1))
                if place:
                    d = torch.bmm(d, weight, out=workspace(d, "dx", place, seen[place].shape))
            else:
                OUTPUT_TELLS[type(layer)][1](d, seen[place], grad_input=d)
        return losses

    return differentiate


def chain(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The layers of nested Sequentials in the order they run in, with the prefix of their
    parameters' names."""
    if type(module) not in (nn.Sequential, PoolsFirst) or hooked(module):
        return [(prefix, module)]
    children = [*module._modules.items()]
    if isinstance(module, PoolsFirst):
        children = [children[place] for place in module.order]
    return [pair for name, child in children if child for pair in chain(child, f"{prefix}{name}.")]


def _known(layer: nn.Module) -> bool:
    if hooked(layer) or not all(p.requires_grad for p in layer.parameters()):
        return False
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) in (nn.Linear, nn.Dropout, *ELEMENTWISE)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (C, B, ..., in), weight (C, out, in), bias (C, out)."""
    rows = x.flatten(1, -2) if x.dim() > 3 else x
    if bias is None:
        y = torch.bmm(weight, rows.mT)
    else:
        y = torch.baddbmm(bias.unsqueeze(-1), weight, rows.mT)
    return y.mT.unflatten(1, x.shape[1:-1]) if x.dim() > 3 else y.mT
