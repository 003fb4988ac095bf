"""`verify` must find mistakes: each test here makes one on purpose."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxpar import gradients, step, verify, zero
from jaxpar.collectives import axis_size
from jaxpar.config import InputError
from jaxpar.layers import attention, embedding, linear
from jaxpar.mesh import make_mesh
from jaxpar.models.own import own_model
from jaxpar.pipeline.stacking import Stacking
from tests.test_step import config


@pytest.fixture
def mesh():
    return make_mesh(data=2, tensor=2)


SETTINGS = {"model": {"num_hidden_layers": 1}, "optimizer": {"name": "adamw"}}
QUICK = {"steps": 1, "evaluate": False}
LOW = {"param_dtype": "float32", "compute_dtype": "bfloat16"}


def test_a_right_program_passes(mesh):
    report = verify.compare(config((2, 1, 2), **SETTINGS), mesh, steps=2)
    assert report.ok and report.tolerance == 1e-9
    kinds = [c.kind for c in report.comparisons]
    assert kinds.count("gradient") == kinds.count("updated parameter") == 2 * 12
    assert kinds.count("initial parameter") == 12 and kinds.count("value") == 2 * 3 and kinds.count("evaluation") == 2


def test_a_constant_factor_that_adam_hides_is_found(mesh, monkeypatch):
    land = zero.Replicas.land

    def twice(self, *args):
        sums, grads = land(self, *args)
        return sums, jax.tree.map(lambda g: 2 * g, grads)

    monkeypatch.setattr(zero.Replicas, "land", twice)
    report = verify.compare(config((2, 1, 2), **SETTINGS), mesh, **QUICK)
    wrong = {c.kind for c in report.comparisons if not c.ok}
    assert not report.ok and wrong == {"gradient", "value"}
    assert report.comparisons[0].error == pytest.approx(1.0)


def test_a_missing_sum_of_one_parameter_is_named(mesh, monkeypatch):
    """The bias of a row parallel layer added before the sum counts once for each device."""
    whole = linear.RowParallelLinear.__call__

    def bias_before_sum(self, x):
        out = whole(self, x)
        return out if self.bias is None else out + self.bias[...] * (axis_size("tensor") - 1)

    monkeypatch.setattr(linear.RowParallelLinear, "__call__", bias_before_sum)
    settings = config((2, 1, 2), model={"num_hidden_layers": 1, "mlp_bias": True})
    report = verify.compare(settings, mesh, **QUICK)
    wrong = [c.name for c in report.comparisons if c.error > 0.5]
    assert not report.ok and "blocks.mlp.down.bias" in wrong


def test_mean_over_replicas_instead_of_tokens_is_found(mesh, monkeypatch):
    """Replicas with different numbers of unmasked tokens must not count alike."""
    real = gradients.make_loss

    def mean_of_replicas(*args, **kwargs):
        loss = real(*args, **kwargs)

        def wrong(*args):
            objective, sums = loss(*args)
            return objective / sums["tokens"], {name: value / sums["tokens"] for name, value in sums.items()}

        return wrong

    monkeypatch.setattr(gradients, "make_loss", mean_of_replicas)
    assert not verify.compare(config((2, 1, 2), **SETTINGS), mesh, **QUICK).ok


def test_masks_that_are_the_same_in_every_step_are_found(mesh, monkeypatch):
    keys = gradients.example_keys
    monkeypatch.setattr(gradients, "example_keys", lambda seed, step, rows: keys(seed, step * 0, rows))
    settings = config((2, 1, 2), model={"num_hidden_layers": 1, "resid_pdrop": 0.2})
    report = verify.compare(settings, mesh, steps=2, evaluate=False)
    assert {c.step for c in report.comparisons if not c.ok} == {2}


def test_a_wrong_evaluation_is_found(mesh, monkeypatch):
    real = gradients.make_loss

    def make_loss(*args, **kwargs):
        loss = real(*args, **kwargs)
        if kwargs["z_loss"]:
            return loss
        return lambda *args: (0.0, {name: 2 * value for name, value in loss(*args)[1].items()})

    monkeypatch.setattr(gradients, "make_loss", make_loss)
    report = verify.compare(config((2, 1, 2), **SETTINGS, train={"z_loss": 0.1}), mesh, steps=1)
    assert [(c.kind, c.name) for c in report.comparisons if not c.ok] == [("evaluation", "tokens")]


def test_layers_in_another_order_are_found(monkeypatch):
    """A step is right on its own then, but it is not the model's."""
    arrange = Stacking.arrange_params
    monkeypatch.setattr(
        Stacking,
        "arrange_params",
        lambda self, params: arrange(self, params | {"blocks": jax.tree.map(lambda x: x[::-1], params["blocks"])}),
    )
    settings = config((1, 2, 1), model={"num_hidden_layers": 3}, parallel={"microbatches": 2})
    report = verify.compare(settings, make_mesh(1, 2, 1), **QUICK)
    assert {c.kind for c in report.comparisons if not c.ok} == {"initial parameter"}


