"""What each link between two replicas carries, for `grad_reduce.links`."""

import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track

from jaxpar.mesh import DATA

CALLS = 4
"""Messages in one measurement."""


def measure_links(mesh: Mesh, message_bytes: int, repeats: int, console: Console | None = None) -> list[list[float]]:
    """Send a message from each position along `data` to each other, one pair at a time while all others are idle.

    With n replicas these are n(n-1) programs to compile, which takes longer than the messages.

    Args:
        mesh: of the devices; pairs with the same positions on `data` send at the same time.
        message_bytes: of a message, at least 4.
        repeats: measurements of which the median counts.
        console: shows the progress.

    Returns:
        `[n, n]` bytes per second from row to column; 0 on the diagonal.
    """
    n = mesh.shape[DATA]
    links = [[0.0] * n for _ in range(n)]
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    x_nN = jnp.ones((n, message_bytes // 4), jnp.float32, device=jax.NamedSharding(mesh, P(DATA)))
    for i, j in track(pairs, "links over data", console=console or Console(quiet=True), transient=True):
        links[i][j] = message_bytes / _seconds(mesh, x_nN, i, j, repeats)
    return links


def _seconds(mesh: Mesh, x_nN: jax.Array, i: int, j: int, repeats: int) -> float:
    """Of a message from i to j, sent several times, each when the one before has arrived."""

    def of_block(x_1N: jax.Array) -> jax.Array:
        def send(_: int, x_1N: jax.Array) -> jax.Array:
            arrived_1N = lax.ppermute(x_1N, DATA, [(i, j)])
            answer_11 = lax.ppermute(arrived_1N[:, :1], DATA, [(j, i)])
            return x_1N + answer_11

        return lax.fori_loop(0, CALLS, send, x_1N)

    run = jax.jit(jax.shard_map(of_block, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA)))
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run(x_nN))
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times[1:])  # the first compiles
