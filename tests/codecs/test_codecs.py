"""Codecs: what comes back, what it costs, and what never happens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import prefed
from prefed.codecs import CODECS, Codec, Noise, Parts, codec, powers, sending
from prefed.codecs.interface import Blockwise
from prefed.codecs.logarithmic import Log8, Logarithmic
from prefed.core import draws
from prefed.core.c_programs import compiler
from prefed.core.hands import ALONE
from prefed.core.layout import Layout

NAMES = [*CODECS.names(), "topk(0.02)", "topk(1)"]
TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
LARGE = float(np.float32(3e38))
"""As large as values may be for the bounds to hold in float32."""


def shapes(size: int) -> Layout:
    """A layout of three tensors, one of them channels_last."""
    conv = torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last)
    rest = size - conv.numel() - 5
    return Layout.of([("conv", conv), ("bias", torch.empty(5)), ("rest", torch.empty(rest))])


def noise(*clients: int, seed: int = 0) -> Noise:
    return draws.Noise(seed, "test", 3, clients or (0,))


def rows_like(values: list[float], size: int, clients: int, dtype: torch.dtype) -> Tensor:
    """The values over and over, in each row from another one on."""
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    return torch.stack([x.repeat(-(-size // len(x)) + 1)[c : c + size] for c in range(clients)])


def there_and_back(way: Codec, x: Tensor, seed: int = 0) -> Tensor:
    layout = shapes(x.shape[1])
    parts = way.encode(x, layout, noise(*range(len(x)), seed=seed))
    return way.decode(parts, layout, x[0])


def bound(name: str, x: Tensor) -> Tensor:
    """The stated error, written from the docstrings."""
    x = x.double()
    size = x.abs()

    def blocks(length: int) -> Tensor:
        rest = -x.shape[1] % length
        return torch.nn.functional.pad(x, (0, rest)).reshape(len(x), -1, length)

    def spread(per_block: Tensor, length: int) -> Tensor:
        return per_block.repeat_interleave(length, 1)[:, : x.shape[1]]

    match name:
        case "exact":
            return torch.zeros_like(x)
        case "float32":
            return size * 2**-24 + TINY
        case "bfloat16":
            return size * (2**-7 + 2**-23) + TINY
        case "float16":
            return torch.where(size > 65504, size, (size * 2**-10).clamp(min=2**-24) * 1.0001)
        case "float8":
            top = spread(blocks(256).abs().amax(-1), 256)
            return torch.maximum(size * 2**-3, top * 2**-9 / 448) * 1.0001 + 2 * TINY
        case "int8":
            top = spread(blocks(256).abs().amax(-1), 256)
            return top / 127 * 1.0001 + 2 * TINY
        case "log8" | "log4":
            levels, span = {"log8": (255, 64), "log4": (15, 28)}[name]
            part = blocks(512)
            high = part.amax(-1).clamp(min=2.0**-100)
            low = torch.where(part > 0, part, torch.inf).amin(-1).minimum(high)
            low = low.maximum(high * 2.0**-span).clamp(min=2.0**-100)
            ratio, low = spread((high / low) ** (1 / (levels - 1)) - 1, 512), spread(low, 512)
            raised = (low - x).clamp(min=0)
            return ((ratio + 5e-5) * size.maximum(low) + raised) * (x > 0)
    raise NotImplementedError(name)


BOUNDED = ["exact", "float32", "bfloat16", "float16", "float8", "int8", "log8", "log4"]
numbers = st.one_of(
    st.floats(-LARGE, LARGE, width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, TINY, LARGE, -LARGE, 1.0, 448.0, 65504.0]),
)
lists = st.lists(numbers, min_size=1, max_size=40)
sizes = st.sampled_from([30, 31, 255, 256, 257, 512, 1025])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
@given(values=lists, size=sizes, seed=st.integers(0, 2**32))
def test_the_error_is_the_stated_one(
    name: str, dtype: torch.dtype, values: list[float], size: int, seed: int
) -> None:
    way = codec(name)
    x = rows_like(values, size, 2, dtype)
    if not way.signed:
        x = x.abs()
    back = there_and_back(way, x, seed)
    assert back.dtype == x.dtype
    assert back.shape == x.shape
    assert back.isfinite().all()
    error = (back.double() - x.double()).abs()
    assert (error <= bound(name, x)).all(), (error - bound(name, x)).max()


@pytest.mark.parametrize("name", ["log8", "log4"])
@given(values=lists, size=sizes, seed=st.integers(0, 2**32))
def test_zero_is_a_code_for_zero_alone(
    name: str, values: list[float], size: int, seed: int
) -> None:
    for x in (rows_like(values, size, 2, dtype).abs() for dtype in (torch.float32, torch.float64)):
        for scale in (1, 1e-300 if x.dtype == torch.float64 else 1e-20):
            back = there_and_back(codec(name), x * scale, seed)
            assert torch.equal(back > 0, x * scale > 0)
            assert torch.equal(back == 0, x * scale == 0)


@pytest.mark.parametrize("name", ["row", "tensor"])
@given(values=lists, size=sizes)
def test_means_are_those_of_the_tensors(name: str, values: list[float], size: int) -> None:
    """An oracle tensor by tensor, in float64; strides of a channels_last tensor included."""
    x = rows_like(values, size, 2, torch.float32).abs()
    layout, back = shapes(size), there_and_back(codec(name), x)
    for row, found in zip(x.double(), back.double(), strict=True):
        for tensor, value in zip(
            layout.views(row).values(), layout.views(found).values(), strict=True
        ):
            groups = tensor.flatten(1) if name == "row" and tensor.dim() > 1 else tensor[..., None]
            if name == "tensor":
                groups = tensor.reshape(1, -1)
            mean = groups.mean(1).view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor)
            torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-36)
            assert ((value > 0) | (mean < 1e-37)).all()


@pytest.mark.parametrize("name", NAMES)
@given(size=sizes, clients=st.integers(1, 4))
def test_bytes_are_the_length_of_the_message(name: str, size: int, clients: int) -> None:
    way, layout = codec(name), shapes(size)
    x = torch.rand(clients, size)
    parts = way.encode(x, layout, noise(*range(clients)))
    packed = b"".join(
        value.contiguous().view(torch.uint8).numpy().tobytes() for value in parts.values()
    )
    assert len(packed) == clients * way.nbytes(layout, x[0])
    assert all(value.numpy().nbytes == value.nbytes for value in parts.values())  # NumPy knows it
    form = way.form(layout, x[0])
    assert {n: (v.dtype, tuple(v.shape[1:])) for n, v in parts.items()} == form


@pytest.mark.parametrize(
    ("name", "share"),
    [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float8", 1.016), ("int8", 1.016),
     ("log8", 1.016), ("log4", 0.516), ("topk(0.02)", 0.16)],
)  # fmt: skip
def test_bytes_for_each_number(name: str, share: float) -> None:
    layout = shapes(1 << 16)
    assert codec(name).nbytes(layout, torch.empty(1 << 16)) == pytest.approx(
        share * 2**16, rel=1e-3
    )


DRAWS = 4000


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8", "int8", "log8", "log4"])
def test_the_mean_over_many_draws_is_the_value(name: str) -> None:
    """Each coordinate's mean over 4000 draws against its standard error; and all together, which
    would show a bias common to them."""
    way, layout = codec(name), shapes(700)
    generator = torch.Generator().manual_seed(1)
    x = 10 ** torch.randn(700, generator=generator)  # within the span of log4
    if way.signed:
        x = (x * torch.randn(700, generator=generator)).clamp(-6e4, 6e4)
    x[::50] = 0
    rows = x.expand(DRAWS, -1)
    back = way.decode(way.encode(rows, layout, noise(*range(DRAWS))), layout, x).double()
    off, spread = back.mean(0) - x.double(), back.std(0)
    # Coordinates that go up and down often enough for their mean to be a normal number.
    noisy = spread > 0.1 * bound(name, x[None])[0]
    assert noisy.sum() > 200
    z = off[noisy] / (spread[noisy] / math.sqrt(DRAWS))
    # 700 coordinates: the largest of so many normal numbers exceeds 5.2 once in 7000 runs.
    assert z.abs().max() < 5.2
    assert abs(float(z.sum()) / math.sqrt(len(z))) < 4.5
    assert float(z.square().mean()) == pytest.approx(1, abs=0.3)
    # The others go up or down with a probability below 1.1 %: 44 of 4000 draws, and never 100.
    assert (off[~noisy].abs() <= 0.025 * bound(name, x[None])[0][~noisy]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    way = codec(name)
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(2, 1100, dtype=dtype)
        x[0, 600] = bad
        back = there_and_back(way, x)
        assert not back[0, 600].isfinite()
        assert back[1].isfinite().all()  # the other client has nothing to do with it


@pytest.mark.parametrize("name", ["log8", "log4"])
def test_a_negative_p_is_not_passed_on_as_a_number(name: str) -> None:
    x = torch.rand(1, 1100)
    x[0, 600] = -1e-3
    back = there_and_back(codec(name), x)
    assert back[0, 512:1024].isnan().all()
    assert back[0, :512].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_client_has_the_message_it_has_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block of clients, and however a vector is cut into pieces."""
    way, layout, x = codec(name), shapes(5000), torch.rand(3, 5000)
    together = way.encode(x, layout, noise(7, 8, 9))
    monkeypatch.setattr("prefed.codecs.interface.PIECE", 1024)
    for row, client in enumerate((7, 8, 9)):
        alone = way.encode(x[row : row + 1], layout, noise(client))
        for part, value in together.items():
            assert torch.equal(as_bytes(alone[part][0]), as_bytes(value[row]))
        back = way.decode(alone, layout, x[0])
        assert torch.equal(back[0], way.decode(together, layout, x[0])[row])


