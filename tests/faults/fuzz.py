"""Input that nobody means well: configs, run directories and data files, whole or nearly so.

Through the command line: it may refuse (exit 2 or 1, with a message) or accept, but no traceback
may reach the user, nothing may hang, and memory stays bounded (a limit on the address space).
Hypothesis makes the input, and shrinks what fails to the least that does.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import safetensors.torch
import tomli_w
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import prefed
from prefed.experiments import checkpoints
from prefed.experiments.run_directory import RunDirectory
from tests.faults.damage import stopped
from tests.faults.trials import call, fault, scratch
from tests.helpers import official

SECONDS, WAIT = 30, 180
"""More for one input is a hang: of the processor's time, and by the clock on a busy machine."""
MEMORY = 2 << 30
"""Bytes that an input of a few kilobytes may make us ask for."""


def fuzz(times: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> list[str]:
    """So many inputs: a line for each, empty for those that were borne."""
    lines = []

    @settings(
        max_examples=times, database=None, deadline=None, derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def test(value: Any) -> None:
        lines.append("")
        check(value)

    with limits():
        try:
            test()
        except BaseException as error:
            lines[-1] = "; ".join(map(told, getattr(error, "exceptions", [error])))
    return lines


def told(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    notes = " ".join(getattr(error, "__notes__", []))
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"{where}: {type(error).__name__}: {str(error)[:600]} {notes[:600]}"


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Time for one input, and memory for all of them."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def hangs(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"it took more than {SECONDS} s of the processor, or waited")


def command_line(words: list[str], wait: int = WAIT) -> tuple[int, str]:
    """Exit code and what was printed; anything that escapes is a traceback to the user."""
    out = io.StringIO()
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, hangs)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(wait)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = call(words)
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if code not in (0, 1, 2):
        raise AssertionError(f"exit {code}: {out.getvalue()}")
    if code and not out.getvalue().strip():
        raise AssertionError(f"exit {code} without a word")
    return code, out.getvalue()


# Configs


def plain() -> st.SearchStrategy[Any]:
    """Any value that TOML can hold."""
    leaf = st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(max_size=12),
        st.sampled_from(
            [0, -1, 1, 1e-300, 1e300, "all", "full", "os:system", "prefed", ":", "a:b"]
        ),
        st.dates(),
        st.datetimes(),
        st.times(),
    )
    keys = st.one_of(st.text(max_size=8), st.sampled_from(["name", "split", "kind", "start"]))
    return st.recursive(
        leaf, lambda x: st.lists(x, max_size=4) | st.dictionaries(keys, x, max_size=4), max_leaves=8
    )


def tables() -> st.SearchStrategy[dict[str, Any]]:
    """A preset with a few values put in, somewhere."""
    places = [
        "rounds", "seed", "clients_per_round", "batch_size", "engine", "workers", "device",
        "client_dropout", "quorum", "on_divergence", "evaluate_every", "precision", "weighting",
        "algorithm", "algorithm.name", "algorithm.client_lr", "algorithm.tau", "algorithm.momentum",
        "algorithm.weight_decay", "algorithm.clip_norm", "data", "data.name", "data.split",
        "data.split.name", "data.split.clients", "data.split.alpha", "data.validation", "model",
        "model.name", "model.hidden", "tuned", "tuned.prefed", "tuned.fedavg.client_lr", "other",
    ]  # fmt: skip
    change = st.tuples(st.sampled_from(places), plain())
    return st.lists(change, min_size=1, max_size=3).map(changed)


def changed(changes: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(
        (Path(prefed.__file__).parent / "presets" / "digits-noniid.toml").read_text()
    )
    for place, value in changes:
        *path, last = place.split(".")
        inner = table
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[last] = value
    return table


@fault("fuzz: config, as a table", times=1500, quick=12, seconds=60)
def config_tables(times: int, rng: random.Random) -> Iterator[str]:
    """Checked; and what is accepted is run, for a round of one step."""
    with scratch() as root:
        os.chdir(root)
        path, out = root / "config.toml", root / "run"

        def check(table: dict[str, Any]) -> None:
            try:
                path.write_text(tomli_w.dumps(table))
            except (TypeError, ValueError, UnicodeEncodeError):
                return  # not TOML
            code, _ = command_line(["validate", str(path)])
            # What the user asks for in so many words is theirs to wait for: keep it small.
            size = len(json.dumps(table, default=str))
            if code == 0 and size < 4000 and _is_small(table):
                short = ["--set", "rounds=1", "--set", "local_steps=1", "--out", str(out)]
                command_line(["run", str(path), *short])
                shutil.rmtree(out, ignore_errors=True)

        yield from fuzz(times, tables(), check)


def _is_small(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_small, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) < 1000


HUGE = (
    "model.hidden=[1000000000]", "model.hidden=[1000000000000000000]",
    "model.hidden=[99999999999999999999]", "data.split.clients=1000000000",
    "batch_size=1000000000000", "clients_per_round=1000000000", "workers=100000",
    "local_steps=1000000000000", "data.split.alpha=1e-300", "data.split.alpha=1e300",
    "seed=9223372036854775807", "seed=9223372036854775808", "client_lr=1e308", "tau=1e308",
)  # fmt: skip


@fault("config with huge numbers, run", times=14, quick=14, seconds=10)
def huge(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        for change in HUGE:
            words = ["run", "digits-noniid", "--set", "rounds=1", "--set", "local_steps=1"]
            try:
                with limits():
                    command_line([*words, "--set", change, "--out", str(root / "run")])
                yield ""
            except BaseException as error:
                yield f"{change}: {told(error)}"
            shutil.rmtree(root / "run", ignore_errors=True)


NEARLY = st.sampled_from([
    b"", b"\xff\xfe", b"[" * 100_000, b"a = " + b"[" * 100_000, b"a." * 20_000 + b"b = 1",
    b"rounds = " + b"9" * 5_000, b"rounds = 1e999", b"seed = 0x" + b"f" * 5_000,
    b"rounds = 2\nrounds = 3", b"[algorithm]\n[algorithm]", b'algorithm = "\\u0000"', b"\0",
    b"algorithm = 3\n[algorithm.a]", b"x = 1979-05-27T25:00:00",
])  # fmt: skip


@fault("fuzz: config, as bytes", times=1500, quick=15, seconds=30)
def config_bytes(times: int, rng: random.Random) -> Iterator[str]:
    good = (Path(prefed.__file__).parent / "presets" / "digits-noniid.toml").read_bytes()
    with scratch() as root:
        path = root / "config.toml"

        def check(content: bytes) -> None:
            path.write_bytes(content)
            command_line(["validate", str(path)])

        yield from fuzz(times, st.one_of(NEARLY, st.binary(max_size=60), mutated(good)), check)


def mutated(good: bytes) -> st.SearchStrategy[bytes]:
    """A sound file with a piece taken out, doubled, overwritten or cut off."""

    def change(where: float, length: int, how: str, other: bytes) -> bytes:
        at = int(where * len(good))
        piece = good[at : at + length]
        middle = {"out": b"", "twice": piece * 2, "over": other, "flip": bytes(
            b ^ 1 << (length % 8) for b in piece
        )}  # fmt: skip
        return good[:at] if how == "end" else good[:at] + middle[how] + good[at + length :]

    return st.builds(
        change,
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 40),
        st.sampled_from(["out", "twice", "over", "flip", "end"]),
        st.binary(min_size=1, max_size=24),
    )


# Run directories


def directory_files(root: Path) -> tuple[Any, Path, dict[str, bytes]]:
    run = stopped(root)
    (root / "mine.toml").write_bytes((run.folder / "config.toml").read_bytes())
    paths = [p for p in run.folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return run, run.folder, {str(p.relative_to(run.folder)): p.read_bytes() for p in paths}


def records() -> st.SearchStrategy[bytes]:
    """Lines for rounds.jsonl that are JSON, and wrong."""
    value = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
        max_leaves=4,
    )
    keys = st.sampled_from(["round", "train_loss", "test_accuracy", "bytes_up", "seconds", "cohort",
                            "test_loss", "bytes_down", "skipped", "diverged", "x"])  # fmt: skip
    record = st.dictionaries(keys, value, max_size=6) | value
    known = {"round": 1, "train_loss": 1.0, "test_loss": 1.0, "test_accuracy": 0.5, "bytes_up": 1,
             "bytes_down": 1, "seconds": 0.1}  # fmt: skip
    near = st.dictionaries(keys, value, max_size=2).map(lambda d: {**known, **d})
    lines = st.lists(record | near, min_size=1, max_size=3)
    return lines.map(lambda rs: "".join(json.dumps(r) + "\n" for r in rs).encode())


@fault("fuzz: run directories, listed and resumed", times=1000, quick=12, seconds=60)
def run_directories(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        _, folder, files = directory_files(root)
        names = sorted(files)

        def content(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
            kinds = [st.binary(max_size=50), mutated(files[name] or b"x")]
            kinds += [records()] * (2 * name.endswith("rounds.jsonl"))
            return st.tuples(st.just(name), st.one_of(kinds))

        def check(change: tuple[str, bytes]) -> None:
            there = root / "there"
            shutil.copytree(folder, there)
            try:
                (there / change[0]).write_bytes(change[1])
                command_line(["runs", str(there)])
                command_line(["run", str(root / "mine.toml"), "--out", str(there), "--resume"])
            finally:
                shutil.rmtree(there)

        yield from fuzz(times, st.sampled_from(names).flatmap(content), check)


@fault("fuzz: run directories, in reports", times=60, quick=2, seconds=120)
def reports(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        _, folder, _ = directory_files(root)

        def check(content: bytes) -> None:
            (folder / "rounds.jsonl").write_bytes(content)
            command_line(["report", str(folder), "-o", str(root / "report.html")])

        yield from fuzz(times, records(), check)


@fault("pipes and devices in a run directory", times=12, quick=12, seconds=10)
def devices(times: int, rng: random.Random) -> Iterator[str]:
    """A pipe waits for ever, /dev/zero never ends."""
    with scratch() as root:
        _, folder, files = directory_files(root)
        for name in sorted(files):
            for kind in ("device", "pipe"):
                there = root / "there"
                shutil.copytree(folder, there)
                (there / name).unlink()
                if kind == "pipe":
                    os.mkfifo(there / name)
                else:
                    (there / name).symlink_to("/dev/zero")
                try:
                    with limits():
                        command_line(["runs", str(there)], wait=60)
                        again = ["run", str(root / "mine.toml"), "--out", str(there), "--resume"]
                        command_line(again, wait=60)
                    yield ""
                except BaseException as error:
                    yield f"{kind} for {name}: {type(error).__name__}: {error}"
                shutil.rmtree(there)


# Safetensors, with checksums that fit


@fault("fuzz: safetensors with right checksums", times=800, quick=10, seconds=60)
def forged(times: int, rng: random.Random) -> Iterator[str]:
    """Tensors of other names, shapes and types, and files that are none, in a checkpoint whose
    checksums fit: made by somebody, not by chance."""
    with scratch() as root:
        run, folder, files = directory_files(root)
        state = safetensors.torch.load(files["checkpoints/000005/state.safetensors"])
        lines = files["checkpoints/000005/rounds.jsonl"].decode()
        with RunDirectory.open(root / "run", run.config.to_dict(), resume=True) as mark:
            pass
        dtypes = st.sampled_from(
            [torch.float32, torch.float64, torch.int64, torch.bool, torch.half]
        )
        tensor = st.builds(
            lambda shape, dtype: torch.ones(shape, dtype=dtype),
            st.lists(st.integers(0, 5), max_size=3),
            dtypes,
        )
        change = st.tuples(st.sampled_from([*state, "kept.more", "x"]), st.none() | tensor)
        raw = mutated(files["checkpoints/000005/state.safetensors"]) | st.binary(max_size=40)
        engine = st.sampled_from(
            ["sequential x 1", "nothing x 1", "", "x", "a x b", "vectorised x -1"]
        )
        text = st.just(lines) | records().map(bytes.decode)

        def check(value: tuple[Any, str, str]) -> None:
            what, engine, text = value
            there = root / "there"
            shutil.copytree(folder, there)
            real = safetensors.torch.save
            try:
                shutil.rmtree(there / "checkpoints")
                tensors = dict(state)
                if isinstance(what, bytes):
                    safetensors.torch.save = lambda *_: what
                else:
                    for name, tensor in what:
                        tensors.pop(name, None)
                        if tensor is not None:
                            tensors[name] = tensor
                made = checkpoints.Checkpoint(5, tensors, text, engine)
                checkpoints.save(there / "checkpoints", mark.fingerprint, made)
                safetensors.torch.save = real
                command_line(["run", str(root / "mine.toml"), "--out", str(there), "--resume"])
            finally:
                safetensors.torch.save = real
                shutil.rmtree(there)

        # What chance may miss: weights that are sound but not this run's.
        for other in (torch.ones(3), state["weights"].double()):
            try:
                check(([("weights", other)], "sequential x 1", lines))
                yield ""
            except BaseException as error:
                yield told(error)
        changes = st.lists(change, min_size=1, max_size=2)
        yield from fuzz(times, st.tuples(changes | raw, engine, text), check)


# Data files


def run_on(name: str, path: Path, *more: str) -> None:
    """`prefed data show` of a config with this data set: it reads all of it."""
    words = ["data", "show", "digits-noniid", "--set", f"data.name={name}"]
    for change in (f"data.path={path}", "data.split=iid", "data.split.clients=2", *more):
        words += ["--set", change]
    command_line(words)


@fault("fuzz: IDX files", times=1000, quick=12, seconds=30)
def idx(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        folder = official.idx(root / "mnist", images=3)
        target = next(p for p in sorted(folder.iterdir()) if "train-images" in p.name)
        good = official.idx_bytes(np.zeros((3, 28, 28), np.uint8))
        header = st.builds(
            lambda magic, sizes: magic + struct.pack(f">{len(sizes)}I", *sizes) + bytes(784),
            st.sampled_from([b"\0\0\x08\x03", b"\0\0\x08\x01", b"\0\0\x0d\x03"])
            | st.binary(max_size=4),
            st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([1, 28]), max_size=4),
        )
        content = st.one_of(st.binary(max_size=40), mutated(good), header)
        zipped = content.map(gzip.compress)
        broken = mutated(gzip.compress(good))

        def check(content: bytes) -> None:
            target.write_bytes(content)
            run_on("mnist", root, "data.complete=false")

        yield from fuzz(times, st.one_of(content, zipped, broken), check)


@fault("fuzz: CIFAR files, binary and pickled", times=1000, quick=12, seconds=60)
def cifar(times: int, rng: random.Random) -> Iterator[str]:
    with scratch() as root:
        binary = official.cifar10(root / "binary", images=2)
        pickled = official.cifar_pickles(root / "pickled" / "cifar-10-batches-py", images=2)
        files = {
            root / "binary": binary / "data_batch_1.bin",
            root / "pickled": pickled / "data_batch_1",
        }
        kinds = [
            st.tuples(st.just(where), st.binary(max_size=60) | mutated(path.read_bytes()))
            for where, path in files.items()
        ]
        opcodes = st.lists(st.sampled_from([
            b"\x80\x02", b"}", b"]", b"(", b"t", b"q\x00", b"h\x00", b"U\x01a", b"K\x01", b"s",
            b"u", b"cnumpy\nndarray\n", b"cos\nsystem\n", b"R", b"b", b"e", b".",
            b"X\xff\xff\xff\x7f",
            b"\x8a\xff", b"I9999999999\n", b"r\xff\xff\xff\x7f", b"0", b"2", b"\x81", b"\x93",
        ]), max_size=12).map(b"".join)  # fmt: skip
        kinds.append(st.tuples(st.just(root / "pickled"), opcodes))

        def check(change: tuple[Path, bytes]) -> None:
            where, content = change
            files[where].write_bytes(content)
            run_on("cifar10", where, "data.complete=false")

        yield from fuzz(times, st.one_of(kinds), check)


@fault("fuzz: LIBSVM files", times=1000, quick=12, seconds=30)
def libsvm(times: int, rng: random.Random) -> Iterator[str]:
    words = st.sampled_from(["1", "-1", "+1", "1:1", "3:0.5", "2:1e400", "9:1", "0:1", "-1:1", "1:",
                             ":", "#", "nan", "1:nan", "2:inf", "99999999999:1", "é"])  # fmt: skip
    line = st.lists(words, max_size=5).map(" ".join)
    text = st.lists(line, max_size=5).map(lambda lines: "\n".join(lines).encode())
    good = b"+1 1:1 3:1 # note\n-1 2:1\n\n-1 3:1\n+1\n" * 3
    with scratch() as root:
        path = root / "some"

        def check(content: bytes) -> None:
            path.write_bytes(content)
            run_on("libsvm", path, "data.features=3")

        yield from fuzz(times, st.one_of(text, st.binary(max_size=60), mutated(good)), check)


@fault("fuzz: npz files", times=1000, quick=12, seconds=40)
def npz(times: int, rng: random.Random) -> Iterator[str]:
    def npy(array: Any) -> bytes:
        out = io.BytesIO()
        np.lib.format.write_array(out, array, allow_pickle=True)
        return out.getvalue()

    def packed(members: dict[str, bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return out.getvalue()

    array = st.builds(
        lambda shape, dtype: np.ones(shape, dtype),
        st.lists(st.integers(0, 7), max_size=4),
        st.sampled_from(["f8", "f4", "i8", "u1", "b1", "c8", "U3", "S2", "M8[s]", "f2", "O"]),
    )
    named = {
        "x.npy": npy(np.eye(6)), "y.npy": npy(np.arange(6) % 3), "client.npy": npy(np.arange(6) % 2)
    }  # fmt: skip
    names = st.sampled_from([*named, "x_test.npy", "y_test.npy", "../x.npy", "x", "x.txt"])
    member = array.map(npy) | st.binary(max_size=40) | mutated(named["x.npy"])
    archive = st.dictionaries(names, member, max_size=3).map(lambda d: packed({**named, **d}))
    with scratch() as root:
        path = root / "own.npz"

        def check(content: bytes) -> None:
            path.write_bytes(content)
            run_on("npz", path)

        kinds = st.one_of(archive, mutated(packed(named)), st.binary(max_size=40))
        yield from fuzz(times, kinds, check)
