from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
from pydantic import (
    BeforeValidator,
    InstanceOf,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.sharing import NO_MEAN, Policy
from prefed.core.errors import did_you_mean, explain
from prefed.core.layout import Layout
from prefed.core.option_models import options_model
from prefed.core.schedule import Rate
from prefed.rules import RULES, SGD, Rule


def _rule(value: Any) -> Any:
    """From its name, or from a table with its name and options."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        return value
    if not isinstance(table.get("name"), str):
        raise ValueError(f"needs the name of a rule{did_you_mean('', RULES.names())}")
    options = {key: option for key, option in table.items() if key != "name"}
    make = RULES.get(table["name"])
    model = options_model(make)
    try:
        return make(**dict(model(**options)))
    except ValidationError as error:
        raise ValueError("; ".join(explain(error, model))) from None


def _policy(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _written(policy: Policy) -> dict[str, Any]:
    """What came later is written if it is used: see Algorithm."""
    table = asdict(policy)
    return table if policy.between != "server" else {n: table[n] for n in table if n != "between"}


RuleOption = Annotated[
    InstanceOf[Rule], BeforeValidator(_rule), PlainSerializer(lambda rule: rule.written())
]
"""A rule, the name of one, or a table with its name and options."""
PolicyOption = Annotated[Policy, BeforeValidator(_policy), PlainSerializer(_written)]
"""A policy, its kind alone, or a table of what it is."""
SMALL = Layout.of([("matrix", torch.zeros(1, 1)), ("vector", torch.zeros(1))])
"""A model with all that a rule may have state for."""


@ALGORITHMS.register("pair")
class Pair(Algorithm):
    """Any client rule, any server rule, any sharing policy: an algorithm without a class of its
    own. As it stands it is FedAvg.

        FedAda2   client = "adagrad", server = "adam"
        DiLoCo    client = "adam" with decoupled_weight_decay, server = "sgd" with nesterov
    """

    client_lr: Rate = 0.05
    client: RuleOption = SGD()
    """The client rule: a name of `prefed ls`, or a table with it and its options."""
    server: RuleOption = SGD()
    """The server rule, which is fed with minus the mean change of the clients."""
    share: dict[str, PolicyOption] = {}  # noqa: RUF012
    """What happens to each field of the client rule's state at the end of a round: "reset" (if not
    named here), "keep" or "average", or a table {kind = "average", codec = "log8"}. With {kind =
    "average", every = 4, between = "keep"} clients keep it, and average it in every 4th round."""
    per_step: bool = False
    """Divide the mean change by the number of local steps."""

    @field_validator("server")
    @classmethod
    def _steps_on_a_server(cls, server: Rule) -> Rule:
        if server.of_clients:
            raise ValueError(
                f"{server.written()['name']} is for clients: it steps along what the server sends"
            )
        return server

    @field_validator("share")
    @classmethod
    def _fits(cls, share: dict[str, Policy], info: ValidationInfo) -> dict[str, Policy]:
        client = info.data.get("client")
        fields = client.fields(SMALL) if client else {}
        for name, policy in share.items():
            if client and name not in fields:
                state = ", ".join(fields) or "none"
                raise ValueError(f"{name}: the client rule has no such state; it has {state}")
            if policy.kind == "derived":
                raise ValueError(
                    f'{name}: "derived" needs a class that says how (Algorithm.derive)'
                )
            if policy.kind == "average" and client and fields[name].cache:
                raise ValueError(f"{name}: {NO_MEAN}")
            if policy.between == "keep" and policy.kind != "average":
                raise ValueError(
                    f'{name}: between = "keep" is for kind = "average"; a client that always keeps '
                    f'its own has kind = "keep"'
                )
        return share

    def client_rule(self) -> Rule:
        return self.client

    def server_rule(self) -> Rule:
        return self.server

    def sharing(self) -> dict[str, Policy]:
        """The mass of a moving average (bias_correction) goes where the average goes."""
        masses = {f"{n}_mass": replace(policy, codec="exact") for n, policy in self.share.items()}
        return masses | self.share

    def pseudo_gradient(self, delta: Tensor, local_steps: float) -> Tensor:
        return delta.div_(-local_steps if self.per_step else -1)
