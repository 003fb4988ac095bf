"""Paths and globs to a list of files that does not depend on the order in which a file system lists them."""

import difflib
import glob
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from jaxpar.config import InputError


def expand(inputs: Iterable[str], key: str) -> list[Path]:
    """The files that `inputs` name: in the order given, each glob's matches sorted, no file twice.

    `{stdlib}` stands for the folder of Python's own library, `~` for the home folder, `**` for any number of
    folders. A glob passes over names that start with a dot, as in a shell, and over folders.

    Args:
        inputs: Paths and globs.
        key: What to call them in an error, like `data.train[0]`.

    Returns:
        Existing files.

    Raises:
        InputError: A path does not exist or is a folder, or a glob matches no file.

    Example:
        >>> [path.name for path in expand(["{stdlib}/[ij]son/__init__.py", "{stdlib}/json/*coder.py"], "inputs")]
        ['__init__.py', 'decoder.py', 'encoder.py']
    """
    files: dict[Path, None] = {}  # a set that keeps its order
    for text in inputs:
        path = Path(text.replace("{stdlib}", sysconfig.get_path("stdlib"))).expanduser()
        if path.is_dir():
            raise InputError(
                f"{key}: {text} is a folder. Name its files with a glob, like {text.rstrip('/')}/**/*.txt."
            )
        if path.is_file():  # before globbing: a name may hold brackets
            files[path] = None
            continue
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise InputError(f"{key}: {_nothing_there(text, path)}")
        files.update(dict.fromkeys(matches))
    return list(files)


def _nothing_there(text: str, path: Path) -> str:
    """Why `path` names no file, and the nearest name that exists."""
    shown = text if text == str(path) else f"{text} (that is {path})"
    if glob.has_magic(str(path)):
        return f"the glob {shown} matches no file. `**` is needed to look into sub-folders."
    if not path.parent.is_dir():
        return f"there is no file {shown}: the folder {path.parent} does not exist."
    near = difflib.get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), n=1)
    return f"there is no file {shown}." + (f" Did you mean {path.parent / near[0]}?" if near else "")
