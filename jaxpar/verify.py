"""Does this config compute the same on its mesh as on one device? The check behind `jaxpar verify`.

A few training steps and an evaluation are made by the real program on the mesh. Each step's gradients are compared with
those of a plain program in global view on one device, which has no scan over layers, no microbatches, no sharding and
optax's cross-entropy; each update with what the optimizer makes of the same gradients there. Both start each step from
the mesh's state, so that rounding does not add up, and before the first one the mesh's parameters are compared with the
model's own, as its maker draws them.

What is computed in bfloat16 is compared with float32 on the same rounded weights: two programs in bfloat16 could be
wrong alike.

Letters: B batch (sequences), T tokens, L layers.
"""

import json
import math
from collections.abc import Callable, Iterator
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
from jaxpar.gradients import Batch, Params
from jaxpar.layers import padding
from jaxpar.layers.dropout import example_keys, fold_in
from jaxpar.layers.layout import STACK
from jaxpar.models import facts_of
from jaxpar.models.protocol import cast
from jaxpar.optimizer import make_optimizer, make_schedule
from jaxpar.step import MakeModel, TrainState, build, model_maker

TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 1.5e-2}
"""Largest accepted relative error by compute dtype: rounding grows with depth and width.

Mistakes in a layout start at 1e-1. A sum over tokens made in bfloat16 is 2e-2 off where it is a vector's gradient.
"""
BFLOAT16_MATRIX = 4e-2
"""That of matrices in bfloat16. Their gradients are products of activations and gradients, which were rounded in every
layer (measured: 1.2e-2 with 8 layers); in a vector's that averages out."""
BFLOAT16_TOKENS = 2048
"""From so many tokens on; with fewer more is accepted, and sums in bfloat16 lose less."""
VANISHING = {"float64": 1e-6, "float32": 1e-6, "bfloat16": 1e-4}
"""Share of the norm of all gradients below which one is nothing but rounding, as that of key biases, to which softmax
is blind. Its error is measured against that share."""


@dataclass(frozen=True)
class Comparison:
    """One tensor computed twice.

    Attributes:
        step: after how many steps.
        kind: `initial parameter`, `value`, `gradient`, `updated parameter` or `evaluation`.
        name: dotted name of the parameter, or `loss`, `grad_norm`, ….
        error: L2 norm of the difference over the L2 norm of the one-device value (see `VANISHING`); of an updated
            parameter over that of its change.
        tolerance: largest accepted error.
    """

    step: int
    kind: str
    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Report:
    """What `compare` found.

    Attributes:
        mesh: axis sizes.
        dtype: compute dtype on the mesh.
        reference_dtype: that on one device.
        steps: how many were made.
        tolerance: of most comparisons.
        ok: every comparison is within its tolerance.
        comparisons: worst first.
    """

    mesh: dict[str, int]
    dtype: str
    reference_dtype: str
    steps: int
    tolerance: float
    ok: bool
    comparisons: list[Comparison]


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens, a fifth of them the same, with a different share of masked targets in every example.

    In text, too, a few tokens make up much of all: their rows of an embedding are sums of very many gradients. One
    example has a single target left.

    Returns:
        `tokens`, `targets` i32[B, T] and `mask` bool[B, T].
    """
    rng = np.random.default_rng(seed)
    shape = config.train.global_batch, config.data.sequence_length
    tokens = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), dtype=np.int32)
    tokens[rng.random(tokens.shape) < 0.2] = config.model.vocab_size // 3
    mask = rng.random(shape) < rng.permutation(np.linspace(0, 1, shape[0]))[:, None]
    mask[0, 0] = True
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


class OneDevice:
    """A config's model on one device in global view: the oracle.

    Args:
        config: its model, optimizer and dtypes are used.
        make_model: builds the model.
    """

    def __init__(self, config: Config, make_model: MakeModel) -> None:
        self.config, self.make_model = config, make_model
        model = facts_of(config, make_model).model
        self.graph, _, self.constants = nnx.split(model, nnx.Param, ...)
        self.optimizer = make_optimizer(config.optimizer, make_schedule(config.optimizer), padding(model))

    def initial(self) -> Params:
        """The model's own parameters."""
        return nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(self.config.train.seed)), nnx.Param))

    def logits(self, params: Params, tokens_BT: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Layer by layer; without the entries that only fill up the vocabulary."""
        model = nnx.merge(self.graph, cast(params, self.config.train.compute_dtype), self.constants)
        layer_graph, stacked = nnx.split(model.blocks)
        x = model.embed(tokens_BT)
        for i in range(jax.tree.leaves(params[STACK])[0].shape[0]):
            layer = nnx.merge(layer_graph, jax.tree.map(lambda leaf_L, i=i: leaf_L[i], stacked))
            x = model.block(layer, x, fold_in(keys_B, i))
        return model.head(x)[..., : self.config.model.vocab_size]

    def losses(self, params: Params, batch: Batch, step: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The objective, and the means that it is made of; step None: an evaluation."""
        keys_B = None
        if step is not None:
            keys_B = example_keys(self.config.train.seed, step, jnp.arange(self.config.train.global_batch))
        logits = self.logits(params, batch["tokens"], keys_B)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        mean = lambda losses_BT: jnp.mean(losses_BT, where=batch["mask"])
        losses = {"loss": mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))}
        if self.config.train.z_loss:
            losses["z_loss"] = self.config.train.z_loss * mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        return sum(losses.values(), start=jnp.zeros(())), losses

    def losses_and_grads(self, params: Params, batch: Batch, step: jax.Array) -> tuple[dict[str, jax.Array], Params]:
        """Means over the tokens of a batch, and the gradients of their sum."""
        (_, losses), grads = jax.value_and_grad(self.losses, has_aux=True)(params, batch, step)
        return losses, grads

    def updated(self, grads: Params, opt_state: Any, params: Params) -> Params:
        """The parameters after an update by these gradients."""
        updates, _ = self.optimizer.update(grads, opt_state, params)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), optax.apply_updates(params, updates), params)


