"""The sections of a config: every key with its unit and legal values, in the line below it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxpar.config.architectures import ARCHITECTURES, Activation, Architecture


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys forbidden, no silent conversions; null means "use the default"."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: value for key, value in values.items() if value is not None or key not in optional}


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _sources(value: Any) -> Any:
    """Paths that stand in the list by themselves make one source of weight 1, in front of the others."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    paths = tuple(item for item in value if isinstance(item, str))
    return (({"paths": paths},) if paths else ()) + tuple(item for item in value if not isinstance(item, str))


class RopeScaling(Section):
    """Llama 3's stretching of the rotary wavelengths."""

    rope_type: Literal["llama3"]
    """The only scaling so far: llama3."""
    factor: float = Field(ge=1)
    """How many times longer the long wavelengths become, at least 1."""
    low_freq_factor: float = Field(gt=0)
    """Wavelengths above original_max_position_embeddings / low_freq_factor are stretched in full, above 0."""
    high_freq_factor: float = Field(gt=0)
    """Wavelengths below original_max_position_embeddings / high_freq_factor stay, above low_freq_factor."""
    original_max_position_embeddings: int = Field(ge=1)
    """Sequence length of the pretraining, in tokens, at least 1."""


LARGEST = 2**31 - 1
"""Of a size: what indices of 32 bits reach."""


