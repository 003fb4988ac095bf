"""Copies that differ by one bit on one device: found, named, and repaired; and none found where there are none."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_run import metrics, write_tiny

import jaxpar.cli
from jaxpar import trainer
from jaxpar.checkpoint import Checkpoints
from jaxpar.config import CheckFailed, load_config
from jaxpar.drift import DriftCheck, Place, checksum, from_words, message, words
from jaxpar.mesh import make_mesh, start

LEAVES = {  # shape, dtype, spec, and the axes along which there are copies, on data 2 × pipe 2 × tensor 2
    "whole": ((6, 4), "float32", P(), ("data", "pipe", "tensor")),
    "column": ((6, 4), "bfloat16", P(None, "tensor"), ("data", "pipe")),
    "stack": ((2, 4, 3), "float64", P("pipe", "tensor"), ("data",)),
    "vocabulary": ((8, 3), "float32", P(("pipe", "tensor")), ("data",)),
    "zero": ((4, 6), "float16", P("data"), ("pipe", "tensor")),
    "flags": ((5,), "bool", P(), ("data", "pipe", "tensor")),
    "count": ((), "int32", P(), ("data", "pipe", "tensor")),
    "split": ((4, 4, 4), "float32", P("data", "pipe", "tensor"), ()),
}


def mesh_222() -> jax.sharding.Mesh:
    return make_mesh(data=2, pipe=2, tensor=2)


def make_state() -> dict[str, Any]:
    rng, mesh = np.random.default_rng(0), mesh_222()
    values = {name: rng.normal(size=shape).astype(dtype) for name, (shape, dtype, _, _) in LEAVES.items()}
    values["whole"][2, 1], values["whole"][5, 3] = np.nan, 0.0
    return {"params": {n: jax.device_put(v, NamedSharding(mesh, LEAVES[n][2])) for n, v in values.items()}}


@pytest.fixture(scope="module")
def check() -> DriftCheck:
    """Compiled once; `clean_step` moves on with every test."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state())
    return DriftCheck(mesh_222(), shapes)


