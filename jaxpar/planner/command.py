"""What `jaxpar plan` does."""

import importlib.util
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxpar.config import Config, InputError
from jaxpar.planner import explain, fitting, written
from jaxpar.planner.attention import COMPILED_WITH, attention_of
from jaxpar.planner.cluster import Cluster, parse_cluster
from jaxpar.planner.layout import Workload
from jaxpar.planner.limits import check_model, check_tokens
from jaxpar.planner.measured import STUDY
from jaxpar.planner.model import Given, count, read
from jaxpar.planner.output import PLAN, check_output, check_replaceable
from jaxpar.planner.plan import make_plan
from jaxpar.planner.space import Space

FOR_FITS = ("--system", "--output")
FOR_PLANS = ("--global-batch-tokens", "--top", "--tensor-across-hosts", "--plot", "--write", "--json")
"""Options that only one of the two modes reads."""


def run(
    model: str,
    cluster: str,
    *,
    global_batch_tokens: str | None = None,
    sequence_length: str | None = None,
    top: int = 10,
    tensor_across_hosts: bool = False,
    plot_file: Path | None = None,
    config_file: Path | None = None,
    as_json: bool = False,
    words: Sequence[str] = (),
) -> bool:
    """Plan, write the files that are asked for, print the plan, and say whether something fits.

    Args:
        model: a config, a Hugging Face config.json, or sizes.
        cluster: as `parse_cluster` takes it.
        global_batch_tokens: tokens of a step; None: the config's batch.
        sequence_length: tokens of a sequence; None: the config's or the model's.
        top: meshes that are listed.
        tensor_across_hosts: whether groups over `tensor` may span hosts.
        plot_file: a picture of the top layouts.
        config_file: a config with the best layout.
        as_json: print the plan as JSON.
        words: the command line, for the comment in the config.

    Raises:
        InputError: for everything wrong in the input.
    """
    _refuse(FOR_FITS, words, "is read with --fit MEASURED.csv alone. Leave it out, or add --fit.")
    _check_files(model, plot_file, config_file)
    machines = parse_cluster(cluster)
    given = read(model, count(sequence_length, "--seq") if sequence_length else None)
    check_model(given.config.model)
    wanted = count(global_batch_tokens, "--global-batch-tokens") if global_batch_tokens else None
    given = _with_batch(given, machines, wanted, tensor_across_hosts)
    workload = _workload(given.config)
    with Console(stderr=True).status("pricing layouts"):
        plan = make_plan(
            given.config,
            workload,
            machines,
            tensor_across_hosts=tensor_across_hosts,
            top=top,
            requested_tokens=wanted,
            notes=given.notes,
        )
    try:
        if plot_file:
            from jaxpar.planner.plot import draw

            draw(plan, plot_file)
        if config_file and plan.best:
            config_file.write_text(written.text(plan, given, shlex.join(words)), encoding="utf-8")
    except OSError as error:  # that it can be opened is known; the disk may be full
        raise InputError(f"{error.filename or 'the files asked for'}: cannot be written: {error.strerror}.") from None
    if as_json:
        print(plan.to_json())
        return plan.best is not None
    explain.show(plan)
    if plot_file:
        print(f"drawn in {plot_file}")
    if config_file:
        print(f"written to {config_file}" if plan.best else f"{config_file} is not written: nothing fits")
        if plan.best and workload.attention == "flash":
            print(COMPILED_WITH)
    return plan.best is not None


def fit(
    measured: Path,
    cluster: str,
    output: Path,
    *,
    model: str | None,
    sequence_length: str | None,
    system: str,
    words: Sequence[str] = (),
) -> None:
    """Fit a cluster's factors to measured layouts, write them, and say how well they predict the same runs.

    Args:
        measured: a CSV file, see `jaxpar.planner.measured`.
        cluster: that was measured.
        output: the .yaml file to write.
        model: the one that lines of the model `model` are about.
        sequence_length: tokens of a sequence, of all runs; None: 4096.
        system: whose programs were measured.
        words: the command line, in which options for plans are refused.

    Raises:
        InputError: for everything wrong in the input.
    """
    _refuse(FOR_PLANS, words, "is for plans: with --fit nothing is planned. Leave one of them out.")
    length = count(sequence_length, "--seq") if sequence_length else 4096
    models = STUDY | ({"model": read(model, length).config.model} if model else {})
    fitting.run(measured, cluster, output, system=system, sequence_length=length, models=models)


def _refuse(options: Sequence[str], words: Sequence[str], why: str) -> None:
    """Refuse the first of these options that the command line has."""
    given = {word.partition("=")[0] for word in words}
    for option in options:
        if option in given:
            raise InputError(f"{option} {why}")


def _workload(config: Config) -> Workload:
    train = config.train
    return Workload(
        config.data.sequence_length,
        train.global_batch,
        train.param_dtype,
        train.compute_dtype,
        config.optimizer.name,
        attention_of(config),
        config.grad_reduce.wire_dtype,
        config.parallel.layer_costs,
    )


def _with_batch(given: Given, cluster: Cluster, wanted: int | None, tensor_across_hosts: bool) -> Given:
    """The task with its global batch; tokens that are no whole number of sequences become the nearest that divides."""
    length = given.config.data.sequence_length
    if wanted is None:
        if given.filled_in:
            raise InputError("--global-batch-tokens is missing: the tokens of a step, for instance 4M.")
        return given
    check_tokens(max(wanted, length))
    sequences, over = divmod(wanted, length)
    notes = given.notes
    if over:
        space = Space(given.config, _workload(given.config), cluster)
        sequences = space.round_batch(wanted / length, inside_hosts=not tensor_across_hosts)
        notes += (
            f"{wanted:,} tokens are {wanted / length:,.2f} sequences of {length:,}; planned with {sequences:,} "
            f"sequences, {sequences * length:,} tokens, which {math.gcd(sequences, cluster.devices)} replicas divide.",
        )
    values = given.config.model_dump(mode="json")
    values["train"]["global_batch"] = sequences
    return Given(Config.from_dict(values), given.filled_in, notes)


def _check_files(model: str, plot_file: Path | None, config_file: Path | None) -> None:
    if plot_file:
        if importlib.util.find_spec("matplotlib") is None:
            raise InputError("--plot needs matplotlib, which is not installed: pip install 'jaxpar[plot]'.")
        if plot_file.suffix not in (".png", ".svg", ".pdf"):
            raise InputError(f"--plot {plot_file}: must end in .png, .svg or .pdf.")
        check_output("--plot", plot_file)
    if config_file:
        if os.path.exists(model) and config_file.exists() and config_file.samefile(model):
            raise InputError(
                f"--write {config_file}: is the MODEL itself, which stays as it is. Write to another file."
            )
        if plot_file and plot_file.resolve() == config_file.resolve():
            raise InputError(f"--write {config_file}: is the file of --plot, too. Name two files.")
        check_replaceable("--write", config_file, PLAN)
