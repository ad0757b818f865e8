"""All that the next rounds of a run depend on, as tensors with names: what a checkpoint holds."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.schedule import at
from prefed.training.records import compact
from prefed.training.trainer import Record, check_fits

if TYPE_CHECKING:
    from prefed.training.run import Run

OLD_NAMES = {"optimiser.steps_left": "optimiser.left"}
"""What checkpoints of earlier versions call a tensor."""


def snapshot(run: "Run") -> dict[str, Tensor]:
    """The tensors of a run themselves, not copies."""
    server = run.server
    tensors = {"weights": server.weights, "buffers": server.buffers, "steps": server.steps}
    tensors |= {f"optimiser.{name}": value for name, value in server.optimiser.items()}
    tensors |= {f"shared.{name}": value for name, value in server.shared.items()}
    tensors |= {f"mean_of_rounds.{name}": value for name, value in server.over_rounds.items()}
    if run.mechanism is not None:
        tensors["privacy.clip"] = run.mechanism.clip
    if run.best is not None:
        tensors |= run.best.tensors
    return tensors | run.trainer.state()


def restore(run: "Run", tensors: Mapping[str, Tensor], history: list[Record], engine: str) -> None:
    """Go on from a snapshot that was taken after the rounds in `history`."""
    _check_step_sizes(run, history)
    tensors = _with_new_names(run, tensors, history)
    here = snapshot(run)
    saved = {name: check_fits(name, tensors, value) for name, value in here.items()}
    run.trainer.load_state(tensors, engine)
    for name, value in here.items():
        value.copy_(saved[name])
    run.server.round, run.history = len(history), [compact(_with_nan(r)) for r in history]
    reason = ""
    for record in run.history:
        if run.mechanism is not None:
            run.mechanism.see(record)
        run.collapse.see(record)
        if run.stopper is not None:
            reason = run.stopper.see(record)
    if reason and run.rounds_left:  # the last of fewer rounds, in which nobody asked
        run.history[-1].setdefault("ended", reason)
    if run.best is not None:
        run.best.restore(tensors, run.history, run.server)


def _check_step_sizes(run: "Run", history: list[Record]) -> None:
    """A function is known by its name alone, and may be another one by now."""
    for option in ("client_lr", "server_lr"):
        rate = getattr(run.algorithm, option)
        if not callable(rate) or isinstance(rate, BaseModel):
            continue
        for round, record in enumerate(history):
            then, now = record.get(option), at(rate, round)
            if then is not None and not math.isclose(then, now, rel_tol=1e-9):
                raise PrefedError(
                    f"{option}: the function gives {now:g} in round {round + 1}, where the run "
                    f"that is to go on had {then:g}; hand in the same one"
                )


def _with_new_names(
    run: "Run", tensors: Mapping[str, Tensor], history: list[Record]
) -> dict[str, Tensor]:
    """A snapshot of an earlier version as this one takes it."""
    names = {new: old for new, old in OLD_NAMES.items() if old in tensors}
    tensors = {**tensors, **{new: tensors[old] for new, old in names.items()}}
    if "steps" not in tensors and "buffers" in tensors:  # from before constants stayed at home
        tensors["buffers"] = run.task.flat.buffers.from_before(tensors["buffers"])
        rounds = sum("skipped" not in record for record in history)
        tensors["steps"] = torch.tensor(rounds * (run.settings.local_steps or 0))
    return tensors


def _with_nan(record: Record) -> Record:
    """A record as the run had it: files have no NaN. Loss and accuracy on the test set are None in
    rounds without an evaluation; metrics are not there."""
    lost = {k for k in record if k.startswith("test_")} - {"test_loss", "test_accuracy"}
    lost.add("train_loss")
    return {k: math.nan if v is None and k in lost else v for k, v in record.items()}
