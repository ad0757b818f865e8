"""A config on Flower's own simulation engine (Ray): the same two apps, without the network.

Ray runs in a process of its own (`python -m prefed.flower.simulated_deployment`), so that it ends
with it, and in a network of its own, because it listens on all interfaces.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefed.core import private_network
from prefed.core.errors import PrefedError
from prefed.core.machine import cores
from prefed.experiments.config import Config
from prefed.flower.deployment_options import Options
from prefed.flower.local_deployment import Say, follow, local_flower
from prefed.flower.write import PACKAGE


def deploy_simulated(
    config: Config,
    folder: Path,
    nodes: int,
    options: Options,
    *,
    resume: bool,
    on_record: Callable[[dict[str, Any]], None],
    say: Say = lambda text: None,
    open_network: bool = False,
) -> None:
    command = [sys.executable, "-m", "prefed.flower.simulated_deployment"]
    if not open_network:
        try:
            command = private_network.inside(*command)
        except PrefedError as error:
            raise PrefedError(
                f"{error}, and Flower's simulation engine listens on all interfaces; use --local, "
                "or insist with --open-network"
            ) from None
    folder = folder.absolute()
    with local_flower(config, folder, nodes, options, resume) as flower:
        flower.environment["PREFED_STATE_DIR"] = str(folder / "nodes")
        job = options.to_run_config() | {"run-dir": str(folder), "resume": resume}
        app = flower.home / "app" / PACKAGE / "config.toml"
        say("simulation engine starts")
        flower.start("simulation", *command, str(app), str(nodes), json.dumps(job))
        follow(folder, config.rounds, flower, ("simulation",), on_record, say)


def main(config: str, nodes: str, job: str) -> None:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from prefed.flower.client import client_app
    from prefed.flower.server import run

    app, text = ServerApp(), Path(config).read_text()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        run(text, grid, json.loads(job))

    with tempfile.TemporaryDirectory(prefix="ray-", dir=_short()) as scratch:
        init = {"num_cpus": min(cores(), int(nodes)), "include_dashboard": False}
        try:
            run_simulation(
                server_app=app,
                client_app=client_app(config),
                num_supernodes=int(nodes),
                backend_config={
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                    "init_args": {**init, "_temp_dir": scratch},
                },
            )
        except BaseException:  # the ServerApp's thread would go on waiting for nodes
            traceback.print_exc()
            shutil.rmtree(scratch, ignore_errors=True)
            os._exit(1)


def _short() -> str | None:
    """Where Ray's sockets may lie: their paths must not be longer than 107 bytes, of which Ray
    takes 80. None is the usual place."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(usual) > 20 and os.access("/tmp", os.W_OK) else None


if __name__ == "__main__":
    main(*sys.argv[1:])
