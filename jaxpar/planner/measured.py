"""Measured layouts: what a fit learns from and a plan is judged by.

A CSV file has one line a run, with the columns

    model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,tok_s_gpu[,gpu_mem_gb]

`mbs` is the microbatch in sequences per replica, `grad_acc` the microbatches of a step, gbs = dp · mbs · grad_acc; an
empty `tok_s_gpu` means that the run did not fit or crashed. `model` is a name in `STUDY`, or one that is given.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config import InputError, ModelConfig
from jaxpar.planner.layout import Layout, Workload

COLUMNS = ("model", "nodes", "dp", "tp", "pp", "mbs", "grad_acc", "gbs", "zero", "tok_s_gpu")


def _llama(layers: int, width: int, heads: int, hidden: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=131072,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
    )


STUDY = {
    # Models of the benchmark in The Ultra-Scale Playbook (Hugging Face, 2025), trained with nanotron.
    "1B": _llama(16, 2048, 32, 8192, tied=True),
    "3B": _llama(28, 3072, 32, 8192, tied=True),
    "8B": _llama(32, 4096, 32, 14336, tied=False),
    "80B": _llama(80, 8192, 64, 28672, tied=False),
}


@dataclass(frozen=True)
class Row:
    """One measured run.

    Attributes:
        name: of the model.
        model: its sizes.
        hosts: number of hosts.
        layouts: the layout; several where the source leaves something open (the fastest that fits is taken).
        workload: batch and sequence length.
        seconds: of a step; None when it did not run.
        memory_gib: what it took, where that was measured.
    """

    name: str
    model: ModelConfig
    hosts: int
    layouts: tuple[Layout, ...]
    workload: Workload
    seconds: float | None
    memory_gib: float | None = None


def read_rows(
    path: str | Path,
    models: Mapping[str, ModelConfig] = STUDY,
    *,
    sequence_length: int = 4096,
    sequence_parallel: bool = True,
    per_host: int = 8,
) -> list[Row]:
    """Read a CSV file of measured layouts.

    Args:
        path: the file.
        models: by the names in the file.
        sequence_length: in tokens, of all runs.
        sequence_parallel: whether `tensor` splits activations between blocks, too.
        per_host: devices of each host.

    Raises:
        InputError: when the file cannot be read or lacks a column, or a line has an unknown model, no number, or a
            layout that cannot be.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            lines = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--fit {path}: cannot be read: {getattr(error, 'strerror', error)}.") from None
    if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
        raise InputError(f"--fit {path}: lacks {', '.join(missing)}. The columns are {', '.join(COLUMNS)}.")
    if not lines:
        raise InputError(f"--fit {path}: has columns and no run below them.")
    return list(_rows(str(path), lines, models, sequence_length, sequence_parallel, per_host))


def _rows(
    path: str,
    lines: list[dict[str, str]],
    models: Mapping[str, ModelConfig],
    length: int,
    sequence_parallel: bool,
    per_host: int,
) -> Iterator[Row]:
    for number, line in enumerate(lines, start=2):
        where = f"--fit {path}, line {number}"
        if line["model"] not in models:
            raise InputError(f"{where}: model {line['model']} is not known. Known: {', '.join(models)}.")
        hosts, data, tensor, pipe, b, M, batch, zero = (
            _whole(where, line, name) for name in ("nodes", "dp", "tp", "pp", "mbs", "grad_acc", "gbs", "zero")
        )
        if data * b * M != batch:
            raise InputError(f"{where}: dp {data} × mbs {b} × grad_acc {M} = {data * b * M}, must be gbs, {batch}.")
        rate, memory = _number(where, line, "tok_s_gpu"), _number(where, line, "gpu_mem_gb")
        devices = data * tensor * pipe
        if devices != hosts * per_host:
            raise InputError(
                f"{where}: dp {data} × tp {tensor} × pp {pipe} = {devices}, must be nodes {hosts} × {per_host} devices "
                f"of a host = {hosts * per_host}."
            )
        heads = models[line["model"]].num_attention_heads
        if heads % tensor:
            raise InputError(f"{where}: tp = {tensor}: must divide the {heads} heads of {line['model']}.")
        if zero > 3:
            raise InputError(f"{where}: zero = {zero}: must be 0, 1, 2 or 3.")
        split = sequence_parallel and tensor > 1
        yield Row(
            name=line["model"],
            model=models[line["model"]],
            hosts=hosts,
            layouts=(Layout(data, pipe, tensor, zero, microbatches=M, sequence_parallel=split),),
            workload=Workload(length, batch),
            seconds=batch * length / (rate * devices) if rate else None,
            memory_gib=memory,
        )


def _whole(where: str, line: Mapping[str, str], name: str) -> int:
    if line[name] is None:
        raise InputError(f"{where}: ends before {name}.")
    try:
        value = int(line[name])
    except ValueError:
        raise InputError(f"{where}: {name} = {line[name]}: must be a whole number.") from None
    if value < (0 if name == "zero" else 1):
        raise InputError(f"{where}: {name} = {value}: must be at least {0 if name == 'zero' else 1}.")
    return value


def _number(where: str, line: Mapping[str, str], name: str) -> float | None:
    text = line.get(name) or ""
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {name} = {text}: must be a number, or empty.") from None
    if not 0 < value < math.inf:
        raise InputError(f"{where}: {name} = {text}: must be above 0 and finite, or empty.")
    return value
