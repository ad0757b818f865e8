"""The settings `mean` and `state_mean`: which mean a run takes, of the weights and of what clients
share besides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationError

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.errors import PrefedError, explain, shown
from prefed.core.layout import Layout
from prefed.core.memory import Memory
from prefed.core.option_models import options_model
from prefed.training.mean import Mean
from prefed.training.means.held_rows import RobustMean, shuffled
from prefed.training.means.in_turn import InTurn, is_wide
from prefed.training.means.mean_rule import MEANS, MeanRule, lying
from prefed.training.messages import averaged
from prefed.training.server_state import LOCAL_STEPS, Server, policy


@dataclass(frozen=True)
class MeanChoice:
    """A rule, and the size of the buckets before it."""

    rule: MeanRule
    bucket: int = 1

    @classmethod
    def of(cls, given: Any) -> "MeanChoice":
        """From a name, or a table with a name, options and perhaps `bucket`."""
        table = {"name": given} if isinstance(given, str) else given
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            raise ValueError(
                f'should be a name such as "median", or a table such as {{name = "trimmed", '
                f"share = 0.2, bucket = 2}}, not {shown(given)}"
            )
        name, bucket = table["name"], table.get("bucket", 1)
        if type(bucket) is not int or bucket < 1:
            raise ValueError(f"bucket: should be a whole number above 0, not {shown(bucket)}")
        kind = MEANS.get(name)
        model = options_model(kind)
        try:
            options = model(**{k: v for k, v in table.items() if k not in ("name", "bucket")})
        except ValidationError as error:
            raise ValueError("; ".join(explain(error, model))) from None
        rule = kind(**dict(options))
        if bucket > 1 and rule.is_plain:
            raise ValueError("bucket: means of means are the mean; take another mean, or no bucket")
        rule = rule.in_buckets(bucket)
        if (share := getattr(rule, "share", 0.0)) >= 0.5:
            raise ValueError(
                f"bucket: a liar spoils a whole bucket, so a share of {share:g} of the buckets may "
                f"lie, and no mean bears half; take a smaller bucket or a smaller share"
            )
        return cls(rule, bucket)


def _checked(given: Any) -> Any:
    """As it was given: settings are plain values."""
    MeanChoice.of(given)
    return given if isinstance(given, str) else dict(given)


MeanOption = Annotated[str | dict[str, Any], PlainValidator(_checked)]


@dataclass(frozen=True)
class Means:
    """What a run averages with. Each value is worked out by itself."""

    weights: MeanChoice
    """For the change of the weights."""
    state: MeanChoice
    """For optimiser state that is shared, and for the statistics of BatchNorm and its like."""

    @classmethod
    def of(cls, mean: Any = "plain", state_mean: Any = None) -> "Means":
        weights = MeanChoice.of(mean)
        return cls(weights, weights if state_mean is None else MeanChoice.of(state_mean))

    @property
    def is_plain(self) -> bool:
        return self.weights.rule.is_plain and self.state.rule.is_plain

    def by_distance(self, shares: bool) -> str:
        """The option whose rule takes a client's numbers together, or nothing.

        shares   clients share optimiser state
        """
        both = {"mean": self.weights.rule} | ({"state_mean": self.state.rule} if shares else {})
        found = (key for key, rule in both.items() if not (rule.is_plain or rule.by_coordinate))
        return next(found, "")

    def collect(
        self,
        algorithm: Algorithm,
        server: Server,
        clients: int,
        seed: int,
        memory: Memory | None = None,
    ) -> Mean:
        """An empty mean for so many clients, which are known by their positions."""
        if self.is_plain:
            return InTurn(memory) if is_wide(server.layout.size) else Mean(memory)
        rules = {}
        for name in server.values(algorithm):
            choice = self.weights if name == "weights" else self.state
            if not choice.rule.is_plain:
                rules[name] = (choice.rule, choice.bucket)
        order = shuffled(draws.generator(seed, "buckets", server.round), clients)
        return RobustMean(rules, order, memory)

    def check(
        self, algorithm: Algorithm, server: Server, clients: int, weighting: object = "uniform"
    ) -> None:
        """Raise for what these means cannot do, of so many clients in a round."""
        if self.is_plain:
            return
        name = type(algorithm).__name__
        if algorithm.client_rule().lockstep:
            raise PrefedError(
                f"mean: clients of {name} average every gradient, which no other mean than "
                f'"plain" does'
            )
        own = averaged(algorithm, server).keys() - server.values(algorithm).keys() - {LOCAL_STEPS}
        vectors = [n for n in own if averaged(algorithm, server)[n].numel() > 1]
        if vectors:
            raise PrefedError(
                f"mean: {name} weights each coordinate of each client, which no other mean than "
                f'"plain" does; PreFed is the same without these weights'
            )
        for key, choice in (("mean", self.weights), ("state_mean", self.state)):
            _check(key, choice, clients, weighting)
        if self.state.rule.by_coordinate:
            _refuse_matrices(algorithm, server.layout)


def _check(key: str, choice: MeanChoice, clients: int, weighting: object) -> None:
    rule, word = choice.rule, MEANS.name_of(type(choice.rule))
    if not rule.weighted and weighting != "uniform":
        raise PrefedError(
            f'{key}: "{word}" takes one client as it is, so clients cannot have weights; set '
            f'weighting="uniform", or take "multi-krum"'
        )
    rows = -(-clients // choice.bucket)
    if (least := rule.least(rows)) > rows:
        what = "clients" if choice.bucket == 1 else "buckets"
        liars = lying(getattr(rule, "share", 0.0), rows)
        raise PrefedError(
            f'{key}: "{word}" needs {least} {what} to bear {liars} '
            f"that lie, and a round has {rows}; take a smaller share or more clients"
        )


def _refuse_matrices(algorithm: Algorithm, layout: Layout) -> None:
    for name, field in algorithm.client_rule().fields(layout).items():
        if policy(algorithm, name).kind == "average" and field.shape not in ((layout.size,), (1,)):
            what = (
                "holds matrices, and one that is put together number by number is none"
                if "shape" in type(algorithm).model_fields
                else "does not hold one number for each weight"
            )
            raise PrefedError(
                f"state_mean: {name} of {type(algorithm).__name__} {what}; take "
                f'"geometric", "clipped", "krum" or "multi-krum" for it'
            )
