"""Checkpoints: written by Orbax while training goes on, restored on any layout.

A folder holds one subfolder for each kept step:

    checkpoints/
      200/
        state/      the arrays (Orbax, OCDBT)
        metadata/   JSON: config, data position, versions, and the name, shape and dtype of every array

Arrays are stored whole, under the names of their path in the state ("params/blocks/mlp/up/weight"), so that nothing on
disk depends on the mesh. Orbax writes into a temporary folder and renames it when everything is there: what has a step
for its name is complete, and older steps are deleted only after that.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from rich.filesize import decimal

import jaxpar
from jaxpar.config import InputError
from jaxpar.disk_errors import disk_reason
from jaxpar.names import Named, like, named, nested
from jaxpar.orbax_log import quieten_orbax

SCHEMA_VERSION = 1
"""Raised when a checkpoint's names or meaning change, so that an older jaxpar refuses it instead of misreading it."""

NAMES_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint holds besides the state.

    Attributes:
        config_yaml: the resolved config of the run, as YAML.
        data_position: where the data goes on, as the data loader counts.
        schema_version: `SCHEMA_VERSION` of the jaxpar that wrote it.
        jaxpar_version: that jaxpar.
        jax_version: the JAX it ran on.
        arrays: for each array of the state its name and "dtype[shape]", as "float32[8,64]".
    """

    config_yaml: str
    data_position: int
    schema_version: int
    jaxpar_version: str
    jax_version: str
    arrays: dict[str, str]


class Checkpoints:
    """The checkpoints in one folder.

    `save` returns as soon as the arrays are copied to host memory; the files are written by a background thread. An
    error there is raised by the next `save`, `wait` or `close`, whichever comes first. Until a save has finished, the
    one before it stays on disk, so there must be room for `keep` + 1 checkpoints.

    Reading never writes: `latest_step`, `metadata` and `restore` may be used on the folder of a run that is training.
    In a run of many processes each method but `latest_step` and `metadata` is called by all, on a shared file system.

    Args:
        folder: where the steps are, made at the first `save`.
        keep: how many finished checkpoints stay, the newest.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> state = {"step": jnp.int32(3), "params": {"weight": jnp.arange(4.0)}}
        >>> shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder), keep=2) as checkpoints:
        ...     checkpoints.save(3, state, config_yaml="", data_position=48)
        ...     checkpoints.wait()
        ...     restored, metadata = checkpoints.restore(shapes)
        >>> restored["params"]["weight"].tolist(), metadata.data_position
        ([0.0, 1.0, 2.0, 3.0], 48)
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder.absolute()
        self.keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._state_bytes = 0
        quieten_orbax()

    def save(self, step: int, state: Any, *, config_yaml: str, data_position: int) -> None:
        """Start to write a checkpoint.

        Args:
            step: the number of the finished step; saving the newest step again does nothing.
            state: a tree of arrays. They may be donated or changed as soon as this returns.
            config_yaml: the resolved config.
            data_position: where the data goes on.

        Raises:
            InputError: when this or the save before it cannot be written, or a later step is already there.
        """
        arrays = named(state)
        metadata = CheckpointMetadata(
            config_yaml=config_yaml,
            data_position=data_position,
            schema_version=SCHEMA_VERSION,
            jaxpar_version=jaxpar.__version__,
            jax_version=jax.__version__,
            arrays={name: _kind(leaf) for name, leaf in arrays.items()},
        )
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            if step == latest:
                return
            raise InputError(
                f"{self.folder} has a checkpoint of step {latest}, later than step {step}, which was to be saved. "
                f"Train in another train.run_dir, or delete the later steps first."
            )
        self._state_bytes = sum(leaf.nbytes for leaf in arrays.values())
        try:
            self._open().save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_nested(arrays)),
                    metadata=ocp.args.JsonSave(dataclasses.asdict(metadata)),
                ),
                force=True,  # when to save is the trainer's decision
            )
        except Exception as error:
            self._failed(error)

    def wait(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            InputError: when it could not be written.
        """
        if self._manager is not None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                self._failed(error)

    def close(self) -> None:
        """Wait for the last save and end the background threads.

        Raises:
            InputError: when the last save could not be written.
        """
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """List the finished checkpoints on disk, oldest first. One that was cut off while writing does not count."""
        found = ocp.path.step.standard_name_format().find_all(self.folder)
        return sorted(entry.step for entry in found)

    def latest_step(self) -> int | None:
        """Return the newest finished checkpoint on disk, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def metadata(self, step: int | None = None) -> CheckpointMetadata:
        """Read what a checkpoint holds besides the state.

        Args:
            step: which one; the newest by default.

        Raises:
            InputError: when there is none, or it was written with another schema version.
        """
        path = self.folder / str(self._existing(step)) / "metadata" / "metadata"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["schema_version"] == SCHEMA_VERSION:
                return CheckpointMetadata(**stored)
            found, writer = stored["schema_version"], stored["jaxpar_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} cannot be read as a jaxpar checkpoint's metadata: {error!r}.") from error
        raise InputError(
            f"{path.parents[1]} has checkpoint schema version {found}, written by jaxpar {writer}; this is jaxpar "
            f"{jaxpar.__version__}, which reads version {SCHEMA_VERSION}. Use jaxpar {writer} to read it."
        )

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, CheckpointMetadata]:
        """Read a checkpoint into arrays of a given layout.

        Names, shapes and dtypes are compared before any array is read or made.

        Args:
            abstract_state: a tree like the saved state, of `jax.ShapeDtypeStruct` (or arrays) with the shardings that
                the result is to have, on any mesh; a leaf without one goes to the first device.
            step: which one; the newest by default.

        Returns:
            The state, bit for bit what was saved, and the metadata.

        Raises:
            InputError: when there is no checkpoint, it does not fit, or its files are damaged.
        """
        step = self._existing(step)
        metadata = self.metadata(step)
        wanted = named(abstract_state)
        _check_fits(metadata.arrays, {name: _kind(leaf) for name, leaf in wanted.items()}, self.folder / str(step))
        abstract = {name: _abstract(leaf) for name, leaf in wanted.items()}
        try:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                stored = checkpointer.restore(
                    self.folder / str(step) / "state", args=ocp.args.StandardRestore(_nested(abstract))
                )
        except (OSError, ValueError) as error:
            others = [other for other in self.steps() if other != step]
            raise InputError(
                f"The checkpoint {self.folder / str(step)} cannot be read: {str(error)[:300]}. "
                + (f"Delete that folder to go on from step {others[-1]}." if others else "There is no other one.")
            ) from error
        return like(abstract_state, named(stored)), metadata

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "no finished checkpoint" if step is None else f"no finished checkpoint of step {step}"
            raise InputError(f"{self.folder} has {wanted}; finished steps: {', '.join(map(str, steps)) or 'none'}.")
        return steps[-1] if step is None else step

    def _open(self) -> ocp.CheckpointManager:
        """Start writing into the folder: remove what an earlier run left unfinished, and make Orbax's manager."""
        if self._manager is None:
            self._remove_unfinished()
            options = ocp.CheckpointManagerOptions(preservation_policy=ocp.checkpoint_managers.LatestN(self.keep))
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _remove_unfinished(self) -> None:
        if jax.process_index() == 0 and self.folder.exists():
            for temporary in ocp.path.step.all_temporary_paths(self.folder):
                shutil.rmtree(str(temporary.get()), ignore_errors=True)

    def _failed(self, error: Exception) -> NoReturn:
        """Bring folder and manager back to the last finished checkpoint, and raise what the user can act on."""
        reason = disk_reason(error)
        self._remove_unfinished()
        if self._manager is not None:
            self._manager.reload()  # it has already taken the failed step in and the oldest out
        if reason is None:
            raise error
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        needed, free = decimal(self._state_bytes), decimal(shutil.disk_usage(existing).free)
        latest = self.latest_step()
        usable = (
            "No checkpoint was finished before."
            if latest is None
            else f"The checkpoint of step {latest} is still usable; the same command goes on from there."
        )
        raise InputError(
            f"A checkpoint could not be written to {self.folder}: {reason}. It needs up to {needed}; {free} are free. "
            f"{usable} Make room first, or point train.run_dir to a larger disk; checkpoint.keep (now {self.keep}) "
            f"says how many are kept, and one more must fit."
        ) from error


def _nested(leaves: Named) -> dict[str, Any]:
    keep = jax.Array | jax.ShapeDtypeStruct
    return nested({name: leaf if isinstance(leaf, keep) else np.asarray(leaf) for name, leaf in leaves.items()})


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_fits(stored: dict[str, str], wanted: dict[str, str], path: Path) -> None:
    changed = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    differences = {
        "only in the checkpoint": [name for name in stored if name not in wanted],
        "missing in the checkpoint": [name for name in wanted if name not in stored],
        "different": [f"{name} ({stored[name]} in the checkpoint, {wanted[name]} here)" for name in changed],
    }
    said = []
    for what, names in differences.items():
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        said += [f"{what}: {', '.join(names[:NAMES_SHOWN])}{more}"] if names else []
    if said:
        raise InputError(
            f"The checkpoint {path} does not fit this config. {'; '.join(said)}. Go on with the model and optimizer "
            f"sections that wrote it (config.yaml in the run folder), or start afresh in another train.run_dir."
        )
