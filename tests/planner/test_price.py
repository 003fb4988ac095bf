"""The price as a value: its parts add up, and it is quick."""

import time
from dataclasses import replace
from itertools import product

import pytest

from jaxpar import gradients
from jaxpar.config import Config, ModelConfig
from jaxpar.flops import flops_per_token
from jaxpar.planner.cluster import parse_cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.price import least_memory_bytes, least_seconds, pace, price
from jaxpar.planner.work import head_seconds

LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
WORKLOAD, CLUSTER = Workload(4096, 256), parse_cluster("8xh100x8")


def test_parts_add_up():
    found = price(LLAMA_8B, Layout(8, 2, 4, microbatches=16), WORKLOAD, CLUSTER)
    assert found.memory.total == pytest.approx(sum(vars(found.memory).values()))
    assert found.time.total == pytest.approx(sum(vars(found.time).values()))
    assert found.tokens_per_second == pytest.approx(256 * 4096 / found.time.total)
    flops = found.tokens_per_second * flops_per_token(LLAMA_8B, 4096) / 64
    assert found.tflops_per_device == pytest.approx(flops / 1e12)
    assert found.mfu == pytest.approx(flops / 989e12)


def test_counts_and_the_fullest_stage():
    found = price(LLAMA_8B, Layout(4, 5, 1, microbatches=16), Workload(4096, 320), parse_cluster("5xh100x4"))
    assert (found.counts, found.stage) == ((6, 6, 6, 7, 7), 3)


def test_layers_of_unlike_costs_are_laid_out_as_in_a_run():
    """The first layer costs as much as four: it is alone on its stage, which computes four layers of padding, too."""
    six, layout = LLAMA_8B.model_copy(update={"num_hidden_layers": 6}), Layout(2, 2, 1, microbatches=4)
    workload = replace(WORKLOAD, layer_costs=(4.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    even, found = (price(six, layout, w, CLUSTER) for w in (WORKLOAD, workload))
    split = gradients.partition_of(config_of(six, layout, workload))
    assert found.counts == split.counts == (1, 5) and even.counts == (3, 3)
    assert found.memory.parameters > even.memory.parameters
    assert pace(split, workload.layer_costs) == pytest.approx(4 * 6 / 9 + 4)
    head = sum(head_seconds(six, workload.sequences_per_microbatch(layout), 4096, 2, "bfloat16", CLUSTER))
    layers = [p.time.compute + p.time.bubble - 4 * head for p in (found, even)]
    assert layers[0] / layers[1] == pytest.approx((4 * 6 / 9 + 4) / 3)
    assert least_seconds(six, layout, workload, CLUSTER) <= found.time.total
    same = replace(WORKLOAD, layer_costs=(0.5,) * 6)
    assert price(six, layout, same, CLUSTER) == even


def config_of(model: ModelConfig, layout: Layout, workload: Workload) -> Config:
    """The config of a run."""
    values = {
        "model": model.model_dump(mode="json"),
        "mesh": {"data": layout.data, "pipe": layout.pipe, "tensor": layout.tensor},
        "parallel": {"microbatches": layout.microbatches, "layer_costs": list(workload.layer_costs or ())},
        "data": {"train": ["unused"], "sequence_length": workload.sequence_length},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "global_batch": workload.global_batch, "run_dir": "unused"},
    }
    return Config.from_dict(values)


def test_whether_it_fits():
    small, large = (price(LLAMA_8B, Layout(64, 1, 1, zero, remat="full"), WORKLOAD, CLUSTER) for zero in (3, 0))
    assert small.fits and not large.fits
    tight = replace(CLUSTER, usable=small.memory.total / CLUSTER.device.memory_bytes * 0.999)
    assert not price(LLAMA_8B, Layout(64, 1, 1, 3, remat="full"), WORKLOAD, tight).fits


def test_the_same_inputs_give_the_same_price():
    layout = Layout(8, 2, 4, microbatches=16)
    assert price(LLAMA_8B, layout, WORKLOAD, CLUSTER) == price(LLAMA_8B, layout, WORKLOAD, parse_cluster("8xh100x8"))


def layouts() -> list[Layout]:
    found = []
    for tensor, pipe, microbatches, zero, remat in product((1, 4, 8), (1, 2, 8), (1, 4), range(4), ("none", "full")):
        for chunks in (1, 2) if pipe > 1 else (1,):
            data = 64 // (tensor * pipe)
            found.append(Layout(data, pipe, tensor, zero, chunks=chunks, microbatches=microbatches, remat=remat))
    return found


def test_bounds_hold():
    for layout in layouts():
        found = price(LLAMA_8B, layout, WORKLOAD, CLUSTER)
        assert least_memory_bytes(LLAMA_8B, layout, WORKLOAD) <= found.memory.total
        assert least_seconds(LLAMA_8B, layout, WORKLOAD, CLUSTER) <= found.time.total


def test_two_thousand_a_second():
    found = layouts()
    begin = time.process_time()
    for layout in found:
        price(LLAMA_8B, layout, replace(WORKLOAD, sequence_length=2048), CLUSTER)  # nothing of it is remembered yet
    assert len(found) / (time.process_time() - begin) > 2000
