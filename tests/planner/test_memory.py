"""Memory before compiling: by hand for one layout, and what must hold between layouts. `test_compiled` has the rest."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest

from jaxpar.config import ModelConfig
from jaxpar.planner.activations import kept
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.memory import TEMPORARIES, Temporaries, is_newer, jax_to_price, least_memory_bytes, memory
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


LAYERS, LOGITS, TABLE = 6 * (MATRICES + NORMS), 4 * 32 * 1024, 1024 * 64
HIDDEN = 6 * 2 * 32 * 192  # what one layer's feed-forward keeps, or as much of its gradients


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> Temporaries:
    """Those of GPUs without the workspace, which is larger than these models."""
    found = replace(TEMPORARIES["gpu"], workspace=0)
    monkeypatch.setitem(TEMPORARIES, "gpu", found)
    return found


def test_matrix_multiplications_take_a_workspace(monkeypatch: pytest.MonkeyPatch):
    before, t = of(Layout(8, 1, 1, microbatches=2)), TEMPORARIES["gpu"]
    monkeypatch.setitem(TEMPORARIES, "gpu", replace(t, workspace=0))
    assert before.temporaries - of(Layout(8, 1, 1, microbatches=2)).temporaries == t.workspace > 0


@pytest.mark.usefixtures("factors")
def test_temporaries_by_hand():
    # One sequence. Weights in bfloat16, the layers' gradients in it, one layer's backward beside the waiting logits.
    copies = 2 * (LAYERS + TABLES + LAST_NORM)
    assert of(Layout(8, 1, 1, microbatches=2)).temporaries == copies + 2 * LAYERS + LOGITS + HIDDEN
    # XLA's attention: between forward and backward the weights of grouped heads are copied to another order.
    xla = of(Layout(8, 1, 1, microbatches=2), replace(WORKLOAD, attention="xla"))
    assert xla.temporaries == copies + 2 * LAYERS + LOGITS + 6 * 4 * 32 * 32 * 8
    # Eight sequences in one microbatch: no sums yet, so the gradients' room is free, and the tables are used up. The
    # loss takes most: logits and their gradients.
    found = of(Layout(8, 1, 1), replace(WORKLOAD, global_batch=64))
    assert found.temporaries == 2 * LAYERS + 2 * 8 * LOGITS - found.gradients
    # Four in each of two: the head's gradients take less than the logits', and are made before the layers'.
    found = of(Layout(8, 1, 1, microbatches=2), replace(WORKLOAD, global_batch=64))
    assert found.temporaries == copies + 2 * LAYERS + 4 * TABLE + 4 * HIDDEN


@pytest.mark.parametrize(("stored", "dtype"), [(4, "float32"), (2, "bfloat16")])
def test_temporaries_of_zero_3_by_hand(factors: Temporaries, stored: int, dtype: str):
    # Of one layer's parts, gate and up are split along their second dim; the layer's gradients are whole in float32.
    turned, made = factors.reordered * stored * 6 * 2 * 64 * 192 // 8, stored * LAYERS // 8
    layer = factors.gathered * 4 * (MATRICES + NORMS)
    on = lambda microbatches, batch: of(
        Layout(8, 1, 1, 3, microbatches=microbatches), replace(WORKLOAD, param_dtype=dtype, global_batch=batch)
    )
    # The head's gradients would take less than the logits', and yet come after the layers'.
    assert on(2, 64).temporaries == turned + made + 4 * LOGITS + layer + 4 * HIDDEN
    # With many sequences the loss takes most, beside the head's table, which is gathered.
    assert on(2, 128).temporaries == turned + 2 * 8 * LOGITS + 2 * TABLE
    # With one microbatch there are no sums yet.
    assert on(1, 64).temporaries == turned + 2 * 8 * LOGITS + 2 * TABLE - on(1, 64).gradients


def test_temporaries_of_zero_2_by_hand(factors: Temporaries):
    layer = factors.gathered * 4 * (MATRICES + NORMS)
    assert of(Layout(8, 1, 1, 2)).temporaries == 2 * LAYERS + 2 * LOGITS + layer + 2 * HIDDEN


@pytest.mark.usefixtures("factors")
def test_new_weights_are_gathered_beside_the_old():
    # One short sequence on each replica: the update takes more than the backward.
    short = Workload(sequence_length=1, global_batch=8)
    found = of(Layout(8, 1, 1, 2), short)
    assert found.gradients + found.activations + found.temporaries == 4 * LAYERS
    assert of(Layout(8, 1, 1, 3), short).temporaries < found.temporaries


def test_stages_add_up_gradients_of_a_chunk(factors: Temporaries):
    # Three stages of two layers, as one chunk and as two; more for two stages, whose first phase is one tick.
    seen = {}
    for pipe, chunks in ((3, 1), (3, 2), (2, 1)):
        layout = Layout(1, pipe, 1, microbatches=6, chunks=chunks, remat="full")
        model = MODEL.model_copy(update={"vocab_size": 128, "vocab_multiple": 1})
        height = partition_of(model, pipe, chunks).height
        workload = Workload(sequence_length=1, global_batch=6)
        found = memory(model, layout, workload, height)
        copies = 2 * (height * chunks * (MATRICES + NORMS) + (2 * model.padded_vocab_size // pipe + 1) * 64)
        seen[pipe, chunks] = (found.temporaries - copies) / (2 * height * (MATRICES + NORMS))
    assert seen[3, 1] == pytest.approx(factors.stages, abs=0.1)
    assert seen[3, 2] == pytest.approx(factors.stages + 1, abs=0.1)
    assert seen[2, 1] == pytest.approx(factors.stages + factors.two_stages, abs=0.1)


def test_what_is_in_flight_between_stages(factors: Temporaries):
    # Two stages of three layers, four sequences; the loss takes most, logits over half of the table.
    found = of(Layout(1, 2, 1, microbatches=4))
    copies = 2 * (3 * (MATRICES + NORMS) + TABLES // 2 + LAST_NORM)
    gradients = (factors.stages + factors.two_stages) * 2 * 3 * (MATRICES + NORMS)
    chunk = 4 * 3 * kept(MODEL, 32, "bfloat16", 2, 1, "none", sequence_parallel=False).layer
    expected = copies + gradients + factors.in_flight * chunk + 2 * 4 * LOGITS // 2
    assert found.temporaries == pytest.approx(expected)


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


def test_gradients_of_one_microbatch_come_when_activations_have_gone():
    """With bfloat16 weights and no moments they are most of what there is."""
    model = read("layers=8,hidden=1024,heads=8,kv=8,ffn=2816,vocab=4000").config.model
    lean = Workload(256, 24, param_dtype="bfloat16", optimizer="sgd", attention="xla")
    one = memory(model, Layout(8, 1, 1), lean, 8)
    two = memory(model, Layout(8, 1, 1, microbatches=2), replace(lean, global_batch=48), 8)  # the same activations
    assert one.gradients == two.gradients and one.activations < two.activations
    assert one.temporaries == 0
    assert two.activations < one.gradients + one.activations < two.gradients + two.activations
    assert one.total == pytest.approx(1017e6, rel=0.05)  # compiled for H100 with jax 0.10.2


def test_xla_s_attention_keeps_the_pairs():
    flash, xla = (of(Layout(8, 1, 1, microbatches=2), replace(WORKLOAD, attention=a)) for a in ("flash", "xla"))
    pairs = 6 * 32 * 32 * 8  # layers, pairs of tokens, heads
    numbers = 6 * 4 * 32 * 8  # of the softmax, one more for each query
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
