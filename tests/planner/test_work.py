"""How long layers and head compute: against FLOPs counted elsewhere, and the shape of the efficiency curve."""

from dataclasses import replace

import pytest

from jaxpar.config import ModelConfig
from jaxpar.flops import block_flops_per_token, flops_per_token
from jaxpar.planner.cluster import Efficiency, parse_cluster
from jaxpar.planner.work import ATTENTION_SHARE, head_seconds, layer_work, matmul_seconds

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=32768,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
)
H100 = parse_cluster("h100x8")
# A device that only multiplies: memory costs nothing.
IDEAL = replace(
    H100,
    device=replace(H100.device, memory_bytes_per_second=1e30),
    efficiency=Efficiency(matmul=1.0),
)
PEAK = IDEAL.device.flops_per_second


def test_a_layer_s_multiplications_are_those_that_mfu_counts():
    T = 1024
    work = layer_work(MODEL, 2, T, 1, False, "bfloat16", IDEAL)
    attention = 2 * T * 3 * 4 * T * 16 * 128 / PEAK  # both passes over all pairs, as MFU counts them
    counted = 2 * T * block_flops_per_token(MODEL, T) / PEAK - attention
    ours = work.forward + work.backward
    assert ours - counted == pytest.approx(attention / 3 / 2 / ATTENTION_SHARE * (1 + 2.5))
    assert work.weights == pytest.approx(work.projections)


def test_the_head_s_likewise():
    total = sum(head_seconds(MODEL, 2, 1024, 1, "bfloat16", IDEAL))
    head = flops_per_token(MODEL, 1024) - 4 * block_flops_per_token(MODEL, 1024)
    assert total == pytest.approx(2 * 1024 * head / PEAK)
    assert sum(head_seconds(MODEL, 2, 1024, 8, "bfloat16", IDEAL)) == pytest.approx(total / 8)


def test_xla_s_attention_writes_and_reads_the_scores():
    T, pairs = 1024, 2 * 16 * 1024**2
    flash, xla = (layer_work(MODEL, 2, T, 1, False, "bfloat16", IDEAL, a) for a in ("flash", "xla"))
    multiplying = 4 * pairs * 128 / PEAK  # masked pairs too, at the rate of multiplications
    assert xla.forward - flash.forward == pytest.approx(multiplying * (1 - 1 / 2 / ATTENTION_SHARE), rel=1e-6)
    slow = replace(H100, efficiency=Efficiency(matmul=1.0, memory=0.5))
    ideal_moves = lambda a: layer_work(MODEL, 2, T, 1, False, "bfloat16", slow, a)
    moved = (ideal_moves("xla").forward - ideal_moves("flash").forward) - (xla.forward - flash.forward)
    rate = 0.5 * H100.device.memory_bytes_per_second
    assert moved == pytest.approx(pairs * (3 * 4 + 2 * 2) / rate, rel=1e-6)
    back = (ideal_moves("xla").backward - ideal_moves("flash").backward) - (xla.backward - flash.backward)
    assert back == pytest.approx(pairs * (3 * 4 + 4 * 2) / rate, rel=1e-6)


def test_splitting_by_tensor_splits_the_work():
    whole, part = (layer_work(MODEL, 1, 1024, n, True, "bfloat16", IDEAL) for n in (1, 4))
    assert part.forward == pytest.approx(whole.forward / 4)
    real_whole, real_part = (layer_work(MODEL, 1, 1024, n, True, "bfloat16", H100) for n in (1, 4))
    assert real_part.forward > real_whole.forward / 4, "smaller multiplications are less efficient"
    without = layer_work(MODEL, 1, 1024, 4, False, "bfloat16", H100)
    assert without.forward > real_part.forward, "without sequence parallel norms are not split"


def test_larger_multiplications_come_nearer_to_the_factor():
    share = lambda n, dtype="bfloat16": 2 * n**3 / matmul_seconds(n, n, n, dtype, H100) / PEAK
    assert share(256) < share(1024) < share(8192) < H100.efficiency.matmul
    assert share(16384) == pytest.approx(H100.efficiency.matmul, rel=0.05)
    assert share(8192, "float32") < share(8192) / 1.9


def test_a_measured_curve_stands_in_for_the_factor():
    measured = replace(H100, matmul={"bfloat16": ((1024.0, 0.2), (4096.0, 0.6))})
    share = lambda *shape: 2 * shape[0] * shape[1] * shape[2] / matmul_seconds(*shape, "bfloat16", measured) / PEAK
    assert share(4096, 4096, 4096) == pytest.approx(0.6)
    assert share(2048, 8192, 8192) == pytest.approx(0.4)  # half way in the logarithm; the least dim counts
    assert share(512, 512, 512) == pytest.approx(0.2)
    assert share(9999, 9999, 9999) == pytest.approx(0.6)
