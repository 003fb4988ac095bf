"""Collectives that know which view they are in.

In *block view* (inside `jax.shard_map`, where the mesh axes are manual) each function communicates. In *global
view* (plain `jit`, or no mesh at all) arrays are whole and each function returns its input: the sum is already
complete, the gathered array is already there. So a layer is written once and runs in both.

Axes that the surrounding mesh does not have are skipped, so a layer works on a mesh of its user's own as well.
So are axes of size 1, over which XLA would otherwise run collectives among one device; only a value whose type
says that it varies over such an axis (because somebody's `in_specs` named it) goes through the real operation,
which changes its type.
Byte counts below are what one device sends, for a buffer of `b` bytes per device over an axis of `n` devices.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

Axes = str | Sequence[str]


def _tuple(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def manual(axes: Axes) -> tuple[str, ...]:
    """Those of `axes` along which this code sees one block; empty in global view."""
    here = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(a for a in _tuple(axes) if a in here)


def _real(axes: Axes) -> tuple[str, ...]:
    """The manual axes among `axes` that have more than one block."""
    return tuple(a for a in manual(axes) if lax.axis_size(a) > 1)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The manual axes over which `x` may differ between devices; empty in global view."""
    return frozenset(jax.typeof(x).mat.varying)


def axis_size(axes: Axes) -> int:
    """Number of blocks along `axes` (their product); 1 in global view."""
    return lax.axis_size(here) if (here := manual(axes)) else 1


def axis_index(axes: Axes) -> jax.Array | int:
    """Which block along `axes` this is, counted with the last axis changing fastest; 0 in global view."""
    return lax.axis_index(real) if (real := _real(axes)) else 0


def varying(tree: Any, axes: Axes) -> Any:
    """Let every leaf be treated as different along `axes`. Moves no bytes; its gradient is a sum over `axes`.

    Used once on the parameters, over `data`: gradients then stay local until they are reduced once.
    """

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in _real(axes) if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def _needed(tree: Any, axes: Axes) -> tuple[str, ...]:
    """The manual axes over which an operation on `tree` has to run: all but those of size 1 that no type names."""
    leaves = jax.tree.leaves(tree)
    return tuple(a for a in manual(axes) if a in _real(a) or any(a in varying_axes(x) for x in leaves))


def _check_varies(name: str, x: jax.Array, axes: tuple[str, ...], consequence: str) -> None:
    """Refuse a value that is whole already. JAX would go on, as if every device had a part of its own."""
    whole = [a for a in axes if a not in varying_axes(x)]
    if axis_size(whole) > 1:
        raise ValueError(
            f"{name} over {whole}: the value {jax.typeof(x)} is already the same on all devices of that axis; "
            f"{consequence.format(axis_size(whole))}"
        )


def psum(x: Any, axes: Axes) -> Any:
    """Sum over the devices of `axes`. All-reduce; sends 2(n-1)/n · b.

    Args:
        x: an array or tree of arrays, each varying over every manual axis in `axes`; they travel together.
        axes: one or several axis names.

    Returns:
        The sum, invariant over `axes`; in global view `x` itself.

    Raises:
        ValueError: when a leaf is the same on all devices of an axis: its sum would multiply it by the axis size.

    Example:
        >>> from jaxpar.mesh import make_mesh
        >>> total = jax.shard_map(lambda x: psum(x.sum(), "tensor"), mesh=make_mesh(tensor=4),
        ...                       in_specs=jax.P("tensor"), out_specs=jax.P())
        >>> float(total(jax.numpy.arange(8.0)))
        28.0
    """
    here = _needed(x, axes)
    for leaf in jax.tree.leaves(x):
        _check_varies("psum", leaf, here, "summing it would multiply it by {}")
    missing = lambda leaf: tuple(a for a in here if a not in varying_axes(leaf))  # of size 1: only a type differs
    x = jax.tree.map(lambda leaf: lax.pcast(leaf, m, to="varying") if (m := missing(leaf)) else leaf, x)
    return lax.psum(x, here) if here else x


def pmax(x: jax.Array, axes: Axes) -> jax.Array:
    """Largest value over the devices of `axes`. All-reduce; sends 2(n-1)/n · b. Has no gradient: stop it before."""
    here = _needed(x, axes)
    return lax.pmax(x, here) if here else x


def same_on_all(tree: Any, axis: str) -> Any:
    """Let every leaf be treated as the same on all devices of `axis`, which the caller knows it to be.

    Moves no bytes: the only public operation with such a result is an all-reduce, which here runs in groups of one
    device each. Has no gradient. A value that differs between devices would stay so, and nobody would be told.

    Args:
        tree: arrays with equal values on all devices of the axis; those whose type says so already are left alone.
        axis: one axis name; in global view the tree itself is returned.
    """

    def cast(x: jax.Array) -> jax.Array:
        alone = [[i] for i in range(lax.axis_size(axis))]
        return lax.pmax(x, axis, axis_index_groups=alone) if axis in varying_axes(x) else x

    return jax.tree.map(cast, tree) if manual(axis) else tree


def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Join the blocks of every device of `axis` along `dim`. Sends (n-1) · b; its gradient is a reduce-scatter.

    Raises:
        ValueError: when `x` is the same on all devices of the axis: it is whole already.
    """
    here = _needed(x, axis)
    _check_varies("all_gather", x, here, "joining its copies would repeat it {} times")
    return lax.all_gather(x, axis, axis=dim, tiled=True) if here else x


def reduce_scatter(x_part: jax.Array, axis: str, dim: int) -> jax.Array:
    """Sum over `axis` and keep this device's block of `dim`. Sends (n-1)/n · b; its gradient is an all-gather.

    Raises:
        ValueError: when `x_part` is the same on all devices of the axis: its sum would multiply it by the axis size.
    """
    here = _needed(x_part, axis)
    _check_varies("reduce_scatter", x_part, here, "summing it would multiply it by {}")
    return lax.psum_scatter(x_part, axis, scatter_dimension=dim, tiled=True) if here else x_part


def shift(x: Any, axis: str, by: int = 1) -> Any:
    """Hand `x` to the device `by` places further along `axis`, around the ring. Permute; sends b.

    In global view there is one place, and the value comes back to where it was.
    """
    if not _needed(x, axis):
        return x
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + by) % n) for i in range(n)])


def block_of(x: jax.Array, axis: str, dim: int, blocks: int | None = None) -> jax.Array:
    """This device's block of `dim` of an array that every device of `axis` holds whole. Sends nothing forward.

    The gradient is summed over `axis` (all-reduce of the whole array).

    Args:
        x: invariant over `axis`.
        axis: the axis to split over, of n devices.
        dim: the dim to split.
        blocks: into how many blocks, a divisor of n; n / blocks neighbours then share one. By default n.

    Returns:
        Block number `index * blocks // n` of `dim`; in global view `x` itself.

    Raises:
        ValueError: when the dim does not divide into the blocks, or the devices over them.
    """
    n = axis_size(axis)
    if n == 1:
        return x
    blocks = n if blocks is None else blocks
    size, rest = divmod(x.shape[dim], blocks)
    if rest:
        raise ValueError(
            f"dim {dim} of size {x.shape[dim]} into {blocks} blocks leaves {x.shape[dim]} mod {blocks} = {rest}"
        )
    if n % blocks:
        raise ValueError(f"{blocks} blocks over {n} devices of {axis} leaves {n} mod {blocks} = {n % blocks}")
    start = lax.axis_index(axis) * blocks // n * size
    return lax.dynamic_slice_in_dim(varying(x, axis), start, size, dim)
