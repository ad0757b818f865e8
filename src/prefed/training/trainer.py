"""Where the clients of a round train: a small protocol behind the loop over rounds.

LocalTrainer    in this process (local_trainer.py)
RankTrainer     on the ranks of a torch.distributed group (ranks.py)
FlowerTrainer   on Flower's nodes (prefed.flower.server)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.memory import all_finite
from prefed.rules import State
from prefed.training.server_state import Server

if TYPE_CHECKING:
    from prefed.training.client_evaluation import ClientEvaluation, Score
    from prefed.training.mechanism import Mechanism
    from prefed.training.run import Run

Record = dict[str, Any]
"""What is known of one round."""


@dataclass(frozen=True)
class Arrived:
    """What the clients of a round sent: admitted and averaged as it came in."""

    mean: State
    """The mean of what the clients sent, and of their "local_steps" if these may be unequal."""
    loss: float
    """The mean training loss."""
    clients: int
    """The number of clients in the mean."""
    kept: dict[int, State] = field(default_factory=dict)
    """What stays with the clients, if it is held here."""
    record: Record = field(default_factory=dict)
    """More for the record of the round."""

    @cached_property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(map(all_finite, self.mean.values()))


class Trainer(ABC):
    leads: bool = True
    """This process evaluates, writes and prints for the run; of several ranks only the first."""
    threads: int | None = None
    """Torch's threads for each operation of a round; None leaves them as they are."""
    simulates: bool = True
    """Clients are simulated: time may be virtual, and noise need not be secret."""
    engine: str = ""
    """How the run computes, known after `prepare`. A resumed run goes on with the same."""
    is_asynchronous: bool = False
    """It says itself whose updates make the next step of the server (`arrivals`)."""
    folder: Path | None = None
    """The directory of the run, if it has one: what is too large for memory is beside it."""
    mechanism: "Mechanism | None" = None
    """Of a private run: what clips each client's contribution before it is added up."""

    def prepare(self, run: "Run") -> None:
        """All that has to be ready before the first round of this process."""

    @abstractmethod
    def train(self, server: Server, clients: list[int]) -> Arrived:
        """K local steps on each of these clients. Nothing of the run is changed yet."""

    def arrivals(self, server: Server) -> list[int]:
        """The clients whose updates make the next step of the server, if it is asynchronous."""
        raise PrefedError("this trainer is not asynchronous")

    def told(self, server: Server) -> Record:
        """For the record of the round: what is known before its clients are trained."""
        return {}

    def keep(self, server: Server, arrived: Arrived) -> None:
        """The round counts: what its clients keep is theirs from now on."""

    def skip(self, server: Server) -> None:
        """The round does not count, and is over."""

    def client_state(self, server: Server, client: int) -> tuple[Tensor, Tensor]:
        """All weights and statistics of a client, as it would be evaluated."""
        raise PrefedError("what clients keep is not held here; evaluate where they are")

    def scores(self, evaluation: "ClientEvaluation", clients: list[int]) -> Mapping[int, "Score"]:
        """Each client on its own test samples, as far as they can be had."""
        return dict(evaluation.here(clients))

    def rest(self) -> None:
        """Let go of memory that the next round, if there is one, would take again."""

    def state(self) -> dict[str, Tensor]:
        """What the next rounds depend on besides the server, by name, as a checkpoint holds it."""
        return {}

    def saved(self, round: int) -> None:
        """The checkpoint of that round is whole on the disk, and so is one before it at most."""

    def load_state(self, saved: Mapping[str, Tensor], engine: str) -> None:
        """Go on from a checkpoint of a run that computed with `engine`."""

    def agree(self, text: str) -> str:
        """What the process says that leads, where several have to agree."""
        return text


def check_fits(name: str, saved: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """The saved tensor of that name, if it has the shape and type of `like`."""
    found = saved.get(name)
    if found is None or found.shape != like.shape or found.dtype != like.dtype:
        raise PrefedError(f"the saved state does not fit this run: {name}")
    return found
