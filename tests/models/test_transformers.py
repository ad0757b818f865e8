"""The transformers against those of others with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.experiments.config import load
from prefed.models.attention import TransformerBlock, turned
from prefed.models.gpt import GPT
from prefed.models.vit import ViT


def copied(block: TransformerBlock, width: int, heads: int) -> nn.TransformerEncoderLayer:
    other = nn.TransformerEncoderLayer(
        width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.in_proj_weight": "qkv.weight", "self_attn.in_proj_bias": "qkv.bias",
        "self_attn.out_proj.weight": "out.weight", "self_attn.out_proj.bias": "out.bias",
        "linear1.weight": "mlp.0.weight", "linear1.bias": "mlp.0.bias",
        "linear2.weight": "mlp.2.weight", "linear2.bias": "mlp.2.bias",
        "norm1.weight": "norm1.weight", "norm1.bias": "norm1.bias",
        "norm2.weight": "norm2.weight", "norm2.bias": "norm2.bias",
    }  # fmt: skip
    own = block.state_dict()
    other.load_state_dict({theirs: own[ours] for theirs, ours in names.items()})
    return other


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_is_that_of_torch(causal: bool) -> None:
    torch.manual_seed(0)
    block = TransformerBlock(12, 3, causal=causal).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    wanted = copied(block, 12, 3)(x, src_mask=mask)
    torch.testing.assert_close(block(x), wanted, rtol=0, atol=1e-12)


@pytest.mark.long
def test_gpt_is_that_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = GPT((9,), 13, width=12, layers=2, heads=3).double()
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=9, n_embd=12, n_layer=2, n_head=3, activation_function="gelu",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double()
    parts = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj",
             "mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj"}  # fmt: skip
    found: dict[str, Tensor] = {}
    for name, value in ours.state_dict().items():
        if name.startswith("blocks."):
            _, number, *rest, kind = name.split(".")
            layer = ".".join(rest)
            flip = kind == "weight" and not layer.startswith("norm")  # a Conv1D has (in, out)
            found[f"transformer.h.{number}.{parts[layer]}.{kind}"] = value.T if flip else value
    found["transformer.wte.weight"] = ours.embed.weight
    found["lm_head.weight"] = ours.embed.weight
    assert ours.positions is not None
    found["transformer.wpe.weight"] = ours.positions
    found |= {f"transformer.ln_f.{k}": v for k, v in ours.norm.state_dict().items()}
    missing = theirs.load_state_dict(found, strict=False)
    assert not missing.unexpected_keys
    assert not [k for k in missing.missing_keys if "attn.bias" not in k]
    x = torch.randint(13, (4, 9))
    torch.testing.assert_close(ours(x).transpose(1, 2), theirs(x).logits, rtol=0, atol=1e-12)


def test_rotary_positions_are_relative() -> None:
    """Products of queries and keys depend on how far they are apart, not on where they are."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    rows = turned(q.expand(9, 8)) @ turned(k.expand(9, 8)).T
    for apart in range(-4, 5):
        along = rows.diagonal(apart)
        torch.testing.assert_close(along, along[:1].expand(len(along)), rtol=0, atol=1e-12)
    assert rows[0, 0] != pytest.approx(float(rows[0, 3]))
    whole = torch.complex(*q.expand(9, 8).chunk(2, -1))
    speeds = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turns = torch.exp(1j * torch.arange(9).unsqueeze(1) * speeds)
    wanted = torch.cat([(whole * turns).real, (whole * turns).imag], -1)
    torch.testing.assert_close(turned(q.expand(9, 8)), wanted, rtol=0, atol=1e-12)


def test_vit_cuts_an_image_into_patches() -> None:
    torch.manual_seed(0)
    model = ViT((2, 8, 12), 5, width=8, layers=1, heads=2, patch=4).double()
    x = torch.randn(3, 2, 8, 12, dtype=torch.float64)
    weight = model.embed.weight.view(8, 2, 4, 4)  # as a convolution has it
    patches = nn.functional.conv2d(x, weight, model.embed.bias, stride=4).flatten(2).mT
    h = torch.cat([model.first.expand(3, 1, 8), patches], 1) + model.positions
    block = model.blocks[0]
    assert isinstance(block, TransformerBlock)
    wanted = model.head(model.norm(copied(block, 8, 2)(h))[:, 0])
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["gpt", "vit"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_engines_agree(kind: str, dropout: float) -> None:
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    options: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "dropout": dropout}
    if kind == "gpt":
        x = torch.randint(7, (4, 6, 5), generator=draw)
        y, model = x.roll(-1, 2), prefed.MODELS.get("gpt")(inputs=(5,), classes=7, **options)
    else:
        x = torch.randn(4, 6, 1, 4, 4, generator=draw, dtype=torch.float64)
        y = torch.randint(3, (4, 6), generator=draw)
        model = prefed.MODELS.get("vit")(inputs=(1, 4, 4), classes=3, patch=2, **options)
    data = prefed.FederatedData(list(zip(x, y, strict=True)))
    one, block = (
        prefed.simulate(
            prefed.PreFed(client_lr=0.01), model.double(), data, rounds=2, local_steps=2,
            batch_size=4, engine=engine,
        )
        for engine in ("sequential", "vectorised")
    )  # fmt: skip
    torch.testing.assert_close(one.weights, block.weights, rtol=0, atol=1e-9)
    if kind == "gpt":  # tied weights are there once
        assert len(one.weights) == sum(p.numel() for p in model.parameters())
        named = dict(one.model.named_parameters(remove_duplicate=False))
        assert named["head.weight"] is named["embed.weight"]


def test_options_of_the_model_under_adapters_are_checked() -> None:
    with pytest.raises(prefed.PrefedError, match=r"of\.hiden: unknown option"):
        load("digits-iid", ['model={name="lora", of={name="mlp", hiden=[3]}}']).make_run()
