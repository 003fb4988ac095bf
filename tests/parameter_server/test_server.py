"""A server by itself: which pushes make an update, in which order, what is sent, and what a snapshot brings back."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from test_config import small

from jaxpar.config import InputError
from jaxpar.names import Named, named, nested
from jaxpar.optimizer import make_optimizer
from jaxpar.parameter_server import server as module
from jaxpar.parameter_server.rows import Rows, without_zeros
from jaxpar.parameter_server.server import Server, schedule_of
from jaxpar.parameter_server.slices import Slice

ROWS, WIDTH = 40, 3
SLICES = (Slice("blocks/mlp/up/weight", 1, 3), Slice("embedding/weight", 0, ROWS), Slice("norm/scale", 0, 4))
SHAPES = {"blocks/mlp/up/weight": (2, 5, 3), "embedding/weight": (ROWS, WIDTH), "norm/scale": (4,)}
SGD = {"optimizer__name": "sgd", "optimizer__schedule": "constant", "optimizer__learning_rate": 0.5}


def arrays(seed: int, dtype: str = "float32") -> Named:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def make(
    folder: Path, version: int = 7, dtype: str = "float32", slices: tuple[Slice, ...] = SLICES, **keys: Any
) -> Server:
    """A server that holds `arrays(0)`; updates up to number 100 are over."""
    config = small(**{**SGD, "optimizer__clip_norm": None, "train__param_dtype": dtype, **keys})
    server = Server(config, 1, slices, str(folder))
    params = arrays(0, dtype)
    state = make_optimizer(config.optimizer, schedule_of(config)).init(nested(params))
    server.load(version, 100, params, {name: np.asarray(leaf) for name, leaf in named(state).items()})
    return server


def update(server: Server, number: int, grads: Named, norm: float | None = None, finite: bool = True) -> None:
    """A whole update of one share."""
    assert server.push(number, 0, 1.0, grads)
    squared = server.norm(number, 1)
    server.apply(number, server.version + 1, server.version, norm if norm is not None else squared**0.5, finite)


def bits(server: Server) -> list[tuple[str, str, bytes]]:
    _, params, opt_state = server.state()
    return [(n, str(a.dtype), a.tobytes()) for tree in (params, opt_state) for n, a in tree.items()]


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "server-1.jsonl").read_text().splitlines()]


def test_shares_are_weighted_by_tokens_and_added_in_their_order_whatever_order_they_come_in(tmp_path: Path):
    """The values are such that float32 sums in another order differ."""
    shares = [(3.0, arrays(1)), (1000.0, arrays(2)), (7.0, arrays(3)), (0.0, arrays(4))]
    seen = []
    for order in itertools.permutations(range(4)):
        server = make(tmp_path / "".join(map(str, order)))
        for share in order:
            assert server.push(101, share, *shares[share])
        squared = server.norm(101, 4)
        server.apply(101, 8, 7, 1.0, True)
        seen.append((squared, bits(server)))
    assert all(one == seen[0] for one in seen)

    tokens = sum(t for t, _ in shares)
    mean = {n: sum(t * g[n].astype(np.float64) for t, g in shares) / tokens for n in SHAPES}
    assert squared == pytest.approx(sum((g**2).sum() for g in mean.values()), rel=1e-6)
    _, params, _ = server.state()
    for name, before in arrays(0).items():
        np.testing.assert_allclose(params[name], before - 0.5 * mean[name], rtol=0, atol=1e-6)  # float32, values near 1


def test_a_share_that_comes_twice_counts_once(tmp_path: Path):
    server, again = make(tmp_path / "a"), make(tmp_path / "b")
    for one, other in ((0, 1), (1, 0)):
        number = 101 + one
        assert server.push(number, one, 2.0, arrays(1)) and again.push(number, one, 2.0, arrays(1))
        assert not again.push(number, one, 2.0, arrays(5))  # waiting, or added already
        assert server.push(number, other, 3.0, arrays(2)) and again.push(number, other, 3.0, arrays(2))
        assert not again.push(number, one, 2.0, arrays(5)) and not again.push(number, other, 3.0, arrays(5))
        assert server.norm(number, 2) == again.norm(number, 2)
        assert not again.push(number, 0, 2.0, arrays(5))  # its norm is known
        for each in (server, again):
            each.apply(number, each.version + 1, each.version, 1.0, True)
    assert bits(server) == bits(again)


def test_pushes_to_what_is_over_leave_nothing(tmp_path: Path):
    server = make(tmp_path)
    held = lambda: (server._sums, server._means)
    assert not server.push(100, 0, 1.0, arrays(1)) and held() == ({}, {})  # of before the load
    update(server, 101, arrays(1))
    assert not server.push(101, 0, 1.0, arrays(1)) and held() == ({}, {})
    server.drop(103)  # nothing had come
    server.push(104, 1, 1.0, arrays(1))
    server.drop(104)  # a share was waiting
    server.push(105, 0, 1.0, arrays(1))
    server.norm(105, 1)
    server.drop(105)  # refused for its age
    assert held() == ({}, {})
    for number in (103, 104, 105):
        assert not server.push(number, 0, 1.0, arrays(1)) and held() == ({}, {})
    assert server.push(102, 0, 1.0, arrays(1))  # is still to come
    assert (server._open_from, server._closed) == (102, {103, 104, 105})
    server.drop(102)
    assert (server._open_from, server._closed) == (106, set())  # what is over takes no memory
    assert [(line["event"], line.get("update")) for line in log(tmp_path)][2:] == [
        ("apply", 101),
        ("drop", 103),
        ("drop", 104),
        ("drop", 105),
        ("drop", 102),
    ]


def test_loading_forgets_all_that_was_under_way(tmp_path: Path):
    server = make(tmp_path)
    server.push(101, 0, 1.0, arrays(1))
    server.push(102, 0, 1.0, arrays(1))
    server.norm(102, 1)
    server.pull(None)
    _, params, opt_state = server.state()
    server.load(3, 200, params, opt_state)
    assert not server.push(102, 1, 1.0, arrays(1)) and not server.push(200, 0, 1.0, arrays(1))
    assert server.push(201, 0, 1.0, arrays(2))
    assert (list(server._sums), server._means, server._pulled) == ([201], {}, {})
    assert server.pull(3) == (3, {})


def test_versions_follow_each_other_and_no_share_is_missing(tmp_path: Path):
    server = make(tmp_path)
    server.push(101, 0, 1.0, arrays(1))
    with pytest.raises(AssertionError, match="update 102 has 0 shares, not 1"):
        server.norm(102, 1)
    server.norm(101, 1)
    for version in (7, 9):
        with pytest.raises(AssertionError, match=f"version {version} cannot follow 7"):
            server.apply(101, version, 7, 1.0, True)
    server.apply(101, 8, 7, 1.0, True)
    server.push(103, 1, 1.0, arrays(1))
    with pytest.raises(AssertionError, match="update 103 has 0 shares, not 2"):
        server.norm(103, 2)
    assert server.version == 8 and server.busy_seconds() > 0


@pytest.mark.parametrize("padding", [0, 15])
def test_rows_of_padding_do_not_count(padding: int, tmp_path: Path):
    """Adafactor scales an update by the root mean square of the parameter: of the rows that are real."""
    table, real = "embedding/weight", ROWS - padding
    filled = tuple(Slice(s.name, s.start, s.stop, padding if s.name == table else 0) for s in SLICES)
    server = make(tmp_path, slices=filled, optimizer__name="adafactor")
    (_, _, opt_state), params, grads = server.state(), arrays(0), arrays(1)
    params[table][real:] = grads[table][real:] = 0
    server.load(7, 100, params, opt_state)
    update(server, 101, grads)
    optax_s = optax.adafactor(0.5, multiply_by_parameter_scale=True, clipping_threshold=1.0, weight_decay_rate=None)
    state = optax_s.init(params[table][:real])
    change, _ = optax_s.update(grads[table][:real], state, params[table][:real])
    _, new, _ = server.state()
    np.testing.assert_allclose(new[table][:real], params[table][:real] + change, rtol=0, atol=1e-6)  # float32, near 1
    assert not new[table][real:].any()


@pytest.mark.parametrize("norm", [0.5, 40.0])
def test_gradients_are_clipped_by_the_norm_over_all_servers(norm: float, tmp_path: Path):
    server = make(tmp_path, optimizer__clip_norm=2.0)
    update(server, 101, arrays(1), norm=norm)
    _, params, _ = server.state()
    for name, before in arrays(0).items():
        want = before - 0.5 * arrays(1)[name] * min(1, 2 / norm)
        np.testing.assert_allclose(params[name], want, rtol=0, atol=1e-6)  # float32, values near 1


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_an_update_that_is_not_finite_changes_only_the_version(value: float, tmp_path: Path):
    server = make(tmp_path, optimizer__name="adamw")
    update(server, 101, arrays(1))
    before, grads = bits(server), arrays(2)
    grads["embedding/weight"][3, 1] = value
    grads["norm/scale"][0] = -value
    server.push(102, 0, 5.0, grads)
    server.push(102, 1, 5.0, {n: -g for n, g in grads.items()})  # inf - inf
    server.push(103, 0, 5.0, grads)
    assert not np.isfinite(server.norm(103, 1))
    server.norm(102, 2)
    server.apply(103, 9, 8, np.nan, False)
    assert bits(server) == before and server.pull(8) == (9, {})
    assert [(line["version"], line["applied"]) for line in log(tmp_path) if line["event"] == "apply"] == [
        (8, True),
        (9, False),
    ]


def test_only_what_changed_is_sent(tmp_path: Path):
    """SGD without decay leaves rows alone in which no token stood; stacks and vectors go whole."""
    server = make(tmp_path)
    grads = {n: np.zeros(shape, np.float32) for n, shape in SHAPES.items()}
    grads["embedding/weight"][[4, 9]] = 1
    update(server, 101, {n: without_zeros(g) for n, g in grads.items()})
    grads["embedding/weight"][:] = 0
    grads["embedding/weight"][[9, 12]] = 1
    update(server, 102, {n: without_zeros(g) for n, g in grads.items()})
    _, params, _ = server.state()

    version, everything = server.pull(None)
    assert version == 9 and list(everything) == list(SHAPES)
    assert all(everything[n] is not None and (everything[n] == params[n]).all() for n in SHAPES)
    for since, rows in ((7, [4, 9, 12]), (8, [9, 12])):
        version, sent = server.pull(since)
        table = sent["embedding/weight"]
        assert version == 9 and isinstance(table, Rows)
        assert table.numbers.tolist() == rows and (table.values == params["embedding/weight"][rows]).all()
        assert isinstance(sent["norm/scale"], np.ndarray) and isinstance(sent["blocks/mlp/up/weight"], np.ndarray)
    assert server.pull(9) == (9, {})


@pytest.mark.parametrize("momentum", [0.9, 1e-12, 0.0], ids=["rows_go_on", "rows_stand_still", "none"])
def test_in_async_mode_parameters_are_moved_on_by_the_mean_staleness(momentum: float, tmp_path: Path):
    """What a worker puts together from what it pulls is params + staleness · (params − those before), row by row."""
    server = make(tmp_path, parameter_server__mode="async", optimizer__name="sgd", optimizer__momentum=momentum)
    held = {n: rows.copy() for n, rows in server.pull(None, True)[1].items()}
    version, staleness, random = 7, 0.0, np.random.default_rng(0)
    for number in range(101, 113):
        before = dict(server.state()[1])
        grads = {n: np.zeros(shape, np.float32) for n, shape in SHAPES.items()}
        grads["embedding/weight"][random.integers(0, ROWS, 2)] = random.normal(size=(2, WIDTH))
        stale = int(random.integers(0, 4))
        server.push(number, 0, 1.0, {n: without_zeros(g) for n, g in grads.items()})
        server.norm(number, 1)
        server.apply(number, server.version + 1, server.version - stale, 1.0, True)
        staleness += (stale - staleness) / 8
        if number % 3 == 0:
            continue  # pulls see some versions only
        version, sent = server.pull(version, True)
        for name, rows in sent.items():
            if isinstance(rows, Rows):
                held[name][rows.numbers] = rows.values
            else:
                held[name] = rows.copy()
        _, params, _ = server.state()
        steps = np.float32(staleness if momentum else 0)
        for name, now in params.items():
            np.testing.assert_allclose(held[name], now + steps * (now - before[name]), rtol=1e-5, atol=1e-6)
        assert server.pull(version, True) == (version, {})
        assert (server.pull(None)[1]["embedding/weight"] == params["embedding/weight"]).all()  # for evaluations


def test_what_all_ask_for_is_put_away_once(tmp_path: Path):
    put = []
    server = make(tmp_path)
    server._put = lambda value: (put.append(value), value)[1]
    for since in (None, 7, None, 7, None):
        server.pull(since)
    assert len(put) == 2
    update(server, 101, arrays(1))
    assert server.pull(7)[1].keys() == SHAPES.keys() and len(put) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_snapshot_holds_what_was_at_its_moment_and_gives_back_every_bit(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server = make(tmp_path, dtype=dtype, optimizer__name="adamw", optimizer__weight_decay=0.1)
    grads = "float64" if dtype == "float64" else "float32"
    update(server, 101, arrays(1, grads))
    before, write, held = bits(server), server._write_snapshot, []
    monkeypatch.setattr(server._writer, "submit", lambda *call: held.append(call))
    server.snapshot()
    update(server, 102, arrays(2, grads))
    after = bits(server)
    assert after != before
    assert write(*held[0][1:]) == 8  # only now it is written
    update(server, 103, arrays(3, grads))

    other = make(tmp_path, optimizer__name="adamw", optimizer__weight_decay=0.1, dtype=dtype)
    other.restore(8, 300)
    assert other.version == 8 and bits(other) == before
    assert not other.push(300, 0, 1.0, arrays(2, grads))
    update(other, 301, arrays(2, grads))
    assert bits(other) == after  # and it goes on as the first did
    assert log(tmp_path)[-2]["event"] == "restore"


def test_old_snapshots_go_when_told(tmp_path: Path):
    server = make(tmp_path, version=0)
    stranger = tmp_path / "snapshots" / "1" / "server-0.safetensors"
    for version in range(4):
        server.snapshot(keep_from=version - 1)
        assert server.snapshot_version(wait=True) == version
        update(server, 101 + version, arrays(1))
        if version == 1:
            stranger.write_bytes(b"another server's")
    found = sorted(str(p.relative_to(tmp_path / "snapshots")) for p in (tmp_path / "snapshots").rglob("*"))
    assert found == ["1", "1/server-0.safetensors", "2", "2/server-1.safetensors", "3", "3/server-1.safetensors"]


def test_a_snapshot_that_was_cut_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = make(tmp_path)
    server.snapshot()
    assert server.snapshot_version(wait=True) == 7
    update(server, 101, arrays(1))

    def cut_off(arrays: Any, path: str) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", cut_off)
    server.snapshot()
    with pytest.raises(InputError, match=r"snapshot .*snapshots/8/server-1.* cannot be written: .*No space left"):
        server.snapshot_version(wait=True)
    with pytest.raises(InputError, match=r"snapshots/8/server-1.safetensors cannot be read .*a file system in common"):
        server.restore(8, 300)
    server.restore(7, 300)
    assert server.version == 7


def test_a_damaged_snapshot_is_named(tmp_path: Path):
    server = make(tmp_path)
    server.snapshot()
    server.snapshot_version(wait=True)
    path = tmp_path / "snapshots" / "7" / "server-1.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=f"{path} cannot be read"):
        server.restore(7, 300)


def test_a_snapshot_is_on_disk_when_it_is_said_to_be(tmp_path: Path):
    server = make(tmp_path)
    assert server.snapshot_version() is None and server.snapshot_version(wait=True) is None
    assert server.snapshot() is None
    server.snapshot_version(wait=True)
    server.push(101, 0, 1.0, arrays(1))
    server.norm(101, 1)
    assert server.apply(101, 8, 7, 1.0, True) == 7
    assert server.snapshot() == 7 and server.snapshot() == 8
    server.restore(7, 300)
    assert server.snapshot_version(wait=True) is None  # what it wrote before counts no more


def test_async_updates_have_a_part_of_the_step_s_learning_rate():
    keys = {
        "optimizer__schedule": "warmup_linear",
        "optimizer__decay_steps": 10,
        "train__data_parallel": "parameter_server",
    }
    rates = {}
    for mode in ("sync", "async"):
        rate = schedule_of(small(**keys, parameter_server__mode=mode, parameter_server__workers=4))
        rates[mode] = [float(jax.jit(rate)(count)) for count in range(12)]
    assert rates["async"][:8] == pytest.approx([rates["sync"][count // 4] / 4 for count in range(8)])
    assert len(set(rates["sync"])) == 11


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_time_of_the_first_update_holds_no_compilation(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which counts for whether a server is alive; and what compiles changes nothing."""
    traced: list[str] = []
    updated, moved_on = Server._updated, module._moved_on
    monkeypatch.setattr(Server, "_updated", lambda *args: traced.append("update") or updated(*args))
    monkeypatch.setattr(module, "_moved_on", lambda *args: traced.append("prediction") or moved_on(*args))
    momentum = {"optimizer__momentum": 0.9, "parameter_server__mode": "async"}
    server = make(tmp_path, dtype=dtype, **momentum)
    assert traced == ["update", "prediction"]
    want = {name: leaf.astype(dtype).tobytes() for name, leaf in arrays(0, dtype).items()}
    assert {name: leaf.tobytes() for name, leaf in server.state()[1].items()} == want
    update(server, 101, arrays(1, "float64" if dtype == "float64" else "float32"))  # as workers send gradients
    server.pull(None, predicted=True)
    assert traced == ["update", "prediction"]
