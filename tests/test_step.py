"""The train step on every layout against one device in global view, in float64.

Sizes are all different, so that swapped dims fail, and as small as they can be: each case compiles a program.
"""

import functools
import itertools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpar import trainer, verify
from jaxpar.config import Config, InputError
from jaxpar.mesh import make_mesh
from jaxpar.models import forward
from jaxpar.optimizer import make_optimizer, make_schedule, matrices
from jaxpar.step import Program, abstract_batch, build, model_maker

LAYOUTS = [(d, 1, t) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * t <= 8]
TOLERANCE = 1e-9  # what is asked; float64 rounding through three layers is about 1e-15, the smallest real mistake 1e-2


def config(layout=(1, 1, 1), *, model=None, parallel=None, grad_reduce=None, optimizer=None, train=None) -> Config:
    values = {
        "model": {
            "architecture": "llama",
            "vocab_size": 503,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 2,
        },
        "mesh": {"data": layout[0], "pipe": layout[1], "tensor": layout[2]},
        "parallel": {},
        "grad_reduce": {},
        "data": {"train": ["unused"], "sequence_length": 8},
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "schedule": "constant"},
        "train": {
            "steps": 20,
            "global_batch": 32,
            "run_dir": "unused",
            "param_dtype": "float64",
            "compute_dtype": "float64",
        },
    }
    given = {"model": model, "parallel": parallel, "grad_reduce": grad_reduce, "optimizer": optimizer, "train": train}
    for section, changes in given.items():
        values[section] |= changes or {}
    return Config.from_dict(values)


def program(settings: Config) -> Program:
    return build(settings, make_mesh(settings.mesh.data, settings.mesh.pipe, settings.mesh.tensor))


@functools.cache
def one_device(**model):
    """Weights, and loss and gradients as one device computes them in global view without microbatches."""
    settings = config(model=model)
    params = jax.device_get(program(settings).init().params)
    params = jax.device_put(params, jax.devices()[0])
    batch = jax.device_put(verify.random_batch(settings), jax.devices()[0])
    alone = verify.OneDevice(settings, model_maker(settings, "cpu"))
    losses, grads = jax.jit(alone.losses_and_grads)(params, batch, jnp.int32(0))
    return jax.device_get((params, losses["loss"], grads))


def assert_parity(settings: Config, **model) -> None:
    params, want_loss, want = one_device(**model)
    built = program(settings)
    shardings = jax.tree.map(lambda s: s.sharding, built.abstract_state.params)
    params = jax.device_put(built.stacking.arrange(params), shardings)
    batch = jax.device_put(verify.random_batch(settings), built.batch_sharding)
    means, got = built.loss_and_grads(params, batch, jnp.int32(0))
    assert means["tokens"] == batch["mask"].sum()
    assert abs(means["loss"] - want_loss) <= TOLERANCE * want_loss
    norm = float(optax.tree.norm(want))

    def error(got, want):  # GPT-2's key biases have no gradient but rounding: softmax is blind to them
        return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6 * norm))

    errors = jax.tree.map(error, built.stacking.model_order(jax.device_get(got)), want)
    assert max(jax.tree.leaves(errors)) <= TOLERANCE, errors


def cases():
    """Every layout with every way to work on it; half of them, in turn, are left to the slow ones."""
    layouts = [(layout, False) for layout in LAYOUTS] + [(layout, True) for layout in LAYOUTS if layout[2] > 1]
    ways = itertools.product(["none", "dots", "full"], [1, 4], [False, True])
    for (i, layout), (j, way) in itertools.product(enumerate(layouts), enumerate(ways)):
        name = f"{'x'.join(map(str, layout[0]))}{'-sp' * layout[1]}-{way[0]}-{way[1]}-{'tied' if way[2] else 'untied'}"
        turn = i + j + j // 2 + j // 4  # so that each value of each way has its turn on each layout
        yield pytest.param(*layout, *way, id=name, marks=[pytest.mark.slow] * (turn % 2))


@pytest.mark.parametrize(("layout", "sequence_parallel", "remat", "microbatches", "tied"), list(cases()))
def test_gradients_equal_one_device(layout, sequence_parallel, remat, microbatches, tied):
    parallel = {"sequence_parallel": sequence_parallel, "remat": remat, "microbatches": microbatches}
    assert_parity(config(layout, model={"tie_word_embeddings": tied}, parallel=parallel), tie_word_embeddings=tied)


