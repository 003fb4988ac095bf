"""A program whose collectives can be counted by hand: every kind over every axis and pair of axes, in nested loops.

Run as a script, it makes its own devices: `python hand_counted.py 64` prints what the report says for 64 CPU devices.
"""

import json
import math
import sys
from itertools import combinations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import inspect
from jaxpar.mesh import AXES, make_mesh, use_cpu_devices

ROWS, COLUMNS, OUTER, INNER = 64, 8, 3, 2
BLOCK_BYTES = ROWS * COLUMNS * 4
SHAPES = {8: (2, 2, 2), 64: (8, 2, 4)}


def axes_of(mesh_shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    return [axes for size in (1, 2) for axes in combinations(AXES, size)]


def operations(axes: tuple[str, ...], n: int) -> dict:
    """Each from a block to a block that depends on what was communicated."""
    ring = [(i, (i + 1) % n) for i in range(n)]
    return {
        "all-reduce": lambda x: lax.pcast(lax.psum(x, axes), axes, to="varying"),
        "all-gather": lambda x: lax.all_gather(x, axes).sum(0),
        "reduce-scatter": lambda x: jnp.tile(lax.psum_scatter(x, axes, tiled=True), (n, 1)),
        "all-to-all": lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, axes, ring),
    }


def lowered(mesh: Mesh) -> jax.stages.Lowered:
    sizes = dict(mesh.shape)

    def block(x):
        for axes in axes_of(tuple(sizes.values())):
            for operation in operations(axes, math.prod(sizes[a] for a in axes)).values():
                inner = lambda x, _, op=operation: (jnp.sin(op(x)), None)
                outer = lambda x, _, inner=inner: (lax.scan(inner, x, None, length=INNER)[0], None)
                x, _ = lax.scan(outer, x, None, length=OUTER)
        return x

    spec = P(AXES)
    whole = jax.ShapeDtypeStruct((mesh.size * ROWS, COLUMNS), "float32", sharding=jax.NamedSharding(mesh, spec))
    return jax.jit(jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec)).lower(whole)


def expected(mesh_shape: tuple[int, ...], devices_per_host: int) -> dict[str, list]:
    """By kind and axes: count, bytes in the buffer, bytes on the wire, crosses hosts."""
    sizes = dict(zip(AXES, mesh_shape, strict=True))
    distance = {"data": sizes["pipe"] * sizes["tensor"], "pipe": sizes["tensor"], "tensor": 1}
    rows = {}
    for axes in axes_of(mesh_shape):
        n = math.prod(sizes[a] for a in axes)
        crosses = any(distance[a] * sizes[a] > devices_per_host for a in axes)
        for kind, buffer, sent in (
            ("all-reduce", BLOCK_BYTES, 2 * BLOCK_BYTES * (n - 1) / n),
            ("all-gather", BLOCK_BYTES * n, BLOCK_BYTES * (n - 1)),
            ("reduce-scatter", BLOCK_BYTES, BLOCK_BYTES * (n - 1) / n),
            ("all-to-all", BLOCK_BYTES, BLOCK_BYTES * (n - 1) / n),
            ("collective-permute", BLOCK_BYTES, BLOCK_BYTES),
        ):
            times = OUTER * INNER
            rows[f"{kind} {' '.join(axes)}"] = [times, times * buffer, times * sent, crosses]
    return rows


def found(report: inspect.Report) -> dict[str, list]:
    return {
        f"{row.op} {' '.join(row.axes)}": [
            row.count_per_step,
            row.buffer_bytes_per_step,
            row.wire_bytes_per_step,
            row.crosses_hosts,
        ]
        for row in report.collectives
    }


if __name__ == "__main__":
    count = int(sys.argv[1])
    use_cpu_devices(count)
    mesh = make_mesh(*SHAPES[count])
    print(json.dumps(found(inspect.report(lowered(mesh).compile(), mesh))))
