"""The train step's report: communication in closed form, memory as it really is, and what does not fit."""

import jax
import pytest

from jaxpar import inspect, verify
from jaxpar.config import Config
from jaxpar.flops import flops_per_token

L, D, F, HEADS, VOCAB, T, BATCH = 2, 32, 48, 8, 512, 16, 16
SPLIT_MATRICES = 9  # query, key, value, out, gate, up, down, embedding, head


def config(
    layout=(1, 1),
    *,
    microbatches=1,
    sequence_parallel=False,
    optimizer="sgd",
    compute_dtype="float32",
    **model,
) -> Config:
    data, tensor = layout
    sizes = {"hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": HEADS}
    return Config.from_dict(
        {
            "model": {"architecture": "llama", "vocab_size": VOCAB, **sizes, **model},
            "mesh": {"data": data, "tensor": tensor},
            "parallel": {"microbatches": microbatches, "sequence_parallel": sequence_parallel},
            "data": {"train": "unused", "sequence_length": T},
            "optimizer": {"name": optimizer, "learning_rate": 1e-3},
            "train": {"steps": 1, "global_batch": BATCH, "run_dir": "unused", "compute_dtype": compute_dtype},
        }
    )


def parameters_per_device(tensor: int) -> int:
    """Everything but the norms is split over tensor."""
    matrices = L * (4 * D * D + 3 * D * F) + 2 * VOCAB * D
    return matrices // tensor + (2 * L + 1) * D


def expected(layout, microbatches, sequence_parallel, activation_itemsize=4) -> dict:
    """Bytes per step in the buffers of each kind of collective over each axis.

    Over data, once: the gradients in float32, and with them the loss and the number of tokens. Over tensor, in every
    microbatch: the activations [B, T, D] twice forward and twice backward in each layer, once more forward out of
    the embedding and backward out of the head (as all-reduces, or as all-gathers and reduce-scatters each way); three
    numbers per token for the loss. And per step one number per split matrix for the norm of all gradients.
    """
    data, tensor = layout
    found = {}
    if data > 1:
        found["all-reduce", ("data",)] = 4 * parameters_per_device(tensor) + 8
    if tensor > 1:
        tokens = BATCH // data * T
        activations = (4 * L + 2) * tokens * D * activation_itemsize
        small = 3 * 4 * tokens + 4 * SPLIT_MATRICES
        if sequence_parallel:
            found["all-gather", ("tensor",)] = found["reduce-scatter", ("tensor",)] = activations
            small += (2 * L + 1) * D * activation_itemsize  # gradients of norms, each of which saw T/tensor tokens
        else:
            small += activations
        found["all-reduce", ("tensor",)] = small
    assert microbatches == 1 or not sequence_parallel
    return found


def buffers(report: inspect.Report) -> dict:
    return {(row.op, row.axes): row.buffer_bytes_per_step for row in report.collectives}


@pytest.mark.parametrize(
    ("layout", "microbatches", "sequence_parallel"),
    [
        ((8, 1), 1, False),
        ((4, 2), 4, False),
        ((2, 4), 1, False),
        ((1, 8), 4, False),
        ((4, 2), 1, True),
        ((2, 4), 1, True),
        ((1, 8), 1, True),
    ],
    ids=str,
)
def test_communication_of_the_train_step_in_closed_form(layout, microbatches, sequence_parallel):
    settings = config(layout, microbatches=microbatches, sequence_parallel=sequence_parallel)
    report = inspect.compile_step(settings).report
    assert buffers(report) == expected(layout, microbatches, sequence_parallel)
    assert report.mesh == {"data": layout[0], "pipe": 1, "tensor": layout[1]}
    assert report.flops_per_step == BATCH * T * flops_per_token(settings.model, T)


def test_the_reduction_that_auto_chooses_is_said():
    settings = config((8, 1))
    auto = settings.model_copy(update={"grad_reduce": settings.grad_reduce.model_copy(update={"algorithm": "auto"})})
    (note,) = inspect.compile_step(auto).report.notes
    assert note == ("gradients are reduced by native: there is no model of this machine, and no measured table")
    assert inspect.compile_step(settings).report.notes == []


@pytest.mark.slow
def test_communication_of_the_train_step_on_h100():
    report = inspect.compile_step(config((2, 4), microbatches=2, compute_dtype="bfloat16"), "h100:8").report
    found, wanted = buffers(report), expected((2, 4), 2, False, activation_itemsize=2)
    merged = wanted["all-reduce", ("tensor",)] - found.pop(("all-reduce", ("tensor",)))
    assert 0 <= merged < 4 * SPLIT_MATRICES  # XLA for GPUs adds some of the numbers of the norm before it sends them
    assert found == {key: size for key, size in wanted.items() if key[1] != ("tensor",)}
    assert report.fits and report.lower_bound and report.lower_bound.source == "NVIDIA H100 SXM datasheet"
    assert any("cuDNN" in note for note in report.notes)


def test_flops_counted_in_the_program_equal_the_formula():
    """On one device, where nothing is recomputed and 512 entries of the vocabulary need no padding."""
    report = inspect.compile_step(config()).report
    assert report.compiled_flops == report.flops_per_step


def on_one_device(tree) -> int:
    device = jax.devices()[0]
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == device)
    return sum(shard.data.nbytes for shard in shards)


@pytest.mark.parametrize(("layout", "kv_heads"), [((2, 4), 2), ((1, 8), 8)], ids=str)
def test_memory_is_what_the_arrays_take(layout, kv_heads):
    settings = config(layout, num_key_value_heads=kv_heads, vocab_size=503, optimizer="adamw")
    step = inspect.compile_step(settings)
    state = step.program.init()
    batch = jax.device_put(verify.random_batch(settings), step.program.batch_sharding)
    _, grads = step.program.loss_and_grads(state.params, batch, state.step)
    memory = step.report.memory
    assert memory.parameters_bytes == on_one_device(state.params)
    assert memory.optimizer_bytes == on_one_device(state.opt_state)
    assert memory.gradients_bytes == on_one_device(grads)
    assert memory.batch_bytes == on_one_device(batch)
    assert memory.arguments_bytes == on_one_device((state, batch))
    stats = step.compiled.memory_analysis()
    assert memory.temp_bytes == stats.temp_size_in_bytes
    assert memory.peak_bytes == memory.arguments_bytes + memory.temp_bytes + memory.outputs_bytes


def test_no_weights_are_made():
    """Eight CPU devices compile a model of 15 terabytes."""
    huge = config((1, 8), hidden_size=2**14, intermediate_size=2**14, num_hidden_layers=2000)
    memory = inspect.compile_step(huge, "cpu:8").report.memory
    assert memory.parameters_bytes and memory.parameters_bytes * 8 > 15e12
