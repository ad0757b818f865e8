"""A model as flat vectors.

The parameters of a model become views into one vector, its gradients views into another, so a
step of an optimiser is a few passes over memory with no loop over parameters. Strides are kept:
a channels_last convolution stays channels_last inside the vector.

Of the buffers, the statistics (buffers.py) form a second vector, which is never preconditioned.
"""

import torch
from torch import Tensor, nn

from prefed.core.buffers import Buffers
from prefed.core.errors import PrefedError
from prefed.core.layout import Layout


class FlatModel:
    """A module whose trainable parameters and gradients live in two flat vectors.

    The module is changed in place: hand in a copy if it is not yours.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        if not parameters:
            raise PrefedError("model: it has no trainable parameters")
        dtypes = sorted({str(p.dtype) for _, p in parameters})
        if len(dtypes) > 1 or not parameters[0][1].dtype.is_floating_point:
            raise PrefedError(
                f"model: all trainable parameters must share one floating-point dtype, "
                f"found {', '.join(dtypes)}; convert it with model.float() or model.double()"
            )
        self.module = module
        self.layout = Layout.of(parameters)
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
