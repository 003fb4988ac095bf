"""Copies that should be equal on several devices, and are not: found by checksums, repaired by the majority.

Every leaf of the state has copies along the mesh axes that its `PartitionSpec` does not name. They start equal and
every device changes its own in the same way, so they stay equal bit for bit, until memory, a link or a kernel that
is not deterministic changes one. Nothing else notices: the loss goes on falling while replicas train apart. A run
also checks before it saves: restored copies are equal, whatever they were made of.

A check reads the state once on every device and gathers 8 bytes for each leaf from each of n devices: it sends
8 (n-1) bytes a leaf, over all axes. It waits for the step that made the state. For `configs/quickstart.yaml` on 8
virtual CPU devices a check takes 0.9% of the CPU time of a train step (measured, `jaxpar.bench.pairs`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import axis_index, psum, varying
from jaxpar.config import CheckFailed
from jaxpar.mesh import shard_bytes

SHOWN = 10
"""Differences that a message names."""


class Place(NamedTuple):
    """A device: its number, the process (host) it belongs to, and where it lies on the mesh."""

    device: int
    process: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Drift:
    """Copies of one block of one leaf that are not equal.

    Attributes:
        leaf: its dotted name in the state.
        axes: along which the copies lie.
        copies: how many there are.
        places: where the copy is not the majority's; all, where more than half are never the same.
        good: which copy along the axes is the majority's (`axis_index` of one of them); None: there is no majority.
        step: after which they were found to differ.
        clean_step: after which they were last known to be equal.
    """

    leaf: str
    axes: tuple[str, ...]
    copies: int
    places: tuple[Place, ...]
    good: int | None
    step: int
    clean_step: int


class DriftCheck:
    """Compares all copies of all leaves of a state.

    Args:
        mesh: of the state.
        abstract_state: its shapes, dtypes and shardings, a tree of `jax.ShapeDtypeStruct`.
        clean_step: the step after which copies are known to be equal: when the state was made or restored.
    """

    def __init__(self, mesh: Mesh, abstract_state: Any, clean_step: int = 0) -> None:
        self.mesh, self.clean_step = mesh, clean_step
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(abstract_state), strict=True)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
        axes = [_free_axes(leaf.sharding.spec, mesh) for leaf in leaves]
        self._positions = [i for i, free in enumerate(axes) if free]
        self.names = [names[i] for i in self._positions]
        self.axes = [axes[i] for i in self._positions]
        self.specs = [leaves[i].sharding.spec for i in self._positions]
        abstract = [leaves[i] for i in self._positions]
        self.bytes = shard_bytes(abstract)
        self._compare = jax.jit(self._in_global_view).lower(abstract).compile() if abstract else None

    def __str__(self) -> str:
        if not self.names:
            return "no leaf of the state has copies on this mesh, nothing is compared"
        return f"{len(self.names)} leaves that have copies, {self.bytes / 1e6:.3g} MB on each device"

    def check(self, state: Any, step: int) -> list[Drift]:
        """Compare, and wait for the result.

        Args:
            state: laid out as the abstract state is.
            step: after which it is.

        Returns:
            A `Drift` for every block of every leaf whose copies differ, in the order of the leaves; none: all are
            equal, and `clean_step` is this step.
        """
        if self._compare is None:
            return []
        differs_L, sums = self._compare(self._of(state))
        found = np.flatnonzero(jax.device_get(differs_L)).tolist()
        if not found:
            self.clean_step = step
            return []
        sums = jax.device_get(sums)
        return [drift for i in found for drift in self._drifts(i, sums[..., i, :], step)]

    def resynchronise(self, state: Any, drifts: Sequence[Drift]) -> Any:
        """Give every device the majority's copy of the leaves that drifted; it takes three copies for one.

        An all-reduce of their bits along the axes of their copies, each sent as 4 bytes at least. Their buffers in
        `state` are donated.

        Args:
            state: as it was checked.
            drifts: what the check found.

        Returns:
            The state with equal copies.

        Raises:
            CheckFailed: where no copy is that of more than half of the devices.
        """
        if any(drift.good is None for drift in drifts):
            raise CheckFailed(message(drifts, self.mesh))
        leaves, structure = jax.tree.flatten(state)
        for name in dict.fromkeys(drift.leaf for drift in drifts):
            i = self.names.index(name)
            at = self._positions[i]
            leaves[at] = self._take(i, leaves[at], [drift for drift in drifts if drift.leaf == name])
        self.clean_step = drifts[0].step
        return jax.tree.unflatten(structure, leaves)

    def _of(self, state: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(state)
        return [leaves[i] for i in self._positions]

    def _in_global_view(self, leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Which leaves differ anywhere, bool[L], and all checksums, u32[*mesh, L, 2], both whole on every device."""
        axes, grid = self.mesh.axis_names, self.mesh.devices.shape
        of_block = lambda leaves: jnp.stack([checksum(varying(x, axes)) for x in leaves])[None]
        rows = jax.shard_map(of_block, mesh=self.mesh, in_specs=(self.specs,), out_specs=P(axes))(leaves)
        sums = lax.with_sharding_constraint(rows, jax.NamedSharding(self.mesh, P())).reshape(*grid, -1, 2)
        differs = []
        for i, free in enumerate(self.axes):
            first = tuple(slice(0, 1) if axis in free else slice(None) for axis in axes)
            differs.append((sums[..., i, :] != sums[..., i, :][first]).any())
        return jnp.stack(differs), sums

    def _drifts(self, i: int, sums: np.ndarray, step: int) -> Iterator[Drift]:
        """The blocks of a leaf whose copies differ, from its checksums `[*mesh, 2]`."""
        free = [self.mesh.axis_names.index(axis) for axis in self.axes[i]]
        shape = self.mesh.devices.shape
        copies = int(np.prod([shape[dim] for dim in free]))
        rows = lambda grid: np.moveaxis(grid, free, range(-len(free), 0)).reshape(-1, copies)
        values = rows(sums[..., 0].astype(np.uint64) << np.uint64(32) | sums[..., 1])
        for row, devices in zip(values.tolist(), rows(np.arange(self.mesh.size).reshape(shape)), strict=True):
            (most, count), *others = Counter(row).most_common()
            if others:
                good = row.index(most) if 2 * count > copies else None
                wrong = [device for device, value in zip(devices, row, strict=True) if good is None or value != most]
                places = tuple(self._place(int(device)) for device in wrong)
                yield Drift(self.names[i], self.axes[i], copies, places, good, step, self.clean_step)

    def _place(self, device: int) -> Place:
        at = np.unravel_index(device, self.mesh.devices.shape)
        found = self.mesh.devices[at]
        return Place(found.id, found.process_index, tuple(int(i) for i in at))

    def _take(self, i: int, leaf: jax.Array, drifts: Iterable[Drift]) -> jax.Array:
        """The leaf with its drifted blocks replaced by their good copy."""
        mesh, free, spec = self.mesh, self.axes[i], self.specs[i]
        good = np.zeros(mesh.devices.shape, np.int32)  # for each device, which copy of its block to take
        for drift in drifts:
            at = drift.places[0].at
            assert drift.good is not None
            good[*(slice(None) if axis in free else at[d] for d, axis in enumerate(mesh.axis_names))] = drift.good

        def of_block(x: jax.Array, good: jax.Array) -> jax.Array:
            mine = axis_index(free) == good.reshape(())
            return from_words(psum(jnp.where(mine, words(varying(x, free)), 0), free), x.dtype)

        each = P(*(axis if size > 1 else None for axis, size in mesh.shape.items()))
        taken = jax.shard_map(of_block, mesh=mesh, in_specs=(spec, each), out_specs=spec)
        return jax.jit(taken, out_shardings=leaf.sharding, donate_argnums=0)(leaf, good)


