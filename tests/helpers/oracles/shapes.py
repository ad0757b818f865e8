"""The shapes of the preconditioner, each as the dense d x d matrix it stands for.

P is a flat vector of all numbers that are kept: of the diagonal, of the matrix, of the blocks one
after another, or of the factors A, B of each weight matrix one after another (vectors: diagonal).
`tensors` are the shapes of the model's tensors in order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import scipy.linalg

Array = npt.NDArray[np.float64]
Tensors = Sequence[tuple[int, ...]]


def pieces(r: Array, tensors: Tensors) -> list[Array]:
    """The tensors inside the vector, matrices as (out, rest)."""
    found, at = [], 0
    for shape in tensors:
        n = int(np.prod(shape))
        part = r[at : at + n]
        found.append(part.reshape(shape[0], -1) if len(shape) > 1 else part)
        at += n
    return found


def block_vectors(r: Array, tensors: Tensors, blocks: str) -> list[Array]:
    """The part of the vector that each block is about."""
    if blocks == "tensor":
        return [piece.ravel() for piece in pieces(r, tensors)]
    return [np.atleast_1d(row) for piece in pieces(r, tensors) for row in piece]


def outer(r: Array, shape: str, tensors: Tensors, blocks: str) -> Array:
    """What one residual adds to P."""
    if shape == "full":
        return np.outer(r, r).ravel()
    if shape == "block":
        return np.concatenate([np.outer(b, b).ravel() for b in block_vectors(r, tensors, blocks)])
    parts = []
    for piece in pieces(r, tensors):
        if piece.ndim == 1:
            parts.append(piece**2)
        else:
            parts += [(piece @ piece.T).ravel(), (piece.T @ piece).ravel()]
    return np.concatenate(parts)


def dense_root(p: Array, d: int, shape: str, tensors: Tensors, blocks: str) -> Array:
    """The square root of the covariance matrix that P stands for."""
    if shape == "full":
        return root(p.reshape(d, d))
    matrices, at = [], 0

    def take(n: int) -> Array:
        nonlocal at
        at += n
        return p[at - n : at]

    if shape == "block":
        for b in block_vectors(np.zeros(d), tensors, blocks):
            matrices.append(root(take(len(b) ** 2).reshape(len(b), len(b))))
    else:
        for piece in pieces(np.zeros(d), tensors):
            if piece.ndim == 1:
                matrices.append(np.diag(np.sqrt(take(len(piece)))))
            else:
                rows, columns = piece.shape
                a = take(rows**2).reshape(rows, rows)
                b = take(columns**2).reshape(columns, columns)
                matrices.append(np.kron(root(a), root(b)) / np.sqrt(max(np.trace(a), 1e-300)))
    return np.asarray(scipy.linalg.block_diag(*matrices))


def root(cov: Array) -> Array:
    """The root of a symmetric matrix from its singular values."""
    u, s, _ = scipy.linalg.svd((cov + cov.T) / 2)
    s[s < s.max() * len(s) * np.finfo(float).eps] = 0.0  # rounding: the rank is smaller
    return np.asarray((u * np.sqrt(s)) @ u.T)
