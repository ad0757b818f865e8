"""Attacks on what a server sees of one client.

Each takes `seen`, the tensors that the server has of a client (or believes to have: after noise, or
as a mean over a cohort), and `sent`, the global state that it had broadcast: weights, m and P. Both
are flat vectors under the names of an update. All else that they use is public: the model, beta1,
beta2, and for membership the sample in question.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Seen = dict[str, Tensor]

BETA1 = BETA2 = 0.9


def gradient_of_one_step(seen: Seen, sent: Seen) -> Tensor:
    """From P its distance from the old m, |g - m0|, for (g - m)^2 is beta1^2 (g - m0)^2; from m the
    sign. Without m in the upload every sign is taken for plus."""
    squares = (seen["P"] - BETA2 * sent["P"]).clamp(min=0) / (1 - BETA2)
    distance = squares.sqrt() / BETA1
    if "m" not in seen:
        return sent["m"] + distance
    return sent["m"] + distance * (seen["m"] - sent["m"]).sign()


def input_of_linear_layer(gradient: Tensor, inputs: int, outputs: int) -> Tensor:
    """The one sample behind the gradient of a linear layer with a bias, whose rows are multiples of
    it: the row of the weights divided by that of the bias, where that is largest."""
    weights, bias = gradient.split([inputs * outputs, outputs])
    row = bias.abs().argmax()
    found: Tensor = weights.view(outputs, inputs)[row] / bias[row]
    return found


def gradients(model: nn.Module, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of each sample by itself, (n, d)."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [value.shape for value in model.parameters()]

    def loss(flat: Tensor, one: Tensor, label: Tensor) -> Tensor:
        parts = flat.split([math.prod(shape) for shape in shapes])
        values = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        outputs: Tensor = functional_call(model, values, (one.unsqueeze(0),))
        return nn.functional.cross_entropy(outputs, label.unsqueeze(0))

    found: Tensor = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    return found


def membership_by_spread(seen: Seen, sent: Seen, samples: Tensor) -> Tensor:
    """How likely each sample, given by its gradient, is one that the client has. Near the optimum P
    is the mean of its samples' squared gradients, so those of a member stand out: the cosine of
    them with how P has moved, both in units of what is usual, which the broadcast P says."""
    usual = sent["P"] + sent["P"].mean() * 1e-3
    return _cosine(samples.square() / usual, (seen["P"] - sent["P"]) / usual)


def membership_by_change(seen: Seen, sent: Seen, samples: Tensor) -> Tensor:
    """The same by the change of the weights, which FedAvg sends as well."""
    return _cosine(-samples, seen["weights"])


def _cosine(rows: Tensor, vector: Tensor) -> Tensor:
    rows, vector = rows - rows.mean(0), vector - vector.mean()
    return nn.functional.cosine_similarity(rows, vector.unsqueeze(0))


def use_of_words(seen: Seen, sent: Seen, words: int, size: int, steps: int) -> Tensor:
    """For each row of the embedding, which comes first in the vector, how far its P is from what it
    would be had every gradient been zero: nothing at all for a word that the client does not have,
    whatever was broadcast."""
    m, P = sent["m"].clone(), sent["P"].clone()
    for _ in range(steps):
        m *= BETA1
        P = BETA2 * P + (1 - BETA2) * m.square()
    far = (seen["P"] - P)[: words * size].view(words, size)
    near = P[: words * size].view(words, size)
    return torch.where(far.abs() > 1e-9 * near, far, 0).abs().sum(1)


def auc(members: Tensor, others: Tensor) -> float:
    """The chance that a member scores higher than another; ties count half."""
    pairs = members.unsqueeze(1) - others.unsqueeze(0)
    return float(((pairs > 0).double() + (pairs == 0).double() / 2).mean())
