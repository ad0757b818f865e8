"""Any prefed algorithm as a Flower strategy, for apps with a ServerApp and ClientApps of their own.

Server-side algorithms (FedAdam, PreFedOpt, ...) work with stock ClientApps as they are. Those with
a client rule of their own send what clients share in a second record beside the arrays, which
`prefed.flower.local_train` reads and answers in the user's ClientApp.
"""

import inspect
import json
import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from logging import INFO, WARNING
from typing import Any, Literal, cast

import torch
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
from prefed.flower.app_fit import Unfit, check_fit
from prefed.flower.arrivals import Arrivals
from prefed.flower.client_metrics import mean_metrics, said_steps, whole
from prefed.flower.kept_state import NEVER
from prefed.flower.nodes import Nodes, partition_id
from prefed.flower.privacy import CentralDP
from prefed.flower.replies import AsTheyCome, exchange
from prefed.flower.statedict import StateDict
from prefed.flower.strategy_checks import check
from prefed.flower.wire import pack, unpack
from prefed.rules import SGD, State
from prefed.training.admission import LARGEST_COUNT, Admission, Refused, UntrustedUpdate, expected
from prefed.training.checks import check_sharing
from prefed.training.mechanism import Mechanism
from prefed.training.messages import depends_on_steps, mean_steps, to_mean
from prefed.training.privacy_setting import Privacy
from prefed.training.private_runs import check_private
from prefed.training.round import server_update
from prefed.training.server_state import LOCAL_STEPS, Server

FAR = 100
"""Times the median: a number of local steps beyond it is not believed."""

