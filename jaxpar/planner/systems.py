"""Other training systems, priced with the same work and links: what measured layouts of theirs are compared with.

Their conventions differ from jaxpar's in a few things, which a `System` says. Stages run at their own pace: with times
t of the stages for one microbatch, a step of 1F1B takes M · max t + (Σ t − max t) / v.

Letters: b sequences of a microbatch, T tokens, D width, F feed-forward width, L layers, M microbatches, v chunks.
"""

from dataclasses import dataclass

from jaxpar.config import ModelConfig
from jaxpar.flops import parameter_count
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.links import collective_seconds, message_seconds, span
from jaxpar.planner.work import head_seconds, layer_work, memory_seconds


@dataclass(frozen=True)
class System:
    """How a training system differs.

    Attributes:
        name: what it is called.
        order: axes from slowest to fastest changing over the devices.
        balanced_head: layers are spread so that the stage with the head has fewer; otherwise all have as many.
        weight_bytes: of a parameter in use.
        gradient_bytes: of a gradient, as summed and sent.
        state_bytes: of a parameter's master copy and moments, which ZeRO splits from stage 1 on.
        kept: times what the formula says of activations; fitted to measured memory, the allocator's waste included.
        attention_pairs: whether attention keeps the weights of all pairs (no flash attention).
        overlaps: sums over `tensor` hide behind multiplications, gradients' reduction behind the last backward.
    """

    name: str
    order: tuple[str, ...] = ("pipe", "data", "tensor")
    balanced_head: bool = False
    weight_bytes: int = 2
    gradient_bytes: int = 4
    state_bytes: int = 12
    kept: float = 1.0
    attention_pairs: bool = False
    overlaps: bool = False


LOGIT_BYTES = 8  # of each logit: bf16, float32, and the gradient in bf16
NANOTRON = System("nanotron", balanced_head=True, state_bytes=14, kept=1.6)
"""huggingface/nanotron: blocks are spread by cost, head included; float32 sums of gradients; bf16 weights."""
MEGATRON_2021 = System("megatron 2021", attention_pairs=True)
"""NVIDIA/Megatron-LM as of arXiv:2104.04473: equally many layers on each stage, head on the last."""
MEGATRON = System("megatron", overlaps=True)
"""The same today, with flash attention and overlapped communication."""

SYSTEMS: dict[str, System | None] = {"jaxpar": None, "nanotron": NANOTRON, "megatron": MEGATRON}
"""By name, for the command line; None: priced by `jaxpar.planner.price`."""


@dataclass(frozen=True)
class Foreign:
    """A step of another system.

    Attributes:
        seconds: of a step.
        memory_bytes: on the fullest device.
    """

    seconds: float
    memory_bytes: float


def foreign_price(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, system: System) -> Foreign:
    """Price a layout of another system."""
    return Foreign(
        foreign_seconds(model, layout, workload, cluster, system), foreign_bytes(model, layout, workload, system)
    )


