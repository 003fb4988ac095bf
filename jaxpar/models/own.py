"""A user's own model by name, as commands take it."""

import difflib
import importlib
import sys
from typing import Any

from jaxpar.config import InputError
from jaxpar.models.check import MakeModel


def own_model(name: str) -> MakeModel:
    """What `MODULE:FUNCTION` names: a function or class that builds a `LanguageModel` from random number streams.

    The module is looked for in the current folder first, as Python does for a script in it.

    Raises:
        InputError: when it is not written so, or there is no such module or function.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise InputError(f"--model {name}: write MODULE:FUNCTION, for instance my_model:make_model.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"--model {name}: cannot import {module_name}: {error}.") from None
    if not callable(found := getattr(module, attribute, None)):
        kind = f"{attribute} is a {type(found).__name__}" if found is not None else f"there is no {attribute}"
        public = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        close = difflib.get_close_matches(attribute, public, n=1)
        instead = f" Did you mean {close[0]}?" if close else ""
        raise InputError(
            f"--model {name}: {kind} in {module_name}; a function of random number streams builds a model.{instead}"
        )
    return found
