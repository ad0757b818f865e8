"""prefed against its peers: rounds of FedAvg on the same data, model and steps, in turn.

    make bench-peers

Each framework is installed in an environment of its own (the first run downloads them) and set
up as its documentation does. All processes stay alive and wait; in every pass each runs rounds for
half a second, one at least, while the others rest, so that a slow moment of the machine hits all.
A framework that cannot be installed or started is left out, with the reason. Each runs in a network
of its own with nothing but loopback: Ray, under Flower's simulation engine, and torch's ranks
listen on all interfaces. Where the system allows no such network, only --open-network runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prefed.core import private_network
from prefed.core.errors import PrefedError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
REQUIREMENTS = {
    "pfl": ["torch", "pfl[pytorch]"],
    "flower": ["torch", "flwr[simulation]"],
    # Newer versions of JAX lack what the released fedjax uses.
    "fedjax": ["fedjax==0.0.17", "jax[cpu]==0.4.20", "numpy<2", "scipy<1.13", "optax<0.2",
               "dm-haiku<0.0.12", "setuptools"],
}  # fmt: skip


@dataclass
class Peer:
    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    def hear(self) -> dict[str, float]:
        """Its next report; a line that is none is the framework's own talk."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                report: dict[str, float] = json.loads(line)
                self.peak_mb = max(self.peak_mb, report["peak_mb"], self.memory())
                return report
        raise ChildProcessError(f"ended with code {self.process.wait()}")

    def turn(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.seconds.append(self.hear()["seconds"])

    def memory(self) -> float:
        """Megabytes that it and the processes it started hold now, shared pages counted once."""
        return sum(_pss(pid) for pid in _family(self.process.pid))

    def stop(self) -> None:
        for pid in _family(self.process.pid)[::-1]:
            subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)


def _family(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        try:
            children = Path(f"/proc/{member}/task/{member}/children").read_text()
        except OSError:
            continue
        found += [int(child) for child in children.split()]
    return found


def _pss(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def environment(name: str, folder: Path) -> Path:
    """The interpreter of a framework's environment, made if need be."""
    home = folder / name
    done = home / "installed"
    if not done.exists():
        print(f"installing {name} ...", flush=True)
        venv.create(home, with_pip=True)
        command = [str(home / "bin/pip"), "install", "-q", *map(pinned, REQUIREMENTS[name])]
        subprocess.run(command, check=True)
        done.touch()
    return home / "bin/python"


def pinned(requirement: str) -> str:
    """torch in the version that prefed is tested with; the rest as the framework asks for it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{requirement}==")), requirement)


def start(name: str, command: list[str], log: Path) -> Peer:
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, env=os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(HERE)},
        )  # fmt: skip
    return Peer(name, process)


def commands(work: str, folder: Path) -> dict[str, Callable[[], list[str]]]:
    """How each contestant is started; asking for it installs what it needs."""

    def peer(name: str, *options: str, ranks: int = 1) -> Callable[[], list[str]]:
        def command() -> list[str]:
            python = str(environment(name, folder))
            run = [] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            return [python, *run, f"with_{name}.py", work, *options]

        return command

    found = {
        "prefed": lambda: [sys.executable, "with_prefed.py", work, "auto"],
        "pfl, 1 process": peer("pfl"),
        "pfl, 2 processes": peer("pfl", ranks=2),
        "Flower simulation": peer("flower"),
        "fedjax": peer("fedjax"),
    }
    if work == "W1":
        found["prefed, compiled"] = lambda: [sys.executable, "with_prefed.py", work, "compiled"]
    else:
        found["pfl, 1 process, channels_last"] = peer("pfl", "channels_last")
        found["pfl, 2 processes, channels_last"] = peer("pfl", "channels_last", ranks=2)
    return found


def as_it_is(*command: str) -> list[str]:
    return list(command)


def measure(work: str, passes: int, folder: Path, contain: Callable[..., list[str]]) -> None:
    peers: list[Peer] = []
    log = folder / f"{work}.log"
    for name, command in commands(work, folder).items():
        try:
            peer = start(name, contain(*command()), log)
            peers.append(peer)
            peer.hear()
        except (ChildProcessError, subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: left out: {error} (see {log})", flush=True)
            peers = [p for p in peers if p.name != name]
    try:
        for done in range(passes):
            for peer in peers:
                peer.turn()
            print(f"{work}: pass {done + 1} of {passes}", flush=True)
    finally:
        for peer in peers:
            peer.stop()
    base = statistics.median(peers[0].seconds)
    print(f"\n| {work} | s a round | times prefed | peak MB |\n|---|---|---|---|")
    for peer in peers:
        seconds = statistics.median(peer.seconds)
        print(f"| {peer.name} | {seconds:.3f} | {seconds / base:.1f} | {peer.peak_mb:.0f} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", nargs="*", default=["W1", "W2"])
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument(
        "--open-network", action="store_true", help="let peers listen on all interfaces"
    )
    options = parser.parse_args()
    contain = as_it_is if options.open_network else private_network.inside
    try:
        contain("true")
    except PrefedError as error:
        sys.exit(f"error: {error}, and peers listen on all interfaces; insist with --open-network")
    options.folder.mkdir(parents=True, exist_ok=True)
    for work in options.work:
        measure(work, options.passes, options.folder.resolve(), contain)


if __name__ == "__main__":
    main()