def edited(x: jax.Array, device: int, edit: Any) -> jax.Array:
    """The array with one device's copy of its block changed by `edit(block)`, in place."""
    blocks = []
    for shard in x.addressable_shards:
        block = np.array(shard.data)
        if shard.device.id == device:
            edit(block)
        blocks.append(jax.device_put(block, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, blocks)


def flip(bit: int, element: int = 0) -> Any:
    """Flip one bit of one element."""

    def edit(block: np.ndarray) -> None:
        block.reshape(-1).view(np.uint8)[element * block.itemsize + bit // 8] ^= 1 << bit % 8

    return edit


def with_edit(name: str, device: int, edit: Any) -> dict[str, Any]:
    state = make_state()
    state["params"][name] = edited(state["params"][name], device, edit)
    return state


def all_bits(x: jax.Array) -> list[bytes]:
    return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]


def test_equal_copies_are_equal(check: DriftCheck):
    """NaN among them."""
    assert check.check(make_state(), step=7) == []
    assert check.clean_step == 7
    assert check.names == [f"params.{name}" for name in sorted(LEAVES) if LEAVES[name][3]]
    on_each = 96 + 24 + 2 * 4 * 3 * 8 // 4 + 24 + 24 + 5 + 4  # bytes, in the order of LEAVES
    assert str(check) == f"7 leaves that have copies, {on_each / 1e6:.3g} MB on each device"


@pytest.mark.parametrize("name", [name for name in LEAVES if LEAVES[name][3]])
def test_one_bit_on_one_device(check: DriftCheck, name: str):
    _, dtype, _, axes = LEAVES[name]
    bit = 0 if dtype == "bool" else 8 * np.dtype(dtype).itemsize - 2
    at = (1, 0, 1)
    device = mesh_222().devices[at].id
    check.check(make_state(), step=3)
    (drift,) = check.check(with_edit(name, device, flip(bit, element=0 if name == "count" else 2)), step=9)
    assert (drift.leaf, drift.axes, drift.copies) == (f"params.{name}", axes, 2 ** len(axes))
    assert (drift.step, drift.clean_step, check.clean_step) == (9, 3, 3)
    if axes == ("data",):  # one against one
        other = mesh_222().devices[0, 0, 1].id
        assert (drift.places, drift.good) == ((Place(other, 0, (0, 0, 1)), Place(device, 0, at)), None)
    else:
        assert drift.places == (Place(device, 0, at),)
        assert drift.good == 0


def negate_all(block: np.ndarray) -> None:
    block *= -1


def swap(block: np.ndarray) -> None:
    block[0, 0], block[0, 1] = block[0, 1], block[0, 0]


def lose_the_sign_of_zero(block: np.ndarray) -> None:
    block[5, 3] = -0.0


def another_nan(block: np.ndarray) -> None:
    flip(3, element=9)(block)


@pytest.mark.parametrize("edit", [negate_all, swap, lose_the_sign_of_zero, another_nan])
def test_changes_that_sums_could_miss(check: DriftCheck, edit: Any):
    """An even number of flipped sign bits adds up to nothing mod 2^32, and so does a swap."""
    (drift,) = check.check(with_edit("whole", 6, edit), step=1)
    assert [place.device for place in drift.places] == [6]


def test_majority_among_several(check: DriftCheck):
    """Of 8 copies 3 are wrong, two of them alike; then 4, which is no minority."""
    state = make_state()
    for device, bit in ((0, 1), (3, 5), (5, 5)):
        state["params"]["whole"] = edited(state["params"]["whole"], device, flip(bit))
    (drift,) = check.check(state, step=1)
    assert [place.device for place in drift.places] == [0, 3, 5]
    assert drift.good == 1
    state["params"]["whole"] = edited(state["params"]["whole"], 7, flip(9))
    (drift,) = check.check(state, step=1)
    assert [place.device for place in drift.places] == list(range(8)) and drift.good is None
    with pytest.raises(CheckFailed, match=r"params\.whole: no majority among 8 copies over data × pipe × tensor"):
        check.resynchronise(state, [drift])


@pytest.mark.parametrize("name", ["whole", "column", "zero", "flags", "count"])
def test_the_majority_repairs(check: DriftCheck, name: str):
    want = make_state()["params"]
    state = with_edit(name, 0, flip(0))
    state["params"]["whole"] = edited(state["params"]["whole"], 4, flip(30, element=9))  # also in a NaN
    before = all_bits(state["params"][name])
    drifts = check.check(state, step=5)
    assert {drift.leaf for drift in drifts} == {"params.whole", f"params.{name}"}
    state = check.resynchronise(state, drifts)
    assert check.clean_step == 5
    assert before != all_bits(want[name])
    for leaf, x in state["params"].items():
        assert all_bits(x) == all_bits(want[leaf]), leaf
        assert x.sharding == want[leaf].sharding and x.dtype == want[leaf].dtype
    assert check.check(state, step=6) == []


def test_each_block_has_its_own_majority(check: DriftCheck):
    """Both halves over tensor drifted, on different devices: `column` has 4 copies of each."""
    state = make_state()
    for at in ((0, 0, 0), (1, 0, 1)):
        state["params"]["column"] = edited(state["params"]["column"], mesh_222().devices[at].id, flip(4))
    drifts = check.check(state, step=2)
    assert [(drift.places[0].at, drift.good) for drift in drifts] == [((0, 0, 0), 1), ((1, 0, 1), 0)]
    state = check.resynchronise(state, drifts)
    assert all_bits(state["params"]["column"]) == all_bits(make_state()["params"]["column"])


def test_copies_that_are_wrong_in_the_same_way(check: DriftCheck):
    """All on stage 1: along data they are equal."""
    state = make_state()
    for data in (0, 1):
        state["params"]["column"] = edited(state["params"]["column"], mesh_222().devices[data, 1, 0].id, flip(4))
    (drift,) = check.check(state, step=2)
    assert [place.at for place in drift.places] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert drift.good is None


def test_the_message_names_leaf_device_host_and_first_step(check: DriftCheck):
    check.check(make_state(), step=20)
    assert message(check.check(with_edit("column", 5, flip(2)), step=30), mesh_222()) == (
        "after step 30 copies that should be equal differ, in 1 leaves of the state. After step 20 they were equal: "
        "step 21 is the first that can have done it.\n"
        "- params.column: not as most of 4 copies over data × pipe: device 5 of process 0 (data 1, pipe 0, tensor 1)"
    )
    (drift,) = check.check(with_edit("column", 5, flip(2)), step=30)
    assert message([drift] * 12, mesh_222()).endswith("\n- and 2 more")


def test_only_checksums_travel(check: DriftCheck):
    """One all-gather of 8 bytes for each of 7 leaves and 8 devices, of what each device computed of its own copy."""
    assert check._compare is not None
    text = check._compare.as_text()
    (gathered,) = re.findall(r"= (\w+\[[\d,]+\])\S* all-gather(?:-start)?\(", text)
    assert gathered == "u32[8,7,2]"
    assert not re.search(r"all-reduce|collective-permute|all-to-all", text)


def test_a_mesh_without_copies():
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(make_mesh(data=8), P("data")))
    check = DriftCheck(make_mesh(data=8), {"x": x})
    assert check.check({"x": jnp.zeros(8)}, step=1) == []
    assert str(check) == "no leaf of the state has copies on this mesh, nothing is compared"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8", "bool", "int32"])
