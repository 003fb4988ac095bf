"""A price made of a few plain formulas, so that the search is tested by itself."""

import math

from jaxpar.config import ModelConfig
from jaxpar.flops import block_flops_per_token, flops_per_token, parameter_count
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.price import MemoryParts, Price, TimeParts
from jaxpar.planner.search import Pricing

RECOMPUTED = {"none": 1.0, "dots": 1.1, "full": 4 / 3}
KEPT_PER_TOKEN = {"none": 34, "dots": 14, "full": 2}
ALGORITHMS = {"native": 1.0, "ring": 1.02, "tree": 1.1, "halving_doubling": 1.05, "hierarchical": 0.7}


def _state(model: ModelConfig, layout: Layout) -> tuple[float, float, float]:
    """Parameters, gradients, optimizer state."""
    block = 4 * parameter_count(model) / (layout.pipe * layout.tensor)
    split = lambda stage: layout.data if layout.zero >= stage else 1
    return block / split(3), block / (split(2) if layout.microbatches == 1 else 1), 2 * block / split(1)


def _ticks(layout: Layout) -> int:
    gap = -layout.microbatches % layout.pipe if layout.chunks > 1 else 0
    return layout.chunks * layout.microbatches + layout.pipe - 1 + (layout.chunks - 1) * gap


def _tick_seconds(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> float:
    height = -(-model.num_hidden_layers // (layout.pipe * layout.chunks))
    tokens = workload.sequences_per_microbatch(layout) * workload.sequence_length
    flops = height * tokens * block_flops_per_token(model, workload.sequence_length) / layout.tensor
    return RECOMPUTED[layout.remat] * flops / cluster.device.flops_per_second


def least_memory_bytes(model: ModelConfig, layout: Layout, workload: Workload) -> float:
    return sum(_state(model, layout))


def least_seconds(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> float:
    return _ticks(layout) * _tick_seconds(model, layout, workload, cluster)


def price(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> Price:
    sequences, T, D = workload.sequences_per_microbatch(layout), workload.sequence_length, model.hidden_size
    p, v, m, t = layout.pipe, layout.chunks, layout.microbatches, layout.tensor
    height = -(-model.num_hidden_layers // (p * v))
    parameters, gradients, optimizer = _state(model, layout)
    live = v * m if layout.schedule == "gpipe" else min(v * m, p * (v + 1) - 1)
    kept = KEPT_PER_TOKEN[layout.remat] / (t if layout.sequence_parallel else (t + 1) / 2)
    memory = MemoryParts(parameters, gradients, optimizer, live * height * sequences * T * D * kept, 0.0, 0.0)
    tick, crossing = _tick_seconds(model, layout, workload, cluster), p * t > cluster.per_host
    inside, outside = cluster.device.nvlink_bytes_per_second, cluster.device.network_bytes_per_second
    message = 2 * sequences * T * D / (outside if crossing else inside)
    shown = 1.0 if layout.schedule == "gpipe" else 0.5
    over_tensor = v * m * height * 8 * sequences * T * D * (t - 1) / t
    over_data = (parameters if layout.zero < 3 else parameters * layout.data * m) * 2 * (layout.data - 1) / layout.data
    work = v * m * tick
    time = TimeParts(
        compute=work,
        data=ALGORITHMS[layout.algorithm] * over_data / (outside if cluster.hosts > 1 else inside),
        pipe=2 * shown * (v * m + p - 1) * message if p > 1 else 0.0,
        tensor=over_tensor / (inside if t <= cluster.per_host else outside),
        bubble=_ticks(layout) * tick - work,
        optimizer=optimizer * 3 / cluster.device.memory_bytes_per_second,
    )
    tokens = workload.tokens_per_step / time.total
    tflops = tokens * flops_per_token(model, T) / cluster.devices / 1e12
    counts = tuple(math.ceil(model.num_hidden_layers / (p * v)) for _ in range(p * v))
    fits = memory.total <= cluster.usable_bytes
    return Price(layout, memory, time, fits, tokens, tflops, tflops * 1e12 / cluster.device.flops_per_second, 0, counts)


STAND_IN = Pricing(price, least_memory_bytes, least_seconds)
