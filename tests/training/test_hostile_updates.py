"""Updates made to do harm: none is let in, none brings the server down, none leaves a trace.

`make hostile` tries 2,000 on each algorithm; `make test` fewer.
"""

from __future__ import annotations

import io
import pickle
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefed.experiments.config import load
from prefed.flower import protocol as p
from prefed.flower.arrivals import Arrivals
from prefed.flower.server import read_update
from prefed.flower.wire import pack_message
from prefed.training.admission import Admission, Refused, Spec, UntrustedUpdate, expected
from prefed.training.messages import Message, receive, upload
from prefed.training.round import Server
from prefed.training.run import Simulation
from tests.helpers.federation import CONFIG
from tests.helpers.problems import WITHOUT_NORMS, local

ALGORITHMS = [n for n in WITHOUT_NORMS if n != "prefedsync"]
CLIENT, ROUND = 3, 0
NAN, INF = float("nan"), float("inf")


@cache
def honest(
    algorithm: str,
) -> tuple[Simulation, dict[str, Spec], Message, dict[str, torch.Tensor], int]:
    small = {**CONFIG, "model": {"name": "mlp", "hidden": [3]}, "algorithm": {"name": algorithm}}
    simulation = load(small).make_run()
    made, server = simulation.algorithm, simulation.server
    workers = local(simulation).workers
    assert workers is not None
    engine = workers.engines[0]
    update = engine.update(made, server, [CLIENT], {})
    message, _ = upload(made, server, update, [CLIENT], {}, 0)
    copy = {n: {p: part.clone() for p, part in parts.items()} for n, parts in message.items()}
    values = {n: rows[0] for n, rows in receive(made, server, copy).items()}
    return simulation, expected(made, server), copy, values, len(simulation.data.client(CLIENT))


def read(algorithm: str, made: RecordDict) -> UntrustedUpdate:
    simulation = honest(algorithm)[0]
    return read_update(simulation.algorithm, simulation.server, CLIENT, made)


def content(algorithm: str) -> RecordDict:
    _, _, message, _, samples = honest(algorithm)
    about: Any = {p.CLIENT: CLIENT, p.ROUND: ROUND, p.SAMPLES: samples, p.LOSS: 1.0, p.AFTER: -1}
    return RecordDict(
        {p.update_key(CLIENT): pack_message(message), p.about_key(CLIENT): MetricRecord(about)}
    )


def gathering(algorithm: str) -> Arrivals:
    _, specs, _, values, samples = honest(algorithm)
    admission = Admission(specs, ROUND, [1, CLIENT, 5], samples={CLIENT: samples})
    result = Arrivals(
        admission, [1, CLIENT, 5], lambda client, n: 1.0, lambda update: {**update.values}
    )
    result.take(1, lambda: UntrustedUpdate(1, ROUND, 9, 0.5, values))
    return result


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def huge_header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + b"\0" * 64


def zipped(array: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, array)
    return file.getvalue()


@st.composite
def bad_arrays(draw: st.DrawFn, algorithm: str) -> RecordDict:
    """Something wrong with the arrays."""
    made = content(algorithm)
    arrays: Any = made[p.update_key(CLIENT)]
    name = draw(st.sampled_from([n for n in arrays if arrays[n].numpy().size]))
    good, data = arrays[name].numpy(), arrays[name].data
    index = draw(st.integers(0, good.size - 1))

    def with_value(value: float) -> Array:
        bad = good.copy().reshape(-1)
        bad[index] = value
        return Array(bad.reshape(good.shape))

    def declared(**changes: Any) -> Array:
        fields = {"dtype": str(good.dtype), "shape": good.shape, "stype": "numpy.ndarray"}
        return Array(**{**fields, "data": arrays[name].data, **changes})

    size = draw(st.integers(0, 3 * good.size).filter(lambda n: n != good.size))
    dtype = draw(st.sampled_from(["f8", "f2", "i4", "u2", "c8", ">f4", "U3", "?"]))
    if np.dtype(dtype) == good.dtype:
        dtype = "f8"
    plain = name.endswith("/values")  # any number in the code of a codec may be an honest one
    kinds: list[Any] = [
        lambda: Array(np.resize(good, size)),
        lambda: Array(good.reshape(*good.shape, 1)),
        lambda: Array(good[None]),
        lambda: Array(np.zeros((), np.float32)),
        lambda: Array(good.astype(dtype)),
        lambda: declared(shape=(*good.shape, 1)),
        lambda: declared(shape=(-1,)),
        lambda: declared(dtype=draw(st.sampled_from(["float64", "object", "", "int64"]))),
        lambda: declared(stype=draw(st.sampled_from(["", "pickle", "torch.tensor"]))),
        lambda: declared(data=data[: draw(st.integers(0, len(data) - 1))]),
        lambda: declared(data=data + draw(st.binary(min_size=1, max_size=9))),
        lambda: declared(data=draw(st.binary(max_size=300))),
        lambda: declared(data=pickle.dumps(good)),
        lambda: declared(data=npy(np.array([object()], dtype=object), allow_pickle=True)),
        lambda: declared(data=zipped(good)),
        lambda: declared(data=huge_header((1 << draw(st.integers(33, 60)),))),
        lambda: declared(data=huge_header((1 << 31, 1 << 31, 1 << 31))),
        lambda: declared(data=b"\x93NUMPY\x01\x00\xff\xff" + draw(st.binary(max_size=200))),
        lambda: declared(data=b"\x93NUMPY\x03\x00" + draw(st.binary(max_size=200))),
    ]
    if plain:
        kinds.append(lambda: with_value(draw(st.sampled_from([NAN, INF, -INF, 1e30, -3e38]))))
    if plain and honest(algorithm)[1][name.removesuffix("/values")].nonnegative:
        kinds.append(lambda: with_value(-draw(st.floats(2.0**-100, 2.0**50, width=32))))
    action = draw(st.integers(0, len(kinds) + 3))
    if action < len(kinds):
        arrays[name] = kinds[action]()
    elif action == len(kinds):
        del arrays[name]
    elif action == len(kinds) + 1:
        arrays[draw(st.text(max_size=12).filter(lambda n: n not in arrays))] = arrays[name]
    elif action == len(kinds) + 2:
        arrays[name + draw(st.sampled_from([" ", ".", "\0", "_"]))] = arrays.pop(name)
    else:
        others: list[Any] = [ConfigRecord({"weights": [1.0]}), MetricRecord({"weights": 1.0})]
        made[p.update_key(CLIENT)] = draw(st.sampled_from([*others, ArrayRecord()]))
    return made


