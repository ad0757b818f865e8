"""The mechanism of private runs: against plain NumPy, against worst cases, against statistics."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import prefed
from prefed.core import draws, system_noise
from prefed.core.errors import PrefedError
from prefed.training.mechanism import BELOW, Mechanism, clipped, normal
from prefed.training.round import Update
from tests.helpers import oracles
from tests.helpers.oracles import privacy as oracle
from tests.helpers.problems import SIZES, arrays, local, tiny_data, tiny_model

SEED, STEPS, ROUNDS = 3, 3, 4
LAYER = 39
"""Weights of the tiny model."""


def make(
    algorithm: prefed.Algorithm, privacy: Any, dtype: torch.dtype = torch.float64, **options: Any
) -> prefed.Run:
    given: dict[str, Any] = {
        "rounds": ROUNDS,
        "local_steps": STEPS,
        "batch_size": None,
        "seed": SEED,
    }
    given |= {"device": "cpu", "engine": "sequential", "privacy": privacy}
    return prefed.Run(
        algorithm,
        tiny_model(dtype=dtype),
        tiny_data(dtype),
        prefed.Settings(**(given | options)),
    )


def mechanism(run: prefed.Run) -> Mechanism:
    assert run.mechanism is not None
    return run.mechanism


def gradient(i: int, k: int, w: oracle.Array) -> oracle.Array:
    x, y = arrays()[i]
    return oracles.loss_and_grad(w, x, y, SIZES)[1]


def draw(name: str, round: int, size: int) -> oracle.Array:
    return draws.generator(SEED, f"privacy {name}", round).standard_normal(size)


# Against plain NumPy

SHARED = {"state_clip": {"m": 0.02, "P": 0.3}}
CASES: dict[str, tuple[dict[str, Any], oracle.Setup]] = {
    "fixed clip": ({"clip": 0.05}, oracle.Setup(0.7, 0.05)),
    "adaptive clip": (
        {"clip": {"start": 0.05, "quantile": 0.3, "rate": 0.5, "count_noise": 2.0}},
        oracle.Setup(0.7, 0.05, quantile=0.3, rate=0.5, count_noise=2.0),
    ),
    "separate": (
        {"clip": 0.05, **SHARED, "state_share": {"m": 0.2, "P": 0.3}},
        oracle.Setup(0.7, 0.05, {"m": 0.02, "P": 0.3}, {"m": 0.2, "P": 0.3}),
    ),
    "one share": (
        {"clip": 0.05, **SHARED, "state_share": 0.4},
        oracle.Setup(0.7, 0.05, {"m": 0.02, "P": 0.3}, {"m": 0.2, "P": 0.2}),
    ),
    "joint, logarithm, adaptive": (
        {
            "clip": {"start": 0.05, "quantile": 0.5, "rate": 0.2, "count_noise": 1.0},
            **SHARED,
            "state": "joint",
            "second_moments": "log",
        },
        oracle.Setup(0.7, 0.05, {"m": 0.02, "P": 0.3}, joint=True, through="log", floor=1e-6,
                     quantile=0.5, rate=0.2, count_noise=1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("case", CASES)
def test_private_rounds_are_those_of_plain_numpy(case: str, sampling: str) -> None:
    options, setup = CASES[case]
    algorithm: prefed.Algorithm = prefed.FedAvg(client_lr=0.1)
    client, shared = oracle.sgd_client(gradient, 0.1, STEPS), {}
    if setup.clips:
        algorithm = prefed.PreFed(client_lr=0.01)
        client = oracle.prefed_client(gradient, 0.01, STEPS, 0.9, 0.9, 1e-3)
        shared = {"m": np.zeros(LAYER), "P": np.zeros(LAYER)}
    privacy = prefed.Privacy(noise_multiplier=0.7, sampling=sampling, **options)
    run = make(algorithm, privacy, clients_per_round=3)
    start = run.server.weights.numpy().copy()
    cohorts = [run.run_round()["cohort"] for _ in range(ROUNDS)]
    sizes = {len(cohort) for cohort in cohorts}
    assert (sizes == {3}) == (sampling == "fixed")
    weights, shared, clip = oracle.rounds(setup, client, start, shared, cohorts, 3, draw)
    np.testing.assert_allclose(run.server.weights, weights, rtol=1e-10, atol=1e-10)
    for name, value in shared.items():
        np.testing.assert_allclose(run.server.shared[name], value, rtol=1e-10, atol=1e-10)
        assert name != "P" or float(run.server.shared[name].min()) >= 0
    assert float(mechanism(run).clip) == pytest.approx(clip, rel=1e-10)


def test_derived_p_and_m_are_those_of_plain_numpy() -> None:
    run = make(
        prefed.PreFed(client_lr=0.01, tau=0.1, P="derived", momentum="derived"),
        None,
        clients_per_round=3,
    )
    start = run.server.weights.numpy().copy()
    cohorts = [run.run_round()["cohort"] for _ in range(ROUNDS)]
    found = oracle.derived_rounds(gradient, start, cohorts, 0.01, STEPS, 0.9, 0.9, 0.1)
    ours = run.server.weights, run.server.shared["m"], run.server.shared["P"]
    for mine, theirs in zip(ours, found, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-13)
    assert run.history[-1]["bytes_up_state"] == 0


def test_masses_are_what_clients_would_have_sent() -> None:
    """They follow from the number of steps, so nobody is asked, and nothing is paid."""
    public = make(prefed.LocalAdam(state="average"), None)
    private = make(
        prefed.LocalAdam(state="average"),
        {"noise_multiplier": 1.0, "state_clip": {"m": 1.0, "v": 1.0}},
    )
    for _ in range(2):
        public.run_round(), private.run_round()
    for name in ("m_mass", "v_mass"):
        torch.testing.assert_close(private.server.shared[name], public.server.shared[name])


def test_noise_of_nothing_and_a_wide_clip_leave_the_plain_mean() -> None:
    """So all that differs from a plain run is the clip and the noise."""
    for algorithm, shared in (
        (prefed.FedAdam(), {}),
        (prefed.SCAFFOLD(), {"c": 1e6}),
        (prefed.LocalAdam(state="average", beta2=0.0, tau=10.0), {"m": 1e6, "v": 1e6}),
        (prefed.PreFedOpt(align=0.3), {}),
    ):
        plain = make(algorithm, None)
        privacy = prefed.Privacy(noise_multiplier=1e-14, clip=1e6, state_clip=shared)
        private = make(algorithm, privacy)
        private.mechanism.prepare = lambda: None  # type: ignore[method-assign, union-attr]
        for _ in range(3):
            plain.run_round()
            # What so little noise costs, no accountant can say.
            private.mechanism.epsilon = lambda round: math.inf  # type: ignore[method-assign, union-attr]
            private.run_round()
        torch.testing.assert_close(private.server.weights, plain.server.weights, rtol=0, atol=1e-5)


# Sensitivity

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    rows=hnp.arrays(np.float32, (2, 8), elements=NUMBERS),
    clip=st.floats(1e-3, 1e3),
    is_double=st.booleans(),
)
def test_no_row_is_longer_than_the_clip(
    rows: np.ndarray[Any, Any], clip: float, is_double: bool
) -> None:
    given = torch.from_numpy(rows.copy())
    made = clipped(given.double() if is_double else given, clip).double().numpy()
    exact = [math.fsum(float(v) ** 2 for v in row) for row in made]
    assert all(math.sqrt(square) <= clip for square in exact)
    short = np.linalg.norm(rows.astype(np.float64), axis=1) < 0.999 * clip
    np.testing.assert_array_equal(made[short], rows[short].astype(np.float64))


POSITIVE = st.floats(0, 2.0**40, width=32)


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    weights=hnp.arrays(np.float32, LAYER, elements=NUMBERS),
    m=hnp.arrays(np.float32, LAYER, elements=st.floats(-(2.0**40), 2.0**40, width=32)),
    P=hnp.arrays(np.float32, LAYER, elements=POSITIVE),
    held=hnp.arrays(np.float32, LAYER, elements=POSITIVE),
    state=st.sampled_from(["separate", "joint"]),
    through=st.sampled_from(["root", "log"]),
    adaptive=st.booleans(),
    spoilt=st.sampled_from([None, math.nan, math.inf, -math.inf]),
)
def test_no_client_moves_the_sum_by_more_than_it_is_said_to(
    private_prefed: dict[tuple[str, str, bool], prefed.Run],
    weights: Any, m: Any, P: Any, held: Any,
    state: str, through: str, adaptive: bool, spoilt: float | None,
) -> None:  # fmt: skip
    """In units of the noise on each value, one client is no longer than one over the noise
    multiplier, all values and the count together, whatever it sends and the server holds."""
    run = private_prefed[state, through, adaptive]
    mine = mechanism(run)
    run.server.shared["P"].copy_(torch.from_numpy(held))
    sent = {"weights": weights.copy(), "m": m, "P": P, "local_steps": np.array([3.0])}
    if spoilt is not None:
        sent["weights"][0] = spoilt
    values = {name: torch.from_numpy(np.array(v)) for name, v in sent.items()}
    made = mine.contribution(run.server, values)
    assert made.keys() == mine.like(run.server).keys()
    total = 0.0
    for name, value in made.items():
        deviation = mine.count_noise if name == BELOW else mine.deviation(name)
        total += math.fsum((float(v) / deviation) ** 2 for v in value)
    assert math.sqrt(total) <= 1 / mine.noise_multiplier * (1 + 1e-12)
    if spoilt is not None:
        assert total == 0


@pytest.fixture(scope="module")
def private_prefed() -> dict[tuple[str, str, bool], prefed.Run]:
    """Float32, the type in which rounding is worst."""
    runs = {}
    for state in ("separate", "joint"):
        for through in ("root", "log"):
            for adaptive in (False, True):
                privacy = prefed.Privacy(
                    noise_multiplier=1.3,
                    clip={"start": 0.37} if adaptive else 0.37,
                    state=state,
                    second_moments=through,
                    state_clip={"m": 0.011, "P": 2.9},
                    state_share={"m": 0.1, "P": 0.2},
                )
                run = make(prefed.PreFed(), privacy, torch.float32)
                run.prepare()
                runs[state, through, adaptive] = run
    return runs


def test_no_codec_carries_a_client_past_the_clip() -> None:
    """Top-k with error feedback sends more than the change of one round: it is clipped as it is
    decoded."""
    algorithm = prefed.FedAvg(client_lr=5.0, upload="topk")
    run = make(algorithm, {"noise_multiplier": 1.0, "clip": 0.01})
    trainer = local(run)
    for _ in range(3):
        run.run_round()
        for update in trainer._updates(run.server, [0, 1, 2], lambda _, update: update):
            norms = torch.linalg.vector_norm(update.values["weights"], dim=1)
            assert 0 < float(norms.max()) <= 0.01


# Noise

Z99, SURE = 2.5758, 5.0
"""Deviations of a 99 % interval; and of one that draws nobody can repeat hardly ever leave."""


def released(privacy: prefed.Privacy, seed: int) -> torch.Tensor:
    """The 10,000 numbers of a released mean. That of the clients is 0.001, and 5 of 6 answer."""
    samples = torch.zeros(2, 99, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    data, model = prefed.FederatedData([samples] * 6), torch.nn.Linear(99, 100).double()
    settings = prefed.Settings(rounds=1, local_steps=1, seed=seed, device="cpu", privacy=privacy)
    mine = mechanism(run := prefed.Run(prefed.FedAvg(), model, data, settings))
    mean = torch.full((10_000,), 0.001, dtype=torch.float64)
    if privacy.where == "client":
        update = Update({"weights": mean.repeat(5, 1)}, {}, torch.zeros(5), [1] * 5)
        mean = mine.on_clients(run.server, update, range(5)).values["weights"].mean(0)
    return mine.release(run.server, {"weights": mean}, answered=5, asked=6)["weights"]


def far(drawn: torch.Tensor, deviation: float) -> float:
    """How far their variance is from what it should be, in its own deviations."""
    return abs(float(drawn.var()) / deviation**2 - 1) / math.sqrt(2 / (len(drawn) - 1))


@pytest.mark.parametrize("where", ["server", "client"])
def test_the_released_mean_varies_as_it_should(where: Any) -> None:
    """10,000 draws for each of 20 seeds: the variance of all within its 99 % interval, that of each
    but one at most, and the mean where it should be."""
    privacy = prefed.Privacy(noise_multiplier=0.8, clip=0.5, where=where)
    deviation = 0.8 * 0.5 / 6 * (math.sqrt(5) if where == "client" else 1)
    drawn = [released(privacy, seed) for seed in range(20)]
    assert sum(far(one, deviation) > Z99 for one in drawn) <= 1
    together = torch.cat(drawn)
    assert far(together, deviation) < Z99
    error = deviation / math.sqrt(len(together))
    assert float(together.mean()) == pytest.approx(0.001 * 5 / 6, abs=Z99 * error)
    assert len(together.unique()) == len(together)


def test_noise_from_the_system_varies_as_it_should() -> None:
    drawn = released(prefed.Privacy(noise_multiplier=0.8, clip=0.5, secret_noise=True), 0)
    assert far(drawn, 0.8 * 0.5 / 6) < SURE
    assert float(drawn.mean()) == pytest.approx(0.001 * 5 / 6, abs=SURE * 0.8 * 0.5 / 6 / 100)


def test_system_noise_is_normal() -> None:
    from scipy import stats

    drawn = system_noise.normal(20_001)
    assert len(drawn) == 20_001
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    halves = drawn[:10_000], drawn[10_001:20_001]
    assert abs(np.corrcoef(*halves)[0, 1]) < 0.05
    assert not np.array_equal(drawn, system_noise.normal(20_001))
    assert 0 < system_noise.uniform(1000).min() < system_noise.uniform(1000).max() < 1


def test_poisson_cohorts_have_the_sizes_they_should() -> None:
    run = make(prefed.FedAvg(), {"noise_multiplier": 1.0}, clients_per_round=2)
    mine = mechanism(run)
    for secret in (False, True):
        mine.secret = secret
        cohorts = [mine.draw_cohort(round) for round in range(2000)]
        joins = np.zeros((2000, 6))
        for row, cohort in zip(joins, cohorts, strict=True):
            row[cohort] = 1
        bound = 4 * math.sqrt(2 / 9 / 2000)
        np.testing.assert_allclose(joins.mean(0), 1 / 3, atol=bound)
        assert abs(np.corrcoef(joins[:, 0], joins[:, 1])[0, 1]) < 0.09
        assert {len(cohort) for cohort in cohorts} >= {0, 1, 2, 3, 4}
    assert mine.draw_cohort(1) != mine.draw_cohort(1) or mine.draw_cohort(2) != mine.draw_cohort(2)


def test_a_cohort_of_nobody_releases_noise_and_counts() -> None:
    """To say that nobody was there would tell that a certain client was not."""
    run = make(prefed.FedAvg(), {"noise_multiplier": 1.0}, clients_per_round=1, rounds=12)
    before = run.server.weights.clone()
    records = []
    for _ in range(12):
        records.append(run.run_round())
        assert not torch.equal(before, run.server.weights)
        before = run.server.weights.clone()
    assert any(not record["cohort"] for record in records)
    assert all(b["epsilon"] > a["epsilon"] for a, b in pairwise(records))


def spoilt_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Not a number for a client that has the last class alone."""
    loss = torch.nn.functional.cross_entropy(output, y)
    return loss * math.nan if bool((y == 2).all()) else loss


