"""Clients that lie, to try means with: `attackers = {share = 0.2, attack = "sign_flip"}`.

Who lies is drawn once for a run: this share of its clients, to the nearest whole number. A liar
trains as everyone does, and then sends something else: the lie comes before its codec, so that
every engine, rank, codec and mean meets it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import PlainValidator, PositiveFloat, ValidationError
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import draws
from prefed.core.errors import PrefedError, explain, shown
from prefed.core.layout import Layout
from prefed.core.option_models import options_model
from prefed.core.registry import Registry
from prefed.data import FederatedData
from prefed.data.flipped_labels import flip_labels
from prefed.rules import State
from prefed.training.round import Update
from prefed.training.server_state import Server, policy

if TYPE_CHECKING:
    from prefed.training.settings import Settings

ATTACKS: "Registry[type[Attack]]" = Registry("attack", "prefed.training")

Draw = Callable[[], Tensor]


@dataclass(frozen=True)
class Moments:
    """What the honest clients of a round move by: their mean change, and the standard deviation of
    each coordinate."""

    mean: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class Attack:
    """What liars do: they send another change of the weights, or another second moment."""

    colludes: ClassVar[bool] = False
    """Liars know what the honest clients send: `change` is given their moments."""
    flips_labels: ClassVar[bool] = False
    """The lie is in the samples that liars train on."""
    needs_state: ClassVar[bool] = False
    """The lie is in a second moment, which the algorithm must share."""

    def change(self, change: Tensor, noise: Draw, honest: Moments | None) -> Tensor:
        """What is sent in place of the change of the weights (d). `noise` draws
        standard normal numbers (d)."""
        return change

    def second_moment(self, value: Tensor) -> Tensor:
        """What is sent in place of P, v or their like."""
        return value


@ATTACKS.register("sign_flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """The change of the weights with the other sign.

    factor   so many times as long
    """

    factor: PositiveFloat = 5.0

    def change(self, change: Tensor, noise: Draw, honest: Moments | None) -> Tensor:
        return -self.factor * change


@ATTACKS.register("scaled")
@dataclass(frozen=True)
class Scaled(Attack):
    """The change of the weights times a factor, so that one client counts as many.

    factor   so many times as long
    """

    factor: float = 10.0

    def change(self, change: Tensor, noise: Draw, honest: Moments | None) -> Tensor:
        return self.factor * change


@ATTACKS.register("noise")
@dataclass(frozen=True)
class Noise(Attack):
    """Gaussian noise in place of the change of the weights.

    factor   its length, about so many times that of the change
    """

    factor: PositiveFloat = 10.0

    def change(self, change: Tensor, noise: Draw, honest: Moments | None) -> Tensor:
        length = float(torch.linalg.vector_norm(change)) / len(change) ** 0.5
        return noise().mul_(self.factor * length)


@ATTACKS.register("alie")
@dataclass(frozen=True)
class ALIE(Attack):
    """Baruch et al. 2019, "A little is enough": all liars send the honest clients' mean change
    minus z standard deviations in each coordinate, which looks like an honest update.

    z   1.5 in the paper's trials; its formula allows less in small cohorts (0 for 2 of 10)
    """

    colludes: ClassVar[bool] = True

    z: float = 1.5

    def change(self, change: Tensor, noise: Draw, honest: Moments | None) -> Tensor:
        return change if honest is None else honest.mean - self.z * honest.deviation


@ATTACKS.register("label_flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Liars train on wrong labels: classes - 1 - y in place of y."""

    flips_labels: ClassVar[bool] = True


@ATTACKS.register("huge_state")
@dataclass(frozen=True)
class HugeState(Attack):
    """A lie in P, v or their like alone, which makes the steps of all clients tiny. The change of
    the weights is honest.

    factor   so many times as large
    """

    needs_state: ClassVar[bool] = True

    factor: PositiveFloat = 1e6

    def second_moment(self, value: Tensor) -> Tensor:
        return self.factor * value


@ATTACKS.register("tiny_state")
@dataclass(frozen=True)
class TinyState(HugeState):
    """A lie in P, v or their like alone, which makes steps long. The change of the weights is
    honest.

    factor   so many times as large
    """

    factor: PositiveFloat = 1e-6


