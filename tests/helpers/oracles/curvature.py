"""Muon, and later algorithms that look at matrices or at second derivatives.

Written from the papers, with the names of their listings; where a listing leaves something open,
from the public code that the docstring names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .algorithms import ALGORITHMS, CHOICES, DEFAULTS, Algorithm, Array


class Layer:
    """One tensor of the model: where it lies in the weights, and its shape as a matrix."""

    def __init__(self, start: int, shape: tuple[int, ...]) -> None:
        self.size = int(np.prod(shape))
        self.slice = slice(start, start + self.size)
        self.is_matrix = len(shape) > 1
        self.shape = (shape[0], self.size // shape[0])


def layers(tensors: Sequence[tuple[int, ...]]) -> Iterator[Layer]:
    """The tensors of the model, one after another."""
    start = 0
    for shape in tensors:
        yield (layer := Layer(start, shape))
        start += layer.size


class Adam:
    """Kingma and Ba, algorithm 1, for one tensor; epsilon outside of the root."""

    def __init__(self, beta1: float, beta2: float, epsilon: float) -> None:
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.m: Any = 0.0
        self.v: Any = 0.0
        self.t = 0

    def direction(self, g: Array) -> Array:
        """The bias-corrected m over the root of the bias-corrected v, after g."""
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        m_hat = self.m / (1 - self.beta1**self.t)
        v_hat = self.v / (1 - self.beta2**self.t)
        return np.asarray(m_hat / (np.sqrt(v_hat) + self.epsilon))


# ---------------------------------------------------------------------------------------------
# Muon
# ---------------------------------------------------------------------------------------------


def newton_schulz(g: Array, iterations: int) -> Array:
    """Jordan 2024: X = aX + b(XX^T)X + c(XX^T)^2 X, begun with G over its Frobenius norm."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (np.sqrt(np.sum(g * g)) + 1e-7)
    for _ in range(iterations):
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return np.asarray(x)


class FedMuon(Algorithm):
    """Takezawa et al. 2025 ("control"), Liu et al. 2025 ("average").

    Takezawa: M = (1 - alpha) M + alpha g; X = X + eta lmo(M - C_i + C); after K steps C_i = M, and
    C moves by the sum of the changes over the number of all clients. M goes on from there.
    Liu: the clients' momenta begin at the server's mean of them; steps as in Jordan's code, with
    Nesterov's step. All that is no matrix is trained by Adam, anew in each round.
    """

    def start(self) -> None:
        """Start all momenta at 0."""
        self.layers = [*layers(self.options["tensors"])]
        matrices = [layer for layer in self.layers if layer.is_matrix]
        zero = np.zeros(sum(layer.size for layer in matrices))
        self.zero = zero
        self.shared["c" if self.options["momentum"] == "control" else "momentum"] = zero

    def split(self, vector: Array) -> list[Array]:
        """The matrices in a vector of all of them."""
        found, at = [], 0
        for layer in self.layers:
            if layer.is_matrix:
                found.append(vector[at : at + layer.size].reshape(layer.shape))
                at += layer.size
        return found

    def client(self, t: int, w: Array, i: int) -> tuple[Array, Array, float]:
        """The steps of client i: its weights, its momenta and its loss."""
        o, lr = self.options, self.client_lr(t)
        beta, control = o["beta"], o["momentum"] == "control"
        first = self.kept[i]["c_i"] if i in self.kept else self.zero
        M = self.split(first if control else self.shared["momentum"])
        C_i, C = self.split(first), self.split(self.shared["c"] if control else self.zero)
        adam = [Adam(0.9, 0.95, 1e-10) for _ in self.layers]
        w_i, loss_i = w.copy(), 0.0
        for x, y in self.task.local_data(t, i):
            loss, g = self.task.gradient(w_i, x, y)
            loss_i += loss / self.task.count(t, i)
            after, number = self.decayed(t, w_i), 0
            for layer, by_adam in zip(self.layers, adam, strict=True):
                part = g[layer.slice]
                if layer.is_matrix:
                    G = part.reshape(layer.shape)
                    M[number] = beta * M[number] + (1 - beta) * G
                    if control:
                        U = M[number] - C_i[number] + C[number]
                    else:
                        U = beta * M[number] + (1 - beta) * G
                    rows, columns = layer.shape
                    scale = np.sqrt(max(1.0, rows / columns))
                    step = scale * newton_schulz(U, o["iterations"]).ravel()
                    number += 1
                else:
                    step = o["adam_lr"] * by_adam.direction(part)
                after[layer.slice] = after[layer.slice] - lr * step
            w_i = self.aligned(t, i, w_i, after)
        return w_i, np.concatenate([m.ravel() for m in M]), loss_i

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """All clients, the mean of the weights, and of the momenta or of their changes."""
        ends = {i: self.client(t, w, i) for i in cohort}
        momenta = [ends[i][1] for i in cohort]
        if self.options["momentum"] == "control":
            old = [self.kept[i]["c_i"] if i in self.kept else self.zero for i in cohort]
            changes = [new - c_i for new, c_i in zip(momenta, old, strict=True)]
            share = len(cohort) / self.task.n_clients
            self.shared["c"] = self.shared["c"] + share * self.task.mean(cohort, changes)
            for i, new in zip(cohort, momenta, strict=True):
                self.kept[i] = {"c_i": new}
        else:
            self.shared["momentum"] = self.task.mean(cohort, momenta)
        self.mean_change = delta = self.task.mean(cohort, [ends[i][0] - w for i in cohort])
        loss = self.task.mean(cohort, [ends[i][2] for i in cohort])
        return w + self.server_lr(t) * delta, loss


