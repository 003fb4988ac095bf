"""A worker by itself: what it pulls, what it computes, and what it pushes to whom."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from in_process import Actor, Died, get
from whole_runs import ALONE, tiny

from jaxpar.data.sources import open_data
from jaxpar.mesh import start
from jaxpar.names import Named, like, named, nested
from jaxpar.optimizer import make_optimizer
from jaxpar.parameter_server.rows import Rows
from jaxpar.parameter_server.server import Server, schedule_of
from jaxpar.parameter_server.slices import cut, take, take_state
from jaxpar.parameter_server.worker import ServerLost, Worker
from jaxpar.step import Program, build

SERVERS, WORKERS, SECONDS = 3, 2, 60.0
OVERRIDES = (
    "optimizer.name=sgd",
    "optimizer.weight_decay=0",
    "data.validation=0.1",
    "train.data_parallel=parameter_server",
    f"parameter_server.workers={WORKERS}",
)


class World:
    """Servers with a state, a worker that is ready, and what a whole batch on one device gives."""

    def __init__(self, folder: Path) -> None:
        self.config = tiny(folder, *OVERRIDES)
        self.whole: Program = build(*start(tiny(folder, "data.validation=0.1", *ALONE)))
        self.data = open_data(self.config, folder / "tokens")
        state = self.whole.init()
        self.params = named(jax.device_get(state.params))
        self.slices = cut(self.params, SERVERS, by_rows=True)
        self.folder = folder
        self.worker = Worker(self.config, self.slices, str(folder / "tokens"), get)
        self.ready = self.worker.ready()

    def servers(self) -> list[Actor]:
        tx = make_optimizer(self.config.optimizer, schedule_of(self.config))
        opt_state = named(tx.init(nested(self.params)))
        made = [Server(self.config, i, s, str(self.folder)) for i, s in enumerate(self.slices)]
        for server, s in zip(made, self.slices, strict=True):
            server.load(0, 0, take(self.params, s), take_state(opt_state, self.params, s))
        return [Actor(server, lambda actor, method: None) for server in made]

    def fresh(self) -> Worker:
        """A worker that has compiled and not worked yet."""
        return copy.copy(self.worker)


@pytest.fixture(scope="module")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], World]:
    return functools.cache(lambda: World(tmp_path_factory.mktemp("worker")))


@pytest.fixture
def world(make_world: Callable[[], World], quick_compiles: None) -> World:
    return make_world()


def owned(servers: Sequence[Actor]) -> Named:
    """All parameters, as the servers hold them."""
    whole: dict[str, list[Any]] = {}
    for server in servers:
        for name, rows in server.instance.state()[1].items():
            whole.setdefault(name, []).append(rows)
    return {name: np.concatenate(rows) for name, rows in whole.items()}


def held(worker: Worker) -> Named:
    """All parameters, as the worker computes with them, in model order."""
    return named(jax.device_get(worker._model_order(worker._params)))


def same_bits(a: Named, b: Named) -> bool:
    return a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)


def update(servers: Sequence[Actor], number: int, shares: int) -> None:
    squared = sum(s.instance.norm(number, shares) for s in servers)
    for s in servers:
        s.instance.apply(number, s.instance.version + 1, s.instance.version, squared**0.5, True)


def test_ready_says_what_it_runs_on(world: World):
    assert world.ready.config.train.global_batch == 8 and world.ready.config.mesh.devices == 1
    assert world.ready.device_kind == jax.devices()[0].device_kind and world.ready.peak_flops_per_second is None


def test_shares_put_together_are_the_gradient_of_the_batch(world: World):
    """Dropout included, which depends on the number of a row in the whole batch."""
    servers, worker, step = world.servers(), world.fresh(), 3
    for part in range(WORKERS):
        done = worker.gradient(servers, 1, 1, part, step, part, SECONDS)
        assert all(answer.get() for answer in done.pushed) and len(done.pushed) == SERVERS
        assert (done.update, done.base_version, done.tokens) == (1, 0, 4 * 16)
    squared = sum(server.instance.norm(1, WORKERS) for server in servers)
    parts = [server.instance._means[1] for server in servers]
    got = {name: np.concatenate([p[name] for p in parts if name in p]) for name in world.params}

    params = like(world.whole.abstract_state.params, world.params)
    means, grads = world.whole.loss_and_grads(params, world.data.train.rows(step, range(8)), np.int32(step))
    assert float(means["tokens"]) == 128
    for name, want in named(jax.device_get(grads)).items():
        np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-6 * np.abs(want).max())  # order of float32 sums
    assert squared == pytest.approx(float(optax.tree.norm(grads)) ** 2, rel=1e-6)


def test_after_each_pull_the_worker_has_bit_for_bit_what_the_servers_have(world: World):
    servers, workers = world.servers(), [world.fresh(), world.fresh()]
    pulled: list[list[int]] = [[], []]
    for number in range(1, 5):
        for which, worker in enumerate(workers):
            if which == 0 or number % 2:  # the other one pulls two updates at a time
                before = owned(servers)
                pulled[which].append(worker.gradient(servers, 1, number, which, number, which, SECONDS).pulled_bytes)
                assert same_bits(held(worker), before)
                assert worker._versions == [number - 1] * SERVERS
        update(servers, number, 1 + number % 2)
    everything = sum(p.nbytes for p in world.params.values())
    assert pulled[0][0] == pulled[1][0] == everything
    assert max(pulled[0][1:]) <= pulled[1][1] < everything


def test_untouched_rows_of_the_embedding_travel_neither_way(world: World):
    servers, worker = world.servers(), world.fresh()
    worker.gradient(servers, 1, 1, 0, 0, 0, SECONDS)
    width = world.params["embedding/weight"].shape[1] * 4
    for number, step in ((2, 1), (3, 2)):  # the pull brings what step - 1 has touched
        touched = np.unique(world.data.train.rows(step - 1, range(4))["tokens"]).size
        update(servers, number - 1, 1)
        done = worker.gradient(servers, 1, number, 0, step, 0, SECONDS)
        others = sum(p.nbytes for n, p in world.params.items() if n != "embedding/weight")
        assert done.pulled_bytes == others + touched * (width + 4)
        touched = np.unique(world.data.train.rows(step, range(4))["tokens"]).size
        assert done.pushed_bytes == others + touched * (width + 4)
        assert done.saved_bytes == world.params["embedding/weight"].nbytes - touched * (width + 4)


def test_a_pull_changes_no_array_that_devices_may_look_at(world: World):
    servers, worker = world.servers(), world.fresh()
    worker.gradient(servers, 1, 1, 0, 0, 0, SECONDS)
    arrays = dict(worker._host)
    copies = {name: array.copy() for name, array in arrays.items()}
    update(servers, 1, 1)
    worker.gradient(servers, 1, 2, 0, 1, 0, SECONDS)
    assert same_bits(arrays, copies) and not same_bits(worker._host, copies)


def test_servers_may_be_at_different_versions(world: World):
    servers, worker = world.servers(), world.fresh()
    worker.gradient(servers, 1, 1, 0, 0, 0, SECONDS)
    squared = sum(s.instance.norm(1, 1) for s in servers)
    for server in servers[1:]:
        server.instance.apply(1, 1, 0, squared**0.5, True)
    done = worker.gradient(servers, 1, 2, 0, 1, 0, SECONDS)
    assert done.base_version == 0 and worker._versions == [0, 1, 1]
    servers[0].instance.apply(1, 1, 0, squared**0.5, True)
    assert worker.gradient(servers, 1, 3, 0, 1, 0, SECONDS).base_version == 1
    assert same_bits(held(worker), owned(servers))


def test_in_another_era_nothing_pulled_before_is_used(world: World):
    """Servers that went back to a snapshot count to the same version again, with other parameters."""
    servers, worker = world.servers(), world.fresh()
    worker.gradient(servers, 1, 1, 0, 0, 0, SECONDS)
    update(servers, 1, 1)
    worker.gradient(servers, 1, 2, 0, 1, 0, SECONDS)
    others = world.servers()
    worker.gradient(others, 2, 3, 0, 5, 0, SECONDS)
    assert same_bits(held(worker), owned(others)) and not same_bits(owned(others), owned(servers))
    update(others, 3, 1)
    done = worker.gradient(others, 3, 4, 0, 1, 0, SECONDS)
    assert done.pulled_bytes == sum(p.nbytes for p in world.params.values())
    assert same_bits(held(worker), owned(others))


def test_a_server_that_does_not_answer_is_noticed_and_harms_nothing(world: World):
    servers, worker = world.servers(), world.fresh()
    worker.gradient(servers, 1, 1, 0, 0, 0, SECONDS)
    update(servers, 1, 1)
    servers[1].alive = False
    with pytest.raises(ServerLost):
        worker.gradient(servers, 1, 2, 0, 1, 0, SECONDS)
    with pytest.raises(ServerLost):
        worker.evaluate(servers, 1, 0, 0, SECONDS)
    servers[1].alive = True
    worker.gradient(servers, 1, 3, 0, 1, 0, SECONDS)
    assert same_bits(held(worker), owned(servers))


def test_a_push_that_fails_is_the_awaiter_s_matter(world: World):
    servers, worker = world.servers(), world.fresh()
    servers[2]._before_call = lambda actor, method: setattr(actor, "alive", method != "push")
    done = worker.gradient(servers, 1, 1, 0, 0, 0, SECONDS)
    assert [answer.get() for answer in done.pushed[:2]] == [True, True]
    with pytest.raises(Died):
        done.pushed[2].get()


def test_parts_of_an_evaluation_add_up_to_the_whole(world: World):
    servers, worker = world.servers(), world.fresh()
    parts = [worker.evaluate(servers, 1, 1, part, SECONDS) for part in range(WORKERS)]
    params = like(world.whole.abstract_state.params, world.params)
    assert world.data.validation
    sums = world.whole.eval_step(params, world.data.validation.rows(1, range(8)))
    assert sum(t for _, t in parts) == float(sums["tokens"]) > 0
    assert sum(x for x, _ in parts) == pytest.approx(float(sums["loss"]), rel=1e-6)


def test_rows_come_into_the_right_place(world: World):
    worker = world.fresh()
    worker._host = {}
    table = world.params["embedding/weight"]
    worker._put("embedding/weight", 100, table[100:])
    worker._put("embedding/weight", 0, table[:100])
    assert worker._host["embedding/weight"].tobytes() == table.tobytes()
    worker._put("embedding/weight", 100, Rows(np.array([2, 5], np.int32), 2 * table[[102, 105]], len(table) - 100))
    want = table.copy()
    want[[102, 105]] *= 2
    assert worker._host["embedding/weight"].tobytes() == want.tobytes()
    worker._put("embedding/weight", 0, table)
    assert worker._host["embedding/weight"] is table
