"""What fills the memory of one device, before anything is compiled.

Parameters, gradients and the optimizer's state are exact: their shapes, and how the axes and ZeRO split them (padding
rows of uneven partitions included). Activations are the slots of the schedule's ring times what a chunk keeps.
Temporaries are counted at the moments at which steps that XLA compiled were fullest: while the loss goes backward,
between forward and backward, in the backward of one layer, and after the update. What holds them there was read off
the buffers of compiled programs, and little of it had to be fitted: `TEMPORARIES`. All stages run the same program, so
all take the same memory.

The convention is jaxpar's: weights in `param_dtype`, by default float32 and themselves the master copy; two moments of
Adam in the same; sums of gradients in float32. Papers count bf16 weights and gradients: see `jaxpar.planner.formulas`.
"""

import math
import re
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version

from jaxpar.config import ModelConfig
from jaxpar.planner.activations import kept
from jaxpar.planner.cached import cached
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.parameters import ITEM_BYTES, block, optimizer_elements, parameters
from jaxpar.planner.ticks import ticks


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on one device of the fullest stage, by what holds them.

    Attributes:
        parameters: as stored between steps.
        gradients: as they are summed over microbatches before `data`: whole but in ZeRO-3, and in ZeRO-2 with one
            microbatch and no stages.
        optimizer: the optimizer's state.
        activations: what forwards keep for their backwards, over all live microbatches, and outputs that wait; of it
            what is there beside the gradients.
        temporaries: copies of weights ready for use, more buffers for gradients, logits, one layer at work.
        batch: tokens, targets and mask of one step.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporaries: float
    batch: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Temporaries:
    """What of XLA's temporaries is not the same everywhere: how many of each buffer there are at once. Fitted.

    Attributes:
        stages: with stages, gradients of a chunk as a microbatch's backward makes them, and the zeros they start as.
        two_stages: as many more with two stages of one chunk.
        in_flight: what a chunk keeps of a microbatch, on its way into the ring and out of it.
        gathered: whole gradients of one layer in float32, where they are summed over `data` layer by layer.
        reordered: stored parts of weights in another order, for ZeRO-3's gathers.
        workspace: bytes for matrix multiplications.
    """

    stages: float
    two_stages: float
    in_flight: float
    gathered: float
    reordered: float
    workspace: int


FITTED_JAX = "0.12.0"
"""The newest that `TEMPORARIES` are fitted to."""


def jax_to_price() -> str:
    """The version that is installed beside the planner; where none is, the newest that is fitted."""
    try:
        return version("jax")
    except PackageNotFoundError:
        return f"{FITTED_JAX} (none is installed)"


def is_newer(jax: str) -> bool:
    """Whether XLA for GPUs is one with other temporaries: from jax 0.11 on.

    Example:
        >>> is_newer("0.10.2"), is_newer("0.11.0rc1"), is_newer("1.0")
        (False, True, True)
    """
    return tuple(map(int, re.findall(r"\d+", jax)[:2])) >= (0, 11)


PRICED_JAX = jax_to_price()
TEMPORARIES = {
    # Least squares of the peak's logarithm over layouts compiled in bfloat16. With jax 0.10.2, 13 small ones for
    # `h100:8` and 53 of 1B to 70B models for `h100:8` and `h100:8x8`: mean error 2%, largest 10% too low (ZeRO-3
    # without remat, where XLA's own attention fills most of the memory) and 9% too high. Of 18 more of that size, drawn
    # at random afterwards: mean 3%, largest 9%, too high. With jax 0.12.0, 12 and 16: mean 2%, largest 7%.
    "gpu": Temporaries(1.5, 0, 1.4, 1.5, 1, 32 << 20)
    if is_newer(PRICED_JAX)
    else Temporaries(1.5, 1, 1.4, 1.5, 1, 4 << 20),
    # For `cpu:8` in float32 with jax 0.10.2, 12 small ones: mean 3%, largest 8%.
    "cpu": Temporaries(1.35, 0, 0.9, 0, 0, 0),
}
SCALARS = 8  # Adam's count of steps and the schedule's


