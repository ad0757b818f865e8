"""What clients keep between rounds, on the disk of their own node.

A file holds a client's state as it was after one round. The server says after which round a client
last took part, so a round that is tried again, or that the server forgot when it was restarted,
begins from the state it began from the first time. Older files go when newer ones come.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from prefed.core.errors import PrefedError
from prefed.core.safe_files import write_whole
from prefed.training.admission import Refused, Spec, check_values

NEVER = -1
"""In place of a round, for a client that has not taken part."""
VERSIONS = 4
"""A server that restarts goes back two rounds at most."""


def state_directory(node_config: dict[str, Any]) -> Path:
    """`state-dir` of the node's own config, $PREFED_STATE_DIR, or a place under Flower's home."""
    named = node_config.get("state-dir") or os.environ.get("PREFED_STATE_DIR")
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    return Path(str(named)) if named else home / "prefed-state"


class KeptState:
    def __init__(self, folder: Path, run: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise PrefedError(f"the server named its run {run!r}; expected hexadecimal digits")
        self.folder = folder / run

    def read(self, client: int, after: int, specs: dict[str, Spec]) -> dict[str, Tensor] | None:
        """The state after a round, or None if it is not there or damaged."""
        path = self._path(client, after)
        if after == NEVER or not path.exists():
            return None
        content = path.read_bytes()
        digest, data = content[:32], content[32:]
        if hashlib.sha256(data).digest() != digest:
            return None
        try:
            values = safetensors.torch.load(data)
            check_values(specs, values)
        except (safetensors.SafetensorError, Refused):
            return None
        return values

    def write(self, client: int, round: int, values: dict[str, Tensor]) -> None:
        path = self._path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = safetensors.torch.save({n: v.cpu().contiguous() for n, v in values.items()})
        write_whole(path, hashlib.sha256(data).digest() + data)
        for old in sorted(path.parent.glob("*.state"))[:-VERSIONS]:
            old.unlink(missing_ok=True)

    def _path(self, client: int, round: int) -> Path:
        return self.folder / f"client-{client}" / f"{round:08d}.state"
