"""Sums over microbatches and replicas are made in float32 where layers compute in bfloat16.

All rows of a batch are the same. So each microbatch and each replica has the same gradient, and the mean over all of
them is the gradient of one, whatever bfloat16 makes of it within a microbatch: the rounding of layers is the same in
both, and does not hide what is looked for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.test_step import config, program

# Summed in float32, 81 equal numbers stray by 1e-6 at the most (and of bfloat16 numbers not at all). Measured: rounding
# the sum of three to bfloat16 costs 1e-3, adding 27 in bfloat16 more.
TOLERANCE = 3e-6
MICROBATCHES, REPLICAS = 27, 3
"""Odd, so that no multiple of a number of 8 bits has 8 bits again."""
TOKENS = 7
"""So many count in a row: 27 · 7 and 81 · 7 in all, of which the latter has more than 8 bits."""

ONE, MANY = (1, 1, 1), (REPLICAS, 1, 1)
CASES: dict[str, tuple[tuple[int, int, int], int, dict[str, Any]]] = {
    "microbatches": (ONE, MICROBATCHES, {}),
    "zero 1": (MANY, MICROBATCHES, {"parallel": {"zero": 1}}),
    "zero 3, ring": (MANY, MICROBATCHES, {"parallel": {"zero": 3}, "grad_reduce": {"algorithm": "ring"}}),
    "overlapped": (MANY, MICROBATCHES, {"grad_reduce": {"schedule": "overlapped"}}),
    "overlapped, zero 2": (MANY, 1, {"parallel": {"zero": 2}, "grad_reduce": {"schedule": "overlapped"}}),
    "1f1b": ((1, 2, 1), MICROBATCHES, {}),
    "gpipe, zero 3": ((REPLICAS, 2, 1), MICROBATCHES, {"parallel": {"zero": 3, "schedule": "gpipe"}}),
}


def mean_of_equal_rows(
    layout: tuple[int, int, int], microbatches: int, parallel: Any = None, grad_reduce: Any = None
) -> tuple[float, Any, float]:
    """Loss, gradients in model order, and tokens; each microbatch of each replica is one row."""
    rows = layout[0] * microbatches
    settings = config(
        layout,
        model={"num_hidden_layers": 2},
        parallel={"microbatches": microbatches} | (parallel or {}),
        grad_reduce=grad_reduce,
        train={"global_batch": rows, "param_dtype": "float32", "compute_dtype": "bfloat16"},
    )
    length = settings.data.sequence_length
    row = np.random.default_rng(0).integers(0, settings.model.vocab_size, length + 1, np.int32)
    one = {"tokens": row[:-1], "targets": row[1:], "mask": np.arange(length) < TOKENS}
    batch = {name: np.tile(array, (rows, 1)) for name, array in one.items()}
    built = program(settings)
    placed = jax.device_put(batch, built.batch_sharding)
    means, grads = built.loss_and_grads(built.init().params, placed, jnp.int32(0))
    return float(means["loss"]), jax.device_get(built.stacking.model_order(grads)), float(means["tokens"])


of_one = functools.cache(lambda stages: mean_of_equal_rows((1, stages, 1), 1))


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", CASES)
def test_many_equal_gradients_have_the_mean_of_one(name: str):
    layout, microbatches, sections = CASES[name]
    loss, got, tokens = mean_of_equal_rows(layout, microbatches, **sections)
    want_loss, want, _ = of_one(layout[1])
    assert tokens == layout[0] * microbatches * TOKENS
    assert loss == pytest.approx(want_loss, rel=TOLERANCE)
    errors = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), got, want)
    assert max(jax.tree.leaves(errors)) <= TOLERANCE, errors
