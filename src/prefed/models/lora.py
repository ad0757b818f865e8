"""LoRA (Hu et al. 2022) on any model that is chosen by name: a frozen base, small factors train."""

import inspect
import math
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import safetensors
import safetensors.torch
from pydantic import Field, ValidationError
from torch import Tensor, nn
from torch.nn.functional import linear

from prefed.core.errors import PrefedError, explain
from prefed.core.option_models import options_model
from prefed.core.safe_files import read_whole
from prefed.models import MODELS


class Adapted(nn.Linear):
    """W x + b + alpha/rank * B (A x): the weights of a layer, and the factors that train beside
    them. B begins at zero, and A as PEFT draws it."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_B = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * linear(linear(x, self.lora_A), self.lora_B)


@MODELS.register("lora")
def lora(
    inputs: Any,
    classes: int,
    of: dict[str, Any],
    base: str = "",
    targets: tuple[str, ...] = ("*qkv", "*out"),
    rank: Annotated[int, Field(ge=1)] = 4,
    alpha: Annotated[float, Field(gt=0)] = 8.0,
) -> nn.Module:
    """Another model, whose linear layers are adapted and whose own weights stay as they are.

    of       the model, a table with its name and options
    base     its weights: a .safetensors file, such as the model.safetensors of an earlier run, or
             "shakespeare-base", which comes with prefed; empty: its first, random ones
    targets  the linear layers that are adapted, by name or pattern
    rank     of the product B A that is added to the weights of a layer
    alpha    the product counts alpha/rank times
    """
    model = _build({"inputs": inputs, "classes": classes}, of)
    if base:
        _load(model, base)
    model.requires_grad_(False)
    chosen = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and any(fnmatchcase(name, t) for t in targets)
    ]
    if not chosen:
        raise PrefedError(f"targets: no linear layer of {of['name']} is named {', '.join(targets)}")
    for name, layer in chosen:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, Adapted(layer, rank, alpha))
    return model


def _build(given: dict[str, Any], of: dict[str, Any]) -> nn.Module:
    if not isinstance(of.get("name"), str):
        raise PrefedError('of: should name a model, as of = { name = "gpt", size = "nano" }')
    build = MODELS.get(of["name"])
    known = inspect.signature(build).parameters
    options = {key: value for key, value in of.items() if key != "name"}
    model = options_model(build, ("inputs", "classes"))
    try:
        options = {key: getattr(model(**options), key) for key in options}
    except ValidationError as error:
        raise PrefedError("\n".join(explain(error, model, prefix="of."))) from None
    return build(**{key: v for key, v in given.items() if key in known}, **options)


def _load(model: nn.Module, base: str) -> None:
    shipped = files("prefed").joinpath("models", f"{base}.safetensors")
    path = Path(str(shipped)) if shipped.is_file() else Path(base)
    try:
        model.load_state_dict(safetensors.torch.load(read_whole(path)))
    except (RuntimeError, OSError, safetensors.SafetensorError) as error:
        what = " ".join(str(error).split())[:300]
        raise PrefedError(f"base: {path} does not fit the model: {what}") from None
