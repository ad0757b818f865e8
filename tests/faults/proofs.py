"""What a run never does: unpickle, execute what a file says, or touch the network.

Python reports such things to an audit hook, whoever does them: ours, or a library that we call.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from tests.faults.damage import stopped
from tests.faults.trials import command, fault, scratch, start
from tests.helpers import official

NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname",
           "socket.sendto", "urllib.Request", "http.client.connect", "ftplib.connect")  # fmt: skip
UNPICKLING = ("pickle.find_class", "marshal.loads")
EXECUTING = ("os.system", "os.posix_spawn", "os.exec")


def forbid(*events: str) -> Callable[[], None]:
    """For a child: to end at once, with code 99, when one of these happens."""

    def add() -> None:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in events:
                if event == "marshal.loads" and _importing():
                    return
                print(f"FORBIDDEN: {event} {arguments!r:.300}", file=sys.stderr, flush=True)
                os._exit(99)

        sys.addaudithook(hook)

    return add


def _importing() -> bool:
    """Whether the import system is reading byte code: it is the interpreter's own."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def commands(root: Path) -> list[list[str]]:
    """What people do, from a run to a report."""
    small = ["--set", "rounds=2", "--set", "local_steps=1", "--set", "model.hidden=[8]"]
    return [
        command(root / "run", "rounds=2", resume=False),
        command(root / "run", "rounds=2"),
        ["validate", "digits-noniid"],
        ["data", "show", "digits-noniid"],
        ["compare", "digits-noniid", "--algorithms", "fedavg,prefed", "--seeds", "1", *small,
         "--out", str(root / "compare")],
        ["runs", str(root)],
        ["report", str(root), "-o", str(root / "report.html")],
    ]  # fmt: skip


def obeyed(words: list[str], root: Path, *events: str) -> str:
    child = start(words, root / "log", forbid(*events))
    code = child.wait()
    return "" if code == 0 else f"{words[0]}: exit {code}: {child.text()[-500:]}"


@fault("nothing is unpickled", times=7, quick=2, seconds=30)
def unpickling(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        for words in commands(root)[:times]:
            yield obeyed(words, root, *UNPICKLING)


@fault("no network is touched", times=7, quick=2, seconds=30)
def network(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        for words in commands(root)[:times]:
            yield obeyed(words, root, *NETWORK)


class Hostile:
    """Unpickled, it would create a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


@fault("hostile pickle in every file that is read", times=46, quick=12, seconds=30)
def pickles(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        mark = root / "executed"
        run = stopped(root)
        (root / "mine.toml").write_bytes((run.folder / "config.toml").read_bytes())
        hostile = [pickle.dumps(Hostile(mark), protocol) for protocol in (0, 2, 4)]
        pickle.loads(hostile[0])  # noqa: S301  it does work where pickles are loaded
        if not mark.exists():
            raise AssertionError("the pickle is not hostile at all")
        mark.rmdir()
        show = ["data", "show", "digits-noniid", "--set", "data.split=iid"]
        show += ["--set", "data.split.clients=2"]

        def data(name: str, path: Path) -> list[str]:
            return [*show, "--set", f"data.name={name}", "--set", f"data.path={path}"]

        again = ["run", str(root / "mine.toml"), "--out", str(root / "there"), "--resume"]
        cases: dict[Path, list[str]] = {}
        pickled = official.cifar_pickles(root / "py" / "cifar-10-batches-py", images=2)
        binary = official.cifar10(root / "bin", images=2)
        images = official.idx(root / "idx", images=3)
        incomplete = ["--set", "data.complete=false"]
        cases[pickled / "data_batch_1"] = data("cifar10", root / "py") + incomplete
        cases[root / "a.npz"] = data("npz", root / "a.npz")
        cases[binary / "data_batch_1.bin"] = data("cifar10", root / "bin") + incomplete
        cases[sorted(images.iterdir())[0]] = data("mnist", root / "idx") + incomplete
        cases[root / "a.svm"] = [*data("libsvm", root / "a.svm"), "--set", "data.features=3"]
        cases[root / "a.toml"] = ["validate", str(root / "a.toml")]
        for path in sorted(run.folder.rglob("*")):
            if path.is_file() and path.name != ".lock":
                cases[root / "there" / path.relative_to(run.folder)] = again
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as members:
            out = io.BytesIO()
            np.save(out, np.array([Hostile(mark)], dtype=object), allow_pickle=True)
            members.writestr("x.npy", out.getvalue())
        everything = [
            (path, words, content)
            for path, words in cases.items()
            for content in (hostile if path.suffix != ".npz" else [*hostile, archive.getvalue()])
        ]
        for path, words, content in everything[:times]:
            shutil.rmtree(root / "there", ignore_errors=True)
            shutil.copytree(run.folder, root / "there")
            path.write_bytes(content)
            child = start(words, root / "log", forbid(*UNPICKLING, *EXECUTING))
            code = child.wait()
            if mark.exists() or code not in (0, 1, 2) or "Traceback" in child.text():
                yield f"{path.name}: exit {code}: {child.text()[-400:]}"
                shutil.rmtree(mark, ignore_errors=True)
            else:
                yield ""


@fault("code named in a stranger's run directory", times=2, quick=2, seconds=10)
def strangers(times: int, rng: random.Random) -> Iterator[str]:
    """Listing and reporting runs imports nothing that they name."""
    with scratch() as root:
        run = stopped(root)
        mark = root / "imported"
        (root / "stranger.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
        path = run.folder / "config.toml"
        text = path.read_text().replace('name = "scaffold"', 'name = "stranger:thing"')
        path.write_text(text.replace('name = "mlp"', 'name = "stranger:model"'))
        report = ["report", str(run.folder), "-o", str(root / "report.html")]
        for words in (["runs", str(run.folder)], report):
            child = start(words, root / "log", lambda: os.chdir(root))
            code = child.wait()
            yield f"{words[0]}: exit {code}: {child.text()}" if code or mark.exists() else ""
        mine = start(["validate", str(path)], root / "log", lambda: os.chdir(root))
        mine.wait()
        if not mark.exists():
            raise AssertionError("the stranger's module does nothing when it is imported")
