"""What README and docs show is run as it stands there."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import prefed
from tests.helpers import ROOT
from tests.helpers.commands import as_it_was, prefed_command, prefed_here
from tests.helpers.problems import tiny_data, tiny_model

SHORT = ["--set", "rounds=1", "--set", "local_steps=1"]
SMALL = ["--set", "rounds=3", "--set", "local_steps=2", "--set", "model.hidden=[4]"]
SMALL += ["--set", "data.split.clients=8", "--set", "clients_per_round=4"]
PAGES: list[Any] = ["README.md", "docs/tour.md", "docs/own-algorithm.md", "docs/upload.md"]
PAGES += ["docs/data.md", "docs/python.md", "docs/results.md", "docs/devices.md"]
PAGES += ["docs/privacy.md", "docs/transformers.md"]
PAGES += [pytest.param(f"docs/{p}.md", marks=pytest.mark.slow) for p in ("experiments", "theory")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.S)


def test_python_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("README.md", "python"):
        exec(compile(block, "README.md", "exec"), {})
    accuracy, uploaded = capsys.readouterr().out.split()
    assert float(accuracy) > 0.6
    assert int(uploaded) == 5 * 3 * 4 * 354


@pytest.mark.process
@pytest.mark.parametrize("how", ["here", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("page", PAGES)
def test_commands(page: str, how: str, tmp_path: Path) -> None:
    """With fewer rounds; in `make test` also with one seed, without figures, and without a process
    for each."""
    command = prefed_here if how == "here" else prefed_command
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):  # a file of the user's, for what follows
            (tmp_path / name[1]).write_text(block)
        with as_it_was(tmp_path):
            sys.path.insert(0, str(tmp_path))
            exec(compile(block, page, "exec"), {"__name__": "__main__"})
    (tmp_path / "my-config.toml").write_text(command("cat", "digits-iid", cwd=tmp_path).stdout)
    for line in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] == "prefed":
            shorter = SHORT if words[1] in ("run", "compare", "sweep") else []
            shorter = SMALL if words[1] == "theory" else shorter
            shorter = ["--minutes", "0.1"] if "--minutes" in words else shorter
            if how == "here" and words[1] in ("compare", "sweep"):
                shorter = [*shorter, "--workers", "1"]
                shorter += ["--seeds", "1"] if words[1] == "compare" else []
            if how == "here" and "--figures" in words:  # tests/cli/test_new_user.py draws them
                where = words.index("--figures")
                del words[where : where + 2]
            if words[1] == "watch":  # until somebody stops it
                check_watch(words, tmp_path)
                continue
            done = command(*words[1:], *shorter, cwd=tmp_path)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
        else:
            assert words[:1] in ([], ["make"], ["pip"])


def check_watch(words: list[str], folder: Path) -> None:
    line = [sys.executable, "-m", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=folder) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith(f"watching {words[2]} on http://127.0.0.1:")
        watching.send_signal(signal.SIGINT)
        assert watching.stdout.read() == "stopped; no run is under way\n"
    assert watching.returncode == 0


def test_make_targets_of_the_readme_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for target in re.findall(r"^make ([\w-]+)", (ROOT / "README.md").read_text(), flags=re.M):
        assert target in targets


def test_the_printed_algorithm_walks_uphill(monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/paper.md says of the listing: with the printed sign the loss rises."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    make = prefed.ALGORITHMS.get("examples.prefedopt_as_printed:AsPrinted")

    def losses(**options: object) -> list[float]:
        algorithm = make(client_lr=0.1, server_lr=0.02, **options)
        result = prefed.simulate(
            algorithm, tiny_model(), tiny_data(), rounds=30, local_steps=2, batch_size=None
        )
        return [record["train_loss"] for record in result.history]

    printed, mended = losses(), losses(uphill=False)
    assert printed[-1] > 2 * printed[0]
    assert mended[-1] < mended[0]


def test_every_algorithm_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in prefed.ALGORITHMS.names())
