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

from jaxpar.config import InputError

Rows = dict[str, np.ndarray]
"""Examples stacked: `tokens` int32[n, T], `targets` int32[n, T] and `mask` bool[n, T], true where a target counts."""


class Span(NamedTuple):
    """`tokens[start:stop]` of a token file; nothing is read before a window is."""

    tokens: np.ndarray
    start: int
    stop: int
    name: str = "tokens"
    """Of the file, for people."""

    def windows(self, sequence_length: int) -> int:
        """How many windows fit."""
        return max((self.stop - self.start - 1) // sequence_length, 0)


def unknown(ids: np.ndarray, vocab_size: int) -> np.ndarray | None:
    """Where ids are not in `0 .. vocab_size - 1`, a boolean for each; None, which is found in one pass: nowhere.

    Example:
        >>> unknown(np.array([0, 7, -1, 8], np.int32), vocab_size=8).tolist()
        [False, False, True, True]
        >>> unknown(np.array([0, 7]), vocab_size=8)
    """
    unsigned = ids.view(f"u{ids.dtype.itemsize}")  # in which negative ids are the largest
    return unsigned >= vocab_size if unsigned.max(initial=0) >= vocab_size else None


class Windows:
    """The windows of several spans, numbered through.

    Args:
        spans: Where to cut windows from; none runs from one span into the next.
        sequence_length: T, in tokens.
        vocab_size: Of the model that is to read them.

    Example:
        >>> spans = [Span(np.arange(10), 0, 10), Span(np.arange(100, 109), 1, 9)]
        >>> windows = Windows(spans, sequence_length=4, vocab_size=109)
        >>> len(windows)
        3
        >>> windows.read([1, 2])["targets"].tolist()
        [[5, 6, 7, 8], [102, 103, 104, 105]]
    """

    def __init__(self, spans: Sequence[Span], sequence_length: int, vocab_size: int):
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self._spans = [span for span in spans if span.windows(sequence_length)]
        self._ends = list(accumulate(span.windows(sequence_length) for span in self._spans))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, numbers: Sequence[int]) -> Rows:
        """The windows with these numbers, in this order, in fresh arrays; the mask is all true.

        Raises:
            InputError: One holds an id that the vocabulary has not. Every id is looked at here, whatever the file's
                header promises: files get damaged.
        """
        length = self.sequence_length
        read = np.empty((len(numbers), length + 1), np.int32)
        for row, number in zip(read, numbers, strict=True):
            span, start = self._place(number)
            row[:] = span.tokens[start : start + length + 1]
        if (where := unknown(read, self.vocab_size)) is not None:
            row, column = np.argwhere(where)[0].tolist()
            span, start = self._place(numbers[row])
            raise InputError(
                f"{span.name} holds the id {span.tokens[start + column]} at token {start + column} (the first is 0), "
                f"but model.vocab_size={self.vocab_size} allows only ids from 0 to {self.vocab_size - 1}, and its "
                "header promised none above. It is damaged, or `jaxpar tokenize` did not make it: copy it again from "
                "where it is whole, or delete it and make it again."
            )
        mask = np.ones((len(numbers), length), np.bool_)
        return {"tokens": read[:, :-1].copy(), "targets": read[:, 1:].copy(), "mask": mask}

    def _place(self, number: int) -> tuple[Span, int]:
        """The span that holds a window, and the index of the window's first token in the file."""
        which = bisect.bisect_right(self._ends, number)
        span = self._spans[which]
        before = self._ends[which - 1] if which else 0
        return span, span.start + (number - before) * self.sequence_length


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
        for span in spans:
            count = span.windows(sequence_length)
            # A window reads one token past its inputs; the tokens held out begin after that.
            cut = span.start + left * sequence_length + 1 if 0 < left < count else (span.stop if left else span.start)
            train.append(span._replace(stop=cut))
            validation.append(span._replace(start=cut))
            left = max(left - count, 0)
        if held >= total or sum(span.windows(sequence_length) for span in validation):
            return train, validation
        held += 1  # beginning one token later cost the only window