def as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def test_draws_depend_on_seed_purpose_round_and_client() -> None:
    base = draws.noise(1, "codec P", 2, [3], 50)
    assert torch.equal(base, draws.noise(1, "codec P", 2, [5, 3], 50)[1:])
    assert torch.equal(base[:, :7], draws.noise(1, "codec P", 2, [3], 7))
    for other in ((0, "codec P", 2, [3]), (1, "codec m", 2, [3]), (1, "codec P", 1, [3]),
                  (1, "codec P", 2, [4])):  # fmt: skip
        assert not torch.equal(base, draws.noise(*other, 50))
    many = draws.noise(0, "codec P", 0, [0], 1 << 16).double()
    assert abs(float(many.mean() + 0.5)) < 5 * 65536 / math.sqrt(12 * 2**16)
    assert many.min() < -32700
    assert many.max() > 32700


def test_bfloat16_against_numpy() -> None:
    """Bit by bit: an upper neighbour where the lower half of the number and the draw carry."""
    x, layout = torch.randn(1, 300), shapes(300)
    drawn = noise(0)(300)[0].numpy().view(np.uint16).astype(np.uint64)
    bits = x[0].numpy().view(np.uint32).astype(np.uint64)
    expected = ((bits + drawn) >> 16 << 16).astype(np.uint32).view(np.float32)
    back = codec("bfloat16").decode(codec("bfloat16").encode(x, layout, noise(0)), layout, x[0])
    np.testing.assert_array_equal(back[0].numpy(), expected)


