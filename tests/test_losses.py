"""The vocabulary-parallel cross-entropy against optax's, which sees all logits at once.

Letters: B batch, T tokens, V vocabulary.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import psum
from jaxpar.losses import cross_entropy, means
from jaxpar.mesh import make_mesh

B, T, V = 4, 5, 840
"""840 divides by all of 1 … 8."""
WAYS = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (1, 5), 6: (3, 2), 7: (1, 7), 8: (2, 4)}
"""Devices of pipe and tensor."""
# float64 sums of 840 numbers, in another order.
CLOSE: dict[str, Any] = dict(rtol=1e-13, atol=1e-13)
Z_LOSS = 0.1


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits up to about 12, targets in every block of the vocabulary, and a different share of each row masked."""
    random = np.random.default_rng(0)
    targets = random.permutation(np.linspace(0, V - 1, B * T).astype(np.int32)).reshape(B, T)
    mask = np.arange(T) < np.array([5, 2, 0, 3])[:, None]
    return 3 * random.normal(size=(B, T, V)), targets, mask


def oracle(logits: jax.Array, targets: Any, mask: Any, z_loss: float) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    losses = losses + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.sum(losses, where=mask), jnp.asarray(mask).sum()


def value_and_gradient(f: Any, z_loss: float) -> Any:
    return jax.value_and_grad(lambda *arrays: f(*arrays, z_loss=z_loss), has_aux=True)


def spec(mesh: jax.sharding.Mesh, *dims: tuple[str, ...]) -> P:
    """Without axes of size 1."""
    return P(*[tuple(a for a in axes if mesh.shape[a] > 1) or None for axes in dims])


@pytest.mark.parametrize("z_loss", [0.0, Z_LOSS])
@pytest.mark.parametrize("ways", WAYS)
def test_split_vocabulary_equals_optax(ways: int, z_loss: float):
    mesh = make_mesh(1, *WAYS[ways])
    split = spec(mesh, (), (), ("pipe", "tensor"))
    logits, targets, mask = batch()
    block = jax.shard_map(
        value_and_gradient(cross_entropy, z_loss),
        mesh=mesh,
        in_specs=(split, P(), P()),
        out_specs=((P(), P()), split),
    )
    (objective, sums), gradient = jax.jit(block)(logits, targets, mask)
    (want, _), want_gradient = value_and_gradient(oracle, z_loss)(logits, targets, mask)
    np.testing.assert_allclose(objective, want, **CLOSE)
    np.testing.assert_allclose(gradient, want_gradient, **CLOSE)
    np.testing.assert_allclose(sums["loss"], oracle(logits, targets, mask, 0.0)[0], **CLOSE)  # whatever the penalty
    assert sums.keys() == {"loss", "tokens"} | ({"z_loss"} if z_loss else set())
    np.testing.assert_allclose(sums["loss"] + sums.get("z_loss", 0), want, **CLOSE)
    assert sums["tokens"] == mask.sum() == 10
    np.testing.assert_array_equal(gradient[~mask], 0)


