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
admission=training.admission algorithms.base=algorithms.algorithm batches=training.batches
bench.measure=bench.ratios checkpoints=experiments.checkpoints codecs.base=codecs.interface
codecs.means=contrib.mean_codecs config=experiments.config data.files=data.reading
data.registry=data.dataset diagnostics=training.diagnostics distributed=training.ranks
draws=core.draws dropout=training.keyed_dropout engines.auto=training.engines.auto
engines.base=training.engines.engine engines.batched=training.engines.linear_chains
engines.compiled=training.engines.compiled engines.gather=training.engines.stacked_batches
engines.losses=training.engines.block_losses engines.pool=training.engines.workers
engines.sequential=training.engines.sequential engines.vectorised=training.engines.vectorised
engines=training.engines errors=core.errors exchange=training.messages files=core.safe_files
flower.exchange=flower.replies flower.gather=flower.arrivals flower.helpers=flower.stock_client
flower.kept=flower.kept_state flower.local=flower.local_deployment
flower.options=flower.deployment_options flower.simulated=flower.simulated_deployment
jobs=experiments.jobs layout=core.layout losses=core.losses mean=training.mean
measures=experiments.measures registry=core.registry report.study=report.study_results
results=experiments.stored_runs round=training.round rules.base=rules.rule
rules.block=rules.covariance_block rules.full=rules.covariance_full
rules.kronecker=rules.covariance_kronecker rules.matrix=rules.covariance_matrix
runs=experiments.run_directory settings=training.settings sharing=algorithms.sharing
simulation=experiments.simulate stats=experiments.stats study=experiments.study
summary=experiments.ranking sweep=experiments.sweep task=training.task
tracking=experiments.trackers
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
