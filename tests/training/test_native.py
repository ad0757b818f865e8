"""The engine that writes C, against the sequential one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.codecs import interface, sending
from prefed.core import c_programs
from prefed.core.c_programs import pointer
from prefed.core.cache_directory import VARIABLE
from prefed.core.layout import Layout
from prefed.data.images import CropAndFlip
from prefed.rules import Rule
from prefed.rules.adagrad import AdaGrad
from prefed.rules.adam import Adam, Yogi
from prefed.rules.covariance import Covariance
from prefed.rules.rule import in_c
from prefed.rules.sgd import SGD
from prefed.rules.spectral import Spectral
from prefed.training.engines import native_program, native_writing
from prefed.training.engines.native import Native
from prefed.training.engines.native_block import NativeBlock
from prefed.training.engines.native_program import Program
from prefed.training.engines.native_writing import Vectors
from tests.helpers.engine_runs import batchnorm, run, same
from tests.helpers.native_gradients import compare
from tests.helpers.problems import SIZES, WITHOUT_NORMS, tiny_data

pytestmark = pytest.mark.process


def relus(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    inputs, hidden, classes = SIZES
    first = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU())
    rest = nn.Linear(hidden, 4, bias=False), nn.ReLU(), nn.Linear(4, classes)
    return nn.Sequential(first, *rest).to(dtype)


def images(classes: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two convolutions, one with a border; pooling that leaves a row and a column out."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(5, 7, 2, bias=False), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
        nn.Linear(28, 9), nn.ReLU(), nn.Linear(9, classes),
    ).to(dtype)  # fmt: skip


def tiles(classes: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Convolutions in Winograd's form: whole tiles and others, with a border, with a part of one
    and without, and channels that do not fill vectors."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 7, 1), nn.Conv2d(7, 9, 3, padding=1), nn.ReLU(),
        nn.Conv2d(9, 8, 5, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False), nn.ReLU(),
        nn.Conv2d(6, 17, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(153, classes),
    ).to(dtype)  # fmt: skip


def one_tile(classes: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A first layer whose input has enough channels, on one tile and a part of it."""
    torch.manual_seed(4)
    layers = nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 5 * 4, classes)
    return nn.Sequential(*layers).to(dtype)


def pictures(dtype: torch.dtype = torch.float64) -> prefed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    sizes = (7, 12, 7, 9, 21, 6)
    clients = [
        (torch.randn(n, 2, 11, 11, dtype=dtype, generator=generator), torch.arange(n) % 3)
        for n in sizes
    ]
    return prefed.FederatedData(clients, test=clients[0])


@pytest.mark.parametrize("name", WITHOUT_NORMS)
def test_every_algorithm_in_float64(name: str) -> None:
    same(run(name, relus(), "sequential"), run(name, relus(), "native"), 1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": None, "weighting": "samples"},
        {"local_steps": None, "local_epochs": 2, "weighting": "samples"},
        {"batch_size": 19},
    ],
    ids=["steps", "full", "epochs", "large"],
)
@pytest.mark.parametrize("name", ["fedavg", "prefed", "prefedm", "scaffold", "prefedsync"])
def test_convolutions_in_float64(name: str, options: dict[str, Any]) -> None:
    if name == "prefedsync" and "local_epochs" in options:
        pytest.skip("clients that meet in every step take equally many")
    one, other = (
        run(name, images(3), engine, data=pictures(), **options)
        for engine in ("sequential", "native")
    )
    same(one, other, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 3, 16, 20, 64, 100])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(
    ("make", "sample", "single"),
    [(images, (2, 11, 11), 1e-5), (tiles, (2, 11, 11), 5e-5), (one_tile, (6, 7, 6), 1e-5)],
)
def test_gradients_are_those_of_autograd(
    dtype: torch.dtype,
    batch: int,
    last: bool,
    make: Callable[[int, torch.dtype], nn.Module],
    sample: tuple[int, ...],
    single: float,
) -> None:
    """Of three clients, on batches that fit the vectors and on others; with infinite weights too,
    NaN comes out where it does in torch. In single precision Winograd's form rounds more than plain
    sums do, two to five times as much after four such layers (against float64), as a share of the
    largest number; in double precision one bound holds for all."""
    model = make(3, dtype)
    if last:
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
    layout = Layout.of(model.named_parameters())
    program = Program(model, layout, sample, dtype, 20)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, batch, *sample, dtype=dtype, generator=generator)
    y = torch.randint(3, (3, batch), generator=generator)
    w = 0.3 * torch.randn(3, layout.size, dtype=dtype, generator=generator)
    tolerance = single if dtype == torch.float32 else 1e-12
    compare(program, model, layout, w, (x, y), tolerance, by_largest=make is not images)


