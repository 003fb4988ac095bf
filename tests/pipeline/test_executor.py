"""Pipelines against one device in global view, in float64; what idle work may touch; memory; where the head is."""

import itertools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import verify
from jaxpar.checkpoint import Checkpoints
from jaxpar.collectives.reduction import Reduction
from jaxpar.gradients import in_block_view, partition_of
from jaxpar.mesh import make_mesh
from jaxpar.models import Transformer
from jaxpar.pipeline import slots
from jaxpar.pipeline.stacking import Stacking
from jaxpar.step import abstract_batch, build
from jaxpar.zero import Replicas, Zero
from tests.test_step import assert_parity, config, program

LAYOUTS = [(4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2), (1, 2, 4)]  # with pipe; the others are in test_step
LAYERS = {2: 5, 4: 9, 8: 17}  # never a multiple of stages × chunks, so that every case has padded rows
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2)]
CASES = list(itertools.product(LAYOUTS, SCHEDULES, ("none", "dots", "full"), ("compute", "skip")))


def case(number: int):
    """Of the two ways to be idle one is for every day, by turns; the other half of the cases is slow."""
    name = "-".join(map(str, CASES[number])).replace(" ", "")
    slow = [pytest.mark.slow] if (number + number // 2) % 2 else []
    return pytest.param(number, id=name, marks=slow)


@pytest.mark.parametrize("number", [case(number) for number in range(len(CASES))])
def test_gradients_equal_one_device(number):
    """Every layout × schedule × remat × idle; the settings that go around with them take turns."""
    layout, (schedule, chunks), remat, idle = CASES[number]
    stages, tensor = layout[1:]
    model = {
        "num_hidden_layers": LAYERS[stages],
        "tie_word_embeddings": bool(number // 2 % 2),
        "resid_pdrop": (0.0, 0.2)[number // 3 % 2],
    }
    parallel = {
        "schedule": schedule,
        "chunks": chunks,
        "remat": remat,
        "idle": idle,
        "microbatches": stages * (1, 2, 4)[number % 3] if stages < 8 else 8 * (1, 2, 4)[number % 3],
        "sequence_parallel": tensor > 1 and bool(number % 2),
        "unroll": 1 + number % 2,
    }
    assert_parity(config(layout, model=model, parallel=parallel), **model)


@pytest.mark.parametrize("microbatches", [1, 3, 5, 12])
@pytest.mark.parametrize("chunks", [1, 2])
def test_microbatches_need_not_be_a_multiple_of_the_stages(microbatches, chunks):
    settings = config(
        (2, 4, 1),
        model={"num_hidden_layers": 9},
        parallel={"microbatches": microbatches, "chunks": chunks, "idle": "compute"},
        train={"global_batch": 2 * microbatches, "z_loss": 1e-3},
    )
    report = verify.compare(settings, make_mesh(2, 4, 1), steps=2, evaluate=False)
    assert report.ok, report.comparisons[:5]


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon"])
def test_updates_equal_one_device_with_padded_layers(optimizer):
    settings = config(
        (2, 2, 2),
        model={"num_hidden_layers": 5, "architecture": "gpt2", "num_key_value_heads": 8},
        parallel={"microbatches": 4, "chunks": 2, "sequence_parallel": True},
        optimizer={"name": optimizer, "learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5},
    )
    report = verify.compare(settings, make_mesh(2, 2, 2), steps=2, evaluate=False)
    assert report.ok, report.comparisons[:5]


class Divided(Transformer):
    """Divides by parameters, which therefore may nowhere be 0."""

    def block(self, layer, x, keys_B):
        return super().block(layer, x, keys_B) / layer.mlp_norm.scale[...]


@pytest.mark.usefixtures("quick_compiles")
def test_padded_layers_are_such_as_a_model_can_compute_with():
    """After two steps, the second one from a checkpoint, what a model without padding gives."""
    optimizer = {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "clip_norm": 0.5}
    settings = config((1, 2, 1), parallel={"microbatches": 2}, optimizer=optimizer, train={"global_batch": 8})
    make_model = lambda rngs: Divided(settings.model, param_dtype="float64", rngs=rngs)
    built = build(settings, make_mesh(1, 2, 1), make_model)
    assert -1 in built.stacking.rows
    alone, steps = config(optimizer=optimizer, train={"global_batch": 8}), []
    for one in (built, build(alone, make_mesh(1, 1, 1), make_model)):
        state = one.init()
        for seed in range(2):
            batch = jax.device_put(verify.random_batch(settings, seed), one.batch_sharding)
            state, _ = one.train_step(state, batch)
            state = one.from_saved(one.to_saved(state))
        assert int(state.skipped) == 0
        steps.append(jax.device_get(one.to_saved(state)))
    for got, want in zip(*map(jax.tree.leaves, steps), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)  # float64 through three layers and two steps


@pytest.mark.parametrize(
    ("schedule", "chunks", "garbage"), [(*SCHEDULES[0], np.nan), (*SCHEDULES[1], np.inf), (*SCHEDULES[2], np.nan)]
)
def test_idle_work_touches_nothing(schedule, chunks, garbage, monkeypatch):
    """Everything that idle stages start from and read is NaN or infinite; loss and gradients stay the same bits."""
    parallel = {"schedule": schedule, "chunks": chunks, "microbatches": 5, "idle": "compute"}
    settings = config((2, 4, 1), model={"num_hidden_layers": 9}, parallel=parallel, train={"global_batch": 20})
    want = loss_and_grads(settings)
    monkeypatch.setattr(slots, "IDLE", garbage)
    got = loss_and_grads(settings)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def loss_and_grads(settings):
    built = program(settings)
    batch = jax.device_put(verify.random_batch(settings), built.batch_sharding)
    return jax.device_get(built.loss_and_grads(built.init().params, batch, jnp.int32(0)))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_evaluation_equals_one_device(schedule, chunks):
    settings = config(
        (2, 2, 2),
        model={"num_hidden_layers": 5},
        parallel={"schedule": schedule, "chunks": chunks, "microbatches": 4, "sequence_parallel": True},
    )
    alone = config((1, 1, 1), model={"num_hidden_layers": 5})
    batch = verify.random_batch(settings)
    sums = []
    for each in (settings, alone):
        built = program(each)
        of_each = built.eval_step(built.init().params, jax.device_put(batch, built.batch_sharding))
        sums.append([of_each["loss"], of_each["tokens"]])
    np.testing.assert_allclose(*sums, rtol=1e-12)


def compiled_gradients(settings):
    built = program(settings)
    step = jax.ShapeDtypeStruct((), np.int32)
    return built.loss_and_grads.lower(built.abstract_state.params, abstract_batch(settings, built), step).compile()


def temporaries(microbatches, **parallel):
    """Bytes of temporaries of one device; wide enough that activations outweigh everything else."""
    settings = config(
        (1, 4, 1),
        model={"hidden_size": 64, "intermediate_size": 176, "head_dim": 8, "num_hidden_layers": 16},
        parallel={"microbatches": microbatches, "idle": "compute", **parallel},
        train={"global_batch": 2 * microbatches, "param_dtype": "float32", "compute_dtype": "float32"},
    )
    data = settings.data.model_copy(update={"sequence_length": 64})
    model = settings.model.model_copy(update={"max_position_embeddings": 64})
    settings = settings.model_copy(update={"data": data, "model": model})
    return compiled_gradients(settings).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_memory_does_not_grow_with_the_microbatches(remat, chunks):
    few, many = (temporaries(m, chunks=chunks, remat=remat) for m in (8, 64))
    assert many <= 1.03 * few


def test_gpipe_grows_and_1f1b_takes_less_than_a_quarter_of_it():
    gpipe = {m: temporaries(m, schedule="gpipe") for m in (8, 16, 32)}
    assert (gpipe[32] - gpipe[16]) / (gpipe[16] - gpipe[8]) == pytest.approx(2, rel=0.02)
    assert temporaries(32) < gpipe[32] / 4


def test_the_program_does_not_grow_with_the_microbatches():
    sizes = [
        compiled_gradients(
            config((1, 4, 1), model={"num_hidden_layers": 4}, parallel={"microbatches": m}, train={"global_batch": m})
        )
        .as_text()
        .count("\n")
        for m in (8, 64)
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)  # constants differ a little


def test_head_and_embedding_are_shared_by_all_stages():
    """With a vocabulary of 128k every device multiplies with its eighth of the table, and nobody with more."""
    vocabulary = 131072
    settings = config((1, 4, 2), model={"vocab_size": vocabulary, "num_hidden_layers": 4}, parallel={"microbatches": 4})
    text = compiled_gradients(settings).as_text()
    dots = [line for line in text.splitlines() if re.search(r" dot\(", line) and "logits" not in line]
    widest = max(int(n) for line in dots for dims in re.findall(r"f64\[([\d,]+)\]", line) for n in dims.split(","))
    assert widest == vocabulary // 8


def test_checkpoint_of_an_interleaved_run_restores_on_one_stage_and_back(tmp_path):
    optimizer = {"name": "adamw"}
    model = {"num_hidden_layers": 9}
    pipe = program(config((1, 4, 2), model=model, parallel={"microbatches": 4, "chunks": 2}, optimizer=optimizer))
    flat = program(config((8, 1, 1), model=model, optimizer=optimizer))
    batch = jax.device_put(verify.random_batch(config()), pipe.batch_sharding)
    state, _ = pipe.train_step(pipe.init(), batch)
    with Checkpoints(tmp_path / "pipe", keep=1) as saved:
        saved.save(1, pipe.to_saved(state), config_yaml="", data_position=1)
        saved.wait()
        on_one = flat.from_saved(saved.restore(flat.saved_state)[0])
    assert on_one.params["blocks"]["mlp"]["up"]["weight"].shape[0] == 9
    with Checkpoints(tmp_path / "flat", keep=1) as saved:
        saved.save(1, flat.to_saved(on_one), config_yaml="", data_position=1)
        saved.wait()
        back = pipe.from_saved(saved.restore(pipe.saved_state)[0])
    for a, b in zip(*(jax.tree.leaves(pipe.to_saved(s)) for s in (back, state)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_layer_is_dropped_or_run_twice():
    for layers, pipe, chunks in itertools.product((4, 5, 7, 16, 30), (1, 2, 4), (1, 2)):
        if pipe * chunks > layers or (pipe == 1 and chunks > 1):
            continue
        settings = config((1, pipe, 1), model={"num_hidden_layers": layers}, parallel={"chunks": chunks})
        stacking = Stacking.of(partition_of(settings))
        assert sorted(row for row in stacking.rows if row >= 0) == list(range(layers))
        order = [row for c in range(chunks) for s in range(pipe) for row in stacking.table()[s, c] if row >= 0]
        assert order == list(range(layers))


def test_idle_is_skipped_on_cpu_and_computed_elsewhere():
    settings = config((1, 2, 1))
    nothing = {"w": jnp.zeros(8)}
    for platform, stage, algorithm, skips in (
        ("cpu", 0, "ring", True),
        ("cpu", 3, "native", True),
        ("cpu", 3, "ring", False),  # its permutes are inside the ticks
        ("gpu", 0, "native", False),
    ):
        zero = Zero.of(stage, nothing, {"w": jax.P()}, 2)
        replicas = Replicas(zero, Reduction(algorithm), "float32")
        loss_and_grads, _ = in_block_view(settings, None, Stacking.of(partition_of(settings)), replicas, platform)
        assert loss_and_grads.__self__.skip_idle is skips


@pytest.mark.slow
def test_64_devices_as_4_by_4_by_4(tmp_path):
    settings = config(
        (4, 4, 4),
        model={"num_hidden_layers": 5, "tie_word_embeddings": True},
        parallel={"microbatches": 4, "sequence_parallel": True, "remat": "full"},
    )
    path = tmp_path / "config.yaml"
    path.write_text(settings.to_yaml())
    command = [sys.executable, "-m", "jaxpar.cli", "verify", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
