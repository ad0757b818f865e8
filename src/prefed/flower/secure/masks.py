"""The pseudo-random numbers that hide a vector.

AES-256 in counter mode over zeros, from the `cryptography` package, under a key that HKDF makes of
a secret. Flower's own generator (`pseudo_rand_gen`) folds the secret into 32 bits and feeds them
to a Mersenne Twister: four billion seeds can be tried, so it hides little, and is not used here.
"""

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

Vector = NDArray[np.uint64]
"""Integers modulo 2^64: numpy adds and subtracts them exactly so."""

CHUNK = 1 << 19
"""Numbers that are made at a time."""
ZEROS = bytes(8 * CHUNK)


def add_mask(vector: Vector, secret: bytes, purpose: bytes, sign: int = 1) -> None:
    """Add the numbers that the secret gives for that purpose, or subtract them; in place."""
    key = HKDF(hashes.SHA256(), 32, salt=None, info=b"prefed mask " + purpose).derive(secret)
    # The counter starts at zero: no key makes more than one mask.
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    for first in range(0, len(vector), CHUNK):
        part = vector[first : first + CHUNK]
        mask = np.frombuffer(stream.update(ZEROS[: part.nbytes]), "<u8")
        if sign > 0:
            part += mask
        else:
            part -= mask
