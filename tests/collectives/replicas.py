"""Functions of what n replicas hold, compiled over the axis `data` of n devices; and what such a program sends."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import Exchange, Reduction
from jaxpar.inspect.summary import read_schedule
from jaxpar.mesh import make_mesh

ALGORITHMS = ["native", "ring", "tree", "halving_doubling", "hierarchical"]
UNIT_ROUNDOFF = {"bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def compiled(f: Callable[[Any], Any], mesh: Mesh, held: Any, out_specs: Any = None) -> jax.stages.Compiled:
    """`f` of what each replica holds: `held` has its leading dim split over `data`, and `f` gets blocks without it.

    Its results are invariant unless `out_specs` say otherwise.
    """
    blocks = jax.shard_map(
        lambda held: f(jax.tree.map(lambda x: x[0], held)), mesh=mesh, in_specs=P("data"), out_specs=out_specs or P()
    )
    return quickly(blocks, held)


def quickly(blocks: Callable[[Any], Any], held: Any) -> jax.stages.Compiled:
    """Compiled for what it computes and sends, and not for speed."""
    return jax.jit(blocks).lower(held).compile({"xla_backend_optimization_level": 0})


def each_device(f: Callable[[Any], Any], held: Any) -> Any:
    """What every replica has as the result of `f`, in a leading dim."""
    mesh = make_mesh(data=len(jax.tree.leaves(held)[0]))
    program = compiled(lambda x: jax.tree.map(lambda y: y[None], f(x)), mesh, held, P("data"))
    return jax.tree.map(np.asarray, program(held))


def copies(x: jax.Array) -> np.ndarray:
    """The copies of an invariant array on all its devices, as bytes."""
    return np.stack([np.asarray(shard.data).reshape(-1).view(np.uint8) for shard in x.addressable_shards])


def sent(program: jax.stages.Compiled, mesh: Mesh) -> dict[str, tuple[int, float]]:
    """By kind of collective: how many, and the bytes that a device sends."""
    found: dict[str, tuple[int, float]] = {}
    for execution in read_schedule(program, mesh).executions:
        count, wire_bytes = found.get(execution.collective.op, (0, 0.0))
        total = wire_bytes + execution.times * execution.collective.wire_bytes
        found[execution.collective.op] = count + execution.times, total
    return found


def random(shape: Iterable[int], dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=tuple(shape)).astype(dtype)


def by_hand(exchange: Exchange, held_nN: np.ndarray, wire: Any) -> np.ndarray:
    """What every device ends with, step by step in numpy; sums in float32 or wider, what is sent as `wire`."""
    n, size = held_nN.shape
    total = held_nN.astype(np.promote_types(held_nN.dtype, np.float32))
    x_nBC = np.pad(total, ((0, 0), (0, -size % exchange.blocks))).reshape(n, exchange.blocks, -1)
    for number, step in enumerate((*exchange.reduce, *exchange.share)):
        adds = number < len(exchange.reduce)
        if not adds:
            x_nBC = x_nBC.astype(wire).astype(x_nBC.dtype)
        before = x_nBC.copy()
        for source, target, block in step.sends:
            part = slice(block, block + step.blocks)
            arrived = before[source, part].astype(wire).astype(x_nBC.dtype)
            x_nBC[target, part] = arrived + before[target, part] if adds else arrived
    return x_nBC.reshape(n, -1)[:, :size].astype(held_nN.dtype)


def on(n: int, algorithm: str, **settings: Any) -> Reduction:
    """Hierarchical with two hosts, or one where n is odd."""
    if algorithm == "hierarchical":
        settings["per_host"] = n // 2 if n % 2 == 0 else n
    return Reduction(algorithm, **settings)


def permuted(algorithm: str, n: int, size: int) -> tuple[int, int]:
    """Permutes, and elements that a device sends in them, for a buffer of `size`."""
    if algorithm == "ring":
        return 2 * (n - 1), 2 * (n - 1) * math.ceil(size / n)
    if algorithm == "tree":
        return (steps := 2 * math.ceil(math.log2(n))), steps * size
    if algorithm == "halving_doubling":
        p = 2 ** int(math.log2(n))
        block = math.ceil(size / p)
        return 2 * int(math.log2(p)) + 2 * (n != p), 2 * (p - 1) * block + 2 * (n != p) * p * block
    assert algorithm == "hierarchical"
    hosts = 2 - n % 2
    g = n // hosts
    block = math.ceil(size / n)
    return 2 * (g - 1) + 2 * (hosts - 1), 2 * (g - 1) * hosts * block + 2 * (hosts - 1) * block
