"""Every algorithm and every option against NumPy code written from the papers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import prefed
from prefed.core import draws
from tests.helpers import oracles
from tests.helpers.device import DEVICE
from tests.helpers.problems import SIZES, arrays, tiny_data, tiny_model
from tests.training.test_personal import CASES as PERSONAL

ROUNDS, STEPS, BATCH = 4, 3, 5


def grid(**options: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


OFF_ON = [False, True]
SERVER_MOMENTS: dict[str, list[Any]] = {
    "bias_correction": OFF_ON,
    "tau_inside": OFF_ON,
    "v0": [None, 0.0, 0.1],
}
COVARIANCE: dict[str, list[Any]] = {
    "accumulate": ["ema", "sum"],
    "shape": ["diagonal", "full", "kronecker"],
    "bias_correction": OFF_ON,
}
EXACT: dict[str, list[Any]] = {"upload": ["exact"], "P_codec": ["exact"], "m_codec": ["exact"]}
"""Codecs have their own tests; with these PreFedLite is compared in what else it does."""
SHAPES = [
    *grid(shape=["full", "kronecker"], refresh=[2, 3]),
    *grid(shape=["block"], blocks=["row", "tensor"], refresh=[1, 2], bias_correction=OFF_ON),
    *grid(shape=["block"], accumulate=["sum"], refresh=[1, 2]),
]
TENSORS = [(SIZES[1], SIZES[0]), (SIZES[1],), (SIZES[2], SIZES[1]), (SIZES[2],)]
FEDADA2 = {"client": {"name": "adagrad"}, "server": {"name": "adam", "v0": 1e-6},
           "server_lr": 0.01}  # fmt: skip
"""Lee et al. 2024: adaptive on both sides, and the clients' state begins anew in each round."""
DILOCO = {
    "client": {"name": "adam", "beta2": 0.999, "tau": 1e-8, "bias_correction": True},
    "decoupled_weight_decay": 0.1, "share": {"m": "keep", "v": "keep"},
    "server": {"name": "sgd", "momentum": 0.9, "nesterov": True}, "server_lr": 0.7,
}  # fmt: skip
"""Douillard et al. 2023: AdamW, whose state stays with each client, and Nesterov's momentum."""
CASES: dict[str, list[dict[str, Any]]] = {
    "fedavg": grid(client_momentum=[0.0, 0.7], server_momentum=[0.0, 0.5], server_lr=[1.0, 0.3]),
    "fedavgm": [{}],
    "fedadagrad": grid(beta1=[0.0, 0.9], server_lr=[0.1], **SERVER_MOMENTS),
    "fedadam": grid(server_lr=[0.1], tau=[1e-3, 0.1], **SERVER_MOMENTS),
    "fedyogi": grid(server_lr=[0.1], beta2=[0.99, 0.8], **SERVER_MOMENTS),
    "adaalter": [*grid(tau=[1e-3, 0.1], v0=[0.0, 0.5]), *grid(frozen=[True], v0=[1.0], tau=[0.1])],
    "localadam": [
        *grid(state=["reset", "average", "keep"], bias_correction=OFF_ON, tau_inside=OFF_ON),
        *grid(v0=[0.5], beta2=[0.8], tau=[0.1], server_lr=[0.7]),
    ],
    "prefed": [
        *SHAPES,
        *grid(momentum=["average", "reset", "keep"], beta2=[0.9, 0.99], **COVARIANCE),
        *grid(
            momentum=["average", "derived", "keep"],
            P_every=[1, 3],
            aggregate=["mean", "sqrtP"],
            accumulate=["ema", "sum"],
            bias_correction=OFF_ON,
            server_lr=[0.7],
        ),
    ],
    "prefedlite": grid(momentum=["average", "derived"], **EXACT),
    "prefedopt": [
        *({"server_lr": 0.02, "tau": 1e-2, **options} for options in SHAPES),
        *grid(
            per_step=OFF_ON, step_with=["delta", "m"], server_lr=[0.02], tau=[1e-2], **COVARIANCE
        ),
    ],
    "prefedsync": grid(accumulate=["sum", "ema"], tau=[0.1]),
    "scaffold": grid(server_lr=[1.0, 0.5], client_momentum=[0.0, 0.7]),
    "fedprox": grid(mu=[0.0, 0.5], client_momentum=[0.0, 0.7]),
    "fednova": grid(client_momentum=[0.0, 0.7], server_momentum=[0.0, 0.5], server_lr=[1.0, 0.3]),
    "fedmuon": [
        *grid(momentum=["control", "average"], server_lr=[1.0, 0.5], beta=[0.95, 0.5]),
        *grid(momentum=["control", "average"], iterations=[0, 2], adam_lr=[1.0]),
    ],
    "mimelite": [
        *grid(beta1=[0.9, 0.0], server_lr=[1.0, 0.5]),
        *grid(optimiser=["adam"], tau=[0.1, 1e-2], beta2=[0.99, 0.5]),
    ],
    "fedpac": [
        *(
            {"rule": {"name": "soap", "tau": 1e-3, **options}, "client_lr": 0.02}
            for options in grid(refresh=[3, 10], largest_side=[256, 4], beta2=[0.95, 0.8])
        ),
        *(
            {"rule": {"name": "sophia", **options}, "client_lr": 0.02}
            for options in grid(refresh=[1, 2, 10], gamma=[0.05, 5.0], tau=[1e-12, 0.1])
        ),
        *grid(rule=[{"name": "adam"}], server_lr=[1.0, 0.5]),
        *grid(rule=[{"name": "sophia", "gamma": 1.0}], align=[0.0, 0.9]),
    ],
    "pair": [
        {},
        FEDADA2,
        {**FEDADA2, "server": {"name": "yogi", "v0": 1e-6}, "server_lr": 0.02},
        *grid(
            client=[{"name": "adam", "bias_correction": True, "tau_inside": True}],
            server=[{"name": "sgd", "momentum": 0.9}, {"name": "covariance", "tau": 1e-2}],
            share=[{}, {"m": "keep", "v": "average"}, {"v": "keep"}],
            server_lr=[0.02],
            per_step=OFF_ON,
        ),
        {
            "client": {"name": "covariance", "bias_correction": True},
            "share": {"P": "average"},
            "server": {"name": "adam", "bias_correction": True},
            "server_lr": 0.01,
        },
        DILOCO,
    ],
}
DESLOC: list[dict[str, Any]] = [
    {"client": {"name": "adam", "bias_correction": True}, "share": {"m": m, "v": v}}
    for m in ("keep", {"kind": "average", "every": 2, "between": "keep"})
    for v in ({"kind": "average", "every": 3, "between": "keep"}, "average")
]
"""Iacob et al. 2025: each piece of state is averaged at its own pace, and kept in between."""
RELATIVE = grid(
    tau_relative=[0.1, 1.0],
    shape=["diagonal", "full", "block", "kronecker"],
    bias_correction=OFF_ON,
)
CASES["pair"] += [
    *DESLOC,
    {"client": {"name": "covariance", "tau_relative": 0.3}, "share": {"P": "average"},
     "server": {"name": "covariance", "tau_relative": 0.5}, "server_lr": 0.02},
]  # fmt: skip
CASES["prefed"] += [
    *RELATIVE,
    *grid(tau_relative=[0.2], momentum=["derived"], accumulate=["ema", "sum"]),
    *grid(tau_relative=[0.2], shape=["kronecker"], refresh=[2]),
    {"tau_relative": 0.2, "beta1": 0.0, "tau": 0.05},  # P is zero
]
CASES["prefedopt"] += [{"server_lr": 0.02, **options} for options in RELATIVE]
CASES["prefedlite"] += [{**options, "tau_relative": 0.2} for options in grid(**EXACT)]
CASES |= {
    "fedcm": grid(alpha=[0.1, 0.6, 1.0], server_lr=[1.0, 0.3]),
    "fedlada": grid(alpha=[0.1, 0.6], tau=[1e-8, 0.1], server_lr=[1.0, 0.3]),
    "fedadamw": grid(means=["tensor", "row", "whole"], alpha=[0.5, 0.0], tau=[1e-8, 0.01]),
    "fedlion": grid(beta1=[0.9, 0.5], beta2=[0.99, 0.7], server_lr=[1.0, 0.3]),
    "fedpm": [
        *grid(shape=["diagonal", "full"], bias_correction=OFF_ON, server_lr=[1.0, 0.7]),
        *grid(momentum=["derived", "keep"], tau_relative=[None, 0.2]),
        {"shape": "full", "tau_relative": 0.2, "accumulate": "sum"},
    ],
}
CASES["prefedm"] = [
    {},
    *grid(server_momentum=[0.0, 0.7], server_lr=[1.0, 0.3], mean_of_rounds=[None, 0.0, 2.5]),
    *grid(tau_relative=[None, 0.3], **COVARIANCE),
    *SHAPES,
]
CASES["prefedmlite"] = [{"upload": "exact", "P_codec": "exact"}]
CASES["prefeds"] = [
    {},
    {"beta1": 0.0, "client_lr": 0.01},  # P is zero
    *grid(tau_relative=[0.1, 1.0], beta1=[0.5, 0.95], beta2=[0.9, 0.999]),
    *grid(mean_of_rounds=[None, 2.5]),
    *grid(iterations=[0, 3], plain_lr=[0.1, 0.5], server_lr=[1.0, 0.3]),
    *grid(plain=[("0.*",), ("2.*",)], embedding_lr=[0.3, 1.0], tau_relative=[0.05, 0.3]),
    {"plain": ("0.*", "2.*"), "beta1": 0.0, "client_lr": 0.01},
    *grid(clip_relative=[None, 0.5, 1.0], beta1=[0.5, 0.95]),
    *grid(refresh=[2, 3], plain=[(), ("0.*",)]),
]
CASES["prefedslite"] = [{"upload": "exact", "m_codec": "exact", "P_codec": "exact"}]
CASES["prefedc"] = [
    {},
    {"beta1": 0.0, "client_lr": 0.01},  # P is zero
    *grid(tau_relative=[0.1, 1.0], beta1=[0.5, 0.95], beta2=[0.9, 0.999]),
    *grid(own_lr=[0.0, 0.5], mean_of_rounds=[None, 2.5]),
    *grid(iterations=[0, 3], plain_lr=[0.1, 0.5], server_lr=[1.0, 0.3]),
    *grid(plain=[("0.*",), ("0.*", "2.*")], embedding_lr=[0.3, 1.0]),
    *grid(clip_relative=[None, 0.5], beta1=[0.5, 0.95]),
]
CASES["prefedclite"] = [{"upload": "exact", "m_codec": "exact", "P_codec": "exact"}]
FIRST_CASE = {"prefedlite", "prefedmlite", "prefedslite", "prefedclite", "fedpac"}
"""Not with their defaults: of codecs; and of SOAP's tau, 1e-8, over which a step of rounding errors
goes where the gradient is 0, as it is along equal scores of all classes."""
BY_TENSOR = {"fedmuon", "fedpac", "prefeds", "prefedslite", "prefedc", "prefedclite"}
"""They treat matrices and vectors differently."""
ALIGNED = grid(align=[0.3], align_form=["added", "mixed"], decoupled_weight_decay=[0.0, 0.1])
ANY_CLIENT = [*grid(clip_norm=[None, 0.3], weight_decay=[0.0, 0.05])[1:], *ALIGNED]
ANY_CLIENT += [{"mean_of_rounds": 3.0}]
ALL = [(name, options) for name, cases in CASES.items() for options in cases]
ALL += [
    (name, {**options, **(cases[0] if name in FIRST_CASE else {})})
    for name, cases in CASES.items()
    for options in ANY_CLIENT
]


