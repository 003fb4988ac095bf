"""Which attention is priced: what the layers would choose on a GPU, and what is said of it."""

import pytest

from jaxpar.config import Config
from jaxpar.planner.attention import attention_in_words, attention_of
from jaxpar.planner.layout import Workload
from jaxpar.planner.model import read

CONFIG = read("layers=2,hidden=64,heads=4,ffn=176,vocab=512").config
MODEL = CONFIG.model


@pytest.mark.parametrize(
    ("wanted", "dtype", "priced"),
    [
        ("auto", "bfloat16", "flash"),
        ("cudnn", "bfloat16", "flash"),
        ("xla", "bfloat16", "xla"),
        ("auto", "float32", "xla"),
        ("auto", "float64", "xla"),
    ],
)
def test_what_a_gpu_will_run_is_priced(wanted, dtype, priced):
    values = CONFIG.model_dump(mode="json")
    values["model"]["attn_implementation"], values["train"]["compute_dtype"] = wanted, dtype
    assert attention_of(Config.from_dict(values)) == priced


def test_it_is_said_with_the_reason():
    assert attention_in_words(MODEL, Workload(8, 8)) == "cuDNN's flash attention"
    wide = Workload(8, 8, compute_dtype="float32", attention="xla")
    assert "train.compute_dtype is float32" in attention_in_words(MODEL, wide)
    wanted = MODEL.model_copy(update={"attn_implementation": "xla"})
    assert "model.attn_implementation is xla" in attention_in_words(wanted, Workload(8, 8, attention="xla"))
