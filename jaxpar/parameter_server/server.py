"""A server: owns some rows of the parameters and of the optimizer's state, and is the only one to change them.

An update has a number, given by the coordinator, and is made of one gradient or several, its shares:

    push (from workers, in any order) → norm → apply, or drop

A server alone sees only its slice of a gradient. So the norms of all servers' slices are added up by the coordinator
and come back with `apply`, for clipping; and nothing is applied anywhere before every server has every share. All
servers apply the same updates in the same order: the number of updates applied is the version.

Gradients of an update are weighted by their tokens and added in the order of the shares, whatever order they come in,
so that two runs agree bit for bit.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from safetensors.flax import load_file, save_file

from jaxpar.config import Config, InputError
from jaxpar.layers.layout import STACK
from jaxpar.mesh import stay_on_cpu, use_config_dtypes
from jaxpar.names import Named, like, named, nested
from jaxpar.optimizer import make_optimizer, make_schedule
from jaxpar.parameter_server.rows import MATRIX, Sent, add, dense, some
from jaxpar.parameter_server.slices import Slices


@dataclass
class Sum:
    """The gradients of an update, added up in the order of their shares.

    Attributes:
        total: sum over shares of tokens × gradient, by parameter.
        tokens: in the shares added.
        shares: how many are added.
        waiting: those that came before one with a lower number.
    """

    total: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: float = 0.0
    shares: int = 0
    waiting: dict[int, tuple[float, Mapping[str, Sent]]] = field(default_factory=dict)

    def take(self, share: int, tokens: float, grads: Mapping[str, Sent]) -> bool:
        """Take a share in; False if it is there already: its worker died after pushing, and another did its work."""
        if share < self.shares or share in self.waiting:
            return False
        self.waiting[share] = tokens, grads
        while self.shares in self.waiting:
            tokens, grads = self.waiting.pop(self.shares)
            for name, sent in grads.items():
                if name not in self.total:
                    self.total[name] = np.zeros_like(dense(sent))
                add(self.total[name], sent, tokens)
            self.tokens += tokens
            self.shares += 1
        return True

    def mean(self) -> dict[str, np.ndarray]:
        """The mean gradient over all tokens."""
        count = max(self.tokens, 1.0)
        return {name: total / total.dtype.type(count) for name, total in self.total.items()}


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
        self._optimizer = make_optimizer(config.optimizer, schedule_of(config))
        self._update = jax.jit(self._updated)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = (self._folder / f"server-{index}.jsonl").open("a", encoding="utf-8")
        self._sums: dict[int, Sum] = {}
        self._closed: set[int] = set()
        self._first_update = 0
        self._means: dict[int, dict[str, np.ndarray]] = {}
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[int] | None = None
        self._busy_seconds = 0.0
        self._write("start", pid=os.getpid())

    def load(self, version: int, first_update: int, params: Named, opt_state: Named) -> None:
        """Take over a state, forgetting everything else.

        Args:
            version: its number.
            first_update: pushes to updates with lower numbers are ignored from now on.
            params: its rows of the parameters, by name.
            opt_state: what belongs to them of the optimizer's state, by name.
        """
        self.version, self._first_update = version, first_update
        self._params = jax.tree.map(jax.numpy.asarray, nested(params))
        self._opt_state = like(jax.eval_shape(self._optimizer.init, self._params), opt_state)
        self._sums.clear()
        self._means.clear()
        self._closed.clear()
        self._pulled: dict[int | None, Any] = {}
        self._changed = {name: np.full(_tracked(name, leaf), version) for name, leaf in named(self._params).items()}
        self._write("load", version=version)

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
        if update < self._first_update or update in self._closed or update in self._means:
            return False
        return self._sums.setdefault(update, Sum()).take(share, tokens, grads)

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
        self.version, mean = version, self._means[update]
        if finite:
            before = named(self._params)
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

    def pull(self, since: int | None) -> tuple[int, Any]:
        """The version, and by name the rows changed after version `since`; None: everything.

        What is sent is the same for all who ask alike, and is put away once.
        """
        if since not in self._pulled:
            sent: dict[str, Sent] = {}
            for name, leaf in named(self._params).items():
                changed = self._changed[name] > (-1 if since is None else since)
                if changed.any():
                    array = np.asarray(leaf)
                    sent[name] = array if changed.all() else some(array, np.flatnonzero(changed))
            self._pulled[since] = self._put(sent)
        return self.version, self._pulled[since]

    def state(self) -> tuple[int, Named, Named]:
        """The version, the parameters and the optimizer's state of this slice, by name."""
        arrays = lambda tree: {name: np.asarray(leaf) for name, leaf in named(tree).items()}
        return self.version, arrays(self._params), arrays(self._opt_state)

    def snapshot(self, keep_from: int | None = None) -> int:
        """Start to write the state to disk; it is copied at once, so that updates may go on.

        Args:
            keep_from: older snapshots than of this version are deleted.

        Returns:
            The version.
        """
        if self._writing:
            self._writing.result()
        for old in self._folder.glob(f"snapshots/*/server-{self.index}.safetensors"):
            if keep_from is not None and int(old.parent.name) < keep_from:
                old.unlink()
        version, params, opt_state = self.state()
        arrays = {f"params/{k}": v.copy() for k, v in params.items()} | {
            f"opt_state/{k}": v.copy() for k, v in opt_state.items()
        }
        self._writing = self._writer.submit(self._write_snapshot, version, arrays)
        return version

    def snapshot_version(self, wait: bool = False) -> int | None:
        """The version of the last snapshot if it is on disk, else None.

        Args:
            wait: for it.
        """
        return self._writing.result() if self._writing and (wait or self._writing.done()) else None

    def restore(self, version: int, first_update: int) -> None:
        """Go back to a snapshot.

        Args:
            version: its version.
            first_update: see `load`.

        Raises:
            InputError: it is not there.
        """
        path = self._snapshot_path(version)
        try:
            arrays = {name: np.asarray(leaf) for name, leaf in load_file(str(path)).items()}
        except OSError as error:
            raise InputError(
                f"{path} cannot be read ({error.strerror or error}): all servers need a file system in common under "
                f"train.run_dir, so that one can take another's place."
            ) from error
        part = lambda kind: {n.removeprefix(kind): a for n, a in arrays.items() if n.startswith(kind)}
        self.load(version, first_update, part("params/"), part("opt_state/"))
        self._write("restore", version=version)

    def busy_seconds(self) -> float:
        """Seconds spent on norms and updates since the start."""
        return self._busy_seconds

    def ping(self) -> int:
        """The process, to see that it answers."""
        return os.getpid()

    def _updated(self, params: Any, opt_state: Any, grads: Any, norm: Any) -> tuple[Any, Any]:
        updates, opt_state = self._optimizer.update(grads, opt_state, params, global_norm=norm)
        return optax.apply_updates(params, updates), opt_state

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

    def _snapshot_path(self, version: int) -> Path:
        return self._folder / "snapshots" / str(version) / f"server-{self.index}.safetensors"

    def _write_snapshot(self, version: int, arrays: dict[str, np.ndarray]) -> int:
        path = self._snapshot_path(version)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        save_file(arrays, str(unfinished))  # pyright: ignore[reportArgumentType]  # it takes NumPy arrays too
        os.replace(unfinished, path)
        return version

    def _write(self, event: str, **values: Any) -> None:
        self._log.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")
        self._log.flush()


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
