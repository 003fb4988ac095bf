"""What is read off a model, against counts by hand and by the formulas that describe our own."""

from types import SimpleNamespace
from typing import Any

import pytest
from flax import nnx
from own_model import FLOAT, D, F, L, OwnModel, T, V, config

from jaxpar.flops import flops_per_token, parameter_count
from jaxpar.layers import VocabParallelEmbedding
from jaxpar.models import facts_of
from jaxpar.start_report import run_report
from jaxpar.step import model_maker


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_of_our_own_model(architecture: str):
    """`parameter_count` is compared with Hugging Face's: rows that fill the vocabulary up are in neither."""
    settings = config(architecture=architecture)
    facts = facts_of(settings, model_maker(settings, "cpu"))
    assert (facts.ours, facts.name) == (True, architecture)
    assert facts.parameters == parameter_count(settings.model)
    assert facts.flops_per_token == flops_per_token(settings.model, T)


def own(rngs: nnx.Rngs) -> OwnModel:
    """With a padded table of ours besides."""
    made = OwnModel(rngs)
    made.more = VocabParallelEmbedding(V, D, multiple=8, rngs=rngs, **FLOAT)
    return made


MATRICES = L * (2 * D * D + 2 * D * F)
PARAMETERS = MATRICES + L * (3 * D + 1) + 2 * V * D


def test_of_any_other_model():
    facts = facts_of(config(), own)
    assert (facts.ours, facts.name) == (False, "OwnModel")
    assert facts.parameters == PARAMETERS  # the constants and the 3 rows of padding are not learned
    assert facts.flops_per_token == 6 * (MATRICES + D * V)


def test_the_start_report_tells_what_the_model_has():
    settings, data = config(), SimpleNamespace(summary=[])
    assert parameter_count(settings.model) != PARAMETERS

    def lines(make_model: Any) -> list[str]:
        return list(run_report(settings, facts_of(settings, make_model), data, "cpu", None))

    assert lines(own)[:2] == [
        f"model: OwnModel, {PARAMETERS:,} parameters in float64, computed in float64",
        f"MFU counts {6 * (MATRICES + D * V):,} operations a token: 6 for each weight in the blocks' matrices and in a "
        f"head of model.hidden_size {D} × model.vocab_size {V}",
    ]
    ours = lines(model_maker(settings, "cpu"))
    assert ours[0].startswith(f"model: llama, {parameter_count(settings.model):,} parameters in float64")
    assert ours[1].startswith("attention: ")
