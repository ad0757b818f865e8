"""Data split over clients."""

from prefed.data.dataset import DATASETS, SPLITS, Dataset
from prefed.data.federated import FederatedData
from prefed.data.partition import Partition
from prefed.data.samples import Samples

__all__ = ["DATASETS", "SPLITS", "Dataset", "FederatedData", "Partition", "Samples"]
