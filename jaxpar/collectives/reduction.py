"""The sum of a tree of gradients over the replicas, by the algorithm that the user chose."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.buckets import in_buckets
from jaxpar.collectives.exchange import Exchange, all_reduce, reduce_scatter, wide
from jaxpar.collectives.halving_doubling import halving_doubling_steps
from jaxpar.collectives.hierarchical import hierarchical_steps
from jaxpar.collectives.native import narrow_all_reduce, narrow_reduce_scatter
from jaxpar.collectives.ring import ring_steps
from jaxpar.collectives.tree import tree_steps
from jaxpar.collectives.views import axis_size, same_on_all, varying_axes
from jaxpar.config import InputError

ACROSS = {"ring": ring_steps, "tree": tree_steps, "halving_doubling": halving_doubling_steps}
"""The algorithms that `hierarchical` can use between hosts."""
ALGORITHMS = ("native", *ACROSS, "hierarchical")


@dataclass(frozen=True)
class Reduction:
    """How values of the replicas on one mesh axis are summed.

    Arrays are flattened and joined into buckets, and travel in their own type unless `wire_dtype` says otherwise.
    Sums are made in float32 or wider, and rounded where they travel; integers are summed as they are. The result is
    the same bit for bit on all devices of the axis. In global view, and over an axis of one device, values come back
    as they are. None of it has a gradient.

    `native` without `wire_dtype` is `lax.psum` and `lax.psum_scatter`, which XLA puts together by itself; bfloat16 it
    may add in bfloat16. The other algorithms put their permutes into the program one by one: among 64 devices a ring
    is 126 of them for each bucket (compiled for H100 in about 4 s on 2 cores), so there buckets should be large.

    Attributes:
        algorithm: native, ring, tree, halving_doubling or hierarchical.
        axis: the mesh axis.
        bucket_bytes: of arrays that travel together; a larger array travels alone.
        wire_dtype: float32 or bfloat16, what is sent; by default as the arrays are.
        order: ring: positions on the axis, in the order of the ring.
        parents: tree: parent of each position, -1 for the root.
        per_host: hierarchical: neighbouring positions that share a host.
        across: hierarchical: the algorithm between hosts, ring, tree or halving_doubling.

    Raises:
        InputError: when a name is not known, or a setting belongs to another algorithm.

    Example:
        >>> from jaxpar.mesh import make_mesh
        >>> total = jax.shard_map(Reduction("ring").sum, mesh=make_mesh(data=4), in_specs=jax.P("data"),
        ...                       out_specs=jax.P())
        >>> jax.jit(total)({"a": jnp.arange(8.0), "b": jnp.ones((4, 1))})["a"].tolist()
        [12.0, 16.0]
    """

    algorithm: str
    axis: str = "data"
    bucket_bytes: int = 64 * 2**20
    wire_dtype: str | None = None
    order: tuple[int, ...] | None = None
    parents: tuple[int, ...] | None = None
    per_host: int = 1
    across: str = "ring"

    def __post_init__(self) -> None:
        names = (
            ("algorithm", self.algorithm, ALGORITHMS),
            ("across", self.across, tuple(ACROSS)),
            ("wire_dtype", self.wire_dtype, (None, "float32", "bfloat16")),
        )
        for key, value, known in names:
            if value not in known:
                raise InputError(f"{key} {value}: must be one of {', '.join(map(str, known))}.")
        for key, value, algorithm in (("order", self.order, "ring"), ("parents", self.parents, "tree")):
            if value is not None and self.algorithm != algorithm:
                raise InputError(f"{key} {value}: belongs to {algorithm}, but the algorithm is {self.algorithm}.")

    def exchange(self, n: int) -> Exchange | None:
        """What is sent among n devices, step by step; None for native, where XLA decides.

        Raises:
            InputError: when `order`, `parents` or `per_host` do not suit n.
        """
        match self.algorithm:
            case "ring":
                return ring_steps(n, self.order)
            case "tree":
                return tree_steps(n, self.parents)
            case "halving_doubling":
                return halving_doubling_steps(n)
            case "hierarchical":
                return hierarchical_steps(n, self.per_host, ACROSS[self.across])
        return None

    def sum(self, tree: Any) -> Any:
        """Sum over the axis. In block view.

        Args:
            tree: arrays of floating point or whole numbers, varying over the axis.

        Returns:
            The sums, of the same dtypes, invariant over the axis; otherwise varying as before.

        Raises:
            ValueError: when an array is the same on all devices of the axis, or is no number.
        """
        if axis_size(self.axis) == 1:
            return same_on_all(tree, self.axis)
        self._check(tree)
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(self._whole(leaves))

    def mean(self, tree: Any) -> Any:
        """As `sum`, divided by the number of devices in the arrays' own dtype; refuses whole numbers."""
        for leaf in jax.tree.leaves(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"mean: {leaf.dtype} has no mean of its own dtype; use sum")
        n = axis_size(self.axis)
        return jax.tree.map(lambda x: x / n, self.sum(tree))

    def scatter(self, tree: Any, dims: Any) -> Any:
        """Sum over the axis, and keep this device's block of a dim. In block view.

        The device at position i of the axis gets block i, whatever the algorithm. Ring and hierarchical reduce-scatter
        and send (n-1)/n of the arrays; for the others see `tree_steps` and `halving_doubling_steps`.

        Args:
            tree: as for `sum`.
            dims: for each array the dim to split, or None.

        Returns:
            For each array with a dim, this device's block of the sum, varying over the axis; for None the sum.

        Raises:
            ValueError: as `sum`; or when a dim does not divide by the number of devices.
        """
        n = axis_size(self.axis)
        if n > 1:
            self._check(tree)
        leaves, structure = jax.tree.flatten(tree)
        dims = structure.flatten_up_to(dims)
        both = [(x, None if dim is None else dim % x.ndim) for x, dim in zip(leaves, dims, strict=True)]
        sums = iter(self.sum([x for x, dim in both if dim is None]))
        split = [(x, dim) for x, dim in both if dim is not None]
        blocks = iter(self._blocks(split, n) if n > 1 else [x for x, _ in split])
        return structure.unflatten(next(sums) if dim is None else next(blocks) for dim in dims)

    def _whole(self, leaves: list[jax.Array]) -> list[jax.Array]:
        if self._left_to_xla:
            return lax.psum(leaves, self.axis)
        flat = in_buckets(self._sum_of_bucket, [x.reshape(-1) for x in leaves], self.bucket_bytes)
        return [y.reshape(x.shape) for x, y in zip(leaves, flat, strict=True)]

    def _blocks(self, split: list[tuple[jax.Array, int]], n: int) -> list[jax.Array]:
        for x, dim in split:
            if x.shape[dim] % n:
                raise ValueError(
                    f"scatter over {self.axis}: dim {dim} of {jax.typeof(x)} into {n} blocks leaves "
                    f"{x.shape[dim]} mod {n} = {x.shape[dim] % n}"
                )
        if self._left_to_xla:
            return [lax.psum_scatter(x, self.axis, scatter_dimension=dim, tiled=True) for x, dim in split]
        first = [jnp.moveaxis(x, dim, 0) for x, dim in split]
        rows = in_buckets(self._row_of_bucket, [x.reshape(n, -1) for x in first], self.bucket_bytes)
        blocks = [row.reshape(x.shape[0] // n, *x.shape[1:]) for x, row in zip(first, rows, strict=True)]
        return [jnp.moveaxis(block, 0, dim) for block, (_, dim) in zip(blocks, split, strict=True)]

    @property
    def _left_to_xla(self) -> bool:
        return self.algorithm == "native" and self.wire_dtype is None

    def _sum_of_bucket(self, x_N: jax.Array) -> jax.Array:
        return same_on_all(self._reduced(x_N, all_reduce, narrow_all_reduce, lax.psum), self.axis)

    def _row_of_bucket(self, x_nK: jax.Array) -> jax.Array:
        return self._reduced(x_nK, reduce_scatter, narrow_reduce_scatter, lax.psum_scatter)

    def _reduced(self, x: jax.Array, by_exchange: Callable, narrow: Callable, native: Callable) -> jax.Array:
        """By one of three functions, summed in float32 or wider."""
        dtype = wide(x.dtype)
        wire = jnp.dtype(self.wire_dtype if self.wire_dtype and jnp.issubdtype(dtype, jnp.floating) else x.dtype)
        if exchange := self.exchange(axis_size(self.axis)):
            total = by_exchange(x.astype(dtype), self.axis, exchange, wire)
        elif wire == dtype:
            total = native(x.astype(dtype), self.axis)
        else:
            total = narrow(x.astype(dtype), self.axis, wire)
        return total.astype(x.dtype)

    def _check(self, tree: Any) -> None:
        n = axis_size(self.axis)
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = f"the array {jax.tree_util.keystr(path)} {jax.typeof(x)}".replace("  ", " ")
            if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
                raise ValueError(f"sum over {self.axis}: {name} is neither of floating point nor of whole numbers")
            if self.axis not in varying_axes(x):
                raise ValueError(
                    f"sum over {self.axis}: {name} is already the same on all devices of that axis; summing it would "
                    f"multiply it by {n}"
                )
