"""Secure aggregation on real deployments: SuperLink, SuperNodes, TLS and keys, and nodes that die.

Three nodes are part of `make test`; eight, one of them killed, are in `make deployments`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from prefed.experiments.config import Config, load
from prefed.flower.deployment_options import Options
from prefed.flower.local_deployment import LocalFlower, follow
from prefed.flower.protocol import PARTITION, PARTITIONS
from prefed.flower.secure import stages as m
from prefed.flower.write import write_app
from tests.flower.test_deploy import flower, nothing_left, wait_until  # noqa: F401
from tests.helpers.secure_mean import plain, plain_mean

DYING = """
import os
from pathlib import Path

from flwr.clientapp import ClientApp

from prefed.flower import client_app

inner = client_app(Path(__file__).with_name("config.toml"))


class Dying(ClientApp):
    def __call__(self, message, context):
        if WHEN.get(context.node_config["partition-id"]) == message.metadata.message_type:
            if KILLED:  # Flower notices after a minute or so
                os._exit(1)
            raise RuntimeError("this node fails")
        return inner(message, context)


app = Dying()
"""
"""A ClientApp that fails, or whose process ends, on some nodes when a stage begins."""


def config_of(clients: int) -> Config:
    return load("digits-noniid", [
        "rounds=1", f"data.split.clients={clients}", f"clients_per_round={clients}",
        "algorithm=prefed", "local_steps=20",
    ])  # fmt: skip


def start(
    flower: LocalFlower,  # noqa: F811
    folder: Path,
    config: Config,
    when: dict[int, str],
    killed: bool,
) -> None:
    app, nodes = flower.home / "app", config.clients_per_round or 0
    write_app(app, config, Options(secure_aggregation=True, round_seconds=300.0))
    (app / "prefed_app" / "client.py").write_text(f"WHEN, KILLED = {when}, {killed}\n{DYING}")
    place = {PARTITIONS: nodes, "state-dir": str(folder / "nodes"), "secure-aggregation": True}
    for number in range(nodes):
        flower.add_supernode(f"supernode-{number}", {PARTITION: number, **place})
    flower.submit(app, {"run-dir": str(folder)})


def assert_is_plain_mean(folder: Path, config: Config, without: set[int]) -> dict[str, Any]:
    """P and m of the server are the mean itself; the weights have moved by it."""
    (path,) = (folder / "checkpoints").glob("*1*/*.safetensors")
    saved = safetensors.torch.load_file(path)
    here, _ = plain(config)
    for name, (exact, bound) in plain_mean(config, without).items():
        if name in ("P", "m"):
            got = saved[f"shared.{name}"].double().numpy()
            assert (np.abs(got - exact) <= bound).all(), name
        if name == "weights":
            moved = here.server.weights.double().numpy() + exact
            digits = 1.5 * np.spacing(np.abs(moved).astype(np.float32))
            assert (np.abs(saved["weights"].double().numpy() - moved) <= bound + digits).all()
    return saved


@pytest.mark.process
def test_three_nodes_of_which_one_fails(flower: LocalFlower, tmp_path: Path) -> None:  # noqa: F811
    folder, config = tmp_path / "run", config_of(3)
    start(flower, folder, config, {2: f"train.{m.MASKED}"}, killed=False)
    records: list[dict[str, Any]] = []
    follow(folder, 1, flower, ("superlink", "run"), records.append)
    assert [*records[0]["refused"]] == ["2"]
    assert_is_plain_mean(folder, config, {2})


@pytest.mark.process
@pytest.mark.slow
def test_eight_nodes_of_which_two_die(flower: LocalFlower, tmp_path: Path) -> None:  # noqa: F811
    """One SuperNode is killed while it trains, and one ClientApp dies after its upload."""
    folder, config = tmp_path / "run", config_of(8)
    start(flower, folder, config, {5: f"query.{m.UNMASK}"}, killed=True)
    log = flower.logs / "supernode-2.log"
    wait_until(lambda: log.exists() and f"train.{m.MASKED}" in log.read_text(), 600)
    os.killpg(flower.processes["supernode-2"].pid, signal.SIGKILL)
    records: list[dict[str, Any]] = []
    follow(folder, 1, flower, ("superlink", "run"), records.append)
    assert [*records[0]["refused"]] == ["2"]
    assert_is_plain_mean(folder, config, {2})


@pytest.mark.process
@pytest.mark.slow
def test_the_command(tmp_path: Path, nothing_left: dict[str, str]) -> None:  # noqa: F811
    words = ["digits-noniid", "--set", "rounds=1", "--set", "algorithm=prefed", "--local", "3"]
    command = [sys.executable, "-m", "prefed", "deploy", *words, "--secure-aggregation", "--out",
               str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(
        command, env=nothing_left, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the sum of 3 of 3 nodes" in (tmp_path / "run" / "logs" / "run.log").read_text()


@pytest.mark.process
def test_a_node_answers_without_torch() -> None:
    """Three of the four stages begin a process each: torch would be most of its time."""
    code = "import sys, prefed.flower.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
