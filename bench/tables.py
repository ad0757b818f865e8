"""What a table of `prefed table` costs: the processor time of a round of each of its cells.

python bench/tables.py fedprox-synthetic niid-bench-mnist      # needs their data sets
python bench/tables.py mcmahan-cnn --rounds 1 --only "E = 1"
"""

import argparse
import time

from prefed.experiments.config import load
from prefed.experiments.printed_tables import read


def seconds_of_a_round(source: str, changes: list[str], rounds: int) -> float:
    """The least processor time of these rounds, after everything is prepared."""
    run = load(source, ["device=cpu", "evaluate_every=1000000", *changes]).make_run()
    run.prepare()
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        run.run_round()
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="cells whose row or column has these words")
    options = parser.parse_args()
    for name in options.tables:
        _, table = read(name)
        total = 0.0
        for cell in table.cells:
            if options.only not in f"{cell.row}, {cell.column}":
                continue
            points = [*cell.points()]
            rounds = load(table.config, points[0]).rounds
            seconds = seconds_of_a_round(table.config, points[0], options.rounds)
            whole = seconds * rounds * len(points) * table.seeds
            total += whole
            print(
                f"{name}: {cell.row}, {cell.column}: {seconds:.3g} s a round, {rounds} rounds, "
                f"{len(points) * table.seeds} runs: {whole / 60:.3g} minutes at most",
                flush=True,
            )
        print(f"{name}: {total / 60:.3g} minutes of one core at most", flush=True)


if __name__ == "__main__":
    main()