def compare(
    config: Config,
    mesh: Mesh,
    make_model: MakeModel | None = None,
    *,
    steps: int = 3,
    evaluate: bool = True,
    tolerance: float | None = None,
) -> Report:
    """Run a config on its mesh and on one device, and compare everything.

    Float32 is multiplied at the highest precision in both, which GPUs do not do by default.

    Args:
        config: resolved; its parallel settings are what is tested.
        mesh: the mesh to test.
        make_model: builds the model; by default the config's own.
        steps: training steps, at least 1.
        evaluate: compare an evaluation after them.
        tolerance: largest accepted relative error of everything; by default the one for the compute dtype and kind.

    Returns:
        The report; it does not raise when the two differ.
    """
    with jax.default_matmul_precision("highest"):
        comparisons = list(_comparisons(config, mesh, make_model, steps, evaluate))
    if tolerance is not None:
        comparisons = [Comparison(c.step, c.kind, c.name, c.error, tolerance) for c in comparisons]
    comparisons.sort(key=lambda c: -c.error / max(c.tolerance, 1e-300))
    dtype = config.train.compute_dtype
    ok = all(c.ok for c in comparisons)
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    return Report(dict(mesh.shape), dtype, _reference(config).train.compute_dtype, steps, tolerance, ok, comparisons)


def _reference(config: Config) -> Config:
    """The oracle's config: float32 in place of bfloat16."""
    if config.train.compute_dtype != "bfloat16":
        return config
    model = config.model.model_copy(update={"attn_implementation": "xla"})
    return config.model_copy(
        update={"model": model, "train": config.train.model_copy(update={"compute_dtype": "float32"})}
    )


