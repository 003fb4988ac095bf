"""Token files to examples: windows of a fixed length, cut one after the other.

Window i of a span of tokens takes `tokens[i*T : i*T + T + 1]`: T inputs, and for each the token after it as target. So
every token but the first is predicted once; the tail that fills no window is left out. Windows run across the ends
of documents, where the end-of-document token stands; attention does too.
"""

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

Rows = dict[str, np.ndarray]
"""Examples stacked: `tokens` int32[n, T], `targets` int32[n, T] and `mask` bool[n, T], true where a target counts."""


class Span(NamedTuple):
    """`tokens[start:stop]` of a token file; nothing is read before a window is."""

    tokens: np.ndarray
    start: int
    stop: int

    def windows(self, sequence_length: int) -> int:
        """How many windows fit."""
        return max((self.stop - self.start - 1) // sequence_length, 0)


class Windows:
    """The windows of several spans, numbered through.

    Args:
        spans: Where to cut windows from; none runs from one span into the next.
        sequence_length: T, in tokens.

    Example:
        >>> windows = Windows([Span(np.arange(10), 0, 10), Span(np.arange(100, 109), 1, 9)], sequence_length=4)
        >>> len(windows)
        3
        >>> windows.read([1, 2])["targets"].tolist()
        [[5, 6, 7, 8], [102, 103, 104, 105]]
    """

    def __init__(self, spans: Sequence[Span], sequence_length: int):
        self.sequence_length = sequence_length
        self._spans = [span for span in spans if span.windows(sequence_length)]
        self._ends = list(accumulate(span.windows(sequence_length) for span in self._spans))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, numbers: Sequence[int]) -> Rows:
        """The windows with these numbers, in this order, in fresh arrays; the mask is all true."""
        length = self.sequence_length
        read = np.empty((len(numbers), length + 1), np.int32)
        for row, number in zip(read, numbers, strict=True):
            which = bisect.bisect_right(self._ends, number)
            span = self._spans[which]
            before = self._ends[which - 1] if which else 0
            start = span.start + (number - before) * length
            row[:] = span.tokens[start : start + length + 1]
        mask = np.ones((len(numbers), length), np.bool_)
        return {"tokens": read[:, :-1].copy(), "targets": read[:, 1:].copy(), "mask": mask}


def hold_out(spans: Sequence[Span], sequence_length: int, fraction: float) -> tuple[list[Span], list[Span]]:
    """Splits off the tail for validation, such that no token is on both sides.

    Args:
        spans: The whole.
        sequence_length: T, in tokens.
        fraction: Share of the windows to hold out, at least one window.

    Returns:
        The spans to train on, and those held out; either may hold no window when there are fewer than three.

    Example:
        >>> hold_out([Span(np.arange(100), 0, 100)], 4, 0.25)[1][0].start
        73
    """
    total = sum(span.windows(sequence_length) for span in spans)
    held = max(1, round(total * fraction))
    while True:
        train, validation, left = [], [], total - held
        for tokens, start, stop in spans:
            count = Span(tokens, start, stop).windows(sequence_length)
            # A window reads one token past its inputs; the tokens held out begin after that.
            cut = start + left * sequence_length + 1 if 0 < left < count else (stop if left else start)
            train.append(Span(tokens, start, cut))
            validation.append(Span(tokens, cut, stop))
            left = max(left - count, 0)
        if held >= total or sum(span.windows(sequence_length) for span in validation):
            return train, validation
        held += 1  # beginning one token later cost the only window
