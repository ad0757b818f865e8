"""Trackers as callbacks: TensorBoard, MLflow, Weights & Biases (the extra `tracking`)."""

import importlib
import json
from pathlib import Path
from typing import Any

from prefed.core.errors import PrefedError, did_you_mean
from prefed.experiments.ranking import flatten
from prefed.training.observers import Callback
from prefed.training.trainer import Record


def tracker(name: str, folder: Path) -> Callback:
    """The tracker of that name for a run in `folder`."""
    kinds = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
    if name not in kinds:
        raise PrefedError(f"--track {name}: unknown tracker{did_you_mean(name, kinds)}")
    return kinds[name](folder)


def _numbers(record: Record) -> dict[str, float]:
    return {k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "round"}


class _Tracker(Callback):
    package: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.library: Any = importlib.import_module(self.package)
        except ImportError:
            name = type(self).__name__
            raise PrefedError(f"{name} is not installed: pip install 'prefed[tracking]'") from None


class TensorBoard(_Tracker):
    """Event files in the run's directory, under tensorboard/."""

    package = "torch.utils.tensorboard"

    def on_start(self, config: dict[str, Any]) -> None:
        self.writer = self.library.SummaryWriter(str(self.folder / "tensorboard"))
        self.writer.add_text("config", f"    {json.dumps(config)}")

    def on_round(self, record: Record) -> None:
        for name, value in _numbers(record).items():
            self.writer.add_scalar(name, value, record["round"])

    def close(self) -> None:
        self.writer.close()


class MLflow(_Tracker):
    """A run in MLflow's current tracking store (MLFLOW_TRACKING_URI)."""

    package = "mlflow"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            self.library.MlflowClient()
        except self.library.MlflowException as error:
            what = str(error).partition(". ")[0]
            raise PrefedError(
                f"--track mlflow: {what}; name a store that it writes to in MLFLOW_TRACKING_URI, "
                f"such as sqlite:///mlflow.db"
            ) from None

    def on_start(self, config: dict[str, Any]) -> None:
        self.library.start_run(run_name=self.folder.name)
        self.library.log_params(flatten(config))

    def on_round(self, record: Record) -> None:
        self.library.log_metrics(_numbers(record), step=record["round"])

    def close(self) -> None:
        self.library.end_run()


class WandB(_Tracker):
    """A run in the current Weights & Biases project (WANDB_PROJECT, WANDB_MODE)."""

    package = "wandb"

    def on_start(self, config: dict[str, Any]) -> None:
        self.tracked = self.library.init(name=self.folder.name, config=config)

    def on_round(self, record: Record) -> None:
        self.tracked.log(_numbers(record), step=record["round"])

    def close(self) -> None:
        self.tracked.finish()
