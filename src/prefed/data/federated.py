"""What a run trains on: samples divided among clients."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefed.core import draws
from prefed.core.batch import Inputs, Ragged
from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels
from prefed.data.held_out import HeldOut, part_of
from prefed.data.partition import Clients, MadeOnce, Partition, Partitions, divide
from prefed.data.sample_checks import check_samples, dtypes, shapes
from prefed.data.samples import (
    Collate,
    Labels,
    LazySamples,
    Pad,
    Read,
    Samples,
    to_samples,
)

Transform = Callable[[Inputs], Inputs]
"""A batch of x on its way to the model. One whose `takes_blocks` is true may be given those of many
clients at once, with a dimension more in front; others are called through vmap then."""
Augment = Callable[[Inputs, np.random.Generator], Inputs]
"""A batch of x and a generator keyed to it -> the batch with random changes. One whose
`keeps_shape` is true gives samples of the shape that they had."""


MOST_HELD = 10_000
"""Clients of a list whose arrays are looked at once, and not in every round."""


class FederatedData:
    """What a run trains on: the clients' samples, and a test set.

    A client is a pair (x, y) of arrays, or a data set: of torch (Dataset, Subset), of Hugging
    Face, or any with len() and samples by number. Data sets are read when a client trains, and
    only the samples that it uses; the test set is read at once. x may be a dict of arrays, which
    the model takes as keywords, or a tuple of tensors, which it takes in order.

    clients    a list of them, a partitioner of flwr-datasets, or what gives one for each number
    test       the same for all clients, or None for a run without evaluation
    transform  applied to each batch of x on its way to the model, so that x can stay uint8
    augment    applied to each batch of x before that, in training only: (x, generator) -> x
    parts      if `clients` is one data set, or one pair: the sample numbers of each client
    x, y       columns, if samples are dicts: "image", "label"; x may be {keyword: column}
    pad        fills rows of unequal length: a number, or {keyword: number}; y gets "y", or -100
    collate    makes x and y of a list of samples, if pairs and columns do not say it
    client_tests  test samples of each client, in the form of `clients`; see also `hold_out`
    """

    def __init__(
        self,
        clients: Any,
        test: Any = None,
        transform: Transform | None = None,
        augment: Augment | None = None,
        *,
        parts: Sequence[Any] | None = None,
        x: str | Sequence[str] | Mapping[str, str] = "x",
        y: str | Sequence[str] = "y",
        collate: Collate | None = None,
        pad: Pad = None,
        client_tests: Any = None,
    ) -> None:
        self.pad, self._read = pad, Read(x, y, collate, pad)
        self.clients = divide(clients, parts, self._read)
        if len(self.clients) == 0:
            raise PrefedError("clients: there is none")
        self.client_tests: Clients | None = None
        if client_tests is not None:
            self.client_tests = divide(client_tests, None, self._read)
            if len(self.client_tests) != len(self.clients):
                raise PrefedError(
                    f"client_tests: {len(self.client_tests)} for {len(self.clients)} clients; give "
                    f"one for each, with no samples where a client has none"
                )
        self.test = None if test is None else to_samples(test, "test", self._read)
        if isinstance(self.test, LazySamples) and len(self.test):
            self.test = Samples(*self.test.all())
        self.transform = transform
        self.augment = augment
        self._sizes, self._test_sizes = np.full((2, len(self.clients)), -1)
        """Samples of each client, where they are known."""
        self._held: dict[tuple[str, int], tuple[Any, Samples]] = {}
        """What was made of the arrays of some clients, in the memory of these."""
        self._looked_at = np.zeros(len(self.clients), dtype=bool)
        """Clients that were made on demand and are as `check` was told."""
        self._look: Callable[[str, Samples], None] | None = None
        self._labels: tuple[int, int | None] | None = None
        """How many classes there are and which label is none, known once `check` has been told."""

    def __len__(self) -> int:
        return len(self.clients)

    def client(self, number: int) -> Samples:
        samples = self._of(self.clients, number, "clients")
        self._sizes[number] = len(samples)
        if self._look is not None and not self._looked_at[number]:
            self._look(f"clients[{number}]", samples)
            self._looked_at[number] = True
        return samples

    def size(self, number: int) -> int:
        """How many samples a client has. Who was made on demand before is not made again for it."""
        if self._sizes[number] < 0:
            self.client(number)
        return int(self._sizes[number])

    def at_hand(self) -> "FederatedData":
        """The same for a block of clients, while it trains: who is made on demand is made once."""
        if isinstance(self.clients, Partition | Partitions | list | tuple):
            return self
        found = copy.copy(self)
        found.clients = MadeOnce(self.clients)
        return found

    def client_test(self, number: int) -> Samples:
        assert self.client_tests is not None
        samples = self._of(self.client_tests, number, "client_tests")
        self._test_sizes[number] = len(samples)
        return samples

    def test_size(self, number: int) -> int:
        """How many test samples a client has of its own."""
        if self._test_sizes[number] < 0:
            self.client_test(number)
        return int(self._test_sizes[number])

    def _of(self, clients: Clients, number: int, name: str) -> Samples:
        item, (given, samples) = clients[number], self._held.get((name, number), (None, None))
        if samples is not None and given is item:
            return samples
        where = f"{name}[{number}]"
        samples = to_samples(item, where, self._read)
        if isinstance(samples, LazySamples):
            return self._watched(clients, samples, where)
        alike = isinstance(clients, list | tuple) and isinstance(item, tuple)
        if alike and len(self._held) < MOST_HELD and samples.shares_memory(*item):
            self._held[name, number] = item, samples
        return samples

    def _watched(self, clients: Clients, samples: LazySamples, where: str) -> LazySamples:
        """Samples that raise, when they are read, for labels that the model does not have."""
        if self._labels is None:
            return samples.checked(None)

        def whose(number: int) -> str:
            if not isinstance(clients, Partition):
                return where
            return f"{where.partition('[')[0]}[{clients.owner(number)}]"

        return samples.checked(Labels(*self._labels, whose))

    def hold_out(self, share: float, seed: int = 0) -> "FederatedData":
        """The same with this share of each client's samples, drawn by the seed, as its own test
        samples. A client with a single sample keeps it, and has none to be tested on."""
        if not 0 < share < 1:
            raise PrefedError(f"share: should lie between 0 and 1, not {share}")
        rest, tests = (part_of(self, share, seed, part) for part in (1, 0))
        more: dict[str, Any] = {"pad": self.pad, "client_tests": tests}
        return FederatedData(rest, self.test, self.transform, self.augment, **more)

    @property
    def ignored(self) -> int | None:
        """The label that targets of unequal length are padded with, if they are."""
        some = self.client(0)
        y = some.take(torch.arange(min(1, len(some))))[1]
        return int(y.fill) if isinstance(y, Ragged) and are_labels(y) else None

    def add_noise(self, deviation: float, seed: int = 0) -> "FederatedData":
        """The same with Gaussian noise on what each client's model is given, as NIID-Bench makes
        features unequal: none for the first client, and evenly more up to this standard deviation
        for the last. A sample has the same noise whenever it is used; test samples have none."""
        if not deviation > 0:
            raise PrefedError(f"deviation: should be above 0, not {deviation}")
        if self.augment is not None:
            raise PrefedError("augment: noise comes after it, and is added now; leave one of them")

        def given(samples: Samples, where: str) -> tuple[Tensor, Tensor]:
            x, y = (None, None) if isinstance(samples, LazySamples) else samples.all()
            x = x if x is None or self.transform is None else self.transform(x)
            if not isinstance(x, Tensor) or not x.dtype.is_floating_point or y is None:
                raise PrefedError(f"{where}: noise is for arrays of floating-point numbers")
            return x, y

        noisy = []
        for number in range(len(self)):
            x, y = given(self.client(number), f"clients[{number}]")
            noise = draws.generator(seed, "client noise", 0, number).normal(size=tuple(x.shape))
            share = deviation * number / max(1, len(self) - 1)
            noisy.append((x + share * torch.from_numpy(noise).to(x.dtype), y))
        test = None if self.test is None else given(self.test, "test")
        tests = self.client_tests and [
            given(self.client_test(n), f"client_tests[{n}]") for n in range(len(self))
        ]
        return FederatedData(noisy, test, client_tests=tests)

    def check(
        self,
        classes: int | None,
        ignored: int | None = None,
        targets: bool = True,
        largest: float | None = None,
    ) -> None:
        """Raise for what would go wrong later. Clients that are made on demand are looked at when
        they are, and of those that are read on demand the labels.

        classes   how many there are, if y is to hold labels
        ignored   a label that stands for no class
        targets   whether y is looked at
        largest   that y may be, from 0 on, if it has bounds
        """
        self._labels = (classes, ignored) if classes is not None and targets else None
        for where, samples in self._checkable():
            check_samples(where, samples, classes, ignored, targets, largest)
            if isinstance(samples, LazySamples):
                named = self.client_tests if where.startswith("client_tests") else self.clients
                self._watched(named or self.clients, samples, where).check_column()
        if not isinstance(self.clients, Partition | HeldOut | list | tuple):
            zero = self.client(0)
            first = None if isinstance(zero, LazySamples) else dtypes(zero)

            def look(where: str, samples: Samples) -> None:
                check_samples(where, samples, classes, ignored, targets, largest)
                if first is None or isinstance(samples, LazySamples):
                    return
                if (found := dtypes(samples)) != first:
                    raise PrefedError(
                        f"{where}: (x, y) are {found}, and those of clients[0] {first}; they must "
                        f"have the same dtypes"
                    )

            self._look = look
        kinds = {dtypes(s) for _, s in self._checkable() if not isinstance(s, LazySamples)}
        if len(kinds) > 1:
            found = " and ".join(sorted(f"({x}, {y})" for x, y in kinds))
            raise PrefedError(f"clients, test: (x, y) must have the same dtypes, found {found}")

    def _checkable(self) -> Iterator[tuple[str, Samples]]:
        if isinstance(self.clients, Partition):
            sizes = np.diff(self.clients.ends, prepend=0)
            if not sizes.all():
                raise PrefedError(f"clients[{int(np.argmin(sizes))}]: it has no samples")
            yield "clients", self.clients.used
        elif isinstance(self.clients, HeldOut):
            yield from self.clients.data._checkable()
            return
        elif isinstance(self.clients, list | tuple):
            for number in range(len(self.clients)):
                yield f"clients[{number}]", self.client(number)
        if self.test is not None:
            yield "test", self.test
        if isinstance(self.client_tests, list | tuple):
            for number in range(len(self.client_tests)):
                if len(samples := self.client_test(number)):
                    yield f"client_tests[{number}]", samples
        elif isinstance(self.client_tests, Partition) and len(self.client_tests.used):
            yield "client_tests", self.client_tests.used


def of_other_shapes(data: FederatedData) -> Iterator[tuple[str, Samples]]:
    """Samples of clients and test sets that have another shape than those before them, once for
    each shape, and where they are. Those that are read on demand are not looked at."""
    known: set[Any] = set()
    for where, samples in data._checkable():
        if (
            isinstance(samples, LazySamples)
            or samples.is_ragged
            or (found := shapes(samples)) in known
        ):
            continue
        if known:
            yield where, samples
        known.add(found)
