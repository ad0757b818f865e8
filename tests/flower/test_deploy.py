"""Real deployments: SuperLink, SuperNodes, TLS and keys, in processes of their own.

One small run is part of `make test`. `make deployments` adds the slow ones: five algorithms on four
nodes, a stock app, nodes and SuperLinks that are killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from prefed.cli import app
from prefed.core.errors import PrefedError
from prefed.core.safe_files import is_locked
from prefed.experiments.bars import RoundBar
from prefed.experiments.config import load
from prefed.experiments.stored_runs import load_run
from prefed.flower.credentials import make_certificates, make_node_key
from prefed.flower.deployment_options import Options
from prefed.flower.local_deployment import LocalFlower, follow
from prefed.flower.protocol import PARTITION, PARTITIONS
from prefed.flower.server import PARTITIONS_FOUND
from prefed.flower.write import write_app
from tests.helpers import ROOT
from tests.helpers.commands import prefed_here
from tests.helpers.federation import told_by_all
from tests.helpers.listening import BETWEEN, allowed, seen


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment for a deployment; in the end none of its processes and files is left."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    yield {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    deadline = time.monotonic() + 20  # Flower's own watchdogs take a few seconds
    while (left := processes_of(scratch)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left
    assert not list(scratch.glob("prefed-flower-*"))


def processes_of(scratch: Path) -> dict[int, str]:
    """Processes whose Flower lives under that directory."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={scratch}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
        except OSError:
            continue
    return found


