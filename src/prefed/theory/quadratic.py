"""A federated problem about which everything is known: quadratics with Gaussian noise."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prefed.data import FederatedData
from prefed.training.run import Run
from prefed.training.settings import Settings
from prefed.training.task import Loss


class Point(nn.Module):
    """Weights that are a point; the output for a sample is where it lies from there."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


@dataclass(frozen=True)
class Quadratic:
    """F_i(w) = mean over the client's samples x of 1/2 (w - x)^T H (w - x).

    A client's gradient is H (w - mean of x), a stochastic one of B samples (with replacement) has
    the covariance H S_i H / B, where S_i is the covariance of the client's samples.
    """

    H: Tensor
    samples: Tensor
    """(clients, samples of each, d)"""
    start: Tensor

    @classmethod
    def make(
        cls,
        d: int = 20,
        clients: int = 10,
        samples: int = 200,
        condition: float = 100.0,
        rotated: bool = True,
        noise: float = 1.0,
        spread: float = 0.3,
        seed: int = 0,
    ) -> "Quadratic":
        """Curvatures from 1/condition to 1 in directions drawn at random (or along the axes), the
        clients' optima `spread` apart, and noise that is itself as badly conditioned as H."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        values = torch.logspace(-torch.tensor(condition).log10().item(), 0, d, dtype=torch.float64)
        Q = torch.linalg.qr(normal(d, d))[0] if rotated else torch.eye(d, dtype=torch.float64)
        H = (Q * values) @ Q.mT
        x = spread * normal(clients, 1, d)
        # Cov(x) = noise^2 H^(-1): then the noise of a gradient has the covariance noise^2 H,
        # as the gradients of a likelihood at its optimum have (Fisher information).
        x = x + noise * normal(clients, samples, d) @ ((Q / values.sqrt()) @ Q.mT)
        return cls(H, x, normal(d))

    @property
    def centres(self) -> Tensor:
        return self.samples.mean(1)

    @property
    def optimum(self) -> Tensor:
        return self.centres.mean(0)

    def excess(self, w: Tensor) -> Tensor:
        """F(w) - F*, for one w or for rows of them."""
        off = w - self.optimum
        return 0.5 * ((off @ self.H) * off).sum(-1)

    def covariances(self, batch: int) -> Tensor:
        """Of a stochastic gradient of each client (clients, d, d): the same at every w."""
        off = self.samples - self.centres[:, None]
        S = off.mT @ off / self.samples.shape[1]
        return self.H @ S @ self.H / batch

    def loss(self) -> Loss:
        H = self.H
        return lambda output, y: 0.5 * ((output @ H) * output).sum(-1).mean()

    def simulation(self, algorithm: object, **settings: object) -> Run:
        targets = torch.zeros(self.samples.shape[1], dtype=torch.float64)
        data = FederatedData([(x, targets) for x in self.samples])
        chosen = Settings.model_validate({"device": "cpu", "engine": "sequential", **settings})
        return Run(algorithm, Point(self.start), data, chosen, self.loss())  # type: ignore[arg-type]