def test_clients_that_fail_count_as_zero_and_are_divided_by() -> None:
    clients = [(torch.tensor(x), torch.tensor(y)) for x, y in arrays()]
    clients[2] = (clients[2][0], torch.full_like(clients[2][1], 2))
    options: dict[str, Any] = {"rounds": 1, "local_steps": STEPS, "batch_size": None, "seed": SEED}
    options |= {"engine": "sequential", "device": "cpu"}
    privacy = prefed.Privacy(noise_multiplier=1e-3, clip=1e3, sampling="fixed")
    moved = []
    for left in (clients, clients[:2] + clients[3:]):
        data = prefed.FederatedData(left)
        run = prefed.Run(
            prefed.FedAvg(),
            tiny_model(),
            data,
            prefed.Settings(privacy=privacy, **options),
            spoilt_loss,
        )
        start = run.server.weights.clone()
        record = run.run_round()
        moved.append((run.server.weights - start) * len(left))
        assert math.isfinite(record["epsilon"])
    torch.testing.assert_close(*moved, rtol=0, atol=1e-9)  # the same noise, of one seed


def test_records_of_a_private_run_have_nothing_without_noise() -> None:
    run = make(prefed.FedAvg(), {"noise_multiplier": 1.0}, client_dropout=0.3)
    record = run.run_round()
    assert math.isnan(record["train_loss"])
    assert not {"drift", "left_out", "refused"} & record.keys()
    plain = make(prefed.FedAvg(), None).run_round()
    assert "epsilon" not in plain
    assert record["update_norm"] > 10 * plain["update_norm"]  # that of the noise


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("where", ["server", "client"])
def test_workers_do_not_change_a_private_run(engine: str, where: str) -> None:
    results = []
    for workers in (1, 3):
        privacy: dict[str, Any] = {"noise_multiplier": 1.0, "where": where}
        if where == "server":
            privacy |= {"clip": {"quantile": 0.4}, "state_clip": {"m": 0.1, "P": 0.1}}
        algorithm = prefed.PreFed() if where == "server" else prefed.FedAdam()
        run = make(algorithm, privacy, engine=engine, workers=workers, clients_per_round=4)
        results.append(run.run())
    assert torch.equal(results[0].weights, results[1].weights)
    assert [r["epsilon"] for r in results[0].history] == [r["epsilon"] for r in results[1].history]


