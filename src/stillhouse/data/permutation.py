"""A keyed permutation of 0..n-1 that is computed where it is asked for, never stored.

A Feistel network over the smallest even number of bits that holds n is a bijection whatever its
round function is; walking on while the answer is out of range makes it one of 0..n-1 (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"). 400 million images cost no memory.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


def permute(index: Sequence[int] | NDArray[np.int64], n: int, *key: object) -> NDArray[np.int64]:
    """Where the permutation of 0..n-1 that belongs to `key` sends each index."""
    values = np.array(index, dtype=np.uint64)
    if n < 1 or (len(values) and int(values.max()) >= n):
        raise ValueError(f"indices must lie in 0..{n - 1}")
    half = max(1, -(-(n - 1).bit_length() // 2))
    rounds = _round_keys(key)
    values = _feistel(values, half, rounds)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], half, rounds)
    return values.astype(np.int64)


def _round_keys(key: tuple[object, ...]) -> NDArray[np.uint64]:
    text = "/".join(str(part) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype=np.uint64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << shift | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of MurmurHash3: every bit of the input reaches every bit of the output."""
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ x >> np.uint64(33)
