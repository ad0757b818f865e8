"""What can go wrong, in words for the person who has to mend it."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    M = TypeVar("M", bound=BaseModel)


class PrefedError(ValueError):
    """Wrong input: an option, a config, data or a model. Nothing has been trained yet."""


class Diverged(RuntimeError):
    """The training loss stopped being a finite number.

    Or the weights did. The global state is still the one before the round that failed, unless it
    was the server's own step that overflowed; `history` holds the rounds up to and including the
    failed one.
    """

    def __init__(self, message: str, history: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.history = history


class Interrupted(RuntimeError):
    """The run was asked to stop, and can be resumed."""


class RunFailed(RuntimeError):
    """A run of an experiment ended for another reason than divergence."""


class CannotWrite(RuntimeError):
    """The disk is full or read-only. What had been written before is intact."""


class RankLost(RuntimeError):
    """Another process of a distributed run has died or hangs."""


def did_you_mean(word: str, names: Iterable[str], listed: bool = True) -> str:
    """'; did you mean "x"?' for the nearest name, or the list of names if none is near; of names
    that are too many to be listed the nearest three."""
    names = sorted(names)
    near = difflib.get_close_matches(word.lower(), names, n=1 if listed else 3, cutoff=0.5)
    if near:
        return f"""; did you mean {" or ".join(f'"{name}"' for name in near)}?"""
    return f"; known: {', '.join(names)}" if names and listed else ""


def explain(error: "ValidationError", model: "type[BaseModel]", prefix: str = "") -> list[str]:
    """One line for each thing wrong: the key's path, what was expected, the nearest name."""
    lines: list[str] = []
    told: set[str] = set()
    for item in error.errors():
        path = _keys(item["loc"])
        where = prefix + ".".join(path)
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            owner = _model_at(model, path[:-1])
            names = owner.model_fields if owner is not None else ()
            known = did_you_mean(path[-1], names)
            lines.append(f"{where}: unknown option{'' if known in told else known}")
            told.add(known if known.startswith("; known") else "")
        elif item["type"] == "missing":
            lines.append(f"{where}: is required")
        elif item["type"] == "union_tag_invalid":
            expected = item["ctx"]["expected_tags"].replace("'", "").split(", ")
            tag = item["ctx"]["tag"]
            lines.append(f"{where}: unknown kind {tag!r}{did_you_mean(tag, expected)}")
        elif item["type"] == "union_tag_not_found":
            key = item["ctx"]["discriminator"].strip("'")
            lines.append(f"{where}: should say which {key} it is, with the key {key}")
        elif not path:
            lines.append(re.sub(r"\.$", ": ", prefix) + _text(item))
        else:
            text = _text(item)
            says = not text.startswith("should") or ", not " in text
            value = "" if says else f", not {shown(item['input'])}"
            lines.append(f"{where}: {text}{value}")
    return list(dict.fromkeys(lines))


def checked(model: "type[M]", values: Mapping[str, Any], prefix: str = "") -> "M":
    """The pydantic model of these values, or a PrefedError with a line for each thing wrong."""
    from pydantic import ValidationError

    try:
        return model(**values)
    except ValidationError as error:
        raise PrefedError("\n".join(explain(error, model, prefix))) from None


def shown(value: Any) -> str:
    """A value as Python writes it, cut where it gets long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or nested as deep
        return f"this {type(value).__name__}"
    return text if len(text) < 200 else text[:200] + "..."


def _text(item: Any) -> str:
    text = str(item["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    return text.rstrip(".")


TAGS = ("a number", "a function", "a word", "weights", "float", "int", "str")
"""Names of the members of unions, which are no keys."""


def _keys(path: tuple[int | str, ...]) -> list[str]:
    """The keys in a path of pydantic's, which also names the members of unions: ("client_lr",
    "a schedule", "step", "start") is client_lr.start."""
    keys: list[str] = []
    parts = iter(path)
    for part in parts:
        if part in ("a schedule", "a distribution"):
            next(parts, None)
        elif part not in TAGS:
            keys.append(str(part))
    return keys


def _model_at(model: "type[BaseModel]", path: list[str]) -> "type[BaseModel] | None":
    from pydantic import BaseModel

    for part in (part for part in path if not part.isdigit()):  # these count what a list has
        field = model.model_fields.get(part)
        kinds = get_args(field.annotation) or (field.annotation,) if field else ()
        models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not models:
            return None
        model = models[0]
    return model
