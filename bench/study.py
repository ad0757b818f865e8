"""What a study of thirty runs takes, as a multiple of its training alone.

python bench/study.py                 digits-noniid, and cifar10-small if its files are there
python bench/study.py digits --rounds 20

The study is a process of its own: 8 points for each of 3 algorithms, then 2 seeds. Training alone
is the same thirty runs in this process, one after another, without imports, data, the choice of an
engine, evaluation and files. With one worker processor time is compared, so that a busy machine
disturbs little; the ratio of the wall clock means something on a quiet one. A study as people start
it has a worker for each core.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from prefed.core.errors import Diverged, PrefedError
from prefed.experiments.config import Config
from prefed.experiments.study import read
from prefed.experiments.study_runs import StudyRuns

TEXT = """
title = "thirty runs"
config = "{config}"
set = ["rounds={rounds}", {more}]
seeds = 2
[tuning]
rounds = {rounds}
[grid.fedavg]
{rate} = [0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.05]
[grid.fedadam]
client_lr = [0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.05]
[grid.prefed]
{rate} = [0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.003, 0.004, 0.005]
"""
STUDIES = {
    "digits": {"config": "digits-noniid", "rounds": 60, "more": "", "rate": "client_lr"},
    "cifar10": {"config": "cifar10-small", "rounds": 20, "more": "", "rate": '"client_lr.start"'},
}
Seconds = tuple[float, float]
"""Of the processor and of the wall clock."""


def whole(study: Path, folder: Path, *more: str) -> Seconds:
    """The command, with all that belongs to it."""
    words = [sys.executable, "-m", "prefed", "study", str(study), "--out", str(folder), "--quiet"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*words, *more], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.perf_counter() - start


def alone(config: Config) -> Seconds:
    """The rounds of a run without evaluation."""
    run = config.make_run()
    run.evaluate = dict  # type: ignore[method-assign]
    run.prepare()
    used, start = time.process_time(), time.perf_counter()
    try:
        for _ in run.rounds():
            pass
    except Diverged:
        pass
    return time.process_time() - used, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*STUDIES, []])
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for name in arguments.names or STUDIES:
        about = STUDIES[name] | ({"rounds": arguments.rounds} if arguments.rounds else {})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "thirty.toml"
            path.write_text(TEXT.format(**about))
            try:
                took = whole(path, Path(folder) / "out", "--workers", "1")
                usual = whole(path, Path(folder) / "usual")[1]
            except (PrefedError, subprocess.CalledProcessError) as error:
                print(f"{name}: {error}")
                continue
            runs = StudyRuns(read(str(path))[1], Path(folder) / "out")
            configs = [
                plan.config for plans in (runs.tuning(), runs.comparison()) for _, plan in plans
            ]
            training = [sum(seconds) for seconds in zip(*map(alone, configs), strict=True)]
        ratios = [a / b for a, b in zip(took, training, strict=True)]
        print(
            f"{name}: {len(configs)} runs of {about['rounds']} rounds: study {took[0]:.1f} s of "
            f"processor time, training alone {training[0]:.1f} s: {ratios[0]:.2f} times; by the "
            f"wall clock {took[1]:.1f} and {training[1]:.1f} s: {ratios[1]:.2f} times; "
            f"with a worker for each core {usual:.1f} s: {usual / training[1]:.2f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
