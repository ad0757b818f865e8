"""The public names."""

from prefed import optim, schedule
from prefed.algorithms.adaalter import AdaAlter
from prefed.algorithms.base import ALGORITHMS, Algorithm
from prefed.algorithms.fedavg import FedAvg, FedAvgM
from prefed.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from prefed.algorithms.fedprox import FedProx
from prefed.algorithms.localadam import LocalAdam
from prefed.algorithms.prefed import PreFed
from prefed.algorithms.prefedlite import PreFedLite
from prefed.algorithms.prefedopt import PreFedOpt
from prefed.algorithms.prefedsync import PreFedSync
from prefed.algorithms.scaffold import SCAFFOLD
from prefed.codecs import CODECS
from prefed.data import DATASETS, SPLITS, FederatedData, Partition
from prefed.diagnostics import CollapseWarning
from prefed.engines import ENGINES, EngineWarning
from prefed.errors import Diverged, Interrupted, PrefedError
from prefed.models import MODELS
from prefed.results import load_runs, to_pandas
from prefed.rules.base import Field, Rule
from prefed.settings import Settings
from prefed.sharing import average, derived, keep, reset
from prefed.simulation import Callback, Result, Simulation, simulate

__all__ = [
    "ALGORITHMS",
    "CODECS",
    "DATASETS",
    "ENGINES",
    "MODELS",
    "SCAFFOLD",
    "SPLITS",
    "AdaAlter",
    "Algorithm",
    "Callback",
    "CollapseWarning",
    "Diverged",
    "EngineWarning",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedYogi",
    "FederatedData",
    "Field",
    "Interrupted",
    "LocalAdam",
    "Partition",
    "PreFed",
    "PreFedLite",
    "PreFedOpt",
    "PreFedSync",
    "PrefedError",
    "Result",
    "Rule",
    "Settings",
    "Simulation",
    "average",
    "derived",
    "keep",
    "load_runs",
    "optim",
    "reset",
    "schedule",
    "simulate",
    "to_pandas",
]
