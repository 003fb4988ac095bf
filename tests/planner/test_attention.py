"""Which attention is priced: what the layers would choose on a GPU, and what is said of it."""

from itertools import product

import pytest

from jaxpar.config import InputError
from jaxpar.layers.attention import choose_implementation
from jaxpar.planner.attention import attention_in_words, choose_attention
from jaxpar.planner.layout import Workload
from jaxpar.planner.model import read

MODEL = read("layers=2,hidden=64,heads=4,ffn=176,vocab=512").config.model


def test_the_choice_is_the_layers():
    for wanted, dtype in product(("auto", "xla", "cudnn"), ("bfloat16", "float32", "float64")):
        if wanted == "cudnn" and dtype != "bfloat16":
            with pytest.raises(InputError, match=r"cudnn: .* needs bfloat16"):
                choose_attention(wanted, dtype)
            continue
        chosen, _ = choose_implementation(wanted, dtype, "gpu")
        assert choose_attention(wanted, dtype) == {"cudnn": "flash", "xla": "xla"}[chosen]


def test_it_is_said_with_the_reason():
    assert attention_in_words(MODEL, Workload(8, 8)) == "cuDNN's flash attention"
    wide = Workload(8, 8, compute_dtype="float32", attention="xla")
    assert "train.compute_dtype is float32" in attention_in_words(MODEL, wide)
    wanted = MODEL.model_copy(update={"attn_implementation": "xla"})
    assert "model.attn_implementation is xla" in attention_in_words(wanted, Workload(8, 8, attention="xla"))
