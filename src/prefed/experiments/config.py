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
import tomllib
from collections.abc import Iterable
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)
from torch import nn

from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.core import draws
from prefed.core.errors import PrefedError, checked, did_you_mean, explain
from prefed.core.losses import LOSSES, OF_NUMBERS, given_to, make_loss
from prefed.core.option_models import options_model
from prefed.core.parts import timed
from prefed.core.safe_files import read_whole
from prefed.core.schedule import written
from prefed.data import FederatedData
from prefed.data.dataset import DATASETS, GIVEN_TO_SPLITS, SPLITS, Dataset, partition
from prefed.models import MODELS
from prefed.training.engines.engine import check_engine
from prefed.training.ranks import make_trainer
from prefed.training.run import MakeTrainer, Run
from prefed.training.settings import Settings

M = TypeVar("M", bound=BaseModel)


class Named(BaseModel):
    """A name and the options of what it names; a name alone may stand for it."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Data(Named):
    split: Named
    """How the samples are divided among clients."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """This share of the training samples is set aside, and evaluated on in place of the test set:
    for choosing step sizes without a look at the test set."""
    client_test: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """This share of each client's samples is set aside as test samples of its own, to evaluate
    clients one by one."""
    client_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Gaussian noise on what the clients' models are given, from none for the first client to this
    standard deviation for the last, as in NIID-Bench."""
    target: Literal["label", "input"] = "label"
    """What the model is to give: the y of the data set, or, for an autoencoder, its input. The
    split goes by the labels in either case."""


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
    def make_data(self) -> tuple[Dataset, FederatedData]:
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
        self, make_trainer: MakeTrainer = make_trainer, algorithm: Algorithm | None = None
    ) -> Run:
        """The run, with data, split and first weights that depend on the config and seed alone."""
        dataset, data = self.make_data()
        loss = None if self.loss is None else make_loss(self.loss.name, **self.loss.options)
        algorithm, model = algorithm or self.make_algorithm(), self.make_model(dataset)
        settings, table = self.settings(), self.to_dict()
        return Run(algorithm, model, data, settings, loss, make_trainer, table)

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


KINDS = {"presets": "preset", "studies": "study", "tables": "table"}
"""Folders with TOML files that come with prefed, and what one of them is."""


def presets() -> list[str]:
    return shipped("presets")


def studies() -> list[str]:
    return shipped("studies")


def tables() -> list[str]:
    return shipped("tables")


