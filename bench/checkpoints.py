"""How long a round waits for a checkpoint, at 11 and 44 million weights (PreFed: three vectors).

python bench/checkpoints.py [millions of weights ...]

"written at once" is what the thread does: with a snapshot that is written before the run goes on.
Seconds of the wall clock and of the thread that trains; the least of five.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from prefed.core.machine import total_memory
from prefed.experiments import checkpoints
from prefed.experiments.checkpoints import Checkpoint, Writer

TIMES = 5


def main() -> None:
    torch.set_num_threads(1)
    for millions in [float(word) for word in sys.argv[1:]] or [11.0, 44.0]:
        state = {name: torch.randn(int(millions * 1e6)) for name in ("weights", "m", "P")}
        size = sum(value.nbytes for value in state.values())
        held = {name: torch.empty_like(value) for name, value in state.items()}
        with tempfile.TemporaryDirectory(dir=".") as folder:
            waits: dict[str, list[tuple[float, float]]] = {}
            writer = Writer()
            for round in range(TIMES):
                for kind in ("copied, then written by a thread", "written at once"):
                    start, used = time.perf_counter(), time.thread_time()
                    copied = {n: held[n].copy_(v) for n, v in state.items()}
                    saved = Checkpoint(round, copied, "\n" * round, "x")

                    def write(saved: Checkpoint = saved) -> None:
                        checkpoints.save(Path(folder), "run", saved)

                    writer.start(write)
                    if kind == "written at once":
                        writer.wait()
                    waited = time.perf_counter() - start, time.thread_time() - used
                    waits.setdefault(kind, []).append(waited)
                    writer.wait()
            writer.close()
        print(f"{millions:g} million weights, {size / 1e6:.0f} MB of {total_memory() / 1e9:.0f} GB")
        for kind, found in waits.items():
            wall, thread = (min(values) for values in zip(*found, strict=True))
            print(f"  {kind:<36} {wall:7.3f} s, {thread:7.3f} s of its thread", flush=True)


if __name__ == "__main__":
    main()
