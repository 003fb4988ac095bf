"""ZeRO stages and ways to reduce gradients: parity with one device, bytes, what is kept, what is hidden.

Sizes are those of `test_step`: 8 replicas divide the widths 24, 40 and 16, and nothing divides the norms' heads.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import verify
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import Config, InputError
from jaxpar.inspect import compile_step
from jaxpar.mesh import make_mesh
from jaxpar.step import abstract_batch
from jaxpar.zero import Zero, split_dim
from tests.test_step import assert_parity, config, one_device, one_device_training, program

ALGORITHMS = ("native", "ring", "tree", "halving_doubling", "hierarchical")
LAYOUTS = ((8, 1, 1), (2, 2, 2), (4, 1, 2), (2, 4, 1))
CHUNKS = {1: (1,), 2: (1, 2), 4: (1, 2)}
CASES = [
    (layout, chunks, stage, algorithm)
    for layout in LAYOUTS
    for chunks in CHUNKS[layout[1]]
    for stage, algorithm in itertools.product((0, 1, 2, 3), ALGORITHMS)
]
ADAM = {"name": "adamw", "learning_rate": 0.01, "clip_norm": 0.5, "weight_decay": 0.1}


def settings_of(layout, chunks, stage, algorithm, number=0, **more) -> Config:
    """A case, and settings that go around with the cases and take turns."""
    data, pipe, tensor = layout
    reduce = {"algorithm": algorithm, "bucket_bytes": (8, 4096, 2**20)[number % 3]}
    if algorithm == "hierarchical":
        reduce |= {"per_host": data // 2, "across": ("ring", "tree", "halving_doubling")[number % 3]}
    if algorithm == "ring":
        reduce["order"] = [*range(1, data, 2), *range(0, data, 2)]
    if pipe == 1 and number % 2:
        reduce["schedule"] = "overlapped"
    return config(
        layout,
        model={"num_hidden_layers": 9 if pipe > 1 else 3, "tie_word_embeddings": bool(number // 4 % 2)},
        parallel={
            "zero": stage,
            "chunks": chunks,
            "microbatches": 4 if pipe > 1 else (1, 2)[number // 2 % 2],
            "sequence_parallel": tensor > 1 and bool(number // 3 % 2),
            "remat": ("none", "dots", "full")[number // 2 % 3],
            "unroll": 1 + number // 5 % 2,
        },
        grad_reduce=reduce,
        optimizer=ADAM,
        **more,
    )


def case(number: int):
    """On each layout stages 1 and 3, or 2, are for every day, with one algorithm; the rest of the product is slow."""
    layout, chunks, stage, algorithm = CASES[number]
    name = f"{layout}-{chunks}-zero{stage}-{algorithm}".replace(" ", "")
    turn = number // (4 * len(ALGORITHMS))  # layout and chunks
    today = stage > 0 and (stage + turn) % 2 == 0 and algorithm == ALGORITHMS[(stage + turn) % 5]
    return pytest.param(number, id=name, marks=[] if today else [pytest.mark.slow])


@pytest.mark.parametrize("number", [case(number) for number in range(len(CASES))])
def test_a_step_equals_one_device(number):
    report = verify.compare(settings_of(*CASES[number], number), make_mesh(*CASES[number][0]), steps=2, evaluate=False)
    assert report.tolerance == 1e-9 and report.ok, report.comparisons[:5]
    kinds = [c.kind for c in report.comparisons]
    assert kinds.count("gradient") >= 11 and kinds.count("updated parameter") >= 11


@pytest.mark.parametrize("stage", [0, 2])
def test_a_table_that_is_used_twice_counts_once(stage):
    """Tied embeddings get gradients from the embedding and from the head: earlier microbatches are added once."""
    model, overlapped = {"tie_word_embeddings": True}, {"schedule": "overlapped"}
    assert_parity(
        config((4, 1, 2), model=model, parallel={"zero": stage, "microbatches": 4}, grad_reduce=overlapped), **model
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_stay_whole_are_summed_too(stage):
    """The norms of queries and keys have 2 elements, which 4 replicas do not divide."""
    model = {"architecture": "qwen3"}
    settings = config((4, 1, 2), model=model, parallel={"zero": stage, "microbatches": 2})
    built = program(settings)
    whole = built.zero.replicated(built.abstract_state.params)
    assert set(whole) == {"blocks.attention.query_norm.scale", "blocks.attention.key_norm.scale"}
    assert_parity(settings, **model)


# ---------------------------------------------------------------- what a step sends and holds


@functools.cache
def compiled(layout=(8, 1, 1), **settings):
    reduce = {key: settings.pop(key) for key in ("algorithm", "schedule", "wire_dtype") if key in settings}
    float32 = {"param_dtype": "float32", "compute_dtype": "float32"}
    return compile_step(config(layout, parallel=settings, grad_reduce=reduce, optimizer=ADAM, train=float32), "cpu:8")


def sent(found, axis="data") -> dict[str, float]:
    """Bytes that one device sends over an axis, by kind of collective, without the few single numbers."""
    rows = [row for row in found.report.collectives if row.axes == (axis,)]
    small = 8 * 32  # loss, tokens, and the norm of every gradient
    return {row.op: row.wire_bytes_per_step for row in rows if row.buffer_bytes_per_step > small}


def parameter_bytes(found) -> int:
    return sum(math.prod(p.shape) * 4 for p in jax.tree.leaves(found.program.abstract_state.params))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_held_and_sent_follow_the_formulas(stage):
    """Everything divides by 8 here: what is in parts is an eighth; Adam keeps two, and a count and a learning rate."""
    found = compiled(zero=stage)
    whole, memory = parameter_bytes(found), found.report.memory
    assert memory.parameters_bytes == whole // (8 if stage == 3 else 1)
    assert memory.gradients_bytes == whole // (8 if stage >= 2 else 1)
    assert memory.optimizer_bytes == 2 * whole // (8 if stage >= 1 else 1) + 2 * 4
    share, bytes_sent = 7 / 8 * whole, sent(found)
    if stage == 0:  # the loss and the token count travel with the gradients
        assert bytes_sent == pytest.approx({"all-reduce": 2 * share}, rel=1e-4)
    elif stage < 3:
        assert bytes_sent == pytest.approx({"reduce-scatter": share, "all-gather": share}, rel=1e-6)
    else:  # gathered twice, but for the embedding, whose table the backward pass does not need, and the head's
        tables = 7 / 8 * 2 * 512 * 24 * 4
        assert bytes_sent["reduce-scatter"] == pytest.approx(share, rel=1e-6)
        assert bytes_sent["all-gather"] == pytest.approx(2 * share - tables, rel=5e-3)  # nor those of norms
        assert sum(bytes_sent.values()) <= 1.5 * 2 * share
    counts = {row.op: row.count_per_step for row in found.report.collectives}
    if stage in (1, 2):  # one for each of 9 stacked parameters and 3 others, or layer by layer
        assert counts["reduce-scatter"] == (12 if stage == 1 else 3 * 9 + 3)


@pytest.mark.parametrize(("stage", "schedule"), [(0, "overlapped"), (2, "end")])
def test_four_microbatches_send_no_more_than_one(stage, schedule):
    found = compiled(zero=stage, microbatches=4, schedule=schedule)
    share = 7 / 8 * parameter_bytes(found)
    halves = {"reduce-scatter": share, "all-gather": share}
    assert sent(found) == pytest.approx(halves if stage else {"all-reduce": 2 * share}, rel=1e-4)
    assert found.report.memory.gradients_bytes == parameter_bytes(found)  # summed over microbatches before


def test_stage_2_never_holds_whole_gradients_of_one_microbatch():
    """Where parameters are most of the memory: measured 1.29 times their bytes in stage 1, 0.67 in stage 2."""
    wide = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    temporaries = []
    for stage in (1, 2):
        train = {"param_dtype": "float32", "compute_dtype": "float32", "global_batch": 16}
        found = compile_step(config((8, 1, 1), model=wide, parallel={"zero": stage}, train=train), "cpu:8")
        temporaries.append(found.report.memory.temp_bytes / parameter_bytes(found))
    assert temporaries[0] > 1 and temporaries[1] < 0.75


def test_stage_3_keeps_no_gathered_weights():
    """What a scan over layers hands to the backward pass has no array of a whole matrix's size; a step without does."""

    def kept(stage: int, remat: str) -> set[tuple[int, ...]]:
        built = program(settings := config((8, 1, 1), parallel={"zero": stage, "remat": remat}))
        batch = abstract_batch(settings, built)
        step = jax.ShapeDtypeStruct((), jnp.int32)
        jaxpr = jax.make_jaxpr(built.loss_and_grads)(built.abstract_state.params, batch, step)
        return {v.aval.shape for eqn in scans(jaxpr.jaxpr) for v in eqn.outvars}

    matrices = {(3, 24, 16), (3, 16, 24), (3, 24, 40), (3, 40, 24), (3, 24, 4)}
    for remat in ("none", "dots", "full"):
        assert not kept(3, remat) & matrices
    assert kept(0, "none") & matrices  # as gradients


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from scans(inner)


