"""`jaxpar bench step`, once and quickly; the promised ratio is for a quiet machine and more pairs."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import jaxpar.cli
from jaxpar.bench import collectives, layers, matmul
from jaxpar.bench.plain import PlainModel
from jaxpar.bench.step import LAYOUTS, bench_config
from jaxpar.collective_costs import ALGORITHMS, choose, read_measured
from jaxpar.collectives import Reduction
from jaxpar.collectives.ring_order import read_links, ring_order
from jaxpar.config import GradReduceConfig, InputError
from jaxpar.flops import parameter_count
from jaxpar.mesh import make_mesh
from jaxpar.planner.cluster import parse_cluster

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def test_the_measured_model_is_the_one_that_is_promised():
    config = bench_config({"data": 8, "tensor": 1})
    assert 7e6 < parameter_count(config.model) < 9e6
    m = config.model
    assert (m.hidden_size, m.num_hidden_layers, m.intermediate_size, m.vocab_size) == (256, 8, 704, 2048)
    assert (config.data.sequence_length, config.train.global_batch, config.train.compute_dtype) == (128, 16, "float32")
    assert {"data": 8, "tensor": 1} in LAYOUTS and {"data": 1, "tensor": 8} in LAYOUTS


def test_the_opponent_has_the_same_parameters():
    config = bench_config({"data": 1, "tensor": 8}).model
    plain = nnx.state(nnx.eval_shape(lambda: PlainModel(config, nnx.Rngs(0))), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(plain)) == parameter_count(config)


@pytest.mark.slow
def test_bench_step_prints_json(run_jaxpar):
    result = run_jaxpar(["bench", "step", "--json", "--pairs", "1", "--steps", "1"], env={"JAX_PLATFORMS": "cpu"})
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)  # nothing else is printed there
    assert [row["mesh"] for row in rows] == list(LAYOUTS)
    for row in rows:
        assert row["jaxpar_cpu_seconds"] > 0.01 and row["other_cpu_seconds"] > 0.01  # 8M parameters take their time
        assert row["ratios"] == [row["ratio"]]
        assert row["ratio"] == pytest.approx(row["jaxpar_cpu_seconds"] / row["other_cpu_seconds"])
        assert row["ratio"] < 1.5  # one step each: a ratio of 1 varies by some tenths


def test_layers_are_measured_one_by_one():
    config = bench_config({"pipe": 2}, global_batch=2)
    small = config.model.model_copy(
        update={"num_hidden_layers": 3, "hidden_size": 32, "head_dim": 4, "vocab_size": 257}
    )
    costs = layers.measure(config.model_copy(update={"model": small}), repeats=1, calls=2)
    assert set(costs) == {"layers", "embed", "head"}
    assert len(costs["layers"]) == 3 and all(seconds >= 0 for seconds in costs["layers"])
    assert sum(costs["layers"]) > 0


def test_matrix_multiplications_are_measured_by_size_and_dtype():
    rows = list(matmul.measure(sizes=(16, 64), repeats=2, each_seconds=0.002))
    assert [(row["dtype"], row["size"]) for row in rows] == [
        (dtype, size) for dtype in ("bfloat16", "float32") for size in (16, 64)
    ]
    for row in rows:
        assert row["flops_per_second"] == pytest.approx(2 * row["size"] ** 3 / row["seconds"])
        assert 1e-9 < row["seconds"] < 0.1  # 64³ takes a core some microseconds
    short = list(matmul.measure(sizes=(16, 64), dtypes=("float32",), repeats=1, each_seconds=0.001, longest_seconds=0))
    assert [row["size"] for row in short] == [16]  # the next would take too long


def test_products_stay_as_large_as_they_are():
    for dtype in ("bfloat16", "float32"):
        assert 0.1 < float(abs(matmul._chain(64, dtype)(1000)).max()) < 100


def test_measured_multiplications_make_a_cluster_for_the_planner(tmp_path, monkeypatch):
    rows = [
        {"dtype": dtype, "size": size, "seconds": 1.0, "flops_per_second": rate}
        for dtype, size, rate in (("bfloat16", 64, 2e9), ("bfloat16", 128, 8e9), ("float32", 64, 5e9))
    ]
    monkeypatch.setattr(matmul, "measure", lambda: iter(rows))
    monkeypatch.setattr(matmul, "SIZES", (64, 128))
    monkeypatch.setattr(matmul, "memory_bytes_per_second", lambda: 1e10)
    matmul.run(output=tmp_path / "here.yaml")
    found = parse_cluster(str(tmp_path / "here.yaml"))
    assert found.matmul == {"bfloat16": ((64, 0.2), (128, 0.8)), "float32": ((64, 1.0),)}  # of half the peak
    assert (found.device.flops_per_second, found.device.memory_bytes_per_second) == (1e10, 1e10)
    assert (found.device.name, found.hosts, found.per_host) == ("cpu", 1, 8)
    assert found.device.memory_bytes > 1e8
    with pytest.raises(InputError, match=r"must be a \.yaml file"):
        matmul.run(output=tmp_path / "here.json")
    monkeypatch.setattr(matmul, "measure", lambda: pytest.fail("it was measured"))
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "mine.yaml").write_text("mine\n")
    for name, said in (("folder.yaml", "is a folder"), ("mine.yaml", "is no cluster that jaxpar wrote")):
        with pytest.raises(InputError, match=said):
            matmul.run(output=tmp_path / name)


def test_collectives_are_measured_for_the_choice_of_one(capsys, monkeypatch, tmp_path):
    """Through the command line; what it writes is what `grad_reduce.table` and `grad_reduce.links` read."""
    table, links, plot = (tmp_path / name for name in ("table.json", "links.json", "plot.svg"))
    overrides = ["mesh.data=4", "mesh.pipe=1", "mesh.tensor=1", "grad_reduce.algorithm=auto", "grad_reduce.per_host=2"]
    options = ["--sizes", "64,1K", "--repeats", "1", "--output", table, "--links", links, "--plot", plot, "--json"]
    command = ["jaxpar", "bench", "collectives", QUICKSTART, *overrides, *options]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    with pytest.raises(SystemExit) as stop:
        jaxpar.cli.main()
    assert stop.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(table.read_text())
    assert printed["repeats"] == 1 and printed["mesh"] == {"data": 4, "pipe": 1, "tensor": 1}
    rows = printed["rows"]
    assert [(row["bytes"], row["algorithm"]) for row in rows] == [(n, a) for n in (64, 1024) for a in ALGORITHMS]
    for row in rows:
        assert (row["axis"], row["n"], row["per_host"], row["op"]) == ("data", 4, 2, "all-reduce")
        assert 1e-6 < row["seconds"] < 10
        assert row["algorithm_bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bytes_per_second"] == pytest.approx(1.5 * row["bytes"] / row["seconds"])  # 2 (4 - 1) / 4
    fastest = min(rows[len(ALGORITHMS) :], key=lambda row: row["seconds"])
    choice = choose(1024, 4, 2, None, read_measured(table))
    assert (choice.algorithm, choice.seconds) == (fastest["algorithm"], fastest["seconds"])
    matrix = read_links(links, 4)
    assert (matrix[~np.eye(4, dtype=bool)] > 0).all() and matrix.diagonal().tolist() == [0, 0, 0, 0]
    assert ring_order(matrix).order is not None
    assert "<svg" in plot.read_text()
    out = Console(width=100, record=True, file=io.StringIO())
    out.print(collectives.table(rows, repeats=1))
    text = out.export_text()
    assert "All-reduce over data: 4 devices, 2 per host, float32" in text
    assert f"{fastest['seconds'] * 1e6:,.1f}" in text and "halving_doubling" in text


def test_the_median_without_the_first_call_counts(monkeypatch):
    reduced = []
    monkeypatch.setattr(Reduction, "mean", lambda self, x: reduced.append(x.shape) or jax.lax.pmean(x, self.axis))
    clock = iter([0, 1000, 0, 1, 0, 5, 0, 2])  # start and end of the first call, which compiles, and of three more
    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    mesh = make_mesh(data=4)
    (row,) = collectives.measure(mesh, [Reduction("native")], sizes=[12], repeats=3)
    assert row["seconds"] == 2 / collectives.CALLS and row["bytes"] == 12
    assert reduced and set(reduced) == {(1, 3)}  # 12 bytes on each device
    assert [r.algorithm for r in collectives.reductions(GradReduceConfig(), mesh, "data")] == [
        "native",
        "ring",
        "tree",
        "halving_doubling",
    ]  # hierarchical takes several hosts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"axis": "pipe"}, "--axis pipe: must be an axis of more than one device; the mesh has data 4, pipe 1, tensor"),
        ({"sizes": "1K,many"}, "'many' is no size. Write bytes, at least 4"),
        ({"sizes": "2"}, "'2' is no size"),
        ({"plot": Path("picture.gif")}, "must end in .png, .svg or .pdf"),
        ({"output": Path("nowhere/table.json")}, "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_measured(options, said: str):
    config = bench_config({"data": 4})
    with pytest.raises(InputError) as error:
        collectives.run(config, make_mesh(data=4), **options)
    assert said in str(error.value)


def test_nothing_to_reduce_over():
    with pytest.raises(InputError, match="all axes of the mesh have one device"):
        collectives.run(bench_config({"data": 1}), make_mesh())
    with pytest.raises(InputError, match=r"mesh\.data is 1"):
        collectives.run(bench_config({"tensor": 2}), make_mesh(tensor=2), links=Path("links.json"))


def test_sizes_that_are_measured():
    assert collectives.default_sizes() == [2**k for k in range(10, 23)]  # 1 KB to 4 MB on CPU
    assert collectives.default_sizes(5000) == [1024, 2048, 4096]