def deploy(
    words: list[str], environment: dict[str, str], inside: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "prefed", "deploy", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def assert_equals_simulation(folder: Path, changes: list[str]) -> None:
    simulation = load("digits-noniid", [*changes, "engine=sequential"]).make_run()
    stored = load_run(folder)
    assert stored.status == "finished"
    for record in stored.history:
        assert told_by_all(simulation.run_round()) == told_by_all(record)
    simulation.result()
    wanted, got = simulation.task.flat.module.state_dict(), weights_of(folder)
    assert all(torch.equal(value, got[name]) for name, value in wanted.items())


def options(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


@pytest.mark.process
def test_a_small_deployment(tmp_path: Path, nothing_left: dict[str, str]) -> None:
    """Two nodes, TLS and keys, two rounds, state that clients keep: the bits of simulation."""
    changes = ["rounds=2", "data.split.clients=4", "clients_per_round=4", "algorithm=prefed"]
    changes += ["momentum=keep"]
    words = ["digits-noniid", *options(changes), "--local", "2", "--out", str(tmp_path / "run")]
    with seen((done := deploy(words, nothing_left)).pid, every=0.5) as listeners:
        output, errors = done.communicate(timeout=900)
    assert done.returncode == 0, errors
    assert {one.program for one in listeners} == {"flower-superlink", "flower-supernode"}
    assert {one.reached_from for one in listeners} == {"this machine"}
    assert re.findall(r"round (\d)/2", output) == ["1", "2"]
    lines = output.splitlines()
    assert lines[:2] == ["SuperLink starts", "SuperLink is up; nodes get keys"]
    waits = lines[2 : next(n for n, line in enumerate(lines) if line.startswith("round 1/2"))]
    assert re.fullmatch(r"[012] of 2 nodes connected.*", waits[0])
    assert waits[-1] == "clients train in round 1"
    assert len(set(waits)) == len(waits)
    assert_equals_simulation(tmp_path / "run", changes)
    assert {p.name for p in (tmp_path / "run" / "logs").iterdir()} == {
        "superlink.log", "supernode-0.log", "supernode-1.log", "run.log"
    }  # fmt: skip
    refused = prefed_here("deploy", *words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "holds this run already" in refused.stderr


@pytest.mark.process
def test_what_a_deployment_waits_for(tmp_path: Path) -> None:
    """Told from the logs of the processes, and not from those of a run before."""
    for name in ("supernode-0", "supernode-1", "run"):
        said = "SuperNode ID Start `flwr-serverapp` partitions have a node"
        (tmp_path / f"{name}.log").write_text(said)
    stages = []
    with LocalFlower(tmp_path) as flower:
        for name, said in {
            "supernode-0": "Starting", "supernode-1": "Starting", "run": "Starting",
            "supernode-0 ": "SuperNode ID: 1", "supernode-1 ": "SuperNode ID: 2",
            "run ": "Start \\`flwr-serverapp\\`", "run  ": f"2 of 2 {PARTITIONS_FOUND}",
        }.items():  # fmt: skip
            flower.start(name.strip(), "sh", "-c", f'echo "{said}"').wait()
            if len(flower.processes) == 3:
                stages.append(flower.stage())
    assert stages == [
        "0 of 2 nodes connected",
        "1 of 2 nodes connected",
        "2 of 2 nodes connected",
        "ServerApp asks nodes for partitions",
        "clients train in round 1",
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_wait_on_a_terminal_and_in_a_pipe(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = "ServerApp asks nodes for partitions"
    with RoundBar(100, quiet=False) as bar:
        bar.say(longest)
    assert capsys.readouterr().out == f"{longest}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    with RoundBar(100, quiet=False) as bar:
        bar.say(longest)
    out, shown = capsys.readouterr()
    assert not out
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    assert any(longest in line for line in lines[-2:]), "beside the bar, or below it"
    assert any("0:00:00 left" in line for line in lines[-2:])


@pytest.mark.parametrize(("words", "message"), [
    (["digits-noniid"], "choose one of --local"),
    (["digits-noniid", "--local", "2", "--simulate", "2"], "choose one of --local"),
    (["digits-noniid", "--local", "51"], "only 50 clients"),
    (["digits-noniid", "--local", "2", "--resume"], "--resume needs --out"),
    (["digits-noniid", "--local", "2", "--min-fraction", "2"], "min_fraction"),
    (["digits-noniid", "--set", "rounds=0", "--local", "2"], "rounds"),
])  # fmt: skip
def test_usage(words: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["deploy", *words], env={"COLUMNS": "200"})
    assert message in f"{done.output} {done.exception}"
    assert done.exit_code == 2 or isinstance(done.exception, PrefedError)


@pytest.mark.process
def test_the_written_app(tmp_path: Path, nothing_left: dict[str, str]) -> None:
    written_to = tmp_path / "app"
    words = ["deploy", "digits-noniid", "--write", str(written_to), "--norm-cap", "5"]
    done = prefed_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = {str(p.relative_to(written_to)) for p in written_to.rglob("*") if p.is_file()}
    package = {f"prefed_app/{n}" for n in ("__init__.py", "client.py", "server.py", "config.toml")}
    assert written == {"pyproject.toml", "README.md", *package}
    build = [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(written_to)]
    home = {**nothing_left, "FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    built = subprocess.run(
        build, env=home, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    done = prefed_here(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not empty" in done.stderr


def wait_until(what: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    ["algorithm=fedavg"],
    ["algorithm=prefed", "momentum=average"],
    ["algorithm=prefed", "momentum=reset"],
    ["algorithm=prefed", "momentum=keep"],
    ["algorithm=prefedopt"],
], ids="".join)  # fmt: skip
def test_four_nodes(changes: list[str], tmp_path: Path, nothing_left: dict[str, str]) -> None:
    changes = [*changes, "rounds=4"]
    words = ["digits-noniid", *options(changes), "--local", "4", "--out", str(tmp_path / "run")]
    _, errors = (done := deploy(words, nothing_left)).communicate(timeout=900)
    assert done.returncode == 0, errors
    assert_equals_simulation(tmp_path / "run", changes)


@pytest.mark.process
@pytest.mark.slow
def test_on_flower_s_simulation_engine(tmp_path: Path, nothing_left: dict[str, str]) -> None:
    changes = ["algorithm=prefed", "momentum=keep", "rounds=3"]
    words = ["digits-noniid", *options(changes), "--simulate", "3", "--out", str(tmp_path / "run")]
    if not allowed():
        pytest.skip("this machine allows no network namespaces")
    _, errors = (done := deploy(words, nothing_left, BETWEEN)).communicate(timeout=900)
    assert done.returncode == 0, errors
    assert_equals_simulation(tmp_path / "run", changes)


@pytest.fixture
def flower(
    tmp_path: Path, nothing_left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalFlower]:
    monkeypatch.setattr("tempfile.tempdir", nothing_left["TMPDIR"])
    with LocalFlower(tmp_path / "logs") as made:
        made.start_superlink()
        yield made


def online(flower: LocalFlower) -> int:
    listed = json.loads(flower.call("flwr", "supernode", "list", "prefed", "--format", "json"))
    return sum(node["status"] == "online" for node in listed["nodes"])


@pytest.mark.process
@pytest.mark.slow
def test_strangers_are_refused(flower: LocalFlower, tmp_path: Path) -> None:
    """Another CA, no key, and a key that nobody registered: none of them becomes a node."""
    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other)
    for name in ("unregistered", "deceived"):
        make_node_key(flower.home / name)
    flower.register(flower.home / "deceived.pub")
    flower.start_supernode("no-key", {}, None)
    flower.start_supernode("unregistered", {}, flower.home / "unregistered")
    flower.start_supernode("deceived", {}, flower.home / "deceived", other / "ca.crt")
    flower.add_supernode("honest", {})
    wait_until(lambda: "SuperNode ID" in (flower.logs / "honest.log").read_text(), 200)

    def said(name: str, what: str) -> bool:
        return what in (flower.logs / f"{name}.log").read_text()

    for name, reason in {
        "no-key": "All SuperNodes must be registered",
        "unregistered": "Failed to activate SuperNode",
        "deceived": "CERTIFICATE_VERIFY_FAILED",
    }.items():
        wait_until(partial(said, name, reason), 100)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(flower.port, other / "ca.crt")
    handshake(flower.port, flower.home / "ca.crt")
    assert online(flower) == 1
    assert not any(said(name, "SuperNode ID") for name in ("no-key", "unregistered", "deceived"))


def handshake(port: int, ca: Path) -> None:
    context = ssl.create_default_context(cafile=str(ca))
    with socket.create_connection(("127.0.0.1", port), 20) as plain:
        context.wrap_socket(plain, server_hostname="localhost").close()


def start(flower: LocalFlower, folder: Path, changes: list[str], nodes: int, **more: Any) -> None:
    config = load("digits-noniid", changes)
    write_app(flower.home / "app", config, Options(**more))
    place = {PARTITIONS: nodes, "state-dir": str(folder / "nodes")}
    for number in range(nodes):
        flower.add_supernode(f"supernode-{number}", {PARTITION: number, **place})
    flower.submit(flower.home / "app", {"run-dir": str(folder)})


def trained(flower: LocalFlower, name: str) -> int:
    path = flower.logs / f"{name}.log"
    return path.read_text().count("Receiving: train") if path.exists() else 0


@pytest.mark.process
@pytest.mark.slow
def test_a_node_is_killed_in_the_middle_of_a_round(flower: LocalFlower, tmp_path: Path) -> None:
    folder, changes = tmp_path / "run", ["algorithm=fedavg", "rounds=2", "local_steps=2000"]
    start(flower, folder, changes, 3, round_seconds=90.0, min_fraction=0.4)
    wait_until(lambda: trained(flower, "supernode-1") > 0, 400)
    os.killpg(flower.processes["supernode-1"].pid, signal.SIGKILL)
    killed = time.monotonic()
    records: list[dict[str, Any]] = []
    follow(folder, 2, flower, ("superlink", "run"), records.append)
    assert time.monotonic() - killed < 2 * 90 + 60
    for record in records:
        gone = {str(client) for client in record["cohort"] if client % 3 == 1}
        assert set(record["refused"]) == gone
    assert load_run(folder).status == "finished"


def restart(flower: LocalFlower, name: str, place: dict[str, Any]) -> None:
    """As a service manager does it: again and again, for a SuperLink turns a key away while it
    believes that the node with it is still there."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        process = flower.start_supernode(name, place, flower.home / name)
        while process.poll() is None:
            if (flower.logs / f"{name}.log").read_text().count("SuperNode ID") > 1:
                return
            time.sleep(0.5)
    raise AssertionError("the SuperLink never took the node back")


@pytest.mark.process
@pytest.mark.slow
def test_a_node_restarts_with_what_its_clients_kept(flower: LocalFlower, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = ["algorithm=prefed", "momentum=keep", "rounds=5"]
    start(flower, folder, changes, 2, round_seconds=120.0, min_fraction=1.0, retries=5)
    rounds = folder / "rounds.jsonl"
    wait_until(lambda: rounds.exists() and len(rounds.read_text().splitlines()) >= 2, 600)
    killed = flower.processes.pop("supernode-1")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    restart(
        flower, "supernode-1", {PARTITION: 1, PARTITIONS: 2, "state-dir": str(folder / "nodes")}
    )
    follow(folder, 5, flower, ("superlink", "run"), lambda record: None)
    assert_equals_simulation(folder, changes)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("how", ["superlink", "ctrl-c", "killed"])
def test_resume(how: str, tmp_path: Path, nothing_left: dict[str, str]) -> None:
    """The SuperLink is killed, Ctrl-C, or prefed itself is killed: resumed to the same bits."""
    folder, changes = tmp_path / "run", ["algorithm=prefed", "momentum=keep", "rounds=5"]
    words = ["digits-noniid", *options(changes), "--local", "2", "--out", str(folder)]
    running = deploy(words, nothing_left)
    rounds = folder / "rounds.jsonl"
    wait_until(lambda: rounds.exists() and len(rounds.read_text().splitlines()) >= 2, 600)
    scratch = Path(nothing_left["TMPDIR"])
    if how == "superlink":
        (pid,) = [n for n, c in processes_of(scratch).items() if "flower-superlink" in c]
        os.kill(pid, signal.SIGKILL)
    else:
        running.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    if how == "superlink":
        assert running.returncode == 1
        assert "the SuperLink has died; continue with --resume" in errors
    elif how == "ctrl-c":
        assert running.returncode == 130
        assert "--resume" in errors
    wait_until(lambda: not processes_of(scratch) and not is_locked(folder), 30)
    for left in scratch.glob("prefed-flower-*"):  # only where prefed itself was killed
        assert how == "killed"
        subprocess.run(["rm", "-r", str(left)], check=True)
    assert load_run(folder).status == "interrupted"
    _, errors = (again := deploy([*words, "--resume"], nothing_left)).communicate(timeout=900)
    assert again.returncode == 0, errors
    assert_equals_simulation(folder, changes)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["FedAdam", "PreFedOpt"])
def test_a_stock_app_on_a_real_deployment(
    strategy: str, flower: LocalFlower, tmp_path: Path
) -> None:
    for number in range(2):
        flower.add_supernode(f"supernode-{number}", {PARTITION: number, PARTITIONS: 2})
    model = tmp_path / "final.safetensors"
    changes = {"strategy": strategy, "model-file": str(model)}
    flower.submit(ROOT / "examples" / "flower_stock", changes).wait(600)
    log = (flower.logs / "run.log").read_text()
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", log)]
    assert len(accuracies) == 3, log
    assert safetensors.torch.load_file(model)["norm.num_batches_tracked"].item() == 3 * 6


@pytest.mark.process
@pytest.mark.slow
def test_prefed_in_a_stock_app_says_what_to_change(flower: LocalFlower, tmp_path: Path) -> None:
    """The swap as an engineer makes it: one constructor, the ClientApp as it was."""
    stock = tmp_path / "stock"
    shutil.copytree(ROOT / "examples" / "flower_stock", stock)
    server = stock / "stock" / "server_app.py"
    text = server.read_text()
    ours = r"prefed\.flower\.PreFedOpt\(\s*server_lr=0\.003, per_step=False,"
    swapped, count = re.subn(ours, "prefed.flower.PreFed(", text)
    assert count == 1
    server.write_text(swapped)
    for number in range(2):
        flower.add_supernode(f"supernode-{number}", {PARTITION: number, PARTITIONS: 2})
    flower.submit(stock, {}).wait(600)
    log = (flower.logs / "run.log").read_text()
    assert "has no record 'prefed-state'" in log
    assert "return prefed.flower.local_train(message, context, model, batches)" in log
    assert sum(trained(flower, f"supernode-{number}") for number in range(2)) == 1


@pytest.mark.process
@pytest.mark.slow
def test_the_command_of_the_stock_example_without_a_network(tmp_path: Path) -> None:
    """Word for word; the namespace that it runs in has no way out."""
    stock = tmp_path / "stock"
    shutil.copytree(ROOT / "examples" / "flower_stock", stock)
    (command,) = re.findall(r"```sh\n(.*?)\n```", (stock / "README.md").read_text())
    if subprocess.run(["unshare", "-rn", "true"], check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sources = os.environ.get("PYTHONPATH", str(ROOT / "src"))
    home = {"FLWR_HOME": str(tmp_path / "home"), "PATH": path, "PYTHONPATH": sources}
    done = subprocess.run(
        ["bash", "-c", command], cwd=stock, env=os.environ | home, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 3, done.stdout + done.stderr
    assert accuracies[-1] > accuracies[0]
    model = safetensors.torch.load_file(stock / "final_model.safetensors")
    assert model["norm.num_batches_tracked"].item() == 3 * 6
