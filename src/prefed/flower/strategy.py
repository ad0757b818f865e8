"""Any prefed algorithm as a Flower strategy, for apps with a ServerApp and ClientApps of their own.

Server-side algorithms (FedAdam, PreFedOpt, ...) work with stock ClientApps as they are. Those with
a client rule of their own send what clients share in a second record beside the arrays, which
`prefed.flower.local_train` reads and answers in the user's ClientApp.
"""

import json
import math
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from logging import INFO, WARNING
from typing import Any, Literal, cast

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from flwr.supercore import log

from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.core import draws
from prefed.core.errors import PrefedError, RunFailed
from prefed.flower import protocol as p
from prefed.flower import strategy_log
from prefed.flower.app_fit import Unfit, check_fit
from prefed.flower.arrivals import Arrivals
from prefed.flower.client_metrics import MetricsOf, reduced
from prefed.flower.kept_state import NEVER
from prefed.flower.nodes import Nodes, partition_id
from prefed.flower.privacy import CentralDP
from prefed.flower.replies import AsTheyCome, exchange
from prefed.flower.statedict import StateDict
from prefed.flower.strategy_checks import check
from prefed.flower.strategy_server import StrategyServer
from prefed.flower.wire import pack
from prefed.training.admission import LARGEST_COUNT, Admission, Refused, expected
from prefed.training.mechanism import Mechanism
from prefed.training.privacy_setting import Privacy
from prefed.training.server_state import Server

RecordType = ArrayRecord | MetricRecord | ConfigRecord


