"""The options of things that are chosen by name, as pydantic sees them."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model, model_validator


class Options(BaseModel):
    """Options for which true is no number: Python takes it for 1."""

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, table: Any) -> Any:
        for name, value in table.items() if isinstance(table, Mapping) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and not _may_be_true(field.annotation):
                raise ValueError(f"{name}: should not be true or false")
        return table


def _may_be_true(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(isinstance(value, bool) for value in get_args(kind))
    return kind in (Any, bool) or any(map(_may_be_true, get_args(kind)))


class _OfFunction(Options):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def options_model(function: Callable[..., Any], given: Iterable[str] = ()) -> type[BaseModel]:
    """A model of the options of a function (or class), to check them as everything else is."""
    return _model(function, tuple(given))


@lru_cache(1000)
def _model(function: Callable[..., Any], given: tuple[str, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if name not in given and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
        ):  # fmt: skip
            empty = inspect.Parameter.empty
            kind = Any if parameter.annotation is empty else parameter.annotation
            fields[name] = (kind, ... if parameter.default is empty else parameter.default)
    return create_model("Options", __base__=_OfFunction, **fields)


def explained(model: type[BaseModel], name: str) -> str:
    """What a field says of itself, or of the field of a base that it has another default for."""
    inherited = (getattr(kind, "model_fields", {}).get(name) for kind in model.__mro__)
    texts = (field.description for field in inherited if field is not None and field.description)
    return " ".join(next(texts, "").split())
