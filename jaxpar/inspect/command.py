"""What `jaxpar compile` does."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from jaxpar.config import Config, InputError
from jaxpar.inspect import printing
from jaxpar.inspect.compiling import compile_step


def run(
    config: Config,
    target: str | None,
    *,
    hlo_file: Path | None = None,
    plot_file: Path | None = None,
    compiler_flags: Mapping[str, str] | None = None,
    as_json: bool = False,
) -> bool:
    """Compile, write the files that are asked for, print the report, and say whether it fits."""
    if plot_file and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib, which is not installed: pip install 'jaxpar[plot]'.")
    for file in (hlo_file, plot_file):
        if file and not file.parent.is_dir():
            raise InputError(f"{file}: there is no folder {file.parent}.")
    with Console(stderr=True).status("compiling"):
        step = compile_step(config, target, compiler_flags=compiler_flags)
    if hlo_file:
        hlo_file.write_text(step.compiled.as_text() or "", encoding="utf-8")
    if plot_file:
        from jaxpar.inspect.plot import draw

        draw(step.report, step.compiled, step.program.mesh, plot_file)
    if as_json:
        print(json.dumps(step.report.as_dict()))
    else:
        printing.show(step.report)
    return step.report.fits
