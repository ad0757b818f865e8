"""Modules that have moved: their old names still import, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PUBLIC = {"prefed.schedule": "prefed.core.schedule"}
"""Names that stay: no warning."""

_OLD = """
algorithms.base=algorithms.algorithm checkpoints=experiments.checkpoints
codecs.base=codecs.interface
config=experiments.config data.registry=data.dataset distributed=training.ranks draws=core.draws
engines=training.engines engines.base=training.engines.engine engines.auto=training.engines.auto
engines.sequential=training.engines.sequential engines.vectorised=training.engines.vectorised
errors=core.errors exchange=training.messages files=core.safe_files jobs=experiments.jobs
layout=core.layout losses=core.losses mean=training.mean measures=experiments.measures
registry=core.registry results=experiments.stored_runs round=training.round
rules.base=rules.rule rules.block=rules.covariance_block rules.full=rules.covariance_full
rules.kronecker=rules.covariance_kronecker runs=experiments.run_directory
settings=training.settings sharing=algorithms.sharing simulation=training.run
stats=experiments.stats study=experiments.study summary=experiments.ranking
sweep=experiments.sweep task=training.task tracking=experiments.trackers
"""
MOVED = {
    f"prefed.{old}": f"prefed.{new}" for old, new in (pair.split("=") for pair in _OLD.split())
}


class MovedModules(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED or name in PUBLIC else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in MOVED:
            text = f"{spec.name} has moved to {MOVED[spec.name]}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        module = importlib.import_module(MOVED.get(spec.name) or PUBLIC[spec.name])
        self.spec = module.__spec__  # the import system is about to overwrite it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        sys.modules[module.__spec__.name] = module
        module.__spec__ = self.spec
