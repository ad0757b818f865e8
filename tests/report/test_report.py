"""The report in a real browser: no errors, curves switch, nothing overlaps at two widths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from prefed.experiments.config import load
from prefed.experiments.stored_runs import load_runs
from prefed.report import write_report

NAMES = ["fedavg", "fedadagrad", "fedadam", "fedyogi", "adaalter", "prefed", "prefedopt"]
HOSTILE = "<script>alert(1)</script>\"&'</pre>"


def made_up_runs(folder: Path) -> None:
    """7 algorithms x 3 seeds x 100 rounds on disk, one of them diverged, one with a vile name."""
    for i, name in enumerate(NAMES):
        for seed in range(3):
            run = folder / f"{name}-{seed}"
            run.mkdir(parents=True)
            config = load("digits-noniid", [f"algorithm={name}", f"seed={seed}", "rounds=100"])
            table = config.to_dict()
            if i == 0:
                table["algorithm"]["name"] = HOSTILE
            (run / "config.toml").write_text(tomli_w.dumps(table))
            lines = []
            for r in range(1, 101):
                accuracy = 1 - 0.9 / (1 + 0.1 * r * (i + 1)) - 0.01 * seed
                record: dict[str, Any] = {
                    "round": r, "train_loss": 2.3 / (1 + 0.2 * r), "test_loss": 2.3 / (1 + 0.1 * r),
                    "test_accuracy": accuracy, "bytes_up": 384400, "bytes_down": 384400,
                    "seconds": 0.04, "adaptive_share": 0.5, "median_step": 0.1,
                    "cohort": [r % 5, r % 3 + 5], "dropped": [5], "client_lr": 0.1, "drift": 0.5,
                    "client_accuracy_mean": accuracy, "client_accuracy_worst_tenth": accuracy / 2,
                    "client_accuracies": [accuracy * c / 50 for c in range(51)],
                }  # fmt: skip
                lines.append(record)
            if name == "prefedopt" and seed == 2:
                lines = [*lines[:40], {**lines[40], "train_loss": None, "test_accuracy": None}]
            else:
                (run / "model.safetensors").touch()
            (run / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
            (run / "environment.json").write_text('{"torch": "2.13.0"}')


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    made_up_runs(folder / "runs")
    write_report(load_runs(folder / "runs"), folder / "report.html", title=HOSTILE)
    return folder / "report.html"


@pytest.mark.slow
def test_its_figures(tmp_path: Path) -> None:
    """The figures of one run are in tests/cli/test_new_user.py."""
    made_up_runs(tmp_path / "runs")
    runs = load_runs(tmp_path / "runs")
    figures = write_report(runs, tmp_path / "report.html", figures=tmp_path / "report")
    assert {path.suffix for path in figures} == {".pdf", ".png"}
    assert all(path.stat().st_size > 5000 for path in figures)


@pytest.mark.long
def test_it_is_one_small_file_and_escapes_what_users_write(report: Path) -> None:
    html = report.read_text()
    assert report.stat().st_size < 8e6
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    notice = "/*! https://github.com/leeoniya/uPlot (v1.6.32) */"
    assert notice in html
    assert "https://" not in html.replace(notice, "")
    assert "Diverged: prefedopt, seed 2: in round 41" in html


LINES = "return document.getElementById('chart-accuracy').plot.series.filter(s => s.curve).length"
PLOT = "const plot = document.getElementById('chart-accuracy').plot; "


@pytest.mark.process
@pytest.mark.parametrize("width", [1280, 420])
def test_in_a_browser(report: Path, browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(report.as_uri())
    assert browser.execute_script("return document.readyState") == "complete"

    # Curves are switched off and on.
    buttons = browser.find_elements("css selector", "#legend button")
    assert len(buttons) == len(NAMES)
    assert browser.execute_script(LINES) == 7
    buttons[0].click()
    assert browser.execute_script(LINES) == 6
    assert buttons[0].get_attribute("aria-pressed") == "false"
    buttons[0].click()
    assert browser.execute_script(LINES) == 7
    for button in buttons:
        button.click()
    assert "switched off" in browser.find_element("id", "chart-accuracy").text
    for button in buttons:
        button.click()

    # Values under the pointer.
    from selenium.webdriver import ActionChains

    over = browser.find_element("css selector", "#chart-accuracy .u-over")
    ActionChains(browser).move_to_element(over).perform()
    tip = browser.find_element("css selector", "#chart-accuracy .tip")
    assert tip.is_displayed()
    assert "fedadam" in tip.text
    assert re.search(r"\d %", tip.text)

    # A drag zooms, a double click shows all again, and so does the button.
    scale = PLOT + "return [plot.scales.x.min, plot.scales.x.max]"
    assert browser.execute_script(scale) == [1, 100]
    drag = ActionChains(browser).move_to_element_with_offset(over, -40, 0).click_and_hold()
    drag.move_by_offset(80, 4).release().perform()
    low, high = browser.execute_script(scale)
    assert 1 < low < high < 100
    ActionChains(browser).double_click(over).perform()
    assert browser.execute_script(scale) == [1, 100]

    # Axes, smoothing, seeds, bands.
    def choose(control: str, value: str) -> None:
        field = f"const field = document.getElementById('{control}'); "
        script = f"field.value = '{value}'; field.dispatchEvent(new Event('input'))"
        browser.execute_script(field + script)

    for axis in ("x", "y"):
        kind = PLOT + f"return plot.scales.{axis}.distr"
        assert browser.execute_script(kind) == 1
        choose(f"{axis}-axis", "log")
        assert browser.execute_script(kind) == 3
        choose(f"{axis}-axis", "linear")
        assert browser.execute_script(kind) == 1
    first = PLOT + "return [plot.data[1][0], plot.data[1][1]]"
    a, b = browser.execute_script(first)
    choose("smoothing", "0.8")
    start, then = browser.execute_script(first)
    assert start == a
    assert then == pytest.approx((0.8 * a + b) / 1.8)
    choose("smoothing", "0")
    count = PLOT + "return plot.series.length"
    assert browser.execute_script(count) == 1 + 7 * 3
    browser.find_element("id", "seeds").click()
    assert browser.execute_script(count) == 1 + 7 * 3 + 21
    browser.find_element("id", "bands").click()
    assert browser.execute_script(count) == 1 + 7 + 21

    # The axis holds what it shows.
    ends = PLOT + "const ys = plot.data.slice(1).flat().filter(v => v != null); "
    low, high, bottom, top = browser.execute_script(
        ends + "return [Math.min(...ys), Math.max(...ys), plot.scales.y.min, plot.scales.y.max]"
    )
    assert bottom <= low
    assert high <= top

    # A heading sorts by its column: numbers as numbers, what has none last.
    rows = "return [...document.querySelector('#tables tbody').rows]"
    names = rows + ".map(row => row.cells[0].textContent)"
    ranked = browser.execute_script(names)
    heading = browser.find_elements("css selector", "#tables thead th")
    heading[1].click()
    by_value = [ranked[-1], *ranked[:-1]]  # a seed of the last has diverged, the others are best
    assert browser.execute_script(names) == by_value
    heading[1].click()
    assert browser.execute_script(names) == by_value[::-1]
    heading[0].click()
    assert browser.execute_script(names) == sorted(ranked)

    page = browser.execute_script("return document.documentElement.scrollWidth")
    assert page <= width
    assert browser.get_log("browser") == []
