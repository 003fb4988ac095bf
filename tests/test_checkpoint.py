"""Round trips between meshes, interrupted and failed writes, and checkpoints that do not fit."""

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint import SCHEMA_VERSION, Checkpoints
from jaxpar.config import InputError


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    rate: Any


def make_state(seed: int = 0, width: int = 16, tx: optax.GradientTransformation | None = None) -> State:
    """Every bit pattern that a copy could change: float32, bfloat16 and int32 at random, NaN payloads, -0, scalars."""
    random = np.random.default_rng(seed)
    bits32, bits16 = (random.integers(0, 2**n, (8, width), dtype=f"uint{n}") for n in (32, 16))
    weight = bits32.view(np.float32)
    weight[0, :2] = [-0.0, np.uint32(0x7FC12345).view(np.float32)]
    params = {
        "blocks": {"up": {"weight": weight, "half": bits16.view(jnp.bfloat16)}},
        "embedding": {"weight": random.normal(size=(24, 8)).astype(np.float32)},
        "ids": bits32.view(np.int32),
    }
    tx = tx or optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-3), _float_mask))
    return State(jnp.int32(7), jax.tree.map(jnp.asarray, params), tx.init(params), np.float32(0.1))


def _float_mask(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.dtype != jnp.int32, tree)


def mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def place(state: Any, on: jax.sharding.Mesh, spec: P) -> Any:
    """Shapes with matrices laid out by `spec`, everything else replicated."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(on, spec if x.ndim == 2 and x.shape[0] % 8 == 0 else P())
        ),
        state,
    )


def put(state: Any, on: jax.sharding.Mesh, spec: P) -> Any:
    return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, place(state, on, spec))


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def save(checkpoints: Checkpoints, step: int, state: Any = None) -> None:
    checkpoints.save(step, make_state(step) if state is None else state, config_yaml="a: 1\n", data_position=step * 16)


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """Writes beyond this size fail with EFBIG, as they would with ENOSPC on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_bits_survive_any_change_of_layout(tmp_path: Path):
    state = make_state()
    data8 = mesh(data=8)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        save(checkpoints, 7, put(state, data8, P("data")))
        checkpoints.wait()
        layouts = [
            place(state, data8, P("data")),
            place(state, mesh(data=2, tensor=4), P("data", "tensor")),
            place(state, mesh(data=2, tensor=4), P("tensor", "data")),
            place(state, mesh(data=2, pipe=2, tensor=2), P(("pipe", "tensor"), None)),
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(jax.devices()[3])), state
            ),
        ]
        for layout in layouts:
            restored, metadata = checkpoints.restore(layout)
            assert_same_bits(restored, state)
            for leaf, want in zip(jax.tree.leaves(restored), jax.tree.leaves(layout), strict=True):
                assert leaf.sharding == want.sharding
            assert (metadata.config_yaml, metadata.data_position) == ("a: 1\n", 112)
    assert metadata.schema_version == SCHEMA_VERSION
    assert (metadata.jaxpar_version, metadata.jax_version) == (jaxpar.__version__, jax.__version__)
    assert metadata.arrays["params/blocks/up/half"] == "bfloat16[8,16]"
    assert metadata.arrays["step"] == "int32[]"


def test_saved_split_restored_split_otherwise(tmp_path: Path):
    """The other way: from (data 2, tensor 4), split in both dims, to (data 8) and, without a sharding, one device."""
    state = make_state()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1, put(state, mesh(data=2, tensor=4), P("tensor", "data")))
        checkpoints.wait()
        assert_same_bits(checkpoints.restore(place(state, mesh(data=8), P(None, "data")))[0], state)
        bare, _ = checkpoints.restore(jax.eval_shape(lambda: state))
        assert_same_bits(bare, state)
        assert {leaf.sharding for leaf in jax.tree.leaves(bare)} == {SingleDeviceSharding(jax.devices()[0])}


def test_saved_arrays_may_be_donated_at_once(tmp_path: Path):
    on = mesh(data=8)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    state = put({str(n): np.random.default_rng(n).normal(size=(512, 64)) for n in range(8)}, on, P("data"))
    want = jax.tree.map(lambda x: np.array(x, copy=True), state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1, state)
        for _ in range(3):
            state = update(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        assert_same_bits(checkpoints.restore(place(want, on, P("data")))[0], want)


def test_keeps_the_newest_and_says_what_is_there(tmp_path: Path):
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.latest_step() is None and not (tmp_path / "c").exists()
        with pytest.raises(InputError, match="no finished checkpoint; finished steps: none"):
            checkpoints.restore(make_state())
        for step in (3, 10, 20):
            save(checkpoints, step)
        save(checkpoints, 20)  # the last step of a run may be saved twice
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20]
        assert_same_bits(checkpoints.restore(make_state())[0], make_state(20))
        assert_same_bits(checkpoints.restore(make_state(), step=10)[0], make_state(10))
        assert checkpoints.metadata(10).data_position == 160
        with pytest.raises(InputError, match="no finished checkpoint of step 3; finished steps: 10, 20"):
            checkpoints.metadata(3)
        with pytest.raises(InputError, match="step 20, later than step 15"):
            save(checkpoints, 15)
    with Checkpoints(tmp_path / "c", keep=1) as later:  # another process, later
        assert later.latest_step() == 20
        save(later, 30)
    assert later.steps() == [30]


