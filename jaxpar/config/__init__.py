"""The typed config of a run, read from YAML with `key=value` overrides; imports no JAX.

`load_config` reads a file; `Config.from_yaml_text` and `Config.from_dict` do the same for what is at hand. What they
return is complete: no key that follows from others (`head_dim`, `decay_steps`, ...) is left open, except a mesh axis
of -1, which `Config.resolve_mesh` fills in as soon as the number of devices is known. All rules between keys are
checked too. To change something: a key in `sections`, a rule between keys in `rules`, a message in `errors`.
"""

from jaxpar.config.attention import Implementation, choose_implementation
from jaxpar.config.errors import CheckFailed, InputError, Stopped
from jaxpar.config.root import Config, blocks_resume, differences, json_schema, load_config
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
    RopeScaling,
    Source,
    TrainConfig,
)

__all__ = [
    "CheckFailed",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "GradReduceConfig",
    "Implementation",
    "InputError",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterServerConfig",
    "RopeScaling",
    "Source",
    "Stopped",
    "TrainConfig",
    "blocks_resume",
    "choose_implementation",
    "differences",
    "json_schema",
    "load_config",
]