# ---------------------------------------------------------------------------------------------
# MimeLite
# ---------------------------------------------------------------------------------------------


class MimeLite(Algorithm):
    """Karimireddy et al. 2020, algorithm 1 without control variates, and the table of base
    optimisers: U steps with the server's statistics s, V updates s once a round."""

    def start(self) -> None:
        """Start at m = 0 and, for Adam, v = 0."""
        self.shared["m"] = np.zeros(self.d)
        if self.options["optimiser"] == "adam":
            self.shared["v"] = np.zeros(self.d)

    def u(self, y: Array, g: Array, eta: float) -> Array:
        """Give the weights after a step: the statistics stay."""
        beta = self.options["beta1"]
        direction = (1 - beta) * g + beta * self.shared["m"]
        if "v" in self.shared:
            direction = direction / (self.options["tau"] + np.sqrt(self.shared["v"]))
        return np.asarray(y - eta * direction)

    def v(self, g: Array) -> None:
        """Update the statistics with the mean of the full local gradients."""
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        self.shared["m"] = (1 - beta1) * g + beta1 * self.shared["m"]
        if "v" in self.shared:
            self.shared["v"] = (1 - beta2) * g**2 + beta2 * self.shared["v"]

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """Local steps by U, then V, then the mean of the weights."""
        deltas, full, losses = [], [], []
        for i in cohort:
            y_i, loss_i = w.copy(), 0.0
            for x, labels in self.task.local_data(t, i):
                loss, g = self.task.gradient(y_i, x, labels)
                loss_i += loss / self.task.count(t, i)
                after = self.u(self.decayed(t, y_i), g, self.client_lr(t))
                y_i = self.aligned(t, i, y_i, after)
            full.append(self.task.gradient(w, *self.task.clients[i])[1])
            deltas.append(y_i - w)
            losses.append(loss_i)
        self.v(self.task.mean(cohort, full))
        self.mean_change = delta = self.task.mean(cohort, deltas)
        return w + self.server_lr(t) * delta, self.task.mean(cohort, losses)


CHOICES["momentum"] += ("control",)
CHOICES["optimiser"] = ("momentum", "adam")
ALGORITHMS |= {"fedmuon": FedMuon, "mimelite": MimeLite}
DEFAULTS |= {
    "mimelite": {"optimiser": "momentum", "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "fedmuon": {
        "momentum": "control", "beta": 0.95, "iterations": 5, "adam_lr": 0.1, "tensors": None,
    },
}  # fmt: skip