class ModelConfig(Section):
    """The transformer, in Hugging Face's names."""

    architecture: Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"]
    """The named architecture: llama, mistral, qwen2, qwen3 or gpt2."""
    vocab_size: int = Field(ge=1, le=LARGEST)
    """Number of tokens, at least 1; 257 or more with the byte tokenizer."""
    vocab_multiple: int = Field(default=128, ge=1)
    """Embedding and head are padded to a multiple of this many rows, at least 1; padding gets no probability."""
    hidden_size: int = Field(ge=1, le=LARGEST)
    """Width of the residual stream, at least 1."""
    intermediate_size: int = Field(ge=1, le=LARGEST)
    """Width of the feed-forward layer, at least 1."""
    num_hidden_layers: int = Field(ge=1, le=LARGEST)
    """Number of blocks, at least 1."""
    num_attention_heads: int = Field(ge=1, le=LARGEST)
    """Number of query heads, at least 1."""
    num_key_value_heads: int = Field(default_factory=lambda data: data["num_attention_heads"], ge=1)
    """Number of key and value heads, a divisor of num_attention_heads; default: num_attention_heads."""
    head_dim: int = Field(default_factory=lambda data: data["hidden_size"] // data["num_attention_heads"], ge=1)
    """Width of one head, even for rotary positions; default: hidden_size / num_attention_heads."""
    hidden_act: Activation = Field(default_factory=lambda data: ARCHITECTURES[data["architecture"]].hidden_act)
    """Activation of the feed-forward layer: silu, gelu or gelu_new; default: gelu_new for gpt2, else silu."""
    max_position_embeddings: int = Field(default=0, ge=0)
    """Longest sequence in tokens, and length of gpt2's position table; default (0): data.sequence_length."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary wavelengths, above 0."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary wavelengths; default: none."""
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm, above 0."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance in gpt2's LayerNorm, above 0."""
    attention_bias: bool = False
    """Biases in attention: true or false (gpt2 always has them, qwen2 in query, key and value)."""
    mlp_bias: bool = False
    """Biases in the feed-forward layer: true or false (gpt2 always has them)."""
    tie_word_embeddings: bool = Field(default_factory=lambda data: ARCHITECTURES[data["architecture"]].tied)
    """Whether the head uses the embedding's table: true or false; default: true for gpt2, else false."""
    sliding_window: int | None = Field(default=None, ge=1)
    """How many tokens, itself included, a token attends to, at least 1; default: all before it."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights, above 0."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Share of each block's output dropped in training, in [0, 1)."""
    attn_implementation: Literal["auto", "xla", "cudnn"] = "auto"
    """How attention is computed: auto, xla or cudnn (flash attention on GPU, bfloat16 only)."""

    @property
    def traits(self) -> Architecture:
        """What the architecture's name stands for."""
        return ARCHITECTURES[self.architecture]

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: vocab_size rounded up to a multiple of vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class MeshConfig(Section):
    """How many devices each axis has."""

    data: int = Field(default=1, ge=-1)
    """Replicas that share the batch, at least 1; -1: the rest of the devices."""
    pipe: int = Field(default=1, ge=-1)
    """Pipeline stages that share the layers, at least 1; -1: the rest of the devices."""
    tensor: int = Field(default=1, ge=-1)
    """Devices that share each layer's matrices, at least 1; -1: the rest of the devices."""
    devices: int | None = Field(default=None, ge=1)
    """Devices in all, at least 1; default: data × pipe × tensor on CPU (virtual devices), elsewhere all there are."""


RematName = Literal["query", "key", "value", "attention_context", "attention_out", "mlp_hidden", "mlp_out"]


class ParallelConfig(Section):
    """How a step is cut into pieces."""

    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Order of forwards and backwards over pipeline stages: gpipe or 1f1b (interleaved with chunks > 1)."""
    chunks: int = Field(default=1, ge=1)
    """Parts of the model on each pipeline stage, at least 1; more make the bubble smaller and messages more."""
    layer_costs: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_listed)] | None = None
    """Time of each layer in any one unit, at least 0, by which layers are spread over stages (`jaxpar bench layers`
    measures it); default: by formula, all alike."""
    idle: Literal["auto", "compute", "skip"] = "auto"
    """What a pipeline stage without work does: compute (on garbage), skip, or auto (skip on CPU, else compute)."""
    microbatches: int = Field(default=1, ge=1)
    """Pieces that each replica's batch is worked through in, at least 1."""
    remat: Literal["none", "dots", "full"] | Annotated[tuple[RematName, ...], BeforeValidator(_listed)] = "none"
    """Activations kept for the backward pass: none (recompute nothing), dots, full (recompute all), or a list of
    the tensors to keep, out of query, key, value, attention_context, attention_out, mlp_hidden, mlp_out."""
    sequence_parallel: bool = False
    """Whether activations between blocks are split over tensor along the sequence: true or false."""
    unroll: int = Field(default=1, ge=1)
    """Layers per iteration of the scan over layers, at least 1; more is faster to run and slower to compile."""
    zero: int = Field(default=0, ge=0, le=3)
    """ZeRO stage, what is split over data: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""


class GradReduceConfig(Section):
    """How gradients are summed over the replicas of `data`."""

    algorithm: Literal["auto", "native", "ring", "tree", "halving_doubling", "hierarchical"] = "native"
    """The all-reduce: native (XLA's, NCCL on GPU), ring, tree, halving_doubling, hierarchical, or auto (the fastest by
    measurement or model)."""
    schedule: Literal["end", "overlapped"] = "end"
    """When: end (once, after the last microbatch) or overlapped (layer by layer inside the last backward pass)."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    """Gradients that travel together, in bytes, at least 1; native leaves this to XLA."""
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the gradients on the wire: float32 or bfloat16 (sums are made in float32 or wider); default: as they
    are."""
    order: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_listed)] | None = None
    """Order of the replicas around the ring, each number from 0 to mesh.data - 1 once; default: as they are."""
    links: str | None = Field(default=None, min_length=1)
    """JSON file with a matrix of link bandwidths between replicas (0: broken), from which the ring's order is found."""
    per_host: int | None = Field(default=None, ge=1)
    """Neighbouring replicas that share a host, for hierarchical, a divisor of mesh.data; default: as the mesh lies."""
    across: Literal["ring", "tree", "halving_doubling"] = "ring"
    """The all-reduce that hierarchical uses between hosts: ring, tree or halving_doubling."""
    table: str | None = Field(default=None, min_length=1)
    """JSON file that `jaxpar bench collectives` wrote, by which auto chooses; default: a latency-bandwidth model."""


class Source(Section):
    """Text or token files that are read as one."""

    paths: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(min_length=1)
    """Files or globs, at least one; {stdlib} stands for the folder of Python's own standard library."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the examples drawn from here, relative to the other sources, above 0."""


Sources = Annotated[tuple[Source, ...], BeforeValidator(_sources, json_schema_input_type=list[str | Source] | str)]


