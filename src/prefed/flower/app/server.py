"""What runs beside the SuperLink."""

from pathlib import Path

from prefed.flower import server_app

app = server_app(Path(__file__).with_name("config.toml"))