@pytest.mark.parametrize(
    "rule",
    [
        SGD(), SGD(0.9), SGD(0.9, nesterov=True), Covariance(), Covariance(accumulate="sum"),
        Covariance(step_with="g", bias_correction=True, tau_relative=0.1),
        Covariance(bias_correction=True), Covariance(tau_relative=0.3), AdaGrad(), Adam(),
        Adam(bias_correction=True, tau_inside=True), Spectral(), Spectral(iterations=2, refresh=4),
        Spectral(clip_relative=None, beta1=0.0), Spectral(clip_relative=0.5, plain=("1.*",)),
        Spectral(clip_relative=0.5, beta1=0.0), Spectral(plain=("*",)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("by_number", [False, True])
def test_rules_in_c_are_those_in_torch(rule: Rule, by_number: bool) -> None:
    """Thirty steps of two clients with weight decay, whose gradients are autograd's."""
    model = relus()
    layout = Layout.of(model.named_parameters())
    rule = rule.fit(layout)
    program, clients, steps = Program(model, layout, (SIZES[0],), torch.float64, 5), 2, 30
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(clients, 5 * steps, SIZES[0], dtype=torch.float64, generator=generator)
    y = torch.randint(SIZES[2], (clients, 5 * steps), generator=generator)
    start = 0.5 * torch.randn(clients, layout.size, dtype=torch.float64, generator=generator)
    fields = rule.fields(layout)
    mine, theirs = (
        (start.clone(), {name: field.new(start, clients) for name, field in fields.items()})
        for _ in range(2)
    )
    lines, losses, scratch = in_c(rule), torch.zeros(clients).double(), program.scratch()
    assert lines is not None
    step = program.rule(lines, [*fields])
    w, g = theirs[0], torch.empty_like(start)
    memory = w.new_empty(program.room(mine[1], 5))
    numbers = torch.arange(y.numel()).view_as(y) if by_number else None
    given = x.flatten(0, 1) if by_number else x
    program.steps(step, *mine, [5] * steps, given, y, numbers, losses, 0.01, 0.02)(memory, scratch)
    for k in range(steps):
        part = slice(5 * k, 5 * k + 5)
        program.gradients(w, g, x[:, part], y[:, part], torch.zeros(2).double(), scratch)
        g.add_(w, alpha=0.02)
        rule.step(w, g, theirs[1], 0.01, k)
    torch.testing.assert_close(mine[0], w, rtol=0, atol=1e-11)
    for name, value in theirs[1].items():
        torch.testing.assert_close(mine[1][name], value, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_orthogonal_steps_in_c_are_those_in_torch(dtype: torch.dtype, iterations: int) -> None:
    """Matrices that are tall, wide, square, single rows and columns, with more columns than are
    added up at a time, and a convolution with its channels last; none fills vectors and tiles."""
    shapes = [(3, 2), (17, 50), (50, 17), (33, 33), (1, 9), (9, 1), (5, 1200), (1200, 5), (70, 97)]
    images = torch.empty(6, 5, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes] + [images, images[0, 0, 0]]
    layout = Layout.of((f"p{n}", tensor) for n, tensor in enumerate(tensors))
    rule = Spectral(iterations=iterations, beta1=0.5).fit(layout)
    lines = in_c(rule)
    assert lines is not None
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(layout.size, dtype=dtype, generator=generator)
    mine, theirs = (
        (w.clone(), {name: field.new(w) for name, field in rule.fields(layout).items()})
        for _ in range(2)
    )
    program = Program(relus(dtype), Layout.of(relus(dtype).named_parameters()), SIZES[:1], dtype, 5)
    program.size = layout.size
    step = program.rule(lines, [*mine[1]])
    fields = [value.data_ptr() for value in mine[1].values()]
    real = ctypes.c_float if dtype == torch.float32 else ctypes.c_double
    for k in range(3):
        g = torch.randn(layout.size, dtype=dtype, generator=generator)
        state = (ctypes.c_void_p * len(fields))(*fields)
        step(pointer(mine[0]), pointer(g), state, real(0.1))
        rule.step(theirs[0], g, theirs[1], 0.1, k)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=tolerance)
    for name, value in theirs[1].items():
        torch.testing.assert_close(mine[1][name], value, rtol=1e-5, atol=tolerance)


def test_large_matrices_are_left_to_torch() -> None:
    shapes = {"a": (600, 700), "b": (10, 700)}
    layouts = [Layout.of([(n, torch.empty(shape))]) for n, shape in shapes.items()]
    assert [in_c(Spectral().fit(layout)) is None for layout in layouts] == [True, False]


def test_vectors_that_are_too_large_to_copy_train_where_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits."""
    copied = run("prefed", relus(), "native", rounds=3)
    for place in (native_writing, native_program):
        monkeypatch.setattr(place, "MOST_COPIED", 0)
    assert torch.equal(run("prefed", relus(), "native", rounds=3).weights, copied.weights)


def test_a_rule_that_inherits_has_no_c_of_its_own() -> None:
    class Twice(SGD):
        def step(self, w: Tensor, g: Tensor, state: Any, lr: float, k: int) -> None:
            super().step(w, g, state, 2 * lr, k)

    assert in_c(SGD()) is not None
    assert in_c(Twice()) is None
    assert in_c(Yogi()) is None


@pytest.mark.parametrize("name", ["fedavg", "prefed", "prefeds", "scaffold"])
def test_bits_do_not_depend_on_the_number_of_workers(name: str) -> None:
    options: dict[str, Any] = {"clients_per_round": None, "weighting": "samples", "rounds": 4}
    one, two = (run(name, relus(), "native", workers=workers, **options) for workers in (1, 2))
    assert torch.equal(one.weights, two.weights)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["fedavg", "prefed", "prefedclite", "adaalter", "localadam"])
@pytest.mark.parametrize("by_number", [True, False])
def test_clients_that_begin_in_the_program_take_the_same_steps(
    algorithm: str, workers: int, by_number: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those for which everything was copied, in blocks."""
    x, y = torch.randn(60, SIZES[0], dtype=torch.float64), torch.arange(60) % SIZES[2]
    parts = [np.arange(c, 60, 6) for c in range(6)]
    listed = prefed.FederatedData([(x[part], y[part]) for part in parts])
    data = prefed.FederatedData((x, y), parts=parts) if by_number else listed
    blocks: list[tuple[bool, int]] = []
    change = NativeBlock.change

    def seen(block: NativeBlock, start: Tensor) -> Tensor:
        blocks.append((block.is_direct, len(block.clients)))
        return change(block, start)

    monkeypatch.setattr(NativeBlock, "change", seen)
    together = run(algorithm, relus(), "native", data=data, workers=workers)
    assert {size for _, size in blocks} == {4}
    assert {direct for direct, _ in blocks} == {algorithm != "prefedclite"}  # which begins
    monkeypatch.setattr(NativeBlock, "_in_one_call", lambda _: False)
    monkeypatch.setattr(Native, "most_divided", 0)
    blocks.clear()
    apart = run(algorithm, relus(), "native", data=data, workers=workers)
    assert set(blocks) == {(False, 2)}
    assert torch.equal(together.weights, apart.weights)


def test_a_rule_that_the_compiler_refuses_begins_where_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = run("prefed", relus(), "vectorised")
    monkeypatch.setattr(Covariance, "in_c", lambda _: "this is no C")
    with pytest.warns(prefed.EngineWarning, match="the rule is not in C"):
        found = run("prefed", relus(), "native")
    same(found, wanted, 1e-9)


def test_a_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = run("prefed", relus(), "native", rounds=6)
    run("prefed", relus(), "native", rounds=3, out=tmp_path / "run")
    more = run("prefed", relus(), "native", rounds=6, out=tmp_path / "run", resume=True)
    assert torch.equal(whole.weights, more.weights)


def test_samples_are_transformed_batch_by_batch() -> None:
    options: dict[str, Any] = {"rounds": 3}
    for engine in ("sequential", "native"):
        data = tiny_data(torch.float64)
        data.transform = lambda x: x / x.abs().max()
        options[engine] = run("prefed", relus(), engine, data=data, rounds=3)
    same(options["sequential"], options["native"], 1e-9)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(SIZES[0], 4), nn.Tanh(), nn.Linear(4, SIZES[2])), "Tanh"),
        (nn.Sequential(nn.Linear(SIZES[0], 4), nn.Dropout(), nn.Linear(4, SIZES[2])), "draws"),
        (batchnorm(), "statistics"),
    ],
    ids=["activation", "dropout", "batchnorm"],
)
def test_what_has_no_c_trains_without_after_one_line(model: nn.Module, reason: str) -> None:
    model = model.double()
    with pytest.warns(prefed.EngineWarning, match=f"not in C .*{reason}") as seen:
        result = run("fedavg", model, "native", rounds=2)
    assert len(seen) == 1
    same(result, run("fedavg", model, "sequential", rounds=2), 1e-9)


