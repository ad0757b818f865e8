"""A small BERT with LoRA adapters (PEFT), and a federated loop in plain PyTorch that trains it:
dict batches, parameter groups, accumulated gradients and a frozen base, parameter by parameter."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from prefed.core import draws
from prefed.models.lora import lora
from tests.helpers.sentences import CLASSES, WORDS, texts

ROUNDS, STEPS, BATCH, MICRO = 3, 3, 5, 2
LR, BETA1, BETA2, TAU, DECAY, B_SCALE = 0.02, 0.9, 0.8, 1e-3, 0.3, 2.0
OPTIONS: dict[str, Any] = {
    "client_lr": LR, "beta1": BETA1, "beta2": BETA2, "tau": TAU, "momentum": "average",
    "decoupled_weight_decay": DECAY,
    "groups": [
        {"params": "@vectors", "decoupled_weight_decay": 0.0},
        {"params": "*lora_B*", "lr_scale": B_SCALE},
    ],
}  # fmt: skip
SETTINGS: dict[str, Any] = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": BATCH}
TARGETS = ["query", "value"]


def base(seed: int = 0) -> nn.Module:
    transformers = pytest.importorskip("transformers")  # takes seconds: not when it is collected
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=12, num_labels=CLASSES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=8,
    )  # fmt: skip
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def adapted(seed: int = 0) -> nn.Module:
    """The adapters and the last layer train."""
    peft = pytest.importorskip("peft")
    model, torch_seed = base(seed), torch.manual_seed(1)
    assert torch_seed is not None
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=TARGETS, lora_dropout=0.0
    )
    found: nn.Module = peft.get_peft_model(model, lora)
    return found


def classifier(inputs: Any, classes: int) -> nn.Module:
    """By name in a config."""
    assert classes == CLASSES
    return adapted()


class Attentive(nn.Module):
    """One head of attention over the words that the mask shows. Unlike BERT it does not look at
    the numbers in its mask before it decides what to compute, so vmap can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.query, self.value = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        h = self.words(input_ids)
        scores = (self.query(h) @ h.mT).masked_fill(attention_mask.unsqueeze(1) == 0, -1e9)
        mixed = h + scores.softmax(-1) @ self.value(h)
        mask = attention_mask.unsqueeze(-1).to(h.dtype)
        mean = (mixed.tanh() * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.head(mean))


def attentive(seed: int = 0) -> nn.Module:
    """The same with prefed's own adapters; its last layer trains as well."""
    torch.manual_seed(seed)
    name = {"name": "tests.helpers.adapters:Attentive"}
    model = lora(None, CLASSES, name, targets=("query", "value"), rank=2, alpha=4)
    model.get_submodule("head").requires_grad_()
    return model


Client = tuple[list[Tensor], Tensor]


def clients(count: int = 4) -> list[Client]:
    whole = texts(10 * count)
    padded = (whole.x[name].padded() for name in ("input_ids", "attention_mask"))
    rows = [ids[mask > 0] for ids, mask in zip(*padded, strict=True)]
    found, first = [], 0
    for size in range(5, 5 + count):
        found.append((rows[first : first + size], whole.y[first : first + size]))
        first += size
    return found


def as_given(of: list[Client]) -> list[Any]:
    return [
        ({"input_ids": rows, "attention_mask": [torch.ones_like(row) for row in rows]}, y)
        for rows, y in of
    ]


def by_hand(model: nn.Module, of: list[Client], frozen: str = "nothing") -> nn.Module:
    """PreFed with groups: w, m and P averaged after each round."""
    server = copy.deepcopy(model).train()
    names = [n for n, p in server.named_parameters() if p.requires_grad and frozen not in n]
    weights: dict[str, Tensor] = dict(server.named_parameters())
    m, P = ({n: torch.zeros_like(weights[n]) for n in names} for _ in range(2))
    for round in range(ROUNDS):
        ended = []
        for client, (rows, y) in enumerate(of):
            own, own_m, own_P = copy.deepcopy(server), copy.deepcopy(m), copy.deepcopy(P)
            drawn = draws.batches(0, round, client, len(rows), STEPS * BATCH).tolist()
            for k in range(STEPS):
                accumulate(own, rows, y, drawn[k * BATCH : (k + 1) * BATCH])
                for name in names:
                    step(name, own.get_parameter(name), own_m[name], own_P[name])
            trained: dict[str, Tensor] = dict(own.named_parameters())
            ended.append((trained, own_m, own_P))
        with torch.no_grad():
            for name in names:
                for into, which in ((weights, 0), (m, 1), (P, 2)):
                    into[name].copy_(torch.stack([e[which][name] for e in ended]).mean(0))
    return server


def accumulate(model: nn.Module, rows: list[Tensor], y: Tensor, numbers: list[int]) -> None:
    """The gradient of a batch, a few samples at a time, each part padded to its longest."""
    model.zero_grad()
    for first in range(0, len(numbers), MICRO):
        some = numbers[first : first + MICRO]
        ids = pad_sequence([rows[n] for n in some], batch_first=True)
        mask = pad_sequence([torch.ones_like(rows[n]) for n in some], batch_first=True)
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = nn.functional.cross_entropy(logits, y[some], reduction="sum") / len(numbers)
        loss.backward()


@torch.no_grad()
def step(name: str, w: nn.Parameter, m: Tensor, P: Tensor) -> None:
    assert w.grad is not None
    scale = B_SCALE if "lora_B" in name else 1.0
    decay = DECAY if w.dim() > 1 else 0.0
    m.copy_(BETA1 * m + (1 - BETA1) * w.grad)
    P.copy_(BETA2 * P + (1 - BETA2) * (w.grad - m) ** 2)
    w.sub_(scale * (LR * decay * w + LR * m / (P.sqrt() + TAU)))
