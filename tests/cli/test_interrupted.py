"""A command that is told to stop says so, whatever it was doing."""

from __future__ import annotations

import os
import signal

import pytest

from prefed import cli


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_that_makes_something_else_of_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pydantic's does, which builds its models in Rust."""

    def app() -> None:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            raise TypeError("Error building a validator: KeyboardInterrupt") from None

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(cli, "app", app)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        for other, handler in before.items():
            signal.signal(other, handler)
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("stopped")


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise TypeError("an error of ours")

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(cli, "app", app)
    try:
        with pytest.raises(TypeError, match="of ours"):
            cli.main()
    finally:
        for other, handler in before.items():
            signal.signal(other, handler)