def test_int8_against_numpy() -> None:
    x, layout = torch.randn(1, 600), shapes(600)
    u = (noise(0)(600)[0].numpy().astype(np.float64) + 32768.5) / 65536
    values = x[0].numpy().astype(np.float64)
    expected = np.empty(600)
    for start in range(0, 600, 256):
        part = slice(start, min(start + 256, 600))
        step = np.abs(values[part]).max() / 127
        expected[part] = np.floor(values[part] / step + u[part]) * step
    back = codec("int8").decode(codec("int8").encode(x, layout, noise(0)), layout, x[0])
    np.testing.assert_allclose(back[0].numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["log8", "log4"])
def test_logarithmic_levels_against_numpy(name: str) -> None:
    """In float64, from the levels and the probability between two of them."""
    way = codec(name)
    assert isinstance(way, Logarithmic)
    x, layout = torch.rand(1, 600).pow(6) + 1e-9, shapes(600)
    u = (noise(0)(600)[0].numpy().astype(np.float64) + 32768.5) / 65536
    values = x[0].numpy().astype(np.float64)
    expected, sure = np.empty(600), np.empty(600, bool)
    for start in (0, 512):
        part = slice(start, min(start + 512, 600))
        high = values[part].max()
        low = max(values[part].min(), high * 2.0**-way.span)
        values[part] = np.maximum(values[part], low)
        levels = np.geomspace(low, high, way.levels)
        k = np.searchsorted(levels[1:-1], values[part], "right")
        p = (values[part] - levels[k]) / (levels[k + 1] - levels[k])
        expected[part] = np.where(u[part] < p, levels[k + 1], levels[k])
        sure[part] = np.abs(u[part] - p) > 1e-2  # float32 may decide otherwise near the border
    back = way.decode(way.encode(x, layout, noise(0)), layout, x[0])[0].numpy()
    assert sure.sum() > 550
    np.testing.assert_allclose(back[sure], expected[sure], rtol=2e-5)


