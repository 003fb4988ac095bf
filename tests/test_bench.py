"""`jaxpar bench step`, once and quickly; the promised ratio is for a quiet machine and more pairs."""

import json

import jax
import pytest
from flax import nnx

from jaxpar.bench import layers
from jaxpar.bench.plain import PlainModel
from jaxpar.bench.step import LAYOUTS, bench_config
from jaxpar.flops import parameter_count


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
