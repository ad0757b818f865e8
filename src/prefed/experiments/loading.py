"""A finished run from disk: its model, its history and its config."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor, nn

from prefed.core.errors import PrefedError
from prefed.core.hashes import digest
from prefed.core.safe_files import read_whole
from prefed.experiments.config import load as load_config
from prefed.experiments.stored_runs import StoredRun, load_run
from prefed.training.result import BASE, BASE_SHA256, tensors_of


@dataclass
class LoadedRun(StoredRun):
    """A finished run, with its model."""

    model: nn.Module = field(default_factory=nn.Module)
    """With the best weights if the run kept them, else with the final ones."""


def load(folder: str | Path, model: nn.Module | None = None) -> LoadedRun:
    """The model, history and config of a run that has finished.

    folder    the directory of the run
    model     for a run of prefed.simulate: a model of the same shape; it stays as it is

    Where only adapters were trained, the model must have the base that the run had.

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
    _fill(model, found[0])
    model.eval()
    return LoadedRun(**vars(run), model=model)


def _fill(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into the model. What is not in it must be the base that it was
    trained on."""
    own = tensors_of(model)
    try:
        tensors, about = _read(path)
        if BASE_SHA256 in about and tensors.keys() <= own.keys():
            base = {name: value for name, value in own.items() if name not in tensors}
            _check_base(path, about, digest(*base.values()))
            tensors |= base
        model.load_state_dict(tensors)
    except (RuntimeError, OSError, safetensors.SafetensorError) as error:
        raise PrefedError(f"{path}: does not fit the model: {error}") from None


def _check_base(path: Path, about: dict[str, str], own: str) -> None:
    if own != about[BASE_SHA256]:
        raise PrefedError(
            f"{path}: was trained on the frozen weights of {about.get(BASE)} with the hash "
            f"{about[BASE_SHA256]}, and those of this model have {own}; build it from the same "
            f"base, with the same seed where some of it is random"
        )


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and what it says of itself in the JSON at its start."""
    content = read_whole(path)
    tensors, size = safetensors.torch.load(content), int.from_bytes(content[:8], "little")
    return tensors, json.loads(content[8 : 8 + size]).get("__metadata__", {})
