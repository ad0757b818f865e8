"""Plain NumPy versions of the federated algorithms, to compare the library against."""

from . import curvature as curvature  # its algorithms are known to `run`
from . import rivals as rivals
from .algorithms import Trace, run
from .problem import loss_and_grad, n_parameters

__all__ = ["Trace", "loss_and_grad", "n_parameters", "run"]