def compare(
    name: str, options: dict[str, Any], weighting: Any, batch: int | None, **steps: Any
) -> None:
    """steps   other settings than STEPS local steps, for local epochs"""
    options = {"client_lr": 0.05, **options}
    algorithm = prefed.ALGORITHMS.get(name)(**options)
    data, model = tiny_data(), tiny_model()
    simulation = prefed.Simulation(
        algorithm,
        model,
        data,
        prefed.Settings(
            rounds=ROUNDS,
            clients_per_round=4,
            batch_size=batch,
            seed=3,
            weighting=weighting,
            device=DEVICE,
            **steps or {"local_steps": STEPS},
        ),
    )
    clients = arrays()

    def batches(round: int, client: int) -> Any:
        samples = len(clients[client][0])
        assert batch is not None
        if steps:
            return passes(round, client, samples, batch, **steps)
        return draws.batches(3, round, client, samples, STEPS * batch).reshape(STEPS, batch)

    start = simulation.server.weights.cpu().numpy().copy()
    records = [simulation.run_round() for _ in range(ROUNDS)]
    cohorts = [record["cohort"] for record in records]
    assert len({tuple(c) for c in cohorts}) > 1
    defaults = known_to_oracle(name, 3)
    if "server_lr" not in options:
        defaults["server_lr"] = algorithm.server_lr
    trace = oracles.run(
        name,
        {**options, **defaults},
        lambda w, x, y: oracles.loss_and_grad(w, x, y, SIZES),
        start,
        clients,
        cohorts,
        None if steps else STEPS,
        batches=None if batch is None else batches,
        weighting=weighting,
        n_clients=len(clients),
    )
    # An older root meets gradients in directions that P does not have yet. There the step is 1/tau
    # times the gradient, and so are rounding errors.
    tolerance = 1e-10 if options.get("refresh", 1) == 1 else 1e-8
    losses = [record["train_loss"] for record in records]
    np.testing.assert_allclose(losses, trace.train_loss, rtol=tolerance, atol=tolerance)
    close(simulation.server.weights, trace.weights[-1], tolerance)
    ours = simulation.server.shared | simulation.server.optimiser
    if "weights" in simulation.server.over_rounds:
        ours["mean_of_rounds"] = simulation.server.over_rounds["weights"]
    theirs = trace.shared[-1] | trace.server[-1]
    for field in set(ours) & set(theirs):
        close(ours[field], theirs[field], tolerance)
    vectors = {n for n, v in ours.items() if v.numel() > 1} - {"root"}  # derived from P
    assert vectors == {n for n, v in theirs.items() if np.size(v) > 1}
    assert simulation.kept.keys() == trace.kept[-1].keys()
    for client, kept in simulation.kept.items():
        assert kept.keys() == trace.kept[-1][client].keys()
        for field, value in kept.items():
            close(value, trace.kept[-1][client][field], tolerance)


