"""A server: owns some rows of the parameters and of the optimizer's state, and is the only one to change them.

An update has a number, given by the coordinator, and is made of one gradient or several, its shares:

    push (from workers, in any order) → norm → apply, or drop

A server alone sees only its slice of a gradient. So the norms of all servers' slices are added up by the coordinator
and come back with `apply`, for clipping; and nothing is applied anywhere before every server has every share. All
servers apply the same updates in the same order: the number of updates applied is the version.

In async mode a gradient is added to parameters that are some updates newer than those it is of. With Adam that slows
learning a lot, so workers do not get the parameters as they are, but where they will be by then: moved on by the newest
step as often as gradients are versions old on average. This is SpecTrain's weight prediction (arXiv:1809.02839); it
needs an optimizer whose steps momentum makes alike.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file

from jaxpar.config import Config, InputError, OptimizerConfig
from jaxpar.layers.layout import STACK
from jaxpar.mesh import stay_on_cpu, use_config_dtypes
from jaxpar.names import Named, like, named, nested
from jaxpar.optimizer import make_optimizer, make_schedule
from jaxpar.parameter_server.rows import MATRIX, Sent, some
from jaxpar.parameter_server.slices import Slices
from jaxpar.parameter_server.sums import Sum

NEWEST = 1 / 8
"""Weight of the newest update in the mean staleness."""


class Server:
    """One server. Its methods are called one at a time.

    Args:
        config: of the run.
        index: which server, from 0.
        slices: the rows it owns.
        folder: where its log `server-<index>.jsonl` and its snapshots go.
        put: makes a value cheap to hand out many times (`ray.put`).
    """

    def __init__(
        self, config: Config, index: int, slices: Slices, folder: str, put: Callable[[Any], Any] = lambda value: value
    ) -> None:
        stay_on_cpu()
        use_config_dtypes(config)
        self.index, self.slices, self._put = index, slices, put
        padding = {s.name: s.padding for s in slices}
        self._optimizer = make_optimizer(config.optimizer, schedule_of(config), padding)
        self._update, self._moved_on = jax.jit(self._updated), jax.jit(_moved_on)
        self._predicts = config.parameter_server.mode == "async" and has_momentum(config.optimizer)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sums: dict[int, Sum] = {}
        self._open_from = 0  # updates with lower numbers are over, and of the others those in `_closed`
        self._closed: set[int] = set()
        self._means: dict[int, dict[str, np.ndarray]] = {}
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[int] | None = None
        self._busy_seconds = 0.0
        self._write("start", pid=os.getpid())

    def load(self, version: int, last_update: int, params: Named, opt_state: Named) -> None:
        """Take over a state, forgetting everything else.

        Args:
            version: its number.
            last_update: pushes to updates up to this number are ignored from now on.
            params: its rows of the parameters, by name.
            opt_state: what belongs to them of the optimizer's state, by name.
        """
        self.version, self._open_from = version, last_update + 1
        self._params = jax.tree.map(jax.numpy.asarray, nested(params))
        self._before, self._staleness = self._params, 0.0
        self._opt_state = like(jax.eval_shape(self._optimizer.init, self._params), opt_state)
        self._sums.clear()
        self._means.clear()
        self._closed.clear()
        self._writing = None  # that is of a history which is given up; what is written next comes after it
        self._pulled: dict[tuple[int | None, bool], Any] = {}
        self._changed = {name: np.full(_tracked(name, leaf), version) for name, leaf in named(self._params).items()}
        self._compile()
        self._write("load", version=version)

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is seen in the norm
    def push(self, update: int, share: int, tokens: float, grads: Mapping[str, Sent]) -> bool:
        """Take a share of an update.

        Args:
            update: its number.
            share: which of its shares, from 0.
            tokens: unmasked ones that the gradient is the mean over.
            grads: for each slice its rows of the gradient.

        Returns:
            False if it is of no use: the update is over, or the share is there already.
        """
        if update < self._open_from or update in self._closed or update in self._means:
            return False
        return self._sums.setdefault(update, Sum()).take(share, tokens, grads)

    @np.errstate(over="ignore", invalid="ignore")
    def norm(self, update: int, shares: int) -> float:
        """The squared norm of this slice of an update's mean gradient, when all its shares have come."""
        start = time.perf_counter()
        got = self._sums.pop(update, Sum())
        assert got.shares == shares, f"update {update} has {got.shares} shares, not {shares}"
        mean = self._means[update] = got.mean()
        squared = sum(float(np.sum(g * g, dtype=np.float64)) for g in mean.values())
        self._busy_seconds += time.perf_counter() - start
        return squared

    def apply(self, update: int, version: int, base_version: int, norm: Any, finite: bool) -> int | None:
        """Make an update.

        Args:
            update: its number.
            version: the one that it makes, the next.
            base_version: of the parameters that its gradients are of.
            norm: of the whole mean gradient, over all servers.
            finite: loss and norm are; otherwise only the version changes.

        Returns:
            The version of the newest snapshot that is on disk.
        """
        start = time.perf_counter()
        assert version == self.version + 1, f"version {version} cannot follow {self.version}"
        self._staleness += (self.version - base_version - self._staleness) * NEWEST
        self.version, mean, self._before = version, self._means[update], self._params
        if finite:
            before = named(self._before)
            norm = np.asarray(norm, np.result_type(*mean.values()))
            self._params, self._opt_state = self._update(self._params, self._opt_state, nested(mean), norm)
            for name, leaf in named(self._params).items():
                self._note_changes(name, np.asarray(before[name]), np.asarray(leaf))
        self._close(update)
        self._pulled.clear()
        self._write("apply", update=update, version=version, base_version=base_version, applied=finite)
        self._busy_seconds += time.perf_counter() - start
        return self.snapshot_version()

    def drop(self, update: int) -> None:
        """Forget an update that is not to be made."""
        self._close(update)
        self._write("drop", update=update, version=self.version)

    def pull(self, since: int | None, predicted: bool = False) -> tuple[int, Any]:
        """The version, and by name the rows that differ from what was handed out at version `since`.

        What is sent is the same for all who ask alike, and is put away once.

        Args:
            since: None: everything.
            predicted: in async mode, parameters to compute a gradient with. Who asks so once always does.
        """
        predicted = predicted and self._predicts
        if (since, predicted) not in self._pulled:
            params, after = self._params, -1 if since is None else since
            if predicted:
                # A row that stood still at this version may have been handed out as one that moves.
                params, after = self._moved_on(params, self._before, self._staleness), after - (after < self.version)
            sent: dict[str, Sent] = {}
            for name, leaf in named(params).items():
                changed = self._changed[name] > after
                if changed.any():
                    array = np.asarray(leaf)
                    sent[name] = array if changed.all() else some(array, np.flatnonzero(changed))
            self._pulled[since, predicted] = self._put(sent)
        return self.version, self._pulled[since, predicted]

    def state(self) -> tuple[int, Named, Named]:
        """The version, the parameters and the optimizer's state of this slice, by name."""
        arrays = lambda tree: {name: np.asarray(leaf) for name, leaf in named(tree).items()}
        return self.version, arrays(self._params), arrays(self._opt_state)

    def snapshot(self, keep_from: int | None = None) -> int | None:
        """Start to write the state to disk. Updates may go on: they make new arrays, and these are kept until then.

        Args:
            keep_from: older snapshots than of this version are deleted.

        Returns:
            The version of the snapshot before, which is on disk now; None if there is none since the last `load`.
        """
        before = self.snapshot_version(wait=True)
        for old in self._folder.glob(f"snapshots/*/server-{self.index}.safetensors"):
            if keep_from is not None and int(old.parent.name) < keep_from:
                old.unlink()
                with suppress(OSError):  # another server's is still there
                    old.parent.rmdir()
        version, params, opt_state = self.state()
        arrays = {f"params/{k}": v for k, v in params.items()} | {f"opt_state/{k}": v for k, v in opt_state.items()}
        self._writing = self._writer.submit(self._write_snapshot, version, arrays)
        return before

    def snapshot_version(self, wait: bool = False) -> int | None:
        """The version of the last snapshot if it is on disk, else None.

        Args:
            wait: for it.
        """
        return self._writing.result() if self._writing and (wait or self._writing.done()) else None

    def restore(self, version: int, last_update: int) -> None:
        """Go back to a snapshot.

        Args:
            version: its version.
            last_update: see `load`.

        Raises:
            InputError: it is not there.
        """
        path = self._snapshot_path(version)
        try:
            arrays = {name: np.asarray(leaf) for name, leaf in load_file(str(path)).items()}
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path} cannot be read ({error}): all servers need a file system in common under train.run_dir, so "
                f"that one can take another's place."
            ) from error
        part = lambda kind: {n.removeprefix(kind): a for n, a in arrays.items() if n.startswith(kind)}
        self.load(version, last_update, part("params/"), part("opt_state/"))
        self._write("restore", version=version)

    def busy_seconds(self) -> float:
        """Seconds spent on norms and updates since the start."""
        return self._busy_seconds

    def ping(self) -> int:
        """The process, to see that it answers."""
        return os.getpid()

    def _updated(self, params: Any, opt_state: Any, grads: Any, norm: Any) -> tuple[Any, Any]:
        before = opt_state
        updates, opt_state = self._optimizer.update(grads, opt_state, params, global_norm=norm)
        new = optax.apply_updates(params, updates), opt_state
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, (params, before))

    def _compile(self) -> None:
        """Make an update of nothing and throw it away, so that the time of the first one does not hold compilation."""
        wide = lambda dtype: jax.numpy.promote_types(dtype, np.float32)  # as gradients come
        grads = {name: np.zeros(leaf.shape, wide(leaf.dtype)) for name, leaf in named(self._params).items()}
        self._update(self._params, self._opt_state, nested(grads), np.zeros((), np.result_type(*grads.values())))
        if self._predicts:
            self._moved_on(self._params, self._before, self._staleness)

    def _note_changes(self, name: str, before: np.ndarray, after: np.ndarray) -> None:
        changed = self._changed[name]
        if len(changed) == 1:
            changed[:] = self.version
        else:
            bits = lambda array: np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
            changed[(bits(before) != bits(after)).any(axis=1)] = self.version

    def _close(self, update: int) -> None:
        self._sums.pop(update, None)
        self._means.pop(update, None)
        self._closed.add(update)
        while self._open_from in self._closed:
            self._closed.remove(self._open_from)
            self._open_from += 1

    def _snapshot_path(self, version: int) -> Path:
        return self._folder / "snapshots" / str(version) / f"server-{self.index}.safetensors"

    def _write_snapshot(self, version: int, arrays: dict[str, np.ndarray]) -> int:
        path = self._snapshot_path(version)
        unfinished = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(arrays, str(unfinished))  # pyright: ignore[reportArgumentType]  # it takes NumPy arrays too
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"The servers' snapshot {path} cannot be written: {error}. Make room, or point train.run_dir to "
                f"another disk; the same command goes on from the newest checkpoint."
            ) from error
        return version

    def _write(self, event: str, **values: Any) -> None:
        with (self._folder / f"server-{self.index}.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")


