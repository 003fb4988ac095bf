"""Small planning tasks, and every legal layout of one, found without any shortcut."""

from collections.abc import Iterator
from itertools import product

from jaxpar.config import Config, InputError
from jaxpar.planner.cluster import Cluster, parse_cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.model import read

SMALL = "layers=5,hidden=1024,heads=8,kv=4,ffn=2816,vocab=32000"
LARGE = "layers=80,hidden=8192,heads=64,kv=8,ffn=28672,vocab=128256"  # Llama 3 70B
Task = tuple[Config, Workload, Cluster]


def task(model: str = SMALL, cluster: str = "2xh100x4", sequence_length: int = 2048, global_batch: int = 16) -> Task:
    config = read(model, sequence_length).config
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": global_batch})})
    return config, Workload(sequence_length, global_batch), parse_cluster(cluster)


def legal(config: Config, layout: Layout) -> bool:
    """Whether a whole config with this layout can be made."""
    values = config.model_dump(mode="json")
    values["mesh"] = {"data": layout.data, "pipe": layout.pipe, "tensor": layout.tensor}
    parallel = ("zero", "schedule", "chunks", "microbatches", "remat", "sequence_parallel")
    values["parallel"] |= {name: getattr(layout, name) for name in parallel}
    values["grad_reduce"]["algorithm"] = layout.algorithm
    try:
        Config.from_dict(values)
    except InputError:
        return False
    return True


def all_layouts(config: Config, workload: Workload, cluster: Cluster) -> Iterator[Layout]:
    """Every legal layout with tensor inside hosts, gpipe and all numbers of chunks among them.

    What is the same as something simpler is not there twice: ZeRO and algorithms with one replica, sequence parallel
    with tensor 1, schedules with one stage, hierarchical where it is a ring.
    """
    algorithms = ("native", "ring", "tree", "halving_doubling", "hierarchical")
    sizes = [n for n in range(1, cluster.devices + 1) if cluster.devices % n == 0]
    for pipe, tensor in product(sizes, sizes):
        data, rest = divmod(cluster.devices, pipe * tensor)
        if rest or cluster.per_host % tensor or not legal(config, Layout(data, pipe, tensor)):
            continue
        share_hosts = 1 < max(1, cluster.per_host // (pipe * tensor)) < data
        for zero, (schedule, chunks), microbatches, remat, sequence_parallel in product(
            range(4 if data > 1 else 1),
            product(("1f1b", "gpipe"), range(1, config.model.num_hidden_layers // pipe + 1))
            if pipe > 1
            else [("1f1b", 1)],
            [m for m in range(1, workload.global_batch // data + 1) if workload.global_batch % (data * m) == 0],
            ("none", "dots", "full"),
            (False, True) if tensor > 1 else (False,),
        ):
            layout = Layout(data, pipe, tensor, zero, schedule, chunks, microbatches, remat, sequence_parallel)
            if legal(config, layout):
                for algorithm in algorithms[: (5 if share_hosts else 4) if data > 1 else 1]:
                    yield Layout(
                        data, pipe, tensor, zero, schedule, chunks, microbatches, remat, sequence_parallel, algorithm
                    )