def words(x: jax.Array) -> jax.Array:
    """The bits of an array as u32: one for each element, or two along a new last dim for types of 8 bytes."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def from_words(bits: jax.Array, dtype: Any) -> jax.Array:
    """The array of which `words` gave the bits."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return bits.astype(dtype)
    narrow = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(bits.astype(narrow), dtype)


def checksum(x: jax.Array) -> jax.Array:
    """Two sums mod 2^32 over the bits of an array, u32[2]: of its words, and of its words mixed with their place.

    Mixing is one to one for each place (the finalizer of MurmurHash3), so that one changed word always changes
    both sums; several changed words, also two that swapped places, leave them alone with a probability of 2^-32.

    Example:
        >>> a = jnp.array([1.0, 2.0, 0.0, jnp.nan])
        >>> bool((checksum(a) == checksum(jnp.array(a))).all())
        True
        >>> for b in ([2.0, 1.0, 0.0, jnp.nan], [1.0, 2.0, -0.0, jnp.nan]):
        ...     print((checksum(a) == checksum(jnp.array(b))).tolist())
        [True, False]
        [False, False]
    """
    word = words(x).reshape(-1)
    place = lax.iota(jnp.uint32, word.size)
    mixed = word ^ (place * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])
    # One reduction of both: as two, XLA on GPU writes the mixed words to memory in between (seen in H100 programs).
    return jnp.stack(lax.reduce((word, mixed ^ (mixed >> 16)), (jnp.uint32(0), jnp.uint32(0)), add, (0,)))


def message(drifts: Sequence[Drift], mesh: Mesh) -> str:
    """What drifted where and since when, for people."""
    leaves, first = len({drift.leaf for drift in drifts}), drifts[0].clean_step
    lines = [
        f"after step {drifts[0].step} copies that should be equal differ, in {leaves} leaves of the state. After step "
        f"{first} they were equal: step {first + 1} is the first that can have done it."
    ]
    for drift in drifts[:SHOWN]:
        over = " × ".join(drift.axes)
        which = "no majority among" if drift.good is None else "not as most of"
        lines.append(f"- {drift.leaf}: {which} {drift.copies} copies over {over}: {_listed(drift.places, mesh)}")
    return "\n".join(lines + ([f"- and {len(drifts) - SHOWN} more"] if drifts[SHOWN:] else []))


def _listed(places: Sequence[Place], mesh: Mesh) -> str:
    axes = lambda at: ", ".join(f"{axis} {i}" for axis, i in zip(mesh.axis_names, at, strict=True))
    return "; ".join(f"device {p.device} of process {p.process} ({axes(p.at)})" for p in places)


def _free_axes(spec: P, mesh: Mesh) -> tuple[str, ...]:
    """The axes of several devices that a spec does not name."""
    named = {axis for dim in spec if dim is not None for axis in (dim if isinstance(dim, tuple) else (dim,))}
    return tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in named)
