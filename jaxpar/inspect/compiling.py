"""Compiling a config's real train step without making weights, for this machine or for one that is not here."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar import mesh as meshes
from jaxpar.config import Config, InputError
from jaxpar.inspect.summary import Report, report
from jaxpar.inspect.targets import compiler_options, parse_target, target_mesh
from jaxpar.mesh import shard_bytes
from jaxpar.step import MakeModel, Program, abstract_batch, build


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step.

    Attributes:
        program: the functions that were built.
        compiled: its `train_step`. For a GPU that is not here it can be read and not run.
        report: what it does.
    """

    program: Program
    compiled: jax.stages.Compiled
    report: Report


def place(config: Config, target: str | None) -> tuple[Config, Mesh]:
    """The config with its mesh resolved, and the mesh, on a target or on this machine's devices.

    Raises:
        InputError: when the target is not known, cannot be compiled for, or is not filled by the mesh.
    """
    if target is None:
        return meshes.start(config)
    wanted = parse_target(target)
    config = config.resolve_mesh(wanted.devices)
    if config.mesh.devices != wanted.devices:
        raise InputError(
            f"mesh.devices = {config.mesh.devices}, but {target} has {wanted.devices} devices, and all of a target are "
            f"used. Set mesh.devices to {wanted.devices}, or leave it out."
        )
    mesh = target_mesh(wanted, config.mesh)
    meshes.use_config_dtypes(config)
    return config, mesh


def compile_step(
    config: Config,
    target: str | None = None,
    *,
    make_model: MakeModel | None = None,
    compiler_flags: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compile a config's train step from shapes alone, and report on it.

    Args:
        config: as loaded; an axis of -1 is filled in.
        target: `h100:8`, `h100:8x8`, `a100:8`, `cpu:8`, ...; None: the devices of this machine.
        make_model: builds the model; by default the config's own.
        compiler_flags: XLA options on top of those that the target needs.

    Raises:
        InputError: see `place`.

    Example:
        >>> config = Config.from_yaml_text('''
        ... model: {architecture: llama, vocab_size: 257, hidden_size: 16, intermediate_size: 32,
        ...         num_hidden_layers: 2, num_attention_heads: 4}
        ... mesh: {data: 2, tensor: 4}
        ... data: {train: unused, sequence_length: 8}
        ... optimizer: {learning_rate: 6e-4}
        ... train: {steps: 1, global_batch: 2, run_dir: unused, compute_dtype: float32}
        ... ''')
        >>> found = compile_step(config, "cpu:8").report
        >>> [(row.op, row.buffer_bytes_per_step) for row in found.collectives if row.axes == ("data",)]
        [('all-reduce', 17736)]
        >>> found.memory.gradients_bytes  # reduced once a step; loss and token count travel with them, 4 bytes each
        17728
    """
    config, mesh = place(config, target)
    notes: tuple[str, ...] = ()
    if target and mesh.devices.flat[0].platform != "cpu" and config.model.attn_implementation != "xla":
        # cuDNN's graphs are built by the library itself, on the GPU.
        model = config.model.model_copy(update={"attn_implementation": "xla"})
        config = config.model_copy(update={"model": model})
        notes = ("attention is XLA's here: cuDNN's, which a run may use, needs less memory and cannot be compiled for",)
    program = build(config, mesh, make_model)
    if config.grad_reduce.algorithm == "auto" and config.mesh.data > 1:
        notes += (f"gradients are reduced by {program.grad_reduce.reason}",)
    batch = abstract_batch(config, program)
    start = time.monotonic()
    lowered = program.train_step.lower(program.abstract_state, batch)
    traced = time.monotonic()
    options = compiler_options(parse_target(target) if target else None) | dict(compiler_flags or {})
    compiled = lowered.compile(compiler_options=options)
    compiled_at = time.monotonic()
    tokens = math.prod(batch["tokens"].shape)
    found = report(
        compiled,
        mesh,
        target=target,
        memory_parts=state_bytes(program, batch),
        flops_per_step=tokens * program.facts.flops_per_token,
        trace_seconds=traced - start,
        compile_seconds=compiled_at - traced,
        notes=notes,
    )
    return CompiledStep(program, compiled, found)


def state_bytes(program: Program, batch: Any) -> dict[str, int]:
    """What parameters, optimizer, batch and gradients take on one device, from their shapes and layouts."""
    state = program.abstract_state
    return {
        "parameters_bytes": shard_bytes(state.params),
        "optimizer_bytes": shard_bytes(state.opt_state),
        "batch_bytes": shard_bytes(batch),
        "gradients_bytes": shard_bytes(program.abstract_grads),
    }