def test_words_are_the_bits(dtype: str):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 5)), dtype) * jnp.asarray(-1.5, dtype)
    assert words(x).dtype == jnp.uint32
    assert np.asarray(from_words(words(x), x.dtype)).tobytes() == np.asarray(x).tobytes()
    flat = words(x).reshape(-1)
    assert int(checksum(x)[0]) == int(np.asarray(flat, np.uint64).sum() % 2**32)


# ------------------------------------------------------------------------------------------------------ whole runs

SETTINGS = ("train.eval_every=null", "checkpoint.keep=9", "train.steps=5", "train.drift_check_every=2")


def flip_during(monkeypatch: pytest.MonkeyPatch, after_step: int, device: int) -> None:
    """Let one bit of a norm's weight flip on one device after a step of every run that follows."""
    build = trainer.build

    def build_flipping(*args: Any) -> Any:
        program = build(*args)

        def train_step(state: Any, batch: Any) -> Any:
            state, measured = program.train_step(state, batch)
            if state.step == after_step:
                scale = edited(state.params["norm"]["scale"], device, flip(20, element=3))
                state = state._replace(params={**state.params, "norm": {**state.params["norm"], "scale": scale}})
            return state, measured

        return dataclasses.replace(program, train_step=train_step)

    monkeypatch.setattr(trainer, "build", build_flipping)


def test_a_run_stops_and_says_where_and_since_when(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_compiles: None
):
    """Through the command line: exit 1."""
    config_file = write_tiny(tmp_path)
    flip_during(monkeypatch, after_step=3, device=2)
    monkeypatch.setattr(sys, "argv", ["jaxpar", "train", str(config_file), *SETTINGS, "checkpoint.every=9"])
    with pytest.raises(SystemExit) as stop:
        jaxpar.cli.main()
    assert stop.value.code == 1
    printed, error = capsys.readouterr()
    assert "drift check: every 2 steps, " in printed
    for said in (
        "stopped: after step 4 copies that should be equal differ, in 1 leaves of the state. After step 2 they were",
        "step 3 is the first that can have done it.",
        "- params.norm.scale: not as most of 4 copies over data × tensor: device 2 of process 0 (data 1, pipe 0,",
        "This state is not saved; there is no checkpoint yet.",
    ):
        assert said in error
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_no_checkpoint_is_of_a_state_that_was_not_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_compiles: None
):
    """A restored state has equal copies whatever it was made of, so that the drift could not be found any more."""
    settings = [*SETTINGS, "train.drift_check_every=4", "checkpoint.every=1"]
    config, mesh = start(load_config(write_tiny(tmp_path), settings))
    flip_during(monkeypatch, after_step=3, device=2)
    with pytest.raises(CheckFailed, match=r"(?s)after step 3 copies .* the newest checkpoint is of step 2\."):
        trainer.train(config, mesh)


def test_a_run_that_is_repaired_ends_like_one_that_was_not_disturbed(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick_compiles: None
):
    """Data 2 × pipe 2 × tensor 2, ZeRO stage 1; the undisturbed run finds nothing. The bit flips before the check."""
    settings = [*SETTINGS, "mesh.pipe=2", "parallel.zero=1", "train.drift_action=resynchronise"]
    states, losses = [], []
    for name in ("whole", "disturbed"):
        (tmp_path / name).mkdir()
        config, mesh = start(load_config(write_tiny(tmp_path / name), settings))
        if name == "disturbed":
            flip_during(monkeypatch, after_step=4, device=6)
        trainer.train(config, mesh)
        losses.append([line["loss"] for line in metrics(tmp_path / name / "run")])
        with Checkpoints(tmp_path / name / "run" / "checkpoints", keep=9) as checkpoints:
            states.append(jax.device_get(checkpoints.restore(jaxpar.step.build(config, mesh).saved_state, 5)[0]))
        printed = capsys.readouterr().out
        assert ("device 6 of process 0 (data 1, pipe 1, tensor 0)" in printed) == (name == "disturbed")
        assert ("The majority's copies were given to the others." in printed) == (name == "disturbed")
    assert losses[0] == losses[1] and len(losses[0]) == 5
    for a, b in zip(*(jax.tree.leaves(state) for state in states), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
