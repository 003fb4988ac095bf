"""A layout and a workload, as plain values: what is priced.

Letters: T tokens of a sequence, B sequences of a step over the whole cluster.
"""

from dataclasses import dataclass

from jaxpar.collective_costs import Algorithm


@dataclass(frozen=True)
class Layout:
    """How a step is laid out over the devices, in the words of the config.

    Attributes:
        data: replicas, `mesh.data`.
        pipe: pipeline stages, `mesh.pipe`.
        tensor: devices that share each matrix, `mesh.tensor`.
        zero: ZeRO stage, `parallel.zero`.
        schedule: `parallel.schedule`, `"1f1b"` or `"gpipe"`.
        chunks: model parts on each stage, `parallel.chunks`.
        microbatches: pieces of each replica's batch, `parallel.microbatches`.
        remat: `"none"`, `"dots"` or `"full"`, `parallel.remat`.
        sequence_parallel: `parallel.sequence_parallel`.
        algorithm: of the gradient reduction, `grad_reduce.algorithm`.
    """

    data: int
    pipe: int
    tensor: int
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    remat: str = "none"
    sequence_parallel: bool = False
    algorithm: Algorithm = "native"

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.data * self.pipe * self.tensor


@dataclass(frozen=True)
class Workload:
    """What a step has to do, whatever the layout.

    Attributes:
        sequence_length: T, in tokens.
        global_batch: B, in sequences.
        param_dtype: of the stored weights and the optimizer's state, `train.param_dtype`.
        compute_dtype: of the arithmetic, `train.compute_dtype`.
        optimizer: `optimizer.name`.
        attention: `"flash"` (cuDNN's) or `"xla"`, which writes out the scores of all pairs of tokens.
        wire_dtype: of gradients on the wire, `grad_reduce.wire_dtype`; None: as they are.
        layer_costs: what each layer costs in any one unit, `parallel.layer_costs`; None: all the same.

    Example:
        >>> workload = Workload(sequence_length=4096, global_batch=256)
        >>> workload.tokens_per_step, workload.sequences_per_microbatch(Layout(8, 2, 4, microbatches=16))
        (1048576, 2)
    """

    sequence_length: int
    global_batch: int
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    optimizer: str = "adamw"
    attention: str = "flash"
    wire_dtype: str | None = None
    layer_costs: tuple[float, ...] | None = None

    @property
    def tokens_per_step(self) -> int:
        """B · T."""
        return self.global_batch * self.sequence_length

    @property
    def batch_as_given(self) -> str:
        """The batch by the names that a user may have given it by, for errors."""
        return f"train.global_batch {self.global_batch} (--global-batch-tokens {self.tokens_per_step})"

    def sequences_per_microbatch(self, layout: Layout) -> int:
        """Sequences in one microbatch of one replica; data · microbatches must divide the batch."""
        return self.global_batch // (layout.data * layout.microbatches)
