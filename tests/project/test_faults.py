"""A small part of the fault suite; `make faults` and `make test-all` run all of it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.faults.protections import PROTECTIONS, noticed
from tests.helpers import ROOT

SOURCES = ROOT / "src" / "prefed"
MODULES = sorted(
    p.stem
    for p in (ROOT / "tests" / "faults").glob("*.py")
    if p.stem not in ("__init__", "__main__", "trials", "protections")
)


def lost(*words: str, seconds: float) -> str:
    """What the suite prints, in a process of its own, which forks before it computes."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", *words],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=seconds,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_protections_take_out_is_there() -> None:
    """`make protections` would find a text that has moved much later."""
    for protection in PROTECTIONS:
        for file, text, _ in protection.edits:
            assert text in (SOURCES / file).read_text(), (protection.name, file)


@pytest.mark.process
@pytest.mark.parametrize("modules", [MODULES[n::3] for n in range(3)], ids=" ".join)
def test_nothing_is_lost(modules: list[str]) -> None:
    """Several in a process, which takes seconds to start."""
    assert "\nlost 0 of " in lost("--quick", *modules, seconds=600)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_lost_in_all_of_it(module: str) -> None:
    assert "\nlost 0 of " in lost(module, seconds=7200)


ONE = "checksum of the manifest"
OTHERS = [p.name for p in PROTECTIONS if p.name != ONE]


@pytest.mark.process
@pytest.mark.parametrize(
    "name", [ONE, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_the_suite_notices_when_a_protection_is_gone(name: str) -> None:
    what = next(p for p in PROTECTIONS if p.name == name)
    seen, last = noticed(what)
    assert seen, last


def test_every_protection_can_still_be_taken_out() -> None:
    for what in PROTECTIONS:
        for name, old, new in what.edits:
            text = (SOURCES / name).read_text()
            assert text.count(old) == 1, f"{what.name}: {name}"
            ast.parse(text.replace(old, new))


PICKLING = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
            "multiprocessing", "copyreg"}  # fmt: skip
CALLS = {"torch.load", "torch.save", "numpy.load", "np.load", "pandas.read_pickle", "eval", "exec",
         "dist.broadcast_object_list", "dist.all_gather_object", "dist.send_object_list",
         "dist.gather_object", "dist.scatter_object_list", "os.system"}  # fmt: skip


RIVAL = SOURCES / "bench" / "bare.py"
"""The bare loop that `prefed bench` measures against: it talks with processes that it has started
itself, over pipes that nobody else has, the way torch does."""


def test_no_source_imports_or_calls_a_pickle() -> None:
    seen = 0
    for path in {*SOURCES.rglob("*.py")} - {RIVAL}:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not PICKLING & {name.partition(".")[0] for name in names}, path
            seen += len(names)
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                arguments = {k.arg: ast.unparse(k.value) for k in node.keywords}
                safe = called.endswith("np.load") and arguments.get("allow_pickle") == "False"
                assert called not in CALLS or safe, f"{path}: {ast.unparse(node)}"
    assert seen > 300
