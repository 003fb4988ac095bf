"""Collectives of a step, by hand. `test_compiled` compares them with compiled programs."""

import pytest

from jaxpar.config import ModelConfig
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.parameters import block
from jaxpar.planner.traffic import transfers, wire_bytes_by_axes

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=6,
    num_attention_heads=8,
    max_position_embeddings=32,
)
WORKLOAD = Workload(32, 16, compute_dtype="float32")
ACTIVATION = 32 * 64 * 4  # of one sequence


def wire(layout: Layout, height: int, workload: Workload = WORKLOAD) -> dict[tuple[str, ...], float]:
    return wire_bytes_by_axes(transfers(MODEL, layout, workload, height), layout)


def test_one_device_sends_nothing():
    assert wire(Layout(1, 1, 1, microbatches=4), 6) == {}


def test_tensor_parallel():
    # 4 microbatches of 2 sequences: 4 sums a layer, one for the embedding, one for the head, 3 numbers a token.
    found = wire(Layout(2, 1, 4, microbatches=4), 6)
    each = 2 * ACTIVATION
    assert found["tensor",] == 2 * 3 / 4 * 4 * ((4 * 6 + 2) * each + 3 * 4 * 2 * 32)


def test_recomputing_sums_again():
    plain, again = (wire(Layout(2, 1, 4, microbatches=4, remat=remat), 6)["tensor",] for remat in ("none", "full"))
    assert again - plain == 2 * 3 / 4 * 4 * 6 * 2 * ACTIVATION


def test_messages_of_a_pipeline():
    # 4 stages, 8 microbatches: 11 ticks each way, idle ones included.
    layout = Layout(1, 4, 1, microbatches=8)
    permutes = [t for t in transfers(MODEL, layout, WORKLOAD, 2) if t.op == "collective-permute"]
    assert sum(t.wire_bytes(layout) for t in permutes) == 22 * 2 * ACTIVATION


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_take_the_bytes_of_an_all_reduce(zero: int):
    held = block(MODEL, 8, 1, 1)
    gradients = 4 * (6 * (held.layer + held.layer_whole) + held.rest + held.rest_whole)
    assert wire(Layout(8, 1, 1, zero), 6)["data",] == pytest.approx(2 * 7 / 8 * (gradients + 8))


def test_gradients_on_the_wire_in_bfloat16():
    held = block(MODEL, 8, 1, 1)
    parameters = 6 * (held.layer + held.layer_whole) + held.rest + held.rest_whole
    short = Workload(32, 16, compute_dtype="float32", wire_dtype="bfloat16")
    assert wire(Layout(8, 1, 1), 6, short)["data",] == pytest.approx(2 * 7 / 8 * (2 * parameters + 8))
    assert wire(Layout(8, 1, 1, 1), 6, short)["data",] == pytest.approx(7 / 8 * (2 + 4) * parameters + 2 * 7 / 8 * 8)


def test_zero_3_gathers_twice_and_scatters_once_for_each_microbatch():
    # bfloat16 to gather, float32 to sum; of the two tables each is gathered and scattered once.
    held = block(MODEL, 8, 1, 1)
    assert held.layer_whole == held.rest_whole == 0
    layers, tables = 6 * held.layer, held.rest
    found = wire(Layout(8, 1, 1, 3, microbatches=2), 6, Workload(32, 16))
    assert found["data",] == pytest.approx(7 / 8 * 2 * (layers * (2 + 2 + 4) + tables * (2 + 4)) + 2 * 7 / 8 * 8)
