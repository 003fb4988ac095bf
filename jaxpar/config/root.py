"""The whole config of a run: complete, checked, read from YAML with `key=value` overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator
from pydantic_core import PydanticCustomError

from jaxpar.config import rules, yaml12
from jaxpar.config.errors import InputError, known_keys, readable, shown, unknown_key
from jaxpar.config.sections import (
    CheckpointConfig,
    DataConfig,
    GradReduceConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterServerConfig,
    Section,
    TrainConfig,
)


class Config(Section):
    """Everything about a run; complete and checked once it exists.

    Example:
        >>> config = Config.from_yaml_text('''
        ... model: {architecture: llama, vocab_size: 257, hidden_size: 64, intermediate_size: 176,
        ...         num_hidden_layers: 2, num_attention_heads: 4}
        ... mesh: {data: -1, tensor: 2}
        ... data: {train: ["{stdlib}/*.py"], sequence_length: 128}
        ... optimizer: {learning_rate: 6e-4}
        ... train: {steps: 100, global_batch: 16, run_dir: runs/example}
        ... ''')
        >>> config.model.head_dim, config.optimizer.decay_steps
        (16, 100)
        >>> config.resolve_mesh(8).batch_derivation()
        'global_batch 16 = data 4 × microbatches 1 × 4 sequences per microbatch'
    """

    model: ModelConfig
    """The transformer."""
    mesh: MeshConfig = MeshConfig()
    """How many devices each axis has."""
    parallel: ParallelConfig = ParallelConfig()
    """How a step is cut into pieces."""
    grad_reduce: GradReduceConfig = GradReduceConfig()
    """How gradients are summed over the replicas."""
    data: DataConfig
    """What is read, and how it becomes tokens."""
    optimizer: OptimizerConfig
    """The optimizer and its learning rate."""
    train: TrainConfig
    """Length, batch and arithmetic of a run."""
    parameter_server: ParameterServerConfig = ParameterServerConfig()
    """Servers and workers, with train.data_parallel parameter_server."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the state is written."""
    log: LogConfig = LogConfig()
    """Where metrics go besides metrics.jsonl."""

    @model_validator(mode="after")
    def _complete_and_check(self) -> Self:
        if not self.model.max_position_embeddings:
            self._fill("model", max_position_embeddings=self.data.sequence_length)
        if not self.optimizer.decay_steps:
            self._fill("optimizer", decay_steps=self.train.steps)
        if self.mesh.devices:
            self._fill("mesh", **rules.open_axis(self.mesh, self.mesh.devices))
        if problems := rules.problems(self):
            raise PydanticCustomError("rules", "{text}", {"text": "\n".join(problems)})
        return self

    def _fill(self, section: str, **values: Any) -> None:
        """Put in what follows from other sections; only while the config is being made."""
        object.__setattr__(self, section, getattr(self, section).model_copy(update=values))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], origin: str = "the config") -> Self:
        """The config that nested plain values stand for, complete and checked.

        Args:
            values: what a YAML file would hold.
            origin: what the values are called in an error, for instance the file's path.

        Raises:
            InputError: names each key at fault, its value, the rule, and the ways out.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _input_error(origin, readable(error.errors(include_url=False), KEYS)) from None

    @classmethod
    def from_yaml_text(cls, text: str, overrides: Sequence[str] = (), origin: str = "the config") -> Self:
        """The config that a YAML text stands for, with `key=value` overrides; see `load_config`."""
        try:
            values = yaml12.load(text)
        except yaml.YAMLError as error:
            line = f", line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
            raise InputError(f"{origin}{line}: {getattr(error, 'problem', error)}") from None
        if not isinstance(values, dict):
            raise InputError(f"{origin}: must hold the sections {', '.join(cls.model_fields)}, each with its keys.")
        problems = [problem for text in overrides if (problem := override(values, text))]
        if problems:
            raise _input_error("the command line", problems)
        return cls.from_dict(values, origin)

    def to_yaml(self) -> str:
        """The whole config as YAML; `from_yaml_text` gives the same config back."""
        return yaml12.dump(self.model_dump(mode="json"))

    def resolve_mesh(self, device_count: int) -> Self:
        """The same config with the axis of -1 filled in and every rule checked.

        Args:
            device_count: number of devices there are; `mesh.devices`, if given, may take fewer.

        Raises:
            InputError: when the axes do not multiply to the devices, or sizes do not divide over them.
        """
        devices = self.mesh.devices or device_count
        if devices > device_count:
            raise InputError(
                f"mesh.devices = {devices}, but there are {device_count} devices. Use {device_count} or less."
            )
        sizes = rules.open_axis(self.mesh, devices)
        resolved = self.model_copy(update={"mesh": self.mesh.model_copy(update={**sizes, "devices": devices})})
        if problems := rules.problems(resolved):
            raise _input_error(f"the config on {devices} devices", problems)
        return resolved

    @property
    def workers(self) -> int:
        """Equal shares of a batch that are worked on apart, each on a mesh of its own: 1 without parameter servers."""
        return self.parameter_server.workers if self.train.data_parallel == "parameter_server" else 1

    def of_one_worker(self) -> Self:
        """What one worker runs: its share of the batch, with nobody to reduce with; this config without servers."""
        train = {"global_batch": self.train.global_batch // self.workers, "data_parallel": "all_reduce"}
        return self.model_copy(update={"train": self.train.model_copy(update=train)})

    @property
    def sequences_per_microbatch(self) -> int:
        """Sequences in one microbatch of one replica; needs mesh.data to be known."""
        assert self.mesh.data > 0, "resolve_mesh first"
        return self.train.global_batch // (self.workers * self.mesh.data * self.parallel.microbatches)

    def batch_derivation(self) -> str:
        """How the global batch divides, for people; needs mesh.data to be known."""
        workers = f"workers {self.workers} × " if self.train.data_parallel == "parameter_server" else ""
        return (
            f"global_batch {self.train.global_batch} = {workers}data {self.mesh.data} × microbatches "
            f"{self.parallel.microbatches} × {self.sequences_per_microbatch} sequences per microbatch"
        )


KEYS = known_keys(Config)
"""Every dotted key with its field."""

RESUME_SECTIONS = frozenset({"mesh", "parallel", "grad_reduce", "parameter_server", "log", "checkpoint"})
"""Sections that may differ between a run's stored config and the one that continues it."""
RESUME_KEYS = frozenset(
    {
        "train.data_parallel",
        "train.run_dir",
        "train.steps",
        "train.eval_every",
        "train.eval_batches",
        "train.max_bad_steps",
        "train.drift_check_every",
        "train.drift_action",
        "model.attn_implementation",
    }
)
"""Keys of the other sections that may differ so, too."""


