"""kill -9 at random moments of a run, then resume: does it end in the same bits?

    python tests/faults/kill.py --trials 200

One process imports torch and then forks a child for each run, so that a trial takes a fraction of a
second. A child checkpoints after every round, is killed at a random moment, and a second child
resumes; every third trial kills the resuming child as well. The final SHA-256 of the weights and of
rounds.jsonl (times aside) must be those of a run that nobody interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from prefed import runs
from prefed.config import Config, load

ALGORITHMS = ("fedadam", "prefed", "scaffold")
"""With state on the server, shared state, and state that clients keep."""


def config(algorithm: str) -> Config:
    changes = ["rounds=6", "local_steps=3", "model.hidden=[16]", "clients_per_round=4"]
    return load("digits-noniid", [*changes, f"algorithm={algorithm}", "device=cpu"])


def start(what: Config, folder: Path) -> int:
    """Fork a child that runs or resumes in `folder`; its process id."""
    child = os.fork()
    if child == 0:
        try:
            runs.execute(what, folder, resume=True)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return child


def finish(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def fingerprint(folder: Path) -> str:
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = json.dumps([{**line, "seconds": 0} for line in lines])
    weights = (folder / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + rounds.encode()).hexdigest()


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.rglob(".*") if p.name != ".lock"]


def main(trials: int, seed: int) -> int:
    torch.set_num_threads(1)
    runs.SECONDS_BETWEEN = 0.0
    rng = random.Random(seed)
    lost = 0
    with tempfile.TemporaryDirectory() as root:
        for algorithm in ALGORITHMS:
            what, whole = config(algorithm), Path(root) / f"{algorithm}-whole"
            begin = time.monotonic()
            if not finish(start(what, whole)):
                sys.exit(f"{algorithm}: the uninterrupted run failed")
            length = time.monotonic() - begin
            expected, survived = fingerprint(whole), 0
            count = trials // len(ALGORITHMS) + (algorithm == ALGORITHMS[0]) * (
                trials % len(ALGORITHMS)
            )
            for trial in range(count):
                folder = Path(root) / f"{algorithm}-{trial}"
                for _ in range(2 if trial % 3 == 0 else 1):
                    child = start(what, folder)
                    time.sleep(rng.uniform(0, length))
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                resumed = finish(start(what, folder))
                same = resumed and fingerprint(folder) == expected and not leftovers(folder)
                survived += same
                if not same:
                    print(f"{algorithm} trial {trial}: lost", file=sys.stderr)
            lost += count - survived
            print(f"kill -9 of {algorithm:<10} tried {count:>4}   survived {survived:>4}")
    print(f"lost {lost}")
    return 1 if lost else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(main(arguments.trials, arguments.seed))
