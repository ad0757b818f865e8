"""A Flower app from a config: a directory that `flwr run` takes."""

import re
from importlib.resources import files
from pathlib import Path

import jinja2
import tomli_w

from prefed import __version__
from prefed.core.errors import PrefedError
from prefed.core.safe_files import write_whole
from prefed.experiments.config import Config
from prefed.flower.deployment_options import Options

PACKAGE = "prefed_app"
INSIDE = {"client.py", "server.py"}


def write_app(folder: Path, config: Config, options: Options, run_dir: str | None = None) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PrefedError(f"{folder}: is not empty; choose another directory")
    if options.secure_aggregation:
        from prefed.flower.secure.secure_trainer import check_secure

        run = config.make_run()
        check_secure(run.algorithm, run.settings, config.data.client_test > 0)
    name = re.sub(r"[^a-z0-9]+", "-", f"prefed-{config.algorithm.name}".lower()).strip("-")
    values = {
        "name": name,
        "publisher": "prefed",
        "package": PACKAGE,
        "version": __version__,
        "algorithm": config.algorithm.name,
        "run_dir": run_dir or f"runs/{name}",
        "options": options.to_run_config(),
        "clients": len(config.make_data()[1]),
    }
    package = folder / PACKAGE
    package.mkdir(parents=True)
    write_whole(package / "__init__.py", "")
    write_whole(package / "config.toml", tomli_w.dumps(config.to_dict()))
    for template in files("prefed").joinpath("flower", "app").iterdir():
        if template.name.startswith("_"):
            continue
        text = template.read_text()
        if template.name in INSIDE:
            write_whole(package / template.name, text)
        else:
            made = jinja2.Template(text, undefined=jinja2.StrictUndefined).render(values)
            write_whole(folder / template.name.removesuffix(".jinja"), made)
