"""Processes that are copies of one that has imported everything."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prefed.experiments import nursery
from prefed.experiments.jobs import Job, Processes
from tests.helpers.run_folders import small

pytestmark = pytest.mark.process


def job(tmp_path: Path, seed: int, *changes: str) -> Job:
    return Job(small("fedavg", f"seed={seed}", *changes).to_dict(), tmp_path / str(seed))


def test_workers_run_side_by_side_and_end_with_their_input(tmp_path: Path) -> None:
    with Processes(2) as processes:
        events = list(processes.run([job(tmp_path, seed) for seed in range(4)]))
        held = processes._nursery
        assert held is not None
        assert len(processes._workers) == 2
    assert sum("done" in event for _, event in events) == 4
    assert not held.is_alive


def test_one_that_is_killed_is_told_of_and_replaced(tmp_path: Path) -> None:
    """And the jobs that wait go to the others."""
    with Processes(1) as processes:
        slow = job(tmp_path, 0, "rounds=100000")
        ends: list[object] = []
        for _, event in processes.run([slow]):
            if "record" in event and not ends:
                held = processes._nursery
                assert held is not None
                pid = held._process.pid
                (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                os.kill(int(child), signal.SIGKILL)
                ends.append(event)
        assert event == {"failed": "its worker process died"}
        again = list(processes.run([job(tmp_path, 1)]))
    assert "done" in again[-1][1]


def test_a_nursery_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with Processes(1) as processes:
        first = list(processes.run([job(tmp_path, 0)]))
        held = processes._nursery
        assert held is not None
        os.kill(held._process.pid, signal.SIGKILL)
        held._process.wait()
        processes._workers[0].is_gone = True
        second = list(processes.run([job(tmp_path, 1)]))
        assert processes._nursery is not held
    assert "done" in first[-1][1]
    assert "done" in second[-1][1]


def test_the_one_that_was_begun_is_taken() -> None:
    nursery.begin()
    nursery.begin()
    (begun,) = nursery._begun
    assert nursery.nursery() is begun
    assert nursery._begun == []
    begun.close()
    assert not begun.is_alive


def test_one_that_nobody_asked_for_is_ended() -> None:
    nursery.begin()
    (begun,) = nursery._begun
    nursery.end()
    assert not begun.is_alive
    assert nursery._begun == []


def test_what_goes_wrong_in_a_worker_is_on_its_standard_error() -> None:
    text = (
        "import os, subprocess, sys\n"
        "from prefed.experiments import nursery\n"
        "held = nursery.Nursery()\n"
        "worker = held.worker()\n"
        "worker.stdin.write('no JSON\\n'); worker.stdin.flush()\n"
        "print(worker.stdout.read() == '', 'JSONDecodeError' in worker.stderr.read())\n"
        "worker.close(); held.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_each_imports_for_itself_where_a_process_cannot_be_copied(tmp_path: Path) -> None:
    """The nursery of another system, in a process of its own."""
    text = (
        "import socket, sys\n"
        "from prefed.experiments import nursery\n"
        "nursery.COPIES = False\n"
        "with socket.socket(fileno=int(sys.argv[1])) as asked:\n"
        "    nursery._serve(asked)\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [sys.executable, "-c", text, str(theirs.fileno())]
        other = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()
        held = nursery.Nursery.__new__(nursery.Nursery)
        held._socket, held._process = ours, other
        worker = held.worker()
        worker.stdin.write(job(tmp_path, 0).to_json() + "\n")
        worker.stdin.flush()
        lines = [json.loads(worker.stdout.readline()) for _ in range(3)]
        assert "record" in lines[0]
        worker.close()
        worker.stderr.close()
        held.close()


def test_a_command_whose_output_is_closed(tmp_path: Path) -> None:
    words = ["compare", "digits-noniid", "--algorithms", "fedavg", "--seeds", "1", "--quiet"]
    words += ["--set", "rounds=2", "--out", str(tmp_path / "out")]
    for closed in ((1,), (1, 2)):

        def close(files: tuple[int, ...] = closed) -> None:
            for file in files:
                os.close(file)

        line = [sys.executable, "-m", "prefed", *words]
        done = subprocess.run(line, preexec_fn=close, timeout=60)
        assert done.returncode == 0


def test_bytes_that_are_no_text_fail_one_job(tmp_path: Path) -> None:
    """A library in C prints what it likes."""
    (input, stdin), (stdout, output), (stderr, errors) = (os.pipe() for _ in range(3))
    os.write(output, b"\xff\xfe no text\n")
    for file in (output, errors):
        os.close(file)
    with Processes(1) as processes:
        processes._workers = [nursery.Worker(stdin, stdout, stderr)]
        events = list(processes.run([job(tmp_path, 0)]))
        assert processes._workers[0].is_gone
        processes._workers[0].stderr.close()
    os.close(input)
    assert events == [(0, {"failed": "its worker process died"})]
