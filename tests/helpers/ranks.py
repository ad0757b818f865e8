"""One rank of a distributed run, for test_distributed.py: python -m tests.helpers.ranks OUT."""

from __future__ import annotations

import os
import sys
from typing import Any

import safetensors.torch
import torch

import prefed
from prefed.training import ranks
from prefed.training.means import in_turn
from tests.helpers.bad_client import BAD, rounds
from tests.helpers.engine_runs import batchnorm
from tests.helpers.problems import tiny_data, tiny_model

OWN = [3, 1, 2, 0.5, 4, 1]
LATE: dict[str, Any] = {
    "steps_per_second": {"distribution": "lognormal", "median": 10.0, "sigma": 1.0},
    "deadline": 0.25, "partial_work": True, "over_selection": 1.3, "vanish": 0.2,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "scaffold": {"engine": "sequential", "weighting": "samples", "clients_per_round": 5},
    "prefed": {"engine": "vectorised", "weighting": OWN, "clients_per_round": None},
    "prefedlite": {"engine": "sequential", "clients_per_round": 5},
    "prefedm": {"engine": "vectorised", "weighting": OWN, "clients_per_round": 5},
    "prefed+topk": {"engine": "vectorised", "clients_per_round": 3},
    "prefedsync": {"engine": "vectorised", "weighting": OWN, "clients_per_round": 2},
    "fedavg": {"engine": "auto", "clients_per_round": 2},
    "prefed+norm": {"engine": "sequential", "clients_per_round": 3},
    "fedbn+own": {"engine": "vectorised", "clients_per_round": 3},
    "prefed+part": {"engine": "sequential", "clients_per_round": 3},
    "fedavg+mean": {"engine": "vectorised", "clients_per_round": 5},
    "fednova": {"engine": "vectorised", "clients_per_round": 5, "local_epochs": 2},
    "prefedopt": {"engine": "sequential", "weighting": OWN, "local_epochs": 1},
    "fedmuon": {"engine": "vectorised", "clients_per_round": 5},
    "fedpac+sampled": {"engine": "sequential", "clients_per_round": 5},
    "mimelite": {"engine": "sequential", "clients_per_round": 5, "weighting": "samples"},
    "pair+both": {"engine": "sequential", "clients_per_round": 5},
    "prefed+align": {"engine": "vectorised", "clients_per_round": 4, "local_epochs": 1},
    "pair+kept": {"engine": "vectorised", "clients_per_round": 3},
    "fedadamw": {"engine": "sequential", "clients_per_round": 5, "local_epochs": 1},
    "fedpm+full": {"engine": "vectorised", "weighting": OWN, "clients_per_round": 5},
    "fedlada": {"engine": "vectorised", "clients_per_round": 5},
    "adaalter": {"engine": "vectorised", "weighting": OWN, "mean": {"name": "median", "bucket": 2},
                 "state_mean": "geometric", "attackers": {"share": 0.4, "attack": "alie"}},
    "localadam": {"engine": "sequential", "clients_per_round": 2, "mean": "clipped",
                  "state_mean": "plain"},
    "fedadam": {"engine": "sequential", "clients_per_round": 5, "client_dropout": 0.4, "quorum": 2},
    "fedyogi": {"engine": "vectorised", "clients_per_round": 4, "devices": LATE},
}  # fmt: skip
PRIVATE = {"noise_multiplier": 1.0, "clip": {"quantile": 0.4}, "state_clip": {"m": 0.1, "P": 0.1}}
RUNS["prefed+private"] = {"engine": "vectorised", "clients_per_round": 2, "privacy": PRIVATE}
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "private": {},
    "norm": {"statistics": "keep", "momentum": "keep"},
    "mean": {"statistics": "average"},
    "both": {"client": "adam", "server": {"name": "sgd", "momentum": 0.9, "nesterov": True},
             "share": {"m": "keep", "v": "average"}},
    "kept": {"client": "adam", "share": {"m": {"kind": "average", "every": 2, "between": "keep"}}},
    "full": {"shape": "full", "tau_relative": 0.1},
    "sampled": {"rule": {"name": "sophia", "refresh": 2}},
    "align": {"align": 0.3, "align_form": "mixed", "personal": ("@last",)},
    "own": {"personal": ("@norm", "@last")},
    "part": {"personal": ("@last",), "momentum": "average", "upload": "topk(0.2)"},
    "topk": {"upload": "topk(0.2)", "P_codec": "log4", "P_every": 3, "momentum": "derived",
             "aggregate": "sqrtP"},
}  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    """The final weights of a few runs; rank 1 may leave in the middle of one."""
    dies = os.environ.get("DIES") == os.environ.get("RANK", "none")
    results = {}
    for name, options in RUNS.items():
        steps = {} if "local_epochs" in options else {"local_steps": 3}
        settings = prefed.Settings(rounds=4, batch_size=4, device="cpu", **steps, **options)
        name, _, more = name.partition("+")
        algorithm = prefed.ALGORITHMS.get(name)(client_lr=0.01, **MORE[more])
        model = batchnorm() if more in ("norm", "mean", "own") else tiny_model()
        simulation = prefed.Simulation(algorithm, model, tiny_data(), settings)
        for _ in range(4):
            record = simulation.run_round()
            if dies:
                os._exit(3)
        results[name + more] = simulation.server.weights
        results[f"{name + more}.buffers"] = simulation.server.buffers
        results |= {f"{name + more}.{n}": v for n, v in simulation.trainer.state().items()}
        results |= {f"{name + more}.mean.{n}": v for n, v in simulation.server.over_rounds.items()}
        number = record.get("epsilon", record["train_loss"])
        results[f"{name + more}.loss"] = torch.tensor(number, dtype=torch.float64)
    early = prefed.Settings(
        rounds=40, local_steps=3, batch_size=4, device="cpu", keep="best", stop_when={"patience": 3}
    )  # the first rank alone knows the accuracy
    run = prefed.Run(prefed.FedAvg(client_lr=0.01), tiny_model(), tiny_data(), early)
    results["ended"] = torch.tensor([record["round"] for record in run.rounds()])
    assert len(results["ended"]) < 40
    for engine in ("sequential", "vectorised"):  # with a client that is left out
        simulation = rounds("scaffold", 3, engine=engine, on_divergence="continue")
        assert [record["left_out"] for record in simulation.history] == [[BAD]] * 3
        results[f"left out, {engine}"] = simulation.server.weights
    return results


def wide_weights() -> dict[str, torch.Tensor]:
    """The same with sums in turn, as those of wide models are."""
    usual, in_turn.WIDE = in_turn.WIDE, 1
    try:
        return {f"wide {name}": value for name, value in weights().items()}
    finally:
        in_turn.WIDE = usual


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ranks.joined():
        found = weights() | wide_weights()
        path = f"{sys.argv[1]}/{os.environ['RANK']}.safetensors"
        safetensors.torch.save_file(found, path)