RecordType = ArrayRecord | MetricRecord | ConfigRecord
MetricsOf = Callable[[list[RecordDict], str], MetricRecord]


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
        self.shape: StateDict | None = None
        self.server: Server | None = None
        """The global state, with the optimiser's, from the first round on."""
        self.after: dict[int, int] = {}
        """For each client that keeps state, the round it last took part in."""
        self.arrivals: Arrivals | None = None
        self.mechanism: Mechanism | None = None
        """Of prefed.Privacy, from the first round on, with the ledger of what was released."""
        self._metrics: dict[int, RecordDict] = {}
        self._needs_steps = False
        """Whether the server's part depends on how many local steps there were."""
        self._is_fit = False
        """Whether a client has been asked what its app sends."""
        self._arrays: ArrayRecord | None = None
        self._asked: dict[int, int] = {}
        """Node -> client, of the round that is under way."""
        self._evaluating = 0
        """How many clients were asked to evaluate."""
        self._round: tuple[ArrayRecord, ConfigRecord]
        """What the clients of this round are sent."""

    def summary(self) -> None:
        log(INFO, "\t├──> %s settings:", type(self.algorithm).__name__)
        options = ", ".join(f"{key}={value!r}" for key, value in self.algorithm)
        for line in textwrap.wrap(options, 52, break_long_words=False):
            log(INFO, "\t│\t%s", line)
        log(INFO, "\t├──> Sampling:")
        log(INFO, "\t│\t├──Fraction: train (%.2f) | evaluate ( %.2f)",
            self.fraction_train, self.fraction_evaluate)  # fmt: skip
        log(INFO, "\t│\t├──Minimum nodes: train (%d) | evaluate (%d)",
            self.min_train_nodes, self.min_evaluate_nodes)  # fmt: skip
        log(INFO, "\t│\t├──Minimum available nodes: %d", self.min_available_nodes)
        log(INFO, "\t│\t└──Usable updates needed: %.2f of a cohort, asked again %d times",
            self.min_fraction, self.retries)  # fmt: skip
        log(INFO, "\t└──> Keys in records:")
        log(INFO, "\t\t├── Weighted by: '%s'", self.weighted_by_key)
        log(INFO, "\t\t├── ArrayRecord key: '%s'", self.arrayrecord_key)
        log(INFO, "\t\t└── ConfigRecord key: '%s'", self.configrecord_key)

    # Training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._load(arrays, is_first=server_round == 1)
        cohort = self._draw(grid, server_round, "train", self.fraction_train, self.min_train_nodes)
        self._check_budget(server_round, len(cohort))
        assert self.server is not None
        assert self.shape is not None
        self.server.round = server_round - 1
        specs = expected(self.algorithm, self.server)
        admission = Admission(
            specs,
            self.server.round,
            cohort,
            largest_count=self.largest_count,
            norm_cap=self.norm_cap,
        )
        by_samples = self.weighting == "samples"
        weight = lambda client, samples: float(samples) if by_samples else 1.0  # noqa: E731
        if server_round == 1:
            self.means.check(self.algorithm, self.server, len(cohort), self.weighting)
        mean = self.means.collect(self.algorithm, self.server, len(cohort), self.seed)
        self.arrivals = Arrivals(admission, cohort, weight, self._averaged, mean)
        self._metrics = {}
        config["server-round"] = server_round
        if arrays is self._arrays and self.server.over_rounds:
            arrays = self.shape.write(self.server.weights, self.server.buffers)
        self._round = arrays, config
        return self._messages(cohort)

    def _check_budget(self, round: int, asked: int) -> None:
        """Raise before a round that would spend more than is allowed."""
        if isinstance(self.privacy, CentralDP):
            self.privacy.check_budget(asked)
        if self.mechanism is not None:
            from flwr.serverapp.exception import PrivacyBudgetExhausted

            self.mechanism.cohort = asked
            if reason := self.mechanism.over(round - 1):
                raise PrivacyBudgetExhausted(reason)

    def _averaged(self, update: UntrustedUpdate) -> State:
        steps = torch.tensor([float(update.steps or self.local_steps or 1)], dtype=torch.float64)
        if isinstance(self.privacy, CentralDP):
            return self.privacy.clip(dict(update.values)) | {LOCAL_STEPS: steps}
        values = to_mean(self.algorithm, dict(update.values), steps)
        if self.mechanism is not None:
            assert self.server is not None
            return self.mechanism.contribution(self.server, values)
        return values

    def _messages(self, clients: list[int]) -> list[Message]:
        """One message for each client: the model, the user's config, and what our own
        `local_train` wants to know, which stock apps leave alone."""
        assert self.server is not None
        assert self.arrivals is not None
        self._asked, messages = {}, []
        arrays, config = self._round
        content: dict[str, RecordType] = {self.arrayrecord_key: arrays}
        if self.server.shared:
            content[p.STATE] = pack(self.server.shared)
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
        assert self.shape is not None
        ours: dict[str, Any] = {
            p.ALGORITHM: tell(self.algorithm),
            p.BUFFERS: list(self.buffers),
            p.PERSONAL: self.shape.personal,
            p.AFTER: self.after.get(client, NEVER),
        }
        return ConfigRecord({**config, **ours})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the replies one by one; without a quorum nothing changes and nothing comes back."""
        arrivals, server, shape = self.arrivals, self.server, self.shape
        assert arrivals is not None
        assert server is not None
        assert shape is not None
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None:
                log(WARNING, "a reply from node %d was not asked for", reply.metadata.src_node_id)
            elif reply.has_error():
                arrivals.refuse(client, Refused(f"failed: {str(reply.error.reason)[:500]}"))
            else:
                self._take(arrivals, client, reply.content)
        admitted, asked = len(arrivals.admission.admitted), len(arrivals.position)
        _log_received("train", admitted, len(arrivals.refused))
        if not self._enough():
            return None, None
        mean, _ = arrivals.mean.result()
        if self.mechanism is not None:
            self.mechanism.spend(server_round, list(arrivals.position))
            mean = self.mechanism.release(server, mean, admitted, asked)
        elif isinstance(self.privacy, CentralDP):
            self.privacy.spend(asked)
            mean["weights"] = self.privacy.noise(mean["weights"], admitted, asked)
            mean.pop("buffers", None)  # statistics of the clients stay with them
        population = max(len(self.members.nodes), asked)
        contents = [self._metrics[c] for c in arrivals.position if c in self._metrics]
        steps = self._steps(mean_steps(mean), contents)
        self._warn_of_own_training(contents)
        took_part = asked if self.mechanism is not None else admitted
        server_update(self.algorithm, server, mean, steps, took_part / population)
        self.after |= dict.fromkeys(arrivals.admission.admitted, server_round - 1)
        self._arrays = shape.write(*server.model(), counters=server.buffers)
        return self._arrays, self._reduce(self.train_metrics_aggr_fn or mean_metrics, contents)

    def _take(self, arrivals: Arrivals, client: int, content: RecordDict) -> None:
        assert self.server is not None
        assert self.shape is not None
        server, shape, found = self.server, self.shape, MetricRecord()

        def read() -> UntrustedUpdate:
            nonlocal found
            found, record = self._records(content)
            check_fit(*self._needs, content)
            weights, buffers = shape.read(record)
            values = {"weights": weights.sub_(server.weights)}
            if "buffers" in arrivals.admission.specs:
                values["buffers"] = buffers
            if server.shared:
                sent = {n: s for n, s in arrivals.admission.specs.items() if n in server.shared}
                values |= unpack(content.get(p.STATE), sent)
            loss, round = found.get(p.LOSS, 0.0), found.get(p.TRAINED, server.round)
            samples = whole(found.get(self.weighted_by_key))
            steps = said_steps(content) if self._learns_steps else None
            return UntrustedUpdate(client, round, samples, loss, values, steps)

        if arrivals.take(client, read) is not None:
            self._metrics[client] = RecordDict({"metrics": found})

    def _records(self, content: RecordDict) -> tuple[MetricRecord, object]:
        """The one metric record, and the one array record that is not our own."""
        if len(content.metric_records) != 1:
            raise Refused(f"{len(content.metric_records)} metric records, not one")
        arrays = [r for key, r in content.array_records.items() if key != p.STATE]
        if len(arrays) != 1:
            raise Refused(f"{len(arrays)} array records, not one")
        return next(iter(content.metric_records.values())), arrays[0]

    @property
    def _learns_steps(self) -> bool:
        return self._needs_steps and self.local_steps is None

    @property
    def _needs(self) -> tuple[Algorithm, Collection[str], bool]:
        """What a client's app must know of."""
        assert self.server is not None
        return self.algorithm, self.server.shared, self._learns_steps

    def _steps(self, mean: float, contents: list[RecordDict]) -> float:
        """The mean number of local steps, without what is far above the median: no single client
        can move it far."""
        said = [n for content in contents if (n := said_steps(content)) is not None]
        if not self._needs_steps or not said:
            return mean
        if self.local_steps is not None:
            if any(n != self.local_steps for n in said):
                log(WARNING, "local_steps is %d, and clients say that they took %d to %d",
                    self.local_steps, min(said), max(said))  # fmt: skip
            return mean
        most = FAR * statistics.median_low(said)
        if max(said) <= most:
            return mean
        log(WARNING, "a client says that it took %d local steps, and others about %d: it is not "
            "counted", max(said), most // FAR)  # fmt: skip
        return statistics.fmean(n for n in said if n <= most)

    def _warn_of_own_training(self, contents: list[RecordDict]) -> None:
        """In the first round, of a rule on the clients that is not followed and not missed."""
        assert self.server is not None
        plain = self.algorithm.client_rule() == SGD()
        if self.server.round == 0 and not plain and not self.server.shared:
            own = sum(p.TRAINED not in content["metrics"] for content in contents)
            if own:
                log(WARNING, "%d of %d clients train in their own way: %s has a rule for clients, "
                    "which prefed.flower.local_train in the ClientApp follows",
                    own, len(contents), type(self.algorithm).__name__)  # fmt: skip

    def _load(self, arrays: ArrayRecord, is_first: bool = False) -> None:
        """Take the model from the arrays of this round: the first, or what a wrapper made of
        ours."""
        if self.shape is None:
            self.shape = StateDict(arrays, self.buffers, self.algorithm.personal)
        if self.server is None:
            weights, buffers = self.shape.read(arrays)
            check_sharing(self.algorithm, self.shape.layout)
            self.server = Server.start(self.algorithm, self.shape.layout, weights, buffers)
            self._needs_steps = depends_on_steps(self.algorithm, self.server)
            if self.privacy is not None and self._learns_steps:
                raise PrefedError(
                    f"local_steps: {type(self.algorithm).__name__} divides by it, and what clients "
                    f"say of it has no privacy; give local_steps= to the strategy"
                )
            if isinstance(self.privacy, Privacy):
                check_private(self.algorithm, self.server, self.privacy, self.local_steps)
                run = 1, 1, 1, self.local_steps, self.seed
                self.mechanism = Mechanism(self.privacy, self.algorithm, *run, secret=True)
                self.mechanism.prepare()
        elif arrays is not self._arrays:
            if self.server.over_rounds and not is_first:
                raise PrefedError(
                    "mean_of_rounds: clients go on from other weights than those that are handed "
                    "over, and something around this strategy changes the latter; set it to None"
                )
            weights, buffers = self.shape.read(arrays)
            self.server.weights.copy_(weights)
            self.server.buffers.copy_(buffers)
            if self.server.over_rounds:  # another start
                self.server.over_rounds["rounds"].zero_()

    def _draw(self, grid: Grid, round: int, purpose: str, fraction: float, least: int) -> list[int]:
        """Clients drawn from those that are there, by (seed, round)."""
        least = max(least, 1)
        needed = max(least, self.min_available_nodes)
        told = -1

        def enough() -> bool:
            nonlocal told
            there = len(self.members.nodes)
            if there < needed and there != told:
                log(INFO, "Waiting for nodes to connect: %d connected (minimum required: %d).",
                    there, needed)  # fmt: skip
                told = there
            return there >= needed

        if not self.members.wait(grid, enough, self.join_seconds):
            raise RunFailed(
                f"{len(self.members.nodes)} nodes are there after {self.join_seconds:g} s, "
                f"{needed} are needed"
            )
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
            _log_received("evaluate", len(contents), asked - len(contents))
        return self._reduce(self.evaluate_metrics_aggr_fn or mean_metrics, contents)

    def _reduce(self, reduce: MetricsOf, contents: list[RecordDict]) -> MetricRecord | None:
        if not contents:
            return None
        try:
            return reduce(contents, self.weighted_by_key)
        except Exception as error:  # metrics are what clients made of them; a run goes on without
            log(WARNING, "the metrics could not be reduced: %s", error)
            return None

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
        assert self.server is not None
        asks = self.server.shared or self._learns_steps or self.algorithm.personal
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
                check_fit(*self._needs, reply.content)
            except Unfit as problem:
                raise PrefedError(
                    f"client {self._asked[node]} (no other was asked yet): {problem}"
                ) from None

    def _enough(self) -> bool:
        assert self.arrivals is not None
        admitted, asked = len(self.arrivals.admission.admitted), len(self.arrivals.position)
        return admitted >= max(1, math.ceil(self.min_fraction * asked))


def _log_received(stage: str, results: int, failures: int) -> None:
    log(INFO, "aggregate_%s: Received %d results and %d failures", stage, results, failures)


def tell(algorithm: Algorithm) -> str:
    name = ALGORITHMS.name_of(type(algorithm))
    return json.dumps({"name": name, **algorithm.model_dump(mode="json")})


def make_strategy(kind: type[Algorithm]) -> Callable[..., Strategy]:
    """The constructor of a strategy: options of the algorithm and of the strategy in one."""
    named = cast(type[Strategy], type(kind.__name__, (Strategy,), {}))  # Flower logs the name

    def make(**options: Any) -> Strategy:
        known = {*kind.model_fields, *kind.contrib_options}
        ours = {k: v for k, v in options.items() if k in known}
        theirs = {k: v for k, v in options.items() if k not in known}
        for name in theirs:
            if name not in inspect.signature(Strategy).parameters:
                kind(**{name: theirs[name]})  # raises, with the nearest name
        return named(kind(**ours), **theirs)

    make.__name__ = make.__qualname__ = kind.__name__
    make.__doc__ = f"{kind.__doc__}\n\n{Strategy.__doc__}"
    return make
