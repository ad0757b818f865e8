"""`prefed watch`: a live page of runs under way, in a real browser, and what it does not serve."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from prefed.core.safe_files import lock
from prefed.experiments.config import load
from prefed.experiments.following import Following
from prefed.report.watch import SHARE, SOONEST, Server, Watch, describe
from tests.helpers.commands import prefed_here


def record(number: int, **more: Any) -> str:
    line = {"round": number, "train_loss": 1.0, "test_loss": 1.0, "test_accuracy": 0.5,
            "bytes_up": 4, "bytes_down": 4, "seconds": 0.1, **more}  # fmt: skip
    return json.dumps(line) + "\n"


def begin(folder: Path, *changes: str) -> Path:
    """A run directory without a round; the path of its records."""
    folder.mkdir(parents=True)
    config = load("digits-noniid", ["rounds=3", *changes])
    (folder / "config.toml").write_text(tomli_w.dumps(config.to_dict()))
    (folder / "rounds.jsonl").touch()
    return folder / "rounds.jsonl"


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    following = Following(tmp_path / "later")
    assert not following.read()
    rounds = begin(tmp_path / "later" / "a")
    assert following.read()
    assert not following.read()
    append(rounds, record(1) + record(2)[:20])
    assert following.read()
    (run,) = following.runs()
    assert [r["round"] for r in run.history] == [1]  # the second line is not whole
    seen: list[str] = []
    from prefed.experiments import following as module

    def parse(line: str) -> dict[str, Any]:
        seen.append(line)
        found: dict[str, Any] = json.loads(line)
        return found

    monkeypatch.setattr(module, "from_json", parse)
    append(rounds, record(2)[20:])
    assert following.read()
    assert seen == [record(2)]
    assert [r["round"] for r in run.history] == [1, 2]
    # Resumed from a checkpoint after the first round: another file, with fewer lines.
    (tmp_path / "new").write_text(record(1))
    (tmp_path / "new").replace(rounds)
    assert following.read()
    assert [r["round"] for r in run.history] == [1]
    # Another run, and one that is gone.
    begin(tmp_path / "later" / "b", "seed=1")
    assert following.read()
    assert len(following.runs()) == 2


def test_it_says_how_runs_stand(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert describe([], folder) == ("waiting", f"Waiting: {folder} is not there yet.")
    watch = Watch(folder)
    folder.mkdir()
    assert json.loads(watch.news())["text"] == f"Waiting: {folder} has no runs yet."
    rounds = begin(folder / "a")
    append(rounds, record(1))
    with lock(folder / "a"):
        news = json.loads(watch.news())
        assert (news["state"], news["number"]) == ("running", 1)
        assert watch.state() == "running"
        assert [chart["name"] for chart in news["charts"]][:2] == ["accuracy", "loss"]
        assert "charts" not in json.loads(watch.news(seen=1))  # nothing new
    assert json.loads(watch.news(1))["state"] == "stopped"
    append(rounds, record(2) + record(3))
    (folder / "a" / "model.safetensors").touch()
    news = json.loads(watch.news(1))
    assert (news["state"], news["text"]) == ("finished", "Finished. 1 run: 1 finished.")
    assert news["charts"][0]["curves"][0]["x"] == [1, 2, 3]
    append(begin(folder / "b", "seed=1"), record(1, diverged="the weights are not finite"))
    news = json.loads(watch.news(1))
    assert news["state"] == "diverged"
    assert "prefed diverged in round 1" in news["text"]
    append(rounds, "{}\n")
    news = json.loads(watch.news(1))
    assert news["state"] == "error"
    assert "rounds.jsonl:4: not a record" in news["text"]
    assert watch.state() == "error"


def test_tuning_of_a_study_is_counted(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").write_text('{"scores": {"a": 1, "b": null}}')
    assert describe([], tmp_path)[1].startswith("Tuning: 2 runs scored. Waiting")


def test_the_longer_a_look_takes_the_more_rarely_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path)
    assert json.loads(watch.news())["wait"] == 1000 * SOONEST
    clock = iter((0.0, 0.5))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    assert json.loads(watch.news())["wait"] == pytest.approx(1000 * 0.5 / SHARE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(Watch(tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, path: str, method: str = "GET", host: str = "") -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def test_nothing_but_the_page_and_its_data_is_served(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    assert server.server_address[0] == "127.0.0.1"
    status, page, headers = ask(server, "/")
    assert status == 200
    assert "uPlot" in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert len(nonce) > 20
    assert f'<script nonce="{nonce}">' in page
    assert ask(server, "/data")[0] == 200
    assert ask(server, "/data?seen=x")[0] == 200
    for path in ("/secret.txt", "/../secret.txt", "/data/", "/favicon.ico", "/page.html"):
        assert ask(server, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(server, "/data", method)[0] == 501
    port = server.server_port
    assert ask(server, "/data", host=f"localhost:{port}")[0] == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port}.evil.example",
    ):
        assert ask(server, "/data", host=host)[0] == 421


def test_names_of_users_are_escaped(tmp_path: Path) -> None:
    path = begin(tmp_path / "a")
    vile = "<img src=x onerror=alert(1)>"
    text = (
        (tmp_path / "a" / "config.toml").read_text().replace('name = "prefed"', f'name = "{vile}"')
    )
    (tmp_path / "a" / "config.toml").write_text(text)
    append(path, record(1))
    news = json.loads(Watch(tmp_path).news())
    assert "&lt;img" in news["tables"]
    assert "<img" not in news["tables"]


def test_mistakes_on_the_command_line(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").touch()
    done = prefed_here("watch", "file", cwd=tmp_path)
    assert (done.returncode, "is a file" in done.stderr) == (2, True)
    done = prefed_here("watch", ".", "--port", str(server.server_port), cwd=tmp_path)
    assert done.returncode == 2
    assert "Address already in use; choose another" in done.stderr


def until(wanted: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
    return found


@pytest.mark.process
def test_a_page_beside_a_real_run(tmp_path: Path, browser: Any) -> None:
    """It waits, draws points as they come, keeps a zoom while more come, and says how it ended."""
    from selenium.webdriver import ActionChains

    command = [sys.executable, "-m", "prefed"]
    with subprocess.Popen(
        [*command, "watch", "run"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as watching:
        run = None
        try:
            assert watching.stdout is not None
            said = watching.stdout.readline()
            assert said.endswith("(Ctrl-C to stop)\n")
            size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(said.split()[3])

            def status() -> str:
                return str(browser.find_element("id", "status").text)

            def points() -> int:
                script = "return document.getElementById('chart-loss')?.plot?.data[0].length ?? 0"
                return int(browser.execute_script(script))

            until(lambda: "Waiting: run is not there yet" in status())
            words = ["run", "digits-noniid", "--out", "run", "--quiet", "--set", "rounds=250"]
            run = subprocess.Popen([*command, *words], cwd=tmp_path)
            first = until(points)
            assert status().startswith("Running.")
            assert first < 250
            until(lambda: points() >= 3)

            over = browser.find_element("css selector", "#chart-loss .u-over")
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
            drag = ActionChains(browser).move_to_element_with_offset(over, -60, 0).click_and_hold()
            drag.move_by_offset(100, 3).release().perform()
            scale = "const {x} = document.getElementById('chart-loss').plot.scales; "
            scale += "return [x.min, x.max]"
            zoomed, count = browser.execute_script(scale), points()
            assert zoomed[1] - zoomed[0] < count - 1
            until(lambda: points() > count)
            assert browser.execute_script(scale) == zoomed
            browser.find_element("id", "whole").click()
            assert browser.execute_script(scale)[0] == 1

            assert run.wait(timeout=200) == 0
            until(lambda: status().startswith("Finished."))
            until(lambda: points() == 250)
            assert browser.execute_script(scale) == [1, 250]
            lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
            last = [json.loads(line)["train_loss"] for line in lines]
            drawn = "return document.getElementById('chart-loss').plot.data[1]"
            assert browser.execute_script(drawn) == pytest.approx(last, rel=1e-5)
            assert browser.get_log("browser") == []
        finally:
            if run is not None:
                run.kill()
                run.wait()
            watching.terminate()
    browser.execute_script("document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: "prefed watch has ended" in status())
