"""A one-hidden-layer classifier with a hand-written gradient."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Sizes = tuple[int, int, int]


def n_parameters(sizes: Sizes) -> int:
    """Length of the flat parameter vector; sizes is (inputs, hidden, classes)."""
    inputs, hidden, classes = sizes
    return hidden * inputs + hidden + classes * hidden + classes


def unpack(w: Array, sizes: Sizes) -> tuple[Array, Array, Array, Array]:
    """Split the flat vector into W1 (hidden x inputs), b1, W2 (classes x hidden), b2."""
    inputs, hidden, classes = sizes
    if w.shape != (n_parameters(sizes),):
        raise ValueError(f"expected {n_parameters(sizes)} parameters, got shape {w.shape}")
    end_w1 = hidden * inputs
    end_b1 = end_w1 + hidden
    end_w2 = end_b1 + classes * hidden
    w1 = w[:end_w1].reshape(hidden, inputs)
    b1 = w[end_w1:end_b1]
    w2 = w[end_b1:end_w2].reshape(classes, hidden)
    b2 = w[end_w2:]
    return w1, b1, w2, b2


def loss_and_grad(w: Array, x: Array, y: Labels, sizes: Sizes) -> tuple[float, Array]:
    """Mean cross-entropy of Linear - tanh - Linear on (x, y), and its flat gradient."""
    w1, b1, w2, b2 = unpack(w, sizes)
    n = len(y)
    rows = np.arange(n)

    h = np.tanh(x @ w1.T + b1)
    z = h @ w2.T + b2
    z = z - z.max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    loss = -float(log_p[rows, y].mean())

    dz = np.exp(log_p)
    dz[rows, y] -= 1.0
    dz /= n
    dw2 = dz.T @ h
    db2 = dz.sum(axis=0)
    da = (dz @ w2) * (1.0 - h**2)
    dw1 = da.T @ x
    db1 = da.sum(axis=0)
    return loss, np.concatenate([dw1.ravel(), db1, dw2.ravel(), db2])