def _comparisons(
    config: Config, mesh: Mesh, make_model: MakeModel | None, steps: int, evaluate: bool
) -> Iterator[Comparison]:
    device = mesh.devices.flat[0]
    program, reference = build(config, mesh, make_model), _reference(config)
    alone = OneDevice(reference, make_model or model_maker(reference, device.platform))
    losses_and_grads, updated = jax.jit(alone.losses_and_grads), jax.jit(alone.updated)
    rounded = jax.jit(lambda params: cast(cast(params, config.train.compute_dtype), reference.train.compute_dtype))
    in_model_order = lambda state: jax.device_get(program.to_saved(state))
    put = lambda tree: jax.device_put(tree, device)
    of_values = TOLERANCE[config.train.compute_dtype]

    state = program.init()
    old: TrainState = in_model_order(state)
    initial = jax.device_get(jax.jit(alone.initial)())
    for name, got, want in _pairs(old.params, initial):
        yield Comparison(0, "initial parameter", name, _error(got, want), _exact(config.train.param_dtype))
    for step in range(steps):
        batch = random_batch(config, step)
        state, means, grads = program.train_step_and_grads(state, jax.device_put(batch, program.batch_sharding))
        grads = program.stacking.model_order(jax.device_get(grads))
        weights = rounded(put(old.params))
        losses, want_grads = jax.device_get(losses_and_grads(weights, put(batch), put(np.int32(step))))
        norm = float(optax.tree.norm(want_grads))
        for name, want in {**losses, "grad_norm": norm, "tokens": batch["mask"].sum()}.items():
            yield Comparison(step + 1, "value", name, _error(means[name], want), of_values)
        for name, got, want in _pairs(grads, want_grads):
            error = _error(got, want, VANISHING[_rounded_to(config)] * norm)
            yield Comparison(
                step + 1, "gradient", name, error, _gradient_tolerance(config, name, got, batch["mask"].sum())
            )
        new: TrainState = in_model_order(state)
        want_params = jax.device_get(updated(put(grads), put(old.opt_state), put(old.params)))
        tolerance = min(TOLERANCE["float32"], of_values)
        rounding = _exact(config.train.param_dtype) / max(tolerance, _exact(config.train.param_dtype))
        for (name, got, want), before in zip(_pairs(new.params, want_params), jax.tree.leaves(old.params), strict=True):
            got, want, before = (np.asarray(x, np.float64) for x in (got, want, before))
            error = _error(got - before, want - before, norm=_norm(want - before) + rounding * _norm(before))
            yield Comparison(step + 1, "updated parameter", name, error, tolerance)
        old = new
    if evaluate:
        batch = random_batch(config, steps)
        sums = program.eval_step(state.params, jax.device_put(batch, program.batch_sharding))
        evaluated = jax.jit(lambda params, batch: alone.losses(params, batch, None)[1]["loss"])
        loss = evaluated(rounded(put(old.params)), put(batch))
        yield Comparison(steps, "evaluation", "loss", _error(sums["loss"] / sums["tokens"], loss), of_values)
        yield Comparison(steps, "evaluation", "tokens", _error(sums["tokens"], batch["mask"].sum()), of_values)


def _exact(dtype: str) -> float:
    """The same numbers, drawn by two programs whose functions XLA may round differently."""
    return 10 * float(jnp.finfo(dtype).eps)


def _rounded_to(config: Config) -> str:
    """The narrowest type that gradients are rounded to on their way."""
    return "bfloat16" if config.grad_reduce.wire_dtype == "bfloat16" else config.train.compute_dtype


def _gradient_tolerance(config: Config, name: str, g: np.ndarray, tokens: int) -> float:
    tolerance = TOLERANCE[_rounded_to(config)]
    if config.train.compute_dtype != "bfloat16":
        return tolerance
    matrix = g.ndim - name.startswith(f"{STACK}.") > 1
    # Rounding that differs from token to token averages out, with their square root.
    return (BFLOAT16_MATRIX if matrix else tolerance) * max(1.0, (BFLOAT16_TOKENS / tokens) ** 0.5)


def _pairs(got: Params, want: Params) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The leaves of both, with their names."""
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        yield ".".join(str(k.key) for k in path), np.asarray(g), np.asarray(w)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _error(got: Any, want: Any, least: float = 0.0, *, norm: float | None = None) -> float:
    """The relative error; `least` is the smallest norm that it is measured against."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = _norm(got - want) / max(_norm(want) if norm is None else norm, least, 1e-300)
    return error if math.isfinite(error) else math.inf


def run(
    config: Config,
    mesh: Mesh,
    make_model: MakeModel | None = None,
    *,
    steps: int = 3,
    as_json: bool = False,
    worst: int = 10,
    print_: Callable = print,
) -> bool:
    """Compare, print a table of the worst offenders or JSON, and say whether all is within tolerance."""
    with Console(stderr=True).status(f"{steps} steps and an evaluation on the mesh and on a single device"):
        report = compare(config, mesh, make_model, steps=steps)
    if as_json:
        print_(json.dumps(asdict(report)))
        return report.ok
    title = f"mesh {report.mesh} in {report.dtype} against one device in {report.reference_dtype}, {steps} steps"
    table = Table(title=title)
    for column in ("step", "kind", "tensor", "relative error", "tolerance", ""):
        table.add_column(column)
    for c in report.comparisons[:worst]:
        verdict = "ok" if c.ok else "differs"
        table.add_row(str(c.step), c.kind, c.name, f"{c.error:.2e}", f"{c.tolerance:g}", verdict)
    Console().print(table)
    bad = sum(not c.ok for c in report.comparisons)
    print_(f"{bad} of {len(report.comparisons)} differ" if bad else f"all {len(report.comparisons)} agree")
    return report.ok
