"""The commands. Each reads and checks its input first, and imports JAX only when that is in order.

Exit codes: 0 fine; 1 the check that was asked for failed, or training stopped by itself; 2 the input was wrong;
130 interrupted.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxpar.arguments import AsJson, ConfigFile, Overrides
from jaxpar.bench.commands import bench
from jaxpar.config import CheckFailed, InputError, Stopped, json_schema, load_config

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(bench, name="bench")


@app.callback()
def _jaxpar() -> None:
    """Train transformer language models over a data × pipe × tensor mesh."""


@app.command()
def train(
    config_file: ConfigFile,
    overrides: Overrides = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Continue a run although its config was another.")
    ] = False,
) -> None:
    """Train a model, or continue the run that stands in train.run_dir."""
    config = load_config(config_file, overrides or ())
    if config.train.data_parallel == "parameter_server":
        from jaxpar.parameter_server import run

        run.train(config, accept_changes=accept_changes)
        return
    from jaxpar import mesh, trainer

    config, devices = mesh.start(config)
    trainer.train(config, devices, accept_changes=accept_changes)


@app.command()
def verify(
    config_file: ConfigFile,
    overrides: Overrides = None,
    float64: Annotated[bool, typer.Option("--float64", help="Store and compute in float64.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 3,
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own model: FUNCTION(rngs) builds it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a few steps and an evaluation of a config on its mesh with the same on one device."""
    dtypes = ["train.param_dtype=float64", "train.compute_dtype=float64"] if float64 else []
    config = load_config(config_file, [*(overrides or ()), *dtypes]).of_one_worker()
    from jaxpar import mesh, verify
    from jaxpar.models.own import own_model

    config, devices = mesh.start(config)
    make_model = own_model(model) if model else None
    if not verify.run(config, devices, make_model, steps=steps, as_json=as_json):
        raise typer.Exit(1)


@app.command("compile")
def compile_(
    config_file: ConfigFile,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option(help="Devices that need not be here: h100:8, h100:8x8 (8 hosts of 8), a100:8, cpu:8.")
    ] = None,
    hlo: Annotated[Path | None, typer.Option(help="Write the compiled program's text here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and timeline into this .png, .svg or .pdf.")] = None,
    xla: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A compiler option; may be given again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a config's train step and report memory, collectives and overlap; exit 1 if it does not fit."""
    config = load_config(config_file, overrides or ()).of_one_worker()
    flags = [flag.partition("=") for flag in xla or ()]
    if wrong := [name for name, equals, _ in flags if not equals]:
        raise InputError(f"--xla {wrong[0]}: write NAME=VALUE.")
    from jaxpar.inspect import command

    flags = {name: value for name, _, value in flags}
    if not command.run(config, target, hlo_file=hlo, plot_file=plot, compiler_flags=flags, as_json=as_json):
        raise typer.Exit(1)


@app.command("config")
def show_config(
    config_file: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The config file (YAML).")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of config files instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a config and print it with everything that follows from it filled in."""
    if schema:
        print(json.dumps(json_schema(), indent=2))
        return
    if config_file is None:
        raise InputError("jaxpar config needs a config file, or --schema.")
    config = load_config(config_file, overrides or ())
    if as_json:
        print(json.dumps(config.model_dump(mode="json"), indent=2))
        return
    if config.mesh.data > 0:
        print(f"# {config.batch_derivation()}")
    print(config.to_yaml(), end="")


@app.command()
def tokenize(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUTS...", help="Text files or globs; {stdlib} is Python's own library.")
    ],
    output: Annotated[Path, typer.Option(help="The token file to write.", show_default=False)],
    tokenizer: Annotated[str, typer.Option(help="byte, or the path of a Hugging Face tokenizer.json.")] = "byte",
    as_json: AsJson = False,
) -> None:
    """Turn text into a memory-mapped token file; an interrupted run continues where it was."""
    from jaxpar.data import tokenize

    _print_summary(tokenize.tokenize_files(inputs, output, tokenizer), as_json)


