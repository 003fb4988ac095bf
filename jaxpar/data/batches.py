"""Batches as global `jax.Array`s; each host reads only the rows that its devices hold, ahead of time."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import grain
import jax
import numpy as np

from jaxpar.data.examples import Examples, read_rows
from jaxpar.data.windows import Rows


def rows_needed(indices: Iterable[tuple[slice, ...]], global_batch: int) -> list[int]:
    """The rows, each once and in order, that devices with these blocks of a `[global_batch, T]` array hold.

    Args:
        indices: Each device's block, as in the values of `Sharding.addressable_devices_indices_map`.
        global_batch: Rows in all.

    Returns:
        Row numbers.

    Example:
        >>> rows_needed([(slice(4, 6), slice(None)), (slice(0, 2), slice(None)), (slice(4, 6), slice(None))], 8)
        [0, 1, 4, 5]
    """
    return sorted({row for index in indices for row in range(*index[0].indices(global_batch))})


class Batches(Iterator[dict[str, jax.Array]]):
    """The batches of steps `start .. stop - 1`, read ahead in background threads by Grain.

    Each is a dict of `tokens` i32[B/data, T], `targets` i32[B/data, T] and `mask` bool[B/data, T] (with the sharding
    `P("data")`). Nothing is communicated: hosts agree because row r of step s is the same on all of them.

    Args:
        examples: Where rows come from.
        sharding: Of an array `[global_batch, T]`.
        start: The first step; after a restart, the step to go on at.
        stop: The step before which to end.
        prefetch: Batches to read ahead, at least 1.

    `next` raises `InputError` when one of this host's rows holds an id that is not in the vocabulary.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> class Counting:
        ...     global_batch, sequence_length, vocab_size = 2, 3, 10
        ...     def rows(self, step, rows):
        ...         return {"tokens": np.full((len(rows), 3), step, np.int32)}
        >>> with Batches(Counting(), jax.NamedSharding(mesh, jax.P("data")), start=5, stop=7) as batches:
        ...     [batch["tokens"].tolist() for batch in batches]
        [[[5, 5, 5], [5, 5, 5]], [[6, 6, 6], [6, 6, 6]]]
    """

    def __init__(self, examples: Examples, sharding: jax.sharding.Sharding, start: int, stop: int, prefetch: int = 4):
        self._shape = (examples.global_batch, examples.sequence_length)
        self._sharding = sharding
        indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(self._shape)
        rows = rows_needed(indices.values(), examples.global_batch)
        self._position = {row: position for position, row in enumerate(rows)}
        # Two threads are enough to stay ahead, and leave the cores to XLA where it computes on the CPU.
        options = grain.ReadOptions(num_threads=min(2, prefetch), prefetch_buffer_size=prefetch)
        steps = grain.MapDataset.range(start, stop)
        self._reading = iter(steps.map(lambda step: read_rows(examples, step, rows)).to_iter_dataset(options))

    def __next__(self) -> dict[str, jax.Array]:
        return self._on_devices(next(self._reading))

    def refusal(self) -> dict[str, jax.Array]:
        """A batch for the step whose own `next` raised and in which other hosts wait for this one.

        The targets in this host's rows are -1, by which all hosts see that it was refused (`jaxpar.losses.count`).
        """
        shape = len(self._position), self._shape[1]
        tokens, targets, mask = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.ones(shape, np.bool_)
        return self._on_devices({"tokens": tokens, "targets": targets, "mask": mask})

    def _on_devices(self, read: Rows) -> dict[str, jax.Array]:
        return {name: self._to_global(array) for name, array in read.items()}

    def _to_global(self, read: np.ndarray) -> jax.Array:
        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "no device of this process is outside the mesh"
            rows = range(*index[0].indices(self._shape[0]))
            first = self._position[rows.start]  # a block's rows are neighbours, here as in the whole
            return read[first : first + len(rows), index[1]]

        return jax.make_array_from_callback(self._shape, self._sharding, block)

    def close(self) -> None:
        """Stops the threads."""
        self._reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
