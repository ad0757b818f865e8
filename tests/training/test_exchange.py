"""The way from client to server, in every engine: codecs, error feedback, lazy averages, bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import prefed
from prefed.codecs import codec
from prefed.codecs.interface import Blockwise
from prefed.core.layout import Layout
from prefed.experiments.run_directory import execute
from prefed.training.engines.vectorised import Vectorised
from prefed.training.messages import exchange, receive, upload
from prefed.training.round import Update
from prefed.training.server_state import Server, codec_of
from prefed.training.traffic import traffic
from tests.helpers.engine_runs import chain, same
from tests.helpers.problems import tiny_data, tiny_model
from tests.helpers.run_folders import StopAfter, fingerprint, small

UPLOADS = [n for n in prefed.CODECS.names() if codec(n).signed]
STATE = [n for n in prefed.CODECS.names() if not codec(n).feedback]
OPTIONS: list[dict[str, Any]] = [
    *({"upload": name} for name in UPLOADS),
    *({"P_codec": name, "P_every": 2} for name in STATE),
    {"m_codec": "int8", "upload": "topk(0.3)", "momentum": "average"},
    {"momentum": "derived", "aggregate": "sqrtP", "P_codec": "log4"},
    {"momentum": "keep", "upload": "topk(0.2)"},
]


def ident(value: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in value.items())


def run(options: dict[str, Any], engine: str, **settings: Any) -> prefed.Result:
    every: dict[str, Any] = {"rounds": 5, "local_steps": 3, "batch_size": 4, "seed": 5}
    every |= {"device": "cpu", "clients_per_round": 4, "engine": engine}
    algorithm = prefed.PreFed(client_lr=0.01, **options)
    return prefed.simulate(algorithm, chain(), tiny_data(), **every | settings)


@cache
def plain(momentum: str) -> torch.Tensor:
    return run({"momentum": momentum}, "sequential").weights


@pytest.mark.parametrize("options", OPTIONS, ids=ident)
def test_every_codec_in_every_engine(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run in the sequential and the vectorised engine, and the same bits with threads."""
    monkeypatch.setattr(Vectorised, "most_clients", 2)
    one, block = run(options, "sequential"), run(options, "vectorised")
    same(one, block, 1e-9)
    lossless = options.get("upload") == "exact"
    assert torch.equal(one.weights, plain(options.get("momentum", "average"))) == lossless
    for engine, alone in (("sequential", one), ("vectorised", block)):
        shared = run(options, engine, workers=3)
        assert torch.equal(shared.weights, alone.weights)
        for client, state in alone.kept.items():
            for name, value in state.items():
                assert torch.equal(shared.kept[client][name], value)


@pytest.mark.parametrize("options", OPTIONS[-3:], ids=ident)
def test_a_resumed_run_has_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    config = small("prefed", "P_every=3", *(f"{k}={v}" for k, v in options.items()))
    execute(config, tmp_path / "whole")
    with pytest.raises(prefed.Interrupted):
        execute(config, tmp_path / "parts", stop=StopAfter(2))
    execute(config, tmp_path / "parts", resume=True)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")


def simulation(algorithm: prefed.Algorithm, **options: Any) -> prefed.Simulation:
    settings = {"rounds": 9, "local_steps": 3, "batch_size": None, "device": "cpu"}
    return prefed.Simulation(
        algorithm, tiny_model(dtype=torch.float32), tiny_data(torch.float32),
        prefed.Settings(**settings | options),
    )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=ident)
def test_bytes_are_those_of_the_messages(options: dict[str, Any]) -> None:
    """The record of each round against the length of what a client would send in it."""
    run = simulation(prefed.PreFed(**options), clients_per_round=2)
    for _ in range(5):
        server, algorithm = run.server, run.algorithm
        rows = {n: torch.rand(2, *v.shape) for n, v in server.values(algorithm).items()}
        update = Update(rows, {}, torch.zeros(2), [1, 1])
        message, _ = upload(algorithm, server, update, [0, 1], {}, 0)
        length = sum(len(bytes_of(p)) for parts in message.values() for p in parts.values())
        state = sum(
            len(bytes_of(p)) for n in message.keys() - {"weights", "buffers"}
            for p in message[n].values()
        )  # fmt: skip
        record = run.run_round()
        assert record["bytes_up"] == length
        assert record["bytes_up_state"] == state
        assert record["bytes_up_weights"] == length - state


