"""Async mode: the parts of some batches, each of which is to make exactly one update, and which to begin next."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Set
from typing import Any

Share = tuple[int, int]
"""Number of the batch, and which part of it."""


class Shares:
    """The parts of the batches `first .. stop - 1`.

    Args:
        first: number of the first batch.
        stop: number of the batch after the last.
        parts: of each batch.
        made: of these updates are made already.
        asked_to_stop: when this is true no further batch is begun; those that are begun are done whole.

    Attributes:
        left: those of which an update is still to be made.
    """

    def __init__(
        self, first: int, stop: int, parts: int, made: Set[Share], asked_to_stop: Callable[[], Any] = lambda: False
    ) -> None:
        self._todo = deque(s for s in itertools.product(range(first, stop), range(parts)) if s not in made)
        self.left = set(self._todo)
        self._unclaimed = set(self._todo)
        self._begun: Counter[Share] = Counter()
        self._last_begun = max([first, *(step for step, _ in made)])
        self._asked_to_stop = asked_to_stop

    def begin(self) -> Share | None:
        """What one who is free is to do: the next that nobody has begun, or at the end what a slow one is still at."""
        if self._asked_to_stop():
            while self._todo and self._todo[-1][0] > self._last_begun:
                self.left.discard(self._todo.pop())
        share = self._todo.popleft() if self._todo else self._begun_once()
        if share:
            self._begun[share] += 1
            self._last_begun = max(self._last_begun, share[0])
        return share

    def _begun_once(self) -> Share | None:
        return next((share for share, times in self._begun.items() if times == 1 and self.open(share)), None)

    def open(self, share: Share) -> bool:
        """Whether nobody has claimed it."""
        return share in self._unclaimed

    def claim(self, share: Share) -> bool:
        """Claim the update of a share: True for the first to ask, who then makes it."""
        first = share in self._unclaimed
        self._unclaimed.discard(share)
        return first

    def made(self, share: Share) -> None:
        """Its update is made."""
        self.left.discard(share)
