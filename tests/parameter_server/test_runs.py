"""Whole runs on Ray, undisturbed, and with processes killed, stopped and slowed.

Each test starts Ray in a network namespace that has only loopback. The workers' class notes what they are asked for,
and sleeps in every share, so that a run lasts long enough for a process to be killed in the middle of something.
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disturbed import one_history, parts_of
from loopback import PROCESSES, needs_namespace, run_in_loopback, run_script
from tiny_run import metrics, quick_compiles_env
from whole_runs import distance, same_bits, saved, tiny

from jaxpar.config import Config

pytestmark = [needs_namespace, pytest.mark.usefixtures("quick_compiles")]

DRIVER = '''
"""Train with parameter servers: folder for notes, seconds that a share takes, config file, overrides."""
import json, os, sys, time
from pathlib import Path
from jaxpar.config import load_config
from jaxpar.parameter_server.run import train
from jaxpar.parameter_server.worker import Worker

notes, seconds = Path(sys.argv[1]), float(sys.argv[2])

class Noting(Worker):
    def __init__(self, *args):
        (notes / f"starts-{os.getpid()}").touch()
        super().__init__(*args)
    def gradient(self, servers, era, update, share, step, part, timeout_seconds):
        line = {"call": [update, share, step, part], "began": time.time(), "process": os.getpid()}
        time.sleep(self.sleeps(step))
        made = super().gradient(servers, era, update, share, step, part, timeout_seconds)
        with (notes / f"calls-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line | {"ended": time.time()}) + chr(10))
        return made
    def sleeps(self, step):
        return 0 if (notes / "hurry").exists() else seconds

class SlowFromStep20(Noting):
    """One of them becomes ten times slower."""
    def sleeps(self, step):
        try:
            (notes / "slow").touch(exist_ok=False)
            self.slow = True
        except FileExistsError:
            self.slow = getattr(self, "slow", False)
        return (10 if self.slow and step >= 20 else 1) * seconds

if __name__ == "__main__":
    config = load_config(sys.argv[3], sys.argv[4:])
    train(config, worker=SlowFromStep20 if os.environ["SLOW"] == "1" else Noting)
'''

WATCH = '''
import json, os, random, signal, subprocess, sys, time
from pathlib import Path

def lines(path):
    """The whole lines of a file that is being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(chr(10))]

def until(what, condition, seconds=120):
    """Wait for something that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if driver.poll() is not None or time.monotonic() > deadline:
            driver.kill()
            said, _ = driver.communicate()
            raise SystemExit(f"{what} did not come; the driver, ended with {driver.returncode}, had said {said[-900:]}")
        time.sleep(0.01)
    return value

def start(*command):
    global driver
    driver = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
'''

KILLS = (
    WATCH
    + '''
notes, folder, choose = Path(sys.argv[1]), Path(sys.argv[2]) / "parameter_server", random.Random(int(sys.argv[3]))
kinds, command = sys.argv[4].split(), sys.argv[5:]

def events(name):
    return [event for event in lines(folder / "events.jsonl") if event["event"] == name]

def workers():
    """The processes of the workers by index."""
    known = dict(enumerate(events("started")[0]["processes"]))
    return known | {event["index"]: event["process"] for event in events("worker_joined")}

def server(index):
    return [line["pid"] for line in lines(folder / f"server-{index}.jsonl") if line["event"] == "start"][-1]

def at_work(index):
    """The process of a worker; None while it is being replaced."""
    process = workers()[index]
    return process if Path(f"/proc/{process}").exists() else None

def version():
    return max((line["version"] for line in lines(folder / "server-0.jsonl")[-9:] if "version" in line), default=0)

start(*command)
until("the start", lambda: events("started"))
for kind in kinds:
    before, joined, restored = version(), len(events("worker_joined")), len(events("server_restored"))
    until("some updates", lambda: version() >= before + 4)
    time.sleep(choose.random())
    index = choose.randrange(2)
    worker = until("a worker", lambda: at_work(index))
    starting = set(notes.glob("starts-*"))
    if kind in ("server", "both"):
        os.kill(server(choose.randrange(2)), signal.SIGKILL)
    if kind in ("worker", "both", "starting"):
        os.kill(worker, signal.SIGKILL)
    if kind == "stopped":
        os.kill(worker, signal.SIGSTOP)
    if kind == "starting":
        (new,) = until("a start", lambda: set(notes.glob("starts-*")) - starting)
        time.sleep(choose.random() / 5)
        os.kill(int(new.name.removeprefix("starts-")), signal.SIGKILL)
    if kind != "server":
        until("a replacement", lambda: len(events("worker_joined")) > joined)
    if kind in ("server", "both"):
        until("the way back", lambda: len(events("server_restored")) > restored)
(notes / "hurry").touch()
said, _ = driver.communicate(timeout=200)
print(said)
sys.exit(driver.returncode)
'''
)


def command(tmp_path: Path, config: Config, seconds: float) -> list[str | Path]:
    """The driver's command for a config."""
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    (tmp_path / "notes").mkdir(exist_ok=True)
    return [tmp_path / "driver.py", tmp_path / "notes", str(seconds), tmp_path / "config.yaml"]


