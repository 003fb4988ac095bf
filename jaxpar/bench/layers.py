"""`jaxpar bench layers`: what each layer of a config's model costs on one device, for `parallel.layer_costs`."""

import json
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxpar.bench.pairs import cpu_seconds
from jaxpar.config import Config
from jaxpar.models.protocol import cast
from jaxpar.step import model_maker


def measure(config: Config, repeats: int, calls: int) -> dict[str, Any]:
    """Time forward and backward of each block, of the embedding, and of the head, on one microbatch.

    Returns:
        `layers`: CPU-seconds of each layer in model order; `embed`, `head`: of those. Medians over `repeats` of the
        mean over `calls`; the parts are measured in turn.
    """
    model = model_maker(config, jax.default_backend())(nnx.Rngs(params=config.train.seed))
    params = cast(nnx.to_pure_dict(nnx.state(model, nnx.Param)), config.train.compute_dtype)
    tokens = jnp.zeros((config.sequences_per_microbatch, config.data.sequence_length), jnp.int32)
    graph, block_graph = nnx.graphdef(model), nnx.graphdef(model.blocks)
    total = lambda y: jnp.sum(y, dtype=jnp.float32)

    def block(layer: Any, x: jax.Array) -> jax.Array:
        return total(model.block(nnx.merge(block_graph, layer), x, None))

    embed = jax.jit(jax.grad(lambda params: total(nnx.merge(graph, params).embed(tokens))))
    head = jax.jit(jax.grad(lambda params, x: total(nnx.merge(graph, params).head(x)), argnums=(0, 1)))
    of_block = jax.jit(jax.grad(block, argnums=(0, 1)))
    x = nnx.merge(graph, params).embed(tokens)
    layers = [jax.tree.map(lambda p, i=i: p[i], params["blocks"]) for i in range(config.model.num_hidden_layers)]
    work: dict[str, Callable[[], Any]] = {"embed": lambda: embed(params), "head": lambda: head(params, x)}
    work |= {f"layer {i}": lambda layer=layer: of_block(layer, x) for i, layer in enumerate(layers)}
    times: dict[str, list[float]] = {name: [] for name in work}
    for repeat in track(range(repeats + 1), "layers", console=Console(stderr=True), transient=True):
        for name, call in work.items():
            seconds = cpu_seconds(lambda call=call: jax.block_until_ready([call() for _ in range(calls)])) / calls
            times[name] += [seconds] if repeat else []  # the first time compiles
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    of_layers = [medians[f"layer {i}"] for i in range(len(layers))]
    return {"layers": of_layers, "embed": medians["embed"], "head": medians["head"]}


def run(config: Config, *, repeats: int = 5, calls: int = 10, as_json: bool = False) -> None:
    """Measure and print a table, with the setting that spreads layers by what they cost; or JSON."""
    costs = measure(config, repeats, calls)
    if as_json:
        print(json.dumps(costs))
        return
    table = Table(title=f"CPU-seconds, forward and backward, {config.sequences_per_microbatch} sequences on one device")
    for column in ("part", "seconds"):
        table.add_column(column)
    for name, seconds in [("embed", costs["embed"]), *enumerate(costs["layers"]), ("head", costs["head"])]:
        table.add_row(str(name), f"{seconds:.5f}")
    Console().print(table)
    print(f"parallel.layer_costs=[{', '.join(f'{seconds:.5f}' for seconds in costs['layers'])}]")
