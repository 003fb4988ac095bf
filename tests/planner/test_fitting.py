"""`jaxpar plan --fit`: from a CSV file to a cluster file that says what it was fitted to."""

from dataclasses import replace
from itertools import product

import pytest

from jaxpar.config import InputError
from jaxpar.planner.calibrate import EAGER, predict
from jaxpar.planner.cluster import parse_cluster
from jaxpar.planner.fitting import run
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.measured import STUDY, Row
from jaxpar.planner.systems import NANOTRON

TRUE = replace(parse_cluster("h100x8"), efficiency=replace(EAGER, matmul=0.5, layer_seconds=2e-3))


@pytest.fixture
def measured(tmp_path):
    lines = ["model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,tok_s_gpu"]
    for hosts, tensor, pipe, b in product((1, 4), (1, 4), (1, 2), (1, 2)):
        data = 8 * hosts // (tensor * pipe)
        M = 256 // (data * b)
        layout = Layout(data, pipe, tensor, 1, microbatches=M, sequence_parallel=tensor > 1)
        row = Row("1B", STUDY["1B"], hosts, (layout,), Workload(4096, 256), 1.0)
        rate = 256 * 4096 / (8 * hosts) / predict(row, layout, TRUE, NANOTRON).seconds
        lines.append(f"1B,{hosts},{data},{tensor},{pipe},{b},{M},256,1,{rate!r}")
    path = tmp_path / "measured.csv"
    path.write_text("\n".join([*lines, "1B,1,8,1,1,32,1,256,0,"]) + "\n")
    return path


def test_the_file_is_a_cluster(measured, tmp_path, capsys):
    output = tmp_path / "machine.yaml"
    found, judged = run(measured, "h100x8", output, system="nanotron")
    assert parse_cluster(str(output)) == found
    assert (found.efficiency.matmul, found.efficiency.layer_seconds) == pytest.approx((0.5, 2e-3), rel=0.05)
    assert judged.rows == 16 and judged.mean_error < 0.01
    assert "fitted by `jaxpar plan --fit` to 16 runs of nanotron in measured.csv" in output.read_text()
    assert "16 measured runs" in capsys.readouterr().out


def test_what_no_run_depends_on_stays_as_given(measured, tmp_path, capsys):
    """Runs within one host: nothing crosses the network."""
    lines = measured.read_text().splitlines()
    measured.write_text("\n".join([lines[0], *(line for line in lines if line.startswith("1B,1,"))]) + "\n")
    output = tmp_path / "machine.yaml"
    found, _ = run(measured, "h100x8", output, system="nanotron")
    given = parse_cluster("h100x8").efficiency
    assert (found.efficiency.network, found.efficiency.latency) == (given.network, given.latency)
    assert found.efficiency.matmul == pytest.approx(0.5, rel=0.05)
    assert "network, latency, stage_layer_seconds: as given; no run depends on them" in output.read_text()
    assert "no run depends on network, latency, stage_layer_seconds" in capsys.readouterr().out.replace("\n", " ")
    run(measured, "h100x8", output, system="nanotron")  # its own file it may replace
    with pytest.raises(InputError, match="is the --cluster itself"):
        run(measured, str(output), output, system="nanotron")
    output.write_text(config := "train: {steps: 1}\n")
    with pytest.raises(InputError, match=r"--output .* is there already, and is no cluster that jaxpar wrote"):
        run(measured, "h100x8", output, system="nanotron")
    assert output.read_text() == config


def test_runs_that_tell_nothing(measured, tmp_path, capsys):
    header, *lines = measured.read_text().splitlines()
    measured.write_text("\n".join([header, *(line.rpartition(",")[0] + "," for line in lines)]) + "\n")
    with pytest.raises(InputError, match="no run has tok_s_gpu"):
        run(measured, "h100x8", tmp_path / "machine.yaml", system="nanotron")
    measured.write_text("\n".join([header, *(line.rpartition(",")[0] + ",0.001" for line in lines)]) + "\n")
    run(measured, "h100x8", tmp_path / "machine.yaml", system="nanotron")
    told = " ".join(capsys.readouterr().out.split())
    assert "100.0% of the runs took over twice as long as predicted, and there are no others." in told


def test_bad_input(measured, tmp_path):
    with pytest.raises(InputError, match=r"system nanotrom is not known.*Did you mean nanotron\?"):
        run(measured, "h100x8", tmp_path / "machine.yaml", system="nanotrom")
    with pytest.raises(InputError, match=r"must be a \.yaml file"):
        run(measured, "h100x8", tmp_path / "machine.json")
