"""The cost of one PreFed step on the weights of a ResNet-18, against torch's fused Adam.

    python bench/step.py

All run in turn in one process, so that a slow moment of the machine hits all; the medians and
their ratios are printed. The plain lines of the rule stand beside: with and without blocks, and,
where there is a compiler, compiled as engine = "compiled" does it.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable

import torch

from prefed.core.layout import Layout
from prefed.rules import SGD, Covariance, Rule
from prefed.rules import rule as rules_base

D = 11_173_962
LOCAL_STEPS = 50
PASSES = 9


def stepper(rule: Rule) -> Callable[[], None]:
    """A round of local steps, with what begin and finish cost once a round."""
    w, g = torch.randn(D), torch.randn(D)
    fields = rule.fields(Layout.of([("w", w)]))
    state = {name: field.new(w) for name, field in fields.items()}

    def round_of_steps() -> None:
        rule.begin(w, state)
        for k in range(LOCAL_STEPS):
            rule.apply(w, g, state, 1e-3, k)
        rule.finish(w, state, 1e-3, LOCAL_STEPS)

    return round_of_steps


def compiled(rule: Rule) -> Callable[[], None]:
    """A round of local steps as the compiled engine runs them."""
    step = torch.compile(rule.step)
    w, g = torch.randn(D), torch.randn(D)
    state = {name: field.new(w) for name, field in rule.fields(Layout.of([("w", w)])).items()}

    def round_of_steps() -> None:
        for k in range(LOCAL_STEPS):
            step(w, g, state, 1e-3, k)

    round_of_steps()
    return round_of_steps


def adam() -> Callable[[], None]:
    parameter = torch.nn.Parameter(torch.randn(D))
    parameter.grad = torch.randn(D)
    optimiser = torch.optim.Adam([parameter], fused=True)

    def steps() -> None:
        for _ in range(LOCAL_STEPS):
            optimiser.step()

    return steps


def unblocked(run: Callable[[], None]) -> Callable[[], None]:
    def steps() -> None:
        block, rules_base.BLOCK = rules_base.BLOCK, D + 1
        run()
        rules_base.BLOCK = block

    return steps


def main() -> None:
    rule = Covariance()
    candidates = {
        "torch.optim.Adam(fused=True)": adam(),
        "PreFed's rule, as local_update runs it": stepper(rule.fused(torch.empty(0))),
        "PreFed's rule, plain lines in blocks": stepper(rule),
        "PreFed's rule, plain lines": unblocked(stepper(rule)),
        "SGD": stepper(SGD()),
    }
    if shutil.which("g++"):
        candidates["PreFed's rule, compiled"] = compiled(rule)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(PASSES):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / LOCAL_STEPS)
    base = statistics.median(times["torch.optim.Adam(fused=True)"])
    print(f"{D:,} float32 weights, {torch.get_num_threads()} threads, median of {PASSES} passes")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<40} {1e3 * median:7.2f} ms   {median / base:5.2f} x Adam")


if __name__ == "__main__":
    main()
