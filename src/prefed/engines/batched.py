"""The fast way to run many copies of a small network: batched matrix products.

vmap runs any model, but for a chain of linear layers it is half as fast as writing the products
down. Here y^T = W x^T for all clients at once; in this orientation the gradient of W leaves the
product in the layout of W, so that it goes into the flat vector without being transposed.

Only chains of the layers named here are taken, and `plan` returns None for any other model. Results
equal those of the modules up to rounding; the engine compares both before it relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from prefed.dropout import dropout

Forward = Callable[[Mapping[str, Tensor], Tensor, Tensor | None], Tensor]
"""(parameters (C, ...), x (C, B, ...), keys of dropout (C, 2)) -> outputs (C, B, ...)"""

ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus,
)  # fmt: skip


def plan(module: nn.Module) -> Forward | None:
    layers, names = _chain(module, ""), dict(module.named_parameters())
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


def _chain(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The layers of nested Sequentials in order, with the prefix of their parameters' names."""
    if type(module) is not nn.Sequential or _hooked(module):
        return [(prefix, module)]
    children = module._modules.items()
    return [pair for name, child in children if child for pair in _chain(child, f"{prefix}{name}.")]


def _known(layer: nn.Module) -> bool:
    if _hooked(layer) or not all(p.requires_grad for p in layer.parameters()):
        return False
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return type(layer) in (nn.Linear, nn.Dropout, *ELEMENTWISE)


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or bool(module._backward_pre_hooks)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (C, B, ..., in), weight (C, out, in), bias (C, out)."""
    rows = x.flatten(1, -2) if x.dim() > 3 else x
    if bias is None:
        y = torch.bmm(weight, rows.mT)
    else:
        y = torch.baddbmm(bias.unsqueeze(-1), weight, rows.mT)
    return y.mT.unflatten(1, x.shape[1:-1]) if x.dim() > 3 else y.mT
