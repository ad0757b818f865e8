"""What a run ends in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import tomli_w
import torch
from torch import Tensor, nn

from prefed.core.errors import PrefedError
from prefed.core.hashes import digest
from prefed.core.safe_files import to_json, write_whole
from prefed.rules import State
from prefed.training.server_state import Server
from prefed.training.trainer import Record

if TYPE_CHECKING:
    import pandas

BASE, BASE_SHA256 = "base", "base_sha256"
"""In the metadata of a file with weights: what the parameters that are not in it are of."""


@dataclass(frozen=True, repr=False)
class Result:
    weights: Tensor
    """The weights of `model`, flat, parameter by parameter in the model's order."""
    model: nn.Module
    """The model with the final weights; with keep="best", with the best."""
    history: list[Record]
    """One record a round."""
    server: Server
    """The final global state, with the optimiser state."""
    kept: Mapping[int, State]
    """The state that clients keep, for those that took part."""
    client_model: Callable[[int], nn.Module]
    """The model that a client would use after the last round: the global one with the client's own
    parts."""
    best_round: int | None = None
    """The round that `model` is of, if the best was to be kept."""
    config: dict[str, Any] = field(default_factory=dict)
    """What was run, as config.toml has it."""

    @property
    def ended(self) -> str:
        """Why the run ended before its last round; empty if it did not."""
        return str(self.history[-1].get("ended", "")) if self.history else ""

    def __repr__(self) -> str:
        name = self.config.get("algorithm", {}).get("name", "Result")
        last = self.history[-1] if self.history else {}
        first = "epsilon" if "epsilon" in last else "train_loss"
        numbers = (first, "test_loss", "test_accuracy")
        parts = [
            f"{len(self.history)} rounds" + (f", ended early: {self.ended}" if self.ended else "")
        ]
        parts += [f"{key} {last[key]:.4g}" for key in numbers if last.get(key) is not None]
        if self.best_round is not None:
            parts.append(f"model of round {self.best_round}, the best")
        up, down = (sum(r[key] for r in self.history) / 1e6 for key in ("bytes_up", "bytes_down"))
        return f"<{name}: {'; '.join(parts)}; {up:.3g} MB up, {down:.3g} MB down>"

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for each round. Needs pandas: pip install 'prefed[pandas]'."""
        return frame(self.history)

    def save(self, folder: str | Path) -> None:
        """Write the model, the history and the config into a new directory, as `prefed.load` and
        `prefed report` read them. For a run that can be resumed, use `out` of `prefed.simulate`."""
        folder = Path(folder)
        if (folder / "config.toml").exists():
            raise PrefedError(f"{folder}: holds a run already; choose another directory")
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(to_json(record) + "\n" for record in self.history)
        write_whole(folder / "rounds.jsonl", lines)
        write_model(folder / "model.safetensors", self.model)
        write_whole(folder / "config.toml", tomli_w.dumps(self.config))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All weights and buffers under the model's own names, without what else it may save."""
    return {n: value for n, value in model.state_dict().items() if isinstance(value, Tensor)}


def write_model(path: Path, model: nn.Module) -> None:
    """Trained weights and buffers under the model's own names; what is frozen, the base that
    adapters belong to, is named and hashed in the file's metadata. A complex128 tensor, which the
    format does not know, is written as pairs of float64."""
    pairs, tensors = torch.complex128, tensors_of(model)
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = [n for n, p in parameters if not p.requires_grad and n in tensors]
    base = [tensors.pop(name) for name in frozen]
    plain = {n: torch.view_as_real(t) if t.dtype == pairs else t for n, t in tensors.items()}
    contents = {name: value.contiguous().clone() for name, value in plain.items()}
    name = str(getattr(model, "name_or_path", "") or type(model).__qualname__)
    about = {BASE: name, BASE_SHA256: digest(*base)} if base else None
    write_whole(path, safetensors.torch.save(contents, about))


def frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError:
        raise PrefedError("to_pandas needs pandas: pip install 'prefed[pandas]'") from None
    return pandas.DataFrame(rows)
