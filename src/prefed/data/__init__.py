"""Data split over clients."""

from prefed.data.federated import FederatedData, Partition, Samples
from prefed.data.registry import DATASETS, SPLITS

__all__ = ["DATASETS", "SPLITS", "FederatedData", "Partition", "Samples"]
