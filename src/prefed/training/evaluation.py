"""What is evaluated after a round, and what follows from it: an end, or a new best model."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from prefed.training.trainer import Record

if TYPE_CHECKING:
    from prefed.training.run import Run


def judge(run: "Run", record: Record) -> None:
    """Add to the record of a round what is due in it, and why the run ends with it, if it does."""
    is_last, reason = not run.rounds_left, ""
    done = _evaluate_if_due(run, record, is_last)
    if run.settings.stop_when and not is_last:
        reason = run.trainer.agree(run.stopper.see(record) if run.stopper else "")
    if run.mechanism is not None and not is_last:
        reason = reason or run.mechanism.over(run.server.round)
    if reason:
        _evaluate_if_due(run, record, True, done)
        record["ended"] = reason
    if run.best is not None:
        run.best.see(record, run.server)


def _evaluate_if_due(
    run: "Run", record: Record, is_last: bool, done: Collection[str] = ()
) -> list[str]:
    """Add what is due in this round, and is not done yet; returns what is done."""
    if not run.trainer.leads:
        return []
    kinds = {"all": (run.settings.evaluate_every, run.evaluate)}
    if run.client_evaluation is not None:
        kinds["clients"] = (run.client_evaluation.every, run.client_evaluation.evaluate)
    if run.objective is not None:
        kinds["objective"] = (run.settings.evaluate_every, run.objective.evaluate)
    round, late = run.server.round, run.server.round >= run.evaluate_from
    due = [k for k, (every, _) in kinds.items() if is_last or (late and not round % every)]
    for kind in due:
        record |= kinds[kind][1]() if kind not in done else {}
    return due
