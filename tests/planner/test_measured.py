"""Reading measured layouts, and what is said of lines that make no sense."""

import pytest

from jaxpar.config import InputError
from jaxpar.flops import parameter_count
from jaxpar.planner.layout import Layout
from jaxpar.planner.measured import STUDY, read_rows

HEADER = "model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,tok_s_gpu,gpu_mem_gb"


def file_of(tmp_path, *lines: str, header: str = HEADER) -> str:
    path = tmp_path / "measured.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return str(path)


def test_rows(tmp_path):
    ran, crashed = read_rows(file_of(tmp_path, "1B,2,4,2,2,1,64,256,1,10000,20.5", "8B,1,8,1,1,1,32,256,0,,"))
    assert ran.layouts == (Layout(4, 2, 2, 1, microbatches=64, sequence_parallel=True),)
    assert ran.seconds == pytest.approx(256 * 4096 / (10000 * 16))
    assert (ran.hosts, ran.memory_gib, ran.workload.global_batch) == (2, 20.5, 256)
    assert crashed.seconds is None and crashed.layouts[0].sequence_parallel is False


@pytest.mark.parametrize(("name", "billions"), [("1B", 1.34), ("3B", 3.57), ("8B", 8.86), ("80B", 80.0)])
def test_models_of_the_study(name: str, billions: float):
    assert parameter_count(STUDY[name]) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2B,1,8,1,1,1,32,256,0,100,1", "line 2: model 2B is not known. Known: 1B, 3B, 8B, 80B"),
        ("1B,1,8,1,1,1,32,255,0,100,1", "dp 8 × mbs 1 × grad_acc 32 = 256, must be gbs, 255"),
        ("1B,1,8,one,1,1,32,256,0,100,1", "tp = one: must be a whole number"),
        ("1B,0,8,1,1,1,32,256,0,100,1", "nodes = 0: must be at least 1"),
        ("1B,2,8,1,1,1,32,256,0,100,1", "dp 8 × tp 1 × pp 1 = 8, must be nodes 2 × 8 devices of a host = 16"),
        ("1B,3,4,3,2,1,64,256,0,100,1", "tp = 3: must divide the 32 heads of 1B"),
        ("1B,1,8,1,1,1,32,256,4,100,1", "zero = 4: must be 0, 1, 2 or 3"),
        ("1B,1,8,1,1,1,32,256,0,fast,1", "tok_s_gpu = fast: must be a number, or empty"),
        ("1B,1,8,1,1,1,32,256,0,-1,1", "tok_s_gpu = -1: must be above 0"),
        ("1B,1,8,1,1,1,32,256,0,inf,1", "tok_s_gpu = inf: must be above 0 and finite"),
        ("1B,1,8,1,1", "line 2: ends before mbs"),
    ],
)
def test_bad_lines(tmp_path, line: str, said: str):
    with pytest.raises(InputError, match=said):
        read_rows(file_of(tmp_path, line))


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "nowhere.csv")
    with pytest.raises(InputError, match="has columns and no run below them"):
        read_rows(file_of(tmp_path))
    with pytest.raises(InputError, match="lacks pp, zero"):
        read_rows(file_of(tmp_path, "1B", header=HEADER.replace(",pp", "").replace(",zero", "")))
