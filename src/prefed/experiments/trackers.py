"""Trackers as callbacks: TensorBoard, MLflow, Weights & Biases (the extra `tracking`)."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefed.core.errors import PrefedError, did_you_mean
from prefed.experiments.ranking import flatten
from prefed.training.observers import Callback
from prefed.training.trainer import Record


def tracker(name: str, folder: Path, run: str | None = None, group: str | None = None) -> Callback:
    """The tracker of that name for a run in `folder`, or for one of many there."""
    kinds = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
    if name not in kinds:
        raise PrefedError(f"--track {name}: unknown tracker{did_you_mean(name, kinds)}")
    return kinds[name](folder, run, group)


@dataclass(frozen=True)
class Tracking:
    """Trackers of a comparison, sweep or study: every run of it is one of theirs, in a group.

    names  "tensorboard", "mlflow", "wandb"
    out    the directory of the comparison; event files of TensorBoard are in out/tensorboard
    group  the name of the comparison; that of the directory if not given
    """

    names: Sequence[str]
    out: Path
    group: str | None = None

    def __post_init__(self) -> None:
        self.callbacks("")  # what is unknown or not installed is an error now

    def callbacks(self, run: str) -> list[Callback]:
        group = self.group or self.out.resolve().name
        return [tracker(name, self.out, run, group) for name in self.names]


def _numbers(record: Record) -> dict[str, float]:
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "round"}


class _Tracker(Callback):
    package: str

    def __init__(self, folder: Path, run: str | None = None, group: str | None = None) -> None:
        """folder  of the run; or of all runs of a group, with the name of this `run`"""
        self.name, self.group = run or folder.name, group
        self.events = folder / "tensorboard" / (run or "")
        try:
            self.library: Any = importlib.import_module(self.package)
        except ImportError:
            name = type(self).__name__
            raise PrefedError(f"{name} is not installed: pip install 'prefed[tracking]'") from None


class TensorBoard(_Tracker):
    """Event files under tensorboard/ in the run's directory, or in that of the group."""

    package = "torch.utils.tensorboard"

    def on_start(self, config: dict[str, Any]) -> None:
        self.writer = self.library.SummaryWriter(str(self.events))
        self.writer.add_text("config", f"    {json.dumps(config)}")

    def on_round(self, record: Record) -> None:
        for name, value in _numbers(record).items():
            self.writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        self.writer.close()


class MLflow(_Tracker):
    """A run in MLflow's current tracking store (MLFLOW_TRACKING_URI)."""

    package = "mlflow"

    def __init__(self, folder: Path, run: str | None = None, group: str | None = None) -> None:
        super().__init__(folder, run, group)
        try:
            self.library.MlflowClient()
        except self.library.MlflowException as error:
            what = str(error).partition(". ")[0]
            raise PrefedError(
                f"--track mlflow: {what}; name a store that it writes to in MLFLOW_TRACKING_URI, "
                f"such as sqlite:///mlflow.db"
            ) from None

    def on_start(self, config: dict[str, Any]) -> None:
        tags = {"group": self.group} if self.group else None
        self.library.start_run(run_name=self.name, tags=tags)
        self.library.log_params(flatten(config))

    def on_round(self, record: Record) -> None:
        self.library.log_metrics(_numbers(record), step=record["round"])

    def close(self) -> None:
        self.library.end_run()


class WandB(_Tracker):
    """A run in the current Weights & Biases project (WANDB_PROJECT, WANDB_MODE)."""

    package = "wandb"

    def on_start(self, config: dict[str, Any]) -> None:
        self.tracked = self.library.init(name=self.name, group=self.group, config=config)

    def on_round(self, record: Record) -> None:
        self.tracked.log(_numbers(record), step=record["round"])

    def close(self) -> None:
        self.tracked.finish()
