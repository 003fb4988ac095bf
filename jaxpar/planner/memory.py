"""What fills the memory of one device, before anything is compiled.

Parameters, gradients and the optimizer's state are exact: their shapes, and how the axes and ZeRO split them (padding
rows of uneven partitions included). Activations are the slots of the schedule's ring times what a chunk keeps.
Temporaries are those of XLA's that are known by kind, times factors fitted to compiled steps: `TEMPORARIES`. All
stages run the same program, so all take the same memory.

The convention is jaxpar's: weights in `param_dtype`, by default float32 and themselves the master copy; two moments of
Adam in the same; sums of gradients in float32. Papers count bf16 weights and gradients: see `jaxpar.planner.formulas`.
"""

import re
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version

from jaxpar.config import ModelConfig
from jaxpar.planner.activations import kept
from jaxpar.planner.cached import cached
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.parameters import ITEM_BYTES, block, optimizer_elements
from jaxpar.planner.ticks import ticks


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on one device of the fullest stage, by what holds them.

    Attributes:
        parameters: as stored between steps.
        gradients: as they are summed over microbatches before `data`: whole but in ZeRO-3, and in ZeRO-2 with one
            microbatch and no stages.
        optimizer: the optimizer's state.
        activations: what forwards keep for their backwards, over all live microbatches, and outputs that wait.
        temporaries: copies of weights ready for use, more buffers for gradients, logits, one chunk at work.
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
    """Fitted: how many of each buffer XLA has at once.

    Attributes:
        sums_of_one: buffers of all gradients, one microbatch and no stages.
        sums_of_many: the same with several microbatches.
        sums_of_stages: the same with stages.
        logits: float32 logits of a microbatch.
        recomputed: what one layer keeps without remat, while it is recomputed.
        gathered: layers that ZeRO-3 gathers, their gradients included, in the compute dtype.
        masks: causal masks and copies of the pairs' weights, with attention that is XLA's.
    """

    sums_of_one: float
    sums_of_many: float
    sums_of_stages: float
    logits: float
    recomputed: float
    gathered: float
    masks: float


FITTED_JAX = "0.12.0"
"""The newest that `TEMPORARIES` are fitted to."""


def jax_to_price() -> str:
    """The version that is installed beside the planner; where none is, the newest that is fitted."""
    try:
        return version("jax")
    except PackageNotFoundError:
        return f"{FITTED_JAX} (none is installed)"


def is_newer(jax: str) -> bool:
    """Whether XLA for GPUs is one that holds more at once: from jax 0.11 on.

    Example:
        >>> is_newer("0.10.2"), is_newer("0.11.0rc1"), is_newer("1.0")
        (False, True, True)
    """
    return tuple(map(int, re.findall(r"\d+", jax)[:2])) >= (0, 11)


PRICED_JAX = jax_to_price()
TEMPORARIES = {
    # Least squares over layouts of four models, compiled for `h100:8` in bfloat16. With jax 0.10.2, 36 layouts: mean
    # error of the peak 5%, four above 10%, largest 16% (ZeRO-3, and where XLA's own attention fills most of the
    # memory). With jax 0.12.0, 17 layouts: mean 5%, three above 10%, largest 16%.
    "gpu": Temporaries(0.3, 1.85, 3.3, 6.0, 0.5, 2.7, 7.1)
    if is_newer(PRICED_JAX)
    else Temporaries(0.3, 1.6, 2.2, 1.5, 1, 6, 6.2),
    # The same for `cpu:8` in float32 with jax 0.10.2, 36 layouts: mean 4%, largest 9%.
    "cpu": Temporaries(1.1, 2.55, 2.35, 0.9, 0.82, 0.0, 4.5),
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
    if layout.pipe > 1:
        table = ticks(layout.schedule, layout.pipe, layout.microbatches, layout.chunks)
        activations = b * (table.slots * height * k.layer + table.outputs * k.boundary)
        in_flight, sums = b * height * k.layer, t.sums_of_stages
    else:
        activations, in_flight = b * height * k.layer, 0
        sums = t.sums_of_one if layout.microbatches == 1 else t.sums_of_many
    temporaries = state.copies + t.gathered * state.layer + (sums - 1) * state.gradients + in_flight
    temporaries += b * (t.logits * k.logits + t.masks * k.hoisted)
    if layout.remat != "none":
        temporaries += t.recomputed * b * k.work
    rows = workload.global_batch // layout.data
    return MemoryParts(
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations,
        temporaries=max(0.0, temporaries),  # with one microbatch fewer sums than gradients, which count whole
        batch=rows * workload.sequence_length * 9,  # two int32 and a bool for each token
    )


@dataclass(frozen=True)
class State:
    """Bytes that do not depend on the batch.

    Attributes:
        parameters: as stored.
        gradients: one buffer in which they are summed.
        optimizer: its state.
        copies: of weights, ready for use.
        layer: of one layer that ZeRO-3 gathers, and of its gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    layer: int


def state_bytes(model: ModelConfig, layout: Layout, workload: Workload, height: int) -> State:
    """Bytes that do not depend on the batch; for the arguments see `memory`."""
    return _state_of(
        model,
        layout.data,
        layout.pipe,
        layout.tensor,
        layout.zero,
        layout.microbatches == 1,
        height * layout.chunks,
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
    rows: int,
    param_dtype: str,
    compute_dtype: str,
    optimizer: str,
) -> State:
    held = block(model, data, pipe, tensor)
    split, whole = rows * held.layer + held.rest, rows * held.layer_whole + held.rest_whole
    stored, computed = ITEM_BYTES[param_dtype], ITEM_BYTES[compute_dtype]
    summed = max(computed, 4)
    part = split // data if data > 1 else split
    never_whole = zero == 3 or (zero == 2 and pipe == 1 and one_microbatch)
    gathers = zero == 3 and data > 1
    cast = 0 if computed == stored else computed * (split + whole)
    return State(
        parameters=stored * ((part if zero == 3 else split) + whole),
        gradients=summed * ((part if never_whole else split) + whole),
        optimizer=stored * optimizer_elements(model, data, pipe, tensor, zero, rows, optimizer) + SCALARS,
        copies=computed * (held.rest + whole) if gathers else cast,
        layer=computed * held.layer if gathers else 0,
    )


def least_memory_bytes(model: ModelConfig, layout: Layout, workload: Workload) -> float:
    """A lower bound of memory, cheap: parameters, gradients and optimizer state with layers spread evenly."""
    layers = model.num_hidden_layers
    state = state_bytes(model, layout, workload, -(-layers // (layout.pipe * layout.chunks)))
    return state.parameters + state.gradients + state.optimizer
