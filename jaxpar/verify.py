"""Does this config compute the same on its mesh as on one device? The check behind `jaxpar verify`.

One training step is made twice from the same weights and the same batch: by the real program on the mesh, and by
a plain global-view program on a single device that shares no reduction, microbatching or sharding with it. Every
gradient and every updated parameter is compared.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from jaxpar.config import Config
from jaxpar.gradients import Batch, Params, make_loss
from jaxpar.layers import padding
from jaxpar.layers.dropout import example_keys
from jaxpar.models.protocol import cast
from jaxpar.optimizer import make_optimizer, make_schedule
from jaxpar.step import MakeModel, build, model_maker

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}
"""Largest accepted relative error by compute dtype: rounding grows with depth and width, mistakes start at 1e-1."""


@dataclass(frozen=True)
class Comparison:
    """One tensor computed twice.

    Attributes:
        name: dotted name of the parameter, or `loss`, `grad_norm`.
        kind: `value`, `gradient` or `updated parameter`.
        error: L2 norm of the difference over the L2 norm of the one-device value. A gradient below a millionth of
            the norm of all gradients (such as that of key biases, to which softmax is blind) is nothing but rounding:
            it is measured against that millionth, and its parameter's update, which Adam makes of it, is left out.
    """

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class Report:
    """What `compare` found.

    Attributes:
        mesh: axis sizes.
        dtype: compute dtype.
        tolerance: largest accepted error.
        ok: every comparison is within it.
        comparisons: worst first.
    """

    mesh: dict[str, int]
    dtype: str
    tolerance: float
    ok: bool
    comparisons: list[Comparison]


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens, with a different share of masked targets in every example (one example has none left).

    Returns:
        `tokens`, `targets` i32[B, T] and `mask` bool[B, T].
    """
    rng = np.random.default_rng(seed)
    shape = config.train.global_batch, config.data.sequence_length
    tokens = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), dtype=np.int32)
    mask = rng.random(shape) < rng.permutation(np.linspace(0, 1, shape[0]))[:, None]
    mask[0, 0] = True
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def one_device_step(
    config: Config, make_model: MakeModel, params: Params, batch: Batch
) -> tuple[jax.Array, Params, Params]:
    """Loss, gradients and updated parameters by differentiating the mean loss in global view: the oracle."""
    model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    summed = make_loss(model, remat="none", unroll=1, z_loss=config.train.z_loss)
    optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer), padding(model))

    def mean_loss(params: Params, batch: Batch) -> jax.Array:
        keys_B = None
        if config.model.resid_pdrop:
            rows_B = jnp.arange(config.train.global_batch)
            keys_B = example_keys(config.train.seed, jnp.zeros((), jnp.int32), rows_B)
        loss, tokens = summed(cast(params, config.train.compute_dtype), batch, keys_B)
        return loss / tokens

    @jax.jit
    def step(params: Params, batch: Batch) -> tuple[jax.Array, Params, Any]:
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return loss, grads, optax.apply_updates(params, updates)

    return step(params, batch)


def compare(
    config: Config, mesh: Mesh, make_model: MakeModel | None = None, *, tolerance: float | None = None
) -> Report:
    """Run one step of a config on its mesh and on one device, and compare everything.

    Args:
        config: resolved; its parallel settings are what is tested.
        mesh: the mesh to test.
        make_model: builds the model; by default the config's own.
        tolerance: largest accepted relative error; by default the one for the compute dtype.

    Returns:
        The report; it does not raise when the two differ.
    """
    make_model = make_model or model_maker(config, mesh.devices.flat[0].platform)
    program = build(config, mesh, make_model)
    batch = random_batch(config)
    state = program.init()
    alone = jax.device_put(program.stacking.model_order(jax.device_get(state.params)), mesh.devices.flat[0])
    placed = jax.device_put(batch, program.batch_sharding)
    loss, grads, _ = program.loss_and_grads(state.params, placed, state.step)
    grads = program.stacking.model_order(jax.device_get(grads))
    state, metrics = program.train_step(state, placed)
    want_loss, want_grads, want_params = jax.device_get(
        one_device_step(config, make_model, alone, jax.device_put(batch, mesh.devices.flat[0]))
    )
    want_norm = float(optax.tree.norm(want_grads))
    vanishing = 1e-6 * want_norm
    gradients = _compare_trees("gradient", grads, want_grads, vanishing)
    norms = jax.tree.map(lambda g: float(np.linalg.norm(g)), want_grads)
    updated = _compare_trees(
        "updated parameter", program.stacking.model_order(jax.device_get(state.params)), want_params
    )
    comparisons = [
        Comparison("loss", "value", _error(loss, want_loss)),
        Comparison("loss in the train step", "value", _error(metrics["loss"], want_loss)),
        Comparison("grad_norm", "value", _error(metrics["grad_norm"], want_norm)),
        *gradients,
        *(c for c, norm in zip(updated, jax.tree.leaves(norms), strict=True) if norm > vanishing),
    ]
    dtype = config.train.compute_dtype
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    comparisons.sort(key=lambda c: -c.error)
    ok = all(c.error <= tolerance for c in comparisons)
    return Report(dict(mesh.shape), dtype, tolerance, ok, comparisons)


def _error(got: Any, want: Any, floor: float = 0.0) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    difference = float(np.linalg.norm(got - want))
    error = difference / max(float(np.linalg.norm(want)), floor, np.finfo(np.float64).tiny)
    return error if np.isfinite(error) else float("inf")


def _compare_trees(kind: str, got: Params, want: Params, floor: float = 0.0) -> list[Comparison]:
    errors = jax.tree.map(lambda g, w: _error(g, w, floor), got, want)
    named = jax.tree_util.tree_flatten_with_path(errors)[0]
    return [Comparison(".".join(str(k.key) for k in path), kind, error) for path, error in named]


def run(config: Config, mesh: Mesh, *, as_json: bool = False, worst: int = 10, print_: Callable = print) -> bool:
    """Compare, print a table of the worst offenders or JSON, and say whether all is within tolerance."""
    with Console(stderr=True).status("one step on the mesh, and one on a single device"):
        report = compare(config, mesh)
    if as_json:
        print_(json.dumps(asdict(report)))
        return report.ok
    table = Table(title=f"mesh {report.mesh} against one device, {report.dtype}, tolerance {report.tolerance:g}")
    for column in ("tensor", "kind", "relative error", ""):
        table.add_column(column)
    for c in report.comparisons[:worst]:
        table.add_row(c.name, c.kind, f"{c.error:.2e}", "ok" if c.error <= report.tolerance else "differs")
    Console().print(table)
    bad = sum(c.error > report.tolerance for c in report.comparisons)
    verdict = "all agree" if report.ok else f"{bad} differ"
    print_(
        f"{len(report.comparisons)} tensors compared, {verdict}; worst relative error {report.comparisons[0].error:.2e}"
    )
    return report.ok
