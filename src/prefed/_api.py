"""The public names."""

from prefed import optim
from prefed.algorithms import ALGORITHMS, Algorithm, average, derived, keep, reset
from prefed.algorithms.adaalter import AdaAlter
from prefed.algorithms.fedadamw import FedAdamW
from prefed.algorithms.fedavg import FedAvg, FedAvgM
from prefed.algorithms.fedcm import FedCM
from prefed.algorithms.fedlada import FedLADA
from prefed.algorithms.fedlion import FedLion
from prefed.algorithms.fedmuon import FedMuon
from prefed.algorithms.fednova import FedNova
from prefed.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from prefed.algorithms.fedpac import FedPAC
from prefed.algorithms.fedpm import FedPM
from prefed.algorithms.fedprox import FedProx
from prefed.algorithms.localadam import LocalAdam
from prefed.algorithms.mimelite import MimeLite
from prefed.algorithms.pair import Pair
from prefed.algorithms.personal import FedBN, FedPer, FedRep
from prefed.algorithms.prefed import PreFed
from prefed.algorithms.prefedc import PreFedC
from prefed.algorithms.prefedclite import PreFedCLite
from prefed.algorithms.prefedlite import PreFedLite
from prefed.algorithms.prefedm import PreFedM
from prefed.algorithms.prefedmlite import PreFedMLite
from prefed.algorithms.prefedopt import PreFedOpt
from prefed.algorithms.prefeds import PreFedS
from prefed.algorithms.prefedslite import PreFedSLite
from prefed.algorithms.prefedsync import PreFedSync
from prefed.algorithms.scaffold import SCAFFOLD
from prefed.codecs import CODECS
from prefed.core import schedule
from prefed.core.errors import Diverged, Interrupted, PrefedError
from prefed.core.losses import LOSSES
from prefed.core.schedule import Rate
from prefed.data import DATASETS, SPLITS, FederatedData, Partition
from prefed.experiments.loading import load
from prefed.experiments.simulate import simulate
from prefed.experiments.stored_runs import load_runs, to_pandas
from prefed.models import MODELS
from prefed.rules import RULES, Field, Rule
from prefed.training.asynchronous import Asynchronous
from prefed.training.attackers import ATTACKS
from prefed.training.devices import Devices
from prefed.training.diagnostics import CollapseWarning
from prefed.training.engines import ENGINES, EngineWarning
from prefed.training.means import MEANS
from prefed.training.metrics import METRICS
from prefed.training.observers import Callback
from prefed.training.privacy_setting import AdaptiveClip, Privacy
from prefed.training.result import Result
from prefed.training.run import Run, Simulation
from prefed.training.settings import Settings

__all__ = [
    "ALGORITHMS", "ATTACKS", "CODECS", "DATASETS", "ENGINES", "LOSSES", "MEANS", "METRICS",
    "MODELS", "RULES", "SCAFFOLD", "SPLITS", "AdaAlter", "AdaptiveClip", "Algorithm",
    "Asynchronous", "Callback", "CollapseWarning", "Devices", "Diverged", "EngineWarning",
    "FedAdagrad", "FedAdam", "FedAdamW", "FedAvg", "FedAvgM", "FedBN", "FedCM", "FedLADA",
    "FedLion", "FedMuon", "FedNova", "FedPAC", "FedPM", "FedPer", "FedProx", "FedRep", "FedYogi",
    "FederatedData", "Field", "Interrupted", "LocalAdam", "MimeLite", "Pair", "Partition",
    "PreFed", "PreFedC", "PreFedCLite", "PreFedLite", "PreFedM", "PreFedMLite", "PreFedOpt",
    "PreFedS", "PreFedSLite", "PreFedSync", "PrefedError", "Privacy", "Rate", "Result",
    "Rule", "Run", "Settings", "Simulation", "average",
    "derived", "keep", "load", "load_runs", "optim", "reset", "schedule", "simulate", "to_pandas",
]  # fmt: skip
