"""The config: what YAML means, what is filled in, and every rule with the words it fails with."""

import ast
import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpar
from jaxpar.config import Config, InputError, ModelConfig, Source, blocks_resume, differences, load_config
from jaxpar.config.nearest import divisors, multiples, nearest
from jaxpar.config.root import KEYS, RESUME_KEYS
from jaxpar.config.sections import RematName
from jaxpar.config.yaml12 import dump, load

PACKAGE = Path(jaxpar.__file__).parent
QUICKSTART = PACKAGE.parent / "configs" / "quickstart.yaml"

SMALL: dict[str, Any] = {
    "model": {
        "architecture": "llama",
        "vocab_size": 503,
        "hidden_size": 48,
        "intermediate_size": 120,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
    "data": {"train": ["a.txt"], "sequence_length": 40},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"steps": 10, "global_batch": 24, "run_dir": "runs/small"},
}


def small(**keys: Any) -> Config:
    """SMALL with dotted keys (written with __) set."""
    values = copy.deepcopy(SMALL)
    for key, value in keys.items():
        section, name = key.split("__")
        values.setdefault(section, {})[name] = value
    return Config.from_dict(values)


def said(**keys: Any) -> str:
    with pytest.raises(InputError) as error:
        small(**keys)
    return str(error.value)


# What YAML means


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-4", 6e-4),
        ("6E-4", 6e-4),
        ("+1.5e3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("-12", -12),
        ("0", 0),
        ("0o17", 15),
        ("0x1F", 31),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("007", "007"),
        ("017", "017"),
        ("0_1", "0_1"),
        ("1__0", "1__0"),
        ("1_", "1_"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("[-a, +1]", ["-a", 1]),
        ("'3'", "3"),
        ("=", "="),
        ("<<", "<<"),
    ],
)
def test_scalars(text: str, value: Any):
    read = load(text)
    assert read == value and type(read) is type(value)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x85"))  # PyYAML loses U+0085, a line break
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT


@given(st.dictionaries(TEXT, PLAIN | st.lists(PLAIN, max_size=3), max_size=4))
def test_what_is_written_reads_back(value: dict[str, Any]):
    assert load(dump(value)) == value


@given(st.from_regex(r"[-+]?[0-9_.eE:ox]{1,8}", fullmatch=True))
def test_strings_that_look_like_numbers_stay_strings(text: str):
    assert load(dump([text])) == [text]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  steps: 1\n  steps: 2\n", ["line 3", "'steps' stands twice"]),
        ("train:\n  steps: [1\n", ["line 3"]),
        ("train: 1\n1: 2\n", ["line 2", "'1' is not a word"]),
        ("model: !!python/object:os.system {}\n", ["line 1", "python/object"]),
        ("- 1\n", ["must hold the sections model, mesh"]),
        ("", ["must hold the sections"]),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, words: list[str]):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_config(path)
    assert all(word in str(error.value) for word in ["broken.yaml", *words]), error.value


