"""Engines: where the local updates of a cohort run, and how many at a time."""

from prefed.training.engines.engine import ENGINES, Engine, EngineWarning

__all__ = ["ENGINES", "Engine", "EngineWarning"]
