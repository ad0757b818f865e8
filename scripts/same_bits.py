"""Compare this version with an earlier one, bit for bit, on this machine.

    git worktree add /tmp/before v0.1.0
    python scripts/same_bits.py /tmp/before [--seeds 10] [--rounds 4]

Each version runs every algorithm with every seed in a process of its own. Weights, optimiser and
kept state, records (all but the seconds) and the tensors of the last checkpoint must be equal, for
whole runs and for runs that were stopped and resumed; a run that the earlier version began and this
one resumed must end in the same bits too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
VARIANTS: list[list[str]] = [
    ["algorithm=fedavg"], ["algorithm=fedavgm"], ["algorithm=fedadagrad"], ["algorithm=fedadam"],
    ["algorithm=fedyogi"], ["algorithm=adaalter"], ["algorithm=localadam"],
    ["algorithm=prefed"], ["algorithm=prefedlite"], ["algorithm=prefedopt"],
    ["algorithm=prefedsync"], ["algorithm=scaffold"], ["algorithm=fedprox"],
    ["algorithm=prefed", "momentum=keep", "upload=topk(0.2)", "P_every=2"],
    ["algorithm=prefed", "momentum=derived", "aggregate=sqrtP", "engine=vectorised"],
    ["algorithm=prefedopt", "shape=kronecker", "refresh=3", "model.hidden=[4]"],
    ["algorithm=prefed", "shape=block", "refresh=2", "model.hidden=[4]"],
    ["algorithm=scaffold", "engine=vectorised", "workers=2", "dropout=0.3", "quorum=3"],
]  # fmt: skip

CHILD = """
import sys, json, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
try:
    from prefed.experiments.config import load
    from prefed.experiments.run_directory import execute
    from prefed.core.errors import Interrupted
except ImportError:
    from prefed.config import load
    from prefed.runs import execute
    from prefed.errors import Interrupted
for line in sys.stdin:
    job = json.loads(line)
    asked = iter(range(1, 10**6))
    stop = (lambda: next(asked) >= job["stop"]) if job["stop"] else (lambda: False)
    try:
        execute(load("digits-noniid", job["changes"]), Path(job["out"]), resume=True, stop=stop)
    except Interrupted:
        pass
"""


def run(tree: Path, jobs: list[dict[str, Any]]) -> None:
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    text = "".join(json.dumps(job) + "\n" for job in jobs)
    subprocess.run([sys.executable, "-c", CHILD], input=text, text=True, check=True,
                   env=environment, cwd=tree)  # fmt: skip


def fingerprint(folder: Path) -> dict[str, str]:
    """The bits of a run: its records without the time they took, its model, its checkpoint."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    records = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    newest = max((folder / "checkpoints").iterdir())
    return {
        "records": json.dumps(records),
        "model": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "checkpoint": _tensors(newest / "state.safetensors"),
    }


def _tensors(path: Path) -> str:
    import safetensors.torch

    found = safetensors.torch.load_file(path)
    found = {name.replace("steps_left", "left"): value for name, value in found.items()}
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        plans = []
        for number, variant in enumerate(VARIANTS):
            for seed in range(options.seeds):
                short = [f"rounds={options.rounds}", "local_steps=3", "device=cpu", f"seed={seed}"]
                engine = [] if any("engine" in c for c in variant) else ["engine=sequential"]
                plans.append((f"{number}-{seed}", [*variant, *engine, *short]))

        def jobs(kind: str, stop: int = 0) -> list[dict[str, Any]]:
            return [{"changes": c, "out": str(root / kind / n), "stop": stop} for n, c in plans]

        run(options.before, jobs("before"))
        run(HERE, jobs("now"))
        run(HERE, jobs("resumed", stop=2) + jobs("resumed"))
        run(options.before, jobs("begun before", stop=2))
        run(HERE, jobs("begun before"))
        wrong = 0
        for name, changes in plans:
            expected = fingerprint(root / "before" / name)
            for kind in ("now", "resumed", "begun before"):
                found = fingerprint(root / kind / name)
                for part in (key for key in expected if found[key] != expected[key]):
                    wrong += 1
                    print(f"{kind}: {part} differs: {' '.join(changes)}")
        print(f"{len(plans)} runs, three ways each: {wrong} differences")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