def has_momentum(optimizer: OptimizerConfig) -> bool:
    """Whether an optimizer's next step resembles its last one."""
    decay = optimizer.momentum if optimizer.name in ("sgd", "muon") else optimizer.b1
    return optimizer.name != "adafactor" and decay > 0


def _moved_on(params: Any, before: Any, steps: Any) -> Any:
    """Parameters after so many more steps like the last one."""
    return jax.tree.map(lambda p, b: (p + steps * (p - b)).astype(p.dtype), params, before)


def schedule_of(config: Config) -> Callable[[Any], Any]:
    """The learning rate by number of updates.

    In async mode `workers` updates make a step. Each has the step's learning rate divided by `workers`, so that they
    move the parameters about as far as one update from all shares would, and learning rates mean the same in both.
    """
    schedule, per_step = make_schedule(config.optimizer), updates_per_step(config)
    return lambda count: schedule(count // per_step) / per_step


def updates_per_step(config: Config) -> int:
    """Updates that are made of one batch."""
    server = config.parameter_server
    return server.workers if server.mode == "async" else 1


def _tracked(name: str, leaf: Any) -> int:
    """How many parts of a parameter are watched for changes: the rows of a matrix outside the stack, else the whole."""
    return leaf.shape[0] if leaf.ndim >= MATRIX and name.split("/")[0] != STACK else 1
