"""Transformers in C, against autograd and the sequential engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core.layout import Layout
from prefed.models.chars import CharTransformer
from prefed.models.gpt import GPT
from prefed.models.vit import ViT
from prefed.training.engines.native_program import Program
from prefed.training.engines.native_writing import NotNative
from tests.helpers.engine_runs import run, same
from tests.helpers.native_gradients import LENGTH, SYMBOLS, compare, text

pytestmark = pytest.mark.process


def gpt(**options: Any) -> nn.Module:
    return GPT((LENGTH,), SYMBOLS, width=12, layers=2, heads=3, **options)


def characters() -> nn.Module:
    return CharTransformer((LENGTH,), SYMBOLS, width=8, layers=1, heads=2)


def long_text() -> nn.Module:
    """Longer than what is taken at a time, and than one vector."""
    return CharTransformer((150,), SYMBOLS, width=4, layers=1, heads=1)


def vit(**options: Any) -> nn.Module:
    return ViT((2, 6, 9), 5, width=10, layers=2, heads=2, patch=3, **options)


def samples(model: nn.Module, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and y of three clients."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, ViT):
        x = torch.randn(3, batch, 2, 6, 9, dtype=dtype, generator=generator)
        return x, torch.randint(5, (3, batch), generator=generator)
    assert isinstance(model, GPT | CharTransformer)
    assert model.positions is not None
    shape = 3, batch, len(model.positions)
    x, y = (torch.randint(SYMBOLS, shape, generator=generator) for _ in range(2))
    return x.to(dtype), y


@pytest.mark.parametrize("make", [gpt, characters, long_text, vit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_autograd(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Of three clients, in batches that one pass holds, that need several, and whose last is short;
    infinite weights end in NaN."""
    torch.manual_seed(0)
    model = make().to(dtype)
    layout = Layout.of(model.named_parameters())
    sample = tuple(samples(model, 1, dtype)[0].shape[2:])
    program = Program(model, layout, sample, dtype, 20)
    generator = torch.Generator().manual_seed(1)
    w = 0.3 * torch.randn(3, layout.size, dtype=dtype, generator=generator)
    for batch in (1, 3, 13, 20):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        compare(program, model, layout, w, samples(model, batch, dtype), tolerance)


@pytest.mark.parametrize("name", ["fedavg", "prefed", "prefeds", "scaffold", "fedadam", "fedpac"])
def test_runs_equal_those_of_the_sequential_engine(name: str) -> None:
    torch.manual_seed(0)
    model = gpt().double()
    one, other = (
        run(name, model, engine, data=text(), rounds=2) for engine in ("sequential", "native")
    )
    same(one, other, 1e-9)
    assert other.history[-1]["test_loss"] == pytest.approx(one.history[-1]["test_loss"], abs=1e-9)


def test_bits_do_not_depend_on_the_number_of_workers() -> None:
    torch.manual_seed(0)
    model = gpt()
    one, two = (run("prefed", model, "native", data=text(), workers=n, rounds=2) for n in (1, 2))
    assert torch.equal(one.weights, two.weights)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gpt(dropout=0.1), "draws numbers"),
        (lambda: gpt(positions="rotary"), "rotary"),
    ],
    ids=["dropout", "rotary"],
)
def test_what_has_no_c_trains_without_after_one_line(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.warns(prefed.EngineWarning, match=f"not in C .*{reason}"):
        run("fedavg", make(), "native", data=text(), rounds=1)


def test_a_frozen_layer_has_no_c() -> None:
    model = gpt()
    for parameter in model.get_submodule("blocks.0").parameters():
        parameter.requires_grad_(False)
    with pytest.warns(prefed.EngineWarning, match="not in C .*frozen"):
        run("fedavg", model, "native", data=text(), rounds=1)


def test_a_symbol_that_the_model_does_not_have_is_an_error() -> None:
    data = text()
    x, y = data.client(0).all()
    assert isinstance(x, Tensor)
    for bad in (SYMBOLS, -1):
        wrong = x.long()
        wrong[-1, 3] = bad
        one = prefed.FederatedData([(x.long(), y), (wrong, y)])
        with pytest.raises((IndexError, prefed.PrefedError), match="symbol"):
            run("fedavg", gpt(), "native", data=one, rounds=1, clients_per_round=None)


def narrower_block(model: Any) -> None:
    """Another width inside the second block: memory is for the first's."""
    model.blocks[1].mlp = nn.Sequential(nn.Linear(12, 1), nn.GELU(), nn.Linear(1, 12))


def without_epsilon(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.eps = 0.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "a narrower block": narrower_block,
    "queries and keys alone": lambda m: setattr(m.blocks[0], "qkv", nn.Linear(12, 24)),
    "a head in a sequence": lambda m: setattr(m, "head", nn.Sequential(nn.Linear(12, 7))),
    "no norm": lambda m: setattr(m, "norm", nn.Sequential()),
    "no activation": lambda m: setattr(m.blocks[0].mlp, "1", nn.Sequential()),
    "one activation more": lambda m: m.blocks[1].mlp.append(nn.GELU()),
    "a layer behind the blocks": lambda m: m.blocks.append(nn.GELU()),
    "one block that sees all": lambda m: setattr(m.blocks[1], "causal", False),
    "a block that was changed": lambda m: setattr(m.blocks[1], "_dropped", lambda x: 2 * x),
    "gradients by frequency": lambda m: setattr(m.embed, "scale_grad_by_freq", True),
    "norms that divide by 0": without_epsilon,
    "heads that differ": lambda m: setattr(m.blocks[1], "heads", 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_models_that_were_changed_are_not_written(change: Callable[[Any], object]) -> None:
    model = CharTransformer((LENGTH,), SYMBOLS, width=12, layers=2, heads=3)
    change(model)
    with pytest.raises(NotNative):
        Program(model, Layout.of(model.named_parameters()), (LENGTH,), torch.float32, 4)


@pytest.mark.parametrize("sample", [(3, 6, 9), (2, 7, 9), (2, 6, 12), (108,)])
def test_images_of_another_shape_are_not_written(sample: tuple[int, ...]) -> None:
    model = vit()
    with pytest.raises(NotNative):
        Program(model, Layout.of(model.named_parameters()), sample, torch.float32, 4)


def test_long_sequences_with_wide_heads_do_not_need_the_stack() -> None:
    model = CharTransformer((512,), SYMBOLS, width=256, layers=1, heads=1).double()
    layout = Layout.of(model.named_parameters())
    program = Program(model, layout, (512,), torch.float64, 1)
    x, y = samples(model, 1, torch.float64)
    w = 0.05 * torch.randn(1, layout.size, generator=torch.Generator().manual_seed(0)).double()
    g, losses = torch.empty_like(w), w.new_zeros(1)
    program.gradients(w, g, x[:1], y[:1], losses, program.scratch())
    output = torch.func.functional_call(model, layout.views(w[0]), (x[0],))
    torch.testing.assert_close(losses[0], nn.functional.cross_entropy(output, y[0]))
    assert g.isfinite().all()
