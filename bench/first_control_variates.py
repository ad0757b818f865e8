"""SCAFFOLD on Fashion-MNIST with two labels a client, where Flower's reproduction printed 10.0 %.

    python bench/first_control_variates.py            # two minutes; needs fashion-mnist

In that code a client that has no control variate yet takes a copy of the weights for it, where the
paper has zero. The first round then adds lr * w to the weights in each of its thousand steps; after
three rounds all is 10.0 %, as printed, and in the fourth no number any more.
"""

import argparse

import torch
from torch import Tensor

import prefed
from prefed.algorithms.scaffold import ControlledSGD
from prefed.experiments.config import load
from prefed.experiments.printed_tables import read
from prefed.rules import Rule, State


class FromWeights(ControlledSGD):
    def begin(self, w: Tensor, state: State) -> None:
        super().begin(w, state)
        new = (state["c_i"] == 0).all(-1, keepdim=True)
        state["c_i"].copy_(torch.where(new, w, state["c_i"]))


class ScaffoldFromWeights(prefed.SCAFFOLD):
    def client_rule(self) -> Rule:
        return FromWeights(self.client_momentum)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    _, table = read("niid-bench-fashion")
    cell = next(c for c in table.cells if (c.row, c.column) == ("two labels a client", "SCAFFOLD"))
    config = load(table.config, [*cell.set, "device=cpu", f"rounds={options.rounds}"])
    for kind in (prefed.SCAFFOLD, ScaffoldFromWeights):
        torch.manual_seed(0)
        run = config.make_run()
        given = {name: getattr(run.algorithm, name) for name in type(run.algorithm).model_fields}
        run = prefed.Run(kind(**given), run.task.flat.module, run.data, run.settings)
        try:
            for record in run.rounds():
                accuracy = 100 * record["test_accuracy"]
                print(f"{kind.__name__}: round {record['round']}: {accuracy:.1f} %", flush=True)
        except prefed.Diverged as error:
            print(f"{kind.__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
