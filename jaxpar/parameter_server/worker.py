"""A worker: pulls parameters, computes loss and gradients of a share of a batch on its own mesh, pushes to the servers.

It runs the same compiled loss and gradients as all-reduce training. Its mesh may have any axes; servers know nothing of
it, since parameters and gradients travel whole, in model order.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.data.sources import open_data
from jaxpar.data.windows import Rows as Batch
from jaxpar.flops import peak_flops_per_second
from jaxpar.mesh import start
from jaxpar.names import Named, like, named
from jaxpar.parameter_server.rows import Rows, Sent, sent_bytes, without_zeros
from jaxpar.parameter_server.slices import Slices
from jaxpar.step import MakeModel, abstract_batch, build


class ServerLost(Exception):
    """A server does not answer."""


@dataclass(frozen=True)
class Ready:
    """A worker that can begin.

    Attributes:
        config: of the run, its mesh resolved.
        device_kind: of its devices.
        peak_flops_per_second: of one device; None: not known.
        process: its number on its host.
    """

    config: Config
    device_kind: str
    peak_flops_per_second: float | None
    process: int


@dataclass(frozen=True)
class Gradient:
    """What became of a share.

    Attributes:
        update: number of the update that it is for.
        means: over its unmasked tokens: `loss`, and what else is minimised (`jaxpar.losses.means`).
        tokens: how many these are.
        base_version: of the parameters that were used, the oldest of the servers'.
        pushed: for each server what `push` gave back, or a reference to it that can be awaited.
        pulled_bytes: of parameters that came.
        pushed_bytes: of gradients that went.
        saved_bytes: of rows of zeros that did not have to go.
        compute_seconds: from the parameters to the gradients on the host.
    """

    update: int
    means: dict[str, float]
    tokens: float
    base_version: int
    pushed: Sequence[Any] = field(repr=False)
    pulled_bytes: int
    pushed_bytes: int
    saved_bytes: int
    compute_seconds: float


class Worker:
    """One worker. Its methods are called one at a time.

    Args:
        config: of the run.
        slices: what each server owns.
        cache_dir: where the run's text lies as tokens.
        get: waits so many seconds for what servers' methods gave back, and raises `ServerLost` if it does not come.
        make_model: builds the model; by default the config's own.
    """

    def __init__(
        self,
        config: Config,
        slices: Sequence[Slices],
        cache_dir: str,
        get: Callable[[Any, float], Any],
        make_model: MakeModel | None = None,
    ) -> None:
        self._slices, self._get, self._cache_dir = slices, get, cache_dir
        own, mesh = start(config.of_one_worker())
        self.config = config.model_copy(update={"mesh": own.mesh})
        self._own = own
        self._program = build(own, mesh, make_model)
        self._saved = self._program.saved_state.params
        self._shapes = named(self._saved)
        stacking, stored = self._program.stacking, self._program.abstract_state.params
        self._arrange = jax.jit(stacking.arrange, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, stored))
        self._model_order = jax.jit(stacking.model_order)
        self._pulled: tuple[int, bool] | None = None
        self._asynchronous = config.parameter_server.mode == "async"
        self._device = mesh.devices.flat[0]

    def ready(self) -> Ready:
        """Open the data and compile, so that the time of a share holds neither."""
        data = open_data(self.config, Path(self._cache_dir))
        self._examples = {"train": data.train, "validation": data.validation}
        params, number = self._program.abstract_state.params, jax.ShapeDtypeStruct((), np.int32)
        batch = abstract_batch(self._own, self._program)
        self._loss_and_grads = self._program.loss_and_grads.lower(params, batch, number, number).compile()
        self._eval_step = self._program.eval_step.lower(params, batch).compile() if data.validation else None
        peak = peak_flops_per_second(self._device.device_kind, self.config.train.compute_dtype)
        return Ready(self.config, self._device.device_kind, peak, os.getpid())

    def gradient(
        self, servers: Sequence[Any], era: int, update: int, share: int, step: int, part: int, timeout_seconds: float
    ) -> Gradient:
        """Compute the gradient of a share of a batch with the newest parameters, and send it off.

        Args:
            servers: their handles.
            era: changes when servers went back to a snapshot, so that nothing pulled before is used.
            update: the update's number.
            share: which share of the update.
            step: which batch.
            part: which part of the batch.
            timeout_seconds: for each server's answer.

        Raises:
            ServerLost: a server does not answer.
        """
        pulled_bytes = self._pull(servers, era, timeout_seconds, predicted=self._asynchronous)
        start = time.perf_counter()
        first_row, batch = self._rows("train", step, part)
        means, grads = self._loss_and_grads(self._params, batch, np.int32(step), np.int32(first_row))
        means, grads = jax.device_get((means, self._model_order(grads)))
        tokens = float(means.pop("tokens"))
        compute_seconds = time.perf_counter() - start
        arrays = named(grads)
        parts = [{s.name: without_zeros(arrays[s.name][s.start : s.stop]) for s in slices} for slices in self._slices]
        pushed = [server.push.remote(update, share, tokens, sent) for server, sent in zip(servers, parts, strict=True)]
        pushed_bytes = sum(map(sent_bytes, parts))
        return Gradient(
            update=update,
            means={name: float(mean) for name, mean in means.items()},
            tokens=tokens,
            base_version=self._base_version,
            pushed=pushed,
            pulled_bytes=pulled_bytes,
            pushed_bytes=pushed_bytes,
            saved_bytes=sum(g.nbytes for g in arrays.values()) - pushed_bytes,
            compute_seconds=compute_seconds,
        )

    def evaluate(
        self, servers: Sequence[Any], era: int, batch_number: int, part: int, timeout_seconds: float
    ) -> tuple[float, float]:
        """The loss summed over the tokens of a part of a validation batch, and their number."""
        self._pull(servers, era, timeout_seconds, predicted=False)
        assert self._eval_step, "there is no validation data"
        _, batch = self._rows("validation", batch_number, part)
        sums = self._eval_step(self._params, batch)
        return float(sums["loss"]), float(sums["tokens"])

    def _rows(self, which: str, step: int, part: int) -> tuple[int, Any]:
        """The number of the first row of a part of a batch, and the part on the devices."""
        count = self._own.train.global_batch
        read: Batch = self._examples[which].rows(step, range(part * count, (part + 1) * count))
        return part * count, jax.device_put(read, self._program.batch_sharding)

    def _pull(self, servers: Sequence[Any], era: int, timeout_seconds: float, predicted: bool) -> int:
        """Bring the parameters up to date; returns the bytes that came."""
        if (era, predicted) != self._pulled:
            self._pulled, self._versions, self._host = (era, predicted), [None] * len(servers), {}
            self._on_devices: Named = {}
        calls = [
            server.pull.remote(version, predicted) for server, version in zip(servers, self._versions, strict=True)
        ]
        answers = self._get(calls, timeout_seconds)
        came: list[Mapping[str, Sent]] = self._get([sent for _, sent in answers], timeout_seconds)
        self._versions = [version for version, _ in answers]
        self._base_version = min(self._versions)
        for slices, sent in zip(self._slices, came, strict=True):
            for s in slices:
                if s.name in sent:
                    self._put(s.name, s.start, sent[s.name])
        changed = {name for sent in came for name in sent}
        self._on_devices |= {name: jax.device_put(self._host[name], self._shapes[name].sharding) for name in changed}
        if changed:
            self._params = self._arrange(like(self._saved, self._on_devices))
        return sum(map(sent_bytes, came))

    def _put(self, name: str, start: int, sent: Sent) -> None:
        """Put rows into the copy on the host, which is never changed in place: devices may look at the same memory."""
        shape = self._shapes[name]
        if isinstance(sent, np.ndarray) and sent.shape == shape.shape:
            self._host[name] = sent
            return
        whole = self._host[name].copy() if name in self._host else np.zeros(shape.shape, shape.dtype)
        rows = whole[start : start + sent.shape[0]]
        if isinstance(sent, Rows):
            rows[sent.numbers] = sent.values
        else:
            rows[:] = sent
        self._host[name] = whole