def override(raw: dict[str, Any], text: str) -> str | None:
    """Set one `a.b=value` in the mapping that a file gave; the value is read like YAML.

    Args:
        raw: nested mappings; changed in place.
        text: the override, for instance `optimizer.learning_rate=6e-4` or `data.train=[a.txt, b.txt]`.

    Returns:
        What is wrong with it, or None.

    Example:
        >>> raw = {"mesh": {"data": 1}}
        >>> override(raw, "mesh.data=1_000")
        >>> raw
        {'mesh': {'data': 1000}}
    """
    dotted, equals, written = text.partition("=")
    if not equals:
        return f"{text}: an override is written key=value, for instance train.steps=100."
    if dotted not in KEYS:
        return unknown_key(dotted, KEYS)
    try:
        value = yaml12.load(written)
    except yaml.YAMLError as error:
        return (
            f"{text}: {getattr(error, 'problem', None) or error} (a value is written as in YAML; quote it if needed)."
        )
    *sections, name = dotted.split(".")
    for section in sections:
        inner = raw.setdefault(section, {})
        if inner is None:
            inner = raw[section] = {}
        if not isinstance(inner, dict):
            return f"{text}: {section} is {shown(inner)} in the file, so that a single key of it cannot be set."
        raw = inner
    raw[name] = value
    return None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file.

    Args:
        path: a YAML file (scalars as in YAML 1.2: see `jaxpar.yaml12`).
        overrides: `key=value` with dotted keys, values written as in the file, for instance `mesh.tensor=2`.

    Raises:
        InputError: when there is no such file, and for everything wrong in it or in the overrides.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file in UTF-8"
        raise InputError(f"cannot read the config file {path}: {reason}.") from None
    return Config.from_yaml_text(text, overrides, str(path))


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors."""
    return Config.model_json_schema(mode="validation")


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two configs differ, each with its old and new value, as `{'mesh.data': (1, 4)}`."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}


def blocks_resume(key: str) -> bool:
    """Whether a run cannot simply go on when this dotted key differs from its stored config.

    Example:
        >>> blocks_resume("mesh.data"), blocks_resume("train.steps"), blocks_resume("optimizer.b1")
        (False, False, True)
    """
    return key.partition(".")[0] not in RESUME_SECTIONS and key not in RESUME_KEYS


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _input_error(origin: str, problems: Sequence[str]) -> InputError:
    return InputError(
        "\n".join([f"{origin}: {problems[0]}"] if len(problems) == 1 else [f"{origin}:", *(f"- {p}" for p in problems)])
    )
