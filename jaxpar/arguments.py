"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The config file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the config, for instance train.steps=100."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
