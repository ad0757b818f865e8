"""What an algorithm is: a value made of three choices."""

from typing import Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from torch import Tensor

from prefed.algorithms.sharing import Policy
from prefed.codecs import CodecName
from prefed.core.errors import PrefedError, explain
from prefed.core.option_models import Options
from prefed.core.patterns import Patterns
from prefed.core.registry import Registry
from prefed.core.schedule import Rate
from prefed.rules import SGD, Fraction, Rule, State
from prefed.rules.grouped import Groups

ALGORITHMS: "Registry[type[Algorithm]]" = Registry("algorithm", "prefed.algorithms")

LATER = (
    "decoupled_weight_decay", "align", "align_form", "state_dtype", "groups", "freeze",
    "tau_relative", "P", "mean_of_rounds",
)  # fmt: skip


class Algorithm(Options):
    """The base of all algorithms, and by itself plain local SGD with averaging.

    A subclass declares its options as fields and overrides the choices that differ. Options are
    checked when the value is made; unknown ones are refused with the nearest known name.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    client_lr: Rate
    """The step size of the clients: a number, a schedule, or a function of the round."""
    server_lr: Rate = 1.0
    """The step size of the server; 1 takes the mean of the clients, if the server rule is SGD."""
    clip_norm: PositiveFloat | None = None
    """Clients scale a gradient down to this length if it is longer."""
    weight_decay: NonNegativeFloat = 0.0
    """Clients add this times the weights to the gradient, after clipping."""
    decoupled_weight_decay: NonNegativeFloat = 0.0
    """Clients take this times the step size of the weights away before each step, as AdamW does."""
    upload: CodecName = "exact"
    """The codec of the weights' change on its way to the server."""
    statistics: Literal["average", "keep", "reset"] = "average"
    """What happens to the statistics of BatchNorm and its like at the end of a round: clients
    "average" them through the server, each will "keep" its own, or "reset" them, so that each
    round begins with the model's first."""

    align: Fraction = 0.0
    """Each of a client's K local steps also moves by align/K times the clients' mean change of the
    last round, which comes down with the weights and never goes up."""
    align_form: Literal["added", "mixed"] = "added"
    """This is "added" to the step of the client rule (as FedAdamW has it), or "mixed" with it: then
    the rule's own part is 1 - align (FedCM, FedLADA, FedPAC)."""

    mean_of_rounds: NonNegativeFloat | None = None
    """The model that is evaluated and handed over is the mean of the global weights over all rounds
    so far, later ones counting more: after round t it moves by (1 + r) / (t + r) towards the
    weights, from which clients go on as they would without it. 0 is the plain mean."""

    state_dtype: Literal["weights", "bfloat16"] = "weights"
    """Clients that train hold m, P and other state of their rule in the type of the "weights", or,
    in half the memory, in "bfloat16", rounded at random at the start and after each step."""

    groups: Groups = ()
    """Parameters that are trained otherwise than the rest, by name or pattern: a list of tables
    such as {params = "@vectors", weight_decay = 0}; of several that name one the first counts."""

    personal: Patterns = ()
    """Parameters that stay with each client, by name or pattern such as "head.*"; "@norm" stands
    for those of normalisation layers, "@last" for those of the last layer."""

    freeze: Patterns = ()
    """Parameters that stay as they are and are never sent, by name or pattern: "*lora_A*" makes
    LoRA's mean exact (FFA-LoRA)."""

    later: ClassVar[tuple[str, ...]] = ()
    """Options of its own that came later, beside LATER."""
    contrib_options: ClassVar[dict[str, str]] = {}
    """Options of an algorithm of prefed.contrib, which is made in place of this one if they are
    given."""

    def __new__(cls, **options: Any) -> Self:
        other = next((cls.contrib_options[n] for n in options if n in cls.contrib_options), None)
        return super().__new__(cls if other is None else ALGORITHMS.get(other))  # type: ignore[return-value]

    @classmethod
    def _first_default(cls, name: str) -> Any:
        """Of an option, in the class that it comes from."""
        kinds = [kind for kind in reversed(cls.__mro__) if issubclass(kind, Algorithm)]
        return next(k.model_fields[name].default for k in kinds if name in k.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Configs have no None: "none" stands for it."""
        for name, value in options.items():
            if isinstance(value, str) and value == "none" and name in cls.model_fields:
                options = {**options, name: None}
        return options

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            lines = explain(error, type(self), prefix=f"{type(self).__name__}.")
            raise PrefedError("\n".join(lines)) from None

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Options that came later are written if they are used: without them a run is the one that
        it was before."""
        table: dict[str, Any] = write(self)
        fields = type(self).model_fields
        unused = {
            name
            for name in (*LATER, *self.later)
            if name in fields
            and getattr(self, name) == fields[name].default == self._first_default(name)
        }
        table = {name: value for name, value in table.items() if name not in unused}
        return {
            name: "none" if value is None and fields[name].default is not None else value
            for name, value in table.items()
        }

    def client_rule(self) -> Rule:
        return SGD()

    def server_rule(self) -> Rule:
        return SGD()

    @property
    def own_share(self) -> float:
        """How much of the client rule's own step a client takes."""
        return 1 - self.align if self.align_form == "mixed" else 1.0

    @property
    def mixes(self) -> bool:
        """`before_mean` makes something else of the weights' change, and `after_mean` undoes it."""
        return False

    @property
    def needs_one_tau(self) -> bool:
        """tau counts outside of the client's own step as well, for all coordinates alike."""
        return False

    def in_turns(self, rule: Rule, shared: int) -> Rule:
        """The client rule for weights whose first `shared` numbers go to the server, if these and
        the personal ones are to move in turns."""
        return rule

    def sharing(self) -> dict[str, Policy]:
        """The policy of each field of the client rule; a field not named here is reset."""
        return {}

    def pseudo_gradient(self, delta: Tensor, local_steps: float) -> Tensor:
        """What the server rule is fed with: minus the mean change of the clients. Where clients
        take unequally many local steps (local_epochs), local_steps is their mean."""
        return delta.neg_()

    def before_mean(self, values: State) -> State:
        """What is averaged, from what a client sent, on (d) or (C, d), and its "local_steps": for
        means that are not plain. May add values; must not change those it is given."""
        return values

    def after_mean(self, mean: State) -> State:
        """Undoes `before_mean` on the mean, which is its to change but not to keep: the next mean
        is in the same memory."""
        return mean

    def derive(self, change: Tensor, shared: State, lr: float, local_steps: float) -> State:
        """The fields whose policy is `derived`: from the clients' mean change of this round, the
        server's new copies of the averaged fields and the clients' step size."""
        return {}
