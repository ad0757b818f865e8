"""A node's side of one session, as SecAgg+ has it. What the server says is checked before anything
secret depends on it, and nothing is said twice.

Torch is not needed here: three of the four stages answer without loading it.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    generate_key_pairs,
    public_key_to_bytes,
)

from prefed.flower.secure import stages as m
from prefed.flower.secure.masks import Vector, add_mask
from prefed.flower.secure.stages import Unexpected, by_number, read

KEY_BYTES = 48
"""Of a private key on Flower's curve, secp384r1."""
MASK_SHARE, KEY_SHARE = 4 + 3 * 16, 4 + 4 * 16
"""Bytes of a share, of the private mask's secret and of the private key of the pairwise masks."""


class Party:
    """Secrets live in `record`, which Flower keeps in the SuperNode's memory between messages."""

    def __init__(self, record: Mapping[str, Any] | None = None) -> None:
        self.record: dict[str, Any] = dict(record or {})

    def _expect(self, stage: str, ask: object) -> None:
        """Whether this stage comes next, in the session that this party is in."""
        session = read(ask, session=bytes)[m.SESSION]
        if self.record.get(m.SESSION) != session or self.record.get("next") != stage:
            raise Unexpected(
                f"the server asks for {stage} out of turn: each stage is answered once, in order"
            )

    def keys(self, ask: object, number: int) -> ConfigRecord:
        """Begin a session with new keys; whatever was left of another is forgotten."""
        told = read(ask, session=bytes, round=int, number=int, neighbours=[int], threshold=int)
        neighbours, threshold = told[m.NEIGHBOURS], told[m.THRESHOLD]
        if len(told[m.SESSION]) != m.SESSION_BYTES:
            raise Unexpected("the session has no proper name")
        if told[m.NUMBER] != number or number not in neighbours:
            raise Unexpected(f"the server takes this node for {told[m.NUMBER]}; it is {number}")
        if neighbours != sorted({*neighbours}) or neighbours[0] < 0:
            raise Unexpected("the neighbours are not in order, or one is there twice")
        if len(neighbours) < m.FEWEST:
            raise Unexpected(f"{len(neighbours)} nodes cannot hide one; {m.FEWEST} are the fewest")
        if not 2 * len(neighbours) <= 3 * threshold <= 3 * len(neighbours):
            raise Unexpected(
                f"a threshold of {threshold} of {len(neighbours)}: with less than two thirds a "
                f"server could ask some for one secret of a node, and others for the other"
            )
        (mask_key, mask_public), (cipher_key, cipher_public) = (
            generate_key_pairs(), generate_key_pairs(),
        )  # fmt: skip
        public = [public_key_to_bytes(key) for key in (mask_public, cipher_public)]
        self.record = told | {
            "next": m.SHARES,
            "mask-key": private_bytes(mask_key),
            "cipher-key": private_bytes(cipher_key),
            "public": public,
        }
        return ConfigRecord({m.MASK_KEYS: public[:1], m.CIPHER_KEYS: public[1:]})

    def shares(self, ask: object) -> ConfigRecord:
        """Make the secret of the private mask, and a share of it and of the key of the pairwise
        masks for each neighbour, encrypted for it alone."""
        self._expect(m.SHARES, ask)
        told = read(ask, numbers=[int], mask_keys=[bytes], cipher_keys=[bytes])
        mask_keys = by_number(told["numbers"], told["mask_keys"], m.LONGEST_KEY)
        cipher_keys = by_number(told["numbers"], told["cipher_keys"], m.LONGEST_KEY)
        own, threshold, neighbours = self._own()
        if not {own} <= mask_keys.keys() <= {*neighbours}:
            raise Unexpected(f"keys of {sorted(mask_keys)}; the neighbours are {neighbours}")
        if len(mask_keys) < threshold:
            raise Unexpected(f"{len(mask_keys)} nodes with keys, {threshold} are needed")
        if [mask_keys[own], cipher_keys[own]] != self.record["public"]:
            raise Unexpected("the server shows other keys as those of this node")
        every = [*mask_keys.values(), *cipher_keys.values()]
        if len({*every}) != len(every):
            raise Unexpected("two keys are the same")
        secret = os.urandom(32)
        masks = create_shares(secret, threshold, len(neighbours))
        keys = create_shares(self.record["mask-key"], threshold, len(neighbours))
        place = {number: index for index, number in enumerate(neighbours)}
        texts: dict[int, bytes] = {}
        shared: dict[int, bytes] = {}
        cipher_key = private_key(self.record["cipher-key"])
        for number in sorted(mask_keys.keys() - {own}):
            shared[number] = generate_shared_key(cipher_key, public_key(cipher_keys[number]))
            public_key(mask_keys[number])  # refused now, before there is something to mask
            plain = share_keys_plaintext_concat(
                own, number, masks[place[number]], keys[place[number]]
            )
            texts[number] = encrypt(shared[number], plain)
        del self.record["cipher-key"]
        self.record |= {
            "next": m.MASKED,
            "secret": secret,
            "own-shares": [masks[place[own]], keys[place[own]]],
            "peers": [*shared],
            "peer-secrets": [*shared.values()],
            "peer-keys": [mask_keys[number] for number in shared],
        }
        return ConfigRecord({m.NUMBERS: [*texts], m.TEXTS: [*texts.values()]})

    def take_shares(self, ask: object) -> None:
        """The shares of the neighbours that have sent theirs: with these it masks."""
        self._expect(m.MASKED, ask)
        told = read(ask, numbers=[int], ciphertexts=[bytes], round=int)
        own, threshold, neighbours = self._own()
        if told[m.ROUND] != self.record[m.ROUND]:
            raise Unexpected(f"the session is of round {self.record[m.ROUND]}")
        texts = by_number(told["numbers"], told["ciphertexts"], m.LONGEST_TEXT)
        secrets = self._peers("peer-secrets")
        if not texts.keys() <= secrets.keys():
            raise Unexpected(f"shares of {sorted(texts)}; keys came from {sorted(secrets)}")
        if len(texts) + 1 < threshold:
            raise Unexpected(f"{len(texts) + 1} nodes with shares, {threshold} are needed")
        # The place is that among the neighbours of the share's owner: the server knows them.
        places = range(1, len(neighbours) + 1)
        held = {own: self.record["own-shares"]}
        for number, text in sorted(texts.items()):
            try:
                plain = decrypt(secrets[number], text)
            except InvalidToken:
                raise Unexpected(f"the share of node {number} was changed on the way") from None
            source, target, mask, key = share_keys_plaintext_separate(plain)
            if (source, target) != (number, own):
                raise Unexpected(f"a share from {source} for {target} in place of node {number}'s")
            check_share(mask, MASK_SHARE, places)
            check_share(key, KEY_SHARE, places)
            held[number] = [mask, key]
        numbers = sorted(held)
        self.record |= {
            "holds": numbers,
            "mask-shares": [held[number][0] for number in numbers],
            "key-shares": [held[number][1] for number in numbers],
        }
        del self.record["peer-secrets"], self.record["own-shares"]

    def mask(self, vector: Vector, common: bytes) -> None:
        """Hide the vector, in place: the private mask, and one with each neighbour, which the two
        of them add with opposite signs. The secrets that made them are forgotten.

        common   a digest of what all nodes should have been told alike
        """
        own, _, _ = self._own()
        session = self.record[m.SESSION]
        add_mask(vector, self.record["secret"], private_purpose(session, own))
        key, keys = private_key(self.record["mask-key"]), self._peers("peer-keys")
        for number in self.record["holds"]:
            if number != own:
                shared = generate_shared_key(key, public_key(keys[number]))
                add_pair(vector, shared, session + common, own, number)
        del self.record["secret"], self.record["mask-key"]
        self.record["next"] = m.UNMASK

    def forget(self) -> None:
        """Nothing more is said in this session."""
        self.record = {}

    def unmask(self, ask: object) -> ConfigRecord:
        """Of each neighbour one share: of its private mask if its vector is in the sum, of its key
        if it is not. Both together would show its vector."""
        self._expect(m.UNMASK, ask)
        told = read(ask, survivors=[int], dropped=[int])
        survivors, dropped = told[m.SURVIVORS], told[m.DROPPED]
        own, threshold, _ = self._own()
        if sorted(survivors + dropped) != self.record["holds"]:
            raise Unexpected(
                f"survivors {survivors} and dropped {dropped} should be {self.record['holds']}, "
                f"each once: of a node that is in both lists both secrets would be known"
            )
        if own not in survivors or len(survivors) < threshold:
            raise Unexpected(f"{len(survivors)} survivors, {threshold} and this node are needed")
        masks, keys = self._held("mask-shares"), self._held("key-shares")
        numbers = sorted(survivors + dropped)
        shares = [masks[n] if n in survivors else keys[n] for n in numbers]
        self.forget()
        return ConfigRecord({m.NUMBERS: numbers, m.SHARES_OF: shares})

    def _own(self) -> tuple[int, int, list[int]]:
        return self.record[m.NUMBER], self.record[m.THRESHOLD], self.record[m.NEIGHBOURS]

    def _peers(self, name: str) -> dict[int, bytes]:
        return dict(zip(self.record["peers"], self.record[name], strict=True))

    def _held(self, name: str) -> dict[int, bytes]:
        return dict(zip(self.record["holds"], self.record[name], strict=True))


def private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_numbers().private_value.to_bytes(KEY_BYTES, "big")


def private_key(data: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(data, "big"), ec.SECP384R1())


def public_key(data: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = bytes_to_public_key(data)
    except Exception as error:  # whatever a hostile key makes the library raise
        raise Unexpected(f"a public key that cannot be read: {str(error)[:100]}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise Unexpected("a public key of another kind")
    return key


def check_share(share: bytes, length: int, places: Collection[int]) -> None:
    if len(share) != length or int.from_bytes(share[:4], "little") not in places:
        raise Unexpected("a share that is not this node's, or of impossible length")


def private_purpose(session: bytes, number: int) -> bytes:
    return b"of one " + session + number.to_bytes(8, "big")


def add_pair(vector: Vector, shared: bytes, told: bytes, own: int, other: int) -> None:
    """The mask that two nodes have in common if they were told the same, with the sign that it has
    for `own`."""
    low, high = sorted((own, other))
    purpose = b"of two " + told + low.to_bytes(8, "big") + high.to_bytes(8, "big")
    add_mask(vector, shared, purpose, 1 if own > other else -1)
