"""Which examples a step reads: a function of (seed, step, row) alone, whatever the number of hosts.

Training: each source's windows are shuffled anew every epoch, and sources are interleaved by weight. Both are Grain
datasets of window *numbers*, with random access: row r of step s is element `s * global_batch + r`, so going on at any
step costs nothing, and nothing about the data but the step is ever stored.

Evaluation: the same windows each time, spread evenly over all that are held out.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import grain
import numpy as np

from jaxpar.config import InputError
from jaxpar.data.windows import Rows, Windows, unknown


class Examples(Protocol):
    """What `batches.Batches` reads from.

    Attributes:
        global_batch: Sequences in a step, over all devices.
        sequence_length: T, in tokens.
        vocab_size: Ids are in `0 .. vocab_size - 1`.
    """

    global_batch: int
    sequence_length: int
    vocab_size: int

    def rows(self, step: int, rows: Sequence[int]) -> Rows:
        """The examples in these rows, each in `0 .. global_batch - 1`, of the batch of this step."""
        ...


def read_rows(examples: Examples, step: int, rows: Sequence[int]) -> Rows:
    """`examples.rows(step, rows)`, fit for a device, where an id that a table has no row for would go unnoticed.

    Raises:
        InputError: An id of `tokens`, or one of `targets` that the mask does not leave out, is not in the vocabulary.
    """
    read = examples.rows(step, rows)
    for name in ("tokens", "targets"):
        where = unknown(read[name], examples.vocab_size) if name in read else None
        if where is not None and name == "targets" and "mask" in read:
            where &= read["mask"]
        if where is not None and where.any():
            row, column = np.argwhere(where)[0].tolist()
            raise InputError(
                f"the batch after step {step} has the id {read[name][row, column]} in its {name}, in row {rows[row]} "
                f"at position {column} (the first is 0), but model.vocab_size={examples.vocab_size} allows only ids "
                f"from 0 to {examples.vocab_size - 1}."
            )
    return read


def shuffled_order(counts: Sequence[int], weights: Sequence[float], seed: int) -> grain.MapDataset[int]:
    """An endless sequence of window numbers with random access.

    Within a source each window comes exactly once an epoch, in another order each epoch. Sources are interleaved
    evenly, in proportion to their weights (to within 1 %); a source whose epoch is over begins its next.

    Args:
        counts: Windows of each source; the sources are numbered through in this order.
        weights: Of each source, relative to the others; of no effect with one source.
        seed: Of the order.

    Returns:
        A Grain dataset of ints.

    Example:
        >>> order = shuffled_order([300, 100], [1, 3], seed=0)
        >>> sum(order[position] >= 300 for position in range(100))
        75
    """
    orders, start = [], 0
    for source, count in enumerate(counts):
        # Grain's epoch e shuffles by seed + e. Spreading the seeds keeps runs with seeds 0 and 1 from sharing orders.
        source_seed = int(np.random.SeedSequence([seed, source]).generate_state(1)[0])
        orders.append(grain.MapDataset.range(start, start + count).shuffle(seed=source_seed).repeat())
        start += count
    # Grain scales the smallest weight to 100 and cuts the others to whole numbers: hence the 1 % above.
    return orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, weights)


class TrainExamples:
    """The training batches, without end.

    Args:
        windows: All sources' windows, source after source.
        counts: Windows of each source.
        weights: Weight of each source.
        global_batch: Sequences in a step.
        seed: Of the order.
    """

    def __init__(self, windows: Windows, counts: Sequence[int], weights: Sequence[float], global_batch: int, seed: int):
        assert sum(counts) == len(windows), (counts, len(windows))
        self.global_batch = global_batch
        self.sequence_length = windows.sequence_length
        self.vocab_size = windows.vocab_size
        self._windows = windows
        self._order = shuffled_order(counts, weights, seed)
        self._order[0]  # Grain sets itself up on first use, which is not safe in two threads at once

    def rows(self, step: int, rows: Sequence[int]) -> Rows:
        """See `Examples.rows`. `step` may be any number from 0; the mask is all true."""
        first = step * self.global_batch
        return self._windows.read([cast(int, self._order[first + row]) for row in rows])


class EvaluationExamples:
    """The batches of an evaluation: always the same, each of its windows exactly once.

    The last batch is filled up with rows that the mask leaves out, so that a mean over unmasked tokens is a mean over
    the windows.

    Args:
        windows: Those held out. If the batches cannot hold all, they get an evenly spaced choice.
        global_batch: Sequences in a batch.
        batches: The most batches to make.
    """

    def __init__(self, windows: Windows, global_batch: int, batches: int):
        self.global_batch = global_batch
        self.sequence_length = windows.sequence_length
        self.vocab_size = windows.vocab_size
        self._windows = windows
        count = min(len(windows), global_batch * batches)
        self._numbers = [position * len(windows) // count for position in range(count)]

    @property
    def windows(self) -> int:
        """Windows in one evaluation."""
        return len(self._numbers)

    def __len__(self) -> int:
        """Batches in one evaluation."""
        return -(-self.windows // self.global_batch)

    def rows(self, step: int, rows: Sequence[int]) -> Rows:
        """See `Examples.rows`. `step` is the number of the batch, in `0 .. len(self) - 1`."""
        first = step * self.global_batch
        real = [first + row < self.windows for row in rows]
        # Rows past the end read some window, and count for nothing.
        read = self._windows.read([self._numbers[min(first + row, self.windows - 1)] for row in rows])
        read["mask"] &= np.array(real, np.bool_)[:, None]
        return read
