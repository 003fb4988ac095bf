"""What is to be planned: from a jaxpar config, a Hugging Face `config.json`, or sizes on the command line.

Whatever it comes from, the result is a whole `Config`, so that the rules of configs hold for plans and a plan can be
written out as a config. What the input does not say is filled in, and said.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.config import Config, InputError, load_config
from jaxpar.config.architectures import ARCHITECTURES
from jaxpar.config.rules import BYTE_VOCAB_SIZE
from jaxpar.planner.hugging_face import from_hugging_face

SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
"""Short names of sizes on the command line, and the config's."""
NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")
FORM = "layers=32,hidden=4096,heads=32,kv=8,ffn=14336,vocab=128256"
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
LARGEST = 2**53  # above it a float does not hold every whole number
FILLED_IN = {
    "mesh": {},
    "optimizer": {"name": "adamw", "learning_rate": 3e-4, "warmup_steps": 100, "weight_decay": 0.1, "clip_norm": 1.0},
    "train": {"steps": 1000, "run_dir": "runs/plan"},
}
"""Sections for a model that comes without; those of `data` follow from the model."""
UNPRICED = {
    "muon": ("muon: what its iterations compute and send is not priced.",),
    "adafactor": ("adafactor: its state is estimated, as a row and a column of each matrix.",),
}
"""By optimizer, what a plan does not know of it."""


@dataclass(frozen=True)
class Given:
    """What is to be planned.

    Attributes:
        config: complete, on a mesh of one device.
        filled_in: sections that the input did not have.
        notes: what of the input was left out.
    """

    config: Config
    filled_in: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def count(text: str, name: str) -> int:
    """Read a whole number, with `_` between digits or a unit: k, M and G are 2^10, 2^20 and 2^30.

    Binary, because batches and sequences are: 4M tokens are 1024 sequences of 4096.

    Args:
        text: as the user wrote it.
        name: what it is, for the error.

    Raises:
        InputError: when it is no such number, below 1 or above 2^53.

    Example:
        >>> count("4M", "tokens"), count("4_000_000", "tokens"), count("0.5k", "tokens")
        (4194304, 4000000, 512)
    """
    form = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kmg]?)", text.strip().lower())
    value = float(form[1].replace("_", "")) * UNITS[form[2]] if form else 0.0
    if value > LARGEST:
        raise InputError(f"{name} = {text}: must be at most 2^53, {LARGEST:,}.")
    if value < 1 or value != int(value):
        raise InputError(f"{name} = {text}: must be a whole number, at least 1, as 4194304, 4_194_304 or 4M (M: 2^20).")
    return int(value)


def read(text: str, sequence_length: int | None = None) -> Given:
    """Read what is to be planned.

    Args:
        text: a file, YAML with the sections of a config or JSON from Hugging Face, or sizes as in `FORM`.
        sequence_length: tokens of a sequence; None: the config's, else 4096 or the model's longest if that is less.

    Returns:
        The config; its global batch is 1 unless the input says otherwise.

    Raises:
        InputError: when it can be neither, or something in it is missing or wrong.

    Example:
        >>> given = read("layers=2,hidden=64,heads=4,ffn=176,vocab=512")
        >>> given.config.model.num_key_value_heads, given.config.data.sequence_length, given.filled_in
        (4, 4096, ('data', 'optimizer', 'train'))
    """
    path, is_file = Path(text), os.path.exists(text)
    if "=" in text and not is_file:
        return _filled_in(from_sizes(text), (), sequence_length, origin=text)
    if path.suffix in (".yaml", ".yml", ".json") or is_file:
        try:
            return _from_file(path, sequence_length)
        except RecursionError:
            raise InputError(f"{text}: is nested too deep for a config.") from None
    raise InputError(f"{text}: must be a config (.yaml), a Hugging Face config.json, or sizes as {FORM}.")