def test_half_the_bytes_are_sent_in_bfloat16():
    whole = sum(sent(compiled(algorithm="ring")).values())
    assert sum(sent(compiled(algorithm="ring", wire_dtype="bfloat16")).values()) == pytest.approx(whole / 2, rel=1e-3)


HIDDEN = """
model: {architecture: llama, vocab_size: 32000, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 8,
        num_attention_heads: 32, num_key_value_heads: 8}
mesh: {data: 8}
grad_reduce: {schedule: overlapped}
data: {train: unused, sequence_length: 4096}
optimizer: {learning_rate: 1e-3, clip_norm: 1.0}
train: {steps: 1, global_batch: 16, run_dir: unused}
"""


@pytest.mark.parametrize(
    ("unroll", "stage", "least"),
    [(8, 0, 0.93), pytest.param(1, 0, 0.8, marks=pytest.mark.slow), pytest.param(8, 2, 0.8, marks=pytest.mark.slow)],
)
def test_overlapped_gradients_are_hidden_on_h100(unroll, stage, least):
    """8,192 tokens a device; measured: 95 % with all layers unrolled (both jax), 87 % with none."""
    text = [f"parallel.unroll={unroll}", f"parallel.zero={stage}", "parallel.remat=dots"]
    found = compile_step(Config.from_yaml_text(HIDDEN, text), "h100:8").report
    gradients = [row for row in found.collectives if row.op in ("all-reduce", "reduce-scatter")]
    total = sum(row.buffer_bytes_per_step for row in gradients)
    assert total == pytest.approx(4 * (8 * (2 * 4096 * 5120 + 3 * 4096 * 14336) + 2 * 32000 * 4096), rel=1e-3)
    assert sum(row.buffer_bytes_per_step * row.hidden_fraction for row in gradients) >= least * total


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_every_optimizer_comes_out_the_same_in_parts(name):
    """Three steps with clipping against an optax loop on one device. Matrices of 128 and more are factored."""
    model = {"hidden_size": 128, "intermediate_size": 136, "num_attention_heads": 8, "head_dim": 16}
    shared = {"model": model, "optimizer": ADAM | {"name": name}, "train": {"global_batch": 8}}
    batches = [verify.random_batch(config(**shared), seed) for seed in range(3)]
    want = one_device_training(config(**shared), batches)
    built = program(config((4, 1, 2), parallel={"zero": 2}, **shared))
    state = built.init()
    for batch in batches:
        state, _ = built.train_step(state, jax.device_put(batch, built.batch_sharding))
    for got, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-8)  # weights are about 0.02
    held, whole = (
        sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(s.opt_state))
        for s in (state, program(config((4, 1, 2), **shared)).abstract_state)
    )
    assert held <= whole / (2 if name == "adafactor" else 3.9)  # adafactor's row and column means are small and whole