def shipped(folder: str) -> list[str]:
    """The names of the TOML files that come with prefed."""
    names = (path.name for path in files("prefed").joinpath(folder).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def find(folder: str, source: str) -> Path:
    """The TOML file that `source` is the path of, or the name in a folder of prefed's."""
    if source in (known := shipped(folder)):
        return Path(str(files("prefed").joinpath(folder, f"{source}.toml")))
    if not Path(source).is_file():
        raise PrefedError(f"{source}: no such file or {KINDS[folder]}{did_you_mean(source, known)}")
    return Path(source)


def read(source: str) -> dict[str, Any]:
    """The table in a TOML file, or in the preset of that name."""
    if Path(source).is_dir() and source not in presets():
        raise PrefedError(f"{source}: is a directory; a run's config is the config.toml in it")
    if (kind := kind_of(source)) != "config":
        raise PrefedError(f"{source}: is a {kind}, not a config; `prefed {kind} {source}` runs it")
    return read_toml(find("presets", source))


def kind_of(source: str) -> str:
    """What a file, or a name, is of: a "config", a "study" or a "table"."""
    if source in presets():
        return "config"
    if not Path(source).is_file():
        return "study" if source in studies() else "table" if source in tables() else "config"
    keys = {*read_toml(Path(source))}
    if "config" not in keys or {"algorithm", "data"} & keys:
        return "config"
    return "table" if "cells" in keys else "study"


def read_plan(model: type[M], folder: str, source: str) -> tuple[str, M]:
    """The name of a study or a table, and its content."""
    path = find(folder, source)
    table = read_toml(path)
    if {"algorithm", "data"} <= {*table}:
        kind = KINDS[folder]
        raise PrefedError(f"{source}: is a config, not a {kind}; `prefed run {source}` runs it")
    return path.stem, checked(model, table, prefix=f"{path.name}: ")


LONGEST_FILE, LONGEST_LINE = 1 << 18, 10_000
"""Of a config, in characters: some that are longer take the parser for ever."""


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file, whatever is in the file."""
    try:
        text = read_whole(path).decode()
        if len(text) > LONGEST_FILE or any(len(line) > LONGEST_LINE for line in text.splitlines()):
            raise PrefedError(f"{path}: is too long for a config")
        return tomllib.loads(text)
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error.strerror or error}") from None
    except PrefedError:
        raise
    except (ValueError, RecursionError) as error:  # also numbers and nesting without end
        raise PrefedError(f"{path}: not valid TOML: {error}") from None


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
    bare = [_change(table, change) for change in changes]
    algorithm = table.get("algorithm")
    if not isinstance(tuned, dict) or not all(isinstance(t, dict) for t in tuned.values()):
        raise PrefedError("tuned: should hold tables, one for each algorithm")
    if isinstance(algorithm, dict) and isinstance(algorithm.get("name"), str):
        table["algorithm"] = {**_tuned(tuned, algorithm["name"]), **algorithm}
    known = _algorithm_options(table)
    errors: list[str] = []
    for key, value in filter(None, bare):
        path = key.split(".")
        if known is not None and path[0] in known:
            assign(table["algorithm"], path, value, key)
        elif known is not None or "algorithm" not in table:
            names = {*Config.model_fields, *(known or ())}
            errors.append(f"{key}: unknown option{did_you_mean(path[0], names)}")
    _fill_schedules(table)
    config = None
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        errors += explain(error, Config)
    errors += _check_parts(table)
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


def _tuned(tuned: dict[str, Any], name: str) -> dict[str, Any]:
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
    tuned = _tuned(read(source).get("tuned", {}), config.algorithm.name)
    chosen = config.algorithm.options
    return {name: value for name, value in tuned.items() if chosen.get(name) == value}


def _change(table: dict[str, Any], change: str) -> tuple[str, Any] | None:
    """Carry out "a.b=value" on the table. A key that does not begin with a setting is handed back:
    it may be an option of the algorithm, which is not known before all changes are made."""
    key, separator, text = change.partition("=")
    key = key.strip()
    if not separator or not key:
        raise PrefedError(f"--set {change}: should have the form key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    path = key.split(".")
    if path[0] not in {*Config.model_fields, *Config.RENAMED}:
        return key, value
    if isinstance(value, str) and key in ("algorithm", "model", "data", "data.split", "loss"):
        value = {"name": value}
        if key == "data":
            value = {**table.get("data", {}), **value}
    assign(table, path, value, change)
    table.pop(INSTEAD.get(key, ""), None)
    return None


INSTEAD = {"local_steps": "local_epochs", "local_epochs": "local_steps"}
"""Settings that a change of the other puts out of force."""
SEEDS = "--seeds says how many there are, from 0 on"


def refuse(changes: Iterable[str], **reasons: str) -> None:
    """Raise if one of these settings is changed, or a part of it that says which it is."""
    for change in changes:
        key = change.partition("=")[0].strip()
        if (reason := reasons.get(key.removesuffix(".name"))) is not None:
            raise PrefedError(f"--set {change}: {reason}")


def assign(table: dict[str, Any], path: list[str], value: Any, change: str) -> None:
    """Set the value at the path, making tables on the way; `change` is what an error names."""
    for part in path[:-1]:
        inner = table.setdefault(part, {})
        if isinstance(inner, str):
            inner = table[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise PrefedError(f"{change}: {part} is not a table")
        table = inner
    table[path[-1]] = value


def _algorithm_options(table: dict[str, Any]) -> set[str] | None:
    """None if there is no such algorithm."""
    try:
        kind = ALGORITHMS.get(table["algorithm"]["name"])
        return {*kind.model_fields, *kind.contrib_options}
    except (PrefedError, KeyError, TypeError, AttributeError):
        return None


def _check_parts(table: dict[str, Any]) -> list[str]:
    """What is wrong with the options of the named parts."""

    def part(*path: str) -> tuple[str, dict[str, Any]] | None:
        value: Any = table
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None  # the config's own check says so
        return value["name"], {k: v for k, v in value.items() if k not in Data.model_fields}

    errors: list[str] = []
    if isinstance(engine := table.get("engine"), str):
        try:
            check_engine(engine)
        except PrefedError as error:
            errors.append(str(error))
    sections = (
        (("algorithm",), ALGORITHMS, ()),
        (("model",), MODELS, ("inputs", "classes")),
        (("data",), DATASETS, ()),
        (("data", "split"), SPLITS, GIVEN_TO_SPLITS),
        (("loss",), LOSSES, ()),
    )
    for path, registry, given in sections:
        if (found := part(*path)) is None:
            continue
        name, options = found
        try:
            thing: Any = registry.get(name)
        except PrefedError as error:
            errors.append(f"{'.'.join(path)}.name: {error}")
            continue
        if registry is ALGORITHMS and not (
            isinstance(thing, type) and issubclass(thing, Algorithm)
        ):
            what = f"{name!r} is a {type(thing).__name__}, not a class of algorithms"
            errors.append(f"algorithm.name: {what}, as prefed.FedAvg is")
            continue
        no_options = given_to(thing) if registry is LOSSES else given
        model = thing if registry is ALGORITHMS else options_model(thing, no_options)
        try:
            model(**options)
        except ValidationError as error:
            errors += explain(error, model, prefix=".".join(path) + ".")
        except PrefedError as error:  # an algorithm says itself what is wrong with its options
            errors += [f"algorithm.{line.partition('.')[2]}" for line in str(error).splitlines()]
    return errors
