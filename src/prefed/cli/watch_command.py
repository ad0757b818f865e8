from pathlib import Path
from typing import Annotated

import typer


def watch(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="a run, comparison, sweep or study; need not be there yet"
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="of the page; 0: one that is free")
    ] = 0,
    target: Annotated[float, typer.Option(min=0, max=1, help="accuracy to count rounds to")] = 0.9,
    open: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
) -> None:
    """Show runs under way as a live page on this machine: the charts and tables of a report.

    DIR is that of a run, comparison, sweep or study, and need not be there yet. Watching only
    reads, takes a fiftieth of a core at most, and nothing while no page is open.
    """
    import webbrowser

    from prefed.core.errors import PrefedError
    from prefed.report.watch import Server, Watch

    if folder.exists() and not folder.is_dir():
        raise PrefedError(f"{folder}: is a file; give the directory of a run")
    try:
        server = Server(Watch(folder, target), port)
    except OSError as error:
        raise PrefedError(f"--port {port}: {error.strerror or error}; choose another") from None
    try:
        with server:
            print(f"watching {folder} on {server.address}  (Ctrl-C to stop)", flush=True)
            if open:
                webbrowser.open(server.address)
            server.serve_forever()
    except KeyboardInterrupt:
        state = server.watch.state()
        more = "; the runs go on" if state == "running" else "; no run is under way"
        print(f"stopped{'' if state in ('waiting', 'error') else more}")
