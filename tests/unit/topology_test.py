"""Links as bandwidths, paths as codes, and the GPUs that real boards' links lead to."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.device_rig import open_rig

from eelgrid_agent.simulation.spec import GpuSpec
from eelgrid_controller.placement.planner import Planner
from eelgrid_controller.placement.snapshot import NetworkLocations, build_link_matrix
from eelgrid_protos.messages import OBJECTIVES, GpuLink, Inventory

BALANCED = OBJECTIVES["balanced"]


def board(product: str, count: int = 8, name: str = "a") -> Inventory:
    """A node of clusters.py's shape with the links and NUMA nodes of a simulated board."""
    with open_rig("direct", *[GpuSpec(product=product)] * count) as rig:
        found = {gpu.uuid: gpu for gpu in rig.device.gpus()}
        links = tuple(
            GpuLink(
                one=found[link.one].index, other=found[link.other].index, ancestor=link.ancestor, nvlinks=link.nvlinks
            )
            for link in rig.device.topology()
        )
    plain = build_node(name, gpus=count)
    numa = {gpu.index: gpu.numa_node for gpu in found.values()}
    return replace(plain, links=links, gpus=tuple(replace(gpu, numa_node=numa[gpu.index]) for gpu in plain.gpus))


def chosen(core, **wanted):
    """The GPUs of a new workload."""
    (spot,) = core.submit(build_request(**wanted), now_ns=1).result.placements
    return spot.gpu_indexes


def hold(core, *indexes):
    """Whole GPUs of a node without links are taken in order, so a task for each holds the first; then some go."""
    ids = [
        core.submit(build_request(gpus=1, cpu=0, memory_gib=0), now_ns=1).result
        for _ in core.state.nodes["a"].inventory.gpus
    ]
    for workload in ids:
        if workload.placements[0].gpu_indexes[0] not in indexes:
            core.cancel(workload.workload_id, now_ns=1)


@pytest.mark.parametrize(
    ("product", "held", "gpus", "expected"),
    [
        # A cube mesh: partners with two links below one PCIe switch; else a face, in the order of its doubled ring.
        ("v100-sxm2-16gb", (), 2, (2, 3)),
        ("v100-sxm2-16gb", (), 4, (0, 3, 2, 1)),
        ("v100-sxm2-16gb", (0,), 4, (4, 7, 6, 5)),
        ("v100-sxm2-16gb", (1, 2), 2, (6, 7)),
        ("v100-sxm2-16gb", (1, 2, 6), 2, (0, 3)),
        # PCIe alone: below one switch, else on one processor, else what there is.
        ("l40s", (0,), 2, (2, 3)),
        ("l40s", (0, 1), 4, (4, 5, 6, 7)),
        ("l40s", (0, 2, 4, 6), 2, (1, 3)),
        # One GPU leaves the pairs whole.
        ("l40s", (2,), 1, (3,)),
        # Switches link all alike; what is left is the PCIe switch and the processor.
        ("h100-sxm5-80gb", (0,), 2, (2, 3)),
        ("a100-sxm4-40gb", (3,), 4, (4, 5, 6, 7)),
        ("t4", (1,), 2, (2, 3)),
    ],
)
def test_whole_gpus_are_taken_where_they_are_best_linked(product, held, gpus, expected):
    core = build_core(board(product))
    hold(core, *held)
    assert chosen(core, gpus=gpus) == expected


def test_shares_and_unknown_or_equal_links_keep_the_order_of_the_index():
    core = build_core(board("l40s"))
    hold(core, 0)
    assert chosen(core, gpus=1, milli=400) == (1,)
    for inventory in (build_node("a", gpus=8), board("a100-sxm4-40gb", 2)):
        core = build_core(inventory)
        assert core.snapshot().devices[0].links is None
        assert chosen(core, gpus=2) == (0, 1)


def test_links_change_no_cost_and_no_node():
    linked, plain = (
        build_core(board("v100-sxm2-16gb"), build_node("b", gpus=4)),
        build_core(build_node("a", gpus=8), build_node("b", gpus=4)),
    )
    kinds = [
        build_request(gpus=2),
        build_request(gpus=1, milli=300),
        build_request(gpus=1),
        build_request(gpus=3),
        build_request(gpus=0, cpu=9),
    ]
    for number in range(12):
        wanted = kinds[number % 5].spec
        found = [Planner().decide_placement(core.snapshot(), wanted, BALANCED) for core in (linked, plain)]
        costs = [[(c.node_name, c.cost_w) for c in one.explanation[0].candidates] for one in found]
        assert costs[0] == costs[1]
        for core in (linked, plain):
            core.submit(kinds[number % 5], now_ns=1)


def test_gpus_of_another_model_are_not_exchanged():
    """Both models may serve, but the cost was reckoned for the first that fit, so alike ones replace them or none."""
    mixed = board("l40s", 4)
    gpus = tuple(replace(gpu, model="T4" if gpu.index in (1, 2) else "G2") for gpu in mixed.gpus)
    core = build_core(replace(mixed, gpus=gpus))
    assert chosen(core, gpus=2) == (0, 1)
    assert chosen(core, gpus=2, models=("T4", "G2")) == (2, 3)
    assert chosen(build_core(replace(mixed, gpus=gpus)), gpus=2, models=("T4",)) == (1, 2)


def test_bandwidths_follow_lanes_then_ancestors_then_numa_nodes():
    gpus = [replace(gpu, numa_node=gpu.index // 2) for gpu in build_node("a", gpus=4).gpus]
    links = [
        GpuLink(one=0, other=1, ancestor=10, nvlinks=2),
        GpuLink(one=2, other=0, ancestor=50),
        # A level that NVML does not have yet lies between its neighbours.
        GpuLink(one=0, other=3, ancestor=45),
    ]
    found = build_link_matrix(gpus, links)
    assert found is not None
    assert found.tolist() == [[0, 62, 6, 9], [62, 0, 6, 6], [6, 6, 0, 9], [9, 6, 9, 0]]
    unknown = [replace(gpu, numa_node=None) for gpu in gpus]
    lone = build_link_matrix(unknown, [*links, GpuLink(one=1, other=3, ancestor=10)])
    assert lone is not None
    assert lone[2].tolist() == [6, 0, 0, 0]
    assert build_link_matrix(unknown, links[:1]) is None


def test_codes_are_equal_where_paths_share_their_beginning_and_follow_the_names():
    places = NetworkLocations()
    for row, path in enumerate([("b", "r1"), ("a", "r1"), ("a", "r1"), ("a", "r0"), (), ("a",)]):
        places.add_path(row, path)
    codes = places.codes()
    assert codes[:, 0].tolist() == [2, 1, 1, 1, 0, 1]
    assert codes[:, 1].tolist() == [4, 3, 3, 2, 0, 1]
    places.add_path(3, ("a", "r1"))
    assert places.codes()[:, 1].tolist() == [3, 2, 2, 2, 0, 1]
    assert NetworkLocations().codes().shape == (0, 0)
