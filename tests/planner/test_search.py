"""The search against pricing everything."""

import time
from dataclasses import replace
from typing import Any

import pytest

from jaxpar.config import InputError
from jaxpar.planner.layout import Layout
from jaxpar.planner.price import Price
from jaxpar.planner.search import Pricing, Search, search
from jaxpar.planner.space import Family, Space, chunk_counts, families, simplicity
from tests.planner.stand_in import STAND_IN
from tests.planner.tasks import LARGE, Task, all_layouts, task

TASKS = {
    "fits easily": task(),
    "numbers that are no powers of 2": task(
        "layers=7,hidden=1536,heads=12,ffn=3072,vocab=32256", "3xa100x6", global_batch=36
    ),
    "fits barely": task("layers=8,hidden=8192,heads=16,kv=4,ffn=28672,vocab=32000", "1xh100x8", global_batch=8),
    "does not fit": task("layers=8,hidden=16384,heads=16,ffn=57344,vocab=32000", "2xh100x2", global_batch=4),
}


def unpruned(of: Task, ask: Pricing) -> dict[Family, tuple[Price | None, Price]]:
    """For every family its fastest layout that fits and its leanest layout, from all prices."""
    config, workload, cluster = of
    members: dict[Family, list[Price]] = {}
    for layout in all_layouts(*of):
        price = ask.price(config.model, layout, workload, cluster)
        for family in families(layout, workload):
            members.setdefault(family, []).append(price)
    by_time = lambda price: (price.time.total, simplicity(price.layout))
    by_memory = lambda price: (price.memory.total, simplicity(price.layout))
    fitting = {family: [price for price in prices if price.fits] for family, prices in members.items()}
    return {
        family: (min(fitting[family], key=by_time, default=None), min(prices, key=by_memory))
        for family, prices in members.items()
    }


def check_against_all_prices(of: Task, ask: Pricing) -> Search:
    found, expected = search(*of, ask=ask), unpruned(of, ask)
    gpipe = expected.pop(("schedule", "gpipe"), None)
    if gpipe and gpipe[0] and found.meshes():
        assert gpipe[0].time.total >= found.meshes()[0].time.total  # so it need not be looked at
    assert {f for f in found.families if f not in found.compared} - {("schedule", "gpipe")} <= set(expected)
    for family, (fastest, leanest) in expected.items():
        if family[0] == "algorithm" and not found.meshes() and family[1] != "native":
            continue  # where nothing fits, algorithms make no difference
        known = found.families[family]
        assert known.fastest == fastest, family
        if fastest is None:
            assert known.leanest == leanest, family
    best = [fastest for (choice, _), (fastest, _) in expected.items() if choice == "mesh" and fastest]
    assert found.meshes() == sorted(best, key=lambda price: (price.time.total, simplicity(price.layout)))
    return found


@pytest.mark.parametrize("name", TASKS)
def test_nothing_better_is_left_out(name: str):
    found = check_against_all_prices(TASKS[name], STAND_IN)
    assert bool(found.meshes()) == (name != "does not fit")
    assert found.priced > 0 and found.bounded > 0
    if not found.meshes():
        assert found.leanest() == unpruned(TASKS[name], STAND_IN)["zero", found.leanest().layout.zero][1]


def nearly(layout: Layout) -> float:
    """Some factor between 0.8 and 1 that knows no order."""
    return 0.79 + 0.05 * ((7 * layout.zero + 3 * layout.microbatches + layout.chunks + len(layout.remat)) % 5)


def test_nothing_better_is_left_out_with_bounds_that_come_near():
    def least_seconds(*about: Any) -> float:
        time = STAND_IN.price(*about).time
        return nearly(about[1]) * (time.total - time.data)

    config, workload, cluster = TASKS["fits barely"]
    least_memory = lambda model, layout, _: 0.99 * STAND_IN.price(model, layout, workload, cluster).memory.total
    near = STAND_IN._replace(least_seconds=least_seconds, least_memory_bytes=least_memory)
    found = check_against_all_prices((config, workload, cluster), near)
    assert found.priced < search(config, workload, cluster, ask=STAND_IN).priced


def test_nothing_better_is_left_out_with_the_real_price():
    assert check_against_all_prices(TASKS["fits barely"], Pricing()).meshes()


