"""The audit of dependencies: what it asks, what it makes of the answer, and of none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy
import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.process

SCRIPT = ROOT / "scripts" / "audit.py"


class Database(BaseHTTPRequestHandler):
    """Knows of a hole in this numpy, unless it is told to talk nonsense."""

    hole: Any = "numpy"

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        queries = json.loads(self.rfile.read(size))["queries"]
        wanted = {"name": self.hole, "ecosystem": "PyPI"}
        results: list[Any] = [
            {"vulns": [{"id": "GHSA-x"}]}
            if q == {"package": wanted, "version": numpy.__version__}
            else {}
            for q in queries
        ]
        self.send_response(200)
        self.end_headers()
        answer = b"nonsense" if self.hole is None else json.dumps({"results": results}).encode()
        self.wfile.write(answer)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Database)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def audit(url: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--url", url], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_known_hole_fails(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Database, "hole", "numpy")
    code, text = audit(url)
    assert code == 1
    assert f"numpy {numpy.__version__}: GHSA-x" in text
    assert "audited, 1 with a known hole" in text
    monkeypatch.setattr(Database, "hole", "nothing")
    code, text = audit(url)
    assert code == 0
    assert ", 0 with a known hole" in text


def test_without_an_answer_it_says_so_in_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Database, "hole", None)
    for address in (url, "http://127.0.0.1:9/"):
        code, text = audit(address)
        assert code == 0
        assert text.startswith("dependencies: not audited")
        assert text.count("\n") == 1