def test_unreadable_files(tmp_path: Path):
    with pytest.raises(InputError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file in UTF-8"):
        load_config(tmp_path / "binary.yaml")


# What is filled in


def test_defaults_that_follow_from_other_keys():
    llama, gpt2 = small(), small(model__architecture="gpt2", model__num_key_value_heads=None, model__head_dim=None)
    assert (llama.model.head_dim, llama.model.num_key_value_heads) == (4, 4)
    assert (gpt2.model.head_dim, gpt2.model.num_key_value_heads) == (4, 12)
    assert (llama.model.hidden_act, gpt2.model.hidden_act) == ("silu", "gelu_new")
    assert (llama.model.tie_word_embeddings, gpt2.model.tie_word_embeddings) == (False, True)
    assert llama.model.max_position_embeddings == 40
    assert llama.model.padded_vocab_size == 512
    assert llama.optimizer.decay_steps == 10
    assert (llama.optimizer.momentum, small(optimizer__name="muon").optimizer.momentum) == (0.0, 0.95)
    given = small(model__head_dim=6, model__max_position_embeddings=64, optimizer__decay_steps=7)
    assert (given.model.head_dim, given.model.max_position_embeddings, given.optimizer.decay_steps) == (6, 64, 7)


def test_sections_complete_themselves_and_config_does_not_change_them():
    section = ModelConfig.model_validate(SMALL["model"])
    config = Config.from_dict({**SMALL, "model": section})
    assert (config.model.max_position_embeddings, section.max_position_embeddings) == (40, 0)


def test_paths_by_themselves_are_one_source():
    config = small(data__train=["a.txt", {"paths": ["b.txt"], "weight": 2}, "c.txt"], data__validation=["v.txt"])
    assert config.data.train == (Source(paths=("a.txt", "c.txt")), Source(paths=("b.txt",), weight=2))
    assert config.data.validation == (Source(paths=("v.txt",)),)
    assert small(data__train="a.txt").data.train == (Source(paths=("a.txt",)),)
    assert small(data__validation=0.25).data.validation == 0.25


def test_stored_config_reads_back_and_stays_as_it_is():
    config = small(data__validation=0.1, parallel__remat=["mlp_hidden"], mesh__data=2, train__run_dir="1e5")
    again = Config.from_yaml_text(config.to_yaml())
    assert again == config and hash(again) == hash(config)
    assert again.to_yaml() == config.to_yaml()
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


def test_quickstart_is_complete():
    assert load_config(QUICKSTART).resolve_mesh(8).mesh.data == 2


# Overrides


def test_overrides_read_like_the_file(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(dump(SMALL))
    config = load_config(
        path,
        [
            "optimizer.learning_rate=6E-4",
            "train.steps=1_000",
            "train.run_dir=no",
            "mesh.tensor=2",
            "data.train=[x.txt, {paths: [y=z.txt], weight: 3}]",
            "optimizer.clip_norm=null",
            "mesh.tensor=4",
        ],
    )
    assert (config.optimizer.learning_rate, config.train.steps, config.train.run_dir) == (6e-4, 1000, "no")
    assert config.mesh.tensor == 4 and config.optimizer.clip_norm is None
    assert config.data.train[1] == Source(paths=("y=z.txt",), weight=3.0)
    assert config.optimizer.decay_steps == 1000


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "optimizer.learnin_rate=1",
            "optimizer.learnin_rate: there is no such key; did you mean optimizer.learning_rate?",
        ),
        ("model.learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("model.rope_scaling.factr=1", "did you mean model.rope_scaling.factor?"),
        ("meshes.data=1", "did you mean mesh.data?"),
        ("log.zzz=1", "the keys of log are every, tensorboard"),
        ("zzz=1", "the sections are model, mesh"),
        ("train.steps", "an override is written key=value"),
        ("train.run_dir=[a", "train.run_dir=[a: expected ',' or ']'"),
        ("data.train.0.weight=2", "there is no such key"),
    ],
)
def test_wrong_overrides(override: str, words: str):
    with pytest.raises(InputError) as error:
        Config.from_yaml_text(dump(SMALL), [override])
    assert words in str(error.value)


def test_an_override_inside_what_is_no_section():
    with pytest.raises(InputError, match="mesh is 3 in the file"):
        Config.from_yaml_text(dump({**SMALL, "mesh": 3}), ["mesh.data=1"])


# Keys and types


def test_all_errors_of_a_file_are_told_at_once():
    values = copy.deepcopy(SMALL)
    values["model"]["hiden_size"] = values["model"].pop("hidden_size")
    values["optimizer"]["learning_rate"] = "6e-4"
    values["train"]["steps"] = 3.0
    with pytest.raises(InputError) as error:
        Config.from_dict(values, "my.yaml")
    text = str(error.value)
    assert text.startswith("my.yaml:\n")
    assert "- model.hiden_size: there is no such key; did you mean model.hidden_size?" in text
    assert "- model.hidden_size: missing. Width of the residual stream, at least 1." in text
    assert (
        '- optimizer.learning_rate = "6e-4": must be a number. Highest learning rate, above 0. '
        "Write 0.0006 without quotes." in text
    )
    assert "- train.steps = 3.0: must be a whole number. Optimizer steps in all, at least 1. Write 3." in text
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"train__steps": True}, "train.steps = true: must be a whole number."),
        ({"train__steps": "3"}, "Write 3 without quotes."),
        ({"train__steps": 0}, "train.steps = 0: must be greater than or equal to 1."),
        ({"train__seed": 2**31}, "in [0, 2^31)"),
        ({"train__data_parallel": "parameter_servers"}, "did you mean parameter_server?"),
        ({"parameter_server__mode": "asyn"}, "did you mean async?"),
        ({"parameter_server__max_staleness": -1}, "greater than or equal to 0"),
        ({"parameter_server__servers": 0}, "greater than or equal to 1"),
        ({"train__run_dir": 3}, "train.run_dir = 3: must be text."),
        ({"optimizer__learning_rate": True}, "must be a number"),
        ({"optimizer__learning_rate": float("inf")}, "must be a finite number"),
        ({"optimizer__name": "adam"}, "did you mean adamw?"),
        ({"parallel__sequence_parallel": "no"}, 'parallel.sequence_parallel = "no": must be true or false.'),
        ({"parallel__sequence_parallel": 1}, "must be true or false."),
        ({"parallel__remat": "ful"}, "did you mean full?"),
        ({"parallel__remat": "mlp_hidden"}, "Write [mlp_hidden]."),
        ({"parallel__remat": ["mlp_hiden"]}, 'parallel.remat.0 = "mlp_hiden"'),
        ({"data__train": 3}, "data.train = 3: must be a list."),
        ({"data__train": []}, "data.train = []"),
        ({"data__train": [3]}, "data.train.0 = 3"),
        ({"data__train": [{"paths": ["a"], "weigth": 1}]}, "data.train.0.weigth: there is no such key; did you mean"),
        ({"data__train": [{"paths": ["a"], "weight": 0}]}, "data.train.0.weight = 0"),
        ({"data__validation": 0.6}, "data.validation = 0.6: Share of each training source"),
        ({"data__validation": [{"paths": "a"}]}, 'data.validation.0.paths = "a": must be a list.'),
        ({"model__rope_scaling": {"factor": 8.0}}, "model.rope_scaling.rope_type: missing."),
    ],
)
def test_wrong_values(keys: dict[str, Any], words: str):
    text = said(**keys)
    assert words.lower() in text.lower(), text


