"""Arrays of which only some rows travel: gradients of embeddings in which no token touched the other rows.

A row is left out if all its bits are zero, so that what arrives is bit for bit what would have come dense.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MATRIX = 2


@dataclass(frozen=True)
class Rows:
    """An array given by some of its rows.

    Attributes:
        numbers: i32[N], of the rows given, rising.
        values: [N, ...], those rows.
        count: rows of the whole array.
    """

    numbers: np.ndarray
    values: np.ndarray
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return self.count, *self.values.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """Of the whole array."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.numbers.nbytes + self.values.nbytes


Sent = np.ndarray | Rows
"""What travels in place of an array."""


def without_zeros(array: np.ndarray) -> Sent:
    """The rows with any bit set, if to name them takes fewer bytes than to send all.

    Example:
        >>> table = np.zeros((1000, 4), np.float32)
        >>> table[7] = 1, 2, 3, 4
        >>> sent = without_zeros(table)
        >>> sent.numbers, sent.nbytes
        (array([7], dtype=int32), 20)
        >>> total = np.zeros(sent.shape, sent.dtype)
        >>> add(total, sent, 1)
        >>> bool((total == table).all())
        True
    """
    if array.ndim < MATRIX or not array.size:
        return array
    bits = np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
    return some(array, np.flatnonzero(bits.any(axis=1)))


def some(array: np.ndarray, numbers: np.ndarray) -> Sent:
    """These rows of an array, or all of it where that takes fewer bytes."""
    rows = Rows(numbers.astype(np.int32), array[numbers], len(array))
    return rows if rows.nbytes < array.nbytes else array


def sent_bytes(arrays: Mapping[str, Sent]) -> int:
    """Bytes that travel of several arrays."""
    return sum(sent.nbytes for sent in arrays.values())


def add(total: np.ndarray, sent: Sent, factor: float) -> None:
    """Add `factor` times an array to `total`, in place; rows that did not travel add nothing."""
    if isinstance(sent, np.ndarray):
        total += sent * total.dtype.type(factor)
    else:
        total[sent.numbers] += sent.values * total.dtype.type(factor)
