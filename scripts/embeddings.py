"""The search behind PreFedS's step size of embeddings (docs/decisions/047): a GPT and an LSTM on
text that no study has.

    apt-get install fortunes
    python scripts/embeddings.py [--out docs/results/embeddings] [--workers 2]

Clients are pieces of some 5,000 characters of one of the package's files; models, rounds and
schedules are those of the presets of Shakespeare's plays, which are not looked at. A run is scored
by its last weights and by their mean over rounds, on the last fifth of each client's fortunes.
Scores are kept in OUT/scores.json, so that the same command goes on, and OUT.md is the table.
"""

import argparse
import json
import re
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from prefed.core.errors import Diverged, PrefedError
from prefed.core.safe_files import write_whole
from prefed.experiments.config import load, read

FORTUNES = Path("/usr/share/games/fortunes")
TASKS = {"GPT": ("shakespeare-gpt", [0.03]), "LSTM": ("shakespeare", [0.1, 0.4])}
"""The preset that model, rounds and schedule are of, and the step sizes."""
SHARES = [0.1, 0.3, 1.0]
CLIENT = 5000
"""Characters, about."""
Job = tuple[str, float, float, str]


def text() -> str:
    """All fortunes, in the form of a play: a speech is a fortune, and a client a speaker."""
    if not FORTUNES.is_dir():
        raise PrefedError(f"{FORTUNES}: not there; install Debian's package fortunes")
    spoken = []
    for path in sorted(FORTUNES.iterdir()):
        if path.suffix or path.is_symlink() or path.name == "ascii-art":
            continue
        found = re.sub(r".\x08", "", path.read_text(errors="ignore").replace("\t", " "))
        plain = "".join(c for c in found if c == "\n" or 32 <= ord(c) < 127)
        client = size = 0
        for fortune in plain.split("\n%\n"):
            words = re.sub(r" {2,}", " ", re.sub(r"\n\s*\n+", "\n", fortune.strip("\n")))
            if len(words) > 20:
                client, size = (client + 1, 0) if size > CLIENT else (client, size)
                spoken.append(f"{path.name}-{client}:\n{words}\n\n")
                size += len(words)
    return "".join(spoken)


def score(job: Job) -> tuple[str, list[float] | None]:
    """By the last weights, and by their mean over rounds."""
    import torch

    torch.set_num_threads(1)
    task, rate, share, path = job
    table = read(TASKS[task][0])
    del table["tuned"]
    table["data"] = {**table["data"], "path": path}
    lr = {"schedule": "cosine", "start": rate}
    table["algorithm"] = {"name": "prefeds", "client_lr": lr, "embedding_lr": share}
    run = load(table, ["device=cpu", "workers=1", "seed=0"]).make_run()
    run.evaluate_from = run.settings.rounds + 1
    try:
        for _ in run.rounds():
            pass
    except Diverged:
        return key(job), None
    by_mean = run.evaluate()["test_accuracy"]
    run.server.over_rounds = {}
    return key(job), [run.evaluate()["test_accuracy"], by_mean]


def key(job: Job) -> str:
    return f"{job[0]}: {job[1]:g}: {job[2]:g}"


def table(scores: dict[str, list[float] | None]) -> str:
    heads = ["model", "client_lr", *(f"embedding_lr = {share:g}" for share in SHARES)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for task, (_, rates) in TASKS.items():
        for rate in rates:
            found = [scores.get(key((task, rate, share, ""))) for share in SHARES]
            cells = ["-" if f is None else f"{100 * f[1]:.1f} ({100 * f[0]:.1f})" for f in found]
            lines.append(f"| {task} | {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/embeddings"))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "scores.json"
    scores = json.loads(path.read_text()) if path.exists() else {}
    with TemporaryDirectory() as folder, ProcessPoolExecutor(given.workers) as pool:
        play = Path(folder) / "fortunes.txt"
        play.write_text(text())
        points = [
            (t, rate, s) for t, (_, rates) in TASKS.items() for rate, s in product(rates, SHARES)
        ]
        left = [job for point in points if key(job := (*point, str(play))) not in scores]
        for name, found in pool.map(score, left):
            scores[name] = found
            write_whole(path, (json.dumps(scores, indent=0) + "\n").encode())
            print(f"{name}: {found}", flush=True)
    write_whole(given.out.with_suffix(".md"), table(scores).encode())
    print(table(scores))


if __name__ == "__main__":
    main()