def test_without_a_compiler_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_programs, "compiler", lambda: None)
    monkeypatch.setattr(c_programs, "_made", {})
    with pytest.warns(prefed.EngineWarning, match="no C compiler") as seen:
        result = run("fedavg", relus(), "native", rounds=2)
    assert len(seen) == 1
    assert torch.equal(result.weights, run("fedavg", relus(), "vectorised", rounds=2).weights)


def test_a_label_that_is_no_class_is_an_error_and_nothing_is_written() -> None:
    model = relus()
    layout = Layout.of(model.named_parameters())
    program = Program(model, layout, (SIZES[0],), torch.float64, 4)
    w = torch.zeros(1, layout.size, dtype=torch.float64)
    for label in (-1, SIZES[2], 1 << 40):
        y = torch.tensor([[0, 1, label, 0]])
        with pytest.raises(IndexError, match="classes"):
            program.gradients(
                w, w.clone(), torch.zeros(1, 4, SIZES[0]).double(), y, w[:, 0].clone(),
                program.scratch(),
            )  # fmt: skip


def test_programs_are_kept_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    source, make = "int answer(void) { return 42; }", c_programs.compile_anew
    assert make(source).answer() == 42
    (library,) = (tmp_path / "cache/native").iterdir()
    before = library.stat().st_mtime_ns
    assert make(source).answer() == 42
    assert library.stat().st_mtime_ns == before
    with pytest.raises(c_programs.CannotCompile, match="error"):
        make("int answer(void) { return }")
    broken = make("int answer(void) { return 41; }")  # another, which is then not whole
    assert broken.answer() == 41
    for path in library.parent.iterdir():
        if path != library:
            path.unlink()
            path.write_bytes(b"")
    assert make("int answer(void) { return 41; }").answer() == 41
    library.unlink()
    library.parent.chmod(0o777)
    assert make(source).answer() == 42
    assert not library.exists(), "compiled elsewhere: others could have put a program there"


