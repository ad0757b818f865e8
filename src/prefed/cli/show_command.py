"""prefed ls, cat, validate: what there is, and whether a config is right."""

import inspect
from typing import Annotated, Any

import typer

from prefed.cli.options import Changes, Source


def ls() -> None:
    """List presets, studies, algorithms, models, data sets, splits, engines and codecs."""
    from prefed import ALGORITHMS, CODECS, DATASETS, ENGINES, MODELS, SPLITS
    from prefed.experiments.config import presets
    from prefed.experiments.study import studies

    print("presets:    " + " ".join(presets()))
    print("studies:    " + " ".join(studies()))
    for title, registry in (
        ("algorithms", ALGORITHMS), ("models", MODELS), ("data sets", DATASETS),
        ("splits", SPLITS), ("engines", ENGINES), ("codecs", CODECS),
    ):  # fmt: skip
        print(f"{title + ':':<12}" + " ".join(registry.names()))


def cat(
    name: Annotated[str, typer.Argument(help="a preset, or anything `prefed ls` lists")],
) -> None:
    """Print a preset, or what an algorithm, model, data set, split or codec is and its options."""
    from importlib.resources import files

    from prefed import ALGORITHMS, CODECS, DATASETS, MODELS, SPLITS
    from prefed.core.errors import PrefedError, did_you_mean
    from prefed.experiments.config import options_model, presets

    if name in presets():
        print(files("prefed").joinpath("presets", f"{name}.toml").read_text(), end="")
        return
    found = False
    known = set(presets())
    for registry in (ALGORITHMS, MODELS, DATASETS, SPLITS, CODECS):
        known.update(registry.names())
        if name in registry.names() or ":" in name:
            thing: Any = registry.get(name)
            given = ("inputs", "classes", "labels", "generator", "keys")
            model: Any = thing if registry is ALGORITHMS else options_model(thing, given)
            print(f"{registry.kind} {name}\n\n{inspect.getdoc(thing) or ''}\n")
            for option, field in model.model_fields.items():
                default = "(required)" if field.is_required() else repr(field.default)
                print(f"    {option} = {default}")
            found = True
            break
    if not found:
        raise PrefedError(f"nothing is called {name!r}{did_you_mean(name, known)}")


def validate(config: Source, set: Changes = []) -> None:
    """Check a config and print every error in it at once."""
    from prefed.experiments.config import load

    load(config, set)
    print(f"{config}: ok")