numbers = st.one_of(st.integers(-(1 << 62), 1 << 62), st.floats(), st.lists(st.integers(0, 9)))


@st.composite
def bad_metrics(draw: st.DrawFn, algorithm: str) -> RecordDict:
    """Something wrong with what it says about itself."""
    made = content(algorithm)
    about: Any = made[p.about_key(CLIENT)]
    samples = honest(algorithm)[4]
    key = draw(st.sampled_from([p.CLIENT, p.ROUND, p.SAMPLES, p.LOSS]))
    right = {p.CLIENT: CLIENT, p.ROUND: ROUND, p.SAMPLES: samples}
    if key == p.LOSS:
        about[key] = draw(st.sampled_from([NAN, INF, -INF, 3, [1.0], [NAN]]))
    else:
        wrong = numbers.filter(lambda v: type(v) is not int or v != right[key])
        about[key] = draw(wrong)
    action = draw(st.integers(0, 9))
    if action == 0:
        del about[key]
    elif action == 1:
        del made[p.about_key(CLIENT)]
    elif action == 2:
        made[p.about_key(CLIENT)] = ConfigRecord({key: "1"})
    return made


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_honest_update_is_let_in(algorithm: str) -> None:
    taken, values = gathering(algorithm), honest(algorithm)[3]
    assert taken.take(CLIENT, lambda: read(algorithm, content(algorithm))) is not None
    assert not taken.refused
    mean, _ = taken.mean.result()
    for name, value in values.items():
        torch.testing.assert_close(mean[name], value)


@pytest.mark.long
@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_hostile_update_is_let_in(algorithm: str, examples: int) -> None:
    untouched = gathering(algorithm).mean.result()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.one_of(bad_arrays(algorithm), bad_arrays(algorithm), bad_metrics(algorithm)))
    def attempt(made: RecordDict) -> None:
        taken = gathering(algorithm)
        assert taken.take(CLIENT, lambda: read(algorithm, made)) is None
        assert isinstance(taken.refused[CLIENT], Refused)
        assert taken.mean.clients == 1
        values, loss = taken.mean.result()
        assert loss == untouched[1]
        assert all(torch.equal(value, untouched[0][name]) for name, value in values.items())

    attempt()


def test_twice_is_once() -> None:
    taken = gathering("prefed")
    assert taken.take(CLIENT, lambda: read("prefed", content("prefed"))) is not None
    assert taken.take(CLIENT, lambda: read("prefed", content("prefed"))) is None
    assert taken.mean.clients == 2
    assert CLIENT not in taken.refused


def test_norm_cap() -> None:
    _, specs, _, values, samples = honest("fedavg")
    length = float(values["weights"].norm())
    update = UntrustedUpdate(CLIENT, ROUND, samples, 1.0, values)
    Admission(specs, ROUND, [CLIENT], norm_cap=1.01 * length).admit(update)
    with pytest.raises(Refused, match="over the cap"):
        Admission(specs, ROUND, [CLIENT], norm_cap=0.99 * length).admit(update)


@pytest.mark.parametrize(
    ("P", "reason"),
    [
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), "semi-definite"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (torch.tensor([[-1.0, 0.0], [0.0, 1.0]]), "semi-definite"),
    ],
)
def test_a_whole_matrix_must_be_a_covariance(P: torch.Tensor, reason: str) -> None:
    from prefed.training.admission import check_values

    specs = {"P": Spec((2, 2), torch.float32, nonnegative=True)}
    check_values(specs, {"P": torch.tensor([[1.0, 0.5], [0.5, 0.25]])})
    with pytest.raises(Refused, match=reason):
        check_values(specs, {"P": P})


def test_finite_updates_cannot_add_up_to_infinity() -> None:
    """The largest that is let in, of many clients, with the largest weight."""
    from prefed.training.admission import LARGEST_COUNT, largest
    from prefed.training.mean import Mean

    mean = Mean()
    for position in range(1000):
        mean.add(
            position, {"weights": torch.full((2,), largest(torch.float32))}, LARGEST_COUNT, 0.0
        )
    assert torch.isfinite(mean.result()[0]["weights"]).all()


def test_server_is_not_needed_to_know_what_to_expect() -> None:
    """The specs come from algorithm and layout alone."""
    simulation = honest("prefed")[0]
    flat = simulation.task.flat
    server = Server.start(simulation.algorithm, flat.layout, flat.weights, flat.read_buffers())
    specs = expected(simulation.algorithm, server)
    assert set(specs) == {"weights", "buffers", "m", "P"}
    assert specs["P"].nonnegative
    assert not specs["m"].nonnegative
