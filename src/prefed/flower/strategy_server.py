"""The server behind a strategy: the global state that Flower's arrays stand for, and its steps."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError
from prefed.flower import protocol as p
from prefed.flower import strategy_log
from prefed.flower.app_fit import check_fit
from prefed.flower.arrivals import Arrivals
from prefed.flower.client_metrics import believed_steps, said_steps, whole
from prefed.flower.privacy import CentralDP
from prefed.flower.statedict import StateDict
from prefed.flower.wire import unpack
from prefed.rules import State
from prefed.training.admission import Refused, Spec, UntrustedUpdate
from prefed.training.checks import check_sharing
from prefed.training.mechanism import Mechanism
from prefed.training.messages import depends_on_steps, mean_steps, to_mean
from prefed.training.privacy_setting import Privacy
from prefed.training.private_runs import check_private
from prefed.training.round import server_update
from prefed.training.server_state import LOCAL_STEPS, Server

if TYPE_CHECKING:
    from prefed.flower.strategy import Strategy


class StrategyServer:
    """What a strategy has from the first arrays on. Its options are those of the strategy."""

    def __init__(self, strategy: "Strategy", arrays: ArrayRecord) -> None:
        self.strategy, self.algorithm = strategy, strategy.algorithm
        self.shape = StateDict(arrays, strategy.buffers, self.algorithm.personal)
        weights, buffers = self.shape.read(arrays)
        check_sharing(self.algorithm, self.shape.layout)
        self.state = Server.start(self.algorithm, self.shape.layout, weights, buffers)
        self.needs_steps = depends_on_steps(self.algorithm, self.state)
        """Whether the server's part depends on how many local steps there were."""
        self.arrays: ArrayRecord | None = None
        """What was handed over last."""
        self.mechanism: Mechanism | None = None
        privacy = strategy.privacy
        if privacy is not None and self.learns_steps:
            raise PrefedError(
                f"local_steps: {type(self.algorithm).__name__} divides by it, and what clients "
                f"say of it has no privacy; give local_steps= to the strategy"
            )
        if isinstance(privacy, Privacy):
            check_private(self.algorithm, self.state, privacy, strategy.local_steps)
            run = 1, 1, 1, strategy.local_steps, strategy.seed
            self.mechanism = Mechanism(privacy, self.algorithm, *run, secret=True)
            self.mechanism.prepare()

    @property
    def learns_steps(self) -> bool:
        """Whether clients have to say how many local steps they took."""
        return self.needs_steps and self.strategy.local_steps is None

    @property
    def needs(self) -> tuple[Algorithm, Collection[str], bool]:
        """What a client's app must know of."""
        return self.algorithm, self.state.shared, self.learns_steps

    def load(self, arrays: ArrayRecord, is_first: bool) -> None:
        """Take the model from the arrays of a round, if a wrapper has made others of ours."""
        if arrays is self.arrays:
            return
        if self.state.over_rounds and not is_first:
            raise PrefedError(
                "mean_of_rounds: clients go on from other weights than those that are handed "
                "over, and something around this strategy changes the latter; set it to None"
            )
        weights, buffers = self.shape.read(arrays)
        self.state.weights.copy_(weights)
        self.state.buffers.copy_(buffers)
        if self.state.over_rounds:  # another start
            self.state.over_rounds["rounds"].zero_()

    def sent(self, arrays: ArrayRecord) -> ArrayRecord:
        """What clients begin with, where the model is that of these arrays."""
        if arrays is self.arrays and self.state.over_rounds:
            return self.shape.write(self.state.weights, self.state.buffers)
        return arrays

    def check_budget(self, round: int, asked: int) -> None:
        """Raise before a round that would spend more than is allowed."""
        privacy = self.strategy.privacy
        if isinstance(privacy, CentralDP):
            privacy.check_budget(asked)
        if self.mechanism is not None:
            from flwr.serverapp.exception import PrivacyBudgetExhausted

            self.mechanism.cohort = asked
            if reason := self.mechanism.over(round - 1):
                raise PrivacyBudgetExhausted(reason)

    def read(self, client: int, content: RecordDict, specs: Mapping[str, Spec]) -> UntrustedUpdate:
        """The update in a reply, which should be as the specs say."""
        found, record = _records(content)
        check_fit(*self.needs, content)
        weights, buffers = self.shape.read(record)
        values = {"weights": weights.sub_(self.state.weights)}
        if "buffers" in specs:
            values["buffers"] = buffers
        if shared := self.state.shared:
            due = {name: spec for name, spec in specs.items() if name in shared}
            values |= unpack(content.get(p.STATE), due)
        loss, round = found.get(p.LOSS, 0.0), found.get(p.TRAINED, self.state.round)
        samples = whole(found.get(self.strategy.weighted_by_key))
        steps = said_steps(content) if self.learns_steps else None
        return UntrustedUpdate(client, round, samples, loss, values, steps)

    def averaged(self, update: UntrustedUpdate) -> State:
        """What is added up of an update."""
        privacy = self.strategy.privacy
        steps = torch.tensor(
            [float(update.steps or self.strategy.local_steps or 1)], dtype=torch.float64
        )
        if isinstance(privacy, CentralDP):
            return privacy.clip(dict(update.values)) | {LOCAL_STEPS: steps}
        values = to_mean(self.algorithm, dict(update.values), steps)
        if self.mechanism is not None:
            return self.mechanism.contribution(self.state, values)
        return values

    def step(self, arrivals: Arrivals, metrics: list[RecordDict], nodes: int) -> ArrayRecord:
        """One step with the mean of what has arrived; the arrays to hand over.

        metrics   of the clients that it is of
        nodes     how many there are in all
        """
        privacy = self.strategy.privacy
        admitted, asked = len(arrivals.admission.admitted), len(arrivals.position)
        mean, _ = arrivals.mean.result()
        if self.mechanism is not None:
            self.mechanism.spend(arrivals.round, list(arrivals.position))
            mean = self.mechanism.release(self.state, mean, admitted, asked)
        elif isinstance(privacy, CentralDP):
            privacy.spend(asked)
            mean["weights"] = privacy.noise(mean["weights"], admitted, asked)
            mean.pop("buffers", None)  # statistics of the clients stay with them
        steps = mean_steps(mean)
        if self.needs_steps:
            steps = believed_steps(steps, metrics, self.strategy.local_steps)
        if arrivals.round == 1 and not self.state.shared:  # where they share, it is refused
            strategy_log.own_training(self.algorithm, metrics)
        took_part = asked if self.mechanism is not None else admitted
        server_update(self.algorithm, self.state, mean, steps, took_part / max(nodes, asked))
        self.arrays = self.shape.write(*self.state.model(), counters=self.state.buffers)
        return self.arrays


def _records(content: RecordDict) -> tuple[MetricRecord, object]:
    """The one metric record, and the one array record that is not our own."""
    if len(content.metric_records) != 1:
        raise Refused(f"{len(content.metric_records)} metric records, not one")
    arrays = [r for key, r in content.array_records.items() if key != p.STATE]
    if len(arrays) != 1:
        raise Refused(f"{len(arrays)} array records, not one")
    return next(iter(content.metric_records.values())), arrays[0]
