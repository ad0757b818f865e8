"""Data sets that can be downloaded: what sources.toml says of them."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class File:
    url: str
    checksum: str | None
    """"md5:..." or "sha256:..."; None where the publisher gives none."""
    unpack: bool = False

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


@dataclass(frozen=True)
class Package:
    manager: str
    """One of packages.FETCH."""
    name: str
    inside: str
    """The folder in it that has the files."""


@dataclass(frozen=True)
class Source:
    page: str
    """For people: what the data set is."""
    files: tuple[File, ...]
    folder: str = ""
    """Files are put into this folder inside the data directory, archives unpacked there."""
    places: tuple[str, ...] = ()
    """Where packages put the same files."""
    package: Package | None = None


SOURCES = {
    name: Source(
        page=table["page"],
        files=tuple(
            File(url, checksum or None, table.get("unpack", False))
            for url, checksum in table["files"].items()
        ),
        folder=table.get("folder", ""),
        places=tuple(table.get("places", ())),
        package=Package(**table["package"]) if "package" in table else None,
    )
    for name, table in tomllib.loads(
        files("prefed.data").joinpath("sources.toml").read_text()
    ).items()
}
