"""prefed ls, cat, validate: what there is, and whether a config is right."""

import inspect
import sys
import textwrap
from typing import Annotated, Any

import typer

from prefed.cli.options import Changes, Source
from prefed.cli.text import joined, say

INDENT = 8 * " "
"""Of what an option does, below its name."""


def ls() -> None:
    """List presets, studies, tables, and what they name: algorithms, models, data sets, ..."""
    from prefed import _api as api
    from prefed.experiments.toml_files import presets, studies, tables
    from prefed.training.device_classes import CLASSES

    for title, names in (("presets", presets()), ("studies", studies()), ("tables", tables())):
        say(f"{title + ':':<12}" + " ".join(names), 12 * " ")
    for title, registry in (
        ("algorithms", api.ALGORITHMS), ("rules", api.RULES), ("models", api.MODELS),
        ("data sets", api.DATASETS), ("splits", api.SPLITS), ("engines", api.ENGINES),
        ("codecs", api.CODECS), ("losses", api.LOSSES), ("means", api.MEANS),
        ("attacks", api.ATTACKS),
    ):  # fmt: skip
        say(f"{title + ':':<12}" + " ".join(registry.names()), 12 * " ")
    say(f"{'devices:':<12}" + " ".join(CLASSES), 12 * " ")


def cat(
    name: Annotated[str, typer.Argument(help="a preset, or anything `prefed ls` lists")],
) -> None:
    """Print a preset, study or table, or what an algorithm, rule, model, data set, split, codec,
    engine, loss, mean, attack or kind of device is and its options; also of your own, as
    module:name."""
    from tomli_w import dumps

    from prefed.core.errors import PrefedError, did_you_mean
    from prefed.core.registry import from_user
    from prefed.experiments.toml_files import find, shipped
    from prefed.training.device_classes import CLASSES

    folders = [folder for folder in ("presets", "studies", "tables") if name in shipped(folder)]
    if "presets" in folders:
        print(find("presets", name).read_text(), end="")
        return
    if name in CLASSES:
        print(
            f"# devices {name}: in a config, devices = {name!r}\n"
            + dumps(CLASSES[name].model_dump())
        )
        return
    kinds = _kinds()
    if ":" in name:
        handed = tuple(name for given in kinds.values() for name in given)
        say(f"{name}\n\n{_described(from_user(name), handed)}")
        return
    found = [registry for registry in kinds if name in registry.names()]
    for registry in found:
        say(f"{registry.kind} {name}\n\n{_described(registry.get(name), kinds[registry])}")
    if not found and folders:
        print(find(folders[0], name).read_text(), end="")
    elif not found:
        shown = [shipped(folder) for folder in ("presets", "studies", "tables")]
        names = [*shown, *(registry.names() for registry in kinds)]
        known = {name for some in names for name in some}
        near = did_you_mean(name, known, listed=False)
        raise PrefedError(
            f"nothing is called {name!r}{near or ';'} `prefed ls` lists what there is"
        )


def _kinds() -> dict[Any, tuple[str, ...]]:
    """What can be named, and which parameters are no options since they are handed over."""
    from prefed import _api as api
    from prefed.data.dataset import GIVEN_TO_SPLITS

    return {
        api.ALGORITHMS: (), api.MODELS: ("inputs", "classes"), api.DATASETS: (),
        api.SPLITS: GIVEN_TO_SPLITS, api.RULES: (), api.CODECS: (),
        api.ENGINES: ("task", "data", "settings"), api.LOSSES: ("output", "y"), api.MEANS: (),
        api.ATTACKS: (),
    }  # fmt: skip


def _described(thing: Any, given: tuple[str, ...] = ()) -> str:
    """What a thing says of itself, and its options with their defaults and what they do."""
    from prefed.core.option_models import explained, options_model

    about = inspect.getdoc(thing) or inspect.getdoc(inspect.getmodule(thing)) or ""
    text = f"{joined(about) if sys.stdout.isatty() else about}\n"
    model = thing if hasattr(thing, "model_fields") else None
    if model is None and callable(thing):
        model = options_model(thing, given)
    if model is None:
        return text
    for option, field in model.model_fields.items():
        default = "(required)" if field.is_required() else repr(field.default)
        text += f"\n    {option} = {default}"
        if about := explained(model, option):
            text += "\n" + textwrap.fill(about, 96, initial_indent=INDENT, subsequent_indent=INDENT)
    return text


def validate(config: Source, set: Changes = []) -> None:
    """Check a config, a study or a table, and print every error in it at once.

    Of a config the run is made too, up to its first round, if its data is on this machine.
    """
    from prefed.core.errors import PrefedError
    from prefed.data.reading import Missing
    from prefed.experiments import printed_tables, study
    from prefed.experiments.config import load
    from prefed.experiments.toml_files import kind_of

    if (kind := kind_of(config)) == "config":
        devices = load(config, set).devices
        if devices is not None:
            devices.check()
        try:
            load(config, [*set, "device=cpu"]).make_run()
        except Missing as missing:
            print(f"{config}: ok, as far as can be told without its data\n{missing}")
        else:
            print(f"{config}: ok")
        return
    if set:
        raise PrefedError(
            f"--set: changes a config, and this is a {kind}; write them into its `set`"
        )
    runs = {"study": study.check, "table": printed_tables.check}[kind](config)
    print(f"{config}: ok, a {kind} of {runs} runs")