VARIANTS = {
    "gpt2 with dropout": {"architecture": "gpt2", "resid_pdrop": 0.2, "num_key_value_heads": 8},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "num_key_value_heads": 1},
    "mistral": {"architecture": "mistral", "sliding_window": 3, "num_key_value_heads": 4},
    "llama with dropout and biases": {"resid_pdrop": 0.3, "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence_parallel"])
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_equal_one_device_in_other_architectures(name, sequence_parallel):
    parallel = {"sequence_parallel": sequence_parallel, "remat": ["query", "mlp_hidden"], "unroll": 2}
    assert_parity(config((2, 1, 4), model=VARIANTS[name], parallel=parallel), **VARIANTS[name])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_twenty_steps_give_the_same_parameters_on_every_layout(name):
    optimizer = {"name": name, "learning_rate": 0.01, "clip_norm": 0.5, "weight_decay": 0.1}
    optimizer |= {"schedule": "warmup_cosine", "warmup_steps": 5}
    batches = [verify.random_batch(config(), seed) for seed in range(20)]
    want = one_device_training(config(optimizer=optimizer), batches)
    for layout in [(1, 1, 1), (8, 1, 1), (1, 1, 8), (2, 1, 4)]:
        built = program(config(layout, optimizer=optimizer, parallel={"microbatches": 2}))
        state = built.init()
        for batch in batches:
            state, _ = built.train_step(state, jax.device_put(batch, built.batch_sharding))
        assert int(state.step) == 20 and int(state.skipped) == 0
        for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-8)  # as asked; weights are about 0.02


def one_device_training(settings: Config, batches) -> dict:
    """Optax on gradients of the mean loss in global view on one device, written without the step."""
    maker = model_maker(settings, "cpu")
    built = program(settings)
    params = jax.device_put(jax.device_get(built.init().params), jax.devices()[0])
    optimizer = make_optimizer(settings.optimizer, make_schedule(settings.optimizer), built.padding)
    state = optimizer.init(params)
    step = jax.jit(lambda params, batch: verify.OneDevice(settings, maker).losses_and_grads(params, batch, 0)[1])
    update = jax.jit(optimizer.update)
    for batch in batches:
        updates, state = update(step(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


def compiled_step(settings: Config):
    built = program(settings)
    return built, built.train_step.lower(built.abstract_state, abstract_batch(settings, built)).compile()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_gradients_are_reduced_once_a_step_whatever_the_microbatches(microbatches):
    """Over data alone nothing else communicates: one all-reduce of every gradient, the loss and the token count."""
    built, compiled = compiled_step(config((8, 1, 1), parallel={"microbatches": microbatches}))
    collectives = re.findall(r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all)\(", compiled.as_text())
    assert len(collectives) == 1
    sizes = [
        int(np.prod([int(d) for d in dims.split(",") if d])) for dims in re.findall(r"f64\[([\d,]*)\]", collectives[0])
    ]
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(built.abstract_state.params)) + 2


def test_the_state_is_donated():
    built, compiled = compiled_step(config((2, 1, 2)))
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(built.abstract_state)]
    leaves = jax.tree.leaves(built.abstract_state)
    per_device = sum(int(np.prod(s)) * leaf.dtype.itemsize for s, leaf in zip(shards, leaves, strict=True))
    assert compiled.memory_analysis().alias_size_in_bytes == per_device


def test_mixed_precision_keeps_float32_masters_and_accumulates_in_float32():
    mixed = {"param_dtype": "float32", "compute_dtype": "bfloat16"}
    settings = config((2, 1, 4), parallel={"microbatches": 4}, train=mixed)
    built = program(settings)
    batch = jax.device_put(verify.random_batch(settings), built.batch_sharding)
    state = built.init()
    _, grads = built.loss_and_grads(state.params, batch, state.step)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, grads))} == {jnp.dtype("float32")}
    text = built.eval_step.lower(state.params, batch).as_text()
    operands = re.findall(r"stablehlo.dot_general.*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", text)
    assert operands and set(operands) == {("bf16", "bf16")}
    report = verify.compare(settings, built.mesh)
    assert report.ok, report.comparisons[:5]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_step_keeps_the_dtypes_of_the_state(name):
    """Or it would be compiled anew, and what it saves would not fit what is restored."""
    settings = config(optimizer={"name": name, "learning_rate": 0.01}, train={"param_dtype": "bfloat16"})
    built = program(settings)
    new, _ = jax.eval_shape(built.train_step, built.abstract_state, abstract_batch(settings, built))
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype, new, built.abstract_state)
    assert all(jax.tree.leaves(same))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(new.params)} == {"bfloat16"}


