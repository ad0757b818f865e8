"""What the attacks reach, in the clear and afterwards: the table of docs/security.md.

python -m tests.attacks.results      runs them all and writes the table
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from tests.attacks import attacks as a
from tests.attacks.victims import (
    CLIENTS,
    Victims,
    attacked,
    behind_noise,
    images,
    linear,
    within_a_sum,
)
from tests.helpers import made_tables

TABLE = "attacks"
HEAD = ("attack", "measured by", "by guessing", "in the clear", "behind noise", "within a sum")
WORDS, SIZE, LENGTH = 200, 8, 6


@dataclass(frozen=True)
class Reached:
    """A number on each side."""

    guessed: float
    clear: float
    noise: float
    sum: float


def sides(victims: Victims, attack: Callable[[int, a.Seen], float]) -> tuple[float, float, float]:
    """The median over clients of what an attack reaches: in the clear, behind noise, in a sum."""
    views = (victims.uploads, behind_noise(victims), within_a_sum(victims))
    clear, noise, total = (
        statistics.median(attack(client, seen) for client, seen in enumerate(view))
        for view in views
    )
    return clear, noise, total


@cache
def inversion(momentum: str, rounds: int = 0) -> Reached:
    """One sample, one step: the error of the image that is computed, as a share of its norm."""
    x, y = images()
    samples = [(x[n : n + 1], y[n : n + 1]) for n in range(CLIENTS)]
    victims = attacked(linear(), samples, rounds=rounds, steps=1, batch=1, momentum=momentum)

    def error(guess: Tensor, truth: Tensor) -> float:
        guess = guess.nan_to_num().abs() if momentum != "average" else guess.nan_to_num()
        return float((guess.clamp(0, 1) - truth).norm() / truth.norm())

    def attack(client: int, seen: a.Seen) -> float:
        gradient = a.gradient_of_one_step(seen, victims.sent)
        guess = a.input_of_linear_layer(gradient, 64, 10)
        return error(guess, samples[client][0].flatten())

    usual = x[CLIENTS:].flatten(1).mean(0)
    guessed = statistics.median(error(usual, one.flatten()) for one, _ in samples)
    return Reached(guessed, *sides(victims, attack))


@cache
def trained() -> Victims:
    """Ten samples a client."""
    x, y = (values[: CLIENTS * 10].split(10) for values in images())
    samples = list(zip(x, y, strict=True))
    return attacked(linear(), samples, rounds=30, steps=10, batch=2, lr=0.003)


def membership(by: str) -> Reached:
    """A model that is trained: how well the samples of a client are told from those of nobody."""
    victims = trained()
    x, y = (values[CLIENTS * 10 :][:400] for values in images())
    weights = victims.sent["weights"]
    outside = a.gradients(victims.model, weights, x, y)
    score = a.membership_by_spread if by == "P" else a.membership_by_change

    def attack(client: int, seen: a.Seen) -> float:
        own = a.gradients(victims.model, weights, *victims.samples[client])
        scores = score(seen, victims.sent, torch.cat([own, outside]))
        return a.auc(scores[: len(own)], scores[len(own) :])

    return Reached(0.5, *sides(victims, attack))


class Text(nn.Module):
    """The mean of the words' vectors, classified."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, SIZE)
        self.out = nn.Linear(SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(x).mean(1))
        return found


def texts() -> list[tuple[Tensor, Tensor]]:
    """Each client writes with thirty of the words."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(CLIENTS):
        own = torch.randperm(WORDS, generator=generator)[:30]
        x = own[torch.randint(len(own), (40, LENGTH), generator=generator)]
        samples.append((x, torch.randint(2, (40,), generator=generator)))
    return samples


@cache
def vocabulary(rounds: int = 2) -> tuple[Reached, bool]:
    """How well the words of a client are told from others, and whether exactly they move P."""
    samples, steps = texts(), 10
    victims = attacked(Text().double(), samples, rounds=rounds, steps=steps, batch=40)
    used = [torch.zeros(WORDS, dtype=torch.bool) for _ in samples]
    for one, (x, _) in zip(used, samples, strict=True):
        one[x.unique()] = True
    exact = True

    def attack(client: int, seen: a.Seen) -> float:
        scores = a.use_of_words(seen, victims.sent, WORDS, SIZE, steps)
        nonlocal exact
        if seen is victims.uploads[client]:
            exact &= bool(((scores > 0) == used[client]).all())
        return a.auc(scores[used[client]], scores[~used[client]])

    reached = sides(victims, attack)
    return Reached(0.5, *reached), exact


def cells() -> list[list[str]]:
    error, area = "error of the image", "area under the curve"
    rows = {
        ("an image from P and m after one step", error): inversion("average"),
        ("the same from P alone", error): inversion("reset"),
        ("membership by P, near the optimum", area): membership("P"),
        ("the same by the weights' change", area): membership("change"),
        ("the words a client has, by P", area): vocabulary()[0],
    }
    return [
        [*names, *(shown(v) for v in (r.guessed, r.clear, r.noise, r.sum))]
        for names, r in rows.items()
    ]


def shown(value: float) -> str:
    return f"{value:.2f}" if value > 1e-6 else "below 1e-6"


def main() -> None:
    for row in (table := cells()):
        print(*row, sep=" | ")
    made_tables.write(TABLE, HEAD, table)


if __name__ == "__main__":
    main()