def stage_layers(layers: int, pipe: int, head_layers: float) -> tuple[float, float]:
    """Layers of the fullest stage without the head, and of the last one, when the head counts as `head_layers`.

    Example:
        >>> stage_layers(16, pipe=4, head_layers=2.5)
        (5, 2)
    """
    last = min(range(layers + 1), key=lambda x: (max(-(-(layers - x) // (pipe - 1)), x + head_layers), -x))
    return -(-(layers - last) // (pipe - 1)), last


def foreign_seconds(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, system: System) -> float:
    """Time of a step."""
    b, T, n = workload.sequences_per_microbatch(layout), workload.sequence_length, layout.tensor
    activation = 2.0 * b * T * model.hidden_size
    across = span(("tensor",), layout, cluster, system.order)
    sums = sum(collective_seconds(op, "native", activation, across, cluster) for op in ("all-gather", "reduce-scatter"))
    layer = _layer_seconds(model, layout, workload, cluster, system, sums)
    head = sum(head_seconds(model, b, T, n, workload.compute_dtype, cluster)) + 2 * sums
    stages = span(("pipe",), layout, cluster, system.order)
    message_bytes = activation / (n if layout.sequence_parallel else 1)
    message = message_seconds(message_bytes, stages.hosts > 1, cluster) if layout.pipe > 1 else 0.0
    pipeline = _pipeline_seconds(model.num_hidden_layers, layout, system, layer, head, message)

    parameters = parameter_count(model) / (layout.pipe * n)
    reduced = _reduction_seconds(parameters, layout, cluster, system)
    if system.overlaps:
        reduced = max(0.0, reduced - 2 / 3 * pipeline / layout.microbatches)
    updated = parameters / (layout.data if layout.zero else 1)
    update = memory_seconds(updated * (2 * system.state_bytes + system.gradient_bytes + system.weight_bytes), cluster)
    return pipeline + reduced + update + cluster.efficiency.step_seconds


def _layer_seconds(
    model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, system: System, sums: float
) -> float:
    """One layer on one microbatch, forward and backward; `sums` is an all-gather and a reduce-scatter over `tensor`."""
    b, T, n = workload.sequences_per_microbatch(layout), workload.sequence_length, layout.tensor
    work = layer_work(model, b, T, n, layout.sequence_parallel, workload.compute_dtype, cluster)
    pairs = 0.0
    if system.attention_pairs:  # six passes over bf16 scores: product, softmax and dropout read and write each
        pairs = memory_seconds(12.0 * b * model.num_attention_heads * T * T / n, cluster)
    forward, backward = work.forward + pairs, work.backward + 2 * pairs
    again = {"none": 0.0, "dots": forward - work.projections, "full": forward}[layout.remat]
    communication = {"none": 4, "dots": 5, "full": 6}[layout.remat] * sums
    started = cluster.efficiency.layer_seconds
    if n > 1 and layout.pipe > 1 and span(("pipe",), layout, cluster, system.order).hosts > 1:
        started += cluster.efficiency.stage_layer_seconds * n
    computing = max(forward + backward + again, started)
    return max(computing, communication) if system.overlaps else computing + communication


def _pipeline_seconds(layers: int, layout: Layout, system: System, layer: float, head: float, message: float) -> float:
    """All microbatches through all stages, from the times of a layer, of the head and of a message."""
    p, M, v = layout.pipe, layout.microbatches, layout.chunks
    if p == 1:
        return M * (layers * layer + head)
    most, last = stage_layers(layers, p, head / layer) if system.balanced_head else (layers / p, layers / p)
    stage, last_stage = most * layer, last * layer + head
    slowest = max(stage, last_stage)
    others = (p - 1) * stage + last_stage - slowest
    return M * (slowest + 2 * v * message) + (others + 2 * (p - 1) * message) / v


def _reduction_seconds(parameters: float, layout: Layout, cluster: Cluster, system: System) -> float:
    """Gradients over `data`, and with ZeRO the new parameters."""
    group = span(("data",), layout, cluster, system.order)
    of = lambda op, size: collective_seconds(op, "native", size * parameters, group, cluster)
    if not layout.zero:
        return of("all-reduce", system.gradient_bytes)
    return of("reduce-scatter", system.gradient_bytes) + of("all-gather", system.weight_bytes)


def foreign_bytes(model: ModelConfig, layout: Layout, workload: Workload, system: System) -> float:
    """Memory of the fullest stage: the first, with most microbatches in flight, or the last, with the head."""
    b, T = workload.sequences_per_microbatch(layout), workload.sequence_length
    p, n, D, V = layout.pipe, layout.tensor, model.hidden_size, model.padded_vocab_size
    tables = 1 if model.tie_word_embeddings else 2
    table = V * D / n
    per_layer = (parameter_count(model) - tables * model.vocab_size * D) / model.num_hidden_layers / n
    state = system.weight_bytes + system.gradient_bytes + system.state_bytes / (layout.data if layout.zero else 1)
    kept = system.kept * b * T * layer_bytes_per_token(model, n, layout.remat, system, T, layout.sequence_parallel)
    logits = LOGIT_BYTES * b * T * V / n
    layers = model.num_hidden_layers / p
    if p == 1:
        return (layers * per_layer + tables * table) * state + layers * kept + logits
    in_flight = min(layout.microbatches, p) * (1 + (p - 1) / (p * layout.chunks) if layout.chunks > 1 else 1)
    first = (layers * per_layer + table) * state + layers * kept * in_flight
    if system.balanced_head:
        layers *= 0.7
    last = (layers * per_layer + table) * state + layers * kept + logits
    return max(first, last)


def layer_bytes_per_token(
    model: ModelConfig, n: int, remat: str, system: System, sequence_length: int, sequence_parallel: bool
) -> float:
    """What a layer keeps for each token in bf16: see `jaxpar.planner.formulas` for GELU with dropout.

    Derived for SwiGLU without dropout and with flash attention: two norms and their results 8D, query, key, value and
    context 2(2H + 2G)K, gate, up, activation and product 8F.
    """
    D = model.hidden_size
    whole = 2.0 * D / (n if sequence_parallel else 1)
    if remat == "full":
        return whole
    heads = 2 * model.head_dim * (2 * model.num_attention_heads + 2 * model.num_key_value_heads) / n
    hidden = 2 * model.intermediate_size * (4 if model.traits.gated else 2) / n
    pairs = 5.0 * model.num_attention_heads * sequence_length / n if system.attention_pairs else 0.0
    return 4 * whole + heads + hidden + pairs
