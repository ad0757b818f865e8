from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor

from prefed.algorithms.algorithm import ALGORITHMS, Algorithm
from prefed.algorithms.sharing import Policy, average, keep
from prefed.core.layout import Layout
from prefed.core.patterns import Patterns
from prefed.core.schedule import Rate
from prefed.rules import Field, Fraction, Rule, State
from prefed.rules.muon import EMBEDDINGS, Matrix, Muon


@ALGORITHMS.register("fedmuon")
class FedMuon(Algorithm):
    """Muon on the clients: each step of a weight matrix has singular values near one, and all that
    is no matrix moves by Adam, whose state begins anew in each round. Two papers have this name:

    momentum="control": Takezawa et al. 2025. A client makes M - c_i + c orthogonal, not its
    momentum M. Its M goes on from its last round and is then its control variate c_i; the server's
    c is the mean over all clients, taking part or not.

    momentum="average": Liu et al. 2025. The server averages the momenta, and clients begin with the
    mean; the step is that of Muon's code, with Nesterov's step ahead. Their local-global alignment
    is align=0.5, align_form="mixed". The paper averages momenta of matrices alone, and so does its
    code; the code's gradient clipping and decay are clip_norm and decoupled_weight_decay.

    Either way the matrices are scaled by sqrt(max(1, rows/columns)), as in Muon's code.
    """

    client_lr: Rate = 0.02
    momentum: Literal["control", "average"] = "control"
    """What the clients do about their momenta pointing apart."""
    beta: Fraction = 0.95
    """The decay of the momentum (1 - alpha in Takezawa et al.)."""
    iterations: NonNegativeInt = 5
    """Of Newton and Schulz; with 0 the momentum is only divided by its norm."""
    adam: Patterns = EMBEDDINGS
    """Patterns of names: parameters that Adam trains though they are matrices."""
    adam_lr: PositiveFloat = 0.1
    """The step size of Adam, as a share of client_lr (a tenth in the code of Liu et al.)."""

    def client_rule(self) -> Rule:
        kind, ahead = (ControlledMuon, False) if self.momentum == "control" else (Muon, True)
        return kind(self.beta, ahead, self.iterations, self.adam, self.adam_lr)

    def sharing(self) -> dict[str, Policy]:
        if self.momentum == "average":
            return {"momentum": average()}
        return {"c": average(follow="participation"), "c_i": keep()}


@dataclass(frozen=True)
class ControlledMuon(Muon):
    """Muon of M - c_i + c; after the round c_i = M."""

    def fields(self, layout: Layout) -> dict[str, Field]:
        found = super().fields(layout)
        return found | dict.fromkeys(("c", "c_i"), found["momentum"])

    def begin(self, w: Tensor, state: State) -> None:
        state["momentum"].copy_(state["c_i"])

    def momentum(self, matrix: Matrix, g: Tensor, state: State) -> Tensor:
        c, c_i = (matrix.inside(state[name]) for name in ("c", "c_i"))
        return (super().momentum(matrix, g, state) - c_i).add_(c)

    def finish(self, w: Tensor, state: State, lr: float, steps: int) -> None:
        c_i, M = state["c_i"], state["momentum"]
        state["c"].add_(M - c_i)  # so that its mean over the cohort is c plus the mean change
        c_i.copy_(M)
