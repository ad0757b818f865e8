"""Parts of a config that have a name and options, and whether these are right."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.core.errors import PrefedError, explain
from prefed.core.losses import LOSSES, given_to
from prefed.core.option_models import options_model
from prefed.data.dataset import DATASETS, GIVEN_TO_SPLITS, SPLITS
from prefed.models import MODELS


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


SECTIONS = (
    (("algorithm",), ALGORITHMS, ()),
    (("model",), MODELS, ("inputs", "classes")),
    (("data",), DATASETS, ()),
    (("data", "split"), SPLITS, GIVEN_TO_SPLITS),
    (("loss",), LOSSES, ()),
)
"""Where a config has named parts, what they are the names of, and which of their parameters are no
options but given."""


def wrong_parts(table: dict[str, Any]) -> list[str]:
    """What is wrong with the names and options of the named parts."""
    errors: list[str] = []
    for path, registry, given in SECTIONS:
        if (found := _part(table, path)) is None:
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
            own = rf"^{model.__name__}\b"
            errors += [re.sub(own, "algorithm", line) for line in str(error).splitlines()]
    return errors


def _part(table: dict[str, Any], path: tuple[str, ...]) -> tuple[str, dict[str, Any]] | None:
    """The name and the options at a place of a config; None if there are none."""
    value: Any = table
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    value = {"name": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None  # the config's own check says so
    return value["name"], {k: v for k, v in value.items() if k not in Data.model_fields}