class DataConfig(Section):
    """What is read, and how it becomes tokens."""

    train: Sources = Field(min_length=1)
    """List of files or globs (together one source), or of {paths: [...], weight: ...} for a mixture."""
    validation: Annotated[float, Field(gt=0, le=0.5)] | Sources | None = None
    """Share of each training source held out from its end, in (0, 0.5], or a list like train; default: none."""
    tokenizer: str = Field(default="byte", min_length=1)
    """byte (256 bytes and an end of document), or the path of a Hugging Face tokenizer.json."""
    sequence_length: int = Field(ge=1)
    """Tokens that a sequence predicts, at least 1."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = "adamw"
    """The optimizer: adamw, lion, adafactor, muon or sgd."""
    learning_rate: float = Field(gt=0)
    """Highest learning rate, above 0."""
    schedule: Literal["constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay"] = "warmup_cosine"
    """Course of the learning rate: constant, warmup_cosine, warmup_linear or warmup_stable_decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of rising linearly from 0, at least 0."""
    decay_steps: int = Field(default=0, ge=0)
    """Step, counted from the first, at which the decay ends, above warmup_steps; default (0): train.steps."""
    decay_fraction: float = Field(default=0.1, gt=0, le=1)
    """Share of decay_steps that warmup_stable_decay spends on falling, in (0, 1]."""
    final_learning_rate_fraction: float = Field(default=0.1, ge=0, le=1)
    """Lowest learning rate after the decay, as a share of learning_rate, in [0, 1]."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment, in [0, 1)."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment, in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator, above 0."""
    momentum: float = Field(default_factory=lambda data: 0.95 if data["name"] == "muon" else 0.0, ge=0, lt=1)
    """Momentum of sgd and muon, in [0, 1); default: 0.95 for muon, else 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices, at least 0; norms and biases get none."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Largest global norm of the gradient, above 0; default: no clipping."""


class ParameterServerConfig(Section):
    """Servers that own the parameters, and workers that come and go; with `train.data_parallel: parameter_server`."""

    servers: int = Field(default=1, ge=1)
    """Processes that share parameters and optimizer state, at least 1 and at most one for each parameter array."""
    workers: int = Field(default=2, ge=1)
    """Processes that compute gradients, each on a mesh of its own, at least 1; each has one share of every batch."""
    mode: Literal["sync", "async"] = "sync"
    """sync (one update per step from all shares, equal to all-reduce) or async (each share's update as it comes)."""
    max_staleness: int = Field(default=4, ge=0)
    """Updates that async mode may have made since the parameters of a gradient were read, at least 0; an older gradient
    is refused."""
    min_workers: int = Field(default=1, ge=1)
    """Workers below which the run waits for others, from 1 to workers."""
    worker_timeout_seconds: float = Field(default=300.0, gt=0, le=86400)
    """Seconds without an answer after which a worker or server that has started counts as dead and is replaced, above 0
    and at most 86,400; at least the time of a share. A worker with two shares at a time, as in async mode with
    max_staleness ≥ 2 × workers - 1, has twice as long."""
    snapshot_every: int = Field(default=10, ge=1)
    """Steps between the servers' snapshots, to which all go back when one dies, at least 1."""
    ray_address: str | None = Field(default=None, min_length=1)
    """host:port of a Ray cluster to join; default: a Ray of this machine alone, started for the run."""


Dtype = Literal["float32", "bfloat16", "float64"]


class TrainConfig(Section):
    """Length, batch and arithmetic of a run."""

    steps: int = Field(ge=1)
    """Optimizer steps in all, at least 1."""
    global_batch: int = Field(ge=1)
    """Sequences per step over all devices, a multiple of mesh.data × parallel.microbatches."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of weights, data order and dropout, in [0, 2^31)."""
    data_parallel: Literal["all_reduce", "parameter_server"] = "all_reduce"
    """Who updates the parameters: all_reduce (every replica) or parameter_server (servers that own them)."""
    run_dir: str = Field(min_length=1)
    """Folder for config, metrics and checkpoints; a run that stands there is continued."""
    param_dtype: Dtype = "float32"
    """Type of the stored weights and the optimizer's state: float32, bfloat16 or float64."""
    compute_dtype: Dtype = "bfloat16"
    """Type of the arithmetic within layers: float32, bfloat16 or float64."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-partition in what is minimised, at least 0; the metric `z_loss`, no part of `loss`."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations on data.validation, at least 1; default: none."""
    eval_batches: int = Field(default=8, ge=1)
    """Global batches per evaluation, at least 1."""
    max_bad_steps: int = Field(default=5, ge=1)
    """Steps in a row with a non-finite loss or gradient after which the run stops, at least 1."""
    drift_check_every: int | None = Field(default=None, ge=1)
    """Steps between checks that replicas are bit for bit equal, at least 1; default: none."""
    drift_action: Literal["stop", "resynchronise"] = "stop"
    """What follows when they are not: stop, or resynchronise (the majority's values go to the others)."""


class CheckpointConfig(Section):
    """When the state is written."""

    every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints, at least 1; default: only at the end."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept, at least 1."""


class LogConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    every: int = Field(default=1, ge=1)
    """Steps between lines of metrics, at least 1."""
    tensorboard: bool = False
    """Whether to write TensorBoard files too: true or false (needs the tensorboard extra)."""