# What is refused


@pytest.mark.parametrize(
    ("algorithm", "privacy", "options", "words"),
    [
        (prefed.FedAvg(), {}, {"weighting": "samples"}, "weighting: .*uniform"),
        (prefed.FedAvg(), {}, {"quorum": 2}, "quorum: "),
        (prefed.PreFed(), {}, {}, r'share m and P, which .* P = "derived"'),
        (prefed.PreFed(), {"state_clip": {"m": 1.0}}, {}, "give P a clip"),
        (prefed.FedAvg(), {"state_clip": {"m": 1.0}}, {}, "share no 'm'"),
        (prefed.PreFed(), {"where": "client"}, {}, "send the change of the weights alone"),
        (prefed.PreFed(shape="full"), {"state_clip": {"m": 1.0, "P": 1.0}}, {}, "is a matrix"),
        (prefed.PreFedSync(), {}, {}, "every step"),
        (prefed.FedNova(), {}, {}, "averages gradients"),
        (prefed.PreFedOpt(), {}, {"local_steps": None, "local_epochs": 1}, "set local_steps"),
        (
            prefed.PreFed(bias_correction=True),
            {"state_clip": {"m": 1.0, "P": 1.0}},
            {"local_steps": None, "local_epochs": 1},
            "bias correction",
        ),
        (prefed.FedAvg(), {"where": "client", "clip": {"quantile": 0.5}}, {}, "should be a number"),
        (prefed.FedAvg(), {"neighbours": "replace"}, {}, 'accountant="pld"'),
        (prefed.FedAvg(), {"delta": 1.0}, {}, "less than 1"),
        (prefed.FedAvg(), {"clip": {"quantil": 0.5}}, {}, 'did you mean "quantile"'),
        (prefed.FedAvg(), {"clip": "1.0"}, {}, "clip"),
        (prefed.FedAvg(), {"state_share": {"m": 0.5}}, {}, "should name the fields"),
    ],
)
def test_what_cannot_be_private_is_refused(
    algorithm: prefed.Algorithm, privacy: Any, options: Any, words: str
) -> None:
    with pytest.raises((PrefedError, ValueError), match=words):
        make(algorithm, {"noise_multiplier": 1.0, **privacy}, **options)


