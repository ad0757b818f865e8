"""The configuration reference, made from the models and registries themselves: what
docs/configuration.md shows cannot be out of date."""

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from prefed import _api
from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.codecs import CODECS
from prefed.core import losses, schedule
from prefed.core.option_models import explained, options_model
from prefed.core.registry import Registry
from prefed.data.dataset import DATASETS, GIVEN_TO_SPLITS, SPLITS
from prefed.experiments.config import Config
from prefed.experiments.named_parts import Data
from prefed.experiments.printed_tables import Cell, PrintedTable
from prefed.experiments.study import Study, Tuning, Variant
from prefed.models import MODELS
from prefed.rules import Rule
from prefed.training.asynchronous import Asynchronous
from prefed.training.availability import Windows
from prefed.training.device_classes import DeviceClass
from prefed.training.devices import Devices
from prefed.training.distributions import Distribution
from prefed.training.engines import ENGINES
from prefed.training.privacy_setting import AdaptiveClip, Privacy

GIVEN = {*GIVEN_TO_SPLITS, "inputs", "classes", "task", "data", "settings", "output", "y",
         "outputs", "targets"}  # fmt: skip
"""What a run hands to splits, models, engines, losses and metrics by itself."""
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "table"}
SCHEDULES = (schedule.Step, schedule.Cosine, schedule.Warmup)
SIGNS = {Gt: "> ", Ge: "≥ ", Lt: "< ", Le: "≤ "}


@dataclass(frozen=True)
class Option:
    name: str
    kind: str
    default: str
    text: str


def options_of(model: type[BaseModel], texts: dict[str, str]) -> list[Option]:
    """The fields of a model; `texts` explains those that do not explain themselves."""
    found = []
    for name, field in model.model_fields.items():
        if name in ("schedule", "distribution", "name"):
            continue
        value = field.get_default(call_default_factory=True)
        default = "required" if value is PydanticUndefined else f"`{toml(value)}`"
        default = {"`None`": "not set"}.get(default, default)
        text = explained(model, name) or " ".join(texts.get(name, "").split())
        found.append(Option(name, kind_of(field.annotation, field.metadata), default, text))
    return found


def toml(value: Any) -> str:
    """A value as it stands in a config."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, BaseModel) or value == {}:
        return "{}"
    if isinstance(value, Rule):
        options = ", ".join(f"{key} = {toml(item)}" for key, item in value.written().items())
        return f"{{{options}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def kind_of(annotation: Any, metadata: typing.Sequence[Any] = ()) -> str:
    """The type in words: "number > 0", '"ema" or "sum"', "list of whole numbers"."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind_of(inner[0], inner[1:])
    if origin in (typing.Union, types.UnionType):
        kinds = dict.fromkeys(kind_of(kind) for kind in inner if kind is not type(None))
        return either([*kinds])
    if origin is typing.Literal:
        return either([f"`{toml(value)}`" for value in inner])
    if origin in (list, tuple, collections.abc.Sequence):
        return f"list of {kind_of(inner[0])}".replace("number", "numbers").replace("text", "texts")
    if origin is collections.abc.Callable:
        return '`"module:function"`'
    if annotation in SCHEDULES:
        return "schedule"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if annotation is Rule:
        return "rule"
    word = WORDS.get(origin or annotation, "value")
    limits = [  # the largest seed is no news
        f"{sign}{getattr(limit, kind.__name__.lower()):g}"
        for limit in metadata
        for kind, sign in SIGNS.items()
        if isinstance(limit, kind) and abs(getattr(limit, kind.__name__.lower())) < 1e9
    ]
    return " ".join([word, " and ".join(limits)]).strip()


def either(kinds: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))


def table(options: list[Option]) -> list[str]:
    if not options:
        return []
    rows = [
        f"| `{o.name}` | {o.kind} | {o.default} | {o.text} |".replace(" |  |", " | |")
        for o in options
    ]
    return ["", "| key | type | default | |", "|---|---|---|---|", *rows, ""]


def doc_of(thing: Any) -> tuple[str, dict[str, str]]:
    """The first paragraphs of a docstring, and what its list of options says of each."""
    prose, options, last = [], {}, []
    for line in (inspect.getdoc(thing) or "").splitlines():
        if found := re.match(r"([a-z_]\w*(?:, \w+)*)  +(\S.*)", line):
            last = found[1].split(", ")
            options |= dict.fromkeys(last, found[2])
        elif last and line.startswith("  "):
            options |= {name: f"{options[name]} {line.strip()}" for name in last}
        else:
            last = []
            prose.append(line)
    return "\n".join(prose).strip(), options


