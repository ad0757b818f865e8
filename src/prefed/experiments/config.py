"""Configs: TOML, checked all at once, and built into a run.

rounds = 60                      # Settings: how the run goes
[algorithm]                      # a name, and the options of what it names
name = "prefed"
client_lr = 0.001
[data]
name = "digits"
split = {name = "dirichlet", clients = 50, alpha = 0.1}
[model]
name = "mlp"
[tuned.fedadam]                  # options for the algorithm if another one is chosen
server_lr = 0.01

Besides, `loss` names one: loss = {name = "cross_entropy", label_smoothing = 0.1}.
"""

import inspect
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from pydantic import (
    SerializeAsAny,
    ValidationError,
)
from torch import nn

from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.core import draws
from prefed.core.errors import PrefedError, did_you_mean, explain
from prefed.core.losses import LOSSES, OF_NUMBERS, make_loss
from prefed.core.parts import timed
from prefed.core.schedule import written
from prefed.data import FederatedData
from prefed.data.dataset import DATASETS, SPLITS, Dataset, partition
from prefed.experiments.changes import assign, make_change
from prefed.experiments.named_parts import Data, Named, wrong_parts
from prefed.experiments.toml_files import read
from prefed.models import MODELS
from prefed.training.engines.engine import check_engine
from prefed.training.ranks import make_trainer
from prefed.training.run import MakeTrainer, Run
from prefed.training.settings import Settings

MadeData = tuple[Dataset, FederatedData]
"""A data set, and it divided among clients."""


