"""Gradients of a program in C beside autograd's."""

import torch
from torch import Tensor, nn

from prefed.core.layout import Layout
from prefed.training.engines.native_program import Program


def compare(
    program: Program,
    model: nn.Module,
    layout: Layout,
    w: Tensor,
    batch: tuple[Tensor, Tensor],
    tolerance: float,
    by_largest: bool = False,
) -> None:
    """Of each client, losses and gradients equal up to this tolerance: of each number or, by the
    largest, as a share of the largest of its tensor."""
    x, y = batch
    g, losses = torch.full_like(w, 7.0), w.new_zeros(len(w))
    program.gradients(w, g, x, y, losses, program.scratch())
    for client in range(len(w)):
        views = layout.views(w[client])
        leaves = {name: view.clone().requires_grad_() for name, view in views.items()}
        output = torch.func.functional_call(model, leaves, (x[client],))
        loss = nn.functional.cross_entropy(output, y[client])
        found = torch.autograd.grad(loss, [*leaves.values()])
        torch.testing.assert_close(losses[client], loss, rtol=tolerance, atol=tolerance)
        for own, wanted in zip(layout.views(g[client]).values(), found, strict=True):
            largest = max(1.0, float(wanted.abs().max())) if by_largest else 1.0
            torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance * largest)
    losses.zero_()
    other = w.clone()
    other[1] = float("inf")
    program.gradients(other, g, x, y, losses, program.scratch())
    assert losses.isnan().tolist() == [client == 1 for client in range(len(w))]
