"""How a run goes: everything about it that is not the algorithm, the model or the data."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    field_serializer,
    field_validator,
    model_validator,
)

from prefed.core.deprecated import with_new_names
from prefed.core.machine import usable_threads
from prefed.core.option_models import Options
from prefed.core.plain import plain
from prefed.training import metrics
from prefed.training.asynchronous import Asynchronous
from prefed.training.attackers import AttackersOption
from prefed.training.devices import Devices
from prefed.training.goals import Goal, StopWhen
from prefed.training.means.choice import MeanOption
from prefed.training.privacy_setting import Privacy

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weighting = Annotated[
    Annotated[Literal["uniform", "samples"], Tag("a word")]
    | Annotated[list[Weight], Tag("weights")],
    Discriminator(lambda value: "weights" if isinstance(value, list | tuple) else "a word"),
    BeforeValidator(lambda value: value.tolist() if hasattr(value, "tolist") else value),
]


def _named(device: Any) -> Any:
    """A torch.device by its name."""
    return str(device) if isinstance(device, torch.device) else device


class Settings(Options):
    """The settings of a run, each stated once: `prefed.simulate`, configs and the command line
    take them from here."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    RENAMED: ClassVar[dict[str, str]] = {"dropout": "client_dropout"}
    """Old names that are still understood."""

    rounds: PositiveInt
    """How often the server averages."""
    clients_per_round: PositiveInt | None = None
    """The size of a cohort, which is drawn anew in each round; None (in a config "all") is all
    clients."""
    local_steps: PositiveInt | None = None
    """Gradient steps of each client in a round (K in the paper); this, or local_epochs."""
    local_epochs: PositiveInt | None = None
    """Passes of each client over its samples in a round, in place of local_steps: clients with more
    samples take more steps."""
    drop_last: bool = False
    """Leave out the short batch at the end of a pass of local_epochs, where there is a whole one
    before it."""
    batch_size: PositiveInt | None = 32
    """Samples in the batch of a step; None (in a config "full") is all samples of the client."""
    micro_batch: PositiveInt | None = None
    """Samples of a batch whose gradient is computed at a time, so that a large batch fits into
    memory: the parts are added up to the gradient of the whole. None computes it at once."""
    batches: Literal["replacement", "epochs"] = "replacement"
    """Samples are drawn with "replacement" in each step, as in the paper, or in shuffled passes
    over the client's samples ("epochs"), as they always are with local_epochs."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Of every random draw."""
    weighting: Weighting = "uniform"
    """Clients count in the mean equally ("uniform"), by their number of "samples", or by weights of
    your own, a list with a positive number for each client."""
    mean: MeanOption = "plain"
    """How the clients' changes of the weights become one: "plain", the weighted mean, or one that
    bears some clients who lie or break: "median", {name = "trimmed", share = 0.2, bucket = 2}."""
    state_mean: MeanOption | None = None
    """The same for what clients share besides (P, m, the statistics of BatchNorm); that of the
    weights if not set."""
    attackers: AttackersOption | None = None
    """Clients that lie, to try means with: {share = 0.2, attack = "sign_flip"}."""
    engine: str = "auto"
    """How clients are computed: "sequential", "vectorised", "native", "compiled", or "auto", which
    measures and chooses."""
    workers: NonNegativeInt = 1
    """Threads that train clients side by side; "cores": as many as torch uses, if there are so many
    cores (one in each process of a comparison or study), to the same bits on any number. With the
    engine "auto", 1 may become as many, too."""
    device: Annotated[str, BeforeValidator(_named)] = "auto"
    """"auto", "cpu", "cuda" (or "cuda:1", ...) or "mps"."""
    channels_last: bool = False
    """The memory format that convolutions on GPUs are fastest in."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """"bfloat16" is mixed precision: matrix products and convolutions in bfloat16, the weights
    and all state as they are."""
    evaluate_every: PositiveInt = 1
    """Rounds between two evaluations on the test set; the last round is always evaluated."""
    evaluate_clients: PositiveInt | None = None
    """How many clients are evaluated on test samples of their own, if the data have such: a new
    draw each time; None (in a config "all") is all of them."""
    evaluate_clients_every: PositiveInt | None = None
    """Rounds between two evaluations of clients; None is that of evaluate_every. The last round is
    always evaluated."""
    objective: Literal["value", "gap"] | None = None
    """Also measure what is minimised, whenever the test set is evaluated: the loss of the global
    model on all clients' training samples, with weight decay ("value"). "gap" is besides how far
    it lies above its minimum, which Newton's method finds first: for convex models with few
    weights."""
    finetune_steps: PositiveInt | None = None
    """Local steps that each client makes, on a copy of the model, before it is evaluated."""
    kept_state: Literal["auto", "memory", "disk"] = "auto"
    """Where the state is held that clients keep from round to round: in "memory", on "disk" in a
    file of the run's directory (a temporary one, if it has none), or "auto": in memory if it fits.
    Results are the same."""
    metrics: Any = ()
    """What is measured on the test set besides loss and accuracy: a list of "top_5" (or another
    number), "f1", "auroc", "perplexity", "class_accuracy", functions (outputs, targets) -> number
    (in a config "module:function") or metrics of torchmetrics. Records have each as test_NAME; a
    dict {name: metric} gives other names."""
    stop_when: StopWhen | None = None
    """Ends the run before its last round: {"patience": 10} after so many evaluations without a
    better test_accuracy, {"metric": "test_f1", "patience": 10, "min_delta": 0.001},
    "test_accuracy >= 0.9", or a function (record) -> bool."""
    keep: str | None = None
    """"best" keeps the model of the round with the best test_accuracy (test_loss, if there are no
    labels), "best test_f1" that of another number. It is then the model of the result."""
    client_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The probability that a client of a cohort never answers."""
    stragglers: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """This share of each cohort, drawn anew, is too slow to do all its work, as in FedProx's
    experiments."""
    straggler_work: Literal["partial", "drop"] = "partial"
    """What becomes of them: they stop after fewer local epochs (or local_steps), a number from 1 to
    all that is drawn anew, and send what they have ("partial"), or they are left out ("drop")."""
    quorum: PositiveInt = 1
    """The number of clients that must answer; with fewer, a round leaves the model as it was."""
    on_divergence: Literal["stop", "continue"] = "stop"
    """When an update is not finite: "stop" the run, or "continue" without its client."""
    devices: Devices | None = None
    """What clients train on, in virtual time: a prefed.Devices, a table of its options, or the name
    of a class such as "phone". Records then have seconds_virtual. None: there is no virtual
    clock."""

    asynchronous: Asynchronous | None = None
    """The server waits for no one: it steps when a buffer of updates is full, and a round is one
    such step. A prefed.Asynchronous or a table of its options, such as {"buffer": 10,
    "concurrency": 100}. Needs `devices`. None: rounds are synchronous."""
    privacy: Privacy | None = None
    """Differential privacy for clients: a table, in Python prefed.Privacy(...)."""

    @model_validator(mode="before")
    @classmethod
    def _with_new_names(cls, table: Any) -> Any:
        return with_new_names(table, cls.RENAMED)

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Self:
        if (self.local_steps is None) == (self.local_epochs is None):
            if self.local_steps is None:
                raise ValueError("local_steps: is required; or set local_epochs in its place")
            raise ValueError("local_steps: cannot stand beside local_epochs; take one of them")
        if self.drop_last and self.local_epochs is None:
            raise ValueError("drop_last: is for local_epochs; batches of local_steps are whole")
        if self.local_epochs is not None:
            object.__setattr__(self, "batches", "epochs")
        return self

    @model_validator(mode="after")
    def _has_a_clock(self) -> Self:
        if self.asynchronous is not None and self.devices is None:
            raise ValueError(
                "asynchronous: needs devices, which say when an update arrives; set devices, such "
                'as devices = "phone" or devices = {steps_per_second = 100, up = 1e6, down = 4e6}'
            )
        return self

    @model_validator(mode="after")
    def _is_slow_in_one_way(self) -> Self:
        if not self.stragglers and self.straggler_work == "drop":
            raise ValueError("straggler_work: is for stragglers, of which there are none")
        if self.stragglers and self.devices is not None:
            raise ValueError(
                "stragglers: cannot stand beside devices, whose speeds say who is slow; set "
                "devices.deadline and devices.partial_work, or leave devices out"
            )
        if self.stragglers and self.privacy is not None:
            raise ValueError(
                "stragglers: who takes part then depends on more than the accountant of privacy "
                "knows; leave one of them out"
            )
        return self

    @field_validator("clients_per_round", "batch_size", "evaluate_clients", mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return None if value in ("all", "full") else value

    @field_validator("workers", mode="before")
    @classmethod
    def _from_cores(cls, value: Any) -> Any:
        return 0 if value == "cores" else value

    @field_serializer("workers")
    def _cores_in_words(self, given: int) -> int | str:
        return given or "cores"

    @field_validator("metrics", mode="plain")
    @classmethod
    def _check_metrics(cls, given: Any) -> Any:
        named = metrics.by_name(given)
        return named if isinstance(given, Mapping) else tuple(named.values())

    @field_serializer("metrics")
    def _metrics_in_words(self, given: Any) -> Any:
        if isinstance(given, Mapping):
            return {name: metrics.word(metric) for name, metric in given.items()}
        return [metrics.word(metric) for metric in given]

    @field_validator("keep")
    @classmethod
    def _check_keep(cls, text: str | None) -> str | None:
        Goal(text or "best")
        return text

    def to_dict(self) -> dict[str, Any]:
        """Plain values for TOML. What is None or empty, as in older versions, is left out."""
        table = {
            name: value for name, value in plain(self.model_dump()).items() if value not in ([], {})
        }
        if self.local_epochs is None:
            del table["drop_last"]
        for name, usual in (("mean", "plain"), ("kept_state", "auto")):
            if table[name] == usual:
                del table[name]
        if not self.stragglers:
            del table["stragglers"], table["straggler_work"]
        return {"batch_size": "full", **table} if self.batch_size is None else table

    def steps(self, samples: int) -> int:
        """The local steps of a client with so many samples."""
        if self.local_epochs is None:
            return self.local_steps or 0
        size = self.batch_size or samples
        batches = samples // size if self.drop_last else math.ceil(samples / size)
        return self.local_epochs * max(1, batches)

    def batch_sizes(self, samples: int) -> set[int]:
        """Of what a client with so many samples computes a gradient of at a time."""
        size = self.batch_size or samples
        sizes = {size}
        if self.local_epochs is not None:
            short = set() if self.drop_last and samples >= size else {samples % size} - {0}
            sizes = short | ({size} if samples >= size else set())
        if (most := self.micro_batch) is None:
            return sizes
        return {n for s in sizes for n in ((most, s % most) if s > most else (s,)) if n}

    def with_steps(self, steps: int) -> Self:
        """The same with so many local steps for each client."""
        return self.model_copy(update={"local_steps": steps, "local_epochs": None})

    def with_workers(self) -> Self:
        """The same with a number of workers, for this machine."""
        return self if self.workers else self.model_copy(update={"workers": usable_threads()})

    def weights(self, clients: Sequence[int], size: Callable[[int], int]) -> list[float]:
        """The weight of each of these clients, who have so many samples."""
        if self.weighting == "uniform":
            return [1.0] * len(clients)
        return [self.weight(client, size(client)) for client in clients]

    def weight(self, client: int, samples: int) -> float:
        """The weight of a client with this number of samples in every mean over the cohort."""
        if isinstance(self.weighting, list):
            return self.weighting[client]
        return 1.0 if self.weighting == "uniform" else float(samples)
