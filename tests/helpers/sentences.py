"""Sentences of unequal length as a data set and a model of a user's own, by name in a config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prefed.data import Dataset

WORDS, CLASSES = 9, 3


class Reader(nn.Module):
    """The mean of a sentence's words, where the mask says that there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1).to(self.last.weight.dtype)
        mean = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        found: Tensor = self.last(mean)
        return found


def reader(inputs: Any, classes: int) -> nn.Module:
    assert inputs.keys() == {"input_ids", "attention_mask"}
    assert classes == CLASSES
    return Reader()


def texts(samples: int = 60) -> Dataset:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 7, (samples,), generator=draw).tolist()
    rows = [torch.randint(1, WORDS, (n,), generator=draw) for n in lengths]
    y = torch.stack([row.sum() % CLASSES for row in rows])
    x = {"input_ids": rows, "attention_mask": [torch.ones_like(row) for row in rows]}
    return Dataset(x, y, (x, y), pad=0)
