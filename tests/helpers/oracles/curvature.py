"""Muon, and later algorithms that look at matrices or at second derivatives.

Written from the papers, with the names of their listings; where a listing leaves something open,
from the public code that the docstring names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.helpers.problems import SIZES

from .algorithms import ALGORITHMS, CHOICES, DEFAULTS, Algorithm, Array
from .problem import unpack


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


class PreFedS(Algorithm):
    """PreFed's m and P, and a step of matrices that is orthogonal before it is divided."""

    def start(self) -> None:
        """Start at m = 0 and P = 0, with no mass behind either."""
        found = [*layers(self.options["tensors"])]
        self.vectors = np.concatenate([np.r_[e.slice] for e in found if not e.is_matrix])
        named = [
            any(f"{n // 2 * 2}." in p for p in self.options["plain"]) for n in range(len(found))
        ]
        self.tables = [
            e for e, is_named in zip(found, named, strict=True) if e.is_matrix and is_named
        ]
        self.layers = [e for e in found if e.is_matrix and e not in self.tables]
        self.shared |= {"m": np.zeros(self.d), "P": np.zeros(self.d), "m_mass": 0.0, "P_mass": 0.0}

    def divided(self, u: Array, p: Array) -> Array:
        """Divide u by sqrt(P) + tau."""
        tau = self.options["tau_relative"] * np.sqrt(np.mean(p)) or 1e-3
        return np.asarray(u / (np.sqrt(p) + tau))

    def client(self, t: int, w: Array, i: int) -> tuple[Array, dict[str, Any], float]:
        """The steps of client i: its weights, its state and its loss."""
        o, lr = self.options, self.client_lr(t)
        b1, b2 = o["beta1"], o["beta2"]
        s: dict[str, Any] = dict(self.shared)
        w_i, loss_i = w.copy(), 0.0
        directions: list[Array] = []
        for k, (x, y) in enumerate(self.task.local_data(t, i)):
            loss, g = self.task.gradient(w_i, x, y)
            loss_i += loss / self.task.count(t, i)
            if o["clip_relative"] and s["m_mass"] > 0:
                expected = np.sum((s["m"] / s["m_mass"]) ** 2) + np.sum(s["P"]) / s["P_mass"]
                most = o["clip_relative"] * np.sqrt(expected)
                g = g * min(1.0, most / np.linalg.norm(g)) if most > 0 else g
            s["m"] = b1 * s["m"] + (1 - b1) * g
            s["P"] = b2 * s["P"] + (1 - b2) * (g - s["m"]) ** 2
            s["m_mass"] = b1 * s["m_mass"] + (1 - b1)
            s["P_mass"] = b2 * s["P_mass"] + (1 - b2)
            m, p = s["m"] / s["m_mass"], s["P"] / s["P_mass"]
            after, ahead = self.decayed(t, w_i), (1 - b1) * g + b1 * s["m"]
            v = self.vectors
            after[v] -= lr * o["plain_lr"] * self.divided(m[v], p[v])
            for e in self.tables:
                u = self.divided(m[e.slice], p[e.slice])
                after[e.slice] -= lr * o["embedding_lr"] * u
            if k % o["refresh"] == 0:
                directions = []
                for e in self.layers:
                    whole = newton_schulz(ahead[e.slice].reshape(e.shape), o["iterations"]).ravel()
                    u = self.divided(whole, p[e.slice])
                    directions.append(u * np.linalg.norm(whole) / (np.linalg.norm(u) + 1e-30))
            for e, u in zip(self.layers, directions, strict=True):
                after[e.slice] -= lr * np.sqrt(max(1.0, e.shape[0] / e.shape[1])) * u
            w_i = self.aligned(t, i, w_i, after)
        return w_i, s, loss_i

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """All clients, and the means of their weights and of all their state."""
        ends = [self.client(t, w, i) for i in cohort]
        for name in self.shared:
            self.shared[name] = self.task.mean(cohort, [s[name] for _, s, _ in ends])
        self.mean_change = delta = self.task.mean(cohort, [w_i - w for w_i, _, _ in ends])
        loss = self.task.mean(cohort, [loss_i for _, _, loss_i in ends])
        return w + self.server_lr(t) * delta, loss


# ---------------------------------------------------------------------------------------------
# MimeLite
# ---------------------------------------------------------------------------------------------


