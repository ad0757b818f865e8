"""Data split over clients."""

from prefed.data.dataset import DATASETS, SPLITS
from prefed.data.federated import FederatedData, Partition, Samples

__all__ = ["DATASETS", "SPLITS", "FederatedData", "Partition", "Samples"]
