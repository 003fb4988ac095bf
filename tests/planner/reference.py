"""The rows of published tables as measured runs of Megatron-LM."""

import json
from collections.abc import Iterator
from pathlib import Path

from jaxpar.config import ModelConfig
from jaxpar.config.nearest import divisors
from jaxpar.planner.formulas import gpt_flops
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.measured import Row

TABLES = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "planner" / "reference_tables.json").read_text(encoding="utf-8")
)


def _gpt(layers: int, width: int, heads: int, vocabulary: int, sequence_length: int) -> ModelConfig:
    return ModelConfig(
        architecture="gpt2",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=sequence_length,
    )


def _layouts(data: int, pipe: int, tensor: int, batch: int, layers: int, **others) -> Iterator[Layout]:
    """All microbatches and chunks, which the tables leave open."""
    for b in (1, 2, 4, 8, 16):
        if batch % (data * b):
            continue
        microbatches = batch // (data * b)
        interleaved = pipe > 1 and microbatches % pipe == 0
        for chunks in divisors(layers // pipe) if interleaved else (1,):
            yield Layout(data, pipe, tensor, chunks=chunks, microbatches=microbatches, **others)


def sc21() -> list[Row]:
    """Megatron-LM on A100, arXiv:2104.04473 table 1: everything recomputed."""
    rows = []
    for _, heads, width, layers, tensor, pipe, devices, batch, tflops, *_ in TABLES["megatron_sc21_table1"]["rows"]:
        flops = gpt_flops(batch, 2048, layers, width, 51200, recompute=True)
        layouts = _layouts(devices // (pipe * tensor), pipe, tensor, batch, layers, remat="full")
        seconds = flops / (tflops * 1e12 * devices)
        rows.append(
            Row(
                f"{width}",
                _gpt(layers, width, heads, 51200, 2048),
                -(-devices // 8),
                tuple(layouts),
                Workload(2048, batch),
                seconds,
            )
        )
    return rows


def megatron_h100() -> list[Row]:
    """Megatron-LM's README, H100: nothing recomputed, sequence parallel, distributed optimizer."""
    rows = []
    for _, heads, width, layers, tensor, pipe, data, devices, batch, tflops, *_ in TABLES["megatron_readme_h100"][
        "rows"
    ]:
        flops = gpt_flops(batch, 4096, layers, width, 131072, recompute=False)
        layouts = _layouts(data, pipe, tensor, batch, layers, zero=1, sequence_parallel=True)
        seconds = flops / (tflops * 1e12 * devices)
        rows.append(
            Row(
                f"{width}",
                _gpt(layers, width, heads, 131072, 4096),
                -(-devices // 8),
                tuple(layouts),
                Workload(4096, batch),
                seconds,
            )
        )
    return rows
