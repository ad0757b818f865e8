"""What each command listens on: the table of docs/security.md.

python -m tests.project.listening      runs them all and writes the table
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers import ROOT, made_tables
from tests.helpers.listening import Listener, allowed, of_command

TABLE = "what listens"
HEAD = ("command", "who listens", "on", "reached from")
PYTHON = sys.executable
SMALL = ["digits-noniid", "--set", "rounds=2", "--set", "data.split.clients=4",
         "--set", "clients_per_round=4", "--set", "algorithm=prefed"]  # fmt: skip
SHORT = [*SMALL, "--set", "local_steps=5"]
ALONE = [PYTHON, "-m", "prefed.core.private_network"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
RUN = ["-m", "prefed", "run", *SMALL, "--set", "local_steps=200", "--out", "run"]
MEET = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", "meet",
        "--local-addr", "127.0.0.1"]  # fmt: skip

Look = Callable[[Path], set[Listener]]


def prefed(*words: str, until: str = "") -> Look:
    return lambda cwd: of_command([PYTHON, "-m", "prefed", *words], cwd, until)


def torchrun(*words: str, inside: Sequence[str] = (), **environment: str) -> Look:
    command = [*inside, *TORCHRUN, *words, *RUN]
    return lambda cwd: of_command(command, cwd, environment=environment)


COMMANDS: dict[str, Look] = {
    "`prefed run`": prefed("run", *SHORT, "--set", "workers=2"),
    "`prefed compare`, `sweep`, `study`, `table`":
        prefed("compare", *SHORT, "--seeds", "2", "--workers", "2", "--algorithms", "fedavg"),
    "`prefed watch`": prefed("watch", "runs", until="Ctrl-C"),
    "`torchrun` as docs/engines.md shows it": torchrun(inside=ALONE),
    "`torchrun` whose ranks meet in a file":
        torchrun(*MEET, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
    "plain `torchrun`": torchrun(),
    "`prefed deploy --local`": prefed("deploy", *SHORT, "--local", "2", "--out", "run"),
    "`prefed deploy --simulate`": prefed("deploy", *SHORT, "--simulate", "2", "--out", "run"),
    "Flower in `make bench-peers`":
        lambda cwd: of_command(peers(cwd), cwd, {"Flower", "Ray"}),
}  # fmt: skip


def peers(cwd: Path) -> list[str]:
    """The benchmark of peers with the Flower that is installed here, and with no other peer: they
    end at once and are left out."""
    for name in ("pfl", "flower", "fedjax"):
        python = cwd / "peers" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {PYTHON} "$@"\n' if name == "flower" else "#!/bin/sh\n")
        python.chmod(0o755)
        (cwd / "peers" / name / "installed").touch()
    script = ROOT / "bench" / "peers" / "run.py"
    return [PYTHON, str(script), "W1", "--passes", "1", "--folder", str(cwd / "peers")]


def cells(command: str, found: set[Listener]) -> list[list[str]]:
    """The rows of a command: one for each program and reach."""
    together: dict[tuple[str, str], list[str]] = {}
    for one in sorted(found):
        together.setdefault((one.program, one.reached_from), []).append(f"`{one.address}`")
    if not together:
        return [[command, "nobody", "", ""]]
    return [[command, who, ", ".join(on), reach] for (who, reach), on in together.items()]


def main() -> None:
    if not allowed():
        sys.exit("this machine allows no network namespaces")
    table: list[list[str]] = []
    for command, look in COMMANDS.items():
        if not all(word in command for word in sys.argv[1:]):
            table += [row for row in made_tables.rows(TABLE) if row[0] == command]
            continue
        with tempfile.TemporaryDirectory() as folder:
            table += cells(command, look(Path(folder)))
        print(table[-1], flush=True)
    made_tables.write(TABLE, HEAD, table)


if __name__ == "__main__":
    main()
