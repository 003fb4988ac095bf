"""Which axes, how many, how many bytes: programs that can be counted by hand."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hand_counted
import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import inspect
from jaxpar.hardware import DEVICES
from jaxpar.inspect import hlo
from jaxpar.inspect.collectives import Collective, Places, collective
from jaxpar.inspect.targets import compiler_options, parse_target, target_devices
from jaxpar.mesh import make_mesh


def test_every_kind_over_every_axis_on_8_cpu_devices():
    mesh = make_mesh(*hand_counted.SHAPES[8])
    report = inspect.report(hand_counted.lowered(mesh).compile(), mesh)
    assert hand_counted.found(report) == hand_counted.expected((2, 2, 2), devices_per_host=8)
    assert report.hidden_fraction == 0  # CPU collectives are synchronous


def test_every_kind_over_every_axis_on_64_cpu_devices():
    script = Path(hand_counted.__file__)
    result = subprocess.run([sys.executable, script, "64"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == hand_counted.expected((8, 2, 4), devices_per_host=64)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("h100:8", 8), ("h100:8x8", 64)])
def test_every_kind_over_every_axis_on_h100(name: str, devices: int):
    target = parse_target(name)
    mesh = make_mesh(*hand_counted.SHAPES[devices], devices=target_devices(target))
    compiled = hand_counted.lowered(mesh).compile(compiler_options=compiler_options(target))
    report = inspect.report(compiled, mesh)
    assert hand_counted.found(report) == hand_counted.expected(hand_counted.SHAPES[devices], devices_per_host=8)


def test_a_mesh_whose_devices_are_not_in_order():
    """Groups count positions in the mesh, not device ids."""
    devices = np.array(jax.devices()[:8])[[3, 0, 6, 1, 7, 2, 5, 4]].reshape(4, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    by_axis = lambda x: (lax.psum(x, "a"), lax.psum(x[:1], "b"))
    total = jax.shard_map(by_axis, mesh=mesh, in_specs=P("a", "b"), out_specs=(P(None, "b"), P("a", None)))
    x = jax.ShapeDtypeStruct((8, 16), "float32", sharding=jax.NamedSharding(mesh, P("a", "b")))
    rows = {row.axes: row for row in inspect.report(jax.jit(total).lower(x).compile(), mesh).collectives}
    assert {axes: row.buffer_bytes_per_step for axes, row in rows.items()} == {("a",): 2 * 8 * 4, ("b",): 8 * 4}
    # So does what the compiler inserts by itself in global view.
    whole = jax.jit(lambda x: x.sum(0), in_shardings=x.sharding, out_shardings=jax.NamedSharding(mesh, P("b")))
    (row,) = inspect.report(whole.lower(x).compile(), mesh).collectives
    assert (row.op, row.axes, row.buffer_bytes_per_step) == ("all-reduce", ("a",), 8 * 4)


def places(hosts: int, per_host: int, shape: tuple[int, ...]) -> Places:
    devices = np.array([SimpleNamespace(process_index=i // per_host) for i in range(hosts * per_host)])
    return Places(SimpleNamespace(axis_names=("data", "tensor"), devices=devices.reshape(shape)))


def read(line: str, where: Places, before: str = "") -> Collective | None:
    text = f"{before}ENTRY %main (x: f32[8], y: bf16[4]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n"
    text += f"  %y = bf16[4]{{0}} parameter(1)\n  ROOT %r = {line}\n}}"
    module = hlo.parse(text)
    return collective(module.entry.root, module.entry, module, where)


def test_arrays_that_travel_together_count_once():
    found = read("(f32[8]{0}, bf16[4]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}", places(1, 4, (2, 2)))
    assert found == Collective("all-reduce", ("tensor",), 2, 2, False, 40, 40.0, False)


@pytest.mark.parametrize(
    "line",
    [
        "f32[8]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}",
        "f32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
        "f32[8]{0} negate(%x)",
        "f32[8]{0} all-gather-done(%x)",
    ],
)
def test_what_communicates_nothing(line: str):
    assert read(line, places(1, 4, (2, 2))) is None


def test_a_collective_wrapped_in_an_asynchronous_computation():
    inside = "%wrapped (p: f32[8]) -> f32[16] {\n  %p = f32[8]{0} parameter(0)\n"
    inside += "  ROOT %g = f32[16]{0} all-gather(%p), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}\n}\n\n"
    line = "((f32[8]{0}), f32[16]{0}) async-start(%x), calls=%wrapped"
    found = read(line, places(2, 2, (2, 2)), inside)
    assert found == Collective("all-gather", ("data",), 2, 1, True, 64, 32.0, True)


@pytest.mark.parametrize(("note", "asynchronous"), [("true", False), ("false", True)])
def test_a_start_that_xla_marks_as_synchronous(note: str, asynchronous: bool):
    line = f'f32[8]{{0}} all-reduce-start(%x), replica_groups={{}}, backend_config={{"is_sync":{note},"x":1}}'
    found = read(line, places(1, 4, (2, 2)))
    assert found and found.asynchronous is asynchronous and found.axes == ("data", "tensor")


def test_time_on_the_links():
    """H100: 450 GB/s inside a host, 50 GB/s for each device that a group has on a host."""
    h100 = DEVICES["H100"]
    all_reduce = Collective("all-reduce", ("data",), 16, 8, True, 1000, 1800.0, True)
    assert all_reduce.link_seconds(h100) == {"nvlink": 1800 / 450e9, "network": 1800 / 8 / 50e9}
    assert all_reduce.seconds(h100) == 1800 / 8 / 50e9
    inside = Collective("all-reduce", ("data",), 8, 8, False, 1000, 1750.0, True)
    assert inside.seconds(h100) == 1750 / 450e9
    spread = Collective("all-gather", ("data",), 8, 1, True, 1000, 875.0, True)
    assert spread.link_seconds(h100) == {"nvlink": 0, "network": 875 / 50e9}
    exchange = Collective("all-to-all", ("data",), 16, 8, True, 1000, 937.5, True)
    assert exchange.link_seconds(h100)["network"] == pytest.approx(500 / 50e9)  # half of it leaves the host
    assert inside.seconds(None) == 0
