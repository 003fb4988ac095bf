"""The best layout of a plan as a config that `jaxpar train`, `compile` and `verify` take as it is."""

import re
from collections.abc import Sequence

from jaxpar.config import Config
from jaxpar.config.yaml12 import dump
from jaxpar.pipeline.partition import Partition
from jaxpar.planner.attention import COMPILED_WITH, attention_in_words
from jaxpar.planner.model import Given
from jaxpar.planner.output import PLAN, sealed
from jaxpar.planner.plan import Plan
from jaxpar.planner.price import Price
from jaxpar.planner.words import MEMORY, gigabytes, mesh
from jaxpar.quantities import seconds


def config_of(base: Config, price: Price) -> Config:
    """A config with the layout of a price.

    Args:
        base: everything else.
        price: whose layout is put in.
    """
    layout, values = price.layout, base.model_dump(mode="json")
    values["mesh"] = {"data": layout.data, "pipe": layout.pipe, "tensor": layout.tensor}
    for name in ("schedule", "chunks", "microbatches", "remat", "sequence_parallel", "zero"):
        values["parallel"][name] = getattr(layout, name)
    values["grad_reduce"]["algorithm"] = layout.algorithm
    return Config.from_dict(values, "the plan")


def text(plan: Plan, given: Given, command: str) -> str:
    """The file: comments with the command and what to expect, then the whole config.

    Args:
        plan: in which something fits.
        given: what was planned.
        command: that made the plan.
    """
    assert plan.best, "a plan in which nothing fits is not written"
    config = config_of(given.config, plan.best)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in _comment(plan, plan.best, config, given, command))
    sections = re.sub(r"^(?=\w)", "\n", dump(config.model_dump(mode="json", exclude_none=True)), flags=re.MULTILINE)
    return sealed(comment + sections, PLAN)


def _comment(plan: Plan, price: Price, config: Config, given: Given, command: str) -> Sequence[str]:
    cluster, work, layout = plan.cluster, plan.workload, price.layout
    parts = [f"{name} {gigabytes(getattr(price.memory, part))}" for part, name in MEMORY.items()]
    lines = [
        f"The fastest layout on {cluster.hosts} × {cluster.per_host} {cluster.device.name}, planned, not measured, by",
        "",
        f"  {command}",
        "",
        f"Expect: {price.tokens_per_second:,.0f} tokens/s, {seconds(price.time.total)} a step, MFU {price.mfu:.1%}.",
        f"Memory: {gigabytes(price.memory.total)} of {gigabytes(cluster.usable_bytes)} per device:",
        f"  {', '.join(parts)}.",
        f"Priced for jax {plan.jax}, with {attention_in_words(plan.model, work)}.",
        *([f"  {COMPILED_WITH}"] if work.attention == "flash" else []),
        f"Devices: {mesh(layout)} = {layout.devices}.",
        f"Batch: {config.batch_derivation()};",
        f"  {work.global_batch:,} × {work.sequence_length:,} = {work.tokens_per_step:,} tokens a step.",
    ]
    if layout.pipe > 1:
        lines.append(f"Layers: {Partition(price.counts, layout.pipe)}.")
    if given.filled_in:
        lines.append(f"The model came without {', '.join(given.filled_in)}: filled in, change what you need.")
    lines += [f"Note: {note}" for note in plan.notes]
    return lines
