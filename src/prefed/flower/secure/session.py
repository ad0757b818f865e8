"""The server's side of one try at one sum: who is asked what, what is believed, and the sum.

A number is that of a node. Vectors are added up as they come; none is kept.
"""

import random
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from flwr.app import ConfigRecord
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from prefed.flower.secure import stages as m
from prefed.flower.secure.masks import Vector, add_mask
from prefed.flower.secure.party import (
    KEY_BYTES,
    KEY_SHARE,
    MASK_SHARE,
    add_pair,
    check_share,
    private_key,
    private_purpose,
    public_key,
)
from prefed.flower.secure.stages import Unexpected, by_number, read

SENT = {m.KEYS: "keys", m.SHARES: "shares", m.MASKED: "a masked vector"}


class TooFew(Exception):
    """Why there is no sum."""


def threshold(shares: int) -> int:
    """How many of a node's shares are needed: a third of those who hold them may be gone."""
    return shares - shares // 3


def neighbourhoods(numbers: Sequence[int], neighbours: int | None) -> dict[int, list[int]]:
    """Whom each node shares its secrets with, itself among them: everybody, or those within reach
    on a ring in random order, as in SecAgg+."""
    ring, reach = list(numbers), (neighbours or len(numbers)) // 2
    if neighbours is None or 2 * reach + 1 >= len(ring):
        return {number: sorted(ring) for number in ring}
    random.SystemRandom().shuffle(ring)
    return {
        number: sorted(ring[(place + offset) % len(ring)] for offset in range(-reach, reach + 1))
        for place, number in enumerate(ring)
    }