def memory(
    model: ModelConfig,
    layout: Layout,
    workload: Workload,
    height: int,
    *,
    platform: str = "gpu",
) -> MemoryParts:
    """Bytes on one device.

    Args:
        model: sizes and architecture.
        layout: the layout.
        workload: the batch, the dtypes and the attention: XLA's keeps the weights of all pairs.
        height: layers of the largest part (`jaxpar.pipeline.partition`).
        platform: `gpu` or `cpu`, whose XLA compiles.
    """
    state = state_bytes(model, layout, workload, height)
    b = workload.sequences_per_microbatch(layout)
    k = kept(
        model,
        workload.sequence_length,
        workload.compute_dtype,
        layout.pipe,
        layout.tensor,
        layout.remat,
        layout.sequence_parallel,
        workload.attention,
    )
    t = TEMPORARIES[platform]
    staged = layout.pipe > 1
    slots, outputs, made = 1, 0, state.microbatch
    if staged:
        table = ticks(layout.schedule, layout.pipe, layout.microbatches, layout.chunks)
        slots, outputs = table.slots, table.outputs
        # A chunk of several is cut out of the weights. With two stages the first and last phase are one tick each.
        copies = t.stages + (1 if layout.chunks > 1 else t.two_stages if layout.pipe == 2 else 0)
        made = copies * made + t.in_flight * b * height * k.layer
    activations = b * (slots * height * k.layer + outputs * k.boundary)
    logits = b * k.logits
    # The head's gradients come before the layers' where they take less than what they are made of, the logits'.
    # Or where a loop that gathers waits for their scatter, on CPU (`jaxpar.collectives.in_order`).
    unordered = not state.gathered_head if platform == "cpu" else state.layer
    waiting = logits if unordered else min(logits, state.head)
    moments = (
        2 * logits + state.gathered_head + (made if staged else 0),  # the loss: logits and their gradients
        waiting + b * slots * height * k.reordered + (0 if staged else made),  # between forward and backward
        waiting + made + t.gathered * state.layer + b * k.work,  # the backward of one layer
    )
    during = state.sums + activations + state.copies + t.reordered * state.reordered + max(moments) + t.workspace
    fullest = max(during, state.at_end)
    # With one microbatch they are gone by the time all gradients are there.
    beside = min(activations, fullest - state.gradients)
    rows = workload.global_batch // layout.data
    return MemoryParts(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=beside,
        temporaries=fullest - state.gradients - beside,
        batch=rows * workload.sequence_length * 9,  # two int32 and a bool for each token
    )


@dataclass(frozen=True)
class State:
    """Bytes that do not depend on the batch.

    Attributes:
        parameters: as stored.
        gradients: one buffer in which they are summed.
        optimizer: its state.
        copies: of weights, cast for use.
        reordered: the stored parts that ZeRO-3 gathers along another dim than the first, for which it turns them.
        sums: of `gradients`, what is there in the backward already: with one microbatch only what lands layer by layer.
        microbatch: gradients of one chunk's layers as the backward of a microbatch makes them, beside `sums`.
        layer: gradients of one whole layer, where they are summed over `data` in its backward.
        head: gradients of the output table.
        gathered_head: the output table, where it is gathered for use.
        at_end: gradients; or the layers' new weights, where they are gathered after the update beside the old.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    reordered: int
    sums: int
    microbatch: int
    layer: int
    head: int
    gathered_head: int
    at_end: int


def state_bytes(model: ModelConfig, layout: Layout, workload: Workload, height: int) -> State:
    """Bytes that do not depend on the batch; for the arguments see `memory`."""
    return _state_of(
        model,
        layout.data,
        layout.pipe,
        layout.tensor,
        layout.zero,
        layout.microbatches == 1,
        height,
        layout.chunks,
        workload.param_dtype,
        workload.compute_dtype,
        workload.optimizer,
    )


@cached
def _state_of(
    model: ModelConfig,
    data: int,
    pipe: int,
    tensor: int,
    zero: int,
    one_microbatch: bool,
    height: int,
    chunks: int,
    param_dtype: str,
    compute_dtype: str,
    optimizer: str,
) -> State:
    held, rows = block(model, data, pipe, tensor), height * chunks
    layers, layers_whole = rows * held.layer, rows * held.layer_whole
    split, whole = layers + held.rest, layers_whole + held.rest_whole
    stored, computed = ITEM_BYTES[param_dtype], ITEM_BYTES[compute_dtype]
    summed = max(computed, 4)
    one, gathers = pipe == 1 and one_microbatch, zero == 3 and data > 1
    lands = data > 1 and (zero == 3 or (zero == 2 and one))  # a layer's gradients are summed in its backward
    gradients = summed * ((split // data if lands else split) + whole)
    # With one microbatch those outside the layers are used up before the layers' backward.
    cast = layers + layers_whole + (0 if one else held.rest + held.rest_whole)
    made = stored * (layers // data + layers_whole) if gathers else computed * (layers + layers_whole)
    landing = lands and not gathers
    table = model.padded_vocab_size // (pipe * tensor) * model.hidden_size
    return State(
        parameters=stored * ((split // data if gathers else split) + whole),
        gradients=gradients,
        optimizer=stored * optimizer_elements(model, data, pipe, tensor, zero, rows, optimizer) + SCALARS,
        copies=0 if gathers or computed == stored else computed * cast,
        reordered=stored * rows * _parts_behind(model, data, pipe, tensor) if gathers else 0,
        sums=0 if one and not landing else gradients,
        microbatch=0 if landing else made // chunks,
        layer=summed * held.layer if lands else 0,
        head=summed * table,
        gathered_head=computed * table if gathers else 0,
        at_end=max(gradients, stored * layers if zero in (1, 2) and data > 1 else 0),
    )


def _parts_behind(model: ModelConfig, data: int, pipe: int, tensor: int) -> int:
    """Elements of one layer's parts over `data`, of the parameters whose first dim `data` does not split."""
    return sum(
        p.size // math.prod(p.ways(pipe, tensor)) // data
        for p in parameters(model)
        if p.stacked and p.zero_dim(data, pipe, tensor)
    )


def least_memory_bytes(model: ModelConfig, layout: Layout, workload: Workload) -> float:
    """A lower bound of memory, cheap: parameters, gradients and optimizer state with layers spread evenly."""
    layers = model.num_hidden_layers
    state = state_bytes(model, layout, workload, -(-layers // (layout.pipe * layout.chunks)))
    return state.parameters + state.gradients + state.optimizer