def test_one_mean_over_replicas_that_mask_differently():
    """Rows over data, 7 and 3 tokens that count: sums are added, then divided."""
    mesh = make_mesh(2, 1, 4)
    split, rows = P("data", None, "tensor"), P("data")
    logits, targets, mask = batch()

    def mean(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        return means(psum(cross_entropy(logits, targets, mask)[1], "data"))["loss"]

    block = jax.shard_map(jax.value_and_grad(mean), mesh=mesh, in_specs=(split, rows, rows), out_specs=(P(), split))
    loss, gradient = jax.jit(block)(logits, targets, mask)
    want, want_gradient = jax.value_and_grad(lambda x: oracle(x, targets, mask, 0.0)[0] / 10)(logits)
    np.testing.assert_allclose(loss, want, **CLOSE)
    np.testing.assert_allclose(gradient, want_gradient, **CLOSE)


def test_a_head_that_is_whole_on_every_device():
    """A user's own head: logits are the same on all devices of pipe and tensor, and nothing needs to be sent."""
    logits, targets, mask = batch()
    block = jax.shard_map(
        value_and_gradient(cross_entropy, Z_LOSS),
        mesh=make_mesh(1, 2, 4),
        in_specs=(P(), P(), P()),
        out_specs=((P(), P()), P()),
    )
    (loss, _), gradient = jax.jit(block)(logits, targets, mask)
    (want, _), want_gradient = value_and_gradient(oracle, Z_LOSS)(logits, targets, mask)
    np.testing.assert_allclose(loss, want, **CLOSE)
    np.testing.assert_allclose(gradient, want_gradient, **CLOSE)
    assert "all-reduce" not in jax.jit(block).lower(logits, targets, mask).compile().as_text()


def test_logits_are_never_gathered():
    """Devices exchange three numbers a token: the maximum first, then the sum and the target's logit."""
    split = P(None, None, "tensor")
    block = jax.shard_map(cross_entropy, mesh=make_mesh(tensor=4), in_specs=(split, P(), P()), out_specs=P())
    text = jax.jit(block).lower(*batch()).compile().as_text()
    sent = re.findall(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", text)
    assert {kind for _, kind in sent} == {"all-reduce"}
    shapes = [dims for results, _ in sent for dims in re.findall(r"f64\[([\d,]*)\]", results)]
    assert sum(int(np.prod([int(d) for d in dims.split(",")])) for dims in shapes) == 3 * B * T


def extreme() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of ±10⁴: exponentials overflow unless the maximum over all devices is taken off first."""
    logits, targets, mask = batch()
    signs = np.where(np.random.default_rng(1).random(logits.shape) < 0.5, -1.0, 1.0)
    return 1e4 * signs, targets, mask


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_extreme_logits(dtype: Any):
    logits, targets, mask = extreme()
    logits[0, 0] = -1e4
    logits[0, 1] = -1e4
    logits[0, 1, V - 1] = 1e4  # the maximum is on the last device alone
    mesh = make_mesh(1, 2, 4)
    split = P(None, None, ("pipe", "tensor"))
    block = jax.shard_map(
        value_and_gradient(cross_entropy, 0.0), mesh=mesh, in_specs=(split, P(), P()), out_specs=((P(), P()), split)
    )
    (loss, _), gradient = jax.jit(block)(logits.astype(dtype), targets, mask)
    (want, _), want_gradient = value_and_gradient(oracle, 0.0)(logits, targets, mask)
    assert loss.dtype == gradient.dtype == dtype and np.isfinite(loss)
    # A few roundings of numbers near 10⁴.
    np.testing.assert_allclose(loss, want, rtol=10 * np.finfo(dtype).eps)
    np.testing.assert_allclose(gradient, want_gradient, atol=1e4 * np.finfo(dtype).eps)


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets, mask = batch()
    low = jnp.asarray(logits, jnp.bfloat16)
    loss, sums = cross_entropy(low, targets, mask)
    want, _ = oracle(low.astype(jnp.float64), targets, mask, 0.0)
    assert loss.dtype == sums["tokens"].dtype == jnp.float32
    np.testing.assert_allclose(loss, want, rtol=1e-6)  # float32 sums; bfloat16 ones are off by 1e-3


def test_targets_where_nothing_counts_may_be_anything():
    """Hugging Face marks them with -100."""
    logits, targets, mask = batch()
    marked = np.where(mask, targets, -100)
    got = value_and_gradient(cross_entropy, Z_LOSS)(logits, marked, mask)
    want = value_and_gradient(cross_entropy, Z_LOSS)(logits, targets, mask)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_counts():
    (loss, sums), gradient = value_and_gradient(cross_entropy, Z_LOSS)(*batch()[:2], np.zeros((B, T), bool))
    assert loss == 0 and all(mean == 0 for mean in means(sums).values())
    np.testing.assert_array_equal(gradient, 0)


def test_a_negative_target_that_counts_is_seen_in_the_number_of_tokens():
    """One that does not count is not, nor one in another example; the loss and its gradient stay finite."""
    logits, targets, mask = batch()
    spoilt = np.where(np.arange(B)[:, None] == 1, -1, targets)
    of_rows = jax.vmap(
        lambda logits, targets, mask: cross_entropy(logits[None], targets[None], mask[None])[1]["tokens"]
    )
    got = of_rows(logits, spoilt, mask)
    assert np.isnan(got).tolist() == (np.arange(B) == 1).tolist()
    np.testing.assert_array_equal(np.delete(got, 1), np.delete(mask.sum(1), 1))
    np.testing.assert_array_equal(of_rows(logits, spoilt, mask & (spoilt >= 0)), (mask & (spoilt >= 0)).sum(1))