@app.command()
def schedule(
    stages: Annotated[int, typer.Option(help="Pipeline stages.", show_default=False)],
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.", show_default=False)],
    name: Annotated[str, typer.Option(help="gpipe or 1f1b; to look at only: zb-h1 or zb-h2.")] = "1f1b",
    chunks: Annotated[int, typer.Option(help="Model parts per stage; 2 or more interleave.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw into this .png, .svg or .pdf file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a pipeline schedule and print its bubble, live activations and messages."""
    from jaxpar.pipeline import report

    report.run(name, stages, microbatches, chunks, plot, as_json=as_json)


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A config (.yaml), a Hugging Face config.json, or sizes: "
            "layers=32,hidden=4096,heads=32,kv=8,ffn=14336,vocab=128256 (also head_dim=, tied=true, architecture=).",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Hosts × device × devices each, as 8xh100x8, or a cluster's YAML file.")
    ] = None,
    global_batch_tokens: Annotated[
        str | None, typer.Option(help="Tokens of a step, as 4M (M: 2^20) or 4_194_304; default: the config's batch.")
    ] = None,
    seq: Annotated[str | None, typer.Option(help="Tokens of a sequence; default: the config's, else 4096.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Meshes to list.")] = 10,
    tensor_across_hosts: Annotated[
        bool, typer.Option("--tensor-across-hosts", help="Let tensor groups span hosts.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and time into this .png, .svg or .pdf.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write a config with the best layout here; over an earlier one only.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Instead of planning, fit the cluster's factors to measured layouts (CSV).")
    ] = None,
    system: Annotated[
        str, typer.Option(help="With --fit: whose programs were measured, jaxpar, nanotron or megatron.")
    ] = "jaxpar",
    output: Annotated[Path | None, typer.Option(help="With --fit: the cluster file (.yaml) to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest layout for a model on a cluster, and say why the others lose; exit 1 if nothing fits."""
    if cluster is None:
        raise InputError("jaxpar plan needs --cluster, for instance --cluster 8xh100x8.")
    if fit or output:
        if fit is None or output is None or as_json:
            raise InputError("--fit MEASURED.csv needs --output HARDWARE.yaml, and the other way round; not --json.")
        from jaxpar.planner import command

        words = ["jaxpar", *sys.argv[1:]]
        command.fit(fit, cluster, output, model=model, sequence_length=seq, system=system, words=words)
        return
    if model is None:
        raise InputError("jaxpar plan needs MODEL: a config, a Hugging Face config.json, or sizes.")
    from jaxpar.planner import command

    found = command.run(
        model,
        cluster,
        global_batch_tokens=global_batch_tokens,
        sequence_length=seq,
        top=top,
        tensor_across_hosts=tensor_across_hosts,
        plot_file=plot,
        config_file=write,
        as_json=as_json,
        words=["jaxpar", *sys.argv[1:]],
    )
    if not found:
        raise typer.Exit(1)


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(summary) if as_json else "\n".join(f"{name}: {value}" for name, value in summary.items()))


def main() -> None:
    """Run the command line: what a user can put right ends in a paragraph, never in a traceback."""
    try:
        app(prog_name="jaxpar")
    except InputError as error:
        _fail("error", str(error), exit_code=2)
    except CheckFailed as error:
        _fail("stopped", str(error), exit_code=1)
    except SystemExit as stop:
        if stop.code == 130 and not isinstance(stop, Stopped):  # which has said more than this
            print("interrupted", file=sys.stderr)
        raise


def _fail(label: str, text: str, exit_code: int) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble((f"{label}: ", "bold red"), text)
    console = Console(stderr=True)
    console.print(line, soft_wrap=not console.is_terminal)  # in a file each line stays one line
    sys.exit(exit_code)


def command() -> None:
    """Run `main` as the whole process, and end it there when the input was wrong or it was interrupted.

    After a failed write Orbax's tasks are left over, and Python would print a traceback for each while it shuts down,
    below the paragraph that says what is wrong. And XLA crashes if Python shuts down while it compiles.
    """
    try:
        main()
    except SystemExit as stop:
        if stop.code in (2, 130):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(stop.code)
        raise


if __name__ == "__main__":
    command()
