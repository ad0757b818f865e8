"""The report in a real browser: no errors, curves switch, nothing overlaps at two widths."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
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
    figures = write_report(load_runs(folder / "runs"), folder / "report.html", title=HOSTILE)
    assert {path.suffix for path in figures} == {".pdf", ".png"}
    assert all(path.stat().st_size > 5000 for path in figures)
    return folder / "report.html"


@pytest.mark.long
def test_it_is_one_small_file_and_escapes_what_users_write(report: Path) -> None:
    html = report.read_text()
    assert report.stat().st_size < 8e6
    assert "<script>alert(1)" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in html
    assert "Diverged: prefedopt, seed 2: in round 41" in html


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--disable-quic",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driving = webdriver.Chrome(options=options, service=Service(driver))
    yield driving
    driving.quit()


OVERLAPS = """
const boxes = [...document.querySelectorAll('.chart')].flatMap(chart => {
  const texts = [...chart.querySelectorAll('text')]
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([b, q]) =>
    p.left < q.right && q.left < p.right && p.top + 2 < q.bottom && q.top + 2 < p.bottom)
    .map(([b]) => a + ' / ' + b));
});
return boxes;
"""


@pytest.mark.process
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(report: Path, browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    start = time.monotonic()
    browser.get(report.as_uri())
    opened = time.monotonic() - start
    assert browser.execute_script("return document.readyState") == "complete"
    print(f"opened in {opened:.2f} s")

    buttons = browser.find_elements("css selector", "#legend button")
    assert len(buttons) == len(NAMES)
    count = "return document.querySelectorAll('#chart-accuracy polyline').length"
    assert browser.execute_script(count) == 7
    buttons[0].click()
    assert browser.execute_script(count) == 6
    assert buttons[0].get_attribute("aria-pressed") == "false"
    buttons[0].click()
    assert browser.execute_script(count) == 7
    for button in buttons:
        button.click()
    assert "switched off" in browser.find_element("id", "chart-accuracy").text
    for button in buttons:
        button.click()

    from selenium.webdriver import ActionChains

    chart = browser.find_element("css selector", "#chart-accuracy svg")
    ActionChains(browser).move_to_element(chart).perform()
    tip = browser.find_element("css selector", "#chart-accuracy .tip")
    assert tip.is_displayed()
    assert "fedadam" in tip.text
    assert "%" in tip.text

    assert browser.execute_script(OVERLAPS) == []
    page = browser.execute_script("return document.documentElement.scrollWidth")
    assert page <= width
    assert browser.get_log("browser") == []
