"""Models of Hugging Face, made on the spot: their logits are what losses are of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core.errors import PrefedError
from prefed.training import task as task_module
from tests.helpers.problems import local

pytestmark = pytest.mark.long
SIZES: dict[str, int] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def classifier() -> nn.Module:
    transformers = pytest.importorskip("transformers")  # takes seconds: not when it is collected
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=11, intermediate_size=8, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **SIZES,
    )  # fmt: skip
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


class Logits(nn.Module):
    """The wrapper that one would have to write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits.transpose(1, 2) if logits.dim() == 3 else logits


def data(sequences: bool) -> prefed.FederatedData:
    x = torch.randint(11, (4, 6, 8), generator=torch.Generator().manual_seed(1))
    y = x.roll(-1, 2) if sequences else x.sum(2) % 3
    clients = list(zip(x, y, strict=True))
    return prefed.FederatedData(clients, test=clients[0])


@pytest.mark.parametrize("make", [classifier, language_model])
def test_it_trains_as_with_a_wrapper(make: Any) -> None:
    settings: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 3}
    algorithm, of = prefed.PreFed(client_lr=0.01), data(make is language_model)
    plain, wrapped = (
        prefed.simulate(algorithm, model, of, engine="sequential", **settings)
        for model in (make(), Logits(make()))
    )
    assert torch.equal(plain.weights, wrapped.weights)
    for ours, theirs in zip(plain.history, wrapped.history, strict=True):
        assert ours["test_loss"] == theirs["test_loss"]
        assert ours["test_accuracy"] == theirs["test_accuracy"]
    assert type(plain.model) is type(make())
    assert plain.model(of.client(0).x).logits.dim() == (3 if make is language_model else 2)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("make", [classifier, language_model])
def test_masks_and_adapters_against_a_loop_by_hand(make: Any, adapters: bool) -> None:
    """Dicts as a tokeniser gives them, all weights or LoRA's: full batches, float64."""
    model = make().double()
    if adapters:
        peft = pytest.importorskip("peft")
        target = ["c_attn"] if make is language_model else ["query", "value"]
        lora = peft.LoraConfig(r=2, target_modules=target, fan_in_fan_out=make is language_model)
        model = peft.get_peft_model(model, lora).double()
    of, clients = data(make is language_model), []
    for client in range(3):
        x, y = of.client(client).all()
        mask = (torch.arange(8) < torch.arange(3, 9).unsqueeze(1)).long()
        clients.append(({"input_ids": x, "attention_mask": mask}, y))
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), model, prefed.FederatedData(clients), rounds=2,
        local_steps=3, batch_size=None, engine="sequential",
    )  # fmt: skip
    server = copy.deepcopy(model)
    for _ in range(2):
        trained = []
        for x, y in clients:
            own = copy.deepcopy(server).train()
            optimiser = torch.optim.SGD([p for p in own.parameters() if p.requires_grad], lr=0.1)
            for _ in range(3):
                optimiser.zero_grad()
                logits = own(**x).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
                loss.backward()
                optimiser.step()
            trained.append(dict(own.named_parameters()))
        with torch.no_grad():
            for name, p in server.named_parameters():
                p.copy_(torch.stack([t[name] for t in trained]).mean(0))
    wanted = dict(server.named_parameters())
    for name, p in result.model.named_parameters():
        torch.testing.assert_close(p, wanted[name], rtol=0, atol=1e-10)


def test_the_vectorised_engine() -> None:
    """Of BERT it warns: vmap trains the embedding of padding, which torch leaves alone."""
    settings: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 3}
    one, block = (
        prefed.simulate(
            prefed.FedAvg(), language_model().double(), data(True), engine=engine, **settings
        )
        for engine in ("sequential", "vectorised")
    )
    torch.testing.assert_close(one.weights, block.weights, rtol=0, atol=1e-9)
    with pytest.warns(prefed.EngineWarning, match="other gradients than autograd"):
        prefed.simulate(prefed.FedAvg(), classifier(), data(False), engine="vectorised", **settings)


def test_of_a_model_with_adapters_only_they_travel() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(language_model(), lora)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    result = prefed.simulate(
        prefed.PreFed(client_lr=0.01), model, data(True), rounds=2, local_steps=2, batch_size=3
    )
    assert len(result.weights) == adapters == 2 * (8 + 24)
    assert result.history[0]["bytes_up_weights"] == 4 * 4 * adapters
    after = dict(result.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    first = dict(model.named_parameters())
    trained = [n for n in after if n not in frozen and not torch.equal(after[n], first[n])]
    assert len(trained) == 2


def test_the_base_is_there_once_and_adapters_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(language_model(), lora)
    settings = prefed.Settings(rounds=1, local_steps=2, engine="sequential", workers=2)
    run = prefed.Run(prefed.FedAvg(), model, data(True), settings)
    run.prepare()
    workers = local(run).workers
    assert workers is not None
    held = [engine.task.flat.module for engine in workers.engines]  # type: ignore[attr-defined]

    def frozen(module: nn.Module) -> list[int]:
        return [p.data_ptr() for p in module.parameters() if not p.requires_grad]

    assert len(held) == 2
    assert frozen(held[0]) == frozen(held[1])
    result = run.run()
    assert frozen(held[0]) == frozen(result.model)
    assert not {*frozen(model)} & {*frozen(result.model)}
    result.model.save_pretrained(tmp_path)  # type: ignore[operator]
    read = peft.PeftModel.from_pretrained(language_model(), tmp_path)
    trained = dict(result.model.named_parameters())
    for name, value in read.named_parameters():
        assert torch.equal(value, trained[name])


def test_an_output_that_is_no_tensor_is_told() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    of = prefed.FederatedData([(torch.randn(4, 5), torch.arange(4) % 3)])
    with pytest.raises(PrefedError, match=r"model: its output should be a tensor.*is a tuple"):
        prefed.simulate(prefed.FedAvg(), Pair(5, 3), of, rounds=1, local_steps=1)


def test_large_outputs_are_evaluated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    run = prefed.Run(prefed.FedAvg(), language_model(), data(True),
                     prefed.Settings(rounds=1, local_steps=1))  # fmt: skip
    assert run.task.numbers_out == 11 * 8
    whole = run.evaluate()
    monkeypatch.setattr(task_module, "LARGEST_OUTPUT", 2 * 11 * 8)
    sizes: list[int] = []
    forward = run.task.forward

    def counted(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return forward(x)

    monkeypatch.setattr(run.task, "forward", counted)
    parts = run.evaluate()
    assert sizes == [2, 2, 2]
    assert parts["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-6)
    assert parts["test_accuracy"] == whole["test_accuracy"]
