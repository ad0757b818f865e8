"""The goals of a run: the model of its best round, and when to end before its last."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.training.goals import Best, Goal, Stopper
from prefed.training.server_state import Server
from prefed.training.trainer import Record, check_fits

if TYPE_CHECKING:
    from prefed.training.run import Run


class BestModel:
    """The model of the best round so far."""

    def __init__(self, goal: Goal) -> None:
        self._best = Best(goal)
        self.tensors: dict[str, Tensor] = {}
        """The model, as a checkpoint holds it; empty if no round has been evaluated."""

    @property
    def round(self) -> int:
        """Which round it is; 0 if there is none yet."""
        return self._best.round

    def see(self, record: Record, server: Server) -> None:
        """Keep the model if its round is the best so far."""
        if self._best.see(record):
            weights, buffers = (value.clone() for value in server.model())
            steps = server.steps.clone()
            self.tensors = {"best.weights": weights, "best.buffers": buffers, "best.steps": steps}

    def of(self, server: Server) -> Server:
        """The global state with the best model in it, if there is one."""
        if not self.tensors:
            return server
        weights, buffers, steps = self.tensors.values()
        return replace(server, weights=weights, buffers=buffers, steps=steps, over_rounds={})

    def restore(self, tensors: Mapping[str, Tensor], history: list[Record], server: Server) -> None:
        """Go on from a checkpoint that was taken after the rounds in `history`."""
        for record in history:
            self._best.see(record)
        if self.round:
            likes = {f"best.{n}": getattr(server, n) for n in ("weights", "buffers", "steps")}
            saved = {name: check_fits(name, tensors, like) for name, like in likes.items()}
            self.tensors = {n: v.to(likes[n].device, copy=True) for n, v in saved.items()}


def make_goals(run: "Run") -> tuple[BestModel | None, Stopper | None]:
    """One evaluation before the first round shows whether metrics work, and what they give."""
    settings, clients = run.settings, run.client_evaluation
    if not (settings.metrics or settings.keep or settings.stop_when or clients):
        return None, None
    if settings.metrics and run.data.test is None:
        raise PrefedError("metrics: there is no test set to compute them on; give data a test")
    found = run.evaluate() | (clients.try_out() if clients else {})
    known = ["train_loss", *(key for key, value in found.items() if isinstance(value, float))]
    best, stopper = None, None
    if settings.keep:
        goal = Goal(settings.keep)
        goal.resolve("keep", known)
        best = BestModel(goal)
    if settings.stop_when:
        stopper = Stopper(settings.stop_when, known)
    return best, stopper