@given(values=lists, share=st.floats(0.01, 1))
def test_topk_keeps_the_largest(values: list[float], share: float) -> None:
    x = rows_like(values, 300, 2, torch.float32)
    back = there_and_back(codec(f"topk({share})"), x)
    kept = math.ceil(share * 300)
    for row, found in zip(x, back, strict=True):
        assert torch.equal(found[found != 0], row[found != 0])
        assert (found != 0).sum() <= kept
        wanted = row.abs().sort(descending=True).values[:kept].sum()
        assert float(found.abs().double().sum()) == pytest.approx(
            float(row.abs().double().sort(descending=True).values[:kept].sum())
        ), wanted


@pytest.mark.parametrize(
    ("name", "message"),
    [("log9", "log8"), ("bfloat", "bfloat16"), ("topk(2)", "share"), ("topk(a)", "float"),
     ("log8(3)", "argument"), ("top k", "codec")],
)  # fmt: skip
def test_wrong_names_are_told_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(prefed.PrefedError, match=rf"PreFed.P_codec: .*{message}"):
        prefed.PreFed(P_codec=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upload": "log8"}, "never negative"),
        ({"upload": "row"}, "never negative"),
        ({"m_codec": "log8"}, "m has both signs"),
        ({"P_codec": "topk"}, "error feedback"),
        ({"P_codec": "log8", "shape": "full"}, "vectors"),
    ],
)
def test_codecs_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    from tests.helpers.problems import tiny_data, tiny_model

    settings = prefed.Settings(rounds=1, local_steps=1, device="cpu")
    with pytest.raises(prefed.PrefedError, match=message):
        prefed.Simulation(prefed.PreFed(**options), tiny_model(), tiny_data(), settings)


class Doubled(Log8):
    """What it inherits in C is not its own."""

    def encode_piece(self, x: Tensor, noise: Tensor) -> Parts:
        return super().encode_piece(x.mul(2), noise)


def test_c_is_not_that_of_another_codec() -> None:
    x = torch.rand(1, sending.WORTH_IT)
    back = x.clone()
    Doubled().send(back, noise(0), ALONE)
    torch.testing.assert_close(back, 2 * x, rtol=0.2, atol=0)


HANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x * 1e-3,
    "over the whole range": lambda x: x * torch.linspace(-140, 127, x.shape[1]).exp2(),
    "zeros of both signs": lambda x: x * torch.tensor([1.0, 0, -0.0]).repeat(2000)[: x.shape[1]],
    "zero": torch.zeros_like,
    "huge": lambda x: x * 3e38,
    "subnormal": lambda x: x * 1e-40,
    "alike": lambda x: torch.full_like(x, 0.3),
    "not finite": lambda x: torch.where(x > 2.5, math.inf, torch.where(x < -2.5, math.nan, x)),
}


@pytest.mark.process
@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("values", HANDED)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8", "int8", "log8", "log4"])
def test_bits_in_c_are_those_of_torch(
    name: str, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = codec(name)
    assert isinstance(way, Blockwise)
    monkeypatch.setattr(sending, "WORTH_IT", 1)
    generator = torch.Generator().manual_seed(2)
    for clients, size in (((3, 8, 2**40), 5000), ((1,), 512), ((0, 6), 40)):
        x = HANDED[values](torch.randn(len(clients), size + 3, generator=generator))
        x = x if way.signed else x.abs()
        mine = x.clone()
        lines = way.in_c()
        assert lines is not None
        assert sending.sent_in_c(lines, mine[:, :size], draws.Noise(5, "codec P", 9, clients))
        parts = way.encode(x[:, :size], shapes(size), draws.Noise(5, "codec P", 9, clients))
        theirs = torch.cat([way.decode(parts, shapes(size), x[0]), x[:, size:]], 1)
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert ((mine.view(torch.int32) == theirs.view(torch.int32)) | mine.isnan()).all()


def test_logarithms_and_powers_are_near_those_of_numpy() -> None:
    x = torch.linspace(-126, 127.99, 100_001, dtype=torch.float64).exp2().to(torch.float32)
    expected = np.log2(x.double().numpy())
    np.testing.assert_allclose(powers.log2(x).numpy(), expected, rtol=2e-7, atol=1e-7)
    y = torch.linspace(-125, 127.99, 100_001)
    expected = np.exp2(y.double().numpy())
    np.testing.assert_allclose(powers.exp2(y).numpy(), expected, rtol=4e-7)
    assert powers.exp2(torch.tensor([128.0, math.nan])).isfinite().logical_not().all()
