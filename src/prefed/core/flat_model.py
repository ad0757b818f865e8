"""A model as flat vectors.

The parameters of a model become views into one vector, its gradients views into another, so a
step of an optimiser is a few passes over memory with no loop over parameters. Strides are kept:
a channels_last convolution stays channels_last inside the vector.

Of the buffers, the statistics (buffers.py) form a second vector, which is never preconditioned.

Parameters that stay with each client come last: what the server has is the first part.
"""

import re
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from prefed.core.buffers import Buffers
from prefed.core.errors import PrefedError
from prefed.core.layout import Layout
from prefed.core.patterns import named

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
NORM_NAMES = re.compile(r"norm(\dd)?$", re.IGNORECASE)
ADAPTERS = re.compile(r"(^|\.)((lora|hada|lokr|vera|ia3|b?oft)_|prompt_encoder\.)")
"""Names of PEFT, and of our own LoRA."""


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Let the parameters that patterns name stay as they are: nobody trains or sends them."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for pattern in patterns:
        for name in named("freeze", pattern, trained):
            trained[name].requires_grad_(False).grad = None
    if trained and not any(p.requires_grad for p in trained.values()):
        raise PrefedError("freeze: all parameters would stay as they are; leave some to train")


def personal_names(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The trainable parameters that patterns name; "@norm" stands for those of normalisation
    layers, "@last" for those of the last layer that has any."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    trained = {_owner(name) for name in names}
    norms = {
        owner
        for owner, layer in module.named_modules()
        if _is_norm(layer)
        and (owner in trained or getattr(layer, "running_mean", None) is not None)
    }
    if "@last" in patterns:
        _check_last(module, names)
    return named_by(patterns, names, norms)


def named_by(patterns: Sequence[str], names: Sequence[str], norms: Collection[str]) -> list[str]:
    """The same, where only the names of parameters are known, and those of the normalisation layers
    that have any or that have statistics, which may stay as well."""
    owners = {name: _owner(name) for name in names}
    found: set[str] = set()
    for pattern in patterns:
        if pattern == "@norm":
            if not norms:
                raise PrefedError(
                    f"personal: '@norm' finds no normalisation layer that is trained; name the "
                    f"parameters that are to stay (a Flower server tells such layers by their "
                    f"running statistics alone), or take FedAvg; there are {', '.join(names)}"
                )
            found |= {name for name in names if owners[name] in norms}
        elif pattern == "@last" and names:
            if ADAPTERS.search(names[-1]):
                raise PrefedError(
                    f"personal: '@last' would be {names[-1]}, a part of an adapter; name the "
                    f'parameters that are to stay, as "*lora_B*" for one factor of each adapter'
                )
            found |= {name for name in names if owners[name] == owners[names[-1]]}
        else:
            found.update(named("personal", pattern, names))
    if found and len(found) == len(names):
        raise PrefedError("personal: all parameters would stay with the clients; share some")
    return [name for name in names if name in found]


def _owner(name: str) -> str:
    """The layer of a parameter: torch's parametrizations of it are modules inside the layer."""
    layer, inside, _ = f".{name}".partition(".parametrizations.")
    return layer[1:] if inside else name.rpartition(".")[0]


def _is_norm(layer: nn.Module) -> bool:
    """Many models have classes of their own, such as LlamaRMSNorm and T5LayerNorm; one with a
    matrix, such as LinearNorm, is none."""
    if isinstance(layer, NORMS):
        return True
    named_so = any(NORM_NAMES.search(kind.__name__) for kind in type(layer).__mro__)
    return named_so and all(max(p.shape, default=1) == p.numel() for p in layer.parameters(False))


def _check_last(module: nn.Module, names: Sequence[str]) -> None:
    """A last layer that shares its weights with another has not got them under its own name. One
    that stands in two places has the name of the first."""
    layers = dict(module.named_modules(remove_duplicate=False))
    own = {id(layers[_owner(name)]) for name in names}
    every = module.named_parameters(remove_duplicate=False)
    last = [name for name, parameter in every if parameter.requires_grad]
    other = [n for n in last if _owner(n) == _owner(last[-1]) and n not in names]
    if other and id(layers[_owner(other[0])]) not in own:
        raise PrefedError(
            f"personal: '@last' would be {_owner(other[0])}, which shares {other[0]} with another "
            f"layer; name the parameters that are to stay; there are {', '.join(names)}"
        )


EMBEDDINGS = nn.Embedding, nn.EmbeddingBag
MULTIPLIERS = nn.Linear, nn.Bilinear, _ConvNd, nn.RNNBase, nn.MultiheadAttention


def kinds_of(module: nn.Module) -> dict[str, str]:
    """What the parameters of layers that torch has are; one that is shared by an embedding and
    another layer is an embedding."""
    found: dict[int, str] = {}
    for layer in module.modules():
        kind = "embedding" if isinstance(layer, EMBEDDINGS) else "matrix"
        if isinstance(layer, (*EMBEDDINGS, *MULTIPLIERS)):
            for own in layer.parameters(recurse=False):
                found[id(own)] = "embedding" if found.get(id(own)) == "embedding" else kind
    return {n: found[id(p)] for n, p in module.named_parameters() if id(p) in found}


class FlatModel:
    """A module whose trainable parameters and gradients live in two flat vectors.

    The module is changed in place: hand in a copy if it is not yours.

    personal   patterns of the parameters that stay with each client
    """

    def __init__(self, module: nn.Module, personal: Sequence[str] = ()) -> None:
        parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise PrefedError("model: it has no trainable parameters")
        dtypes = sorted({str(p.dtype) for _, p in parameters})
        if len(dtypes) > 1 or not parameters[0][1].dtype.is_floating_point:
            raise PrefedError(
                f"model: all trainable parameters must share one floating-point dtype, "
                f"found {', '.join(dtypes)}; convert it with model.float() or model.double()"
            )
        self.module, self.personal = module, personal
        stay = personal_names(module, personal)
        parameters = sorted(parameters, key=lambda pair: pair[0] in stay)
        kinds = kinds_of(module)
        self.layout = Layout.of(parameters, kinds)
        self.shared = Layout.of((pair for pair in parameters if pair[0] not in stay), kinds)
        """Of the part that the server has, which comes first."""
        first = parameters[0][1]
        self.weights = torch.empty(self.layout.size, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.weights)
        weights, gradients = self.layout.views(self.weights), self.layout.views(self.gradient)
        for name, parameter in parameters:
            weights[name].copy_(parameter.detach())
            parameter.data = weights[name]
            parameter.grad = gradients[name]
        self.buffers = Buffers(module, first.dtype)

    def read_buffers(self) -> Tensor:
        """A new vector with the statistics."""
        return self.buffers.read()

    def write_buffers(self, vector: Tensor, steps: Tensor) -> None:
        """Set the statistics, and the counters to what they are after so many steps."""
        self.buffers.write(vector, steps)

    def load(self, weights: Tensor, statistics: Tensor, steps: Tensor) -> None:
        """Set all weights, the statistics, and the counters to what they are after so many
        steps."""
        self.weights.copy_(weights)
        self.write_buffers(statistics, steps)