def notes_of(tmp_path: Path) -> list[dict[str, Any]]:
    """What the workers noted of their shares."""
    files = sorted((tmp_path / "notes").glob("calls-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]


def check_history(tmp_path: Path, config: Config) -> None:
    """Versions, updates, data and metrics are right, whatever died."""
    run_dir, workers = Path(config.train.run_dir), config.parameter_server.workers
    applied = one_history(run_dir / "parameter_server", config)
    parts = parts_of(applied, [tuple(note["call"]) for note in notes_of(tmp_path)])
    assert Counter(parts) == Counter(itertools.product(range(config.train.steps), range(workers)))
    assert [line["step"] for line in metrics(run_dir)] == list(range(1, config.train.steps + 1))


UNDISTURBED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from whole_runs import with_servers
with_servers(Path(sys.argv[3]), *sys.argv[4:])
"""


def undisturbed(tmp_path: Path, compile_cache: Path, *overrides: str) -> Config:
    """The same run without Ray and without deaths, in a process like those of Ray: one device, no 64-bit types."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    here = Path(__file__).parent
    command = [sys.executable, "-c", UNDISTURBED, here, here.parent, folder, *overrides]
    environment = {**os.environ, **quick_compiles_env(compile_cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return servers_config(folder, *overrides)


def servers_config(tmp_path: Path, *overrides: str, workers: int = 2) -> Config:
    settings = ("train.data_parallel=parameter_server", "parameter_server.servers=2")
    return tiny(tmp_path, *settings, f"parameter_server.workers={workers}", *overrides)


def test_the_command_line_trains_as_all_reduce_does(run_jaxpar, tmp_path: Path, compile_cache: Path):
    overrides = ("data.validation=0.1", "train.steps=8", "train.eval_every=4", "checkpoint.every=6")
    config = servers_config(tmp_path, *overrides)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    done = run_in_loopback(
        [Path(sys.executable).with_name("jaxpar"), "train", tmp_path / "config.yaml"],
        timeout_seconds=200,
        env=quick_compiles_env(compile_cache),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    # JAX's CUDA plugin complains where there is no driver. Ray and JAX have nothing to complain of, forks for instance.
    plugin = ("cudart_stub.cc", "absl::InitializeLog()")
    assert [line for line in done.stderr.splitlines() if not any(word in line for word in plugin)] == []
    run_dir = tmp_path / "run"
    lines = metrics(run_dir)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text(tiny(tmp_path / "other", *overrides, "mesh.data=2").to_yaml())
    whole = run_jaxpar(["train", tmp_path / "other" / "config.yaml"], env=quick_compiles_env(compile_cache))
    assert whole.returncode == 0, whole.stderr
    for got, want in zip(lines, metrics(tmp_path / "other" / "run"), strict=True):
        assert [got["step"], got["tokens"]] == [want["step"], want["tokens"]]
        assert "staleness" not in got
        numbers = lambda line: {
            name: line[name] for name in ("loss", "learning_rate", "validation_loss") if name in line
        }
        assert numbers(got) == pytest.approx(numbers(want), rel=1e-6)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["6", "8"]
    files = {path.name for path in (run_dir / "parameter_server").iterdir()}
    assert files == {"events.jsonl", "report.json", "server-0.jsonl", "server-1.jsonl"}
    assert {"config.yaml", "metrics.jsonl", "start.txt", "tokens"} <= {path.name for path in run_dir.iterdir()}
    (event,) = map(json.loads, (run_dir / "parameter_server" / "events.jsonl").read_text().splitlines())
    assert event["event"] == "started" and len(set(event["processes"])) == 2
    assert f"done: {run_dir} holds metrics.jsonl and checkpoints/8" in done.stdout
    assert "step 8/8  loss" in done.stdout and "staleness" not in done.stdout


@pytest.mark.parametrize(
    "kinds, steps, mode, seed",
    [
        # More steps than the kills take on a slow machine; when they are done the rest hurries.
        ("worker server both starting", 240, "sync", 0),
        pytest.param("worker server both starting stopped " * 4, 1200, "sync", 1, marks=pytest.mark.slow),
        pytest.param("worker server both starting stopped " * 2, 700, "async", 2, marks=pytest.mark.slow),
    ],
)
def test_any_process_may_be_killed_at_any_moment(
    kinds: str, steps: int, mode: str, seed: int, tmp_path: Path, compile_cache: Path
):
    overrides = (f"train.steps={steps}", f"parameter_server.mode={mode}", "parameter_server.snapshot_every=3")
    config = servers_config(tmp_path, *overrides, "parameter_server.worker_timeout_seconds=15")
    run_dir = Path(config.train.run_dir)
    done = run_script(
        KILLS,
        *[tmp_path / "notes", run_dir, str(seed), kinds, *command(tmp_path, config, seconds=0.3)],
        timeout_seconds=560,
        env=quick_compiles_env(compile_cache) | {"SLOW": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_history(tmp_path, config)
    events = [json.loads(line) for line in (run_dir / "parameter_server" / "events.jsonl").read_text().splitlines()]
    said, count = Counter(event["event"] for event in events), Counter(kinds.split())
    assert said["server_restored"] >= count["server"] + count["both"]
    assert said["worker_joined"] >= len(kinds.split()) - count["server"]
    assert said["worker_failed"]  # at least one was killed before it was ready
    for name in ("share_recovered", "worker_joined", "server_restored"):
        seconds = [event["seconds"] for event in events if event["event"] == name]
        print(f"{name}: {len(seconds)} times, seconds: {np.round(sorted(seconds), 2).tolist()}")
    if mode == "sync":
        want = saved(undisturbed(tmp_path, compile_cache, *overrides))
        assert same_bits(saved(config), want), distance(saved(config), want)


DRIVER_KILLED = (
    WATCH
    + PROCESSES
    + """
run, command = Path(sys.argv[1]), sys.argv[2:]
start(*command)
until("a checkpoint and more", lambda: (run / "checkpoints" / "6").exists() and len(lines(run / "metrics.jsonl")) >= 8)
at_work = len(processes())
driver.kill()
killed = time.monotonic()
while processes() and time.monotonic() < killed + 20:
    time.sleep(0.1)
left, seconds = processes(), time.monotonic() - killed
driver.communicate()
start(*command)
said, _ = driver.communicate(timeout=200)
print(json.dumps([at_work, left, seconds, said, driver.returncode]))
"""
)


def test_a_run_whose_driver_was_killed_goes_on_from_the_last_checkpoint(tmp_path: Path, compile_cache: Path):
    overrides = ("train.steps=14", "checkpoint.every=6")
    config = servers_config(tmp_path, *overrides)
    done = run_script(
        DRIVER_KILLED,
        *[config.train.run_dir, *command(tmp_path, config, seconds=0.3)],
        timeout_seconds=300,
        env=quick_compiles_env(compile_cache) | {"SLOW": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    at_work, left, seconds, said, code = json.loads(done.stdout)
    print(f"of {at_work} processes none was left {seconds:.1f} s after the driver was killed")
    assert code == 0, said
    assert at_work > 8 and left == {}
    assert "continued after step 6" in said
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 15))
    assert same_bits(saved(config), saved(undisturbed(tmp_path, compile_cache, *overrides)))


def others_rates(tmp_path: Path) -> tuple[float, float, float]:
    """Shares per second of each worker but the slow one, before it was slow and while it was; and the slow one's."""
    notes = notes_of(tmp_path)
    by_process = lambda process: [note for note in notes if note["process"] == process]
    processes = sorted({note["process"] for note in notes})
    took = {process: max(note["ended"] - note["began"] for note in by_process(process)) for process in processes}
    slow = max(took, key=lambda process: took[process])
    turn = min(note["began"] for note in by_process(slow) if note["call"][2] >= 20)
    first = max(min(note["began"] for note in by_process(process)) for process in processes)
    last = max(note["ended"] for note in by_process(slow))
    count = lambda begin, end: sum(begin <= note["ended"] < end for note in notes if note["process"] != slow)
    rate = lambda begin, end: count(begin, end) / (end - begin) / (len(processes) - 1)
    return rate(first, turn), rate(turn, last), 1 / took[slow]


@pytest.mark.slow
@pytest.mark.parametrize("mode, steps, staleness", [("async", 45, 8), ("async", 45, 3), ("sync", 26, 4)])
def test_a_slow_worker_slows_sync_mode_alone(
    mode: str, steps: int, staleness: int, tmp_path: Path, compile_cache: Path
):
    """Four workers sleep 0.2 s in each share, and from step 20 on one of them 2 s."""
    overrides = (f"train.steps={steps}", f"parameter_server.mode={mode}", f"parameter_server.max_staleness={staleness}")
    config = servers_config(tmp_path, *overrides, workers=4)
    done = run_in_loopback(
        [sys.executable, *command(tmp_path, config, seconds=0.2)],
        timeout_seconds=300,
        env=quick_compiles_env(compile_cache) | {"SLOW": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_history(tmp_path, config)
    before, with_slow, slow = others_rates(tmp_path)
    print(f"{mode}: shares per second of each of the others {before:.2f}; with a slow one ({slow:.2f}) {with_slow:.2f}")
    assert slow < 0.5
    if mode == "sync":
        assert with_slow < 0.25 * before  # a step takes as long as the slowest share
        return
    assert with_slow > 0.85 * before
    overlapped = shares_begun_before_the_last_was_applied(tmp_path)
    print(f"of the shares {overlapped:.0%} were begun before the same worker's share before was applied")
    # With staleness 8 a worker has two shares at a time, with 3 it waits for its update. It may wait for others too.
    assert overlapped > 0.9 if staleness == 8 else overlapped < 0.1


def shares_begun_before_the_last_was_applied(tmp_path: Path) -> float:
    log = map(json.loads, (tmp_path / "run" / "parameter_server" / "server-0.jsonl").read_text().splitlines())
    applied = {line["update"]: line["time"] for line in log if line["event"] == "apply"}
    notes = sorted(notes_of(tmp_path), key=lambda note: (note["process"], note["began"]))
    pairs = [(a, b) for a, b in itertools.pairwise(notes) if a["process"] == b["process"] and a["call"][0] in applied]
    return float(np.mean([b["began"] < applied[a["call"][0]] for a, b in pairs]))
