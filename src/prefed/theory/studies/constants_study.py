"""The constants of a config, and both variances coordinate by coordinate."""

from collections.abc import Sequence

from torch import Tensor

from prefed.experiments.config import Config, load
from prefed.report.figures import Line, draw_lines
from prefed.report.sections import Picture, Section
from prefed.theory.constants import Constants, measure
from prefed.theory.objective import Objective, Tick
from prefed.theory.studies.common import WARM_UP, Found, constants_table, own_rounds


def pieces(config: Config) -> int:
    """The config's own run, L-BFGS, and variances and curvature at four points."""
    return WARM_UP + 1 + 2 * 4


def study(source: str, changes: Sequence[str], tick: Tick) -> Found:
    config = load(source, changes)
    run = config.make_run()
    objective = Objective.of(run)
    path = []
    for _ in range(2):
        own_rounds(run, WARM_UP // 2, tick)
        path.append(run.server.weights.clone())
    found, _ = measure(objective, path, tick)
    numbers = {"constants": found.to_dict(), "d": objective.d}
    tensors = {"local": found.local_coordinates, "global": found.spread_coordinates}
    return Found(config, [show(found)], numbers, tensors)


def show(found: Constants) -> Section:
    lines = [
        ranked("local, σ_l²", found.local_coordinates),
        ranked("global, σ_g²", found.spread_coordinates),
    ]
    figure = draw_lines(lines, "coordinate, by rank", "variance of the gradient", log_x=True)
    return Section(
        "Constants",
        [f"Measured on {found.clients} clients at {found.points} points: the first weights, two on "
         f"the way of the config's own algorithm, and the best that L-BFGS found. The assumptions "
         f"speak of all weights, so L, G and the variances are lower estimates of what they name.",
         "Intervals are for 95 %."],
        [constants_table(found)],
        [Picture("coordinates", "Variance of each coordinate", figure)],
    )  # fmt: skip


def ranked(label: str, variances: Tensor) -> Line:
    """The largest first, without those that are zero but for rounding."""
    values = variances.sort(descending=True).values.double().cpu().numpy()
    shown = values[values > 1e-9 * values[0]]
    return Line(label, list(range(1, len(shown) + 1)), list(shown))
