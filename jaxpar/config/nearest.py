"""The legal numbers next to one that is not."""

import math
from collections.abc import Iterable


def multiples(value: int, of: int) -> str:
    """The multiples of `of` next to `value`, for people.

    Example:
        >>> multiples(18, of=8), multiples(3, of=8)
        ('16 or 24', '8')
    """
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def nearest(legal: Iterable[int], value: int) -> str:
    """The legal numbers next to `value`, for people.

    Example:
        >>> nearest([1, 2, 4, 8], 3), nearest([1, 2, 4, 8], 11)
        ('2 or 4', '8')
    """
    below, above = [n for n in legal if n <= value], [n for n in legal if n > value]
    return " or ".join(str(n) for n in sorted(below)[-1:] + sorted(above)[:1])


def divisors(value: int) -> list[int]:
    """All divisors of `value`.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})