def test_whole_numbers_are_numbers():
    assert small(optimizer__learning_rate=1).optimizer.learning_rate == 1.0


# Rules between keys


@pytest.mark.parametrize(
    ("keys", "equation", "ways"),
    [
        ({"model__hidden_size": 50}, "model.hidden_size 50 % model.num_attention_heads 12 = 2", "48 or 60"),
        ({"model__num_key_value_heads": 5}, "model.num_attention_heads 12 % model.num_key_value_heads 5 = 2", "4 or 6"),
        ({"model__head_dim": 5}, "model.head_dim 5 % 2 = 1", "head_dim 4 or 6"),
        ({"mesh__tensor": 5}, "model.num_attention_heads 12 % mesh.tensor 5 = 2", "10 or 15, or tensor 4 or 6"),
        ({"mesh__tensor": 6}, "num_key_value_heads 4 % mesh.tensor 6 = 4 and 6 % 4 = 2", "6, or tensor 4 or 12"),
        (
            {"mesh__tensor": 4, "model__intermediate_size": 122},
            "model.intermediate_size 122 % mesh.tensor 4 = 2",
            "120 or 124, or tensor 2 or 61",
        ),
        (
            {"mesh__tensor": 12},
            "vocab_size 503 padded to a multiple of model.vocab_multiple 128: 512 % (mesh.pipe 1 × mesh.tensor 12) = 8",
            "vocab_multiple 120 or 132",
        ),
        (
            {"mesh__data": 2, "parallel__microbatches": 5},
            "train.global_batch 24 % (mesh.data 2 × parallel.microbatches 5) = 4",
            "global_batch 20 or 30, or microbatches 4 or 6",
        ),
        (
            {"mesh__tensor": 4, "parallel__sequence_parallel": True, "data__sequence_length": 42},
            "data.sequence_length 42 % mesh.tensor 4 = 2",
            "sequence_length 40 or 44, tensor 3 or 6, or sequence_parallel false",
        ),
        (
            {"model__max_position_embeddings": 39},
            "data.sequence_length 40 ≤ model.max_position_embeddings 39 does not hold",
            "39 or less",
        ),
        (
            {"mesh__pipe": 2, "parallel__chunks": 2},
            "mesh.pipe 2 × parallel.chunks 2 = 4 ≤ model.num_hidden_layers 3 does not hold",
            "Use chunks 1 or less, or more layers",
        ),
        (
            {"mesh__pipe": 4, "parallel__chunks": 1},
            "mesh.pipe 4 × parallel.chunks 1 = 4 ≤ model.num_hidden_layers 3 does not hold",
            "Use pipe 3 or less",
        ),
        ({"parallel__chunks": 2}, "parallel.chunks 2 with mesh.pipe 1", "Use chunks 1, or more stages"),
        ({"parallel__layer_costs": [1.0, 2.0]}, "parallel.layer_costs has 2 numbers", "num_hidden_layers 3"),
        ({"mesh__data": 0}, "mesh.data = 0", "or -1 for the rest"),
        ({"mesh__data": -1, "mesh__tensor": -1}, "mesh.data and mesh.tensor are -1", "Set one"),
        (
            {"mesh__data": 2, "mesh__tensor": 2, "mesh__devices": 8},
            "mesh.data 2 × mesh.pipe 1 × mesh.tensor 2 = 4, must be the number of devices, 8",
            "Use data 4, or -1",
        ),
        (
            {"mesh__data": -1, "mesh__tensor": 4, "mesh__devices": 6},
            "mesh.devices 6 % (mesh.pipe 1 × mesh.tensor 4) = 2",
            "a product of 3 or 6, or devices 4 or 8",
        ),
        (
            {"parameter_server__min_workers": 5, "parameter_server__workers": 4},
            "parameter_server.min_workers 5 ≤ parameter_server.workers 4 does not hold",
            "Use min_workers 4 or less",
        ),
        (
            {"train__data_parallel": "parameter_server", "mesh__data": -1},
            "mesh has an axis of -1 with train.data_parallel parameter_server",
            "Give all three sizes",
        ),
        (
            {"train__data_parallel": "parameter_server", "train__drift_check_every": 3},
            "train.drift_check_every 3 with train.data_parallel parameter_server",
            "Leave drift_check_every out",
        ),
        (
            {"train__drift_action": "resynchronise"},
            "train.drift_action resynchronise without train.drift_check_every",
            "Set drift_check_every",
        ),
        (
            {"train__data_parallel": "parameter_server", "parameter_server__workers": 5},
            "train.global_batch 24 % (parameter_server.workers 5 × mesh.data 1 × parallel.microbatches 1) = 4",
            "Use global_batch 20 or 25, or workers 4 or 6.",
        ),
        (
            {
                "train__data_parallel": "parameter_server",
                "parameter_server__workers": 3,
                "mesh__data": 2,
                "parallel__microbatches": 3,
            },
            "train.global_batch 24 % (parameter_server.workers 3 × mesh.data 2 × parallel.microbatches 3) = 6",
            "Use global_batch 18 or 36, or microbatches 2 or 4.",
        ),
        (
            {
                "train__data_parallel": "parameter_server",
                "parameter_server__workers": 5,
                "parallel__microbatches": 7,
            },
            "train.global_batch 24 % (parameter_server.workers 5 × mesh.data 1 × parallel.microbatches 7) = 24",
            "Use global_batch 35.",
        ),
        ({"optimizer__warmup_steps": 10}, "optimizer.warmup_steps 10 + 1 ≤ train.steps 10", "9 or less"),
        (
            {
                "optimizer__schedule": "warmup_stable_decay",
                "optimizer__decay_fraction": 0.5,
                "optimizer__warmup_steps": 6,
            },
            "optimizer.warmup_steps 6 + decay_fraction 0.5 × steps ≤ train.steps 10",
            "5 or less",
        ),
        ({"model__vocab_size": 256}, "model.vocab_size 256 ≥ 257 does not hold", "257"),
        ({"train__eval_every": 5}, "train.eval_every = 5, but data.validation is not given", "0.05"),
        (
            {"model__attn_implementation": "cudnn", "train__compute_dtype": "float32"},
            "cudnn computes in bfloat16, but train.compute_dtype is float32",
            "attn_implementation xla",
        ),
        (
            {
                "model__architecture": "gpt2",
                "model__rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
            "architecture gpt2 learns a table of positions",
            "low_freq_factor 4.0 < high_freq_factor 4.0 does not hold",
        ),
    ],
)
def test_rules(keys: dict[str, Any], equation: str, ways: str):
    text = said(**keys)
    assert equation in text and ways in text, text


def test_legal_sizes_that_look_close_to_the_rules():
    small(mesh__tensor=12, model__vocab_multiple=8, model__num_key_value_heads=4)
    small(model__hidden_size=50, model__head_dim=4)
    small(model__architecture="gpt2", model__hidden_size=36)  # head_dim 3: no rotary positions
    small(mesh__tensor=2, model__num_key_value_heads=1)
    small(optimizer__schedule="constant", optimizer__warmup_steps=10)
    small(model__vocab_size=100, data__tokenizer="tokenizer.json")


@given(st.integers(1, 200), st.integers(1, 200))
def test_choices_are_legal_and_nearest(value: int, of: int):
    choices = [int(n) for n in multiples(value, of).split(" or ")]
    assert all(n % of == 0 and abs(n - value) <= of for n in choices)
    choices = [int(n) for n in nearest(divisors(value), of).split(" or ")]
    assert all(value % n == 0 for n in choices)
    assert not [d for d in range(1, value + 1) if value % d == 0 and min(choices) < d < max(choices)]


# The mesh


def test_the_open_axis_takes_the_rest():
    config = small(mesh__data=-1, mesh__tensor=2)
    assert config.mesh.data == -1 and config.mesh.devices is None
    resolved = config.resolve_mesh(8)
    assert (resolved.mesh.data, resolved.mesh.devices, config.mesh.data) == (4, 8, -1)
    assert resolved.batch_derivation() == "global_batch 24 = data 4 × microbatches 1 × 6 sequences per microbatch"
    assert small(mesh__data=2, mesh__tensor=-1, mesh__devices=8).mesh.tensor == 4
    assert differences(config, resolved) == {"mesh.data": (-1, 4), "mesh.devices": (None, 8)}


@pytest.mark.parametrize(
    ("mesh", "devices", "words"),
    [
        ({"data": -1}, 5, "train.global_batch 24 % (mesh.data 5 × parallel.microbatches 1) = 4"),
        ({"tensor": -1}, 5, "model.num_attention_heads 12 % mesh.tensor 5 = 2"),
        ({"data": -1, "tensor": 4}, 6, "mesh.devices 6 % (mesh.pipe 1 × mesh.tensor 4) = 2"),
        ({"data": 2, "tensor": 2}, 8, "= 4, must be the number of devices, 8"),
        ({"data": 2, "devices": 2}, 1, "mesh.devices = 2, but there are 1 devices"),
    ],
)
def test_rules_about_the_open_axis_wait_for_the_devices(mesh: dict[str, int], devices: int, words: str):
    config = small(**{f"mesh__{name}": size for name, size in mesh.items()})
    with pytest.raises(InputError) as error:
        config.resolve_mesh(devices)
    assert words in str(error.value)


def test_fewer_devices_than_there_are():
    assert small(mesh__data=2, mesh__devices=2).resolve_mesh(8).mesh.devices == 2


# Parameter servers


def test_without_servers_their_section_has_no_effect():
    """But for what could never be right."""
    config = small(parameter_server__workers=5, mesh__data=-1, train__drift_check_every=3).resolve_mesh(8)
    assert config.workers == 1 and config.of_one_worker() == config
    assert "workers" not in config.batch_derivation()


def test_a_worker_runs_its_share_of_the_batch():
    config = small(
        train__data_parallel="parameter_server", parameter_server__workers=3, mesh__data=2, parallel__microbatches=2
    )
    said = "global_batch 24 = workers 3 × data 2 × microbatches 2 × 2 sequences per microbatch"
    assert config.workers == 3 and config.batch_derivation() == said
    own = config.of_one_worker()
    changed = {"train.global_batch": (24, 8), "train.data_parallel": ("parameter_server", "all_reduce")}
    assert differences(config, own) == changed
    assert (own.workers, own.sequences_per_microbatch) == (1, config.sequences_per_microbatch)
    assert own.of_one_worker() == own


# Going on with a run


def test_differences_and_what_may_differ():
    old = small()
    new = small(mesh__data=2, optimizer__b1=0.8, train__steps=20, data__train=["b.txt"], parallel__remat=["mlp_hidden"])
    changed = differences(old, new)
    assert changed["mesh.data"] == (1, 2) and changed["optimizer.b1"] == (0.9, 0.8)
    assert changed["parallel.remat"] == ("none", ["mlp_hidden"])
    assert {key for key in changed if blocks_resume(key)} == {"optimizer.b1", "optimizer.decay_steps", "data.train"}
    assert set(KEYS) >= RESUME_KEYS and differences(old, old) == {}
    with_servers = small(train__data_parallel="parameter_server", parameter_server__workers=4)
    assert not [key for key in differences(old, with_servers) if blocks_resume(key)]


# The fields


def test_every_field_says_what_it_is():
    assert [key for key, field in KEYS.items() if not (field.description or "").endswith((".", ")."))] == []


def test_every_field_is_read():
    """By an attribute of its name somewhere outside the config."""
    read = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE / "config"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    checked_only = {"model.rope_scaling.rope_type"}  # one legal value so far
    assert [key for key in KEYS if key.split(".")[-1] not in read and key not in checked_only] == []


def test_remat_names_are_those_that_the_layers_give():
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.parent.name != "config"
    )
    given_names = set(re.findall(r'checkpoint_name\(.*?, "(\w+)"\)', source))
    assert given_names == set(get_args(RematName))
