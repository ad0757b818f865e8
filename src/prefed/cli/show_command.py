"""prefed ls, cat, validate: what there is, and whether a config is right."""

import inspect
from typing import Annotated, Any

import typer

from prefed.cli.options import Changes, Source


def ls() -> None:
    """List presets, studies, algorithms, models, data sets, splits, engines, codecs and losses."""
    from prefed import ALGORITHMS, CODECS, DATASETS, ENGINES, LOSSES, MODELS, SPLITS
    from prefed.experiments.config import presets
    from prefed.experiments.study import studies

    print("presets:    " + " ".join(presets()))
    print("studies:    " + " ".join(studies()))
    for title, registry in (
        ("algorithms", ALGORITHMS), ("models", MODELS), ("data sets", DATASETS),
        ("splits", SPLITS), ("engines", ENGINES), ("codecs", CODECS), ("losses", LOSSES),
    ):  # fmt: skip
        print(f"{title + ':':<12}" + " ".join(registry.names()))


def cat(
    name: Annotated[str, typer.Argument(help="a preset, or anything `prefed ls` lists")],
) -> None:
    """Print a preset or a study, or what an algorithm, model, data set, split, codec, engine or
    loss is and its options; also of your own, as module:name."""
    from importlib.resources import files

    from prefed.core.errors import PrefedError, did_you_mean
    from prefed.experiments.config import presets
    from prefed.experiments.study import find, studies

    if name in presets():
        print(files("prefed").joinpath("presets", f"{name}.toml").read_text(), end="")
        return
    kinds = _kinds()
    if ":" in name:
        handed = tuple(name for given in kinds.values() for name in given)
        print(f"{name}\n\n{_described(next(iter(kinds)).get(name), handed)}", end="")
        return
    found = [registry for registry in kinds if name in registry.names()]
    for registry in found:
        print(
            f"{registry.kind} {name}\n\n{_described(registry.get(name), kinds[registry])}", end=""
        )
    if not found and name in studies():
        print(find(name).read_text(), end="")
    elif not found:
        known = {*presets(), *studies(), *(n for registry in kinds for n in registry.names())}
        raise PrefedError(f"nothing is called {name!r}{did_you_mean(name, known)}")


def _kinds() -> dict[Any, tuple[str, ...]]:
    """What can be named, and which parameters are no options since they are handed over."""
    from prefed import ALGORITHMS, CODECS, DATASETS, ENGINES, LOSSES, MODELS, SPLITS
    from prefed.data.dataset import GIVEN_TO_SPLITS

    return {
        ALGORITHMS: (), MODELS: ("inputs", "classes"), DATASETS: (), SPLITS: GIVEN_TO_SPLITS,
        CODECS: (), ENGINES: ("task", "data", "settings"), LOSSES: ("output", "y"),
    }  # fmt: skip


def _described(thing: Any, given: tuple[str, ...] = ()) -> str:
    """What a thing says of itself, and its options with their defaults."""
    from prefed.experiments.config import options_model

    about = inspect.getdoc(thing) or inspect.getdoc(inspect.getmodule(thing)) or ""
    text = f"{about}\n\n"
    model = thing if hasattr(thing, "model_fields") else None
    if model is None and callable(thing):
        model = options_model(thing, given)
    for option, field in model.model_fields.items() if model is not None else ():
        default = "(required)" if field.is_required() else repr(field.default)
        text += f"    {option} = {default}\n"
    return text


def validate(config: Source, set: Changes = []) -> None:
    """Check a config and print every error in it at once."""
    from prefed.experiments.config import load

    load(config, set)
    print(f"{config}: ok")
