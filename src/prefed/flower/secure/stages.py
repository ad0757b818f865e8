"""What server and nodes say to each other, in four stages.

KEYS      here is your neighbourhood            -> two public keys
SHARES    here are your neighbours' keys        -> an encrypted share for each of them
MASKED    here are your neighbours' shares; train -> the masked vector
UNMASK    these sent a vector, those did not    -> one share of each
"""

import hashlib
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from prefed.core.errors import PrefedError
from prefed.flower import protocol as p

KEYS, SHARES, MASKED, UNMASK = "secure_keys", "secure_shares", "secure_masked", "secure_unmask"
"""The stages: names of actions of the ClientApp. MASKED trains, the others are queries."""

RECORD = "secure"
"""ConfigRecord of every message of a stage, and of the answers of all but MASKED."""
VECTOR = "masked"
"""ArrayRecord of the answer to MASKED, and the one array in it."""

SESSION = "session"
"""16 random bytes: one try at one sum. Keys are never used in another."""
ROUND = "round"
NUMBER = "number"
"""Of a node: the partition that it has."""
NEIGHBOURS = "neighbours"
"""Of a node, itself included, in order: the place of each says which share is its."""
THRESHOLD = "threshold"
"""Shares that give a secret away."""
NUMBERS, MASK_KEYS, CIPHER_KEYS = "numbers", "mask-keys", "cipher-keys"
TEXTS = "ciphertexts"
SURVIVORS, DROPPED = "survivors", "dropped"
SHARES_OF = "shares"
EXPONENTS, TOTAL, LARGEST = "exponents", "total-weight", "largest-weight"
NOT_FINITE = "not-finite"
"""In place of a vector: training diverged."""

LONGEST_KEY, LONGEST_SHARE, LONGEST_TEXT = 512, 512, 2048
SESSION_BYTES = 16
FEWEST = 3
"""Nodes in a sum: of two, each would know the other's part."""


class Unexpected(PrefedError):
    """A message that is not what was agreed on."""


def read(record: object, **kinds: Any) -> dict[str, Any]:
    """The values of a record that came in, by their Python names: a type, or a list with a type
    for a list of such. Nothing in it is known to be true."""
    if not isinstance(record, ConfigRecord):
        raise Unexpected("it has no record of secure aggregation")
    found = {}
    for name, kind in kinds.items():
        value = record.get(name.replace("_", "-"))
        if isinstance(kind, list):
            value = [] if value is None else value  # an empty list may not survive the way
            good = type(value) is list and all(type(item) is kind[0] for item in value)
        else:
            good = type(value) is kind
        if not good:
            raise Unexpected(f"{name}: {str(value)[:60]!r} is not what was agreed on")
        found[name] = value
    return found


def by_number(numbers: list[int], values: list[bytes], longest: int) -> dict[int, bytes]:
    """A value for each number, which may occur once."""
    if len(numbers) != len(values) or len({*numbers}) != len(numbers):
        raise Unexpected(f"{len(values)} values for the nodes {numbers}")
    if any(not 0 < len(value) <= longest for value in values):
        raise Unexpected("a key or a share of impossible length")
    return dict(zip(numbers, values, strict=True))


def common(content: RecordDict) -> bytes:
    """A digest of what every node is told alike: the model, the bounds, the round and the run. It
    goes into the masks of pairs, so that these cancel only between nodes that were told the same:
    a server that shows one node another model than the rest gets no sum (Pasquini et al. 2022)."""
    arrays, ask, record = (content.get(key) for key in (p.SERVER, p.ASK, RECORD))
    if not (
        isinstance(arrays, ArrayRecord)
        and isinstance(ask, ConfigRecord)
        and isinstance(record, ConfigRecord)
    ):
        raise Unexpected("the server shows no model")
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        for part in (name.encode(), str((array.dtype, array.shape)).encode(), array.data):
            found.update(len(part).to_bytes(8, "big") + hashlib.sha256(part).digest())
    told = [ask.get(key) for key in (p.ROUND, p.STEPS, p.RUN, p.CONFIG)]
    told += [record.get(key) for key in (SESSION, EXPONENTS, TOTAL, LARGEST)]
    found.update(repr(told).encode())
    return found.digest()


def size(record: ConfigRecord) -> int:
    """The bytes of keys, shares and numbers in it."""

    def one(value: Any) -> int:
        if isinstance(value, list):
            return sum(map(one, value))
        return len(value) if isinstance(value, bytes) else 8

    return sum(one(value) for value in record.values())