def test_statistics_of_batchnorm_are_refused_unless_they_stay() -> None:
    x, y = torch.randn(3, 8, 4), torch.randint(2, (3, 8))
    data = prefed.FederatedData(list(zip(x, y, strict=True)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    settings = prefed.Settings(rounds=1, local_steps=1, privacy=prefed.Privacy(noise_multiplier=1))
    with pytest.raises(PrefedError, match="BatchNorm"):
        prefed.Run(prefed.FedAvg(), model, data, settings)
    run = prefed.Run(prefed.FedAvg(statistics="keep"), model, data, settings)
    assert "epsilon" in run.run_round()


def test_too_loud_a_count_is_refused() -> None:
    run = make(prefed.FedAvg(), {"noise_multiplier": 1.0, "clip": {"count_noise": 0.4}})
    with pytest.raises(PrefedError, match="must be above"):
        run.run_round()


def test_a_seed_gives_the_same_noise_and_the_system_never() -> None:
    like = torch.zeros(50)
    assert torch.equal(normal(1, "a", 0, like), normal(1, "a", 0, like))
    for other in (normal(2, "a", 0, like), normal(1, "b", 0, like), normal(1, "a", 1, like)):
        assert not torch.equal(normal(1, "a", 0, like), other)
    assert not torch.equal(normal(None, "a", 0, like), normal(None, "a", 0, like))
    secret = prefed.Privacy(noise_multiplier=1.0, secret_noise=True)
    a, b = (make(prefed.FedAvg(), secret).run() for _ in range(2))
    assert not torch.equal(a.weights, b.weights)