def known_to_oracle(name: str, seed: int) -> dict[str, Any]:
    """What an oracle needs besides the options: where tensors lie, and drawn numbers."""
    more: dict[str, Any] = {}
    fields = prefed.ALGORITHMS.get(name).model_fields
    if {"shape", "means"} & fields.keys() or name in BY_TENSOR:
        more["tensors"] = TENSORS
    if name == "fedpac":
        more["uniform"] = lambda t, i, k, n: draws.generator(seed, "labels", t, i, k).random(n)
    return more


def passes(
    round: int, client: int, samples: int, batch: int, local_epochs: int, drop_last: bool = False
) -> list[np.ndarray[Any, Any]]:
    """The batches of shuffled passes, as a DataLoader cuts them."""
    drawn = draws.epochs(3, round, client, samples, local_epochs * samples)
    found = []
    for order in drawn.reshape(local_epochs, samples):
        assert sorted(order) == [*range(samples)]
        cut = [order[first : first + batch] for first in range(0, samples, batch)]
        found += [b for b in cut if len(b) == batch] if drop_last and samples >= batch else cut
    return found


def close(ours: torch.Tensor, theirs: Any, tolerance: float = 1e-10) -> None:
    theirs = np.broadcast_to(theirs, ours.shape)
    np.testing.assert_allclose(ours.cpu().numpy(), theirs, rtol=tolerance, atol=tolerance)


