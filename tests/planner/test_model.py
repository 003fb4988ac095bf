"""Reading what is to be planned."""

import json
from pathlib import Path

import pytest

from jaxpar.config import InputError
from jaxpar.flops import parameter_count
from jaxpar.planner.model import count, read

FIXTURES = Path(__file__).parent.parent / "fixtures" / "hf"
QUICKSTART = Path(__file__).parent.parent.parent / "configs" / "quickstart.yaml"
LLAMA_8B = "layers=32,hidden=4096,heads=32,kv=8,ffn=14336,vocab=128256"
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
}  # https://huggingface.co/Qwen/Qwen3-0.6B, shortened


WINDOW = QWEN3 | {"sliding_window": 4096, "use_sliding_window": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}


def write(folder: Path, values: object) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


@pytest.mark.parametrize(
    ("text", "number"),
    [("4M", 4 * 2**20), ("4_000_000", 4_000_000), ("512k", 2**19), ("1.5k", 1536), ("2g", 2**31), (" 7 ", 7)],
)
def test_numbers(text: str, number: int):
    assert count(text, "tokens") == number


@pytest.mark.parametrize("text", ["", "k", "0", "-4", "4MB", "1e6", "0.3", "1.0005k", "four"])
def test_what_is_no_number(text: str):
    with pytest.raises(InputError, match=r"--seq = .*whole number"):
        count(text, "--seq")


