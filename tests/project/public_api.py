"""What users of the package may call: names, signatures, options and their defaults.

python -m tests.project.public_api      write public_api.json anew, after a change that is meant
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import prefed
from prefed import _api

FILE = Path(__file__).with_name("public_api.json")


def describe() -> dict[str, Any]:
    return {
        "names": sorted(_api.__all__),
        "functions": {
            "simulate": _lines(prefed.simulate),
            "load": _lines(prefed.load),
            "load_runs": _lines(prefed.load_runs),
            "to_pandas": _lines(prefed.to_pandas),
            "FederatedData": _lines(prefed.FederatedData),
            "optim.Covariance": _lines(prefed.optim.Covariance),
            **{name: _lines(getattr(prefed, name)) for name in _POLICIES},
            **{f"schedule.{n}": _lines(getattr(prefed.schedule, n)) for n in _SCHEDULES},
            **{f"Callback.{n}": _lines(f) for n, f in _methods(prefed.Callback)},
            **{f"FederatedData.{n}": _lines(f) for n, f in _methods(prefed.FederatedData)},
            **{f"Run.{n}": _lines(f) for n, f in _methods(prefed.Run)},
            **{f"Result.{n}": _lines(f) for n, f in _methods(prefed.Result)},
        },
        "algorithms": {
            name: {key: _default(field) for key, field in _fields(name).items()}
            for name in _ours("ALGORITHMS")
        },
        "settings": {key: _default(f) for key, f in prefed.Settings.model_fields.items()},
        "registries": {name: _ours(name) for name in _REGISTRIES},
    }


_POLICIES = ("average", "derived", "keep", "reset")
_REGISTRIES = ("ATTACKS", "CODECS", "DATASETS", "ENGINES", "MEANS", "METRICS", "MODELS", "RULES",
               "SPLITS")  # fmt: skip
_SCHEDULES = ("at", "cosine", "step", "warmup")


def _ours(registry: str) -> list[str]:
    """What is registered under that name by the package itself."""
    things = getattr(prefed, registry)
    return [n for n in things.names() if things.get(n).__module__.startswith("prefed.")]


def _lines(function: Any) -> list[str]:
    """A line for each parameter, so that a change shows as one line."""
    found = inspect.signature(function).parameters.values()
    return [str(p.replace(annotation=p.empty)) for p in found if p.name != "self"]


def _methods(kind: type) -> list[tuple[str, Any]]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return [(name, function) for name, function in found if not name.startswith("_")]


def _fields(name: str) -> dict[str, Any]:
    return prefed.ALGORITHMS.get(name).model_fields


def _default(field: Any) -> str:
    return "(required)" if field.is_required() else repr(field.default)


if __name__ == "__main__":
    FILE.write_text(json.dumps(describe(), indent=1) + "\n")
