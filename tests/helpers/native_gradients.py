"""Gradients of a program in C beside autograd's, and text for models of it."""

import torch
from torch import Tensor, nn

import prefed
from prefed.core.layout import Layout
from prefed.training.engines.native_program import Program

SYMBOLS, LENGTH = 7, 21


def text(clients: int = 4) -> prefed.FederatedData:
    generator = torch.Generator().manual_seed(0)
    made = []
    for n in (7, 12, 9, 6)[:clients]:
        line = torch.randint(SYMBOLS, (n, LENGTH + 1), generator=generator)
        made.append((line[:, :-1].to(torch.uint8), line[:, 1:].contiguous()))
    return prefed.FederatedData(made, test=made[0])


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
