"""Memory before compiling: by hand for one layout, and what must hold between layouts. `test_compiled` has the rest."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest

from jaxpar.config import ModelConfig
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.memory import TEMPORARIES, is_newer, jax_to_price, least_memory_bytes, memory
from jaxpar.planner.model import read
from jaxpar.planner.price import partition_of

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=32,
)
WORKLOAD = Workload(sequence_length=32, global_batch=16)
# One layer: query, out 64·64 each; key, value 64·32 each; gate, up, down 64·192 each; two norms of 64.
MATRICES, NORMS, TABLES, LAST_NORM = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192, 2 * 64, 2 * 1024 * 64, 64


def of(layout: Layout, workload: Workload = WORKLOAD, **options):
    height = partition_of(MODEL, layout.pipe, layout.chunks).height
    return memory(MODEL, layout, workload, height, **options)


def test_state_by_hand():
    # 4 stages for 6 layers: padded to 2 each; matrices over tensor, tables over pipe and tensor, norms whole.
    held = 2 * (MATRICES // 2 + NORMS) + TABLES // 8 + LAST_NORM
    found = of(Layout(2, 4, 2, microbatches=4))
    assert (found.parameters, found.gradients, found.optimizer) == (4 * held, 4 * held, 8 * held + 8)
    assert found.batch == 8 * 32 * (4 + 4 + 1)


def test_zero_by_hand():
    # 8 replicas divide every dim here, so nothing stays whole.
    held = 6 * (MATRICES + NORMS) + TABLES + LAST_NORM
    parts = [of(Layout(8, 1, 1, zero, microbatches=m)) for zero, m in ((0, 2), (1, 2), (2, 2), (2, 1), (3, 2))]
    assert [p.parameters for p in parts] == [4 * held] * 4 + [held // 2]
    assert [p.gradients for p in parts] == [4 * held] * 3 + [held // 2] * 2
    assert [p.optimizer for p in parts] == [8 * held + 8] + [held + 8] * 4


def test_what_zero_cannot_split_stays_whole():
    # 3 replicas divide F = 192 alone.
    found = of(Layout(3, 1, 1, 1), replace(WORKLOAD, global_batch=3))
    split = 6 * 3 * 64 * 192
    whole = 6 * (2 * 64 * 64 + 2 * 64 * 32 + NORMS) + TABLES + LAST_NORM
    assert found.optimizer == 8 * (split // 3 + whole) + 8


def test_activations_are_the_slots_of_the_schedule():
    one = of(Layout(1, 2, 1, microbatches=2)).activations
    few, many = (of(Layout(1, 2, 1, microbatches=m)).activations * m for m in (8, 16))
    assert few == many, "1F1B holds as many microbatches whatever their number, each smaller by as much"
    gpipe = [of(Layout(1, 2, 1, schedule="gpipe", microbatches=m)).activations * m for m in (8, 16)]
    assert gpipe[1] / gpipe[0] == pytest.approx(17 / 9), "gpipe holds all, and one slot for idle writes"
    assert one < of(Layout(1, 2, 1, schedule="gpipe", microbatches=2)).activations


def test_remat_and_sequence_parallel_keep_less():
    total = lambda **options: of(Layout(1, 2, 4, microbatches=8, **options)).activations
    assert total(remat="full") < total(remat="dots") < total()
    assert total(remat="full", sequence_parallel=True) == total(remat="full") / 4
    assert total(sequence_parallel=True) < total()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("platform", TEMPORARIES)
def test_the_bound_is_one(platform: str, zero: int):
    for layout in (Layout(8, 1, 1, zero), Layout(2, 2, 2, zero, microbatches=4), Layout(2, 4, 1, zero, remat="full")):
        found = of(layout, platform=platform)
        assert least_memory_bytes(MODEL, layout, WORKLOAD) <= found.total
        assert min(vars(found).values()) >= 0


def test_no_part_is_negative():
    model = read("layers=32,hidden=4096,heads=32,kv=8,ffn=14336,vocab=128256").config.model
    found = memory(model, Layout(1, 1, 8), Workload(4096, 1, param_dtype="bfloat16"), 32)
    assert found.temporaries >= 0 and memory(MODEL, Layout(1, 1, 8), Workload(1, 1), 6).temporaries >= 0


def test_xla_s_attention_keeps_the_pairs():
    flash, xla = (of(Layout(8, 1, 1), replace(WORKLOAD, attention=a)) for a in ("flash", "xla"))
    pairs = 6 * 2 * 32 * 32 * 8  # layers, sequences, pairs of tokens, heads
    numbers = 6 * 2 * 4 * 32 * 8  # of the softmax, one more for each query
    assert xla.activations - flash.activations == (4 + 2) * pairs + numbers


def test_without_jax_it_is_the_newest_that_is_fitted(monkeypatch: pytest.MonkeyPatch):
    def missing(_: str) -> str:
        raise PackageNotFoundError

    assert jax_to_price() == version("jax")
    monkeypatch.setattr("jaxpar.planner.memory.version", missing)
    assert jax_to_price() == "0.12.0 (none is installed)" and is_newer(jax_to_price())


def test_bfloat16_weights_need_no_copies():
    own, cast = (of(Layout(8, 1, 1, microbatches=2), replace(WORKLOAD, param_dtype=d)) for d in ("bfloat16", "float32"))
    assert own.parameters == cast.parameters / 2
    assert cast.temporaries - own.temporaries == own.parameters
