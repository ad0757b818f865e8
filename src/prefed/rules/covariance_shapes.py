"""The covariance rule in any shape, by name."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PositiveFloat, PositiveInt

from prefed.core.errors import PrefedError
from prefed.rules.covariance import SHAPES, Accumulate, Covariance
from prefed.rules.covariance_block import Blocks
from prefed.rules.rule import RULES, Fraction


def _known(name: str) -> str:
    try:
        SHAPES.get(name)
    except PrefedError as error:
        raise ValueError(str(error)) from None
    return name


Shape = Annotated[str, AfterValidator(_known)]


@RULES.register("covariance")
def covariance(
    beta1: Fraction = 0.9,
    beta2: Fraction = 0.9,
    tau: PositiveFloat = 1e-3,
    accumulate: Accumulate = "ema",
    step_with: Literal["m", "g"] = "m",
    bias_correction: bool = False,
    shape: Shape = "diagonal",
    refresh: PositiveInt = 1,
    blocks: Blocks = "row",
    largest_side: PositiveInt = 256,
    tau_relative: PositiveFloat | None = None,
) -> Covariance:
    """The paper's rule: m = beta1*m + (1 - beta1)*g, P = beta2*P + (1 - beta2)*(g - m)^2,
    w -= lr * m / (sqrt(P) + tau).

    beta1             the decay of m, the moving average of the gradient
    beta2             the decay of P, the moving average of the squared distance from m
    tau               bounds the step where P is small
    accumulate        P is an exponential moving average ("ema") or a "sum"
    step_with         the step is along "m", or along the gradient "g" itself
    bias_correction   divide m and P by the weight that they have gathered
    shape             what is kept of the covariance: "diagonal", "full", "block" or "kronecker"
    refresh           steps between two computations of the inverse root
    blocks            of shape="block": one for each output "row", or one for each "tensor"
    largest_side      of shape="kronecker": the factor of a longer side is its diagonal
    tau_relative      tau is this share of the root mean square of sqrt(P), in each step anew
    """
    make = SHAPES.get(shape)
    own: dict[str, Any] = {
        "refresh": refresh,
        "blocks": blocks,
        "largest_side": largest_side,
        "tau_relative": tau_relative,
    }
    has = {name: value for name, value in own.items() if name in make.__dataclass_fields__}
    return make(beta1, beta2, tau, accumulate, step_with, bias_correction, **has)
