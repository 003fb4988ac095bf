"""What a run says at its start: how it is laid out, what that costs, and what was chosen and why."""

import math
from collections.abc import Iterator

import jax
from rich.filesize import decimal

from jaxpar.config import Config, choose_implementation
from jaxpar.data.sources import Data
from jaxpar.drift import DriftCheck
from jaxpar.gradients import layer_by_layer, partition_of
from jaxpar.mesh import DATA, shard_bytes
from jaxpar.models import Facts
from jaxpar.pipeline.schedules import make_schedule
from jaxpar.step import Program
from jaxpar.zero import REPLICATED_SHARE


def start_report(
    config: Config, program: Program, data: Data, drift: DriftCheck | None, resumed: int | None
) -> Iterator[str]:
    """What a person wants to know before the first step, a line each."""
    mesh = program.mesh
    device = mesh.devices.flat[0]
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    processes = f"{jax.process_count()} process{'es' * (jax.process_count() > 1)}"
    yield f"mesh: {axes} = {mesh.size} devices ({device.device_kind}, {processes})"
    yield f"batch: {config.batch_derivation()}"
    if config.mesh.pipe > 1:
        schedule = make_schedule(
            config.parallel.schedule, config.mesh.pipe, config.parallel.microbatches, config.parallel.chunks
        )
        yield f"pipeline: {schedule.name}, bubble {schedule.bubble:.1%}; {partition_of(config)}"
    if config.mesh.data > 1:
        last = "as the last backward pass makes them" if layer_by_layer(config) else "at the end"
        when = "as each backward pass makes them" if config.parallel.zero == 3 else last
        yield f"gradients: reduced {when} by {program.grad_reduce.reason}"
    if config.parallel.zero and config.mesh.data == 1:
        yield f"ZeRO stage {config.parallel.zero}: there is one replica, nothing is split"
    elif config.parallel.zero:
        yield from zero_report(program)
    if drift:
        yield f"drift check: every {config.train.drift_check_every} steps, {drift}"
    yield from run_report(config, program.facts, data, device.platform, resumed)


def run_report(config: Config, facts: Facts, data: Data, platform: str, resumed: int | None) -> Iterator[str]:
    """The part that has nothing to do with the layout: data, model, where the run goes on."""
    yield from data.summary
    yield (
        f"model: {facts.name}, {facts.parameters:,} parameters in {config.train.param_dtype}, computed in "
        f"{config.train.compute_dtype}"
    )
    if facts.ours:
        kernel, reason = choose_implementation(config.model.attn_implementation, config.train.compute_dtype, platform)
        yield f"attention: {kernel} ({reason})"
    else:
        yield (
            f"MFU counts {facts.flops_per_token:,} operations a token: 6 for each weight in the blocks' matrices and "
            f"in a head of model.hidden_size {config.model.hidden_size} × model.vocab_size {config.model.vocab_size}"
        )
    if resumed is None:
        yield f"run: {config.train.run_dir}, from the start"
    elif resumed < config.train.steps:
        yield f"run: {config.train.run_dir}, continued after step {resumed}"
    else:
        yield f"run: {config.train.run_dir} has already done {resumed} steps; set train.steps higher to continue it"


def zero_report(program: Program) -> Iterator[str]:
    """What a ZeRO stage leaves on one device, and what it could not split."""
    state = program.abstract_state
    held = {"parameters": state.params, "gradients": program.abstract_grads, "optimizer": state.opt_state}
    sizes = ", ".join(f"{name} {decimal(shard_bytes(tree))}" for name, tree in held.items())
    yield f"ZeRO stage {program.zero.stage}: one device holds {sizes}"
    if whole := program.zero.replicated(state.params):
        total = sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(state.params))
        share = sum(whole.values()) / total
        names = ", ".join(f"{name} {decimal(size)}" for name, size in sorted(whole.items(), key=lambda item: -item[1]))
        warning = "warning: " if share > REPLICATED_SHARE else ""
        replicas = program.mesh.shape[DATA]
        yield (
            f"{warning}{share:.2%} of the parameters' bytes stay whole on every replica, having no free dim that "
            f"{replicas} divides: {names}"
        )
