"""Dropout: a fixed share, the mean kept, and the same mask whatever the layout; every mask of a step is another."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import axis_index
from jaxpar.config import Config
from jaxpar.layers import dropout
from jaxpar.layers.dropout import fold_in
from jaxpar.mesh import make_mesh
from jaxpar.models import Transformer
from jaxpar.step import Program, TrainState, build

B, T, D = 6, 8, 50
RATE = 0.3


def keys(rows: jax.Array) -> jax.Array:
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(5), row))(rows)


def ones(dtype: type = np.float64) -> np.ndarray:
    return np.ones((B, T, D), dtype)


def on_one_device() -> np.ndarray:
    return np.asarray(dropout(jnp.asarray(ones()), keys(jnp.arange(B)), RATE))


def test_the_share_and_the_mean():
    y = on_one_device()
    kept = y != 0
    np.testing.assert_allclose(y[kept], 1 / (1 - RATE), rtol=1e-15)
    # 2400 draws: within 5 standard errors.
    standard_error = math.sqrt(RATE * (1 - RATE) / y.size)
    assert abs(kept.mean() - (1 - RATE)) < 5 * standard_error
    assert abs(y.mean() - 1) < 5 * standard_error / (1 - RATE)


def test_every_example_and_token_has_its_own_mask():
    kept = (on_one_device() != 0).reshape(B * T, D)
    assert len({mask.tobytes() for mask in kept}) == B * T


def test_the_gradient_is_the_mask():
    y, backward = jax.vjp(lambda x: dropout(x, keys(jnp.arange(B)), RATE), ones())
    np.testing.assert_array_equal(backward(ones())[0], y)


@pytest.mark.parametrize("sizes", [(1, 1, 4), (2, 1, 4), (6, 1, 1), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
def test_every_layout_has_the_same_mask(sizes: tuple[int, ...], sequence_parallel: bool):
    mesh = make_mesh(*sizes)

    def block(x: jax.Array) -> jax.Array:
        rows = axis_index("data") * x.shape[0] + jnp.arange(x.shape[0])
        return dropout(x, keys(rows), RATE, sequence_parallel=sequence_parallel)

    spec = P("data", "tensor" if sequence_parallel else None)
    got = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec))(ones())
    np.testing.assert_array_equal(got, on_one_device())


def test_nothing_without_keys_or_rate():
    x = jnp.asarray(ones())
    assert dropout(x, None, RATE) is x
    assert dropout(x, keys(jnp.arange(B)), 0.0) is x


def test_the_dtype_stays():
    assert dropout(jnp.asarray(ones(), jnp.bfloat16), keys(jnp.arange(B)), RATE).dtype == jnp.bfloat16


def test_fold_in_makes_new_keys_for_every_example():
    assert fold_in(None, 3) is None
    before = keys(jnp.arange(B))
    made = [fold_in(before, 0), fold_in(before, 1), before]
    data = np.concatenate([jax.random.key_data(k) for k in made if k is not None])
    assert len({k.tobytes() for k in data}) == 3 * B


# ---------------------------------------------------------------- all masks of a step, read off the real program

LAYERS, ROWS, TOKENS, WIDTH, VOCABULARY = 5, 8, 6, 48, 64
PLACES = 2
"""Where a block drops: what attention gave, and what the feed-forward layer gave."""


class Bare(Transformer):
    """A GPT-2 whose head has no norm before it."""

    def head(self, x: jax.Array) -> jax.Array:
        assert self.lm_head is not None
        return self.lm_head.logits(x)


def settings(layout: tuple[int, int, int] = (1, 1, 1), rate: float = RATE, seed: int = 3, **parallel: Any) -> Config:
    data, pipe, tensor = layout
    return Config.from_dict(
        {
            "model": {
                "architecture": "gpt2",
                "vocab_size": VOCABULARY,
                "vocab_multiple": VOCABULARY,
                "hidden_size": WIDTH,
                "intermediate_size": 8,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "tie_word_embeddings": False,
                "resid_pdrop": rate,
            },
            "mesh": {"data": data, "pipe": pipe, "tensor": tensor},
            "parallel": parallel,
            "data": {"train": ["unused"], "tokenizer": "unused.json", "sequence_length": TOKENS},
            "optimizer": {"name": "sgd", "learning_rate": 1.0, "schedule": "constant"},
            "train": {"steps": 20, "global_batch": ROWS, "run_dir": "unused", "seed": seed}
            | {"param_dtype": "float64", "compute_dtype": "float64"},
        }
    )


def run(config: Config) -> Program:
    """Build it once."""
    return programs(config.to_yaml())


@functools.cache
def programs(text: str) -> Program:
    config = Config.from_yaml_text(text)
    mesh = make_mesh(config.mesh.data, config.mesh.pipe, config.mesh.tensor)
    own = {"sequence_parallel": config.parallel.sequence_parallel, "param_dtype": config.train.param_dtype}
    return build(config, mesh, lambda rngs: Bare(config.model, **own, rngs=rngs))


def holding(program: Program, change: Callable[[Any], Any]) -> TrainState:
    """A state whose parameters, in model order, are what `change` makes of zeros, and all else zero."""
    state = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), program.saved_state)
    shardings = jax.tree.map(lambda s: s.sharding, program.saved_state)
    return program.from_saved(jax.device_put(state._replace(params=change(state.params)), shardings))


def numbered(params: Any) -> Any:
    """With these the activations before the head tell what was dropped: branch number i adds 2^i / (1 - rate), or 0.

    The biases at the end of residual branches do it; all else is zero.
    """
    for place, module in enumerate((params["blocks"]["attention"]["out"], params["blocks"]["mlp"]["down"])):
        module["bias"] += 2.0 ** (PLACES * np.arange(LAYERS)[:, None] + place)
    return params


def drawn(params: Any) -> Any:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda p: random.normal(size=p.shape, scale=0.3), params)


TARGETS = np.random.default_rng(0).permutation(ROWS * TOKENS).astype(np.int32).reshape(ROWS, TOKENS)
"""One token, one target."""


def batch(program: Program) -> Any:
    whole = {"tokens": TARGETS, "targets": TARGETS, "mask": np.ones(TARGETS.shape, bool)}
    return jax.device_put(whole, program.batch_sharding)


def masks_of(head_gradient_VD: Any) -> np.ndarray:
    """What was kept, `[LAYERS, PLACES, ROWS, TOKENS, WIDTH]`, from the gradient of the head's weights, which are zero.

    Row v is the mean over tokens of (1/V - [v is the target]) · activations.
    """
    gradient_VD = np.asarray(head_gradient_VD)
    x_BTD = (gradient_VD[VOCABULARY - 1] - gradient_VD[TARGETS]) * TARGETS.size  # the last row is nobody's target
    number_BTD = np.rint(x_BTD * (1 - RATE)).astype(int)
    np.testing.assert_allclose(x_BTD, number_BTD / (1 - RATE), rtol=0, atol=1e-9)  # sums of 48 numbers below 1500
    branches = np.arange(PLACES * LAYERS).reshape(LAYERS, PLACES, 1, 1, 1)
    return number_BTD >> branches & 1 == 1


def masks(config: Config, step: int = 0, first_row: int = 0) -> np.ndarray:
    program = run(config)
    params = holding(program, numbered).params
    _, grads = program.loss_and_grads(params, batch(program), jnp.int32(step), first_row)
    return masks_of(grads["lm_head"]["weight"])


@pytest.mark.usefixtures("quick_compiles")
def test_every_mask_of_a_run_is_another():
    """Of two seeds, two steps, layers, places in a layer, examples and tokens; but twice the same is the same."""
    kept = np.stack([[masks(settings(seed=seed), step) for step in (0, 1)] for seed in (3, 4)])
    patterns = kept.reshape(-1, WIDTH)
    assert len({pattern.tobytes() for pattern in patterns}) == len(patterns)
    for dim in range(kept.ndim - 1):  # two neighbours in any of these agree no more often than chance has it
        pairs = kept.swapaxes(0, dim)
        chance, agree = RATE**2 + (1 - RATE) ** 2, pairs[1:] == pairs[:-1]
        assert abs(agree.mean() - chance) < 5 * math.sqrt(chance * (1 - chance) / agree.size), dim
    share = kept.mean(axis=(-3, -2, -1))  # 2304 draws each
    assert (abs(share - (1 - RATE)) < 5 * math.sqrt(RATE * (1 - RATE) / (ROWS * TOKENS * WIDTH))).all()
    np.testing.assert_array_equal(masks(settings(), 1), kept[0, 1])


LAYOUTS: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatches": 4},
    "zero 3, sequence parallel": {"layout": (2, 1, 2), "zero": 3, "sequence_parallel": True, "microbatches": 2},
    "1f1b, sequence parallel": {"layout": (2, 2, 2), "sequence_parallel": True, "microbatches": 2, "remat": "full"},
    "1f1b in two chunks, zero 3": {"layout": (2, 2, 1), "chunks": 2, "microbatches": 2, "zero": 3},
}


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_has_the_same_masks_on_every_layout(name: str):
    config, alone = settings(**LAYOUTS[name]), settings()
    for step in (0, 7):
        np.testing.assert_array_equal(masks(config, step), masks(alone, step), err_msg=f"step {step}")
    # A batch that is the end of a larger one, as a worker of a parameter server has it.
    half = ROWS // 2
    np.testing.assert_array_equal(masks(config, 7, half)[:, :, :half], masks(alone, 7)[:, :, half:])


@pytest.mark.usefixtures("quick_compiles")
def test_the_train_step_drops_by_its_own_number():
    program = run(settings(**LAYOUTS["1f1b, sequence parallel"]))
    for step in (0, 1):
        before = holding(program, numbered)._replace(step=jnp.int32(step))
        after, _ = program.train_step(before, batch(program))
        # Plain SGD at rate 1, and the head was zero.
        np.testing.assert_array_equal(masks_of(-after.params["lm_head"]["weight"]), masks(settings(), step))


@pytest.mark.usefixtures("quick_compiles")
def test_evaluation_drops_nothing():
    """On one device and in a pipeline, whose training loss is another, it is that of a model without dropout."""
    found = []
    for config in (
        settings(rate=0.0),
        settings(**LAYOUTS["microbatches"]),
        settings(**LAYOUTS["1f1b, sequence parallel"]),
    ):
        program = run(config)
        params = holding(program, drawn).params
        sums = program.eval_step(params, batch(program))
        found.append(float(sums["loss"] / sums["tokens"]))
    dropped = program.loss_and_grads(params, batch(program), jnp.int32(0))[0]["loss"]
    np.testing.assert_allclose(found, found[0], rtol=1e-12)
    assert abs(dropped - found[0]) > 1e-2 * found[0]
