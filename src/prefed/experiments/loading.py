"""A finished run from disk: its model, its history and its config."""

import copy
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
from torch import nn

from prefed.core.errors import PrefedError
from prefed.core.safe_files import read_whole
from prefed.experiments.config import load as load_config
from prefed.experiments.stored_runs import StoredRun, load_run


@dataclass
class LoadedRun(StoredRun):
    """A finished run, with its model."""

    model: nn.Module = field(default_factory=nn.Module)
    """With the best weights if the run kept them, else with the final ones."""


def load(folder: str | Path, model: nn.Module | None = None) -> LoadedRun:
    """The model, history and config of a run that has finished.

    folder    the directory of the run
    model     for a run of prefed.simulate: a model of the same shape; it stays as it is

    The model of a config is built anew, by the config's own words: if these name Python modules,
    they are imported, so do not load the runs of strangers.
    """
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise PrefedError(f"{folder}: holds no run; give the directory with its config.toml")
    run = load_run(folder)
    found = [p for n in ("best", "model") if (p := folder / f"{n}.safetensors").exists()]
    if not (folder / "model.safetensors").exists():
        raise PrefedError(f"{folder}: the run is {run.status}, and has no model yet; resume it")
    if model is None:
        if "python" in run.config.get("model", {}):
            kind = run.config["model"]["python"]
            raise PrefedError(
                f"{folder}: its {kind} was made in Python; give load(..., model=) one"
            )
        config = load_config(run.config)
        model = config.make_model(config.make_data()[0])
    else:
        model = copy.deepcopy(model)
    try:
        model.load_state_dict(safetensors.torch.load(read_whole(found[0])))
    except (RuntimeError, OSError, safetensors.SafetensorError) as error:
        raise PrefedError(f"{found[0]}: does not fit the model: {error}") from None
    model.eval()
    return LoadedRun(**vars(run), model=model)
