"""LoRA: adapters on a frozen base, against a loop in plain PyTorch; what is saved of them; and the
mean that is exact because A stands still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import prefed
from prefed.core.errors import PrefedError
from prefed.models.gpt import GPT
from prefed.models.lora import Adapted, lora
from tests.helpers.adapters import (
    MICRO,
    OPTIONS,
    ROUNDS,
    SETTINGS,
    adapted,
    as_given,
    attentive,
    base,
    by_hand,
    clients,
)

pytestmark = pytest.mark.long
WAYS: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "in parts": {"engine": "sequential", "micro_batch": MICRO},
    "two workers": {"engine": "sequential", "micro_batch": MICRO, "workers": 2},
    "vectorised": {"engine": "vectorised"},
}
A = "*lora_A*"


def data() -> prefed.FederatedData:
    return prefed.FederatedData(as_given(clients()), pad=0)


def run(model: nn.Module, frozen: tuple[str, ...] = (), **more: Any) -> prefed.Result:
    algorithm = prefed.PreFed(**OPTIONS, freeze=frozen)
    return prefed.simulate(algorithm, model, data(), **SETTINGS | more)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("frozen", [(), (A,)])
@pytest.mark.parametrize(("make", "way"), [
    (adapted, "in parts"), (adapted, "two workers"), *((attentive, way) for way in WAYS)
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_it_equals_a_loop_by_hand(
    make: Any, way: str, dtype: torch.dtype, tolerance: float, frozen: tuple[str, ...]
) -> None:
    model = make().to(dtype)
    result = run(model, frozen, **WAYS[way])
    wanted = by_hand(model, clients(), "lora_A" if frozen else "nothing")
    first = dict(model.named_parameters())
    moved = 0
    for name, value in result.model.named_parameters():
        torch.testing.assert_close(value, wanted.get_parameter(name), rtol=0, atol=tolerance)
        moved += not torch.equal(value, first[name])
    adapters = 4 if make is adapted else 2
    assert moved == (adapters if frozen else 2 * adapters) + 2


@pytest.mark.slow
@pytest.mark.process
def test_compiled() -> None:
    model = attentive().double()
    result, wanted = run(model, engine="compiled"), by_hand(model, clients())
    for name, value in trained(result.model).items():
        torch.testing.assert_close(value, wanted.get_parameter(name), rtol=0, atol=1e-10)


def test_after_a_resume_and_from_disk(tmp_path: Path) -> None:
    """A file holds the adapters alone, and belongs to one base."""
    peft, out = pytest.importorskip("peft"), tmp_path / "run"
    settings: dict[str, Any] = {"engine": "sequential", "micro_batch": MICRO}
    whole = run(adapted(), **settings)
    run(adapted(), **settings, rounds=1, out=out)
    resumed = run(adapted(), **settings, out=out, resume=True)
    assert torch.equal(whole.weights, resumed.weights)

    assert {*safetensors.torch.load_file(out / "model.safetensors")} == {*trained(adapted())}
    with safetensors.safe_open(out / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert about["base"] == "PeftModelForSequenceClassification"
    assert len(about["base_sha256"]) == 16
    state = safetensors.torch.load_file(out / "checkpoints" / f"{ROUNDS:06d}" / "state.safetensors")
    assert max(value.numel() for value in state.values()) == len(whole.weights)

    loaded = prefed.load(out, model=adapted()).model
    for name, value in whole.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    loaded.save_pretrained(tmp_path / "peft")  # type: ignore[operator]
    read = peft.PeftModel.from_pretrained(base(), tmp_path / "peft").state_dict()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(read[name], value)
    with pytest.raises(
        PrefedError, match=r"was trained on the frozen weights of \w+ with the hash"
    ):
        prefed.load(out, model=adapted(seed=5))
    with pytest.raises(PrefedError, match="does not fit the model"):
        prefed.load(out, model=nn.Linear(3, 2))


def test_what_the_option_froze_is_base(tmp_path: Path) -> None:
    result = run(adapted(), (A,), engine="sequential", out=tmp_path / "run")
    loaded = prefed.load(tmp_path / "run", model=adapted()).model
    for name, value in result.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def product(model: nn.Module) -> Tensor:
    factors = {n: p for n, p in model.named_parameters() if "lora_" in n}
    pairs = [
        (p, factors[n.replace("lora_A", "lora_B")]) for n, p in factors.items() if "lora_A" in n
    ]
    return torch.cat([(b @ a).detach().flatten() for a, b in pairs])


@pytest.mark.parametrize("frozen", [(), (A,)])
def test_with_a_frozen_the_mean_of_the_products_is_exact(frozen: tuple[str, ...]) -> None:
    """After a round, of the clients' B_i A_i: to the last bits if A stands still, else not."""
    model, of = attentive().double(), as_given(clients())
    with torch.no_grad():  # from zero it would be exact for a round whatever stands still
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(3))
    algorithm = prefed.FedAvg(client_lr=0.3, freeze=frozen)
    settings: dict[str, Any] = {"rounds": 1, "local_steps": 5, "batch_size": None}
    settings |= {"engine": "sequential"}
    alone = [
        product(
            prefed.simulate(algorithm, model, prefed.FederatedData([c], pad=0), **settings).model
        )
        for c in of
    ]
    together = prefed.simulate(algorithm, model, prefed.FederatedData(of, pad=0), **settings)
    wanted = torch.stack(alone).mean(0)
    off = float((product(together.model) - wanted).norm() / (wanted - product(model)).norm())
    assert off < 1e-12 if frozen else off > 1e-3, off


