"""Every collective of a step, from the layout alone: which kind, over which axes, how large and how often.

It restates what the compiled program runs, as `jaxpar compile` reports it; tests compare the bytes, axis by axis. Left
out are the few scalars of the gradient's norm (44 bytes at most), and what only dropout and evaluation do.

Letters: b sequences of a microbatch on one replica, T tokens, D width, L layers, M microbatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.config import ModelConfig
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.parameters import ITEM_BYTES, POSITIONS, block, parameters
from jaxpar.planner.ticks import Ticks, ticks

WIRE = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}  # times (n - 1) / n of the buffer
DATA, PIPE, TENSOR, VOCABULARY = ("data",), ("pipe",), ("tensor",), ("pipe", "tensor")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective that a device takes part in several times a step.

    Attributes:
        op: `all-reduce`, `all-gather`, `reduce-scatter` or `collective-permute`.
        axes: mesh axes that it runs over.
        bytes: of the whole buffer, once.
        times: a step.
        during: `forward`, `backward`, `head`; `beside`, which nothing in the same tick waits for; or `step`, once after
            the last microbatch.
    """

    op: str
    axes: tuple[str, ...]
    bytes: float
    times: int
    during: str

    def wire_bytes(self, layout: Layout) -> float:
        """What one device sends in a step."""
        n = group_size(self.axes, layout)
        return self.times * self.bytes * (WIRE[self.op] * (n - 1) / n if self.op in WIRE else 1.0)


def group_size(axes: tuple[str, ...], layout: Layout) -> int:
    """Devices that a collective over these axes joins."""
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    return size


def transfers(model: ModelConfig, layout: Layout, workload: Workload, height: int) -> list[Transfer]:
    """All collectives of a step.

    Args:
        model: sizes and architecture.
        layout: the layout.
        workload: the batch and the dtypes.
        height: layers of the largest part, to which the others are padded (`jaxpar.pipeline.partition`).
    """
    found = [*_model(model, layout, workload, height), *_gradients(model, layout, workload, height)]
    return [t for t in found if t.times and t.bytes and group_size(t.axes, layout) > 1]


