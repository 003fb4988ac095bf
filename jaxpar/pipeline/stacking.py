"""How a stack of layers is arranged over pipeline stages.

At rest and on disk the stacked parameters of the blocks are in model order, whatever the layout. In a run their
leading dim is split over `pipe`, so it is ordered by stage, then chunk, then position in the chunk, and chunks with
fewer layers than the largest are filled up with rows that the executor passes over: parameters with copies of a layer,
everything else with zeros.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.layers.layout import STACK
from jaxpar.pipeline.partition import Partition


@dataclass(frozen=True)
class Stacking:
    """Which layer each row of the stacked parameters holds.

    Attributes:
        layers: L, layers of the model.
        stages: S.
        chunks: v, chunks per stage.
        rows: layer number of each row, or -1 for a row of padding; `stages * chunks * height` of them.

    Example:
        >>> Stacking.of(Partition((2, 1, 1, 1), stages=2))  # parts in model order: stage 0, 1, 0, 1
        Stacking(layers=5, stages=2, chunks=2, rows=(0, 1, 3, -1, 2, -1, 4, -1))
    """

    layers: int
    stages: int
    chunks: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, partition: Partition) -> "Stacking":
        """Arrange the parts of a partition."""
        rows: list[int] = []
        for stage, chunk in itertools.product(range(partition.stages), range(partition.chunks)):
            layers = partition.layers(chunk, stage)
            rows += [*layers, *[-1] * (partition.height - len(layers))]
        return cls(sum(partition.counts), partition.stages, partition.chunks, tuple(rows))

    @property
    def height(self) -> int:
        """Rows of one chunk."""
        return len(self.rows) // (self.stages * self.chunks)

    @property
    def in_model_order(self) -> bool:
        """Nothing is moved or padded: one stage, or one chunk per stage with equally many layers in each."""
        return self.rows == tuple(range(self.layers))

    def table(self) -> np.ndarray:
        """The layer of each row, i32[S, v, height]; -1 is padding."""
        return np.array(self.rows, np.int32).reshape(self.stages, self.chunks, self.height)

    def arrange(self, tree: Any) -> Any:
        """From model order `[L, ...]` to rows; every leaf that lies under a key `blocks`. Rows of padding are zeros."""
        if self.in_model_order:
            return tree
        rows = np.array(self.rows)
        fill = lambda x: jnp.where((rows >= 0).reshape(-1, *[1] * (x.ndim - 1)), x[np.maximum(rows, 0)], 0)
        return _on_stacks(lambda x: fill(x).astype(x.dtype), tree)

    def arrange_params(self, params: Any) -> Any:
        """`arrange`, but rows of padding hold the layer before them.

        The executor calls layers on these rows too, and throws away what comes. Of zeros it would not get rid: 1 / w or
        w / |w| makes the gradient NaN, of whatever is not used too. Gradients being 0, copies change by decay alone.
        """
        if self.in_model_order:
            return params
        layer, copied = 0, []
        for row in self.rows:
            layer = row if row >= 0 else layer
            copied.append(layer)
        return _on_stacks(lambda x: x[np.array(copied)], params)

    def model_order(self, tree: Any) -> Any:
        """From rows back to model order; the inverse of `arrange`."""
        if self.in_model_order:
            return tree
        row_of = {layer: row for row, layer in enumerate(self.rows)}
        places = np.array([row_of[layer] for layer in range(self.layers)])
        return _on_stacks(lambda x: x[places], tree)


def _on_stacks(change: Any, tree: Any) -> Any:
    def at(path: Any, leaf: jax.Array) -> jax.Array:
        return change(leaf) if any(getattr(key, "key", None) == STACK for key in path) else leaf

    return jax.tree_util.tree_map_with_path(at, tree)