def test_what_is_frozen_neither_travels_nor_is_counted() -> None:
    half, whole = (run(adapted(), frozen, engine="sequential") for frozen in ((A,), ()))
    of_a = sum(p.numel() for n, p in adapted().named_parameters() if "lora_A" in n)
    assert len(whole.weights) - len(half.weights) == of_a
    bytes_up = [r.history[0]["bytes_up"] for r in (half, whole)]
    assert bytes_up[1] - bytes_up[0] == 3 * 4 * 4 * of_a  # w, m and P of four clients
    with pytest.raises(PrefedError, match=r"freeze: '\*lora_C' names no parameter"):
        run(adapted(), ("*lora_C",))
    with pytest.raises(PrefedError, match="all parameters would stay as they are"):
        run(adapted(), ("*",))


def test_the_model_is_that_of_peft() -> None:
    """The same layers, first factors of the same distribution, the same output and gradients."""
    peft = pytest.importorskip("peft")
    of = {"name": "gpt", "width": 12, "layers": 2, "heads": 3}
    torch.manual_seed(0)
    ours = lora((9,), 13, of, targets=("*qkv", "*mlp.0"), rank=3, alpha=6).double()
    torch.manual_seed(0)
    plain = GPT((9,), 13, width=12, layers=2, heads=3).double()
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["qkv", "mlp.0"])
    theirs = peft.get_peft_model(plain, config)
    with torch.no_grad():
        for name, layer in ours.named_modules():
            if isinstance(layer, Adapted):
                layer.lora_B.normal_()
                other = theirs.base_model.model.get_submodule(name)
                other.lora_A["default"].weight.copy_(layer.lora_A)
                other.lora_B["default"].weight.copy_(layer.lora_B)
    x = torch.randint(13, (4, 9))
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)
    sizes = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (ours, theirs)]
    assert sizes[0] == sizes[1] == 2 * (3 * (12 + 36) + 3 * (12 + 48))
    for model in (ours, theirs):
        model(x).square().sum().backward()
    found = dict(theirs.base_model.model.named_parameters())
    for name, p in ours.named_parameters():
        if p.requires_grad:
            assert p.grad is not None
            torch.testing.assert_close(p.grad, found[f"{name}.default.weight"].grad)


def test_a_base_from_an_earlier_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randint(13, (3, 6, 9))
    of = prefed.FederatedData(list(zip(x, x.roll(-1, 2), strict=True)))
    settings: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 3}
    small: dict[str, Any] = {"width": 12, "layers": 2, "heads": 3}
    first = prefed.simulate(prefed.FedAvg(client_lr=0.1), GPT((9,), 13, **small), of,
                            out=tmp_path / "base", **settings)  # fmt: skip
    kind = {"name": "gpt", **small}
    model = lora((9,), 13, kind, base=str(tmp_path / "base" / "model.safetensors"))
    assert torch.equal(model(x[0]), first.model(x[0]))
    result = prefed.simulate(prefed.PreFed(client_lr=0.01), model, of, **settings)
    assert not torch.equal(result.model(x[0]), first.model(x[0]))
    with pytest.raises(PrefedError, match=r"base: .* does not fit the model"):
        lora((9,), 14, kind, base=str(tmp_path / "base" / "model.safetensors"))
    with pytest.raises(PrefedError, match="targets: no linear layer of gpt is named nothing"):
        lora((9,), 13, kind, targets=("nothing",))
