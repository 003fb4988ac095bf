"""`jaxpar bench parameter-server`: bytes follow from the model, whatever the machine; times only have to make sense."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from in_process import Actor, InProcess
from loopback import needs_namespace, run_in_loopback
from rich.console import Console

import jaxpar.cli
from jaxpar.bench import parameter_server as bench
from jaxpar.bench import parameter_server_measured as measured
from jaxpar.bench.parameter_server_report import notes, tables
from jaxpar.config import CheckFailed, Config, InputError, load_config
from jaxpar.data.sources import open_data
from jaxpar.parameter_server.slices import nbytes
from jaxpar.parameter_server.whole import Whole

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SMALL = [
    "model.vocab_size=512",
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_attention_heads=2",
    "model.num_hidden_layers=2",
    "train.global_batch=4",
    "data.train=['{stdlib}/abc.py']",
]
DENSE = "model.tie_word_embeddings=true"  # then each token's row has a gradient, as an output if not as an input
STEPS = 3

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Counting(InProcess):
    """With the servers that are measured."""

    def server(self, index: int) -> Actor:
        server = measured.MeasuredServer(self.config, index, self.slices[index], str(self.folder))
        self.servers.append(Actor(server, self.before_call))
        return self.servers[-1]


def in_process(config: Config, folder: Path, steps: int = STEPS, **actors: Any) -> tuple[dict[str, Any], Whole]:
    """The row of a case without Ray."""
    whole = Whole(config)
    open_data(config, folder / "tokens")
    cls = Counting(config, whole.slices, folder / "servers", worker=measured.MeasuredWorker, **actors)
    return measured.train_with_servers(config, cls, whole.parts(whole.program.init()), steps), whole


def largest_row(whole: Whole) -> int:
    return max(nbytes(leaf) // leaf.shape[0] for leaf in whole.params.values())


@pytest.mark.parametrize(("servers", "workers"), [(1, 2), (3, 2)])
def test_bytes_are_those_of_gradients_and_parameters(servers: int, workers: int, tmp_path: Path):
    config = bench.of_servers(bench.own_config([*SMALL, DENSE]), "sync", servers, workers, STEPS)
    row, whole = in_process(config, tmp_path)
    owned = [
        sum(nbytes(whole.params[s.name]) // whole.params[s.name].shape[0] * (s.stop - s.start) for s in slices)
        for slices in whole.slices
    ]
    total = sum(map(nbytes, whole.params.values()))
    assert sum(owned) == total
    assert [server["in_bytes"] for server in row["per_server"]] == [workers * size for size in owned]
    assert [server["out_bytes"] for server in row["per_server"]] == [workers * size for size in owned]
    assert row["busiest_bytes"] == 2 * workers * max(owned)
    # The cuts lie within half a row of where they would be equal.
    assert row["busiest_bytes"] == pytest.approx(2 * workers * total / servers, abs=2 * workers * largest_row(whole))
    assert row["saved_bytes"] == row["staleness"] == row["refused"] == 0
    assert row["bytes_per_second"] == pytest.approx(2 * workers * total * row["steps_per_second"])
    assert (row["training"], row["mode"], row["servers"], row["workers"]) == (
        "parameter_server",
        "sync",
        servers,
        workers,
    )


def test_rows_of_zeros_are_counted_as_saved(tmp_path: Path):
    config = bench.of_servers(bench.own_config(SMALL), "sync", 2, 2, STEPS)
    row, whole = in_process(config, tmp_path)
    pushed = sum(server["in_bytes"] for server in row["per_server"])
    assert pushed + row["saved_bytes"] == pytest.approx(2 * sum(map(nbytes, whole.params.values())))
    untouched = (512 - 256) * 16 * 4  # rows of tokens that are no byte
    assert row["saved_bytes"] > 2 * untouched


def test_in_async_mode_a_step_is_an_update_of_each_worker(tmp_path: Path):
    steps = 8
    config = bench.of_servers(bench.own_config([*SMALL, DENSE]), "async", 1, 2, steps)
    assert config.train.steps == measured.WARM_UP + steps + bench.TAIL
    row, whole = in_process(config, tmp_path, steps)
    total = sum(map(nbytes, whole.params.values()))
    under_way = 4  # gradients, when the measurement begins or ends: two of each worker
    (server,) = row["per_server"]
    assert server["in_bytes"] / total * steps == pytest.approx(2 * steps, abs=under_way)
    assert 0 < server["out_bytes"] / total * steps < 2 * steps + under_way  # nothing, where nothing is new
    assert row["mode"] == "async" and row["staleness"] <= 8


def test_the_time_of_the_measured_steps_counts(tmp_path: Path):
    """Servers that sleep take wall time, and no CPU time; warming up takes longer, which is left out."""
    config = bench.of_servers(bench.own_config([*SMALL, DENSE]), "sync", 1, 2, STEPS)
    applied: list[float] = []

    def before_call(actor: Actor, method: str) -> None:
        if method == "apply":
            applied.append(time.perf_counter())
            time.sleep(0.05 if len(applied) > measured.WARM_UP else 0.4)

    row, _ = in_process(config, tmp_path, before_call=before_call)
    step_seconds = 1 / row["steps_per_second"]
    assert 0.05 < step_seconds < 0.35
    assert row["busiest_cpu_seconds"] == row["per_server"][0]["cpu_seconds"] > 0
    assert row["busiest_share"] == pytest.approx(row["busiest_cpu_seconds"] / step_seconds)


@pytest.mark.parametrize("victim", ["gradient", "apply"])
def test_a_death_makes_the_measurement_worthless(victim: str, tmp_path: Path):
    config = bench.of_servers(bench.own_config([*SMALL, DENSE]), "sync", 1, 2, STEPS)
    died: list[Actor] = []

    def before_call(actor: Actor, method: str) -> None:
        if method == victim and not died:
            died.append(actor)
            actor.alive = False

    with pytest.raises(CheckFailed, match=r"the measurement is worth nothing: .*died"):
        in_process(config, tmp_path, before_call=before_call)


def test_everything_is_bounded_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measured, "_limit_seconds", lambda config: 1e-3)
    config = bench.own_config(SMALL)
    with pytest.raises(CheckFailed, match="training with 1 servers and 2 workers did not end within 0 s"):
        in_process(bench.of_servers(config, "sync", 1, 2, STEPS), tmp_path)
    with pytest.raises(CheckFailed, match="all-reduce with 2 replicas did not end"):
        measured.train_replicas(bench.of_replicas(config, 2, STEPS), tmp_path, on_cpu=True)


def test_a_worker_is_a_replica():
    config = load_config(QUICKSTART)  # data 2 × pipe 2 × tensor 2, for all-reduce
    case, replicas = bench.of_servers(config, "sync", 1, 4, STEPS), bench.of_replicas(config, 4, STEPS)
    assert (case.mesh.data, case.mesh.pipe, case.mesh.tensor, case.workers) == (1, 2, 2, 4)
    assert (replicas.mesh.data, replicas.mesh.pipe, replicas.mesh.tensor, replicas.workers) == (4, 2, 2, 1)
    assert case.train.global_batch == replicas.train.global_batch == 16
    assert case.data.validation is case.train.eval_every is None
    own = bench.own_config(["mesh.data=2"])  # of each worker
    assert bench.of_servers(own, "sync", 1, 2, STEPS).mesh.data == 2
    assert bench.of_replicas(own, 2, STEPS).mesh.data == 4


@needs_namespace
def test_the_command(tmp_path: Path):
    plot, output = tmp_path / "plot.svg", tmp_path / "rows.json"
    options = ["--servers", "2", "--workers", "2", "--mode", "sync", "--steps", str(STEPS), "--json"]
    command = [Path(sys.executable).with_name("jaxpar"), "bench", "parameter-server", *SMALL, DENSE, *options]
    done = run_in_loopback([*command, "--plot", plot, "--output", output], timeout_seconds=300)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)  # nothing else is printed there
    assert printed == json.loads(output.read_text())
    assert printed["steps"] == STEPS and printed["on_this_machine"]
    reduced, row = printed["rows"]
    total = printed["param_bytes"]
    assert total == 4 * (512 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16)
    assert (reduced["training"], reduced["servers"], reduced["workers"]) == ("all_reduce", 0, 2)
    assert reduced["bytes_per_second"] / reduced["steps_per_second"] == pytest.approx(2 * (2 - 1) * total)
    assert (row["servers"], row["workers"], len(row["per_server"])) == (2, 2, 2)
    for way in ("in_bytes", "out_bytes"):
        assert sum(server[way] for server in row["per_server"]) == pytest.approx(2 * total)
    assert row["busiest_bytes"] == pytest.approx((2 * total + 2 * total) / 2, rel=0.1)
    for kind in ("servers", "workers", "coordinator"):
        assert 1e-4 < row[f"{kind}_cpu_seconds"] < 10
    assert row["servers_cpu_seconds"] == pytest.approx(sum(server["cpu_seconds"] for server in row["per_server"]))
    drawn = plot.read_text()
    assert drawn.count('<g id="axes_') == 3 and "all-reduce" in drawn


def result(cores: int = 2) -> dict[str, Any]:
    """A server at its limit, and two that are not."""
    shared = {"training": "parameter_server", "mode": "sync", "workers": 2, "workers_cpu_seconds": 0.08}
    shared |= {"bytes_per_second": 8e6, "saved_bytes": 1e6, "coordinator_cpu_seconds": 0.01, "steps_per_second": 2.0}
    served = [
        {
            **shared,
            "servers": n,
            "per_server": [{"in_bytes": 3e6 / n, "out_bytes": 5e6 / n, "cpu_seconds": 0.06 / n}] * n,
            "busiest_bytes": 8e6 / n,
            "busiest_cpu_seconds": 0.06 / n,
            "busiest_share": 0.12 / n,
            "servers_cpu_seconds": 0.06,
        }
        for n in (1, 2)
    ]
    reduced = {"training": "all_reduce", "mode": "sync", "servers": 0, "workers": 2, "steps_per_second": 3.0}
    reduced |= {"bytes_per_second": 1e6, "workers_cpu_seconds": 0.02}
    return {"cores": cores, "on_this_machine": True, "steps": 5, "param_bytes": 2.5e6, "rows": [reduced, *served]}


def test_what_people_see(tmp_path: Path):
    console = Console(width=80, record=True, force_terminal=True, quiet=False)
    with console.capture() as captured:
        for table in tables(result()):
            console.print(table)
    text = captured.get()
    lines = {(words[1], words[3], words[5]): line for line in text.splitlines() if len(words := line.split()) > 5}
    assert "2.50 MB" in text or "2.5 MB" in text
    assert "…" not in text  # it fits a terminal
    bold = lambda words: f"\x1b[1m{words}\x1b[0m"
    busy, relieved = (next(x for x in text.splitlines()[::-1] if f"{n} │       2 │" in x) for n in (1, 2))
    assert bold("60 ms") in busy and bold("40 ms") not in busy
    assert bold("40 ms") in relieved and bold("30 ms") not in relieved
    assert ("all-reduce", "–", "2") in lines and "150 ms" in text  # 60 + 80 + 10
    said = "\n".join(notes(result()))
    assert "sync, 2 workers, 1 → 2 servers" in said
    assert "CPU time is 60 ms → 30 ms (÷ 2.0), its bytes 8 MB → 4 MB (÷ 2.0)" in said
    assert "up to 25% of the bytes of gradients" in said
    assert "All processes, up to 4, share this machine's 2 cores" in said
    assert "share this machine's" not in "\n".join(notes(result(cores=8)))


def refuse_to_start(*args: Any) -> None:
    raise AssertionError("something was started")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, "--mode fast: must be sync, async or both"),
        ({"servers": "0"}, "--servers 0: '0' is no number of processes"),
        ({"workers": "1,many"}, "--workers 1,many: 'many' is no number of processes"),
        ({"workers": "1,3"}, "with --servers 1 --workers 3: train.global_batch 8 % (parameter_server.workers 3"),
        ({"servers": "2,13"}, "parameter_server.servers 13 ≤ 12, the number of the model's parameter arrays, does not"),
        ({"plot": Path("picture.gif")}, "--plot picture.gif: must end in .png, .svg or .pdf"),
        ({"output": Path("nowhere/rows.json")}, "--output nowhere/rows.json: there is no folder nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options, said: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("cluster", "train_replicas", "open_data"):
        monkeypatch.setattr(bench, name, refuse_to_start)
    with pytest.raises(InputError) as error:
        bench.run(bench.own_config(), **options)
    assert said in str(error.value)


def test_changes_without_a_config_are_of_the_benchs_own(monkeypatch, capsys):
    command = ["jaxpar", "bench", "parameter-server", "train.global_batch=6", "model.hidden_size=32", "--workers", "4"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        jaxpar.cli.main()
    assert stop.value.code == 2
    assert "train.global_batch 6 % (parameter_server.workers 4" in capsys.readouterr().err