def _from_file(path: Path, sequence_length: int | None) -> Given:
    values = _json(path) if path.suffix == ".json" else {}
    if "model" in values or path.suffix != ".json":
        return _planned(load_config(path), sequence_length)
    model, notes = from_hugging_face(values, origin=str(path))
    return _filled_in(model, notes, sequence_length, origin=str(path))


def _planned(config: Config, sequence_length: int | None) -> Given:
    """The config without its layout, which is what is being looked for."""
    values = config.model_dump(mode="json")
    values["mesh"] = {}
    kept = {"unroll": config.parallel.unroll, "idle": config.parallel.idle, "layer_costs": config.parallel.layer_costs}
    values["parallel"] = {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
    values["grad_reduce"] = {"wire_dtype": config.grad_reduce.wire_dtype}
    notes = UNPRICED.get(config.optimizer.name, ())
    if config.train.data_parallel == "parameter_server":
        values["train"]["data_parallel"] = "all_reduce"
        notes += ("train.data_parallel parameter_server is left out: plans are made for all_reduce.",)
    if sequence_length:
        values["data"]["sequence_length"] = sequence_length
        if config.model.max_position_embeddings == config.data.sequence_length and config.model.traits.rotary:
            values["model"]["max_position_embeddings"] = None  # it followed from the sequences, and does again
    return Given(Config.from_dict(values), notes=notes)


def _filled_in(model: dict[str, Any], notes: tuple[str, ...], sequence_length: int | None, origin: str) -> Given:
    """A whole config around a model."""
    bytes_fit = isinstance(vocab := model["vocab_size"], int) and vocab >= BYTE_VOCAB_SIZE
    longest = model.get("max_position_embeddings") or 4096
    if not isinstance(longest, int):
        raise InputError(f"{origin}: max_position_embeddings = {json.dumps(longest)}: must be a whole number.")
    data = {
        "train": ["{stdlib}/*.py"],
        "tokenizer": "byte" if bytes_fit else "data/tokenizer.json",
        "sequence_length": sequence_length or min(4096, longest),
    }
    train = {**FILLED_IN["train"], "global_batch": 1}
    config = Config.from_dict({**FILLED_IN, "model": model, "data": data, "train": train}, origin)
    return Given(config, ("data", "optimizer", "train"), notes)


def from_sizes(text: str) -> dict[str, Any]:
    """The model section that sizes stand for, as in `FORM`.

    Also `head_dim=` (default hidden / heads), `tied=true` (the head uses the embedding's table) and `architecture=`
    (default llama). Without `kv` there are as many key and value heads as heads.

    Raises:
        InputError: when a size is missing, unknown, given twice or no number.

    Example:
        >>> from_sizes("layers=2,hidden=64,heads=4,ffn=176,vocab=128k,tied=true")["vocab_size"]
        131072
    """
    model: dict[str, Any] = {"architecture": "llama"}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        key = SIZES.get(name, {"tied": "tie_word_embeddings", "architecture": "architecture"}.get(name))
        if key is None or not equals:
            names = ", ".join((*SIZES, "tied", "architecture"))
            raise InputError(f"{part.strip() or text}: sizes are NAME=VALUE, as {FORM}; the names are {names}.")
        if key in model and key != "architecture":
            raise InputError(f"{name} is given twice in {text}.")
        if name == "tied" and value not in ("true", "false"):
            raise InputError(f"tied = {value}: must be true or false.")
        if name == "architecture" and value not in ARCHITECTURES:
            raise InputError(f"architecture = {value}: must be one of {', '.join(ARCHITECTURES)}.")
        model[key] = count(value, name) if name in SIZES else value == "true" if name == "tied" else value
    if missing := [name for name in NEEDED if SIZES[name] not in model]:
        raise InputError(f"{text}: {', '.join(missing)} missing. Sizes are given as {FORM}.")
    return model


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise InputError(f"cannot read {path}: {reason}.") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: {error.msg}.") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{path}: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold an object with the fields of a model.")
    return values
