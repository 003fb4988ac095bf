"""The errors that end in a readable paragraph, near names for a misspelt key, and plain words for pydantic's errors.

`keys` is everywhere the table of all legal dotted keys, as `known_keys` makes it from the config's class.
"""

import contextlib
import difflib
import json
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jaxpar.config import yaml12


class InputError(ValueError):
    """Something a user can put right. The CLI prints it as one readable paragraph and exits with 2."""


class CheckFailed(RuntimeError):
    """The work or check that was asked for failed on its own merits. The CLI prints the text and exits with 1."""


class Stopped(SystemExit):
    """A signal ended a run, which has saved its last step and said so; the code is 128 + the signal's number."""


PLAIN = {
    "int_type": "must be a whole number. ",
    "float_type": "must be a number. ",
    "bool_type": "must be true or false. ",
    "string_type": "must be text. ",
    "tuple_type": "must be a list. ",
    "model_type": "must be a section with keys of its own. ",
    "literal_error": "",  # the field's description lists the words
}
"""Pydantic's commonest error types in the words of somebody who writes YAML."""


def _parts(annotation: Any) -> Iterator[Any]:
    """The annotation and everything it is made of."""
    yield annotation
    for part in get_args(annotation) if get_origin(annotation) is not Literal else ():
        yield from _parts(part)


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """All dotted keys below `model`, with their fields; positions in lists are left out."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        keys[prefix + name] = field
        for part in _parts(field.annotation):
            if isinstance(part, type) and not isinstance(part, types.GenericAlias) and issubclass(part, BaseModel):
                keys |= known_keys(part, f"{prefix}{name}.")
    return keys


def shown(value: Any) -> str:
    """A value as one would write it in the file, cut to 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_key(dotted: str, keys: Iterable[str]) -> str:
    """One line about a key that does not exist: the near names here, the same name elsewhere, or all names here.

    Example:
        >>> unknown_key("model.learning_rate", ["model.hidden_size", "optimizer.learning_rate"])
        'model.learning_rate: there is no such key; did you mean optimizer.learning_rate?'
    """
    section, _, name = dotted.rpartition(".")
    names = {key: key.rpartition(".") for key in keys}
    here = [key for key, (parent, _, _) in names.items() if parent == section]
    near = [f"{section}.{n}".lstrip(".") for n in difflib.get_close_matches(name, [names[k][2] for k in here], n=2)]
    found = near[:1] + [key for key in names if names[key][2] == name and key not in (*near, name)]
    if not found:
        close = difflib.get_close_matches(name, {last for _, _, last in names.values()}, n=1, cutoff=0.75)
        found = [key for key in names if names[key][2] in close]
    if found:
        return f"{dotted}: there is no such key; did you mean {' or '.join(found)}?"
    where = f"the keys of {section} are" if here and section else "the sections are"
    listed = here or [key for key in names if "." not in key]
    return f"{dotted}: there is no such key; {where} {', '.join(names[key][2] for key in listed)}."


def _choices(annotation: Any) -> list[str]:
    """All words that a field takes literally."""
    return [word for part in _parts(annotation) if get_origin(part) is Literal for word in get_args(part)]


def _hint(error: ErrorDetails, field: FieldInfo) -> str:
    """What the value was probably meant to be, as a sentence, or nothing."""
    value = error["input"]
    if value in (choices := _choices(field.annotation)):
        return f" Write [{value}]."
    if near := difflib.get_close_matches(str(value), choices, n=1):
        return f" Did you mean {near[0]}?"
    if error["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        return f" Write {int(value)}."
    if error["type"] in ("int_type", "float_type") and isinstance(value, str):
        with contextlib.suppress(yaml.YAMLError):
            number = yaml12.load(value)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return f" Write {number} without quotes."
    return ""


def readable(errors: Iterable[ErrorDetails], keys: Mapping[str, FieldInfo]) -> list[str]:
    """One line for each key that pydantic found fault with: its dotted path, its value, and what it may be."""
    found: dict[str, list[ErrorDetails]] = {}
    shapes: dict[str, str] = {}  # the same dotted path without positions in lists: a key of `keys`
    for error in errors:
        place = shape = ""
        for part in error["loc"]:
            longer = f"{shape}.{part}".lstrip(".")
            if isinstance(part, int):
                place += f".{part}"
            elif longer in keys or (error["type"] == "extra_forbidden" and part == error["loc"][-1]):
                place, shape = f"{place}.{part}".lstrip("."), longer
            # anything else in a loc is pydantic's name for a branch of a union
        if error["type"] != "default_factory_not_called":  # its cause is reported by itself
            found.setdefault(place, []).append(error)
            shapes[place] = shape
    lines = []
    for place, (error, *branches) in found.items():
        field = keys.get(shapes[place])
        rule = " ".join((field.description or "").split()) if field else ""
        if any(other.startswith(f"{place}.") for other in found):
            continue  # another branch of the same union, which the value was not meant for
        if error["type"] == "extra_forbidden":
            lines.append(unknown_key(shapes[place], keys).replace(shapes[place], place, 1))
        elif error["type"] == "missing":
            lines.append(f"{place}: missing. {rule}")
        elif error["type"] == "rules" or field is None:
            lines += error["msg"].splitlines()
        else:
            plain = PLAIN.get(error["type"], error["msg"].replace("Input should be", "must be") + ". ")
            said = "" if branches else plain  # each branch of a union has its own complaint; the rule names them all
            lines.append(f"{place} = {shown(error['input'])}: {said}{rule}{_hint(error, field)}")
    return lines