def test_a_full_disk_surfaces_once_and_leaves_the_last_checkpoint(tmp_path: Path):
    big = {"weight": np.random.default_rng(0).normal(size=(100_000,))}
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, big)
    checkpoints.wait()
    surfacing = [checkpoints.close, checkpoints.wait, lambda: save(checkpoints, 9, big)]
    for step, surface in enumerate(surfacing, start=2):
        with files_limited_to(50_000):
            save(checkpoints, step, big)  # returns: the arrays are copied, the write fails later
            with pytest.raises(InputError) as failure:
                surface()
        text = str(failure.value)
        assert str(tmp_path) in text and "file too large" in text and "up to 800.0 kB" in text and "are free" in text
        assert "checkpoint of step 1 is still usable" in text and "train.run_dir" in text
        assert checkpoints.steps() == [1]
        assert [path.name for path in tmp_path.iterdir()] == ["1"]  # what was half written takes no room
        assert_same_bits(checkpoints.restore(big)[0], big)
        checkpoints.wait()  # nothing is left to raise
    save(checkpoints, 5, big)
    checkpoints.close()
    assert checkpoints.steps() == [5]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "c").write_text("a file")
    checkpoints = Checkpoints(tmp_path / "c" / "d", keep=1)
    with pytest.raises(InputError, match=r"not a directory.*No checkpoint was finished before"):
        save(checkpoints, 1)
    checkpoints.close()


def test_errors_that_are_ours_are_not_called_disk_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any, **kwargs: Any):
        raise RuntimeError("a bug")

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        monkeypatch.setattr(ocp.path.atomicity.AtomicRenameTemporaryPath, "finalize", broken)
        save(checkpoints, 2)
        with pytest.raises(RuntimeError, match="a bug"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_the_old_one_stays_until_the_new_one_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    finalize = ocp.path.atomicity.AtomicRenameTemporaryPath.finalize

    async def watched(self: Any, *args: Any, **kwargs: Any):
        seen.append(sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()))
        await finalize(self, *args, **kwargs)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        monkeypatch.setattr(ocp.path.atomicity.AtomicRenameTemporaryPath, "finalize", watched)
        save(checkpoints, 2)
    assert seen and all("1" in names for names in seen)
    assert checkpoints.steps() == [2]


KILLED_BEFORE_THE_RENAME = """
import os, sys
from pathlib import Path
import numpy as np
import orbax.checkpoint as ocp
from jaxpar.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
state = {"weight": np.arange(4.0)}
checkpoints.save(1, state, config_yaml="", data_position=16)
checkpoints.wait()
finalize = ocp.path.atomicity.AtomicRenameTemporaryPath.finalize

async def die(self, *args, **kwargs):
    if self.get_final().name == "2":  # everything is written, only the rename is missing
        os._exit(9)
    await finalize(self, *args, **kwargs)

ocp.path.atomicity.AtomicRenameTemporaryPath.finalize = die
checkpoints.save(2, state, config_yaml="", data_position=32)
checkpoints.wait()
"""


def test_a_kill_while_writing_is_no_checkpoint(tmp_path: Path):
    ended = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_RENAME, str(tmp_path)], check=False)
    assert ended.returncode == 9
    assert len(list(tmp_path.iterdir())) == 2  # the finished one, and what the kill left
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [1]
        restored, metadata = checkpoints.restore({"weight": jax.ShapeDtypeStruct((4,), jnp.float64)})
        assert restored["weight"].tolist() == [0, 1, 2, 3] and metadata.data_position == 16
        assert len(list(tmp_path.iterdir())) == 2  # reading leaves alone what may be another process's work
        save(checkpoints, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_what_does_not_fit_is_named_before_anything_is_read(tmp_path: Path):
    state = make_state()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1, state)
        checkpoints.wait()
        shutil.rmtree(tmp_path / "1" / "state")  # had an array been read, the error would be another
        with pytest.raises(InputError, match="does not fit") as failure:
            checkpoints.restore(make_state(width=32))
        assert "params/blocks/up/weight (float32[8,16] in the checkpoint, float32[8,32] here)" in str(failure.value)
        assert "config.yaml" in str(failure.value)
        with pytest.raises(InputError, match=r"only in the checkpoint: opt_state/1/inner_state/0/count.*\d+ more"):
            checkpoints.restore(make_state(tx=optax.sgd(0.1)))
        other = state._replace(params=state.params | {"head": jnp.zeros(3)})
        with pytest.raises(InputError, match=r"missing in the checkpoint: params/head\."):
            checkpoints.restore(other)
        half = state._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))
        with pytest.raises(InputError, match=r"ids \(int32\[8,16\] in the checkpoint, bfloat16\[8,16\] here\)"):
            checkpoints.restore(half)
        with pytest.raises(InputError, match=r"cannot be read.*There is no other one"):
            checkpoints.restore(state)


def test_another_schema_version_is_refused(tmp_path: Path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        path = tmp_path / "1" / "metadata" / "metadata"
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"schema_version": 99, "jaxpar_version": "7.0", "new_key": 1}))
        with pytest.raises(InputError, match=r"schema version 99, written by jaxpar 7\.0.*reads version 1"):
            checkpoints.restore(make_state())
        path.write_text("{")
        with pytest.raises(InputError, match="cannot be read as a jaxpar checkpoint"):
            checkpoints.metadata()


def test_damaged_files_name_the_way_out(tmp_path: Path):
    state = {"weight": np.random.default_rng(0).normal(size=(5000,))}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        save(checkpoints, 1, state)
        save(checkpoints, 2, state)
        checkpoints.wait()
        for path in (tmp_path / "2" / "state").rglob("d/*"):
            os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(InputError, match=r"2 cannot be read.*to go on from step 1"):
            checkpoints.restore(state)
        assert_same_bits(checkpoints.restore(state, step=1)[0], state)


def test_orbax_is_quiet_and_others_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="absl"), Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        assert not caplog.records
        logging.getLogger("absl").warning("from somebody else")
        assert len(caplog.records) == 1