def test_sizes():
    given = read(LLAMA_8B, sequence_length=8192)
    assert parameter_count(given.config.model) == 8_030_261_248  # Llama 3 8B
    assert given.config.model.architecture == "llama" and given.config.data.sequence_length == 8192
    assert (given.config.data.tokenizer, given.filled_in) == ("byte", ("data", "optimizer", "train"))
    tied = read("layers=3,hidden=48,heads=4,ffn=64,vocab=1k,head_dim=16,tied=true,architecture=qwen3").config.model
    assert (tied.vocab_size, tied.head_dim, tied.num_key_value_heads) == (1024, 16, 4)
    assert tied.tie_word_embeddings and tied.traits.qk_norm
    assert read("layers=3,hidden=48,heads=4,ffn=64,vocab=200").config.data.tokenizer == "data/tokenizer.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers=32,hidden=4096,ffn=2", "heads, vocab missing"),
        ("layers=32,width=4096", "width=4096: sizes are NAME=VALUE.*hidden"),
        (LLAMA_8B + ",kv=4", "kv is given twice"),
        (LLAMA_8B + ",tied=maybe", "tied = maybe: must be true or false"),
        (LLAMA_8B + ",architecture=gpt5", "architecture = gpt5: must be one of llama"),
        (LLAMA_8B.replace("32", "many", 1), "layers = many: must be a whole number"),
        (LLAMA_8B.replace("kv=8", "kv=5"), "num_key_value_heads 5"),  # the rules of configs hold
        ("missing.yaml", "missing.yaml: No such file"),
        ("missing.json", "missing.json: No such file"),
        ("llama", "llama: must be a config .* sizes as layers=32"),
    ],
)
def test_bad_models(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        read(text)


def test_hugging_face_models():
    gpt2 = read(str(FIXTURES / "gpt2" / "config.json")).config.model
    assert (gpt2.hidden_size, gpt2.intermediate_size, gpt2.num_hidden_layers) == (64, 256, 3)
    assert (gpt2.hidden_act, gpt2.max_position_embeddings, gpt2.tie_word_embeddings) == ("gelu_new", 128, True)
    llama = read(str(FIXTURES / "llama_gqa" / "config.json"))
    assert (llama.config.model.num_key_value_heads, llama.config.model.head_dim) == (2, 8)
    assert llama.config.data.sequence_length == 256  # the longest it has
    qwen2 = read(str(FIXTURES / "qwen2" / "config.json")).config.model
    assert qwen2.tie_word_embeddings and qwen2.rms_norm_eps == 1e-6 and qwen2.sliding_window is None


def test_hugging_face_fields(tmp_path: Path):
    qwen3 = read(write(tmp_path, QWEN3)).config.model
    assert (qwen3.head_dim, qwen3.rope_theta) == (128, 1e6)  # transformers' default; a whole number in the file
    assert parameter_count(qwen3) == 596_049_920  # its model card: 0.6B
    (note,) = read(write(tmp_path, QWEN3 | {"quantization_config": {"quant_method": "fp8"}})).notes
    assert note == "quantization_config is left out: in training weights have train.param_dtype."
    mistral = QWEN3 | {"model_type": "mistral", "sliding_window": 4096}
    assert read(write(tmp_path, mistral)).config.model.sliding_window == 4096
    absent = read(write(tmp_path, QWEN3 | {"model_type": "mistral"})).config.model
    assert (absent.sliding_window, absent.rms_norm_eps) == (4096, 1e-6)  # transformers' defaults
    unused = QWEN3 | {"sliding_window": 4096, "use_sliding_window": False}
    assert read(write(tmp_path, unused)).config.model.sliding_window is None
    assert read(write(tmp_path, unused | {"max_window_layers": 0})).config.model.sliding_window is None
    windowed = WINDOW | {"max_window_layers": 0}, WINDOW | {"layer_types": ["sliding_attention"] * 28}
    assert [read(write(tmp_path, values)).config.model.sliding_window for values in windowed] == [4096, 4096]
    mixed = WINDOW | {"layer_types": ["full_attention", "sliding_attention"] * 14}
    partly = WINDOW, WINDOW | {"max_window_layers": 21}, mixed
    for given in (read(write(tmp_path, values)) for values in partly):
        assert given.config.model.sliding_window is None and "sliding_window is left out" in given.notes[0]
    stretched = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    stretched["original_max_position_embeddings"] = 8192
    scaled = read(write(tmp_path, QWEN3 | {"rope_scaling": stretched})).config.model.rope_scaling
    assert scaled is not None and scaled.factor == 8
    both = read(write(tmp_path, QWEN3 | {"rope_theta": 7, "rope_parameters": stretched | {"rope_theta": 1e6}}))
    assert both.config.model.rope_scaling == scaled and both.config.model.rope_theta == 1e6 and not both.notes
    yarn = read(write(tmp_path, QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}))
    assert yarn.config.model.rope_scaling is None and "yarn is left out" in yarn.notes[0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (QWEN3 | {"attn_logit_softcapping": 50.0, "torch_dtype": "bfloat16", "use_new": False}, "softcapping, use_new"),
        (QWEN3 | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "such thing: partial_rotary"),
        (QWEN3 | {"layer_types": ["full_attention", "linear_attention"] * 14}, "linear_attention are left out"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "idx is left out: in jaxpar it is always false"),
        (GPT2 | {"sliding_window": 4}, "stand for: sliding_window"),
    ],
)
def test_what_is_left_out_of_hugging_face_files_is_said(values: dict[str, object], said: str, tmp_path: Path):
    (note,) = read(write(tmp_path, values)).notes
    assert said in note


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({k: v for k, v in QWEN3.items() if k not in ("hidden_size", "num_hidden_layers")}, "hidden_size, num_hidd"),
        ({k: v for k, v in QWEN3.items() if k != "num_key_value_heads"}, "num_key_value_heads missing"),
        ({"model_type": "gpt2", "n_embd": 64}, "vocab_size, n_layer, n_head, n_positions missing"),
        (QWEN3 | {"model_type": "gemma"}, 'model_type "gemma" must be one of llama'),
        (QWEN3 | {"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts = 8: a mixture of experts"),
        (QWEN3 | {"num_experts": 128}, "num_experts = 128: a mixture of experts"),
        (QWEN3 | {"n_routed_experts": 64, "n_shared_experts": 1}, "n_routed_experts = 64: a mixture of experts"),
        (QWEN3 | {"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder is set: .* an encoder"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is set: attention to an encoder"),
        ({"model_type": "llava", "text_config": QWEN3}, "alone is the object text_config"),
        (QWEN3 | {"kv_lora_rank": 512}, "kv_lora_rank is set: latent attention"),
        (QWEN3 | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is set"),
        (WINDOW | {"layer_types": "all"}, "layer_types must be a list"),
        (WINDOW | {"max_window_layers": "all"}, "max_window_layers a whole number"),
        ({}, "model_type null"),
        (QWEN3 | {"hidden_size": "wide"}, "model.hidden_size"),
        (QWEN3 | {"rope_scaling": "linear"}, 'rope_scaling = "linear": must be an object'),
        (QWEN3 | {"rope_parameters": [1]}, r"rope_parameters = \[1\]: must be an object"),
        (QWEN3 | {"rope_theta": "large"}, 'rope_theta = "large": must be a number'),
        (QWEN3 | {"max_position_embeddings": "many"}, 'max_position_embeddings = "many": must be a whole number'),
        (QWEN3 | {"model_type": ["qwen3"]}, "model_type .* must be one of llama"),
        (GPT2 | {"n_embd": {}}, "n_embd = {}: must be a whole number"),
        ([], "must hold an object"),
    ],
)
def test_bad_hugging_face_files(values: object, said: str, tmp_path: Path):
    with pytest.raises(InputError, match=said):
        read(write(tmp_path, values))


def test_a_dense_model_may_have_such_fields(tmp_path: Path):
    dense = {"num_experts": None, "num_local_experts": 1, "is_encoder_decoder": False, "num_nextn_predict_layers": 0}
    assert read(write(tmp_path, QWEN3 | dense)).config == read(write(tmp_path, QWEN3)).config


def test_text_that_is_no_json(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"a": 1,\n}')
    with pytest.raises(InputError, match=r"config\.json, line 2"):
        read(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("name", "before"), [("config.json", ""), ("config.yaml", "model: ")])
def test_files_nested_thousands_deep(tmp_path: Path, name: str, before: str):
    (tmp_path / name).write_text(before + "[" * 5000 + "]" * 5000)
    with pytest.raises(InputError, match="nested too deep"):
        read(str(tmp_path / name))


def test_numbers_of_thousands_of_digits(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}")
    with pytest.raises(InputError, match=r"config\.json: .*digits"):
        read(str(tmp_path / "config.json"))
    with pytest.raises(InputError, match=r"at most 2\^53"):
        count("9" * 500 + "G", "--seq")


def test_a_config_keeps_everything_but_its_layout():
    given = read(str(QUICKSTART))
    assert given.filled_in == () and given.config.mesh.pipe == given.config.parallel.microbatches == 1
    assert not given.config.parallel.sequence_parallel
    assert given.config.train.global_batch == 16 and given.config.optimizer.warmup_steps == 10
    assert given.config.data.sequence_length == 128 and given.config.checkpoint.every == 60
    longer = read(str(QUICKSTART), sequence_length=256).config
    assert longer.data.sequence_length == longer.model.max_position_embeddings == 256
