"""`jaxpar plan` as a user runs it."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import jaxpar.cli
from jaxpar.config import Config, InputError, load_config
from jaxpar.hardware import DEVICES
from jaxpar.planner import command, written
from jaxpar.planner.cluster import Cluster, Efficiency, parse_cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.measured import STUDY
from jaxpar.planner.model import read
from jaxpar.planner.output import CLUSTER, sealed
from jaxpar.planner.plan import Plan
from jaxpar.planner.price import price

QUICKSTART = Path(__file__).parent.parent.parent / "configs" / "quickstart.yaml"
SIZES = "layers=3,hidden=512,heads=8,kv=4,ffn=1408,vocab=32000"
BATCH = {"global_batch_tokens": "64k", "sequence_length": "1024"}


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jaxpar", *args])
    try:
        jaxpar.cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_neither_help_nor_a_plan_imports_jax(tmp_path: Path):
    program = (
        "import sys, jaxpar.cli\n"
        "for args in (['plan', '--help'], sys.argv[1:]):\n"
        "    sys.argv = ['jaxpar', *args]\n"
        "    try:\n        jaxpar.cli.main()\n"
        "    except SystemExit as stop:\n        assert not stop.code, stop.code\n"
        "    print(sorted({'jax', 'flax', 'optax', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    args = ["plan", SIZES, "--cluster", "h100x2", "--global-batch-tokens", "8k", "--write", str(tmp_path / "c.yaml")]
    result = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == "[]\n[]\n", result.stderr
    assert "--global-batch-tokens" in result.stdout and "The usual advice" in result.stdout


def test_a_written_config_is_the_best_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "best.yaml"
    words = ["jaxpar", "plan", SIZES, "--write", "a file"]
    assert command.run(SIZES, "2xh100x4", **BATCH, as_json=True, config_file=file, words=words)
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.best is not None
    config, layout = load_config(file), plan.best.layout
    assert (config.mesh.data, config.mesh.pipe, config.mesh.tensor) == (layout.data, layout.pipe, layout.tensor)
    parallel = ("zero", "schedule", "chunks", "microbatches", "remat", "sequence_parallel")
    assert all(getattr(config.parallel, name) == getattr(layout, name) for name in parallel)
    assert config.grad_reduce.algorithm == layout.algorithm
    assert (config.train.global_batch, config.data.sequence_length, config.model.num_hidden_layers) == (64, 1024, 3)
    assert config.resolve_mesh(8) == config.resolve_mesh(8)
    lines = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert f"#   jaxpar plan {SIZES} --write 'a file'" in lines
    assert any(f"{plan.best.tokens_per_second:,.0f} tokens/s" in line for line in lines)
    assert any(f"Memory: {plan.best.memory.total / 1e9:.1f} GB of 78.1 GB" in line for line in lines)
    assert any("without data, optimizer, train: filled in" in line for line in lines)


def test_every_choice_is_written():
    given = read("layers=8,hidden=64,heads=8,kv=8,ffn=256,vocab=512", 64)
    base = given.config.model_copy(update={"train": given.config.train.model_copy(update={"global_batch": 16})})
    for layout in (
        Layout(2, 2, 2, 1, "1f1b", 2, 4, "full", True, "ring"),
        Layout(8, 1, 1, 3, "1f1b", 1, 2, "dots", False, "tree"),
        Layout(1, 8, 1, 0, "gpipe", 1, 16, "none", False, "native"),
    ):
        found = price(base.model, layout, Workload(64, 16), parse_cluster("h100x8"))
        config = written.config_of(base, found)
        assert Layout(**config.mesh.model_dump(include={"data", "pipe", "tensor"}), **of(config)) == layout


def of(config: Config) -> dict[str, Any]:
    parallel = {"zero", "schedule", "chunks", "microbatches", "remat", "sequence_parallel"}
    return {**config.parallel.model_dump(include=parallel), "algorithm": config.grad_reduce.algorithm}


def test_a_config_keeps_its_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.run(str(QUICKSTART), "1xh100x8", config_file=tmp_path / "best.yaml")
    ours, theirs = load_config(tmp_path / "best.yaml"), load_config(QUICKSTART)
    assert (ours.data, ours.optimizer, ours.train, ours.checkpoint) == (
        theirs.data,
        theirs.optimizer,
        theirs.train,
        theirs.checkpoint,
    )
    assert "filled in" not in (tmp_path / "best.yaml").read_text()
    assert "written to" in capsys.readouterr().out


@pytest.mark.slow
def test_train_compile_and_verify_take_what_is_written(run_jaxpar, tmp_path: Path):
    env = {"JAX_PLATFORMS": "cpu"}
    file = tmp_path / "best.yaml"
    planned = run_jaxpar(["plan", QUICKSTART, "--cluster", "2xh100x4", "--write", file])
    assert planned.returncode == 0, planned.stderr
    for name, extra in (("compile", ["--target", "cpu:8"]), ("verify", []), ("train", [])):
        keys = ["train.steps=2", "optimizer.warmup_steps=1", "train.run_dir=run"] if name == "train" else []
        result = run_jaxpar([name, file, *keys, *extra], env=env, cwd=tmp_path)
        assert result.returncode == 0, (name, result.stderr)


def test_batches_that_are_no_whole_sequences_are_rounded_and_said(capsys: pytest.CaptureFixture[str]):
    command.run(SIZES, "2xh100x4", global_batch_tokens="60_000", sequence_length="1024")
    out = capsys.readouterr().out
    assert "60 sequences × 1,024" in out  # 59 are nearer, but are only divided by one replica
    said = "60,000 tokens are 58.59 sequences of 1,024; planned with 60 sequences, 61,440 tokens, which 4 replicas"
    assert f"note: {said} divide." in out.replace("\n", " ")
    one_layer = SIZES.replace("layers=3", "layers=1")  # at least 2 replicas, with tensor inside hosts
    command.run(one_layer, "2xh100x4", global_batch_tokens="60_000", sequence_length="1024", as_json=True)
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.workload.global_batch, plan.requested_tokens) == (60, 60_000)
    assert plan.notes[0].startswith("60,000 tokens are 58.59 sequences of 1,024; planned with 60 sequences")
    command.run(one_layer, "2xh100x4", global_batch_tokens="1", sequence_length="1024", as_json=True)
    assert Plan.from_json(capsys.readouterr().out).workload.global_batch == 2


def test_a_config_with_servers_or_costs_is_planned_as_it_would_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file, best = tmp_path / "given.yaml", tmp_path / "best.yaml"
    values = load_config(QUICKSTART).model_dump(mode="json")
    values["train"] |= {"data_parallel": "parameter_server", "compute_dtype": "bfloat16"}
    values["parallel"]["layer_costs"] = [3.0] + [1.0] * (values["model"]["num_hidden_layers"] - 1)
    values["grad_reduce"]["wire_dtype"] = "bfloat16"
    values["optimizer"] |= {"name": "muon"}
    file.write_text(Config.from_dict(values).to_yaml())
    assert command.run(str(file), "h100x8", config_file=best, as_json=True)
    plan, config = Plan.from_json(capsys.readouterr().out), load_config(best)
    assert config.train.data_parallel == "all_reduce"
    assert plan.notes == (
        "muon: what its iterations compute and send is not priced.",
        "train.data_parallel parameter_server is left out: plans are made for all_reduce.",
    )
    assert (plan.workload.layer_costs, plan.workload.wire_dtype) == (config.parallel.layer_costs, "bfloat16")


def test_only_a_plan_is_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    plan, other, first = tmp_path / "plan.yaml", tmp_path / "other.yaml", "# mine\n"
    other.write_text(first)
    args = ["--cluster", "h100x2", "--write"]
    assert run_main(monkeypatch, "plan", SIZES, *args, str(plan), "--global-batch-tokens", "8k") == 0
    assert run_main(monkeypatch, "plan", SIZES, *args, str(plan), "--global-batch-tokens", "16k") == 0
    written_once = plan.read_text()
    assert "--global-batch-tokens 16k" in written_once
    capsys.readouterr()
    assert run_main(monkeypatch, "plan", str(plan), *args, str(plan)) == 2
    assert "is the MODEL itself" in capsys.readouterr().err
    assert run_main(monkeypatch, "plan", SIZES, *args, str(other), "--global-batch-tokens", "8k") == 2
    assert "is there already, and is no plan that jaxpar wrote" in capsys.readouterr().err.replace("\n", " ")
    assert other.read_text() == first and plan.read_text() == written_once
    plan.write_text(edited := written_once.replace("learning_rate: 0.0003", "learning_rate: 0.0002"))
    assert edited != written_once and Config.from_yaml_text(edited)
    assert run_main(monkeypatch, "plan", SIZES, *args, str(plan), "--global-batch-tokens", "8k") == 2
    assert "has been changed since jaxpar wrote it" in capsys.readouterr().err.replace("\n", " ")
    assert plan.read_text() == edited
    machine = tmp_path / "machine.yaml"
    machine.write_text(kept := sealed(parse_cluster("h100x2").to_yaml(), CLUSTER))
    wanted = ["plan", SIZES, "--cluster", str(machine), "--global-batch-tokens", "8k", "--write", str(machine)]
    assert run_main(monkeypatch, *wanted) == 2
    assert "is no plan that jaxpar wrote" in capsys.readouterr().err.replace("\n", " ") and machine.read_text() == kept
    both = ["--write", "a.svg", "--plot", str(tmp_path / ".." / tmp_path.name / "a.svg")]
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, "plan", SIZES, "--cluster", "h100x2", "--global-batch-tokens", "8k", *both) == 2
    assert "Name two files" in capsys.readouterr().err


def test_which_attention_is_priced_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    absent = "`jaxpar compile` for a GPU that is absent uses XLA's attention"
    assert command.run(SIZES, "h100x4", **BATCH, config_file=tmp_path / "flash.yaml")
    out, text = capsys.readouterr().out, (tmp_path / "flash.yaml").read_text()
    assert f"priced for jax {version('jax')}, with cuDNN's flash attention" in out
    assert absent in out and absent in text
    config = tmp_path / "float32.yaml"
    config.write_text(text.replace("compute_dtype: bfloat16", "compute_dtype: float32"))
    assert command.run(str(config), "h100x4", config_file=tmp_path / "xla.yaml", as_json=True)
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.workload.attention, plan.jax) == ("xla", version("jax"))
    text = (tmp_path / "xla.yaml").read_text()
    assert "with XLA's attention" in text and absent not in text


def test_json_is_the_same_every_time(capsys: pytest.CaptureFixture[str]):
    texts = set()
    for _ in range(2):
        command.run(SIZES, "h100x4", **BATCH, as_json=True)
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
    assert json.loads(texts.pop())["ranked"][0]["layout"]["data"] >= 1


def test_exit_codes_and_where_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    large = "layers=80,hidden=8192,heads=64,kv=8,ffn=28672,vocab=128256"
    args = ["--cluster", "h100x2", "--global-batch-tokens", "32k", "--write", str(tmp_path / "no.yaml")]
    assert run_main(monkeypatch, "plan", large, *args) == 1
    out = capsys.readouterr().out
    assert "Nothing fits." in out and "It would fit with" in out and "times the hosts" in out
    assert "no.yaml is not written: nothing fits" in out and not (tmp_path / "no.yaml").exists()
    assert run_main(monkeypatch, "plan", SIZES, *args[:4]) == 0


def test_factors_are_fitted_to_measured_layouts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    lines = ["model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,tok_s_gpu"]
    true = Cluster(DEVICES["H100"], 1, 8, Efficiency(matmul=0.5, network=0.5, step_seconds=0.1))
    for hosts, data, tensor, pipe, size, count in (
        *((1, 8, 1, 1, 1, 4), (1, 4, 2, 1, 2, 4), (1, 2, 2, 2, 1, 16), (1, 1, 8, 1, 4, 4), (1, 1, 2, 4, 1, 32)),
        *((4, 32, 1, 1, 1, 1), (4, 8, 4, 1, 1, 2), (4, 4, 2, 4, 1, 8), (4, 2, 2, 8, 1, 16), (4, 16, 1, 2, 2, 4)),
    ):
        layout = Layout(data, pipe, tensor, microbatches=count, sequence_parallel=tensor > 1)
        workload = Workload(4096, data * size * count)
        found = price(STUDY["1B"], layout, workload, replace(true, hosts=hosts))
        rate = found.tokens_per_second / layout.devices
        name, batch = "1B" if hosts == 1 else "model", workload.global_batch
        lines.append(f"{name},{hosts},{data},{tensor},{pipe},{size},{count},{batch},0,{rate}")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    out = tmp_path / "h100.yaml"
    same = "layers=16,hidden=2048,heads=32,ffn=8192,vocab=128k,tied=true"  # 1B
    args = ["plan", same, "--fit", str(tmp_path / "rows.csv"), "--cluster", "h100x8", "--output", str(out)]
    assert run_main(monkeypatch, *args) == 0
    assert "10 measured runs" in capsys.readouterr().out
    efficiency = parse_cluster(str(out)).efficiency
    assert efficiency.matmul == pytest.approx(0.5, rel=0.05)
    assert efficiency.network == pytest.approx(0.5, rel=0.1)
    assert efficiency.step_seconds == pytest.approx(0.1, rel=0.1)
    assert "10 runs of jaxpar in rows.csv" in out.read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["plan", SIZES], "needs --cluster"),
        (["plan", "--cluster", "h100x8"], "needs MODEL"),
        (["plan", SIZES, "--cluster", "h100x8"], "--global-batch-tokens is missing"),
        (["plan", SIZES, "--cluster", "8xh900x8", "--global-batch-tokens", "4M"], "no device is called h900"),
        (["plan", SIZES, "--cluster", "8h100", "--global-batch-tokens", "4M"], "hosts × devices"),
        (["plan", SIZES, "--cluster", "h100x8", "--global-batch-tokens", "lots"], "--global-batch-tokens = lots"),
        (["plan", SIZES, "--cluster", "h100x8", "--seq", "0", "--global-batch-tokens", "4M"], "--seq = 0"),
        (["plan", "layers=3,heads=4", "--cluster", "h100x8"], "hidden, ffn, vocab missing"),
        (["plan", "missing.json", "--cluster", "h100x8"], "missing.json"),
        (["plan", SIZES, "--cluster", "h100x7", "--seq", "7", "--global-batch-tokens", "14"], "Use 7 sequences"),
        (["plan", SIZES, "--cluster", "h100x8", "--write", "no/where.yaml"], "there is no folder no"),
        (["plan", SIZES, "--cluster", "h100x8", "--plot", "plan.txt"], "must end in .png"),
        (["plan", SIZES, "--cluster", "h100x8", "--write", "."], "is a folder, must be a file"),
        (["plan", SIZES, "--cluster", "h100x8", "--write", "/proc/x.yaml"], "/proc/x.yaml: cannot be written"),
        (["plan", SIZES, "--cluster", "h100x8", "--write", "/dev/null"], "must be an ordinary file"),
        (["plan", SIZES, "--cluster", "h100x8", "--plot", "folder.png"], "folder.png: is a folder"),
        (["plan", SIZES, "--cluster", "h100x8", "--global-batch-tokens", "65G"], "at most 2^36"),
        (["plan", SIZES.replace("3", "3000", 1), "--cluster", "h100x8"], "at most 2,000 layers"),
        (["plan", "--cluster", "h100x8", "--fit", "r", "--output", "/proc/x.yaml"], "--output /proc/x.yaml: cannot"),
        (["plan", SIZES, "--cluster", "h100x8", "--system", "nanotron"], "--system is read with --fit"),
        (["plan", SIZES, "--cluster", "h100x8", "--system=jaxpar"], "--system is read with --fit"),
        (["plan", "--cluster", "h100x8", "--fit", "rows.csv"], "--fit MEASURED.csv needs --output"),
        (["plan", "--cluster", "h100x8", "--fit", "rows.csv", "--output", "h.yaml"], "rows.csv: cannot be read"),
        (["plan", "--cluster", "h100x8", "--fit", "rows.csv", "--output", "h.json"], "must be a .yaml file"),
        (
            ["plan", "--cluster", "h100x8", "--fit", "r", "--output", "h.yaml", "--system", "torch"],
            "system torch is not known",
        ),
    ],
)
def test_bad_input(
    args: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert run_main(monkeypatch, *args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error.replace("\n", " "), error


@pytest.mark.parametrize("option", ["--global-batch-tokens=4M", "--top", "--tensor-across-hosts", "--plot", "--write"])
def test_a_fit_refuses_what_only_a_plan_reads(option: str):
    with pytest.raises(InputError, match=f"{option.partition('=')[0]} is for plans: with --fit nothing is planned"):
        command.fit(
            Path("r.csv"),
            "h100x8",
            Path("h.yaml"),
            model=None,
            sequence_length=None,
            system="jaxpar",
            words=["jaxpar", "plan", "--fit", "r.csv", option],
        )


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'jaxpar\[plot\]'"):
        command.run(SIZES, "h100x8", plot_file=Path("plan.png"))
