"""What `jaxpar plan --fit` does: from measured layouts to a file that `--cluster` takes."""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxpar.config import InputError, ModelConfig
from jaxpar.planner.calibrate import EAGER, FACTORS, Evaluation, evaluate, fit, told
from jaxpar.planner.cluster import Cluster, parse_cluster
from jaxpar.planner.measured import STUDY, read_rows
from jaxpar.planner.output import CLUSTER, check_cluster_file, sealed
from jaxpar.planner.systems import SYSTEMS


def run(
    measured: Path,
    cluster: str,
    output: Path,
    *,
    system: str = "jaxpar",
    sequence_length: int = 4096,
    models: Mapping[str, ModelConfig] = STUDY,
) -> tuple[Cluster, Evaluation]:
    """Fit, write the file, and print how near the fit comes.

    Args:
        measured: a CSV file, see `jaxpar.planner.measured`.
        cluster: the machine that was measured, as `parse_cluster` takes it.
        output: the YAML file to write.
        system: whose steps were measured, a name in `SYSTEMS`.
        sequence_length: in tokens, of all runs.
        models: by the names in the file.

    Raises:
        InputError: for everything wrong in the input.
    """
    if system not in SYSTEMS:
        near = difflib.get_close_matches(system, SYSTEMS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise InputError(f"system {system} is not known: must be one of {', '.join(SYSTEMS)}.{hint}")
    check_cluster_file(output)
    if output.exists() and os.path.exists(cluster) and output.samefile(cluster):
        raise InputError(f"--output {output}: is the --cluster itself, which stays as it is. Write to another file.")
    start = parse_cluster(cluster)
    rows = read_rows(measured, models, sequence_length=sequence_length, per_host=start.per_host)
    if not any(row.seconds for row in rows):
        raise InputError(f"--fit {measured}: no run has tok_s_gpu, so that there is nothing to fit to.")
    given = start.efficiency
    if SYSTEMS[system] is not None:
        start = replace(start, efficiency=EAGER)
    factors = told(rows, start, SYSTEMS[system])
    untold = {name: getattr(given, name) for name in FACTORS if name not in factors}
    start = replace(start, efficiency=replace(start.efficiency, **untold))
    found = fit(rows, start, SYSTEMS[system], factors)
    judged = evaluate(rows, found, SYSTEMS[system])
    comment = (
        f"# {', '.join(factors)}: fitted by `jaxpar plan --fit` to {judged.rows} runs of {system} in {measured.name}.\n"
        f"# Error of tokens per second: {judged.median_error:.1%} in the median; {judged.held_up:.0%} of the runs took "
        f"over twice as long as predicted, {_others(judged)}.\n"
    )
    if untold:
        comment += f"# {', '.join(untold)}: as given; no run depends on them.\n"
    output.write_text(sealed(comment + found.to_yaml(), CLUSTER), encoding="utf-8")
    show(found, judged, output, tuple(untold))
    return found, judged


def _others(judged: Evaluation) -> str:
    """Of the runs that nothing held up."""
    if judged.held_up == 1:
        return "and there are no others"
    return f"the others' mean error is {judged.mean_error_of_others:.1%}"


def show(found: Cluster, judged: Evaluation, output: Path, untold: Sequence[str] = ()) -> None:
    """Print factors and errors."""
    console = Console()
    console.print("  ".join(f"{name} {getattr(found.efficiency, name):.4g}" for name in FACTORS if name not in untold))
    if untold:
        console.print(f"no run depends on {', '.join(untold)}: as given")
    table = Table(title=f"{judged.rows} measured runs")
    for column in ("model", "hosts", "runs", "mean error", "Kendall's τ", "regret"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for cell in judged.cells:
        numbers = f"{cell.error:.1%}", f"{cell.tau:.2f}", f"{cell.regret:.1%}"
        table.add_row(cell.name, str(cell.hosts), str(cell.rows), *numbers)
    console.print(table)
    console.print(
        f"error of tokens per second: median {judged.median_error:.1%}, mean {judged.mean_error:.1%}, 90th percentile "
        f"{judged.p90_error:.1%}; {judged.held_up:.1%} of the runs took over twice as long as predicted, "
        f"{_others(judged)}. {judged.impossible:.1%} are called impossible."
    )
    console.print(f"written to {output}")
