"""Three tiers: make test-fast, make test, make test-all (see the markers in pyproject.toml)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import prefed
import prefed.contrib.mean_codecs
import prefed.contrib.prefed_extended  # before tests put registries back to what they were
from prefed.experiments import nursery

# Tests run side by side on small problems: more threads only get into each other's way.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
os.environ["PREFED_CACHE"] = "off"  # nothing is left in the home of who runs the tests

# Processes that tests start, wherever they stand, take the package that is tested here.
package = str(Path(prefed.__file__).resolve().parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])

# Jobs in the background of a shell ignore Ctrl-C, and so would the processes that tests send it to.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("prefed", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("prefed")

CASES = 2
"""Of a test with more cases than this, --fast takes about so many, spread evenly."""
FLOWER = Path(__file__).parent / "flower"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="a part that starts no process")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast nothing of Flower."""
    return True if config.getoption("--fast") and collection_path == FLOWER else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --fast no test that is marked, and of a test with many cases a few."""
    if not config.getoption("--fast"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("process", "long", "slow")):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {item for group in cases.values() for item in group[:: -(-len(group) // CASES)]}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""What Python tells its audit hooks when a process is about to begin."""
HARMLESS = {"git", "uname", "lscpu"}
"""What a run asks about the machine for its environment.json: a few milliseconds."""

watched = False
started: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not watched or event not in STARTS:
        return
    words = arguments[1] if event == "subprocess.Popen" else arguments
    words = [words] if isinstance(words, str | bytes) else [os.fspath(w) for w in words]
    if event != "subprocess.Popen" or os.path.basename(words[0]) not in HARMLESS:
        started.append(f"{event}: {words}")
        raise AssertionError(f"a process is started ({started[-1]}): mark the test as process")


sys.addaudithook(watch)


@pytest.fixture(autouse=True)
def no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that start processes say so with a marker: `make test-fast` has none of them. Commands
    that make a mistake need not be ready for more."""
    global watched
    started.clear()
    watched = request.node.get_closest_marker("process") is None
    with pytest.MonkeyPatch.context() as patch:
        if watched:
            patch.setattr(nursery, "begin", lambda: None)
        yield
    watched = False
    assert not started, f"mark this test as process: it starts {started}"


@pytest.fixture(autouse=True)
def threads_are_given_back() -> Iterator[None]:
    """Whoever changes torch's threads gives them back: the bits of the next test depend on them."""
    yield
    assert torch.get_num_threads() == 1