class PreFedC(PreFedS):
    """Steps of matrices along one direction for all clients, and along what is each one's own."""

    def direction(self, e: Layer) -> tuple[Array, float]:
        """What the server's m and P say of a matrix: where to, and tau."""
        m, p = (self.shared[name][e.slice] for name in ("m", "P"))
        whole = newton_schulz(m.reshape(e.shape), self.options["iterations"]).ravel()
        p = p / self.shared["P_mass"]
        u = self.divided(whole, p)
        r = np.sqrt(np.mean(p))
        return u * np.linalg.norm(whole) / (np.linalg.norm(u) + 1e-30), r

    def client(self, t: int, w: Array, i: int) -> tuple[Array, dict[str, Any], float]:
        """The steps of client i: its weights, its state and its loss."""
        o, lr = self.options, self.client_lr(t)
        b1, b2 = o["beta1"], o["beta2"]
        s: dict[str, Any] = dict(self.shared)
        w_i, loss_i = w.copy(), 0.0
        begun = s["P_mass"] > 0
        common = [self.direction(e) if begun else (0.0, 0.0) for e in self.layers]
        most = 0.0
        if begun and o["clip_relative"]:
            expected = np.sum((s["m"] / s["m_mass"]) ** 2) + np.sum(s["P"]) / s["P_mass"]
            most = float(o["clip_relative"] * np.sqrt(expected))
        for x, y in self.task.local_data(t, i):
            loss, g = self.task.gradient(w_i, x, y)
            loss_i += loss / self.task.count(t, i)
            g = g * min(1.0, most / float(np.linalg.norm(g))) if most > 0 else g
            s["m"] = b1 * s["m"] + (1 - b1) * g
            apart = g - s["m"]
            s["P"] = b2 * s["P"] + (1 - b2) * apart**2
            s["m_mass"] = b1 * s["m_mass"] + (1 - b1)
            s["P_mass"] = b2 * s["P_mass"] + (1 - b2)
            m, p = s["m"] / s["m_mass"], s["P"] / s["P_mass"]
            after, v = self.decayed(t, w_i), self.vectors
            after[v] -= lr * o["plain_lr"] * self.divided(m[v], p[v])
            for e in self.tables:
                after[e.slice] -= lr * o["embedding_lr"] * self.divided(m[e.slice], p[e.slice])
            for e, (u, r) in zip(self.layers, common, strict=True):
                rows, columns = e.shape
                step = u
                if r > 0:
                    own = apart[e.slice] / (np.sqrt(p[e.slice]) + o["tau_relative"] * r)
                    step = u + o["own_lr"] * own / np.sqrt(max(rows, columns))
                after[e.slice] -= lr * np.sqrt(max(1.0, rows / columns)) * step
            w_i = self.aligned(t, i, w_i, after)
        return w_i, s, loss_i


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


# ---------------------------------------------------------------------------------------------
# FedPAC: SOAP, Sophia and Muon with averaged preconditioners
# ---------------------------------------------------------------------------------------------


class SOAPClient:
    """Vyas et al. 2024, algorithm 3, for each matrix; vectors by Adam.

    The eigenvectors are those of L and R before the step, computed anew in every f-th; as long as
    there has been no gradient they are the identity.
    """

    def __init__(self, shapes: Sequence[Layer], P: Array, o: dict[str, Any]) -> None:
        self.layers, self.o, self.steps = shapes, o, 0
        self.adam = [Adam(o["beta1"], o["beta2"], o["tau"]) for _ in shapes]
        self.factors: list[list[Array]] = []
        at = 0
        for layer in shapes:
            found = []
            for n in layer.shape if layer.is_matrix else ():
                if n <= o["largest_side"]:
                    found.append(P[at : at + n * n].reshape(n, n))
                    at += n * n
                else:
                    found.append(np.zeros((0, 0)))
            self.factors.append(found)
        self.bases: list[list[Array]] = []

    @property
    def state(self) -> Array:
        """All factors that there are."""
        return np.concatenate([f.ravel() for of_one in self.factors for f in of_one])

    @staticmethod
    def eigenvectors(factor: Array, n: int) -> Array:
        """Of one factor; the identity if it is zero or if there is none."""
        return np.linalg.eigh(factor)[1] if factor.any() else np.eye(n)

    def direction(self, g: Array) -> Array:
        """What a step moves along."""
        if self.steps % self.o["refresh"] == 0:
            self.bases = [
                [self.eigenvectors(f, n) for f, n in zip(of_one, layer.shape, strict=False)]
                for of_one, layer in zip(self.factors, self.layers, strict=True)
            ]
        self.steps += 1
        found, beta2 = np.zeros_like(g), self.o["beta2"]
        beta1, t = self.o["beta1"], self.steps
        for number, layer in enumerate(self.layers):
            adam, part = self.adam[number], g[layer.slice]
            if not layer.is_matrix:
                found[layer.slice] = adam.direction(part)
                continue
            G, (QL, QR) = part.reshape(layer.shape), self.bases[number]
            turned = QL.T @ G @ QR
            adam.m = beta1 * adam.m + (1 - beta1) * G
            adam.v = beta2 * adam.v + (1 - beta2) * turned**2
            m_hat = (QL.T @ adam.m @ QR) / (1 - beta1**t)
            v_hat = adam.v / (1 - beta2**t)
            found[layer.slice] = (QL @ (m_hat / (np.sqrt(v_hat) + self.o["tau"])) @ QR.T).ravel()
            L, R = self.factors[number]
            if L.size:
                self.factors[number][0] = beta2 * L + (1 - beta2) * G @ G.T
            if R.size:
                self.factors[number][1] = beta2 * R + (1 - beta2) * G.T @ G
        return found


