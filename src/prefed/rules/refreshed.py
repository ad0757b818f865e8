"""What a rule works out anew every few steps, and holds in between: the clients whose turn it is.

They need not take turns together. State that clients keep, or steps that they take unequally many
of, leave those of one block with other counts, and each goes by its own.
"""

from torch import Tensor

from prefed.rules.rule import Field

STEPS_LEFT = Field((1,), cache=True)
"""The steps until the next time. Zero at first, so that the first step is one."""

Rows = Tensor | slice


def due(steps_left: Tensor, refresh: int) -> Rows | None:
    """Count a step of each client (C, 1), or of one holder (1). The rows whose turn it is: a slice
    if it is all of them, as it usually is, and None if there is none."""
    turn = (steps_left <= 0).view(-1)
    rows: Rows | None = None
    if turn.any():
        rows = slice(None) if turn.all() else turn.nonzero().view(-1)
        steps_left[rows] = refresh
    steps_left.sub_(1)
    return rows