@pytest.mark.parametrize("options", OPTIONS, ids=ident)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_one_process_the_same_values_arrive_with_less_memory(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Vectors of several pieces; what clients keep of what they send is as it was."""
    algorithm, size = prefed.PreFed(**options), (1 << 17) + 700
    layout = Layout.of([("w", torch.empty(size))])
    server = Server.start(
        algorithm, layout, torch.rand(size, dtype=dtype), torch.empty(0, dtype=dtype)
    )
    rows = {n: torch.rand(3, *v.shape).to(dtype) for n, v in server.values(algorithm).items()}
    stays = {name: rows[name].clone() for name in [*rows][1:]}
    for kept in ({}, stays):
        update = Update(dict(rows), kept, torch.zeros(3), [1] * 3)
        message, left = upload(algorithm, server, update, [4, 0, 9], {}, 7)
        wanted = receive(algorithm, server, message)
        mine = Update({n: v.clone() for n, v in rows.items()}, kept, torch.zeros(3), [1] * 3)
        found, here = exchange(algorithm, server, mine, [4, 0, 9], {}, 7)
        assert [*found] == [*wanted]
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
            if isinstance(codec_of(algorithm, name), Blockwise):
                in_place = found[name].data_ptr() == mine.values[name].data_ptr()
                assert in_place == (name not in kept)
            if name in kept:
                assert torch.equal(mine.values[name], rows[name])
        assert here.keys() == left.keys()
        assert all(torch.equal(here[name], value) for name, value in left.items())


def bytes_of(value: Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def test_p_goes_up_in_the_first_two_rounds_and_then_in_every_third() -> None:
    lazy = prefed.PreFed(P_every=3, momentum="reset")  # type: ignore[call-arg]
    run = simulation(lazy)
    d, before = run.server.weights.nbytes, run.server.shared["P"].clone()
    for round in range(9):
        record, clients = run.run_round(), 6
        sent = round in (0, 1, 3, 6)
        assert record["bytes_up_state"] == (clients * d if sent else 0)
        assert record["bytes_down_state"] == clients * d
        assert torch.equal(run.server.shared["P"], before) != sent
        before = run.server.shared["P"].clone()


@pytest.mark.parametrize("momentum", ["derived", "average"])
def test_derived_momentum_is_not_sent(momentum: Any) -> None:
    record = (run := simulation(prefed.PreFed(momentum=momentum))).run_round()
    d = 6 * run.server.weights.nbytes
    assert record["bytes_down_state"] == 2 * d
    assert record["bytes_up_state"] == (d if momentum == "derived" else 2 * d)
    assert run.server.shared["m"].abs().max() > 0


def test_derived_momentum_is_the_m_of_equal_steps() -> None:
    """K steps with one and the same m and P give a change from which that m comes back."""
    algorithm, m, P = prefed.PreFed(momentum="derived"), torch.randn(9), torch.rand(9)
    change = -0.01 * 7 * m / (P.sqrt() + algorithm.tau)
    torch.testing.assert_close(algorithm.derive(change, {"P": P}, 0.01, 7)["m"], m)


def test_weighted_mean_by_hand() -> None:
    """Two clients: where one has a preconditioner near zero, the other decides."""
    algorithm = prefed.PreFed(aggregate="sqrtP", tau=1e-3)  # type: ignore[call-arg]
    values = {"weights": torch.tensor([[1.0, 1.0], [3.0, 3.0]])}
    values["P"] = torch.tensor([[4.0, 1e-12], [4.0, 1.0]])
    sent = algorithm.before_mean(values)
    mean = {name: value.mean(0) for name, value in sent.items()}
    found = algorithm.after_mean(mean)["weights"]
    second = (1e-6 + 1e-3 + 3 * 1.001) / (1e-6 + 1e-3 + 1.001)
    torch.testing.assert_close(found, torch.tensor([2.0, second]))
    assert torch.equal(values["weights"], torch.tensor([[1.0, 1.0], [3.0, 3.0]]))


def test_error_feedback_sends_everything_in_the_end() -> None:
    """What a client lost comes with its next message: over many rounds of one and the same change
    the sum of what arrived is the sum of the changes, less what is still kept."""
    algorithm = prefed.FedAvg(upload="topk(0.1)")
    run = simulation(algorithm)
    server, layout = run.server, run.task.flat.layout
    change = torch.randn(2, layout.size)
    kept: dict[int, dict[str, Tensor]] = {}
    arrived = torch.zeros_like(change)
    for _ in range(40):
        update = Update(
            {"weights": change.clone(), "buffers": change[:, :0]},
            {},
            change[:, 0],
            [1] * len(change),
        )
        message, stays = upload(algorithm, server, update, [4, 9], kept, 0)
        came = receive(algorithm, server, message)["weights"]
        assert (came != 0).sum(1).tolist() == [-(-layout.size // 10)] * 2
        arrived += came
        kept = {c: {"lost": stays["lost"][row]} for row, c in enumerate((4, 9))}
    lost = torch.stack([kept[4]["lost"], kept[9]["lost"]])
    torch.testing.assert_close(arrived + lost, 40 * change, rtol=1e-4, atol=1e-4)
    assert lost.abs().max() < 40 * change.abs().max()
    assert torch.cosine_similarity(arrived, change).min() > 0.9


def test_feedback_is_kept_by_those_that_took_part() -> None:
    run = simulation(prefed.FedAvg(upload="topk(0.2)"), clients_per_round=2)
    for _ in range(3):
        run.run_round()
    took_part = {c for record in run.history for c in record["cohort"]}
    assert set(run.kept) == took_part
    assert all(state.keys() == {"lost"} and state["lost"].any() for state in run.kept.values())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.pop("P"), "should have the values"),
        (lambda m: m.update(Q=m["P"]), "should have the values"),
        (lambda m: m["P"].pop("low"), "P: a message should have the parts"),
        (lambda m: m["P"].update(low=m["P"]["low"].double()), "P: a message"),
        (lambda m: m["P"].update(codes=m["P"]["codes"][:, :-1]), "P: a message"),
        (lambda m: m["P"].update(codes=m["P"]["codes"][:1]), "a row for each client"),
        (lambda m: m["weights"]["places"].fill_(10**6), "a place that does not exist"),
        (lambda m: m["weights"]["places"].fill_(-1), "a place that does not exist"),
    ],
)
def test_messages_of_another_form_are_refused(damage: Any, message: str) -> None:
    algorithm = prefed.PreFed(P_codec="log8", momentum="reset", upload="topk(0.1)")
    run = simulation(algorithm)
    rows = {n: torch.rand(2, *v.shape) for n, v in run.server.values(algorithm).items()}
    update = Update(rows, {}, torch.zeros(2), [1, 1])
    sent, _ = upload(algorithm, run.server, update, [0, 1], {}, 0)
    receive(algorithm, run.server, sent)
    damage(sent)
    with pytest.raises(prefed.PrefedError, match=message):
        receive(algorithm, run.server, sent)


def test_prefedlite_sends_no_more_than_fedavg_and_a_twentieth() -> None:
    """For a network of some size; and all of it: buffers, optimiser state, scales."""
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5), torch.nn.BatchNorm2d(16), torch.nn.Flatten(),
        torch.nn.Linear(16, 120), torch.nn.Linear(120, 84), torch.nn.Linear(84, 10),
    )  # fmt: skip
    from prefed.core.flat_model import FlatModel

    flat, sent = FlatModel(module), {}
    for algorithm in (prefed.PreFedLite(), prefed.FedAvg(), prefed.PreFed()):
        server = Server.start(algorithm, flat.layout, flat.weights, flat.read_buffers())
        name = type(algorithm).__name__
        sent[name] = traffic(algorithm, server, 1, 1)["bytes_up"]
    assert sent["PreFedLite"] <= 1.05 * sent["FedAvg"] < sent["PreFed"]