def test_a_compiler_that_cannot_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    monkeypatch.setattr(c_programs, "compiler", lambda: str(script))
    monkeypatch.setattr(c_programs, "_made", {})
    with pytest.warns(prefed.EngineWarning, match="not in C"):
        run("fedavg", relus(), "native", rounds=1)


class Clipped(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return input.clamp(0, 3)


class Unused(nn.Linear):
    """With a parameter that nothing depends on."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.more = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(SIZES[0], 4), Clipped(), nn.Linear(4, SIZES[2])], "Clipped"),
        ([nn.Linear(SIZES[0], 4), nn.ReLU(), Unused(4, SIZES[2])], "Unused"),
        ([nn.Linear(SIZES[0], SIZES[2]), nn.ReLU()], "last layer"),
        ([nn.Linear(SIZES[0], SIZES[0])] * 9 + [nn.Linear(SIZES[0], SIZES[2])], "8 layers"),
    ],
    ids=["subclass", "more parameters", "ends with ReLU", "deep"],
)
def test_layers_that_are_not_what_they_seem(layers: list[nn.Module], reason: str) -> None:
    model = nn.Sequential(*layers).double()
    with pytest.warns(prefed.EngineWarning, match=f"not in C .*{reason}"):
        run("fedavg", model, "native", rounds=1)


@pytest.mark.parametrize("augmented", [False, True], ids=["clients", "augment"])
def test_images_of_other_sizes_than_the_first_are_not_given_to_the_program(augmented: bool) -> None:
    """Pooling leaves rows out, so that the model takes both."""
    model = nn.Sequential(
        nn.Conv2d(1, 3, 1), nn.MaxPool2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    generator = torch.Generator().manual_seed(0)
    sides = [11] * 4 if augmented else [11, 8, 11, 8]
    clients = [
        (torch.randn(9, 1, n, n, dtype=torch.float64, generator=generator), torch.arange(9) % 3)
        for n in sides
    ]
    found = []
    for engine in ("sequential", "native"):
        data = prefed.FederatedData(clients, test=clients[0])
        if augmented:
            data.augment = lambda x, _: x[:, :, 1:9, 1:9]
        options: dict[str, Any] = {"local_steps": None, "local_epochs": 1, "rounds": 2}
        found.append(run("prefed", model, engine, data=data, **options))
    same(found[0], found[1], 1e-9)


def test_images_that_are_moved_and_mirrored_train_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of a client in one call, as if they were as they lie."""
    calls, steps = [], Program.steps

    def counted(*given: Any) -> Any:
        calls.append(1)
        return steps(*given)

    monkeypatch.setattr(Program, "steps", counted)
    found = []
    for engine in ("sequential", "native"):
        data = pictures()
        data.augment = CropAndFlip(2)
        found.append(run("prefed", images(3), engine, data=data, rounds=2))
    same(found[0], found[1], 1e-9)
    assert calls


@pytest.mark.parametrize("model", [images(3), tiles(3)], ids=["plain", "Winograd"])
def test_the_test_set_is_evaluated_in_c(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to torch's evaluation."""
    calls, outputs = [], Program.outputs

    def counted(*given: Any) -> Tensor:
        calls.append(len(given[2]))
        return outputs(*given)

    monkeypatch.setattr(Program, "outputs", counted)
    one, other = (
        run("prefed", model, engine, data=pictures(), rounds=2)
        for engine in ("sequential", "native")
    )
    assert calls == [7, 7]
    for name in ("test_loss", "test_accuracy"):
        assert other.history[-1][name] == pytest.approx(one.history[-1][name], abs=1e-9)


def test_labels_that_do_not_count_are_left_out() -> None:
    found = []
    for engine in ("sequential", "native"):
        clients = [
            (x, y.clone()) for x, y in (tiny_data(torch.float64).client(i).all() for i in range(4))
        ]
        clients[2][1][0] = -100
        data = prefed.FederatedData(clients, test=clients[0])
        options: dict[str, Any] = {"local_steps": None, "local_epochs": 1, "rounds": 2}
        loss = nn.functional.cross_entropy
        found.append(run("fedavg", relus(), engine, data=data, loss=loss, **options))
    same(found[0], found[1], 1e-9)


def test_a_transform_that_vmap_cannot_run_falls_back() -> None:
    data = tiny_data(torch.float64)
    data.transform = lambda x: torch.from_numpy(x.numpy() * 0.5)
    with pytest.warns(prefed.EngineWarning, match="not in C"):
        run("fedavg", relus(), "native", data=data, rounds=1)


def test_an_output_for_each_pixel_falls_back() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1)).double()
    x = torch.randn(4, 6, 1, 5, 5, dtype=torch.float64)
    clients = [(images, torch.zeros(6, 5, 5, dtype=torch.int64)) for images in x]
    with pytest.warns(prefed.EngineWarning, match="last layer"):
        run(
            "fedavg", model, "native", data=prefed.FederatedData(clients, test=clients[0]), rounds=1
        )


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_vectors_hold_every_batch(capability: str, halves: bool) -> None:
    for batch in (*range(1, 70), 100, 128, 1000):
        for size in (4, 8):
            found = Vectors.of(batch, size, capability, halves)
            assert found.width % found.lanes == 0
            parts = np.ceil(batch / found.width)
            assert parts * found.width < batch + parts * found.lanes