@dataclass(frozen=True)
class Attackers:
    """The liars of a run."""

    attack: Attack
    liars: frozenset[int]
    """Their numbers."""
    seed: int

    @classmethod
    def of(cls, settings: "Settings", clients: int) -> "Attackers | None":
        if settings.attackers is None:
            return None
        share, attack = parse(settings.attackers)
        drawn = draws.cohort(settings.seed, 0, clients, round(share * clients), "attackers")
        return cls(attack, frozenset(drawn), settings.seed)

    def lies(self, client: int) -> bool:
        return client in self.liars

    def among(self, clients: Sequence[int]) -> list[int]:
        return [client for client in clients if self.lies(client)]

    def check(self, algorithm: Algorithm, layout: Layout) -> None:
        """Raise where there is nothing to lie in."""
        name = type(algorithm).__name__
        if algorithm.client_rule().lockstep:
            raise PrefedError(
                f"attackers: clients of {name} average every gradient, and lies are in what is "
                f"sent at the end of a round"
            )
        if self.attack.needs_state and not second_moments(algorithm, layout):
            raise PrefedError(
                f"attackers: clients of {name} send no P, v or the like; take an algorithm such as "
                f"PreFed or AdaAlter, or a lie in the weights such as sign_flip"
            )

    def spoil(self, data: FederatedData) -> FederatedData:
        """The data that a run with these liars trains on."""
        return flip_labels(data, self.lies) if self.attack.flips_labels else data

    def send(
        self,
        algorithm: Algorithm,
        server: Server,
        update: Update,
        clients: Sequence[int],
        honest: Moments | None = None,
    ) -> Update:
        """What a block of clients sends, with the lies of those that lie."""
        rows = [row for row, client in enumerate(clients) if self.lies(client)]
        if not rows or self.attack.flips_labels:
            return update
        names = second_moments(algorithm, server.layout) if self.attack.needs_state else ["weights"]
        values: State = {n: update.values[n].clone() for n in names if n in update.values}
        for row in rows:
            for name, value in values.items():
                if name == "weights":
                    noise = partial(self._noise, server, clients[row])
                    lie = self.attack.change(value[row], noise, honest)
                else:
                    lie = self.attack.second_moment(value[row])
                value[row] = lie.to(value.dtype)
        return replace(update, values=update.values | values)

    def _noise(self, server: Server, client: int) -> Tensor:
        drawn = draws.generator(self.seed, "attack", server.round, client)
        noise = torch.from_numpy(drawn.standard_normal(len(server.weights)))
        return noise.to(server.weights.device)


def second_moments(algorithm: Algorithm, layout: Layout) -> list[str]:
    """The fields that clients send and that are never negative (a matrix: semi-definite), but for
    the numbers that count steps."""
    rule = algorithm.client_rule()
    preconditioner = rule.preconditioner()
    return [
        name
        for name, field in rule.fields(layout).items()
        if policy(algorithm, name).kind == "average"
        and (field.nonnegative or (preconditioner and preconditioner[0] == name))
        and field.shape != (1,)
    ]


def parse(given: Any) -> tuple[float, Attack]:
    """The share of liars and what they do, from a table with `share`, `attack` and options."""
    if not isinstance(given, Mapping) or not isinstance(given.get("attack"), str):
        raise ValueError(
            f'should be a table such as {{share = 0.2, attack = "sign_flip"}}, not {shown(given)}'
        )
    share, kind = given.get("share"), ATTACKS.get(given["attack"])
    if not isinstance(share, float | int) or isinstance(share, bool) or not 0 <= share < 1:
        raise ValueError(f"share: should be at least 0 and below 1, not {shown(share)}")
    model = options_model(kind)
    try:
        options = model(**{k: v for k, v in given.items() if k not in ("share", "attack")})
    except ValidationError as error:
        raise ValueError("; ".join(explain(error, model))) from None
    return float(share), kind(**dict(options))


def _checked(given: Any) -> Any:
    parse(given)
    return dict(given)


AttackersOption = Annotated[dict[str, Any], PlainValidator(_checked)]
