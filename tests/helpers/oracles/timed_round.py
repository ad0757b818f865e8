"""A synchronous round in virtual time, one event after another, in plain Python.

Written from the description in docs/devices.md, not from the source.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass


@dataclass
class Asked:
    """A client of the cohort, and what its device can do."""

    steps: int
    steps_per_second: float
    up: float
    down: float
    latency: float
    vanishes: float = math.inf
    """Seconds after the start of the round."""


@dataclass
class Outcome:
    lasts: float
    taken: dict[int, int]
    """By place in the cohort: the local steps behind the answer."""
    device_seconds: float
    wasted_seconds: float
    wasted_up: int


def timed_round(
    asked: list[Asked], wanted: int, down: int, up: int, deadline: float, partial: bool
) -> Outcome:
    """Play the events of a round in the order of their times."""
    events: list[tuple[float, int, str]] = []
    steps, finish = {}, {}
    for place, its in enumerate(asked):
        arrives = its.latency + down / its.down
        returns = its.latency + up / its.up
        steps[place] = its.steps
        if partial and arrives + its.steps / its.steps_per_second + returns > deadline:
            most = 0
            while arrives + (most + 1) / its.steps_per_second + returns <= deadline:
                most += 1
            steps[place] = most or its.steps
        finish[place] = arrives + steps[place] / its.steps_per_second + returns
        heapq.heappush(events, (finish[place], place, "answers"))
        if its.vanishes < finish[place]:
            heapq.heappush(events, (its.vanishes, place, "vanishes"))
    taken: dict[int, int] = {}
    left = {*range(len(asked))}
    stopped: dict[int, float] = {}
    now = 0.0
    while left and len(taken) < wanted:
        time, place, what = heapq.heappop(events)
        if time > deadline:
            now = deadline
            break
        if place not in left:
            continue
        now = time
        left.remove(place)
        stopped[place] = now
        if what == "answers":
            taken[place] = steps[place]
    stopped |= dict.fromkeys(left, now)
    wasted_up = 0
    for place, time in stopped.items():
        if place not in taken:
            begins = finish[place] - up / asked[place].up
            wasted_up += math.floor(min(up, max(0.0, (time - begins) * asked[place].up)))
    wasted = sum(time for place, time in stopped.items() if place not in taken)
    return Outcome(now, taken, sum(stopped.values()), wasted, wasted_up)