@pytest.mark.parametrize(("batch", "halved", "whole"), [(20, 8, 16), (32, 16, 16), (40, 8, 16)])
def test_wide_vectors_where_they_are_whole(batch: int, halved: int, whole: int) -> None:
    """Twenty samples fill three vectors of eight, or two of sixteen: fewer operations, unless each
    of those is two."""
    assert Vectors.of(batch, 4, "AVX512", halves=True).lanes == halved
    assert Vectors.of(batch, 4, "AVX512", halves=False).lanes == whole


def test_samples_by_number_are_those_that_were_copied() -> None:
    """Clients that are parts of one data set are not gathered; a list of arrays is."""
    x, y = torch.randn(60, SIZES[0], dtype=torch.float64), torch.arange(60) % SIZES[2]
    parts = [np.arange(c, 60, 6) for c in range(6)]
    divided = prefed.FederatedData((x, y), parts=parts)
    listed = prefed.FederatedData([(x[part], y[part]) for part in parts])
    one, two = (run("prefed", relus(), "native", data=data) for data in (divided, listed))
    assert torch.equal(one.weights, two.weights)


def test_a_sample_that_is_not_there_is_refused() -> None:
    x, y = torch.randn(60, SIZES[0], dtype=torch.float64), torch.arange(60) % SIZES[2]
    program = Program(relus(), Layout.of(relus().named_parameters()), (SIZES[0],), x.dtype, 5)
    step, scratch = program.rule(in_c(SGD()) or "", []), program.scratch()
    w, memory = x.new_zeros(1, program.size), x.new_empty(program.room({}, 5))
    for wrong in (-1, 60):
        numbers = torch.tensor([[0, 1, 2, 3, wrong]])
        with pytest.raises(IndexError, match="a sample that is not there"):
            program.steps(
                step, w, {}, [5], x, y[None, :5].clone(), numbers, x.new_zeros(1), 0.1, 0.0
            )(memory, scratch)


def test_messages_go_through_c_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(sending, "WORTH_IT", 1)

    def counted(*given: Any) -> bool:
        calls.append(sending.sent_in_c(*given))
        return calls[-1]

    ways: list[Callable[..., bool]] = [counted, lambda *_: False]
    results = []
    for way in ways:
        monkeypatch.setattr(interface, "sent_in_c", way)
        results.append(run("prefedslite", relus(torch.float32), "native").weights)
    assert calls
    assert all(calls)
    assert torch.equal(*results)