def losses(settings: Config, steps: int) -> list[float]:
    built = program(settings)
    state = built.init()
    found = []
    for seed in range(steps):
        batch = jax.device_put(verify.random_batch(settings, seed % 4), built.batch_sharding)
        state, metrics = built.train_step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [(0, "native"), (1, "native"), (2, "native"), (3, "native"), *((0, a) for a in ALGORITHMS[1:]), (3, "ring")]
)
def test_a_hundred_steps_have_the_same_losses(case):
    """In float32, against stage 0 in float64: rounding grows slowly, and Adam's first steps double it."""
    stage, algorithm = case
    float32 = {"param_dtype": "float32", "compute_dtype": "float32", "steps": 100}
    want = losses(config(optimizer=ADAM, train={"steps": 100}), 100)
    got = losses(settings_of((8, 1, 1), 1, stage, algorithm, train=float32), 100)
    assert want[-1] < want[0] - 1
    np.testing.assert_allclose(got, want, rtol=2e-4)


def test_bfloat16_on_the_wire_rounds_gradients_and_no_more():
    settings = config((4, 1, 2), grad_reduce={"algorithm": "ring", "wire_dtype": "bfloat16"})
    params, _, want = one_device()
    built = program(settings)
    params = jax.device_put(params, jax.tree.map(lambda s: s.sharding, built.abstract_state.params))
    batch = jax.device_put(verify.random_batch(settings), built.batch_sharding)
    _, got = built.loss_and_grads(params, batch, jnp.int32(0))
    errors = jax.tree.map(lambda g, w: np.linalg.norm(g - w) / np.linalg.norm(w), jax.device_get(got), want)
    assert 1e-4 < max(jax.tree.leaves(errors)) < 1e-2  # four roundings of 2^-9 at the most
    assert optax.tree.norm(got) == pytest.approx(float(optax.tree.norm(want)), rel=1e-2)


