"""A whole Flower deployment on this machine: SuperLink, SuperNodes, TLS, keys, and an end to all of
them however the run ends."""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from prefed.core.errors import Diverged, PrefedError, RunFailed
from prefed.core.safe_files import is_locked
from prefed.experiments.config import Config
from prefed.experiments.run_directory import RunDirectory
from prefed.flower.credentials import make_certificates, make_node_key
from prefed.flower.deployment_options import Options
from prefed.flower.protocol import PARTITION, PARTITIONS
from prefed.flower.server import END, PARTITIONS_FOUND
from prefed.flower.write import write_app

NAME = "prefed"
"""Of the SuperLink in Flower's config."""
START_SECONDS = 60.0
STOP_SECONDS = 10.0

Say = Callable[[str], None]
"""Hears what is done or waited for before the first round."""


class LocalFlower:
    """Flower's processes on this machine, with a home of their own. Use it in a `with`."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self.home = Path(tempfile.mkdtemp(prefix="prefed-flower-"))
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._begins: dict[str, int] = {}
        """Where in its log file a process begins: a resumed run goes on in the same files."""
        self.environment = os.environ | {
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": os.pathsep.join(_import_paths()),
            "NO_COLOR": "1",
        }

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> "LocalFlower":
        self._handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGTERM, _interrupt)
        make_certificates(self.home)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.home / "ca.crt"}"\n'
        )
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # nothing may come between us and the end
        self.stop(*reversed(self.processes))
        self._sweep()
        shutil.rmtree(self.home, ignore_errors=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start_superlink(self, *, in_memory: bool = False) -> None:
        """With a database, and for the nodes alone that are registered; or in memory, for any."""
        known = ("--enable-supernode-auth", "--database", str(self.home / "state.db"))
        self.start(
            "superlink",
            "flower-superlink",
            *("--ssl-ca-certfile", str(self.home / "ca.crt")),
            *("--ssl-certfile", str(self.home / "server.pem")),
            *("--ssl-keyfile", str(self.home / "server.key")),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            "--disable-runtime-dependency-installation",
            *(() if in_memory else known),
        )
        self.wait_for_port("superlink", self.port)

    def register(self, public_key: Path) -> None:
        self.call("flwr", "supernode", "register", str(public_key), NAME)

    def start_supernode(
        self, name: str, node_config: dict[str, Any], key: Path | None, ca: Path | None = None
    ) -> subprocess.Popen[bytes]:
        config = " ".join(f"{k}={json.dumps(v)}" for k, v in node_config.items())
        auth = () if key is None else ("--auth-supernode-private-key", str(key))
        return self.start(
            name,
            "flower-supernode",
            *("--superlink", self.address, "--root-certificates", str(ca or self.home / "ca.crt")),
            *("--port", str(free_port()), "--node-config", config),
            *auth,
        )

    def add_supernode(self, name: str, node_config: dict[str, Any]) -> subprocess.Popen[bytes]:
        """A SuperNode with a key that is made and registered first."""
        key = self.home / name
        self.register(make_node_key(key))
        return self.start_supernode(name, node_config, key)

    def submit(self, app: Path, run_config: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Send the app to the SuperLink; the process ends with the run and logs what it says."""
        changes = " ".join(f"{k}={json.dumps(v)}" for k, v in run_config.items())
        command = ("flwr", "run", str(app), NAME, "--stream", "--run-config", changes)
        return self.start("run", *command)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(self.logs / f"{name}.log", "ab") as log:
            self._begins[name] = log.tell()
            process = subprocess.Popen(
                self._resolve(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.home,
                start_new_session=True,  # Ctrl-C is for us to handle
                preexec_fn=_die_with_parent,
            )
        self.processes[name] = process
        return process

    def logged(self, name: str, text: str) -> bool:
        """Whether the newest process of that name has logged it."""
        found = (self.logs / f"{name}.log").read_bytes()[self._begins[name] :]
        return text.encode() in found

    def stage(self) -> str:
        """What a run that was submitted waits for."""
        nodes = [name for name in self.processes if name.startswith("supernode")]
        there = sum(self.logged(name, "SuperNode ID") for name in nodes)
        app = "run" if "run" in self.processes else "simulation"
        if self.logged(app, PARTITIONS_FOUND):
            return "clients train in round 1"
        if there < len(nodes) or (nodes and not self.logged(app, "Start `flwr-serverapp`")):
            return f"{there} of {len(nodes)} nodes connected"
        return "ServerApp asks nodes for partitions"

    def call(self, *command: str) -> str:
        """Run one of Flower's commands to its end."""
        done = subprocess.run(
            self._resolve(command),
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.home,
            timeout=START_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RunFailed(
                f"{' '.join(command[:3])} failed: {(done.stderr or done.stdout)[-500:]}"
            )
        return done.stdout

    def _resolve(self, command: tuple[str, ...]) -> list[str]:
        found = shutil.which(command[0], path=self.environment["PATH"])
        if found is None:
            raise PrefedError(
                f"{command[0]} is not there; install it: pip install 'prefed[flower]'"
            )
        return [found, *command[1:]]

    def wait_for_port(self, name: str, port: int) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.processes[name].poll() is not None:
                break
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.1)
        raise RunFailed(f"the {name} did not start; see {self.logs / f'{name}.log'}")

    def _sweep(self) -> None:
        """Kill what lives in this home and in no process group of ours: a SuperLink that was
        killed leaves its ServerApp behind, which would hold the run directory (Linux only)."""
        mark = f"FLWR_HOME={self.home}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes() + b"\0":
                    os.kill(int(folder.name), signal.SIGKILL)

    def let_end(self, name: str) -> None:
        """Give a process that is about to end by itself the time to do so."""
        with suppress(subprocess.TimeoutExpired):
            self.processes[name].wait(STOP_SECONDS)

    def stop(self, *names: str) -> None:
        """End processes and all they have started: asked first, made to after a while."""
        groups = {name: self.processes.pop(name) for name in names}
        for process in groups.values():
            _signal(process, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        for process in groups.values():
            while _alive(process) and time.monotonic() < end:
                process.poll()
                time.sleep(0.05)
            _signal(process, signal.SIGKILL)
            process.wait()


@contextmanager
def local_flower(
    config: Config, folder: Path, nodes: int, options: Options, resume: bool
) -> Iterator[LocalFlower]:
    """Flower's processes on this machine with the app of a config, after all checks."""
    clients = len(config.make_data()[1])
    if nodes > clients:
        raise PrefedError(f"{nodes} nodes: there are only {clients} clients")
    check_folder(folder, config, resume)
    with released(folder), LocalFlower(folder / "logs") as flower:
        write_app(flower.home / "app", config, options)
        yield flower


def deploy_locally(
    config: Config,
    folder: Path,
    nodes: int,
    options: Options,
    *,
    resume: bool,
    on_record: Callable[[dict[str, Any]], None],
    say: Say = lambda text: None,
) -> None:
    """Run a config on a SuperLink and `nodes` SuperNodes here; the ServerApp writes `folder`."""
    folder = folder.absolute()
    with local_flower(config, folder, nodes, options, resume) as flower:
        say("SuperLink starts")
        flower.start_superlink()
        say("SuperLink is up; nodes get keys")
        place = {PARTITIONS: nodes, "state-dir": str(folder / "nodes")}
        names = [f"supernode-{number}" for number in range(nodes)]
        keys = [make_node_key(flower.home / name) for name in names]
        with ThreadPoolExecutor(4) as threads:  # most of it is Flower's command line starting up
            list(threads.map(flower.register, keys))
        for number, name in enumerate(names):
            flower.start_supernode(name, {PARTITION: number, **place}, flower.home / name)
        flower.submit(flower.home / "app", {"run-dir": str(folder), "resume": resume})
        follow(folder, config.rounds, flower, ("superlink", "run"), on_record, say)


def follow(
    folder: Path,
    rounds: int,
    flower: LocalFlower,
    needed: Sequence[str],
    on_record: Callable[[dict[str, Any]], None],
    say: Say = lambda text: None,
) -> None:
    """Hand on each round as it is written, until the run ends; raise if it did not end well, or if
    a process is gone that it needs."""
    seen, stage = 0, ""
    while True:
        gone = [name for name in needed if flower.processes[name].poll() is not None]
        lines = _lines(folder / "rounds.jsonl")
        for line in lines[seen:]:
            on_record(json.loads(line))
        seen = max(seen, len(lines))
        if not seen and (now := flower.stage()) != stage:
            say(stage := now)
        is_last = seen >= rounds or (seen and "ended" in json.loads(lines[-1]))
        if (folder / "model.safetensors").exists() and is_last:
            flower.let_end(*needed[-1:])
            return
        if (folder / END).exists():
            end = json.loads((folder / END).read_text())
            raise _as_told(end["kind"], end["message"])
        nodes = [q.poll() for name, q in flower.processes.items() if name.startswith("supernode")]
        if nodes and None not in nodes:
            raise RunFailed(
                f"all SuperNodes have died; continue with --resume\n{summary(flower.logs)}"
            )
        if gone:
            what = "the SuperLink has died" if gone[0] == "superlink" else "the run has ended early"
            raise RunFailed(f"{what}; continue with --resume\n{summary(flower.logs)}")
        time.sleep(0.2)


def summary(logs: Path) -> str:
    """The last exceptions in every log."""
    found = []
    for path in sorted(logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b", line)]
        found += [f"{path}: {line[:300]}" for line in errors[-2:]]
    return "\n".join(found) or f"the logs are in {logs}"


def check_folder(folder: Path, config: Config, resume: bool) -> None:
    """Say now, and not in a log of Flower's, what RunDirectory.open would refuse."""
    with RunDirectory.open(folder, config.to_dict(), resume):
        pass
    (folder / END).unlink(missing_ok=True)


@contextmanager
def released(folder: Path) -> Iterator[None]:
    """Afterwards nobody holds the run directory: a process that was killed lets go of it a moment
    later."""
    try:
        yield
    finally:
        end = time.monotonic() + STOP_SECONDS
        while is_locked(folder) and time.monotonic() < end:
            time.sleep(0.05)


def _lines(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _as_told(kind: str, message: str) -> Exception:
    """The error that ended a ServerApp, in this process."""
    if kind == "Diverged":
        return Diverged(message, [])
    return PrefedError(message) if kind == "PrefedError" else RunFailed(message)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _alive(process: subprocess.Popen[bytes]) -> bool:
    """Whether anything of its process group is left."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _import_paths() -> list[str]:
    """Where modules are found here, for processes that stand elsewhere: a config may name things
    of the user's own."""
    paths = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return [str(Path(path).absolute()) for path in paths if path]


def _die_with_parent() -> None:
    """If prefed itself is killed, what it started must not stay behind (Linux only). The signal
    comes when the thread ends that started it, so that must be the main one."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