class Config(Settings):
    """A whole run. Made by `load`, which checks the options of every named part as well."""

    algorithm: SerializeAsAny[Named]
    data: SerializeAsAny[Data]
    model: SerializeAsAny[Named]
    loss: SerializeAsAny[Named] | None = None
    """By default cross-entropy for labels, and squared error for numbers."""

    def make_algorithm(self) -> Algorithm:
        return ALGORITHMS.get(self.algorithm.name)(**self.algorithm.options)

    def settings(self) -> Settings:
        return Settings(**{name: getattr(self, name) for name in Settings.model_fields})

    @timed("data")
    def make_data(self) -> MadeData:
        """The data set and its split, which depend on the config and seed alone."""
        dataset = DATASETS.get(self.data.name)(**self.data.options)
        if not isinstance(dataset, Dataset):
            found = type(dataset).__name__
            raise PrefedError(
                f"data: {self.data.name} should return a prefed.data.Dataset, not {found}"
            )
        if self.data.validation:
            dataset = dataset.hold_out(self.data.validation, draws.generator(self.seed, "held out"))
        if self.data.target == "input":
            dataset = dataset.with_input_as_target()
        split, generator = SPLITS.get(self.data.split.name), draws.generator(self.seed, "split")
        data = partition(dataset, split, generator, self.data.split.options)
        if self.data.client_noise:
            data = data.add_noise(self.data.client_noise, self.seed)
        share = self.data.client_test
        return dataset, data.hold_out(share, self.seed) if share else data

    def make_run(
        self,
        make_trainer: MakeTrainer = make_trainer,
        algorithm: Algorithm | None = None,
        data: MadeData | None = None,
    ) -> Run:
        """The run, with data, split and first weights that depend on the config and seed alone.

        data   what `make_data` gave for the same data and seed
        """
        dataset, split = data or self.make_data()
        loss = None if self.loss is None else make_loss(self.loss.name, **self.loss.options)
        algorithm, model = algorithm or self.make_algorithm(), self.make_model(dataset)
        settings, table = self.settings(), self.to_dict()
        return Run(algorithm, model, split, settings, loss, make_trainer, table)

    def make_model(self, dataset: Dataset) -> nn.Module:
        """The model with its first weights, for the inputs and outputs of the data set."""
        by_numbers = self.loss is not None and LOSSES.get(self.loss.name) in OF_NUMBERS
        classes = dataset.numbers if by_numbers else dataset.outputs
        given = {"inputs": dataset.inputs, "classes": classes}
        build = MODELS.get(self.model.name)
        wanted = inspect.signature(build).parameters
        with torch.random.fork_rng():
            torch.manual_seed(draws.torch_seed(self.seed, "weights"))
            options = {k: v for k, v in given.items() if k in wanted} | self.model.options
            try:
                return build(**options)
            except (RuntimeError, TypeError, ValueError) as error:
                if ":" in self.model.name:
                    raise  # a thing of the user's: they will want to see where
                what = str(error).partition("\n")[0]
                raise PrefedError(f"model: {self.model.name} cannot be built so: {what}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for TOML, enough to run it again."""
        written(self.algorithm.model_dump())
        table = super().to_dict()
        for key, default in (("target", "label"), ("client_test", 0), ("client_noise", 0)):
            if table["data"][key] == default:  # as in runs from before there was a choice
                del table["data"][key]
        return table


def load(source: str | dict[str, Any], changes: Iterable[str] = ()) -> Config:
    """A checked config from a file, a preset or a table, with changes of the form "key=value"."""
    table = read(source) if isinstance(source, str) else deepcopy(source)  # changes go deep
    if any("python" in part for k in ("model", "data") if isinstance(part := table.get(k), dict)):
        raise PrefedError(
            "model, data: they were made in Python, by a program that called prefed.simulate; a "
            "config cannot make them. The program goes on with such a run by resume=True"
        )
    tuned = table.pop("tuned", {})
    for name in ("algorithm", "model", "data", "loss"):
        if isinstance(table.get(name), str):
            table[name] = {"name": table[name]}
    settings = {*Config.model_fields, *Config.RENAMED}
    bare = [make_change(table, change, settings) for change in changes]
    algorithm = table.get("algorithm")
    if not isinstance(tuned, dict) or not all(isinstance(t, dict) for t in tuned.values()):
        raise PrefedError("tuned: should hold tables, one for each algorithm")
    if isinstance(algorithm, dict) and isinstance(algorithm.get("name"), str):
        table["algorithm"] = {**tuned_for(tuned, algorithm["name"]), **algorithm}
    known = _algorithm_options(table)
    errors: list[str] = []
    for key, value in filter(None, bare):
        path = key.split(".")
        if known is not None and path[0] in known:
            assign(table["algorithm"], path, value, key)
        elif known is not None or "algorithm" not in table:
            names = {*Config.model_fields, *(known or ())}
            has = [n for n in ALGORITHMS.names() if path[0] in ALGORITHMS.get(n).model_fields]
            told = did_you_mean(path[0], names)
            if known is not None and has:
                verb = "has" if len(has) == 1 else "have"
                told = f" of {table['algorithm']['name']}; {', '.join(has)} {verb} one of that name"
            errors.append(f"{key}: unknown option{told}")
    _fill_schedules(table)
    config = None
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        errors += explain(error, Config)
    if isinstance(engine := table.get("engine"), str):
        try:
            check_engine(engine)
        except PrefedError as error:
            errors.append(str(error))
    errors += wrong_parts(table)
    if errors or config is None:
        raise PrefedError("\n".join(errors))
    return config


def _fill_schedules(table: dict[str, Any]) -> None:
    """A cosine that does not say over how many rounds it falls does so over the run's; a warm-up by
    steps counts the run's local steps."""
    algorithm = table.get("algorithm")
    if not isinstance(algorithm, dict):
        return
    for name, value in algorithm.items():
        if isinstance(value, dict) and value.get("schedule") == "cosine" and "rounds" in table:
            algorithm[name] = {"rounds": table["rounds"], **value}
        by_steps = (
            isinstance(value, dict) and value.get("schedule") == "warmup" and "steps" in value
        )
        if by_steps and "local_steps" in table:
            algorithm[name] = {"local_steps": table["local_steps"], **value}


def algorithms_of(source: str) -> list[str]:
    """The algorithms a preset or config has step sizes for."""
    table = read(source)
    chosen = table.get("algorithm", {})
    name = chosen if isinstance(chosen, str) else chosen.get("name")
    names = [*table.get("tuned", {})] or [name]
    if None in names:
        raise PrefedError(f"{source}: names no algorithm; give --algorithms")
    return names


def tuned_for(tuned: dict[str, Any], name: str) -> dict[str, Any]:
    """The options for this algorithm, or for the nearest that it is a kind of: FedAvg's for
    FedNova."""
    try:
        kinds = ALGORITHMS.get(name).__mro__
    except (PrefedError, AttributeError):  # which is told elsewhere
        kinds = ()
    names = [name, *(ALGORITHMS.name_of(kind) for kind in kinds if issubclass(kind, Algorithm))]
    found: dict[str, Any] = next((tuned[n] for n in names if n in tuned), {})
    return found


def tuned_options(source: str, config: Config) -> dict[str, Any]:
    """The options of the config's algorithm that are what `source` has tuned for it."""
    tuned = tuned_for(read(source).get("tuned", {}), config.algorithm.name)
    chosen = config.algorithm.options
    return {name: value for name, value in tuned.items() if chosen.get(name) == value}


def _algorithm_options(table: dict[str, Any]) -> set[str] | None:
    """None if there is no such algorithm."""
    try:
        kind = ALGORITHMS.get(table["algorithm"]["name"])
        return {*kind.model_fields, *kind.contrib_options}
    except (PrefedError, KeyError, TypeError, AttributeError):
        return None