def real_axes(axes: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """Those with more than one device: the others take part in no collective."""
    return tuple(axis for axis in axes if getattr(layout, axis) > 1)


def wire_bytes_by_axes(found: list[Transfer], layout: Layout) -> dict[tuple[str, ...], float]:
    """What one device sends in a step, over each set of axes."""
    total: dict[tuple[str, ...], float] = {}
    for t in found:
        axes = real_axes(t.axes, layout)
        total[axes] = total.get(axes, 0.0) + t.wire_bytes(layout)
    return total


def runs(layout: Layout, height: int) -> tuple[Ticks, int]:
    """Ticks of a step and layers in each of them; without stages a microbatch is a tick and all layers are in it."""
    if layout.pipe > 1:
        return ticks(layout.schedule, layout.pipe, layout.microbatches, layout.chunks), height
    M = layout.microbatches
    return Ticks(M, M, M, M, 1, 0), height


def _model(model: ModelConfig, layout: Layout, workload: Workload, height: int) -> Iterator[Transfer]:
    """What embedding, layers, head and messages between stages need, idle ticks included."""
    traits, n, D = model.traits, layout.tensor, model.hidden_size
    c = ITEM_BYTES[workload.compute_dtype]
    wide = max(c, 4)
    b, T = workload.sequences_per_microbatch(layout), workload.sequence_length
    table, rows = runs(layout, height)
    split = layout.sequence_parallel and n > 1
    whole = b * T * D * c  # activations of all tokens
    part = whole // n if split else whole  # as they are between blocks
    recomputed = layout.remat != "none"
    embedding = "beside" if layout.pipe > 1 else "forward"
    forward, backward = table.forward * rows, table.backward * rows
    if split:
        # Forward: two gathers and two scatters; recomputed are all but the last. Backward: the same the other way.
        yield Transfer("all-gather", TENSOR, whole, 2 * forward, "forward")
        yield Transfer("reduce-scatter", TENSOR, whole, 2 * forward, "forward")
        yield Transfer("all-gather", TENSOR, whole, (4 if recomputed else 2) * backward, "backward")
        yield Transfer("reduce-scatter", TENSOR, whole, (3 if recomputed else 2) * backward, "backward")
        # Each device has its own tokens, so gradients of what they share are summed: norms, biases after a scatter.
        norms = 2 * D * (2 if traits.layer_norm else 1)
        biases = D * ((traits.all_bias or model.attention_bias) + (traits.all_bias or model.mlp_bias))
        yield Transfer("all-reduce", TENSOR, wide * norms + c * biases, backward, "backward")
        yield Transfer("all-reduce", TENSOR, c * norms // 2, table.head, "head")
        yield Transfer("reduce-scatter", TENSOR, whole, table.forward, "forward")  # the embedding's vectors
        yield Transfer("all-gather", TENSOR, whole, table.backward, "backward")
        yield Transfer("all-reduce", PIPE, whole, table.forward, embedding)
        yield Transfer("all-gather", TENSOR, whole, table.head, "head")
        yield Transfer("reduce-scatter", TENSOR, whole, table.head, "head")
        yield Transfer("all-reduce", PIPE, whole, table.head, "head")
        if not traits.rotary:
            yield Transfer("all-reduce", TENSOR, c * T * D, table.backward, "backward")
    else:
        yield Transfer("all-reduce", TENSOR, whole, 2 * forward, "forward")
        yield Transfer("all-reduce", TENSOR, whole, (3 if recomputed else 2) * backward, "backward")
        yield Transfer("all-reduce", VOCABULARY, whole, table.forward, embedding)
        yield Transfer("all-reduce", VOCABULARY, whole, table.head, "head")
    if model.num_key_value_heads < n:  # all devices hold all key and value heads, and each uses one
        heads = model.num_key_value_heads * model.head_dim
        bias = 1 if traits.qkv_bias or traits.all_bias or model.attention_bias else 0
        yield Transfer("all-reduce", TENSOR, c * 2 * heads * (D + bias), backward, "backward")
    if traits.qk_norm:
        yield Transfer("all-reduce", TENSOR, wide * 2 * model.head_dim, backward, "backward")
    yield Transfer("all-reduce", VOCABULARY, 3 * wide * b * T, table.head, "head")  # maximum, sum, target's logit
    if layout.pipe > 1:
        yield Transfer("all-reduce", PIPE, part, table.head, "head")  # the output, to all stages
        yield Transfer("all-reduce", PIPE, part, table.backward, "beside")  # the embedding's gradient, likewise
        yield Transfer("collective-permute", PIPE, part, table.forward, "forward")
        yield Transfer("collective-permute", PIPE, part, table.backward, "backward")


def _gradients(model: ModelConfig, layout: Layout, workload: Workload, height: int) -> Iterator[Transfer]:
    """What crosses `data`."""
    sizes = layout.data, layout.pipe, layout.tensor
    held = block(model, *sizes)
    c, stored = ITEM_BYTES[workload.compute_dtype], ITEM_BYTES[workload.param_dtype]
    wide = max(c, 4)
    sent = ITEM_BYTES[workload.wire_dtype] if workload.wire_dtype else wide
    table, rows = runs(layout, height)
    layers = height * layout.chunks
    split, whole = layers * held.layer + held.rest, layers * held.layer_whole + held.rest_whole
    yield Transfer("all-reduce", DATA, 8, 1, "step")  # loss and tokens
    if layout.zero == 0:
        yield Transfer("all-reduce", DATA, sent * (split + whole), 1, "step")
        return
    yield Transfer("all-reduce", DATA, sent * whole, 1, "step")
    if layout.zero < 3:
        layer_by_layer = layout.zero == 2 and layout.pipe == 1 and layout.microbatches == 1
        yield Transfer("reduce-scatter", DATA, sent * split, 1, "backward" if layer_by_layer else "step")
        yield Transfer("all-gather", DATA, stored * split, 1, "step")
        return
    yield Transfer("all-gather", DATA, c * held.layer, table.forward * rows, "forward")
    yield Transfer("all-gather", DATA, c * held.layer, table.backward * rows, "backward")
    yield Transfer("reduce-scatter", DATA, sent * held.layer, table.backward * rows, "backward")
    positions = sum(p.size for p in parameters(model) if p.name == POSITIONS and p.zero_dim(*sizes) is not None)
    head = (held.rest - positions) / (1 if model.tie_word_embeddings else 2)
    embedding = head + positions
    yield Transfer("all-gather", DATA, c * embedding, table.forward, "forward")
    yield Transfer("reduce-scatter", DATA, sent * embedding, table.backward, "backward")
    if model.tie_word_embeddings and layout.pipe == 1:
        return  # XLA for GPUs gathers the table once for both, and scatters the sum of its gradients
    yield Transfer("all-gather", DATA, c * head, table.head, "head")
    yield Transfer("reduce-scatter", DATA, sent * head, table.head, "head")
