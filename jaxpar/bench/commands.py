"""The commands of `jaxpar bench`. Each reads its config first, and imports JAX only when that is in order."""

from pathlib import Path
from typing import Annotated

import typer

from jaxpar.arguments import AsJson, ConfigFile, Overrides
from jaxpar.config import load_config

bench = typer.Typer(no_args_is_help=True, help="Measure jaxpar against plain JAX on this machine.")


@bench.command("step")
def bench_step(
    pairs: Annotated[int, typer.Option(min=1, help="Measurements of each program, alternating.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Steps in one measurement.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Compare our train step with a plain jit program of the same model, pair by pair."""
    from jaxpar.bench import step

    step.run(pairs=pairs, steps=steps, as_json=as_json)


@bench.command("pipeline")
def bench_pipeline(
    pairs: Annotated[int, typer.Option(min=1, help="Measurements of each program, alternating.")] = 5,
    memory: Annotated[bool, typer.Option("--memory", help="Instead, what each schedule takes; runs nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare our pipeline with a scanned GPipe and with data parallelism, pair by pair."""
    from jaxpar.bench import pipeline

    if memory:
        pipeline.run_memory(as_json=as_json)
    else:
        pipeline.run(pairs=pairs, as_json=as_json)


@bench.command("layers")
def bench_layers(
    config_file: ConfigFile,
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each layer.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure what each layer of a config's model costs on one device, for parallel.layer_costs."""
    config = load_config(config_file, overrides or ())
    from jaxpar import mesh
    from jaxpar.bench import layers

    config, _ = mesh.start(config)
    layers.run(config, repeats=repeats, as_json=as_json)


@bench.command("collectives")
def bench_collectives(
    config_file: ConfigFile,
    overrides: Overrides = None,
    axis: Annotated[
        str | None, typer.Option(help="data, pipe or tensor; default: each that has several devices.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Bytes of the buffers, as in 1K,64K,1M; default: 1 KB and its doubles.")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=1024, help="Bytes of the largest buffer; default: what fits, 4 MB on CPU.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of which the median counts.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Write all rows here (JSON), for grad_reduce.table.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bus bandwidths into this .png, .svg or .pdf.")] = None,
    links: Annotated[
        Path | None, typer.Option(help="Measure each link over data, too, and write a matrix for grad_reduce.links.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure every all-reduce algorithm over sizes and mesh axes, as nccl-tests does."""
    config = load_config(config_file, overrides or ())
    from jaxpar import mesh
    from jaxpar.bench import collectives

    config, devices = mesh.start(config)
    collectives.run(
        config,
        devices,
        axis=axis,
        sizes=sizes,
        max_bytes=max_bytes,
        repeats=repeats,
        output=output,
        plot=plot,
        links=links,
        as_json=as_json,
    )


@bench.command("parameter-server")
def bench_parameter_server(
    config_file: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="The config file (YAML); default: a model that keeps servers busy."),
    ] = None,
    overrides: Overrides = None,
    servers: Annotated[str, typer.Option(help="Numbers of servers.")] = "1,2,3",
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,2,4",
    mode: Annotated[str, typer.Option(help="sync, async or both.")] = "both",
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in each case.")] = 20,
    output: Annotated[Path | None, typer.Option(help="Write all rows here (JSON).")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speed, work and traffic into this .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure parameter servers over numbers of servers and workers, next to all-reduce."""
    if config_file and "=" in config_file:  # there is no file, only changes
        config_file, overrides = None, [config_file, *(overrides or ())]
    config = load_config(config_file, overrides or ()) if config_file else None
    from jaxpar.bench import parameter_server

    parameter_server.run(
        config or parameter_server.own_config(overrides or ()),
        servers=servers,
        workers=workers,
        mode=mode,
        steps=steps,
        output=output,
        plot=plot,
        as_json=as_json,
    )


@bench.command("matmul")
def bench_matmul(
    output: Annotated[Path | None, typer.Option(help="Write a cluster file (.yaml) for jaxpar plan here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine's device multiplies matrices of each size, for jaxpar plan."""
    from jaxpar.bench import matmul

    matmul.run(output=output, as_json=as_json)