def test_a_step_that_is_not_finite_changes_nothing_but_the_counters():
    built = program(config((2, 1, 2), optimizer={"name": "adamw"}))
    batch = jax.device_put(verify.random_batch(config()), built.batch_sharding)
    state, _ = built.train_step(built.init(), batch)
    poisoned = jax.tree.map(jnp.copy, state)
    scale = poisoned.params["norm"]["scale"]
    poisoned.params["norm"]["scale"] = jax.device_put(scale.at[0].set(jnp.inf), scale.sharding)
    before = jax.device_get(poisoned)
    after, metrics = built.train_step(poisoned, batch)
    assert not np.isfinite(metrics["loss"])
    assert (int(after.skipped), int(after.skipped_in_a_row), int(after.step)) == (1, 1, 2)
    for new, old in zip(jax.tree.leaves(after[1:3]), jax.tree.leaves(before[1:3]), strict=True):
        np.testing.assert_array_equal(new, old)
    state, metrics = built.train_step(after._replace(params=state.params), batch)
    assert np.isfinite(metrics["loss"]) and (int(state.skipped), int(state.skipped_in_a_row)) == (1, 0)


def test_weights_do_not_depend_on_the_layout():
    want = jax.device_get(program(config()).init().params)
    got = jax.device_get(program(config((2, 1, 4))).init().params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- batches in which nothing counts

EMPTY = {
    "one device": {"parallel": {"microbatches": 2}},
    "overlapped": {"layout": (2, 1, 1), "parallel": {"microbatches": 2}, "grad_reduce": {"schedule": "overlapped"}},
    "1f1b": {"layout": (2, 2, 2), "parallel": {"microbatches": 2}},
    "1f1b, zero 3": {"layout": (2, 2, 2), "parallel": {"microbatches": 2, "zero": 3}},
}
FEW = {"global_batch": 8, "z_loss": 1e-2}
ADAM = {"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.2, "clip_norm": 1.0}


@functools.cache
def in_few_rows(name: str) -> tuple[Config, Program]:
    settings = config(**EMPTY[name], optimizer=ADAM, train=FEW)
    return settings, program(settings)


def masked(settings: Config, empty: list[int]):
    """A batch in whose rows `empty` no token counts; as Hugging Face marks them, they have the target -100."""
    batch = verify.random_batch(settings, seed=1)
    batch["mask"][:] = True
    batch["mask"][empty] = batch["mask"][:, -1] = False
    batch["targets"] = np.where(batch["mask"], batch["targets"], -100)
    return batch


@functools.cache
def optax_gradients():
    """`(params, batch) -> ` gradients of the mean loss over what counts, in global view, with optax's cross-entropy."""
    settings = config(train=FEW)
    graph = nnx.graphdef(nnx.eval_shape(lambda: model_maker(settings, "cpu")(nnx.Rngs(0))))

    def mean_loss(params, batch):
        logits = forward(nnx.merge(graph, params), batch["tokens"])[..., : settings.model.vocab_size]
        labels = jnp.maximum(batch["targets"], 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses + FEW["z_loss"] * jax.nn.logsumexp(logits, axis=-1) ** 2, where=batch["mask"])

    return jax.jit(jax.grad(mean_loss))


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("empty", ["a microbatch", "a replica", "a microbatch of a replica"])
@pytest.mark.parametrize("name", EMPTY)
def test_where_nothing_counts_adds_nothing(name, empty):
    """Rows 0 to 3 are the first of two replicas; rows 0, 1 and 4, 5 the first microbatches of both."""
    settings, built = in_few_rows(name)
    rows = {"a microbatch": [0, 1, 4, 5], "a replica": [0, 1, 2, 3], "a microbatch of a replica": [0, 1]}[empty]
    batch = masked(settings, rows)
    params = built.init().params
    means, got = built.loss_and_grads(params, jax.device_put(batch, built.batch_sharding), jnp.int32(0))
    want = optax_gradients()(jax.device_get(built.stacking.model_order(params)), batch)
    assert means["tokens"] == batch["mask"].sum()
    for a, b in zip(jax.tree.leaves(built.stacking.model_order(got)), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b)
    # Nor does it where nothing of the whole batch counts: there is no gradient, and no 0 / 0.
    nothing = jax.device_put(masked(settings, list(range(8))), built.batch_sharding)
    means, got = built.loss_and_grads(params, nothing, jnp.int32(0))
    assert all(mean == 0 for mean in means.values())
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(got))


@dataclass
class Fixed:
    """The same batch twice, as an evaluation reads it."""

    batch: dict[str, np.ndarray]
    global_batch: int
    sequence_length: int
    vocab_size: int

    def __len__(self):
        return 2

    def rows(self, step, rows):
        return {name: array[rows] for name, array in self.batch.items()}


@pytest.mark.usefixtures("quick_compiles")
def test_a_step_in_which_nothing_counts_is_one_without_a_gradient():
    """Its loss is 0; momentum and decay go on, as in optax's AdamW."""
    settings, built = in_few_rows("1f1b, zero 3")
    whole, nothing = masked(settings, []), masked(settings, list(range(8)))
    optimizer = optax.adamw(0.1, 0.9, 0.95, weight_decay=0.2, mask=matrices)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    params = jax.device_get(built.stacking.model_order(built.init().params))
    gradients = optax_gradients()(params, whole), jax.tree.map(np.zeros_like, params)
    opt_state, state = optimizer.init(params), built.init()
    for batch, grads in zip((whole, nothing), gradients, strict=True):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = built.train_step(state, jax.device_put(batch, built.batch_sharding))
    assert [float(metrics[name]) for name in ("loss", "grad_norm", "tokens", "skipped")] == [0, 0, 0, 0]
    assert state.step == 2
    # Adam's first steps divide by the root of small numbers, in another order.
    for a, b in zip(jax.tree.leaves(built.stacking.model_order(state.params)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-8)
    validation = Fixed(nothing, 8, settings.data.sequence_length, settings.model.vocab_size)
    with pytest.raises(InputError, match="no token counts in its 2 batches"):
        trainer.evaluate(built, state.params, validation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon", "sgd"])
def test_every_optimizer_makes_no_update_of_no_gradient(name, dtype):
    """From the first step on; what is left is the decay of matrices. 128 and more: Adafactor factors them."""
    section = config(optimizer=ADAM | {"name": name}).optimizer
    optimizer = make_optimizer(section, make_schedule(section))
    random = np.random.default_rng(0)
    params = {"blocks": {"up": random.normal(size=(2, 128, 130)), "bias": random.normal(size=(2, 6))}}
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), params)
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    decayed = -0.1 * 0.2 * params["blocks"]["up"].astype(jnp.float32)
    np.testing.assert_allclose(updates["blocks"]["up"].astype(jnp.float32), decayed, rtol=2**-6)
    np.testing.assert_array_equal(updates["blocks"]["bias"], 0)


def test_a_step_that_must_not_be_done_changes_nothing(quick_compiles: None):
    """Neither one with a batch that a process refused in its rows, nor one begun after too many bad ones.

    Here in a pipeline; whole runs do it without (`test_trainer`).
    """
    settings = config((2, 2, 1), optimizer={"name": "adamw"}, train={"max_bad_steps": 2})
    built = program(settings)
    good = verify.random_batch(settings)
    rows = settings.train.global_batch
    refused = good | {  # as `Batches.refusal` makes it, by the process of the second replica
        "targets": np.where(np.arange(rows)[:, None] < rows // 2, good["targets"], -1),
        "mask": good["mask"] | (np.arange(rows)[:, None] >= rows // 2),
    }
    good, refused = (jax.device_put(batch, built.batch_sharding) for batch in (good, refused))

    def step(state, batch):
        before = jax.device_get(state)
        after, metrics = built.train_step(state, batch)
        unchanged = jax.tree.map(np.array_equal, before, jax.device_get(after))
        return after, metrics, all(jax.tree.leaves(unchanged))

    state, metrics, unchanged = step(built.init(), good)
    assert not unchanged and np.isfinite(metrics["tokens"])
    state, metrics, unchanged = step(state, refused)
    assert unchanged and np.isnan(metrics["tokens"])
    after = [jax.tree.map(jnp.copy, state._replace(skipped_in_a_row=jnp.int32(bad))) for bad in (1, 2)]
    _, _, unchanged = step(after[0], good)
    assert not unchanged
    state, metrics, unchanged = step(after[1], good)
    assert unchanged and np.isfinite(metrics["loss"])
    anew = state.tried_anew(2)
    assert (int(anew.step), int(anew.skipped_in_a_row)) == (1, 0) and anew.params is state.params
    assert int(state.tried_anew(3).skipped_in_a_row) == 2