MANY_TOKENS = {
    "model": {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8},
    "train": LOW | {"global_batch": 16},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2},
}


def many_tokens(architecture, layout=(2, 1, 2), **sections):
    """8,192 tokens."""
    own = {"gpt2": {"num_key_value_heads": 4, "max_position_embeddings": 512}}.get(architecture, {})
    settings = MANY_TOKENS | sections
    settings["model"] = settings["model"] | {"architecture": architecture} | own
    settings = config(layout, **settings)
    return settings.model_copy(update={"data": settings.data.model_copy(update={"sequence_length": 512})})


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
def test_bfloat16_is_compared_with_float32_and_raises_no_false_alarm(mesh, architecture):
    """Not of the biases of keys either, which are blind to softmax and get nothing but rounding."""
    report = verify.compare(many_tokens(architecture), mesh, steps=2)
    assert report.ok, [c for c in report.comparisons if not c.ok]
    assert (report.dtype, report.reference_dtype) == ("bfloat16", "float32")
    biases = [c for c in report.comparisons if c.kind == "gradient" and c.name.endswith("bias")]
    assert biases and all(c.tolerance == verify.TOLERANCE["bfloat16"] for c in biases)


def test_bfloat16_on_the_wire_raises_no_false_alarm(mesh):
    reduce = {"algorithm": "ring", "wire_dtype": "bfloat16"}
    settings = many_tokens("gpt2", train={"compute_dtype": "float32", "param_dtype": "float32"}, grad_reduce=reduce)
    report = verify.compare(settings, mesh, **QUICK)
    assert report.ok and report.tolerance == verify.TOLERANCE["float32"], report.comparisons[:5]


@pytest.mark.parametrize("function", ["add", "look_up"])
def test_sums_over_tokens_in_bfloat16_are_found(monkeypatch, function):
    """Where neither our layers nor `wide_sums` make them in float32."""
    monkeypatch.setattr(step, "wide_sums", lambda f: f)
    plain = {"add": lambda x, bias: x + bias, "look_up": lambda table, rows: table[rows]}[function]
    for module in (linear, attention, embedding):
        if hasattr(module, function):
            monkeypatch.setattr(module, function, plain)
    report = verify.compare(many_tokens("qwen2", layout=(1, 1, 2)), make_mesh(tensor=2), **QUICK)
    wrong = {c.name for c in report.comparisons if not c.ok}
    expected = {"add": "blocks.attention.value.bias", "look_up": "embedding.weight"}[function]
    assert not report.ok and expected in wrong


def test_not_a_number_is_an_infinite_error():
    assert verify._error(np.array([np.nan]), np.array([1.0])) == float("inf")


def test_json_report_and_verdict(mesh, capsys):
    assert verify.run(config((2, 1, 2), **SETTINGS), mesh, steps=1, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["mesh"] == {"data": 2, "pipe": 1, "tensor": 2}
    assert set(report) == {f.name for f in dataclasses.fields(verify.Report)}


OWN_MODEL = """
from flax import nnx
from jaxpar.models import stack

class Own(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(257, 8, rngs=rngs)
        self.blocks = stack(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 3, rngs)

    def embed(self, tokens):
        return self.table(tokens)

    def block(self, layer, x, keys):
        return x + layer(nnx.gelu(x))

    def head(self, x):
        return self.table.attend(x)

number = 3
"""


def test_command_with_a_model_of_ones_own(run_jaxpar, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    model = {"vocab_size": 257, "hidden_size": 8, "num_hidden_layers": 3}
    settings = config((2, 2, 1), model=model, parallel={"microbatches": 2}, train=LOW | {"global_batch": 8})
    (tmp_path / "config.yaml").write_text(settings.to_yaml())
    done = run_jaxpar(["verify", "config.yaml", "--model", "mine:Own", "--steps", "2", "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 2 and {"table.embedding", "blocks.kernel"} <= {c["name"] for c in report["comparisons"]}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine", "write MODULE:FUNCTION"),
        ("nowhere:Own", "cannot import nowhere"),
        ("mine:own", "there is no own in mine.*Did you mean Own"),
        ("mine:number", "number is a int in mine"),
    ],
)
def test_a_model_that_cannot_be_had_is_named(monkeypatch, tmp_path, name, said):
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=said):
        own_model(name)


def test_command_exits_1_when_the_two_differ(run_jaxpar, tmp_path):
    """With a tolerance of nothing at all, rounding is a difference."""
    path = tmp_path / "config.yaml"
    path.write_text(config((2, 1, 1), **SETTINGS).to_yaml())
    good = run_jaxpar(["verify", str(path), "--json"])
    assert good.returncode == 0, good.stderr
    script = "from jaxpar import verify, cli; verify.TOLERANCE['float64'] = 0.0; cli.main()"
    bad = subprocess.run([sys.executable, "-c", script, "verify", str(path)], capture_output=True, text=True)
    assert bad.returncode == 1 and "differ" in bad.stdout, bad.stderr