class Session:
    def __init__(self, numbers: Collection[int], round: int, neighbours: int | None = None) -> None:
        """numbers      the nodes that are asked
        neighbours   of each node; None is everybody
        """
        if len(numbers) < m.FEWEST:
            raise TooFew(
                f"the clients of this round are on {len(numbers)} nodes; {m.FEWEST} are the fewest "
                f"in a sum: ask more clients a round, or let there be more nodes"
            )
        self.name, self.round = secrets.token_bytes(m.SESSION_BYTES), round
        self.around = neighbourhoods(sorted(numbers), neighbours)
        self.threshold = threshold(len(next(iter(self.around.values()))))
        self.mask_keys: dict[int, bytes] = {}
        self.cipher_keys: dict[int, bytes] = {}
        self.texts: dict[int, dict[int, bytes]] = {}
        """For each node the encrypted shares that others have for it."""
        self.shared: set[int] = set()
        """The nodes that have sent their shares: everyone's masks have them as neighbours."""
        self.survivors: set[int] = set()
        """The nodes whose vectors are in the sum."""
        self.shares: dict[int, dict[int, bytes]] = {}
        """Of each node's secret that is asked for, the shares by who holds them."""
        self.common = b""
        """A digest of what all nodes were told alike when they trained."""
        self.sum: Vector | None = None
        self.key_bytes = 0
        """Of keys, shares and lists, both ways."""

    def ask(self, stage: str, number: int) -> ConfigRecord:
        """What a stage says to a node."""
        around = self.around[number]
        values: dict[str, Any] = {m.SESSION: self.name, m.ROUND: self.round}
        match stage:
            case m.KEYS:
                values |= {m.NUMBER: number, m.NEIGHBOURS: around, m.THRESHOLD: self.threshold}
            case m.SHARES:
                there = [n for n in around if n in self.mask_keys]
                values |= {
                    m.NUMBERS: there,
                    m.MASK_KEYS: [self.mask_keys[n] for n in there],
                    m.CIPHER_KEYS: [self.cipher_keys[n] for n in there],
                }
            case m.MASKED:
                there = [n for n in around if n in self.shared and n != number]
                texts = [self.texts[number][n] for n in there]
                values |= {m.NUMBERS: there, m.TEXTS: texts}
            case m.UNMASK:
                there = [n for n in around if n in self.shared]
                values |= {
                    m.SURVIVORS: [n for n in there if n in self.survivors],
                    m.DROPPED: [n for n in there if n not in self.survivors],
                }
        record = ConfigRecord(values)
        self.key_bytes += m.size(record)
        return record

    def asked(self, stage: str) -> list[int]:
        """The nodes that a stage goes to: those that answered the one before."""
        there: dict[str, Collection[int]] = {
            m.KEYS: self.around,
            m.SHARES: self.mask_keys,
            m.MASKED: self.shared,
            m.UNMASK: self.survivors,
        }
        return sorted(there[stage])

    def take_keys(self, number: int, record: object) -> None:
        told = read(record, mask_keys=[bytes], cipher_keys=[bytes])
        mask_key = by_number([number], told["mask_keys"], m.LONGEST_KEY)[number]
        cipher_key = by_number([number], told["cipher_keys"], m.LONGEST_KEY)[number]
        seen = {*self.mask_keys.values(), *self.cipher_keys.values()}
        if mask_key == cipher_key or {mask_key, cipher_key} & seen:
            raise Unexpected("a public key that is there already")
        public_key(mask_key), public_key(cipher_key)
        self.mask_keys[number], self.cipher_keys[number] = mask_key, cipher_key
        self._count(record)

    def take_shares(self, number: int, record: object) -> None:
        told = read(record, numbers=[int], ciphertexts=[bytes])
        texts = by_number(told["numbers"], told["ciphertexts"], m.LONGEST_TEXT)
        wanted = {n for n in self.around[number] if n in self.mask_keys} - {number}
        if texts.keys() != wanted:
            raise Unexpected(f"shares for the nodes {sorted(texts)}, not {sorted(wanted)}")
        for other, text in texts.items():
            self.texts.setdefault(other, {})[number] = text
        self.texts.setdefault(number, {})
        self.shared.add(number)
        self._count(record)

    def take_vector(self, number: int, vector: Vector) -> None:
        """The vector itself has been checked: its length, and that it is of integers."""
        if number not in self.shared or number in self.survivors:
            raise Unexpected("a vector that was not asked for")
        if self.sum is None:
            self.sum = vector.copy()
        else:
            self.sum += vector
        self.survivors.add(number)

    def take_secrets(self, number: int, record: object) -> None:
        told = read(record, numbers=[int], shares=[bytes])
        shares = by_number(told["numbers"], told["shares"], m.LONGEST_SHARE)
        wanted = {n for n in self.around[number] if n in self.shared}
        if shares.keys() != wanted:
            raise Unexpected(f"shares of the nodes {sorted(shares)}, not {sorted(wanted)}")
        for owner, share in shares.items():
            length = MASK_SHARE if owner in self.survivors else KEY_SHARE
            check_share(share, length, [self.around[owner].index(number) + 1])
        for owner, share in shares.items():
            self.shares.setdefault(owner, {})[number] = share
        self._count(record)

    def _count(self, record: object) -> None:
        assert isinstance(record, ConfigRecord)
        self.key_bytes += m.size(record)

    def check(self, stage: str) -> None:
        """Raise TooFew unless enough have answered this stage for the next."""
        if stage == m.UNMASK:
            if not self.is_complete:
                raise TooFew(f"fewer than {self.threshold} shares of a secret came back")
            return
        there: Collection[int] = self.survivors if stage == m.MASKED else self.shared
        there = self.mask_keys if stage == m.KEYS else there
        owners = self.shared if stage == m.MASKED else there  # whose secrets will be asked for
        for number in sorted(owners) or [min(self.around)]:
            around = self.around[number]
            if (found := sum(n in there for n in around)) < self.threshold:
                raise TooFew(
                    f"{len(there)} of {len(self.around)} nodes have sent {SENT[stage]}; of the "
                    f"{len(around)} around node {number} it takes {self.threshold}, not {found}"
                )
        if stage == m.MASKED and not self._is_connected():
            raise TooFew("the nodes that are left fall apart into groups with sums of their own")

    @property
    def is_complete(self) -> bool:
        """Whether the shares are enough for all secrets."""
        return all(len(self.shares.get(n, ())) >= self.threshold for n in self.shared)

    def _is_connected(self) -> bool:
        """Whether no part of the survivors has masks among itself alone."""
        reached, border = set[int](), {min(self.survivors)}
        while border:
            reached |= border
            border = {n for b in border for n in self.around[b] if n in self.survivors} - reached
        return reached == self.survivors

    def unmask(self) -> Vector:
        """The sum, without the private masks of those in it and without the pairwise masks that
        they have with those who are not."""
        assert self.sum is not None
        total = self.sum
        for number in sorted(self.shared):
            shares = sorted(self.shares[number].items())[: self.threshold]
            try:
                secret = combine_shares([share for _, share in shares])
            except ValueError:
                raise TooFew(f"the shares of node {number}'s secret do not fit together") from None
            if number in self.survivors:
                add_mask(total, secret, private_purpose(self.name, number), -1)
            else:
                self._remove_pairs(total, number, secret)
        return total

    def _remove_pairs(self, total: Vector, number: int, secret: bytes) -> None:
        try:
            key = private_key(secret)
            fits = len(secret) == KEY_BYTES
            fits &= public_key_to_bytes(key.public_key()) == self.mask_keys[number]
        except ValueError:
            fits = False
        if not fits:
            raise TooFew(f"the shares of node {number}'s key give another key")
        for other in self.around[number]:
            if other in self.survivors:
                shared = generate_shared_key(key, public_key(self.mask_keys[other]))
                # As if the one that is gone had sent a vector of zeros.
                add_pair(total, shared, self.name + self.common, number, other)
