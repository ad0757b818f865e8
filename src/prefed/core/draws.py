"""Every random draw of a run, keyed by (seed, purpose, round, client) and in some by the step.

No draw depends on a global generator or on how many draws came before it. So cohorts and batches
are the same in every engine, on any number of workers, and after a resume. The key goes straight
into a counter-based generator (Philox): (seed, purpose) is its key, (round, client, step) its
counter.
"""

import ctypes
import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.core.c_programs import CannotCompile, compiled

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]


def generator(
    seed: int, purpose: str, round: int = 0, client: int = 0, step: int = 0
) -> np.random.Generator:
    key = np.array([seed, zlib.crc32(purpose.encode())], dtype=np.uint64)
    counter = np.array([0, step, client, round], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


_local = threading.local()


def _brief(seed: int, purpose: str, round: int, client: int) -> np.random.Generator:
    """The same generator, valid until the thread's next call of this: making one anew costs more
    than most draws."""
    if not hasattr(_local, "generator"):
        _local.generator = generator(0, "")
        _local.state = _local.generator.bit_generator.state
    state = _local.state
    state["state"]["key"][:] = seed, zlib.crc32(purpose.encode())
    state["state"]["counter"][:] = 0, 0, client, round
    _local.generator.bit_generator.state = state
    found: np.random.Generator = _local.generator
    return found


def torch_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A seed for torch's own generators: initial weights, dropout."""
    return int(generator(seed, purpose, round, client).integers(1 << 62))


def cohort(
    seed: int, round: int, clients: int, size: int | None, purpose: str = "cohort"
) -> list[int]:
    """The clients of a round: drawn uniformly without replacement, in ascending order."""
    if size is None or size == clients:
        return list(range(clients))
    drawn = generator(seed, purpose, round).choice(clients, size, replace=False, shuffle=False)
    found: list[int] = np.sort(drawn).tolist()
    return found


def answering(seed: int, round: int, cohort: list[int], dropout: float) -> list[int]:
    """The clients of a cohort that answer: each is lost with the chance `dropout`, by itself."""
    if not dropout:
        return cohort
    return [c for c in cohort if generator(seed, "answer", round, c).random() >= dropout]


def batches(seed: int, round: int, client: int, samples: int, count: int) -> Numbers:
    """`count` sample indices: uniform, with replacement."""
    return _brief(seed, "batches", round, client).integers(samples, size=count)


def batches_of(
    seed: int, round: int, clients: Sequence[int], samples: Sequence[int], count: int
) -> Numbers:
    """`batches` of several clients, a row for each: the same numbers in a fraction of the time,
    as NumPy makes them of the generator's bits (Lemire's method on 32 of them)."""
    high = np.array(samples, np.uint64)
    if _batches_in_c is not None:
        drawn, again = _drawn_in_c(seed, round, clients, high, count)
    else:
        drawn, again = _drawn(seed, round, clients, high, count)
    for row in np.flatnonzero(again).tolist():  # NumPy draws once more, or otherwise
        drawn[row] = batches(seed, round, clients[row], samples[row], count)
    return drawn


def _drawn(
    seed: int, round: int, clients: Sequence[int], samples: Any, count: int
) -> tuple[Numbers, Any]:
    """The numbers, and which rows are NumPy's only if it draws them."""
    halves = -(-count // 2)
    bits = np.empty((len(clients), halves), "<u8")
    source = _brief(seed, "batches", round, 0).bit_generator
    for row, client in zip(bits, clients, strict=True):
        _local.state["state"]["counter"][2] = client
        source.state = _local.state
        row[:] = source.random_raw(halves)
    high = samples[:, None]
    product = bits.view("<u4")[:, :count] * high
    again = (product & 0xFFFFFFFF) < (2**32 - high) % np.maximum(high, 1)
    again |= (high >= 2**32) | (high == 0)
    return (product >> 32).astype(np.int64), again.any(1)


_batches_in_c: Any = None


def compile_batches() -> None:
    """Draw batches in C from now on, where there is a compiler: the same numbers, and other threads
    need not wait for the interpreter's lock meanwhile. For engines that compile anyhow."""
    global _batches_in_c
    source = files("prefed.core").joinpath("batches.c").read_text()
    with suppress(CannotCompile):
        _batches_in_c = compiled(f"{philox()}\n{source}").batches


def _drawn_in_c(
    seed: int, round: int, clients: Sequence[int], samples: Any, count: int
) -> tuple[Numbers, Any]:
    drawn, again = np.empty((len(clients), count), np.int64), np.empty(len(clients), np.uint8)
    key = np.array([seed, zlib.crc32(b"batches")], np.uint64)
    _batches_in_c(
        *map(ctypes.c_int64, drawn.shape), key.ctypes, ctypes.c_uint64(round),
        np.array(clients, np.uint64).ctypes, samples.ctypes, drawn.ctypes, again.ctypes,
    )  # fmt: skip
    return drawn, again


def philox() -> str:
    """The generator in C."""
    return files("prefed.core").joinpath("philox.c").read_text()


def epochs(seed: int, round: int, client: int, samples: int, count: int) -> Numbers:
    """`count` sample indices: one shuffled pass over the samples after another. A batch may reach
    into the next pass, so all are of one size, and no sample is used more than once more often
    than another."""
    passes = -(-count // samples)
    drawn = np.arange(samples * passes).reshape(passes, samples)
    np.remainder(drawn, samples, out=drawn)
    _brief(seed, "epochs", round, client).permuted(drawn, axis=1, out=drawn)
    return drawn.reshape(-1)[:count]


def held_out(seed: int, client: int, samples: int, share: float) -> tuple[Numbers, Numbers]:
    """This share of a client's sample indices, and the rest, each in ascending order. At least one
    is held out, and at least one is left."""
    cut = min(max(1, round(share * samples)), samples - 1)
    order = _brief(seed, "client test", 0, client).permutation(samples)
    return np.sort(order[:cut]), np.sort(order[cut:])


def uniform(
    seed: int, purpose: str, round: int, client: int, step: int, shape: Sequence[int]
) -> Tensor:
    """Random numbers in [0, 1), as float64."""
    return torch.from_numpy(generator(seed, purpose, round, client, step).random(tuple(shape)))


class Noise:
    """Random numbers of 16 bits for each client, as int16: all at once, or one piece after another,
    each of which but the last has a multiple of four."""

    def __init__(self, seed: int, purpose: str, round: int, clients: Sequence[int]) -> None:
        self._of, self.round, self.clients, self._drawn = (seed, purpose, round), round, clients, 0
        self.key = np.array([seed, zlib.crc32(purpose.encode())], np.uint64)
        """Philox's."""

    def __call__(self, size: int) -> Tensor:
        """The next (C, size)."""
        # One generator serves all clients, each at its own place: making one takes longer than
        # most draws. It has 4 numbers of 64 bits for each value of its counter.
        source, (seen, rest) = _brief(*self._of, 0).bit_generator, divmod(self._drawn, 4)
        count = -(-size // 4)
        found = np.empty((len(self.clients), count), np.uint64)
        for row, client in zip(found, self.clients, strict=True):
            _local.state["state"]["counter"][:3] = seen, 0, client
            source.state = _local.state
            row[:] = source.random_raw(rest + count)[rest:]
        self._drawn += count
        return torch.from_numpy(found.view(np.int16))[:, :size]


def noise(seed: int, purpose: str, round: int, clients: Sequence[int], size: int) -> Tensor:
    """The first numbers of `Noise` (C, size)."""
    return Noise(seed, purpose, round, clients)(size)


def uniforms(seed: int, purpose: str, clients: Numbers, round: int = 0) -> Floats:
    """A number above 0 and below 1 for each client, all at once: for whole populations.

    The key makes the start of a SplitMix64 sequence, of which client c has number c. So a client's
    number depends neither on which others are asked for nor on their order.
    """
    start = _brief(seed, purpose, round, 0).bit_generator.random_raw()
    z = np.array(clients, dtype=np.uint64)
    z += np.uint64(1)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    z >>= np.uint64(12)  # 52 bits, so that a half can be added exactly
    return (z.astype(np.float64) + 0.5) * 2.0**-52
