"""Plans as values, why the others lose, and what would make a model fit."""

import json
from dataclasses import replace

import pytest

from jaxpar.config import InputError
from jaxpar.planner.advice import Advice, advise
from jaxpar.planner.plan import Plan, make_plan
from jaxpar.planner.price import Price
from jaxpar.planner.reasons import Rejected
from jaxpar.planner.remedies import Task, remedies
from jaxpar.planner.search import Found, Search
from jaxpar.quantities import seconds
from tests.planner.stand_in import STAND_IN
from tests.planner.tasks import LARGE, task

FITS = task("layers=48,hidden=8192,heads=8,kv=8,ffn=28672,vocab=32000", "2xh100x8", global_batch=16)
TWO_HOSTS = task("layers=20,hidden=8192,heads=8,kv=8,ffn=28672,vocab=32000", "2xh100x4", global_batch=8)
TOO_LARGE = task("layers=12,hidden=16384,heads=8,ffn=28672,vocab=32000", "1xh100x4", global_batch=4)
MIDDLING = "layers=32,hidden=4096,heads=32,kv=8,ffn=14336,vocab=128256"  # Llama 3 8B
LONG = "layers=4,hidden=8192,heads=8,ffn=8192,vocab=512"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(*FITS, top=20, ask=STAND_IN)


@pytest.fixture(scope="module")
def nothing() -> Plan:
    return make_plan(*TOO_LARGE, ask=STAND_IN)


def test_a_plan_is_read_back_the_same(plan: Plan, nothing: Plan):
    for it in (plan, nothing):
        assert Plan.from_json(it.to_json()) == it
    assert Plan.from_json(plan.to_json()) != nothing
    first = json.loads(plan.to_json())["ranked"][0]
    assert first["time"]["total"] == plan.ranked[0].time.total
    assert first["memory"]["total"] == plan.ranked[0].memory.total
    with pytest.raises(InputError, match="no plan: model"):
        Plan.from_json("{}")


def test_the_same_inputs_give_the_same_bytes(plan: Plan):
    assert make_plan(*FITS, top=20, ask=STAND_IN).to_json() == plan.to_json()
    other = FITS[0], replace(FITS[1], optimizer="sgd"), FITS[2]
    assert make_plan(*other, top=20, ask=STAND_IN).to_json() != plan.to_json()


def test_the_ranked_list_is_the_fastest_of_each_mesh(plan: Plan):
    assert plan.best is plan.ranked[0] and plan.meshes == len(plan.ranked) > 10
    assert sorted(plan.ranked, key=lambda price: price.time.total) == list(plan.ranked)
    meshes = [(p.layout.data, p.layout.pipe, p.layout.tensor) for p in plan.ranked]
    assert len(set(meshes)) == len(meshes) and all(price.fits for price in plan.ranked)
    short = make_plan(*FITS, top=2, ask=STAND_IN)
    assert short.ranked == plan.ranked[:2] and short.meshes == plan.meshes
    assert plan.nearest is None and plan.remedies == ()


def test_reasons_have_the_numbers_of_the_prices(plan: Plan):
    best = plan.best
    assert best is not None
    slower = [row for row in plan.rejected if row.price and row.price.fits]
    larger = [row for row in plan.rejected if row.price and not row.price.fits]
    refused = [row for row in plan.rejected if row.price is None]
    assert slower and larger and refused
    assert not any(row.choice == "data" for row in slower)  # pipe and tensor have said it
    for row in slower:
        assert row.price is not None
        share = row.price.time.total / best.time.total - 1
        assert f"{share:.1%} longer" in row.reason if share else row.reason == "as fast, and not as simple"
    for row in larger:
        assert row.price is not None and row.price.memory.total > plan.cluster.usable_bytes
        size = row.price.memory.total / 1e9
        how = "all else equal," if row.value == "gpipe" else "at least"
        assert f"{how} {size:,.0f} GB against" in row.reason or f"{how} {size:.1f} GB against" in row.reason
    assert "num_attention_heads 8 % mesh.tensor 16" in row_of(plan, "tensor", 16).reason


