import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import InputError
from jaxpar.data.batches import Batches, rows_needed
from jaxpar.data.examples import EvaluationExamples, TrainExamples
from jaxpar.data.windows import Span, Windows

TOKENS = np.random.default_rng(0).integers(0, 257, 5 * 240 + 1).astype(np.uint16)


def train_examples(global_batch=8):
    return TrainExamples(Windows([Span(TOKENS, 0, TOKENS.size)], 5, 257), [240], [1.0], global_batch, seed=3)


def batch_sharding(data, tensor):
    if jax.device_count() < data * tensor:
        pytest.skip(f"needs {data * tensor} devices")
    devices = jax.devices()[: data * tensor]
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    return NamedSharding(mesh, P("data"))


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 4), (4, 2), (8, 1), (1, 8)])
def test_batches_are_the_examples_on_every_mesh(data, tensor):
    examples, sharding = train_examples(), batch_sharding(data, tensor)
    with Batches(examples, sharding, 0, 5) as batches:
        got = list(batches)
    assert len(got) == 5
    for step, batch in enumerate(got):
        expected = examples.rows(step, range(8))
        assert batch.keys() == expected.keys() == {"tokens", "targets", "mask"}
        for name, array in batch.items():
            assert array.shape == (8, 5) and array.dtype == expected[name].dtype and array.sharding == sharding
            np.testing.assert_array_equal(array, expected[name])
            for shard in array.addressable_shards:  # the whole would look right even if replicas differed
                np.testing.assert_array_equal(shard.data, expected[name][shard.index])


def test_restart_at_any_step_goes_on_with_the_same_batches():
    examples, sharding = train_examples(), batch_sharding(1, 1)
    with Batches(examples, sharding, 0, 60) as batches:
        whole = [np.asarray(batch["tokens"]) for batch in batches]
    with Batches(train_examples(), sharding, 37, 60, prefetch=1) as batches:
        rest = [np.asarray(batch["tokens"]) for batch in batches]
    np.testing.assert_array_equal(rest, whole[37:])


def test_batches_of_an_evaluation():
    examples = EvaluationExamples(Windows([Span(TOKENS, 0, 5 * 11 + 1)], 5, 257), 8, 4)
    with Batches(examples, batch_sharding(1, 1), 0, len(examples)) as batches:
        assert [int(batch["mask"].sum()) for batch in batches] == [40, 15]


def test_only_rows_of_own_devices_are_read_and_ahead_of_time():
    read, ahead = [], threading.Event()

    class Recording:
        global_batch, sequence_length, vocab_size = 8, 5, 257

        def rows(self, step, rows):
            read.append((step, list(rows), threading.current_thread()))
            if step == 3:
                ahead.set()
            return {"tokens": np.zeros((len(rows), 5), np.int32)}

    with Batches(Recording(), batch_sharding(1, 1), 0, 100, prefetch=4) as batches:
        next(batches)
        assert ahead.wait(30)
    assert {step for step, _, _ in read} <= set(range(6))
    assert all(rows == list(range(8)) for _, rows, _ in read)
    assert threading.current_thread() not in {thread for _, _, thread in read}


def test_an_error_while_reading_reaches_the_reader():
    class Broken:
        global_batch, sequence_length, vocab_size = 8, 5, 257

        def rows(self, step, rows):
            raise RuntimeError("disk gone")

    with Batches(Broken(), batch_sharding(1, 1), 0, 3) as batches, pytest.raises(RuntimeError, match="disk gone"):
        next(batches)


def test_an_id_outside_the_vocabulary_is_refused_when_it_is_its_turn():
    class Bad:
        global_batch, sequence_length, vocab_size = 8, 5, 257

        def rows(self, step, rows):
            ids = np.zeros((len(rows), 5), np.int32)
            return {"tokens": ids, "targets": ids + 257 * (step == 2)}

    with Batches(Bad(), batch_sharding(1, 1), 0, 9) as batches:
        assert int(next(batches)["targets"].max()) == int(next(batches)["targets"].max()) == 0
        with pytest.raises(InputError, match=r"the batch after step 2 has the id 257 in its targets, in row 0 at"):
            next(batches)


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (2, 4)])
def test_a_refusal_fits_the_step(data, tensor):
    """It has the shapes, dtypes and layout of a batch, or other hosts would run another program."""
    with Batches(train_examples(), batch_sharding(data, tensor), 0, 1) as batches:
        batch, refusal = next(batches), batches.refusal()
    described = lambda arrays: {n: (a.shape, a.dtype, a.sharding) for n, a in arrays.items()}
    assert described(refusal) == described(batch)
    assert (np.asarray(refusal["targets"]) == -1).all() and np.asarray(refusal["mask"]).all()


@pytest.mark.parametrize(
    ("hosts", "data", "tensor"), [(1, 2, 4), (2, 4, 2), (4, 4, 2), (2, 8, 1), (8, 2, 4), (2, 1, 8)]
)
def test_rows_of_simulated_hosts(hosts, data, tensor):
    """Hosts of neighbouring devices read a batch's rows exactly as often as their replicas lie on different hosts."""
    sharding = batch_sharding(data, tensor)
    blocks = sharding.devices_indices_map((16, 5))
    devices = list(sharding.mesh.devices.flat)
    own = len(devices) // hosts
    rows = [rows_needed((blocks[d] for d in devices[h * own : (h + 1) * own]), 16) for h in range(hosts)]
    assert [len(r) for r in rows] == [max(16 // data, 16 // hosts)] * hosts
    assert sorted({row for r in rows for row in r}) == list(range(16))


TWO_PROCESSES = """
import sys
import jax, numpy as np
process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_batches import Batches, train_examples
assert jax.device_count() == 4 and jax.local_device_count() == 2
examples, asked = train_examples(), set()
real = examples.rows
examples.rows = lambda step, rows: (asked.update(rows), real(step, rows))[1]
for shape, own in (((4, 1), range(4 * process, 4 * process + 4)), ((2, 2), range(4 * process, 4 * process + 4))):
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices())
    asked.clear()
    with Batches(examples, NamedSharding(mesh, P("data")), 2, 4) as batches:
        for step, batch in zip((2, 3), batches, strict=True):
            expected = real(step, range(8))
            for name, array in batch.items():
                assert array.shape == (8, 5)
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(shard.data, expected[name][shard.index])
    assert asked == set(own), asked
print("fine")
"""


def test_two_processes_each_read_their_own_rows(request):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = str(request.path.parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(process), port],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "fine" in out, err
