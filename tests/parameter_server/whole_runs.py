"""Whole runs of a tiny model in the test's own process, with servers and with all-reduce, and what they saved."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from in_process import InProcess
from tiny_run import write_tiny

from jaxpar import run_folder, trainer
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import Config, load_config
from jaxpar.data.examples import TrainExamples
from jaxpar.data.sources import open_data
from jaxpar.data.windows import Rows
from jaxpar.mesh import start, use_config_dtypes
from jaxpar.names import Named, named, nested
from jaxpar.parameter_server.run import train_with
from jaxpar.parameter_server.slices import Slices
from jaxpar.parameter_server.whole import Whole
from jaxpar.step import MakeModel

MakeInProcess = Callable[[Config, Sequence[Slices], Path], InProcess]

ALONE = ("mesh.data=1", "mesh.tensor=1", "parallel.microbatches=1")
SHORT = (
    "train.steps=20",
    "train.eval_every=null",
    "data.validation=null",
    "checkpoint.every=null",
    "checkpoint.keep=9",
)


def tiny(folder: Path, *overrides: str) -> Config:
    """The tiny run on one device, 20 steps, without evaluations; overrides come last."""
    file = folder / "tiny.yaml"
    if not file.exists():
        write_tiny(folder)
    return load_config(file, [*SHORT, *ALONE, *overrides])


def with_servers(
    folder: Path,
    *overrides: str,
    servers: int = 2,
    workers: int = 2,
    make_actors: MakeInProcess = InProcess,
    make_model: MakeModel | None = None,
) -> Config:
    """Train with parameter servers; returns the config."""
    config = tiny(
        folder,
        "train.data_parallel=parameter_server",
        f"parameter_server.servers={servers}",
        f"parameter_server.workers={workers}",
        *overrides,
    )
    run_dir = Path(config.train.run_dir)
    run_folder.prepare(config, run_dir, accept_changes=False)
    data = open_data(config, run_dir / "tokens")
    use_config_dtypes(config)
    train_with(config, Whole(config, make_model), data, make_actors)
    return config


def all_reduced(folder: Path, *overrides: str, make_model: MakeModel | None = None) -> Config:
    """Train with all-reduce on two devices; returns the config."""
    config, mesh = start(tiny(folder, "mesh.data=2", *overrides))
    trainer.train(config, mesh, make_model=make_model)
    return config


def saved(config: Config, step: int | None = None) -> Named:
    """The state of a run's checkpoint, the newest by default, by name."""
    with Checkpoints(Path(config.train.run_dir) / "checkpoints", keep=9) as checkpoints:
        shapes = {name: shape_of(kind) for name, kind in checkpoints.metadata(step).arrays.items()}
        return named(jax.device_get(checkpoints.restore(nested(shapes), step)[0]))


def shape_of(kind: str) -> jax.ShapeDtypeStruct:
    """From "float32[8,64]"."""
    dtype, dims = kind.rstrip("]").split("[")
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, dims.split(",")))), dtype)


def distance(got: Named, want: Named) -> tuple[float, str]:
    """The largest difference, relative to the largest value of its array, and where it is."""
    assert got.keys() == want.keys()
    difference = lambda a, b: float(np.abs(a.astype(np.float64) - b).max() / max(np.abs(b).max(), 1e-30))
    return max((difference(got[name], want[name]), name) for name in want)


def same_bits(a: Named, b: Named) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


PART_OF_TOKENS = (0.05, 1.0, 0.5, 0.1, 0.9, 0.02, 0.7, 0.3)
"""That count in a row; rows take turns."""


def uneven(plain: Callable[..., Rows]) -> Callable[..., Rows]:
    """`TrainExamples.rows` with a mask of its own in each row of each step; in step 3 the first two rows have none."""

    def rows(self: TrainExamples, step: int, numbers: Sequence[int]) -> Rows:
        read = plain(self, step, numbers)
        for mask, row in zip(read["mask"], numbers, strict=True):
            part = 0 if step == 3 and row < 2 else PART_OF_TOKENS[(row + step) % 8]
            mask &= np.random.default_rng([step, row]).random(mask.shape) < part
        return read

    return rows
