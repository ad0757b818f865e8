"""Data split over clients."""

from prefed.data.dataset import DATASETS, SPLITS, Dataset
from prefed.data.federated import FederatedData, Partition, Samples

__all__ = ["DATASETS", "SPLITS", "Dataset", "FederatedData", "Partition", "Samples"]
