"""`prefed watch`: the page of a report for runs under way, served on loopback.

Nothing but the page and its data is served, to GET alone, and only under the names of loopback: a
site that makes its own name point here (DNS rebinding) gets no answer. The files of runs are read
as they grow, while a page asks for them; the longer that takes, the more rarely it may ask.
"""

import json
import secrets
import threading
import time
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefed.core.errors import PrefedError
from prefed.core.safe_files import read_whole, to_json
from prefed.experiments.following import Following
from prefed.experiments.ranking import group
from prefed.experiments.stored_runs import StoredRun
from prefed.report.curves import charts
from prefed.report.page import render, tables

SHARE = 0.02
"""Of the time of one core: what looking may take."""
SOONEST = 1.0
"""Seconds between two looks, at least."""


class Watch:
    """What a page is told of the runs in a directory."""

    def __init__(self, folder: Path, target: float = 0.9) -> None:
        self.folder, self.target = folder, target
        self._following = Following(folder)
        self._lock = threading.Lock()
        self._drawn = 0
        self._body = '"charts": [], "tables": ""'

    def news(self, seen: int = -1) -> str:
        """As JSON: how the runs stand, when to ask again, and what to draw unless `seen` is the
        number of that."""
        with self._lock:
            start = time.thread_time()
            try:
                changed = self._following.read()
                runs = self._following.runs()
                state, text = describe(runs, self.folder)
                if changed and runs:
                    self._draw(runs)
            except (PrefedError, OSError) as error:
                state, text = "error", str(error)
            wait = max(SOONEST, (time.thread_time() - start) / SHARE)
            about = {"number": self._drawn, "state": state, "text": text, "wait": 1000 * wait}
            body = "" if seen == self._drawn else f", {self._body}"
            return f"{json.dumps(about)[:-1]}{body}}}"

    def state(self) -> str:
        """How the runs stand, in a word."""
        with self._lock:
            try:
                self._following.read()
                return describe(self._following.runs(), self.folder)[0]
            except (PrefedError, OSError):
                return "error"

    def _draw(self, runs: list[StoredRun]) -> None:
        groups = group(runs)
        progress = [
            (
                f"{g.label}, seed {run.seed}" + ("" if run.split == "test" else f", {run.split}"),
                [run.status, str(len(run.history)), str(run.config["rounds"])],
            )
            for g in groups
            for run in g.runs
        ]
        html = tables(groups, self.target, progress=progress)
        drawn = to_json({"charts": [chart.to_dict() for chart in charts(groups)], "tables": html})
        self._body, self._drawn = drawn[1:-1], self._drawn + 1


def describe(runs: list[StoredRun], folder: Path) -> tuple[str, str]:
    """How the runs stand, in a word and in a sentence."""
    scored = _tuning(folder)
    tuning = f"Tuning: {scored} runs scored. " if scored else ""
    if not runs:
        there = "has no runs yet" if folder.is_dir() else "is not there yet"
        return "waiting", f"{tuning}Waiting: {folder} {there}."
    count = Counter(run.status for run in runs)
    named = (("finished", "finished"), ("running", "running"), ("diverged", "diverged"))
    parts = [
        f"{count[key]} {word}" for key, word in (*named, ("interrupted", "stopped")) if count[key]
    ]
    of = f"{tuning}{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {', '.join(parts)}."
    if count["running"]:
        return "running", f"Running. {of}"
    if count["interrupted"]:
        return "stopped", f"Stopped; the same command with --resume or --out goes on. {of}"
    if count["diverged"]:
        last = next(run for run in runs if run.status == "diverged")
        return "diverged", f"Ended: {last.algorithm} diverged in round {len(last.history)}. {of}"
    return "finished", f"Finished. {of}"


def _tuning(folder: Path) -> int:
    """How many tuning runs of a study have a score: they have no directories of their own."""
    found = 0
    for path in folder.rglob("tuning.json"):
        try:
            found += len(json.loads(read_whole(path))["scores"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
    return found


class Server(ThreadingHTTPServer):
    """On 127.0.0.1, on a free port if `port` is 0."""

    daemon_threads = True

    def __init__(self, watch: Watch, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.watch = watch
        self.address = f"http://127.0.0.1:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "prefed", ""

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif where.path == "/":
            nonce = secrets.token_urlsafe(16)
            title = f"prefed watch {self.server.watch.folder}"
            start = "Looking for runs."
            page = render(title, start, {"charts": [], "live": True}, live=nonce,
                          tables="", heat_map=None, split=None)  # fmt: skip
            self._answer(page, "text/html", f"script-src 'nonce-{nonce}'; connect-src 'self'")
        elif where.path == "/data":
            _, _, seen = where.query.partition("seen=")
            news = self.server.watch.news(int(seen) if seen.isdecimal() else -1)
            self._answer(news, "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str, allowed: str = "") -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
            f"img-src data:; frame-ancestors 'none'; base-uri 'none'; {allowed}",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address is all that the terminal needs."""
