"""Models by name. A model is a function of its options that returns an nn.Module."""

from collections.abc import Callable

from torch import nn

from prefed.core.registry import Registry

MODELS: Registry[Callable[..., nn.Module]] = Registry("model", "prefed.models")
