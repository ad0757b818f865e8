"""What several runs say together: groups of seeds, ranked, with intervals and paired tests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from prefed.experiments.measures import ACCURACY, Measure, duration, measure, megabytes, merit
from prefed.experiments.stats import bootstrap_interval, sign_flip_p
from prefed.experiments.stored_runs import StoredRun

FAIRNESS = ("client_accuracy_worst_tenth", "client_accuracy_std")
"""What is shown beside the accuracy of runs whose clients were evaluated one by one."""


def headings(best: "Group", target: float) -> list[str]:
    """Of a ranking, after the label: what `Group.cells` fills. The target is an accuracy."""
    measure, split = best.measure, best.split
    to_target = [f"rounds\nto {target:.0%}", f"MB up\nto {target:.0%}"]
    if best.timed:
        to_target.append(f"virtual\nto {target:.0%}")
    return [
        f"{measure.heading(split)}\n[95 % interval]",
        "p vs\nbest",
        *(["worst 10 %\n/ std"] if best.fair else []),
        *(["epsilon"] if best.private else []),
        *(to_target if measure is ACCURACY else []),
        "MB\nup",
        "MB\ndown",
        "s",
        *(["virtual\ntime", "wasted\n%"] if best.timed else []),
    ]


@dataclass
class Group:
    """The runs of one config that differ in nothing but the seed."""

    label: str
    runs: list[StoredRun]
    p_value: float | None = None
    """Of the paired test against the best group; None for the best itself, or without pairs."""
    measure: Measure = ACCURACY
    """What the groups of a ranking are compared by."""
    fair: bool = False
    """Whether a ranking has a column for FAIRNESS."""
    timed: bool = False
    """Whether a ranking has columns of virtual time."""
    private: bool = False
    """Whether a ranking has a column for the privacy that runs have spent."""

    @property
    def split(self) -> str:
        """What the runs were evaluated on."""
        return self.runs[0].split

    def values(self) -> dict[int, float]:
        """What each finished run is judged by, by seed."""
        found = {run.seed: self._result(run) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def merit(self) -> tuple[bool, float]:
        """What groups are ranked by, more is better. Runs that have not ended do not count."""
        ended = (run for run in self.runs if run.status in ("finished", "diverged"))
        return merit([self._result(run) for run in ended], self.measure)

    def _result(self, run: StoredRun) -> float | None:
        return self.measure.final(run) if run.status == "finished" else None

    def mean(self) -> float | None:
        values = self.values()
        return fmean(values.values()) if values else None

    def interval(self) -> tuple[float, float] | None:
        """95 % bootstrap interval of the mean over seeds."""
        values = self.values()
        return bootstrap_interval(list(values.values())) if len(values) > 1 else None

    def count(self, status: str) -> int:
        return sum(run.status == status for run in self.runs)

    def to_target(self, target: float) -> tuple[float, float, int] | None:
        """Mean rounds and mean bytes up to that accuracy, and how many runs reached it."""
        hits = [(run, hit) for run in self.runs if (hit := run.reached(target)) is not None]
        if not hits:
            return None
        sent = fmean(run.total("bytes_up", hit["round"]) for run, hit in hits)
        return fmean(hit["round"] for _, hit in hits), sent, len(hits)

    def time_to(self, target: float) -> float | None:
        """Mean virtual seconds to that accuracy, of the runs that reached it."""
        hits = [hit for run in self.runs if run.timed and (hit := run.reached(target)) is not None]
        return fmean(hit["seconds_virtual"] for hit in hits) if hits else None

    def _time(self) -> list[str]:
        """The virtual time of a run, and the share of device seconds that came to nothing."""
        runs = [run for run in self.runs if run.timed]
        if not runs:
            return ["-", "-"]
        used, lost = (
            sum(float(r.get(key) or 0.0) for run in runs for r in run.history)
            for key in ("device_seconds", "wasted_device_seconds")
        )
        mean = fmean(run.history[-1]["seconds_virtual"] for run in runs)
        return [duration(mean), f"{100 * lost / used:.1f}" if used else "-"]

    def mean_total(self, key: str) -> float:
        return fmean(run.total(key) for run in self.runs)

    def cells(self, target: float) -> list[str]:
        """The columns of a ranking, as text."""
        mean, interval, reached = self.mean(), self.interval(), self.to_target(target)
        text = self.measure.text
        value = "-" if mean is None else text(mean)
        if interval is not None:
            value += f" [{text(interval[0])}, {text(interval[1])}]"
        for status in ("diverged", "interrupted", "running"):
            if count := self.count(status):
                value += f" ({count}/{len(self.runs)} {status})"
        rounds = sent = "-"
        if reached is not None:
            some = f" ({reached[2]}/{len(self.runs)})" if reached[2] < len(self.runs) else ""
            rounds, sent = f"{reached[0]:.0f}{some}", megabytes(reached[1])
        time = self.time_to(target)
        virtual = ["-" if time is None else duration(time)] if self.timed else []
        return [
            value,
            "" if self.p_value is None else f"{self.p_value:.2g}",
            *([self._fairness()] if self.fair else []),
            *([self._epsilon()] if self.private else []),
            *([rounds, sent, *virtual] if self.measure is ACCURACY else []),
            megabytes(self.mean_total("bytes_up")),
            megabytes(self.mean_total("bytes_down")),
            f"{self.mean_total('seconds'):.1f}",
            *(self._time() if self.timed else []),
        ]

    def _fairness(self) -> str:
        ended = [run for run in self.runs if run.status == "finished"]
        found = [[v for run in ended if (v := run.final(key)) is not None] for key in FAIRNESS]
        return "/".join(f"{100 * fmean(values):.1f}" for values in found if values) or "-"

    def _epsilon(self) -> str:
        """The most that any of the runs has spent; nothing hides those that are not private."""
        found = [run.epsilon for run in self.runs]
        return "-" if None in found else f"{max(e for e in found if e is not None):.4g}"


def group(runs: Sequence[StoredRun]) -> list[Group]:
    """Those on the test set, then those on a validation split; of each the best first."""
    by_config: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_config.setdefault(json.dumps(_without_seed(run.config), sort_keys=True), []).append(run)
    members = list(by_config.values())
    labels = _labels([_without_seed(runs[0].config) for runs in members])
    by = measure(runs)
    fair = any(FAIRNESS[0] in record for run in runs for record in run.history[-1:])
    timed = any(run.timed for run in runs)
    private = any(run.epsilon is not None for run in runs)
    groups = [
        Group(label, own, measure=by, fair=fair, timed=timed, private=private)
        for label, own in zip(labels, members, strict=True)
    ]
    groups.sort(key=lambda g: (g.split == "test", g.merit()), reverse=True)
    best: dict[str, Group] = {}
    for other in groups:
        first, values = best.setdefault(other.split, other).values(), other.values()
        paired = [first[seed] - values[seed] for seed in first if seed in values]
        if other is not best[other.split] and len(paired) > 1:
            other.p_value = sign_flip_p(paired)
    return groups


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables with dotted names: "algorithm.client_lr"."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _without_seed(config: dict[str, Any]) -> dict[str, Any]:
    """Without the hashes of first weights and samples, too, which runs of Python have: they may
    depend on the seed."""
    rest = {key: value for key, value in config.items() if key != "seed"}
    for name in ("model", "data"):
        if "python" in (part := rest.get(name, {})):
            rest[name] = {key: value for key, value in part.items() if key != "sha256"}
    return rest


def _labels(configs: list[dict[str, Any]]) -> list[str]:
    """The algorithm's name, and where it occurs more than once the options that differ."""
    flat = [flatten(config) for config in configs]
    for mine in flat:
        mine.pop("data.validation", None)  # the same setting, once more on the test set
    labels = []
    for mine in flat:
        name = str(mine["algorithm.name"])
        same = [other for other in flat if other["algorithm.name"] == name]
        keys = sorted({k for other in same for k in other} - {"algorithm.name"})
        differing = [k for k in keys if len({str(other.get(k)) for other in same}) > 1]
        options = [f"{k.removeprefix('algorithm.')}={mine[k]}" for k in differing if k in mine]
        labels.append(" ".join([name, *options]))
    return labels
