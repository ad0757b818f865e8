"""`prefed.simulate` and `prefed.load`: runs of models and data that are made in Python."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from prefed.algorithms import Algorithm
from prefed.core.errors import PrefedError, checked
from prefed.data import FederatedData
from prefed.experiments.bars import RoundBar
from prefed.experiments.run_directory import execute
from prefed.training.observers import Callback
from prefed.training.result import Result
from prefed.training.run import Run, Simulation
from prefed.training.settings import Settings
from prefed.training.task import Loss

__all__ = ["Result", "Run", "Simulation", "simulate"]


def simulate(
    algorithm: Algorithm,
    model: nn.Module,
    data: FederatedData,
    *,
    loss: Loss | str | Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    out: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train `model` on `data` with `algorithm`; the model that is handed in stays as it is.

    algorithm          such as prefed.PreFed(client_lr=0.01)
    model              any torch.nn.Module
    data               a prefed.FederatedData
    loss               (output, y) -> a number; a name, or a table with a name; None: by targets
    callbacks          see prefed.Callback
    out                a directory for checkpoints, the history and the model; None writes nothing
    resume             go on with the run in `out`, to the same bits; without one there, begin
    progress           True: a bar, elsewhere a line a round; None: a bar or nothing; False: nothing
    """
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise PrefedError(
            f"callbacks: should be a list of them, not {type(callbacks).__name__}; put it in one"
        )
    if resume and out is None:
        raise PrefedError("resume: needs out, the directory of the run to go on with")
    run = Run(algorithm, model, data, checked(Settings, settings), loss)
    if progress is not False:
        quiet = False if progress else None
        callbacks = [RoundBar(run.settings.rounds, quiet), *callbacks]
    return execute(run, None if out is None else Path(out), resume=resume, callbacks=callbacks)


def _describe(function: Callable[..., Any]) -> None:
    """Give a function that takes `**settings` their names, types, defaults and descriptions."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    lines = [inspect.cleandoc(function.__doc__ or "")]
    for name, field in Settings.model_fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.default
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, field.annotation
        own.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        lines.append(f"{name:<18} {' '.join((field.description or '').split())}")
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    function.__doc__ = "\n".join(lines)


_describe(simulate)