def test_every_registered_algorithm_has_an_oracle() -> None:
    in_pytorch = {type(a).__name__.lower() for a, *_ in PERSONAL.values()}
    assert set(CASES) | in_pytorch == set(prefed.ALGORITHMS.names())


@pytest.mark.parametrize(("name", "options"), ALL, ids=lambda v: v if isinstance(v, str) else "")
def test_full_batch(name: str, options: dict[str, Any]) -> None:
    compare(name, options, "uniform", None)


WEIGHTINGS = ["uniform", "samples", [0.5, 3, 1, 2, 1.5, 1]]
WAYS = [*product(WEIGHTINGS, [None, BATCH])][1:]
"""All but the one of `test_full_batch`."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("weighting", "batch"), WAYS)
def test_weighting_and_batches(name: str, weighting: Any, batch: int | None) -> None:
    for options in (CASES[name][0], CASES[name][-1]):
        compare(name, options, weighting, batch)


EPOCHS = [name for name in CASES if name != "prefedsync"]


@pytest.mark.parametrize("name", EPOCHS)
@pytest.mark.parametrize("steps", [{}, {"drop_last": True}], ids=["short", "whole"])
def test_local_epochs(name: str, steps: dict[str, Any]) -> None:
    """Clients of 4 to 15 samples, in batches of 5: unequally many steps, and short batches."""
    cases = {"prefed": CASES["prefed"]}.get(name, [CASES[name][0], CASES[name][-1]])
    derived = [case for case in cases if case.get("momentum") == "derived"][:2]
    exact = cases[0] if name in FIRST_CASE else {}
    aligned = [{**options, **case} for options in ALIGNED[::3] for case in (exact, *derived)]
    for options in (*derived, *aligned, cases[0], cases[-1]):
        for weighting in ("uniform", "samples"):
            compare(name, options, weighting, BATCH, local_epochs=2, **steps)


@pytest.mark.parametrize(
    ("client_lr", "server_lr"),
    [
        (prefed.schedule.step(0.1, decay=0.5, every=2), prefed.schedule.cosine(0.1, rounds=4)),
        (lambda t: [0.1, 0.1, 0.05, 0.05][t], lambda t: 0.05 * (1 + np.cos(np.pi * t / 4))),
    ],
    ids=["named", "functions"],
)
def test_schedules(client_lr: Any, server_lr: Any) -> None:
    algorithm = prefed.FedAdam(client_lr=client_lr, server_lr=server_lr)
    result = prefed.simulate(
        algorithm,
        tiny_model(),
        tiny_data(),
        rounds=4,
        local_steps=2,
        batch_size=None,
        device=DEVICE,
    )
    assert [record["client_lr"] for record in result.history] == [0.1, 0.1, 0.05, 0.05]
    trace = oracles.run(
        "fedadam",
        {
            "client_lr": lambda t: 0.1 * 0.5 ** (t // 2),
            "server_lr": lambda t: 0.05 * (1 + np.cos(np.pi * t / 4)),
        },
        lambda w, x, y: oracles.loss_and_grad(w, x, y, SIZES),
        prefed.simulate(
            prefed.FedAvg(client_lr=1e-300), tiny_model(), tiny_data(), rounds=1, local_steps=1
        )
        .weights.cpu()
        .numpy(),
        arrays(),
        [list(range(6))] * 4,
        2,
        n_clients=6,
    )
    close(result.weights, trace.weights[-1])