def test_nothing_better_is_left_out_where_layers_cost_unlike():
    """Three chunks may be faster than two, though the largest part has as many layers."""
    config, workload, cluster = task("layers=13,hidden=1024,heads=8,kv=4,ffn=2816,vocab=32000", "4xh100x1")
    costs = (3.0, 3.0, 3.0, 1.0, 3.0, 3.0, 3.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    layouts = Space(config, unlike := replace(workload, layer_costs=costs), cluster).layouts((1, 4, 1))
    assert {layout.chunks for layout in layouts} == {1, 2, 3}
    assert check_against_all_prices((config, unlike, cluster), Pricing()).meshes()


@pytest.mark.slow
@pytest.mark.parametrize("sequence_length", [4096, 8192])
def test_nothing_better_is_left_out_of_thousands(sequence_length: int):
    of = task("layers=24,hidden=6144,heads=48,kv=8,ffn=16384,vocab=64000", "4xh100x8", sequence_length, 64)
    assert check_against_all_prices(of, Pricing()).meshes()


def test_gpipe_never_wins():
    config, workload, cluster = TASKS["fits easily"]
    for layout in all_layouts(config, workload, cluster):
        if layout.schedule == "gpipe":
            for ask in (STAND_IN, Pricing()):
                ours = ask.price(config.model, replace(layout, schedule="1f1b"), workload, cluster)
                gpipe = ask.price(config.model, layout, workload, cluster)
                assert ours.time.total <= gpipe.time.total and ours.memory.total <= gpipe.memory.total


def test_equally_fast_layouts_are_ordered_by_simplicity():
    _, workload, cluster = of = task(cluster="1xh100x4", global_batch=4)
    one = STAND_IN.price(of[0].model, Layout(4, 1, 1), workload, cluster)
    alike = STAND_IN._replace(price=lambda model, layout, *_: replace(one, layout=layout), least_seconds=lambda *_: 0.0)
    found = search(*of, ask=alike)
    assert found.meshes()[0].layout == Layout(4, 1, 1)
    assert [price.layout.zero for price in found.meshes()] == [0] * len(found.meshes())
    assert found.meshes()[1].layout == Layout(1, 4, 1)  # one axis; two come after it
    assert found.families["zero", 2].fastest.layout == Layout(4, 1, 1, zero=2)
    assert found.families["remat", "full"].fastest.layout == Layout(4, 1, 1, remat="full")


def test_tensor_stays_inside_hosts_unless_allowed():
    of = task("layers=5,hidden=1536,heads=24,kv=24,ffn=3072,vocab=32256", cluster="2xh100x6", global_batch=12)
    inside, across = search(*of, ask=STAND_IN), search(*of, tensor_across_hosts=True, ask=STAND_IN)
    assert {price.layout.tensor for price in inside.meshes()} == {1, 2, 3, 6}
    assert {price.layout.tensor for price in across.meshes()} == {1, 2, 3, 4, 6, 12}
    assert inside.compared == {("tensor", 4), ("tensor", 12)} and across.compared == set()
    for family in inside.compared:  # they are priced all the same, to say what they would cost
        compared = inside.families[family].fastest
        assert compared is not None and compared == across.families[family].fastest


def test_what_the_rules_refuse_is_kept_with_the_rule():
    found = search(*task(cluster="2xh100x8", global_batch=8), ask=STAND_IN)
    assert "num_hidden_layers 5" in found.illegal["pipe", 8]
    assert "global_batch 8 % (mesh.data 16" in found.illegal["data", 16]
    assert "num_attention_heads 8 % mesh.tensor 16" in found.illegal["tensor", 16]
    assert found.families.keys().isdisjoint(found.illegal)


def test_a_batch_that_only_tensor_across_hosts_divides():
    one = task("layers=1,hidden=2048,heads=16,ffn=4096,vocab=32000", "2xh100x8", global_batch=1)
    with pytest.raises(InputError, match="--tensor-across-hosts, or use a batch of 2 sequences"):
        search(*one)
    assert search(*one, tensor_across_hosts=True).meshes()


def test_a_batch_that_no_layout_divides():
    with pytest.raises(
        InputError,
        match=r"7 .--global-batch-tokens 14336.: .* 2, 4, 8.*Use 6 or 8 sequences \(12288 or 16384 tokens\)",
    ):
        search(*task("layers=1,hidden=1024,heads=4,ffn=64,vocab=512", "1xh100x8", global_batch=7), ask=STAND_IN)
    with pytest.raises(InputError, match=r"Use 2 sequences"):
        search(*task("layers=1,hidden=1024,heads=4,ffn=64,vocab=512", "1xh100x8", global_batch=1), ask=STAND_IN)
    # On pipe 7 the layers are too few, whatever else.
    with pytest.raises(InputError, match=r"Use 7 sequences.*On data 1 × pipe 1 × tensor 7, which would divide them"):
        search(*task("layers=1,hidden=1024,heads=4,ffn=64,vocab=512", "1xh100x7", global_batch=6), ask=STAND_IN)
    with pytest.raises(InputError, match=r"On data 8 × pipe 9 × tensor 1, which .* vocab_multiple 126 or 135\."):
        search(*task(LARGE, "gb200x72", sequence_length=4096, global_batch=1024), ask=STAND_IN)


def test_chunk_counts_have_every_height_once():
    for layers, pipe in ((80, 8), (7, 2), (30, 4), (5, 5)):
        heights = [-(-layers // (pipe * chunks)) for chunks in chunk_counts(layers, pipe)]
        assert heights == sorted({-(-layers // (pipe * v)) for v in range(1, layers // pipe + 1)}, reverse=True)


def test_1024_devices():
    before = time.process_time()
    found = search(*task(LARGE, "128xh100x8", sequence_length=4096, global_batch=1024))
    assert time.process_time() - before < 10  # 3.5 s measured
    assert found.meshes()[0].layout.devices == 1024
