"""Who listens to a layer of a model."""

from torch import nn


def hooked(module: nn.Module) -> bool:
    """Somebody wants to be told what goes in or comes out, and may change it: it has to run as it
    is written."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or bool(module._backward_pre_hooks)
