"""Downloads from a server on loopback: cut connections, wrong bytes, hostile archives."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import prefed
from prefed.data.download import get, unpack
from prefed.data.sources import File, Source

CONTENT = bytes(range(256)) * 1000


class Server(ThreadingHTTPServer):
    content = CONTENT
    cut: int | None = None
    """Send so many bytes of each answer, then hang up."""
    ranges = True
    asked: list[str | None]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        body, start = self.server.content, 0
        if wanted and self.server.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][: self.server.cut])

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    made = Server(("127.0.0.1", 0), Handler)
    made.asked = []
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def source(server: Server, name: str = "file.bin", unpacked: bool = False) -> Source:
    checksum = "sha256:" + hashlib.sha256(server.content).hexdigest()
    url = f"http://127.0.0.1:{server.server_address[1]}/{name}"
    return Source("a page", (File(url, checksum, unpacked),), "there")


def test_a_download(server: Server, tmp_path: Path) -> None:
    seen: list[int] = []
    folder = get(source(server), tmp_path, lambda name, done, total: seen.append(done))
    assert (folder / "file.bin").read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == len(CONTENT)
    get(source(server), tmp_path)
    assert server.asked == [None]  # it was there already


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.cut, server.ranges = 100_000, ranges
    if not ranges:  # each answer starts anew and gets no further
        with pytest.raises(prefed.PrefedError, match="broke off"):
            get(source(server), tmp_path)
        return
    folder = get(source(server), tmp_path)
    assert (folder / "file.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=200000-"]


def test_what_was_there_before_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file.bin.part").write_bytes(CONTENT[:5000])
    get(source(server), tmp_path)
    assert server.asked == ["bytes=5000-"]


def test_wrong_bytes_are_refused(server: Server, tmp_path: Path) -> None:
    wanted = source(server)
    server.content = b"x" + CONTENT[1:]
    with pytest.raises(prefed.PrefedError, match=r"has the checksum sha256:.*it was deleted"):
        get(wanted, tmp_path)
    assert list((tmp_path / "there").iterdir()) == []


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    file = File("http://127.0.0.1:9/file.bin", None)
    with pytest.raises(prefed.PrefedError, match=r"https_proxy.*put it into .*there"):
        get(Source("a page", (file,), "there"), tmp_path)


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_an_archive_is_unpacked(server: Server, tmp_path: Path) -> None:
    server.content = tar((tarfile.TarInfo("inner/a"), b"one"), (tarfile.TarInfo("b"), b"two"))
    folder = get(source(server, "all.tar.gz", unpacked=True), tmp_path)
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert files == {"inner/a", "b"}


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


HOSTILE = {
    "parent": (tarfile.TarInfo("../out"), "outside the target"),
    "deep parent": (tarfile.TarInfo("a/../../out"), "outside the target"),
    "absolute": (tarfile.TarInfo("/tmp/prefed-out"), "outside the target"),
    "backslash": (tarfile.TarInfo("..\\out"), "outside the target"),
    "symlink": (link("a", tarfile.SYMTYPE), "a link or device"),
    "hard link": (link("a", tarfile.LNKTYPE), "a link or device"),
    "device": (link("a", tarfile.CHRTYPE), "a link or device"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives(case: str, tmp_path: Path) -> None:
    info, message = HOSTILE[case]
    target = tmp_path / "inside"
    target.mkdir()
    content = b"" if info.type != tarfile.REGTYPE else b"bad"
    (tmp_path / "a.tar.gz").write_bytes(tar((tarfile.TarInfo("fine"), b"ok"), (info, content)))
    with pytest.raises(prefed.PrefedError, match=message):
        unpack(tmp_path / "a.tar.gz", target)
    assert list(target.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"inside", "a.tar.gz"}


@pytest.mark.parametrize(
    ("name", "message"), [("../out", "outside the target"), ("big", "more than 64 times")]
)
def test_hostile_zips(name: str, message: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(1 << 20))
    (tmp_path / "inside").mkdir()
    with pytest.raises(prefed.PrefedError, match=message):
        unpack(tmp_path / "a.zip", tmp_path / "inside")
    assert list((tmp_path / "inside").iterdir()) == []