def text_of(thing: Any) -> str:
    """Its docstring, with formulas as code and no Markdown in it by accident."""
    text = doc_of(thing)[0] if not inspect.isclass(thing) or thing.__doc__ else ""
    return re.sub(r"\n\n((?:    .*\n?)+)", r"\n\n```text\n\1\n```\n", text)


def named(title: str, registry: Registry[Any], skip: set[str] | None = None) -> Iterator[str]:
    """A section for each thing that is registered."""
    for name in registry.names():
        thing = registry.get(name)
        is_model = inspect.isclass(thing) and issubclass(thing, BaseModel)
        model = thing if is_model else options_model(thing, GIVEN)
        kinds = reversed(thing.__mro__) if inspect.isclass(thing) else [thing]
        texts = {key: text for kind in kinds for key, text in doc_of(kind)[1].items()}
        options = options_of(model, texts)
        yield from ["", f"### {title} `{name}`", "", text_of(thing)]
        yield from table([o for o in options if o.name not in (skip or set())])


def distributions() -> list[type[Distribution]]:
    return Distribution.__subclasses__()


def page() -> str:
    base = {name: Algorithm.model_fields[name] for name in Algorithm.model_fields}
    lines = ["## Settings", "", "At the top of a config; `prefed.simulate` takes the same.", ""]
    parts = ("algorithm", "data", "model")
    lines += table([option for option in options_of(Config, {}) if option.name not in parts])
    lines += ["", "## `[privacy]`", "", text_of(Privacy), *table(options_of(Privacy, {}))]
    lines += ["", "### `[privacy.clip]`", "", text_of(AdaptiveClip)]
    lines += table(options_of(AdaptiveClip, {}))
    lines += ["", "## `[algorithm]`", "", "A `name`, and its options. These all algorithms have:"]
    lines += table(options_of(Algorithm, {}))
    for name in ALGORITHMS.names():
        kind = ALGORITHMS.get(name)
        own = [
            option
            for option in options_of(kind, {})
            if option.name not in base
            or kind.model_fields[option.name].default != base[option.name].default
        ]
        lines += ["", f"### algorithm `{name}`", "", text_of(kind), *table(own)]
    lines += [
        "",
        "## `[devices]`",
        "",
        "See [devices](devices.md).",
        *table(options_of(Devices, {})),
    ]
    lines += ["", "### `[devices.windows]`", "", text_of(Windows), *table(options_of(Windows, {}))]
    lines += ["", "### `[devices.classes.NAME]`", "", text_of(DeviceClass)]
    lines += table([o for o in options_of(DeviceClass, {}) if o.name == "share"])
    for kind in distributions():
        name = kind.model_fields["distribution"].default
        lines += ["", f"### distribution `{name}`", "", text_of(kind), *table(options_of(kind, {}))]
    lines += ["", "## `[asynchronous]`", "", "See [asynchronous rounds](asynchronous.md)."]
    lines += table(options_of(Asynchronous, {}))
    lines += ["", "## Schedules", "", "In place of a step size: a table with the key `schedule`, "]
    lines += ["or a function of the round, counted from 0, by its name."]
    for kind in SCHEDULES:
        name = kind.model_fields["schedule"].default
        lines += ["", f"### schedule `{name}`", "", text_of(getattr(schedule, name))]
        lines += table(options_of(kind, {}))
    lines += ["", "## `[data]`", "", "The `name` of a data set, its options, and:"]
    lines += table(options_of(Data, {}))
    lines += named("data set", DATASETS)
    lines += ["", "## `[data.split]`", "", "A `name`, and its options."]
    lines += named("split", SPLITS)
    lines += ["", "## `[model]`", "", "A `name`, and its options."]
    lines += named("model", MODELS)
    lines += ["", "## Codecs", "", "Of `upload`, `P_codec` and `m_codec`; an option stands in "]
    lines += ['brackets: `"topk(0.05)"`.']
    lines += named("codec", CODECS)
    lines += ["", "## Engines", "", "Of `engine`.", *named("engine", ENGINES)]
    shown = (ALGORITHMS, DATASETS, SPLITS, MODELS, CODECS, ENGINES)
    for name, registry in (vars(losses) | vars(_api)).items():  # what else has a name
        if isinstance(registry, Registry) and registry not in shown:
            lines += ["", f"## {name.capitalize()}", *named(registry.kind, registry)]
    lines += ["", "## Studies", "", "The file of `prefed study`."]
    lines += table(options_of(Study, {}))
    lines += ["", "### `[tuning]`", *table(options_of(Tuning, {}))]
    lines += ["", "### `[variants.LABEL]`", "", text_of(Variant), *table(options_of(Variant, {}))]
    lines += [
        "",
        "## Tables",
        "",
        "The file of `prefed table`.",
        *table(options_of(PrintedTable, {})),
    ]
    lines += ["", "### `[[cells]]`", *table(options_of(Cell, {}))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page())
