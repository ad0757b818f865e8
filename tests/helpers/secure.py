"""Secure aggregation without Flower's apps: a server's session and its parties, with records that
go through Flower's serialisation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from prefed.flower.secure import stages as m
from prefed.flower.secure.masks import Vector
from prefed.flower.secure.party import Party
from prefed.flower.secure.session import Session

STAGES = (m.KEYS, m.SHARES, m.MASKED, m.UNMASK)
COMMON = b"c" * 32
LENGTH = 11

Ask = Callable[[str, int, ConfigRecord], ConfigRecord]


def sent(record: ConfigRecord) -> ConfigRecord:
    return ConfigRecord.inflate(record.deflate())


def vectors_of(numbers: Collection[int], length: int = LENGTH, seed: int = 0) -> dict[int, Vector]:
    """Integers with a sign, of any size up to what leaves room for a sum."""
    draws = np.random.default_rng(seed)
    return {
        n: draws.integers(-(2**55), 2**55, length).view(np.uint64).copy() for n in sorted(numbers)
    }


class Talk:
    """A session, its parties, and all that the server got to see.

    gone   the stages that a node does not answer any more, from the first of them on
    ask    the server's message to a node, changed on the way
    """

    def __init__(
        self,
        numbers: Collection[int],
        gone: Mapping[int, str] | None = None,
        neighbours: int | None = None,
        ask: Ask | None = None,
        vectors: dict[int, Vector] | None = None,
    ) -> None:
        self.session = Session(numbers, round=3, neighbours=neighbours)
        self.session.common = COMMON
        self.parties = {n: Party() for n in numbers}
        self.vectors = vectors_of(numbers) if vectors is None else vectors
        self.gone, self.ask = gone or {}, ask
        self.seen: list[tuple[str, int, Any]] = []
        self.answers: dict[str, dict[int, Any]] = {stage: {} for stage in STAGES}
        self.told: dict[str, dict[int, Any]] = {stage: {} for stage in STAGES}

    def stage(self, stage: str) -> None:
        for number in self.session.asked(stage):
            first = self.gone.get(number)
            if first is not None and STAGES.index(stage) >= STAGES.index(first):
                continue
            ask = sent(self.session.ask(stage, number))
            if self.ask is not None:
                ask = self.ask(stage, number, ask)
            self.told[stage][number] = ask
            answer = self.answer(stage, number, ask)
            self.answers[stage][number] = answer
            self.take(stage, number, answer)
        self.session.check(stage)

    def answer(self, stage: str, number: int, ask: ConfigRecord) -> Any:
        party = self.parties[number]
        match stage:
            case m.KEYS:
                return sent(party.keys(ask, number))
            case m.SHARES:
                return sent(party.shares(ask))
            case m.MASKED:
                party.take_shares(ask)
                vector = self.vectors[number].copy()
                party.mask(vector, COMMON)
                return vector
        return sent(party.unmask(ask))

    def take(self, stage: str, number: int, answer: Any) -> None:
        session = self.session
        {
            m.KEYS: session.take_keys, m.SHARES: session.take_shares,
            m.MASKED: session.take_vector, m.UNMASK: session.take_secrets,
        }[stage](number, answer)  # fmt: skip

    def until(self, last: str) -> Talk:
        for stage in STAGES[: STAGES.index(last) + 1]:
            self.stage(stage)
        return self

    def total(self) -> Vector:
        return self.until(m.UNMASK).session.unmask()