def test_checkpoints_and_evaluation_do_not_know_the_stage(tmp_path):
    parts = program(settings := config((4, 1, 2), parallel={"zero": 3}, optimizer=ADAM))
    whole = program(config((2, 1, 2), optimizer=ADAM))
    batch = verify.random_batch(settings)
    state, _ = parts.train_step(parts.init(), jax.device_put(batch, parts.batch_sharding))
    with Checkpoints(tmp_path, keep=1) as saved:
        saved.save(1, parts.to_saved(state), config_yaml="", data_position=1)
        saved.wait()
        restored = whole.from_saved(saved.restore(whole.saved_state)[0])
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)
    sums = [
        p.eval_step(s.params, jax.device_put(batch, p.batch_sharding)) for p, s in ((parts, state), (whole, restored))
    ]
    np.testing.assert_allclose(*([s["loss"], s["tokens"]] for s in sums), rtol=1e-12)


# ---------------------------------------------------------------- choosing dims


def test_the_largest_free_dim_that_divides_is_split():
    assert split_dim((3, 24, 40), jax.P(None, None, "tensor"), 8, stacked=True) == 1
    assert split_dim((3, 24, 40), jax.P(), 8, stacked=True) == 2
    assert split_dim((8, 5), jax.P(), 8, stacked=True) is None  # layers are never split
    assert split_dim((16, 8), jax.P(("pipe", "tensor")), 8, stacked=False) == 1
    assert split_dim((16, 8), jax.P(), 1, stacked=False) is None


def test_what_stays_whole_is_listed_with_its_bytes():
    shapes = {"blocks": {"odd": jax.ShapeDtypeStruct((2, 5), "float32")}, "even": jax.ShapeDtypeStruct((8,), "float32")}
    zero = Zero.of(1, shapes, jax.tree.map(lambda _: jax.P(), shapes), 4)
    assert zero.replicated(shapes) == {"blocks.odd": 40}
    assert zero.landed == {"blocks": {"odd": jax.P()}, "even": jax.P("data")} and zero.stored == zero.whole


@pytest.mark.parametrize(
    ("layout", "parallel", "reduce", "said"),
    [
        ((2, 1, 1), {"zero": 4}, {}, ["parallel.zero", "4", "3"]),
        ((4, 1, 1), {}, {"algorithm": "ring", "order": [0, 1, 2, 2]}, ["lacks 3", "has 2", "[0, 1, 2, 3]"]),
        ((4, 1, 1), {}, {"algorithm": "ring", "order": [0, 1, 2]}, ["lacks 3"]),
        ((4, 1, 1), {}, {"algorithm": "tree", "order": [0, 1, 2, 3]}, ["tree does not read it", "ring or auto"]),
        ((4, 1, 1), {}, {"algorithm": "tree", "across": "tree"}, ["tree does not read it", "hierarchical or auto"]),
        ((4, 1, 1), {}, {"algorithm": "hierarchical", "per_host": 3}, ["4 % grad_reduce.per_host 3", "2 or 4"]),
        ((2, 2, 1), {}, {"schedule": "overlapped"}, ["nothing would be hidden", "Use schedule end"]),
        ((2, 2, 1), {"zero": 3, "idle": "skip"}, {"algorithm": "ring"}, ["idle auto or compute"]),
        ((2, 1, 1), {}, {"table": "measured.json"}, ["native does not read it", "Use algorithm auto"]),
    ],
)
def test_what_cannot_be_is_refused(layout, parallel, reduce, said):
    with pytest.raises(InputError) as refused:
        config(layout, parallel=parallel, grad_reduce=reduce)
    assert all(part in str(refused.value) for part in said), refused.value
