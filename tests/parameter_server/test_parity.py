"""Training with servers against training with all-reduce: the same parameters and the same optimizer state.

Float32 sums in another order differ by about 1e-7 of the largest addend. Plain SGD carries that along; Adam divides by
the size of a gradient, and with its usual eps makes noise of any size out of a gradient that is nearly zero: two
all-reduce runs on 2 and on 4 devices differ by 6e-5 after 20 steps. So in float32 it has a large eps here, and in
float64 its own.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import Actor, InProcess
from test_trainer import POISON, POISON_GRADIENT, make_poisoned, poison
from tiny_run import metrics
from whole_runs import all_reduced, distance, same_bits, saved, tiny, uneven, with_servers

from jaxpar.data.examples import TrainExamples
from jaxpar.names import Named
from jaxpar.parameter_server import worker as worker_module
from jaxpar.parameter_server.worker import Worker

FLOAT64 = ("train.param_dtype=float64", "train.compute_dtype=float64")
CLIPPING = ("optimizer.clip_norm=0.3",)
OPTIMIZERS = {
    "sgd": ("optimizer.name=sgd", "optimizer.momentum=0.5", "optimizer.learning_rate=0.1"),
    "adamw": ("optimizer.learning_rate=2e-3", "optimizer.eps=1e-3"),
    "adamw64": FLOAT64,
    "lion": ("optimizer.name=lion", "optimizer.learning_rate=2e-3", *FLOAT64),
    "adafactor": ("optimizer.name=adafactor", *FLOAT64),
    "muon": ("optimizer.name=muon", *FLOAT64),
}
TOLERANCE = 1e-6
TOLERANCE64 = 1e-10
"""Of float64: what is left is the order of sums, and what 20 steps make of it."""


@pytest.fixture(autouse=True)
def uneven_and_quick(monkeypatch: pytest.MonkeyPatch, quick_compiles: None) -> None:
    monkeypatch.setattr(TrainExamples, "rows", uneven(TrainExamples.rows))


@pytest.fixture(scope="module")
def all_reduce(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Named]:
    """The state after 20 steps with all-reduce, for each optimizer; all but a step or so were clipped."""

    @functools.cache
    def state(optimizer: str) -> Named:
        folder = tmp_path_factory.mktemp(optimizer)
        config = all_reduced(folder, *CLIPPING, *OPTIMIZERS[optimizer])
        clipped = [line["grad_norm"] > 0.3 for line in metrics(folder / "run")]
        assert sum(clipped) >= 19 and len(clipped) == 20
        return saved(config)

    return state


def case(optimizer: str, servers: int, workers: int) -> Any:
    """Each number of servers and of workers, each pair with one optimizer or none, is for every day."""
    today = (servers + [1, 2, 4].index(workers) + (optimizer == "sgd")) % 3 == 0
    return pytest.param(optimizer, servers, workers, marks=[] if today else [pytest.mark.slow])


@pytest.mark.parametrize(
    "optimizer, servers, workers", [case(*c) for c in itertools.product(("sgd", "adamw"), (1, 2, 3), (1, 2, 4))]
)
def test_sync_equals_all_reduce(
    optimizer: str, servers: int, workers: int, tmp_path: Path, all_reduce: Callable[[str], Named]
):
    config = with_servers(tmp_path, *CLIPPING, *OPTIMIZERS[optimizer], servers=servers, workers=workers)
    state = saved(config)
    assert distance(state, all_reduce(optimizer)) < (TOLERANCE, "")
    assert int(state["step"]) == 20


@pytest.mark.parametrize(
    "optimizer", ["adamw64", "muon", *(pytest.param(o, marks=pytest.mark.slow) for o in ("lion", "adafactor"))]
)
def test_other_optimizers_and_float64(optimizer: str, tmp_path: Path, all_reduce: Callable[[str], Named]):
    config = with_servers(tmp_path, *CLIPPING, *OPTIMIZERS[optimizer], workers=4 if optimizer == "adamw64" else 2)
    assert distance(saved(config), all_reduce(optimizer)) < (TOLERANCE64, "")


def test_a_worker_may_have_a_mesh_of_its_own(tmp_path: Path, all_reduce: Callable[[str], Named]):
    mesh = ("mesh.data=2", "mesh.pipe=2", "mesh.tensor=2", "parallel.zero=3", "parallel.microbatches=2")
    config = with_servers(tmp_path, *CLIPPING, *OPTIMIZERS["sgd"], *mesh)
    assert distance(saved(config), all_reduce("sgd")) < (TOLERANCE, "")


def test_a_run_goes_on_with_servers_and_back(tmp_path: Path, all_reduce: Callable[[str], Named]):
    settings = (*CLIPPING, *OPTIMIZERS["adamw"])
    all_reduced(tmp_path, *settings, "train.steps=7")
    with_servers(tmp_path, *settings, "train.steps=13", servers=3)
    config = all_reduced(tmp_path, *settings)
    assert distance(saved(config), all_reduce("adamw")) < (TOLERANCE, "")
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 21))


def test_however_many_servers_every_bit_is_the_same(tmp_path: Path):
    """Adam looks at each element by itself, and the norm is summed in float64."""
    settings = (*CLIPPING, *OPTIMIZERS["adamw"], "train.steps=4")
    one, three = (
        with_servers(tmp_path, *settings, f"train.run_dir={tmp_path}/{n}", servers=n, workers=1) for n in (1, 3)
    )
    assert same_bits(saved(one), saved(three))


def test_async_with_one_worker_and_no_staleness_equals_sync(tmp_path: Path):
    for mode in ("sync", "async"):
        overrides = (
            f"parameter_server.mode={mode}",
            "parameter_server.max_staleness=0",
            f"train.run_dir={tmp_path}/{mode}",
        )
        config = with_servers(tmp_path, *CLIPPING, *OPTIMIZERS["adamw"], *overrides, servers=2, workers=1)
        if mode == "sync":
            sync = saved(config)
    assert same_bits(saved(config), sync)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.slow)])
def test_other_types_of_parameters_and_back_to_a_snapshot(dtype: str, tmp_path: Path):
    """A server dies in step 6, and all go back to the snapshot of step 4: the end is bit for bit the same."""
    settings = (*CLIPPING, f"train.param_dtype={dtype}", "train.steps=8", "parameter_server.snapshot_every=4")
    undisturbed = saved(with_servers(tmp_path, *settings))
    killed = []

    def kill_once(actor: Actor, method: str) -> None:
        if method == "apply" and actor.instance.version == 5 and not killed:
            killed.append(actor)
            actor.alive = False

    run_dir = f"train.run_dir={tmp_path}/killed"
    make_actors = lambda *args: InProcess(*args, before_call=kill_once)
    config = with_servers(tmp_path, *settings, run_dir, make_actors=make_actors)
    assert killed and same_bits(saved(config), undisturbed)
    assert {str(undisturbed["params/embedding/weight"].dtype)} == {dtype}


class PoisonedWorker(Worker):
    def __init__(self, config: Any, *args: Any) -> None:
        super().__init__(config, *args, make_model=make_poisoned(config))


def test_a_step_that_is_not_finite_changes_nothing_but_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # every token counts
    bad = {2: POISON, 5: POISON_GRADIENT, 6: POISON}
    config = tiny(tmp_path, "data.validation=0.1")
    poison(tmp_path / "tiny.yaml", bad)
    settings = ("train.steps=8", "checkpoint.every=1", "train.max_bad_steps=3", "data.validation=0.1")
    all_reduce = all_reduced(tmp_path, *settings, make_model=make_poisoned(config))
    servers = with_servers(
        tmp_path,
        *settings,
        f"train.run_dir={tmp_path}/servers",
        make_actors=functools.partial(InProcess, worker=PoisonedWorker),
    )
    for step in range(1, 9):
        before, after = (saved(servers, s) if s else {} for s in (step - 1, step))
        want = saved(all_reduce, step)
        for counter in ("step", "skipped", "skipped_in_a_row"):
            assert after[counter] == want[counter], (step, counter)
        trained = lambda state: {n: leaf for n, leaf in state.items() if n.startswith(("params/", "opt_state/"))}
        assert same_bits(trained(before), trained(after)) == (step in bad)
    lines = [metrics(Path(config.train.run_dir)) for config in (servers, all_reduce)]
    for name in ("skipped", "skipped_in_a_row", "learning_rate"):
        got, want = ([line[name] for line in run] for run in lines)
        assert got == pytest.approx(want, rel=1e-12), name  # the schedule is compiled in one and not in the other
    got, want = ([set(line.get("nonfinite", [])) for line in run] for run in lines)
    assert got == want


def test_rows_of_zeros_that_stay_at_home_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sparse = with_servers(tmp_path, *CLIPPING, *OPTIMIZERS["adamw"], "train.steps=6", servers=3)
    saved_bytes = [line["saved_bytes"] for line in metrics(tmp_path / "run")]
    monkeypatch.setattr(worker_module, "without_zeros", lambda array: array)
    dense = with_servers(
        tmp_path, *CLIPPING, *OPTIMIZERS["adamw"], "train.steps=6", f"train.run_dir={tmp_path}/dense", servers=3
    )
    assert same_bits(saved(sparse), saved(dense))
    lines = metrics(tmp_path / "dense")
    assert [line["saved_bytes"] for line in lines] == [0] * 6 and min(saved_bytes) > 0
    parameter_bytes = sum(a.nbytes for n, a in saved(dense).items() if n.startswith("params/"))
    assert [line["pushed_bytes"] for line in lines] == [2 * parameter_bytes] * 6
    assert [line["pushed_bytes"] for line in metrics(tmp_path / "run")] == [
        2 * parameter_bytes - s for s in saved_bytes
    ]
