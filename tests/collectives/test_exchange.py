"""Exchanges in general: the tables are right for every number of devices, and devices do what a table says."""

from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas

from jaxpar.collectives import Exchange, halving_doubling_steps, hierarchical_steps, ring_steps, tree_steps
from jaxpar.collectives.exchange import all_gather, all_reduce, reduce_scatter, wide
from jaxpar.inspect.summary import read_schedule
from jaxpar.inspect.targets import compiler_options, parse_target, target_devices
from jaxpar.mesh import make_mesh

FLAT = [ring_steps, tree_steps, halving_doubling_steps]


def every_exchange(n: int) -> list[Exchange]:
    hosts = [(g, across) for g in range(1, n + 1) if n % g == 0 for across in FLAT]
    return [*(steps(n) for steps in FLAT), *(hierarchical_steps(n, g, across) for g, across in hosts)]


@pytest.mark.parametrize("n", [*range(1, 13), 16, 24, 31, 64])
def test_every_device_ends_with_all_sums(n: int):
    for exchange in every_exchange(n):
        steps = (*exchange.reduce, *exchange.share)
        held = np.random.default_rng(n).integers(2**40, size=(n, exchange.blocks))
        after = [held, *exchange.plain(held)]
        assert (after[-1] == held.sum(0)).all()
        for step in steps:
            for devices in zip(*((send.source, send.target) for send in step.sends), strict=True):
                assert len(set(devices)) == len(devices) and set(devices) <= set(range(n))
            assert all(0 <= send.block <= exchange.blocks - step.blocks for send in step.sends)


@pytest.mark.parametrize("n", [*range(1, 13), 16, 24, 31, 64])
def test_every_device_has_its_part_of_a_scatter(n: int):
    """Each part is there after the steps that the exchange names, and not a step earlier on all of them."""
    for exchange in every_exchange(n):
        held = np.random.default_rng(n).integers(2**40, size=(n, exchange.blocks, n))
        total = held.sum(0).reshape(n, -1)
        needed = len(exchange.reduce) + exchange.scatter_shares
        after = [held, *islice(exchange.plain(held), needed)]
        has = [
            [(x.reshape(n, n, -1)[i, row] == total[row]).all() for i, row in enumerate(exchange.rows)] for x in after
        ]
        assert sorted(exchange.rows) == list(range(n))
        assert all(has[-1])
        assert n == 1 or not all(has[-2])


EXCHANGES = {
    "ring": ring_steps(4, [2, 0, 3, 1]),
    "tree": tree_steps(5),
    "chain": tree_steps(6, [1, 2, 3, -1, 3, 4]),
    "halving_doubling": halving_doubling_steps(6),
    "hierarchical": hierarchical_steps(6, 2),
    "hierarchical folded": hierarchical_steps(6, 2, halving_doubling_steps),
    "hierarchical tree": hierarchical_steps(8, 4, tree_steps),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_devices_do_what_the_steps_say(name: str):
    """Bit for bit: the same additions in the same order, in float32 or wider, and the same roundings on the wire."""
    exchange = EXCHANGES[name]
    wires = {"bfloat16": [None, "float32"], "float32": [None, "bfloat16"], "float64": ["float32"]}
    held = {f"{d} {w}": replicas.random((exchange.devices, 11), d) for d in wires for w in wires[d]}
    wire_of = {key: jnp.dtype(x.dtype if key.endswith("None") else key.split()[1]) for key, x in held.items()}

    def sums(held: dict[str, jax.Array]) -> dict[str, jax.Array]:
        total = lambda x, wire: all_reduce(x.astype(wide(x.dtype)), "data", exchange, wire).astype(x.dtype)
        return {key: total(x, wire_of[key]) for key, x in held.items()}

    for key, got in replicas.each_device(sums, held).items():
        want = replicas.by_hand(exchange, held[key], wire_of[key])
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=key)


def test_a_reduce_scatter_rounds_no_more_than_it_sends():
    """The last sum stays where it is made, and stays in float32."""
    held = replicas.random((4, 4, 3), "float32")
    got = replicas.each_device(lambda x: reduce_scatter(x, "data", ring_steps(4), jnp.bfloat16), held)
    halfway = ring_steps(4).reduce
    want = replicas.by_hand(Exchange(4, 4, halfway, (), (0, 1, 2, 3)), held.reshape(4, -1), "bfloat16")
    np.testing.assert_array_equal(got, want.reshape(4, 4, 3)[range(4), range(4)])
    assert (got != got.astype(jnp.bfloat16)).any()


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_gather_undoes_a_scatter(name: str):
    exchange = EXCHANGES[name]
    n = exchange.devices
    held = np.random.default_rng(0).integers(-8, 9, (n, n, 3)).astype("float32")
    there = lambda x: reduce_scatter(x, "data", exchange)
    rows, whole = replicas.each_device(lambda x: (there(x), all_gather(there(x), "data", exchange)), held)
    np.testing.assert_array_equal(rows, held.sum(0))
    np.testing.assert_array_equal(whole, np.broadcast_to(held.sum(0), held.shape))


def test_a_gpu_runs_each_step_by_itself():
    """Two bytes an element are sent; and the kernels of a step do not repeat the steps before it."""
    target = parse_target("h100:8")
    mesh = make_mesh(data=8, devices=target_devices(target))
    total = jax.shard_map(
        lambda x: all_reduce(x[0], "data", ring_steps(8), jnp.bfloat16)[None],
        mesh=mesh,
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
    )
    x = jax.ShapeDtypeStruct((8, 80_000), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
    program = jax.jit(total).lower(x).compile(compiler_options(target))
    schedule = read_schedule(program, mesh)
    assert [run.collective.buffer_bytes for run in schedule.executions] == [10_000 * 2] * 14
    updates = [
        sum(i.opcode == "dynamic-update-slice" for i in computation.instructions)
        for computation in schedule.module.computations.values()
    ]
    assert max(updates) == 1 and sum(updates) == 14