class FedPAC(Algorithm):
    """Liu et al. 2026: clients begin with the mean of the preconditioners, and their steps are
    mixed with the global direction (the `align` of all algorithms here). Momenta begin at 0."""

    def start(self) -> None:
        """Start the preconditioners at 0."""
        self.layers = [*layers(self.options["tensors"])]
        given = self.options["rule"]
        self.rule = {**RULES[given["name"]], **given}
        sizes = [n for layer in self.layers if layer.is_matrix for n in layer.shape]
        small = [n for n in sizes if n <= self.rule.get("largest_side", 0)]
        self.name, size = {
            "soap": ("P", sum(n * n for n in small)),
            "sophia": ("h", self.d),
            "adam": ("v", self.d),
        }[given["name"]]
        self.shared[self.name] = np.zeros(size)

    def drawn(self, t: int, i: int, k: int, w: Array, x: Array) -> Array:
        """The gradient of the batch with labels drawn from the softmax, by inverting its sum."""
        w1, b1, w2, b2 = unpack(w, SIZES)
        z = np.tanh(x @ w1.T + b1) @ w2.T + b2
        p = np.exp(z - z.max(axis=1, keepdims=True))
        p = p / p.sum(axis=1, keepdims=True)
        u = self.options["uniform"](t, i, k, len(x))
        labels = [int(np.searchsorted(np.cumsum(row)[:-1], u_n, side="right"))
                  for row, u_n in zip(p, u, strict=True)]  # fmt: skip
        return self.task.grad(w, x, np.array(labels))[1]

    def client(self, t: int, w: Array, i: int) -> tuple[Array, Array, float]:
        """The steps of client i: its weights, its preconditioner and its loss."""
        lr, o = self.client_lr(t), self.rule
        soap = SOAPClient(self.layers, self.shared["P"], o) if o["name"] == "soap" else None
        adam = Adam(o["beta1"], o["beta2"], o["tau"])
        m, state = np.zeros(self.d), self.shared[self.name]
        w_i, loss_i = w.copy(), 0.0
        for k, (x, y) in enumerate(self.task.local_data(t, i)):
            loss, g = self.task.gradient(w_i, x, y)
            loss_i += loss / self.task.count(t, i)
            if soap is not None:
                direction = soap.direction(g)
                state = soap.state
            elif o["name"] == "sophia":
                m = o["beta1"] * m + (1 - o["beta1"]) * g
                if k % o["refresh"] == 0:
                    estimate = len(x) * self.drawn(t, i, k, w_i, x) ** 2
                    state = o["beta2"] * state + (1 - o["beta2"]) * estimate
                direction = np.clip(m / np.maximum(o["gamma"] * state, o["tau"]), -1, 1)
            else:
                adam.m = o["beta1"] * adam.m + (1 - o["beta1"]) * g
                state = o["beta2"] * state + (1 - o["beta2"]) * g**2
                direction = adam.m / (np.sqrt(state) + o["tau"])
            w_i = self.aligned(t, i, w_i, self.decayed(t, w_i) - lr * direction)
        return w_i, state, loss_i

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """All clients, then the means of weights and preconditioners."""
        ends = [self.client(t, w, i) for i in cohort]
        self.shared[self.name] = self.task.mean(cohort, [end[1] for end in ends])
        self.mean_change = delta = self.task.mean(cohort, [end[0] - w for end in ends])
        return w + self.server_lr(t) * delta, self.task.mean(cohort, [end[2] for end in ends])


RULES: dict[str, dict[str, Any]] = {
    "soap": {"beta1": 0.95, "beta2": 0.95, "tau": 1e-8, "refresh": 10, "largest_side": 256},
    "sophia": {"beta1": 0.96, "beta2": 0.99, "tau": 1e-12, "refresh": 10, "gamma": 0.05},
    "adam": {"beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
}
CHOICES["momentum"] += ("control",)
CHOICES["optimiser"] = ("momentum", "adam")
ALGORITHMS |= {"fedmuon": FedMuon, "mimelite": MimeLite, "fedpac": FedPAC}
ALGORITHMS |= {"prefeds": PreFedS, "prefedslite": PreFedS}
ALGORITHMS |= {"prefedc": PreFedC, "prefedclite": PreFedC}
DEFAULTS |= {
    "mimelite": {"optimiser": "momentum", "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "fedpac": {
        "rule": {"name": "soap"}, "align": 0.5, "align_form": "mixed", "tensors": None,
        "uniform": None,
    },
    "prefeds": {
        "beta1": 0.95, "beta2": 0.999, "tau_relative": 0.3, "iterations": 5, "plain_lr": 0.1,
        "plain": (), "embedding_lr": 0.3, "clip_relative": 10.0, "refresh": 1, "tensors": None,
        "upload": "exact", "m_codec": "exact", "P_codec": "exact", "mean_of_rounds": 4.0,
    },
    "fedmuon": {
        "momentum": "control", "beta": 0.95, "iterations": 5, "adam_lr": 0.1, "tensors": None,
    },
}  # fmt: skip
DEFAULTS["prefedslite"] = DEFAULTS["prefeds"]
DEFAULTS["prefedc"] = DEFAULTS["prefeds"] | {"beta1": 0.9, "own_lr": 1.0}
del DEFAULTS["prefedc"]["refresh"]
DEFAULTS["prefedclite"] = DEFAULTS["prefedc"]
