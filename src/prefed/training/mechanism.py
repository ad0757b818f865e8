"""The Gaussian mechanism around the mean of a round: the one place where it is, for every engine,
on ranks and on Flower.

    contribution   of each client, as the server has decoded it: clipped
    spend          the ledger, before anything is noised
    release        the noised sum, divided by the number asked: all that the server goes on with

Clipping comes after decoding, so that no codec can carry a client past the bound. What is clipped
of a field that clients share is its change: what the client has less what the server sent. A client
that does not answer, or whose numbers are not finite, adds zero, and the divisor stays.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from prefed.algorithms import Algorithm
from prefed.core import draws, system_noise
from prefed.core.errors import PrefedError
from prefed.core.layout import Layout
from prefed.rules import State
from prefed.training.accounting import Accountant
from prefed.training.ledger import Ledger, Release
from prefed.training.messages import averaged
from prefed.training.privacy_setting import Privacy
from prefed.training.round import Update
from prefed.training.server_state import BUFFERS, LOCAL_STEPS, Server

if TYPE_CHECKING:
    from prefed.training.trainer import Record

BELOW = "below"
"""Among the values that are summed up: 1/2 for a client whose norm is below the clip, -1/2 for one
above, so that a client moves their sum by 1/2 at most (Andrew et al. 2021)."""
SAFE = 1e-12
"""Of the clip, and four times the rounding error of the weights' type: what clipped vectors stay
below the clip by, so that rounding takes none above it."""
FLOOR = 1e-6
"""What is added to a second moment before its logarithm is taken if the rule has no tau."""


@dataclass(eq=False)
class Mechanism:
    """algorithm    whose means are noised
    clients      how many there are
    cohort       how many a round asks, or is expected to: what sums are divided by
    rounds       that the run may have
    local_steps  of every client; None where they differ and nothing depends on them
    secret       noise and cohorts are from the system's randomness and not from the seed
    """

    privacy: Privacy
    algorithm: Algorithm
    clients: int
    cohort: int
    rounds: int
    local_steps: int | None
    seed: int
    secret: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    clip: Tensor = field(init=False)
    """Of the change of the weights in this round: one number, part of checkpoints."""

    def __post_init__(self) -> None:
        self.clip = torch.tensor([self.privacy.first_clip], dtype=torch.float64)
        self.secret |= self.privacy.secret_noise
        self.ledger.secret = self.secret
        self.accountant = Accountant.of(self.privacy, self.clients, self.cohort)

    # What it costs

    @cached_property
    def noise_multiplier(self) -> float:
        given, epsilon = self.privacy.noise_multiplier, self.privacy.epsilon
        if given is not None:
            return given
        assert epsilon is not None
        return self.accountant.noise_for(epsilon, self.rounds)

    @property
    def count_noise(self) -> float:
        adaptive = self.privacy.adaptive
        assert adaptive is not None
        return adaptive.count_noise or max(self.cohort / 20, self.noise_multiplier)

    @property
    def noise(self) -> float:
        """The noise multiplier of the sum: a little more than that of the whole if a count is
        released beside it, so that both together cost what they are said to."""
        z = self.noise_multiplier
        if self.privacy.adaptive is None:
            return z
        if z >= 2 * self.count_noise:
            raise PrefedError(
                f"privacy.clip.count_noise: {self.count_noise:g} on the count of clients below the "
                f"clip tells more than noise_multiplier = {z:g} allows; it must be above {z / 2:g}"
            )
        return float((z**-2 - (2 * self.count_noise) ** -2) ** -0.5)

    def prepare(self) -> None:
        """Raise, before the first round, what would be wrong in it."""
        noise = self.noise, self.noise_multiplier
        for release in self.ledger.releases:
            z = release.noise_multiplier
            if z and not math.isclose(z, noise[1], rel_tol=1e-9):
                raise PrefedError(
                    f"privacy: the ledger has rounds with noise_multiplier = {z:g}, and now it "
                    f"would be {noise[1]:g}; set privacy.noise_multiplier to go on for longer"
                )
        budget, one = self.privacy.epsilon, self.accountant.epsilon(noise[1], 1)
        if budget is not None and one > budget:
            raise PrefedError(
                f"privacy.epsilon: the first round alone costs {one:.4g}, more than {budget:g}; "
                f"raise noise_multiplier, or leave it out to have it computed"
            )

    def epsilon(self, round: int) -> float:
        """What everything up to this round has cost."""
        return self.accountant.epsilon(self.noise_multiplier, self.ledger.count(round))

    def over(self, round: int) -> str:
        """Why there is no round after this one; empty if there may be."""
        budget, z = self.privacy.epsilon, self.noise_multiplier
        if budget is None:
            return ""
        released = not self.secret and any(r.round == round + 1 for r in self.ledger.releases)
        spent = self.ledger.count(round)
        if released or self.accountant.epsilon(z, spent + 1) <= budget:
            return ""
        return (
            f"another round would pass the budget of epsilon = {budget:g} "
            f"(now {self.accountant.epsilon(z, spent):.4g} at delta = {self.privacy.delta:g})"
        )

    def spend(self, round: int, clients: Sequence[int]) -> "Record":
        """Write the release of this round, counted from 1, into the ledger; what the record has."""
        own = tuple(clients) if self.privacy.where == "client" else None
        self.ledger.spend(Release(round, self.noise_multiplier, own))
        adapts = {"clip": float(self.clip)} if self.privacy.adaptive else {}
        return {"epsilon": self.epsilon(round), **adapts}

    def see(self, record: "Record") -> None:
        """A round of before a resume: it has been released, whatever became of the ledger."""
        if "epsilon" in record and not record.get("skipped"):
            own = tuple(record["cohort"]) if self.privacy.where == "client" else None
            self.ledger.releases.append(Release(record["round"], 0.0, own))

    # Who is asked

    def draw_cohort(self, round: int) -> list[int]:
        poisson, size = self.privacy.sampling == "poisson", self.cohort
        if poisson and size < self.clients:
            chance = size / self.clients
            if self.secret:
                joins = system_noise.uniform(self.clients) < chance
            else:
                joins = draws.generator(self.seed, "poisson", round).random(self.clients) < chance
            return [int(client) for client in np.flatnonzero(joins)]
        seed = int.from_bytes(os.urandom(7)) if self.secret else self.seed
        return draws.cohort(seed, round, self.clients, size)

    # What clients contribute

    def contributions(self, server: Server, values: State) -> State:
        """Of each client, a row in every value: what is summed up. `values` is what would be
        averaged without privacy."""
        changes = self._changes(server, values)
        finite = torch.stack([rows.isfinite().all(1) for rows in changes.values()]).all(0)
        changes = {n: rows.where(finite.unsqueeze(1), 0.0) for n, rows in changes.items()}
        if self.privacy.where == "client":  # they have clipped and noised
            return changes
        norms = {
            name: torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / self.bound(name)
            for name, rows in changes.items()
        }
        if self.privacy.state == "joint":
            norms = dict.fromkeys(norms, torch.stack([*norms.values()]).square().sum(0).sqrt())
        clipped = {
            name: _shrink(rows, norms[name], server.weights.dtype) for name, rows in changes.items()
        }
        if self.privacy.adaptive:
            below = (norms["weights"] <= 1).double().sub_(0.5).where(finite, 0.0)
            clipped[BELOW] = below.unsqueeze(1)
        return clipped

    def contribution(self, server: Server, values: State) -> State:
        """Of one client, without rows."""
        rows = {name: value.unsqueeze(0) for name, value in values.items()}
        return {name: value[0] for name, value in self.contributions(server, rows).items()}

    def _changes(self, server: Server, values: State) -> State:
        """What of a client's values is clipped, (C, ...) made flat: the changes of the weights and
        of the fields that are sent."""
        return {
            name: rows if name == "weights" else self._change(name, rows, server)
            for name, rows in values.items()
            if name not in (LOCAL_STEPS, BUFFERS) and not name.endswith("_mass")
        }

    def _change(self, name: str, rows: Tensor, server: Server) -> Tensor:
        here, there = rows.double(), server.shared[name].double()
        match self.transform(name, server.layout):
            case "root":
                here, there = here.clamp(min=0).sqrt(), there.sqrt()
            case "log":
                floor = self._floor()
                here, there = (here.clamp(min=0) + floor).log(), (there + floor).log()
        return here - there

    def transform(self, name: str, layout: Layout) -> str:
        fields = self.algorithm.client_rule().fields(layout)
        return self.privacy.second_moments if fields[name].nonnegative else "none"

    def _floor(self) -> float:
        """Where a logarithm ends: the square of tau, below which a second moment does nothing."""
        found = self.algorithm.client_rule().preconditioner()
        return found[1] ** 2 if found and found[1] else FLOOR

    def bound(self, name: str) -> float:
        """The clip of a value; with state="joint" its unit in the vector of all."""
        clip, first = float(self.clip), self.privacy.first_clip
        if name == "weights":
            return clip
        follows = clip / first if self.privacy.state == "joint" else 1.0
        return self.privacy.state_clip[name] * follows

    def deviation(self, name: str) -> float:
        """Of the noise on the sum of a value. Separate fields have noise for their share of the
        budget: with shares that add up to one it is that of a single Gaussian."""
        share, shares = 1.0, self.privacy.shares()
        if self.privacy.state == "separate":
            share = shares.get(name, 1 - math.fsum(shares.values()))
        return self.noise * self.bound(name) / math.sqrt(share)

    def like(self, server: Server) -> State:
        """Names, types and shapes of what is summed up."""
        return self.contribution(server, averaged(self.algorithm, server))

    # What the server goes on with

    def release(self, server: Server, mean: State, answered: int, asked: int) -> State:
        """From the mean over those who answered, the mean that is released: all of what
        server_update takes."""
        like, released = self.like(server), dict[str, Tensor]()
        for name, value in like.items():
            total = value.new_zeros(value.shape, dtype=torch.float64)
            if name in mean:
                total = mean[name].double() * answered
            if self.privacy.where == "server":
                deviation = self.count_noise if name == BELOW else self.deviation(name)
                total += deviation * self._normal(name, server.round, total)
            released[name] = total / asked
        if (below := released.pop(BELOW, None)) is not None:
            self._adapt(0.5 + float(below))
        for name in released.keys() - {"weights"}:
            released[name] = self._undo(name, released[name], server)
        released |= self._masses(server)
        dtype = server.weights.dtype
        found = {name: value.to(dtype) for name, value in released.items()}
        steps = server.weights.new_tensor([float(self.local_steps or 1)], dtype=torch.float64)
        return found | {LOCAL_STEPS: steps}

    def _undo(self, name: str, change: Tensor, server: Server) -> Tensor:
        there = server.shared[name].double()
        match self.transform(name, server.layout):
            case "root":
                return there.sqrt().add_(change).clamp_(min=0).square_()
            case "log":
                floor = self._floor()
                return (there + floor).mul_(change.exp()).sub_(floor).clamp_(min=0)
        return there + change

    def _adapt(self, below: float) -> None:
        """The clip of the next round, from the noised share of clients below this one's."""
        adaptive = self.privacy.adaptive
        assert adaptive is not None
        self.clip *= math.exp(-adaptive.rate * (below - adaptive.quantile))

    def _masses(self, server: Server) -> State:
        """The weights that moving averages have gathered: they follow from the number of steps, so
        they tell nothing, and nobody has to be asked."""
        names = [name for name in server.values(self.algorithm) if name.endswith("_mass")]
        if not names:
            return {}
        w = server.weights.new_zeros(1)
        layout, rule = Layout.of([("w", w)]), self.algorithm.client_rule()
        state = {name: f.new(w) for name, f in rule.fields(layout).items()}
        for name in names:
            state[name].copy_(server.shared[name])
        for k in range(self.local_steps or 1):
            rule.fit(layout).step(w, torch.zeros_like(w), state, 0.0, k)
        return {name: state[name] for name in names}

    # Noise

    def on_clients(self, server: Server, update: Update, clients: Sequence[int]) -> Update:
        """With where="client", what these clients send: clipped and noised where they are."""
        if self.privacy.where == "server":
            return update
        rows = update.values["weights"]
        finite = rows.isfinite().all(1, keepdim=True)
        rows = rows.where(finite, 0.0)
        noisy = clipped(rows, float(self.clip)).double()
        for row, client in zip(noisy, clients, strict=True):
            row += self.deviation("weights") * self._normal("own", server.round, row, client)
        sent = update.values | {"weights": noisy.to(rows.dtype)}
        return replace(update, values=sent, losses=torch.zeros_like(update.losses))

    def _normal(self, name: str, round: int, like: Tensor, client: int = 0) -> Tensor:
        return normal(None if self.secret else self.seed, name, round, like, client)


def normal(seed: int | None, name: str, round: int, like: Tensor, client: int = 0) -> Tensor:
    """Standard normal numbers, float64; without a seed, from the system's randomness."""
    if seed is None:
        drawn = system_noise.normal(like.numel())
    else:
        generator = draws.generator(seed, f"privacy {name}", round, client)
        drawn = generator.standard_normal(like.numel())
    return torch.from_numpy(drawn).to(like.device).view(like.shape)


def clipped(rows: Tensor, clip: float) -> Tensor:
    """Rows (C, d), those that are longer than the clip scaled down to it."""
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / clip
    return _shrink(rows, norms, rows.dtype)


def _shrink(rows: Tensor, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows whose norm is above 1, in units of the clip, scaled down to it."""
    most = 1 - SAFE - 4 * torch.finfo(dtype).eps
    factor = (most / norms).clamp_(max=1).unsqueeze(1)
    return (rows * factor).to(dtype) if rows.dtype == torch.float64 else rows * factor.to(dtype)
