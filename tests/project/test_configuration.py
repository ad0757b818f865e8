"""The configuration reference, which is made from the program: whole, and in words."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

import prefed
from prefed.core.schedule import Rate
from prefed.experiments.config import load
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def reference() -> Any:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(reference: Any) -> str:
    text: str = reference.page()
    return text


def section(page: str, title: str) -> str:
    """From a heading to the next."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", page, flags=re.M | re.S)
    assert found, title
    return found[1]


def test_every_setting_and_every_name_is_there(page: str) -> None:
    settings = section(page, "Settings")
    assert all(f"| `{name}` |" in settings for name in prefed.Settings.model_fields)
    for title, registry in (
        ("algorithm", prefed.ALGORITHMS), ("data set", prefed.DATASETS), ("split", prefed.SPLITS),
        ("model", prefed.MODELS), ("codec", prefed.CODECS), ("engine", prefed.ENGINES),
    ):  # fmt: skip
        for name in registry.names():
            section(page, f"{title} `{name}`")


def test_every_option_has_a_type_a_default_and_an_explanation(page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    for row in rows:
        _, name, kind, default, text, _ = re.split(r" ?\| ?", row)
        assert kind, f"{name} has no type"
        assert default, f"{name} has no default"
        assert len(text) > 5, f"{name} is not explained: its docstring should say what it is"


def test_what_an_algorithm_has_of_its_own(page: str) -> None:
    text = section(page, "algorithm `prefedopt`")
    assert '| `server_lr` | number > 0, schedule or `"module:function"` | `0.002` |' in text
    assert '| `step_with` | `"delta"` or `"m"` | `"delta"` |' in text
    assert "clip_norm" not in text  # as all have it
    assert "| `mu` | number ≥ 0 | `0.01` |" in section(page, "algorithm `fedprox`")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PositiveInt | None, "whole number > 0"),
        (Annotated[float, Field(ge=0, lt=1)], "number ≥ 0 and < 1"),
        (Literal["a", "b", 3], '`"a"`, `"b"` or `3`'),
        (list[float] | None, "list of numbers"),
        (Rate, 'number > 0, schedule or `"module:function"`'),
        (bool, "true or false"),
    ],
)
def test_types_in_words(reference: Any, kind: Any, text: str) -> None:
    from pydantic import TypeAdapter, create_model

    TypeAdapter(kind)
    field = create_model("M", f=(kind, ...)).model_fields["f"]
    assert reference.kind_of(field.annotation, field.metadata) == text


def test_the_config_on_the_page_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    config = tmp_path / "config.toml"
    config.write_text(re.findall(r"```toml\n(.*?)```", text, flags=re.S)[0])
    assert load(str(config)).rounds == 60
    assert load(str(config), ["algorithm=fedadam"]).algorithm.options["server_lr"] == 0.01
