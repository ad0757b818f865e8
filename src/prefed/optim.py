"""The paper's local rule as a torch optimiser, for training loops of your own."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from prefed.core.errors import PrefedError
from prefed.rules import Covariance as CovarianceRule

MASSES = "m_mass", "P_mass"


class Covariance(torch.optim.Optimizer):
    """m = beta1*m + (1 - beta1)*g,  P = beta2*P + (1 - beta2)*(g - m)^2,
    w -= lr * m / (sqrt(P) + tau).

    The state of each parameter holds `m` and `P` (and, with bias_correction=True, the numbers
    `m_mass` and `P_mass`). weight_decay adds weight_decay * w to the gradient. Of parameters that
    torch's fully_shard has cut, each rank steps its own shards.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9),
        tau: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        accumulate: Literal["ema", "sum"] = "ema",
        bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "tau": tau,
            "weight_decay": weight_decay,
            "accumulate": accumulate,
            "bias_correction": bias_correction,
        }
        _check(defaults)
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        names = [n for group in state_dict["param_groups"] for n in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for name, parameter in zip(names, own, strict=True):
            for field, value in state_dict["state"].get(name, {}).items():
                if field in MASSES:  # which torch has rounded to the type of the parameter
                    self.state[parameter][field] = new_mass(parameter).copy_(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rule = CovarianceRule(
                beta1,
                beta2,
                group["tau"],
                group["accumulate"],
                bias_correction=group["bias_correction"],
            )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, rule, float(group["lr"]), group["weight_decay"])
        return loss

    def _step(
        self, parameter: torch.Tensor, rule: CovarianceRule, lr: float, weight_decay: float
    ) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise PrefedError("Covariance does not support sparse gradients; use dense ones")
        if parameter.is_complex():
            raise PrefedError("Covariance does not support complex parameters")
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {name: torch.zeros_like(parameter) for name in ("m", "P")}
            state |= {name: new_mass(parameter) for name in rule.masses()}
        if weight_decay:
            gradient = gradient.add(parameter, alpha=weight_decay)
        own = {name: _row(_local(value)) for name, value in state.items()}
        rule.step(_row(_local(parameter)), _row(_local(gradient)), own, lr, 0)


def new_mass(parameter: torch.Tensor) -> torch.Tensor:
    """A share that grows to 1, in float32 at least: bfloat16 would stand still far below."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros(1, dtype=dtype, device=parameter.device)


def _check(options: dict[str, Any]) -> None:
    """Of the optimiser, or of a group of parameters."""
    lr, betas, tau = options["lr"], options["betas"], options["tau"]
    weight_decay, accumulate = options["weight_decay"], options["accumulate"]
    if not lr >= 0:
        raise PrefedError(f"lr: should be at least 0, not {lr}")
    if not tau > 0:
        raise PrefedError(f"tau: should be greater than 0, not {tau}")
    two = isinstance(betas, tuple | list) and len(betas) == 2
    if not two or not all(0 <= beta < 1 for beta in betas):
        raise PrefedError(f"betas: should be two numbers in [0, 1), not {betas}")
    if not weight_decay >= 0:
        raise PrefedError(f"weight_decay: should be at least 0, not {weight_decay}")
    if accumulate not in ("ema", "sum"):
        raise PrefedError(f'accumulate: should be "ema" or "sum", not {accumulate!r}')


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """A single number as a vector."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter in shards (FSDP2): each coordinate goes its own way, so a
    step needs no more."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
