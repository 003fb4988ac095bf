"""The price of a layout: memory of the fullest stage and time of a step, each by its parts."""

from dataclasses import dataclass

from jaxpar.config import ModelConfig
from jaxpar.flops import flops_per_token
from jaxpar.hardware import SHARE_OF_PEAK
from jaxpar.pipeline.partition import Partition, even, partition
from jaxpar.planner.cached import cached
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.cost import TimeParts, least_seconds, step_seconds
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.memory import MemoryParts, least_memory_bytes, memory

__all__ = ["MemoryParts", "Price", "TimeParts", "least_memory_bytes", "least_seconds", "partition_of", "price"]


@dataclass(frozen=True)
class Price:
    """What a layout costs.

    Attributes:
        layout: that is priced.
        memory: of the fullest stage; all stages of a jaxpar program take the same.
        time: of a step.
        fits: whether memory.total is within what the device can give.
        tokens_per_second: of the whole cluster.
        tflops_per_device: model FLOPs (`jaxpar.flops.flops_per_token`) per device and second, in units of 10¹².
        mfu: the same as a share of the device's peak.
        stage: the fullest, the one with the most layers.
        counts: layers of each part of the model, in model order.
    """

    layout: Layout
    memory: MemoryParts
    time: TimeParts
    fits: bool
    tokens_per_second: float
    tflops_per_device: float
    mfu: float
    stage: int
    counts: tuple[int, ...]


def price(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> Price:
    """Price a layout that the config's rules allow (`jaxpar.config.rules`); nothing is checked here.

    Example:
        >>> from jaxpar.planner.cluster import parse_cluster
        >>> model = ModelConfig(architecture="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        ...     num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
        >>> found = price(model, Layout(8, 2, 4, 1, microbatches=32), Workload(4096, 256), parse_cluster("8xh100x8"))
        >>> found.fits, found.counts
        (True, (16, 16))
    """
    split = partition_of(model, layout.pipe, layout.chunks, workload.layer_costs)
    filled = memory(model, layout, workload, split.height)
    time = step_seconds(model, layout, workload, cluster, split.height, pace(split, workload.layer_costs))
    tokens_per_second = workload.tokens_per_step / time.total
    per_device = tokens_per_second * _flops_per_token(model, workload.sequence_length) / layout.devices
    peak = cluster.device.flops_per_second * SHARE_OF_PEAK.get(workload.compute_dtype, 1.0)
    return Price(
        layout=layout,
        memory=filled,
        time=time,
        fits=filled.total <= cluster.usable_bytes,
        tokens_per_second=tokens_per_second,
        tflops_per_device=per_device / 1e12,
        mfu=per_device / peak,
        stage=split.counts.index(split.height) % layout.pipe,
        counts=split.counts,
    )


@cached
def partition_of(model: ModelConfig, pipe: int, chunks: int, layer_costs: tuple[float, ...] | None = None) -> Partition:
    """Which layers go where: by their costs, as in a run; by formula they all cost the same."""
    if layer_costs is None:
        return even(model.num_hidden_layers, pipe, chunks)
    return partition(layer_costs, (1,) * (len(layer_costs) - 1), pipe, chunks)


def pace(split: Partition, layer_costs: tuple[float, ...] | None) -> float:
    """The time of the slowest part in mean layers, with the layers that it is padded with.

    Example:
        >>> pace(Partition((1, 3), stages=2), (3.0, 1.0, 1.0, 1.0))
        4.0
    """
    if layer_costs is None or not (total := sum(layer_costs)):
        return split.height
    ends = zip(split.starts, split.counts, strict=True)
    parts = (sum(layer_costs[start : start + n]) * len(layer_costs) / total + split.height - n for start, n in ends)
    return max(parts)


_flops_per_token = cached(flops_per_token)