@dataclass(eq=False, repr=False)
class Strategy(FlowerStrategy):
    """The server side of an algorithm, with Flower's names for what Flower also has.

    algorithm            any prefed algorithm whose clients do not meet in every step
    local_steps          how many steps clients take, for algorithms that divide by it, such as
                         PreFedOpt (per_step); None is what each says in the metric "local-steps"
    weighting            by "samples", as Flower does, or "uniform"
    seed                 of the cohorts
    ask_partitions       draw cohorts by partition id: needs prefed.flower.tell_partition(app)
    buffers              entries of the state dict that are not to be preconditioned, besides
                         integers and statistics of normalisation layers
    min_fraction         the fraction of a cohort that must send a usable update
    retries              how often missing clients are asked again before the run ends
    join_seconds         how long to wait for min_available_nodes
    norm_cap             the largest norm of a client's change of the weights
    largest_count        the highest number of samples that is accepted
    privacy              prefed.Privacy(..., sampling="fixed"), or prefed.flower.CentralDP(...)
    mean                 how the clients' changes become one: "plain", or one that bears clients who
                         lie, such as "median" (docs/robust.md)
    state_mean           the same for what clients share besides; None is that of the weights
    """

    algorithm: Algorithm
    _: KW_ONLY
    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = p.SAMPLES
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: MetricsOf | None = None
    evaluate_metrics_aggr_fn: MetricsOf | None = None
    local_steps: int | None = None
    weighting: Literal["samples", "uniform"] = "samples"
    seed: int = 0
    ask_partitions: bool = False
    buffers: Collection[str] = ()
    min_fraction: float = 0.5
    retries: int = 2
    join_seconds: float = 300.0
    norm_cap: float | None = None
    largest_count: int = LARGEST_COUNT
    privacy: CentralDP | Privacy | None = None
    mean: str | dict[str, Any] = "plain"
    state_mean: str | dict[str, Any] | None = None
    quorum: InitVar[float | None] = None

    def __post_init__(self, quorum: float | None) -> None:
        if quorum is not None:
            warnings.warn("quorum is now called min_fraction", FutureWarning, stacklevel=3)
            self.min_fraction = quorum
        self.means = check(self)
        self.members = Nodes(partition_id if self.ask_partitions else None)
        self._begun: StrategyServer | None = None
        """The server, from the first round on."""
        self.after: dict[int, int] = {}
        """For each client that keeps state, the round it last took part in."""
        self.arrivals: Arrivals | None = None
        self._metrics: dict[int, RecordDict] = {}
        self._is_fit = False
        """Whether a client has been asked what its app sends."""
        self._asked: dict[int, int] = {}
        """Node -> client, of the round that is under way."""
        self._evaluating = 0
        """How many clients were asked to evaluate."""
        self._round: tuple[ArrayRecord, ConfigRecord]
        """What the clients of this round are sent."""

    @property
    def shape(self) -> StateDict | None:
        """Where the state dict has weights and buffers, from the first round on."""
        return None if self._begun is None else self._begun.shape

    @property
    def server(self) -> Server | None:
        """The global state, with the optimiser's, from the first round on."""
        return None if self._begun is None else self._begun.state

    @property
    def mechanism(self) -> Mechanism | None:
        """Of prefed.Privacy, from the first round on, with the ledger of what was released."""
        return None if self._begun is None else self._begun.mechanism

    def summary(self) -> None:
        strategy_log.summary(self)

    # Training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        server = self._load(arrays, is_first=server_round == 1)
        cohort = self._draw(grid, server_round, "train", self.fraction_train, self.min_train_nodes)
        server.check_budget(server_round, len(cohort))
        algorithm, state = self.algorithm, server.state
        state.round = server_round - 1
        admission = Admission(
            expected(algorithm, state),
            state.round,
            cohort,
            largest_count=self.largest_count,
            norm_cap=self.norm_cap,
        )
        by_samples = self.weighting == "samples"
        weight = lambda client, samples: float(samples) if by_samples else 1.0  # noqa: E731
        if server_round == 1:
            self.means.check(algorithm, state, len(cohort), self.weighting)
        mean = self.means.collect(algorithm, state, len(cohort), self.seed)
        self.arrivals = Arrivals(admission, cohort, weight, server.averaged, mean)
        self._metrics = {}
        config["server-round"] = server_round
        self._round = server.sent(arrays), config
        return self._messages(cohort)

    def _load(self, arrays: ArrayRecord, is_first: bool = False) -> StrategyServer:
        """The server, with the model of the arrays of this round."""
        if self._begun is None:
            self._begun = StrategyServer(self, arrays)
        else:
            self._begun.load(arrays, is_first)
        return self._begun

    def _messages(self, clients: list[int]) -> list[Message]:
        """One message for each client: the model, the user's config, and what our own
        `local_train` wants to know, which stock apps leave alone."""
        assert self._begun is not None
        assert self.arrivals is not None
        self._asked, messages = {}, []
        arrays, config = self._round
        content: dict[str, RecordType] = {self.arrayrecord_key: arrays}
        if shared := self._begun.state.shared:
            content[p.STATE] = pack(shared)
        for client in clients:
            node = self.members.nodes.get(client)
            if node is None:
                self.arrivals.refuse(client, Refused("its node is not there"))
                continue
            record = RecordDict({**content, self.configrecord_key: self._told(config, client)})
            messages.append(Message(record, node, MessageType.TRAIN))
            self._asked[node] = client
        return messages

    def _told(self, config: ConfigRecord, client: int) -> ConfigRecord:
        """The user's config, and what our own functions in a ClientApp go by."""
        assert self._begun is not None
        ours: dict[str, Any] = {
            p.ALGORITHM: tell(self.algorithm),
            p.BUFFERS: list(self.buffers),
            p.PERSONAL: self._begun.shape.personal,
            p.AFTER: self.after.get(client, NEVER),
            p.PRIVATE: self.privacy is not None,
            p.MEAN: self.means.by_distance(bool(self._begun.state.shared)),
        }
        return ConfigRecord({**config, **ours})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the replies one by one; without a quorum nothing changes and nothing comes back."""
        arrivals, server = self.arrivals, self._begun
        assert arrivals is not None
        assert server is not None
        specs = arrivals.admission.specs
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None:
                log(WARNING, "a reply from node %d was not asked for", reply.metadata.src_node_id)
            elif reply.has_error():
                arrivals.refuse(client, Refused(f"failed: {str(reply.error.reason)[:500]}"))
            elif arrivals.take(client, partial(server.read, client, reply.content, specs)):
                (found,) = reply.content.metric_records.values()
                self._metrics[client] = RecordDict({"metrics": found})
        admitted = arrivals.admission.admitted
        strategy_log.received("train", len(admitted), len(arrivals.refused))
        if not self._enough():
            return None, None
        metrics = [self._metrics[c] for c in arrivals.position if c in self._metrics]
        arrays = server.step(arrivals, metrics, len(self.members.nodes))
        self.after |= dict.fromkeys(admitted, server_round - 1)
        return arrays, reduced(self.train_metrics_aggr_fn, metrics, self.weighted_by_key)

    def _draw(self, grid: Grid, round: int, purpose: str, fraction: float, least: int) -> list[int]:
        """Clients drawn from those that are there, by (seed, round)."""
        least = max(least, 1)
        self.members.gather(grid, max(least, self.min_available_nodes), self.join_seconds)
        clients = sorted(self.members.nodes)
        size = min(max(int(len(clients) * fraction), least), len(clients))
        log(INFO, "configure_%s: Sampled %d nodes (out of %d)", purpose, size, len(clients))
        offset = 0 if purpose == "train" else 1 << 32
        return [clients[i] for i in draws.cohort(self.seed, round - 1 + offset, len(clients), size)]

    # Evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._evaluating = 0
        if self.fraction_evaluate == 0:
            return []
        clients = self._draw(
            grid, server_round, "evaluate", self.fraction_evaluate, self.min_evaluate_nodes
        )
        config["server-round"] = server_round
        self._evaluating = len(clients)
        self._load(arrays)
        messages = []
        for client in clients:
            told: dict[str, RecordType] = {self.configrecord_key: self._told(config, client)}
            record = RecordDict({self.arrayrecord_key: arrays, **told})
            messages.append(Message(record, self.members.nodes[client], MessageType.EVALUATE))
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        contents, asked = [], self._evaluating
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                log(WARNING, "evaluation failed on node %d: %s", node, reply.error.reason)
                continue
            records = list(reply.content.metric_records.values())
            count = records[0].get(self.weighted_by_key) if len(records) == 1 else None
            if isinstance(count, int | float) and 1 <= count <= self.largest_count:
                contents.append(RecordDict({"metrics": records[0]}))
            else:
                log(WARNING, "evaluation on node %d is not used: it should be one record of "
                    "metrics with %r in it", node, self.weighted_by_key)  # fmt: skip
        if asked:
            strategy_log.received("evaluate", len(contents), asked - len(contents))
        return reduced(self.evaluate_metrics_aggr_fn, contents, self.weighted_by_key)

    # The run

    def start(self, grid: Grid, *parts: Any, **options: Any) -> Result:
        """Flower's own loop over rounds, with replies taken as they come and failures counted."""
        return super().start(cast(Grid, AsTheyCome(grid, self.replies)), *parts, **options)

    def replies(self, grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Message]:
        """The replies to the messages of a round. While too few updates are usable, the clients
        that are missing are asked again; `aggregate_train` takes each reply before the next."""
        arrivals, asked = self.arrivals, list(messages)
        assert arrivals is not None
        self._ask_first(grid, asked, timeout)
        for attempt in range(1 + self.retries):
            if attempt:
                log(WARNING, "round %d: too few usable updates; asking again", arrivals.round)
                missing = set(arrivals.missing)
                self.members.wait(
                    grid,
                    lambda missing=missing: self.members.nodes.keys() >= missing,  # type: ignore[misc]
                    min(timeout, self.join_seconds),
                )
                asked = self._messages(arrivals.missing)
            for message, reply in exchange(grid, asked, timeout):
                if isinstance(reply, Refused):
                    arrivals.refuse(self._asked[message.metadata.dst_node_id], reply)
                else:
                    yield reply
                    reply.content.clear()  # Flower's records hold on to each other
            if self._enough():
                return
            if arrivals.refused and all(isinstance(r, Unfit) for r in arrivals.refused.values()):
                raise PrefedError("\n".join(arrivals.reasons()[:1]))  # asking again is no use
        raise RunFailed(
            f"round {arrivals.round}: {len(arrivals.admission.admitted)} of "
            f"{len(arrivals.position)} clients sent a usable update; the model is as it was "
            f"before\n" + "\n".join(arrivals.reasons())
        )

    def _ask_first(self, grid: Grid, messages: list[Message], timeout: float) -> None:
        """Before a cohort trains for nothing, ask one of it what its app sends: with `local_train`
        it says so at once, and without it its reply shows what is missing. Once in a run."""
        assert self._begun is not None
        asks = any(self._begun.needs[1:]) or self.algorithm.personal
        if self._is_fit or not messages or not asks:
            return
        self._is_fit, node = True, messages[0].metadata.dst_node_id
        log(INFO, "one client is asked first whether its app suits %s",
            type(self.algorithm).__name__)  # fmt: skip
        content = RecordDict({**messages[0].content})
        told = cast(ConfigRecord, content[self.configrecord_key])
        content[self.configrecord_key] = ConfigRecord({**told, p.QUESTION: True})
        for _, reply in exchange(grid, [Message(content, node, MessageType.TRAIN)], timeout):
            if isinstance(reply, Refused):
                log(WARNING, "client %d did not answer: %s", self._asked[node], reply)
                continue
            try:
                check_fit(*self._begun.needs, reply.content)
            except Unfit as problem:
                raise PrefedError(
                    f"client {self._asked[node]} (no other was asked yet): {problem}"
                ) from None

    def _enough(self) -> bool:
        assert self.arrivals is not None
        admitted, asked = len(self.arrivals.admission.admitted), len(self.arrivals.position)
        return admitted >= max(1, math.ceil(self.min_fraction * asked))


def tell(algorithm: Algorithm) -> str:
    name = ALGORITHMS.name_of(type(algorithm))
    return json.dumps({"name": name, **algorithm.model_dump(mode="json")})
