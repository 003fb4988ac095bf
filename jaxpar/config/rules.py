"""The rules between keys of a config, as equations, with the nearest legal choices when one fails.

Rules about an axis of -1 wait until the axis is known (`Config.resolve_mesh`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxpar.config.architectures import ARCHITECTURES
from jaxpar.config.nearest import divisors, multiples, nearest

if TYPE_CHECKING:
    from jaxpar.config.root import Config
    from jaxpar.config.sections import MeshConfig

BYTE_VOCAB_SIZE = 257
"""Tokens of the byte tokenizer: 256 bytes and the end of a document."""


def open_axis(mesh: MeshConfig, devices: int) -> dict[str, int]:
    """The axis that is -1 with the size it gets out of `devices`; empty when there is none or it does not divide."""
    sizes = {"data": mesh.data, "pipe": mesh.pipe, "tensor": mesh.tensor}
    open_names = [name for name, size in sizes.items() if size == -1]
    rest = math.prod(size for size in sizes.values() if size != -1)
    if len(open_names) != 1 or rest == 0 or devices % rest:
        return {}
    return {open_names[0]: devices // rest}


def problems(config: Config) -> list[str]:
    """One line for each broken rule: the failing equation with its keys and values, why, and the ways out."""
    mesh = list(_mesh(config))
    sizes = (
        [] if mesh else [*_tensor(config), *_pipeline(config), *_batch(config), *_grad_reduce(config)]
    )  # on an impossible mesh they would mean nothing
    others = (_parameter_server, _drift, _optimizer, _data)
    return [*_model(config), *mesh, *sizes, *(line for rule in others for line in rule(config))]


def _indivisible(left: str, right: str, values: tuple[int, int], why: str, ways: str) -> Iterator[str]:
    """The line for `left % right == 0`, when that fails for their values; `why` it must hold, and the `ways` out."""
    if remainder := values[0] % values[1]:
        yield f"{left} % {right} = {remainder}, must be 0: {why}. Use {ways}."


def _model(config: Config) -> Iterator[str]:
    m = config.model
    heads, kv_heads, width = m.num_attention_heads, m.num_key_value_heads, m.hidden_size
    if "head_dim" not in m.model_fields_set:
        yield from _indivisible(
            f"model.hidden_size {width}",
            f"model.num_attention_heads {heads}",
            (width, heads),
            "model.head_dim is not given",
            f"hidden_size {multiples(width, heads)}, num_attention_heads {nearest(divisors(width), heads)}, or give "
            f"head_dim",
        )
    yield from _indivisible(
        f"model.num_attention_heads {heads}",
        f"model.num_key_value_heads {kv_heads}",
        (heads, kv_heads),
        "every key and value head serves equally many query heads",
        f"num_key_value_heads {nearest(divisors(heads), kv_heads)}",
    )
    if m.traits.rotary:
        yield from _indivisible(
            f"model.head_dim {m.head_dim}",
            "2",
            (m.head_dim, 2),
            "rotary positions turn pairs",
            f"head_dim {multiples(m.head_dim, 2)}",
        )
    elif m.rope_scaling:
        rotary = ", ".join(name for name, traits in ARCHITECTURES.items() if traits.rotary)
        yield (
            f"model.rope_scaling is given, but model.architecture {m.architecture} learns a table of positions. "
            f"Leave rope_scaling out, or use an architecture with rotary positions: {rotary}."
        )
    if m.rope_scaling and m.rope_scaling.low_freq_factor >= m.rope_scaling.high_freq_factor:
        yield (
            f"model.rope_scaling.low_freq_factor {m.rope_scaling.low_freq_factor} < high_freq_factor "
            f"{m.rope_scaling.high_freq_factor} does not hold. Llama 3 has 1.0 and 4.0."
        )
    if config.data.sequence_length > m.max_position_embeddings:
        yield (
            f"data.sequence_length {config.data.sequence_length} ≤ model.max_position_embeddings "
            f"{m.max_position_embeddings} does not hold. Use sequence_length {m.max_position_embeddings} or less, or a "
            f"larger max_position_embeddings (or leave it out)."
        )
    if m.attn_implementation == "cudnn" and config.train.compute_dtype != "bfloat16":
        yield (
            f"model.attn_implementation cudnn computes in bfloat16, but train.compute_dtype is "
            f"{config.train.compute_dtype}. Use compute_dtype bfloat16, or attn_implementation xla."
        )


def _mesh(config: Config) -> Iterator[str]:
    m = config.mesh
    sizes = {"data": m.data, "pipe": m.pipe, "tensor": m.tensor}
    for name in (name for name, size in sizes.items() if size == 0):
        yield f"mesh.{name} = 0, must be at least 1, or -1 for the rest of the devices."
    open_names = [name for name, size in sizes.items() if size == -1]
    if len(open_names) > 1:
        yield f"mesh.{' and mesh.'.join(open_names)} are -1, but only one axis can be the rest of the devices. Set one."
    if m.devices is None or 0 in sizes.values() or len(open_names) > 1:
        return
    known = {name: size for name, size in sizes.items() if size != -1}
    product, written = math.prod(known.values()), " × ".join(f"mesh.{name} {size}" for name, size in known.items())
    if open_names:
        yield from _indivisible(
            f"mesh.devices {m.devices}",
            f"({written})",
            (m.devices, product),
            f"mesh.{open_names[0]} is -1, the rest of the devices",
            f"a product of {nearest(divisors(m.devices), product)}, or devices {multiples(m.devices, product)}",
        )
    elif product != m.devices:
        fits = m.devices % (m.pipe * m.tensor) == 0
        axis = (
            f"data {m.devices // (m.pipe * m.tensor)}" if fits else f"tensor {nearest(divisors(m.devices), m.tensor)}"
        )
        yield (
            f"{written} = {product}, must be the number of devices, {m.devices}. Use {axis}, or -1 for one axis, which "
            f"takes the rest, or mesh.devices {product}."
        )


def _tensor(config: Config) -> Iterator[str]:
    m, pipe, tensor = config.model, config.mesh.pipe, config.mesh.tensor
    if tensor == -1:
        return
    heads, kv_heads = m.num_attention_heads, m.num_key_value_heads
    width, length = m.intermediate_size, config.data.sequence_length
    by = f"mesh.tensor {tensor}"
    yield from _indivisible(
        f"model.num_attention_heads {heads}",
        by,
        (heads, tensor),
        "heads are split over tensor",
        f"num_attention_heads {multiples(heads, tensor)}, or tensor {nearest(divisors(heads), tensor)}",
    )
    if kv_heads % tensor and tensor % kv_heads:
        legal = [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
        yield (
            f"model.num_key_value_heads {kv_heads} % mesh.tensor {tensor} = {kv_heads % tensor} and "
            f"{tensor} % {kv_heads} = {tensor % kv_heads}, one of them must be 0: key and value heads are split over "
            f"tensor, or each is copied to equally many devices. Use num_key_value_heads "
            f"{multiples(kv_heads, tensor)}, or tensor {nearest(legal, tensor)}."
        )
    yield from _indivisible(
        f"model.intermediate_size {width}",
        by,
        (width, tensor),
        "the feed-forward layer is split over tensor",
        f"intermediate_size {multiples(width, tensor)}, or tensor {nearest(divisors(width), tensor)}",
    )
    yield from _indivisible(
        f"model.vocab_size {m.vocab_size} padded to a multiple of model.vocab_multiple {m.vocab_multiple}: "
        f"{m.padded_vocab_size}",
        f"(mesh.pipe {pipe} × {by})",
        (m.padded_vocab_size, pipe * tensor),
        "embedding and head are split over both axes",
        f"vocab_multiple {multiples(m.vocab_multiple, pipe * tensor)}",
    )
    if config.parallel.sequence_parallel:
        yield from _indivisible(
            f"data.sequence_length {length}",
            by,
            (length, tensor),
            "parallel.sequence_parallel splits the sequence over tensor",
            f"sequence_length {multiples(length, tensor)}, tensor {nearest(divisors(length), tensor)}, or "
            f"sequence_parallel false",
        )


def _pipeline(config: Config) -> Iterator[str]:
    layers, pipe, chunks = config.model.num_hidden_layers, config.mesh.pipe, config.parallel.chunks
    costs = config.parallel.layer_costs
    if costs and len(costs) != layers:
        yield f"parallel.layer_costs has {len(costs)} numbers, must be one for each of num_hidden_layers {layers}."
    if pipe == 1 and chunks > 1:
        yield f"parallel.chunks {chunks} with mesh.pipe 1: there are no stages to divide. Use chunks 1, or more stages."
    elif pipe > 0 and pipe * chunks > layers:
        most = f"chunks {layers // pipe}" if layers >= pipe else f"pipe {layers}"
        yield (
            f"mesh.pipe {pipe} × parallel.chunks {chunks} = {pipe * chunks} ≤ model.num_hidden_layers {layers} does "
            f"not hold: every chunk has a layer. Use {most} or less, or more layers."
        )


def _batch(config: Config) -> Iterator[str]:
    batch, data, microbatches = config.train.global_batch, config.mesh.data, config.parallel.microbatches
    if data == -1:
        return
    workers = config.workers
    ways = f"global_batch {multiples(batch, workers * data * microbatches)}"
    if batch % (workers * data) == 0:
        ways += f", or microbatches {nearest(divisors(batch // (workers * data)), microbatches)}"
    elif workers > 1 and batch % (data * microbatches) == 0:
        ways += f", or workers {nearest(divisors(batch // (data * microbatches)), workers)}"
    shares = f"parameter_server.workers {workers} × " if workers > 1 else ""
    yield from _indivisible(
        f"train.global_batch {batch}",
        f"({shares}mesh.data {data} × parallel.microbatches {microbatches})",
        (batch, workers * data * microbatches),
        "every microbatch of every replica has equally many sequences",
        ways,
    )


def _parameter_server(config: Config) -> Iterator[str]:
    p, mesh = config.parameter_server, config.mesh
    if p.min_workers > p.workers:
        yield (
            f"parameter_server.min_workers {p.min_workers} ≤ parameter_server.workers {p.workers} does not hold: the "
            f"run would wait for ever. Use min_workers {p.workers} or less."
        )
    if config.train.data_parallel == "parameter_server" and -1 in (mesh.data, mesh.pipe, mesh.tensor):
        yield (
            "mesh has an axis of -1 with train.data_parallel parameter_server: it is each worker's mesh, and a worker "
            "takes as many devices as it says. Give all three sizes."
        )
    if config.train.data_parallel == "parameter_server" and config.train.drift_check_every:
        yield (
            f"train.drift_check_every {config.train.drift_check_every} with train.data_parallel parameter_server: "
            f"workers keep no state that could drift, the servers' is the only one. Leave drift_check_every out."
        )


def _grad_reduce(config: Config) -> Iterator[str]:
    g, p, data = config.grad_reduce, config.parallel, config.mesh.data
    if g.schedule == "overlapped" and config.mesh.pipe > 1:
        yield (
            f"grad_reduce.schedule overlapped with mesh.pipe {config.mesh.pipe}: the first stage has its gradients "
            f"only with the last tick, and in one program all stages reduce at the same time, so that nothing would be "
            f"hidden. Use schedule end, or pipe 1."
        )
    if p.zero == 3 and config.mesh.pipe > 1 and p.idle == "skip" and g.algorithm != "native":
        yield (
            f"parallel.idle skip with parallel.zero 3 and grad_reduce.algorithm {g.algorithm}: its permutes are joined "
            f"by all devices of a mesh, also by stages that skip the work they belong to. Use idle auto or compute, or "
            f"algorithm native."
        )
    readers = {"order": ("ring", "auto"), "links": ("ring", "auto"), "per_host": ("hierarchical", "auto")}
    for key, algorithms in (readers | {"table": ("auto",)}).items():
        if getattr(g, key) is not None and g.algorithm not in algorithms:
            yield (
                f"grad_reduce.{key} is given, but grad_reduce.algorithm {g.algorithm} does not read it. Use algorithm "
                f"{' or '.join(algorithms)}, or leave {key} out."
            )
    if g.across != "ring" and g.algorithm not in ("hierarchical", "auto"):
        yield (
            f"grad_reduce.across {g.across} is given, but grad_reduce.algorithm {g.algorithm} does not read it. Use "
            f"algorithm hierarchical or auto, or leave across out."
        )
    if g.order is not None and g.links is not None:
        yield "grad_reduce.order and grad_reduce.links are both given, but either gives the ring's order. Give one."
    if data == -1:
        return
    if g.order is not None and sorted(g.order) != list(range(data)):
        missing = sorted(set(range(data)) - set(g.order))
        wrong = sorted({i for i in g.order if i >= data or g.order.count(i) > 1})
        lacks = [f"lacks {', '.join(map(str, missing))}"] if missing else []
        has = [f"has {', '.join(map(str, wrong))}, too large or more than once"] if wrong else []
        yield (
            f"grad_reduce.order {list(g.order)} must hold each number from 0 to mesh.data - 1 = {data - 1} once, but "
            f"it {' and '.join(lacks + has)}. Use {list(range(data))} in another order."
        )
    if g.per_host is not None:
        yield from _indivisible(
            f"mesh.data {data}",
            f"grad_reduce.per_host {g.per_host}",
            (data, g.per_host),
            "every host holds equally many replicas",
            f"per_host {nearest(divisors(data), g.per_host)}",
        )


def _drift(config: Config) -> Iterator[str]:
    if config.train.drift_action != "stop" and not config.train.drift_check_every:
        yield (
            f"train.drift_action {config.train.drift_action} without train.drift_check_every: replicas are never "
            f"compared. Set drift_check_every, for instance to 100, or leave drift_action out."
        )


def _optimizer(config: Config) -> Iterator[str]:
    o = config.optimizer
    if o.schedule == "constant":
        return
    end, key = ("train.steps", "steps") if o.decay_steps == config.train.steps else ("optimizer.decay_steps",) * 2
    if o.schedule == "warmup_stable_decay":
        falling, written = o.decay_fraction * o.decay_steps, f"decay_fraction {o.decay_fraction} × {key}"
        enough = math.ceil(o.warmup_steps / (1 - o.decay_fraction)) if o.decay_fraction < 1 else None
    else:
        falling, written = 1, "1"
        enough = o.warmup_steps + 1
    if o.warmup_steps + falling > o.decay_steps:
        more = f", or {key} {enough} or more" if enough else ""
        yield (
            f"optimizer.warmup_steps {o.warmup_steps} + {written} ≤ {end} {o.decay_steps} does not hold. Use "
            f"warmup_steps {math.floor(o.decay_steps - falling)} or less{more}."
        )


def _data(config: Config) -> Iterator[str]:
    if config.data.tokenizer == "byte" and config.model.vocab_size < BYTE_VOCAB_SIZE:
        yield (
            f"model.vocab_size {config.model.vocab_size} ≥ {BYTE_VOCAB_SIZE} does not hold: data.tokenizer byte has "
            f"256 bytes and an end of document. Use vocab_size {BYTE_VOCAB_SIZE}."
        )
    if config.train.eval_every and config.data.validation is None:
        yield (
            f"train.eval_every = {config.train.eval_every}, but data.validation is not given. Set data.validation, for "
            f"instance to 0.05 (a twentieth of each training source), or leave eval_every out."
        )