def row_of(plan: Plan, choice: str, value: int | str) -> Rejected:
    return next(row for row in plan.rejected if (row.choice, row.value) == (choice, value))


def test_a_value_alone_is_compared_with_the_best(plan: Plan):
    best = plan.best
    assert best is not None
    config, workload, cluster = FITS
    for choice, value, changed in (
        ("remat", "full", replace(best.layout, remat="full")),
        ("microbatch", 4, replace(best.layout, microbatches=16 // (4 * best.layout.data))),
    ):
        price, row = STAND_IN.price(config.model, changed, workload, cluster), row_of(plan, choice, value)
        assert row.price is not None and row.price.layout != changed
        usual = f"all else equal, a step takes {price.time.total / best.time.total - 1:.1%} longer"
        too_large = f"all else equal, {price.memory.total / 1e9:.1f} GB against"
        assert row.reason.startswith(usual if price.fits else too_large)
        assert f"; at best a step takes {row.price.time.total / best.time.total - 1:.1%} longer" in row.reason


def test_crossing_hosts_is_said():
    plan = make_plan(*TWO_HOSTS, ask=STAND_IN)
    best, crossing = plan.best, row_of(plan, "tensor", 8)
    assert crossing.reason.startswith("crosses hosts (only with --tensor-across-hosts); a step takes ")
    assert best is not None and crossing.price is not None
    before, after = seconds(best.time.tensor), seconds(crossing.price.time.tensor)
    assert f"exposed communication over tensor {before} → {after}" in crossing.reason
    allowed = row_of(make_plan(*TWO_HOSTS, tensor_across_hosts=True, ask=STAND_IN), "tensor", 8)
    assert allowed.reason.startswith("crosses hosts; a step takes ") and allowed.price == crossing.price


def test_great_numbers_that_do_not_fit_are_folded():
    plan = make_plan(*task(LONG, "1xh100x1", sequence_length=2**17, global_batch=16), ask=STAND_IN)
    sizes = {row.value: row for row in plan.rejected if row.choice == "microbatch"}
    assert plan.best is not None and sizes.keys() == {1, 2, 4, 8, 16} - {16 // plan.best.layout.microbatches} - {16}
    assert [row.and_above for row in sizes.values()] == [False, False, True]
    assert sizes[8].price is not None and sizes[8].price.layout.microbatches == 2  # not 1, of size 16


def test_a_range_holds_nothing_that_fits():
    """Of 8 devices only 2 and 4 replicas with ZeRO-3 fit, and at most 2 sequences of a microbatch."""

    def price(model, layout, workload, cluster) -> Price:
        small = workload.sequences_per_microbatch(layout) <= 2
        fits = layout.data in (2, 4) and layout.zero == 3 and small
        return replace(STAND_IN.price(model, layout, workload, cluster), fits=fits)

    plan = make_plan(*task(), ask=STAND_IN._replace(price=price))
    values = lambda choice: {row.value: row.and_above for row in plan.rejected if row.choice == choice}
    assert {price.layout.data for price in plan.ranked} == {2, 4}
    assert values("data") == {1: False, 8: False}
    assert values("zero") == {0: False, 1: False, 2: False}
    assert values("microbatch")[4] and 8 not in values("microbatch")


@pytest.mark.parametrize(
    ("sizes", "cluster", "batch", "said"),
    [
        (LONG.replace("layers=4", "layers=2001"), "1xh100x8", 8, "2,001: a plan is for at most 2,000 layers"),
        (LONG, "1xh100x8", 2**25, r"a plan is for at most 2\^36, 68,719,476,736"),
    ],
)
def test_tasks_that_are_too_large_are_refused(sizes: str, cluster: str, batch: int, said: str):
    with pytest.raises(InputError, match=said):
        make_plan(*task(sizes, cluster, sequence_length=4096, global_batch=batch))


def test_the_usual_advice():
    plan = make_plan(*TWO_HOSTS, ask=STAND_IN)
    assert plan.best is not None and plan.advice is not None
    prices = {(p.layout.pipe, p.layout.tensor): p for p in plan.ranked}

    def advised(*meshes: tuple[int, int]) -> Advice:
        of = {("mesh", str(mesh)): Found(prices[mesh], by_time=(prices[mesh].time.total, ())) for mesh in meshes}
        return advise(Search(families={**of}), plan.best, TWO_HOSTS[2])

    assert advised((1, 1), (1, 4), (2, 4)).price == prices[1, 1] == plan.advice.price  # data parallel alone, if it fits
    assert advised((1, 4), (1, 2), (2, 4), (8, 1)).price == prices[1, 2]  # as little tensor as it takes
    assert advised((2, 1), (2, 4), (4, 2)).price == prices[2, 4]  # a whole host before more stages
    best = (plan.best.layout.pipe, plan.best.layout.tensor)
    assert advised(best).text.endswith("which by cost is the best too.")
    assert f"{prices[1, 1].time.total / plan.best.time.total - 1:.1%} longer" in plan.advice.text
    assert "leads to data 8 × pipe 1 × tensor 1, where" in plan.advice.text


def test_when_nothing_fits_there_is_a_nearest_and_a_way_out(nothing: Plan):
    assert nothing.ranked == () and nothing.best is None and nothing.advice is None
    assert nothing.nearest is not None and nothing.nearest.memory.total > nothing.cluster.usable_bytes
    leanest = [row.price for row in nothing.rejected if row.price]
    assert nothing.nearest.memory.total == min(price.memory.total for price in leanest)
    assert {row.choice for row in nothing.rejected if row.and_above} == {"microbatch"}
    values = [row.choice for row in nothing.rejected if not row.and_above]
    assert values and all(values.count(choice) > 1 for choice in values)  # what is no choice is not spoken of
    hosts = next(remedy for remedy in nothing.remedies if "times the hosts" in remedy)
    times = int(hosts.split()[0])
    config, workload, cluster = TOO_LARGE
    for more, helps in ((times // 2, False), (times, True)):  # the least number that does
        found = make_plan(config, workload, replace(cluster, hosts=more), ask=STAND_IN)
        assert (found.best is not None) == helps


def test_a_host_of_one_device_gets_more_before_there_are_more_hosts():
    of = lambda text: next(r for r in make_plan(*text, ask=STAND_IN).remedies if "on each host" in r)
    middling, large = (task(sizes, "1xh100x1", global_batch=64) for sizes in (MIDDLING, LARGE))
    assert of(middling).startswith("2 devices on each host, 2 in all: ")
    assert of(large).startswith("8 devices on each host and 2 times the hosts, 2 with 16 devices: ")


def test_a_shorter_sequence_helps_where_activations_are_too_large():
    plan = make_plan(*task(LONG, "1xh100x1", 2**20, 1), ask=STAND_IN)
    assert plan.best is None
    said = next(remedy for remedy in plan.remedies if remedy.startswith("sequences of"))
    length = int(said.split()[2])
    assert f"--seq {length}" in said and f", {2**20 // length} microbatches of 1 sequence" in said
    for tokens, fit in ((length, True), (2 * length, False)):
        shorter = make_plan(*task(LONG, "1xh100x1", tokens, 2**20 // tokens), ask=STAND_IN)
        assert (shorter.best is not None) == fit


def test_something_is_said_even_where_nothing_helps():
    config, workload, cluster = task(LARGE, "1xh100x1", sequence_length=4096, global_batch=1)
    never = STAND_IN._replace(least_memory_bytes=lambda *_: 1e15)
    (said,) = remedies(Task("as it is", config, workload, cluster, False), never)
    assert "at least 1,000,000 GB on each device" in said and "12,797 devices" in said


def test_uneven_layers_are_part_of_a_plan():
    plan = make_plan(*task("layers=7,hidden=1024,heads=8,kv=4,ffn=2816,vocab=32000", "1xh100x4"))
    staged = [price for price in plan.ranked if price.layout.pipe > 1]
    assert staged and all(sum(price.counts) == 7 for price in plan.ranked)
    for price in staged:
        assert len(price.counts) == price.layout.pipe * price.layout.chunks
        assert max(price.counts) - min(price.counts) == 1
