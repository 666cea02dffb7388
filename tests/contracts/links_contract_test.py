"""Nearness, both ways over the same devices: PCIe ancestors, NVLinks and what goes over them, the fabric."""

import pytest
from tests.device_rig import WAYS, open_rig

from eelgrid_agent.devices.port import DeviceLink
from eelgrid_agent.simulation.spec import GpuSpec
from eelgrid_protos.messages import Reading


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def links_of(way: str, product: str, count: int) -> list[DeviceLink]:
    with open_rig(way, *[GpuSpec(product=product)] * count) as rig:
        assert len({gpu.uuid for gpu in rig.device.gpus()}) == count
        return list(rig.device.topology())


def test_every_pair_is_reported_once_with_its_nearness(way: str) -> None:
    with open_rig(way) as rig:
        links = rig.device.topology()
        index = {gpu.uuid: gpu.index for gpu in rig.device.gpus()}
    pairs = {(index[link.one], index[link.other]): (link.ancestor, link.nvlinks) for link in links}
    assert sorted(pairs) == [(one, other) for one in range(8) for other in range(one + 1, 8)]
    assert (pairs[0, 1], pairs[0, 2], pairs[0, 4]) == ((10, 0), (40, 0), (50, 0))


@pytest.mark.parametrize(
    ("product", "count", "nvlinks"),
    [("a100-sxm4-40gb", 4, 4), ("h100-sxm5-80gb", 8, 18), ("v100-sxm2-16gb", 2, 6), ("l40s", 4, 0)],
)
def test_links_between_devices_are_counted_directly_and_over_switches(
    way: str, product: str, count: int, nvlinks: int
) -> None:
    links = links_of(way, product, count)
    assert len(links) == count * (count - 1) // 2
    assert {link.nvlinks for link in links} == {nvlinks}


def test_sxm2_boards_of_eight_are_a_hybrid_cube_mesh(way: str) -> None:
    """The matrix of a DGX-1 with V100: six links to each device, sixteen pairs linked, eight of them doubly."""
    with open_rig(way, *[GpuSpec(product="v100-sxm2-16gb")] * 8) as rig:
        index = {gpu.uuid: gpu.index for gpu in rig.device.gpus()}
        nvlinks = {(index[link.one], index[link.other]): link.nvlinks for link in rig.device.topology()}
    assert [nvlinks[0, other] for other in range(1, 8)] == [1, 1, 2, 2, 0, 0, 0]
    assert [nvlinks[min(4, other), max(4, other)] for other in (0, 1, 2, 3, 5, 6, 7)] == [2, 0, 0, 0, 1, 1, 2]
    assert sorted(nvlinks.values()) == [0] * 12 + [1] * 8 + [2] * 8
    for gpu in range(8):
        assert sum(count for pair, count in nvlinks.items() if gpu in pair) == 6


def test_each_device_reports_its_numa_node_and_neighbours_below_it_share_one(way: str) -> None:
    with open_rig(way, *[GpuSpec(product="l40s")] * 8) as rig:
        numa = {gpu.uuid: gpu.numa_node for gpu in rig.device.gpus()}
        assert list(numa.values()) == [0] * 4 + [1] * 4
        for link in rig.device.topology():
            assert (link.ancestor <= 40) == (numa[link.one] == numa[link.other])


def test_a_silent_device_has_no_neighbours(way: str) -> None:
    with open_rig(way, *[GpuSpec(product="h100-sxm5-80gb")] * 3) as rig:
        rig.device.gpus()
        rig.node.faults.lose_gpu(rig.uuid(0))
        assert [(link.one, link.other) for link in rig.device.topology()] == [(rig.uuid(1), rig.uuid(2))]


def test_traffic_over_links_follows_the_work_and_the_fabric_stands(way: str) -> None:
    with open_rig(way, *[GpuSpec(product="h100-sxm5-80gb")] * 8) as rig:
        before = rig.slow(0)
        rig.load(0, 1.0)
        rig.advance(10.0)
        after = rig.slow(0)
        assert before[Reading.NVLINK_ACTIVE_LINKS] == 18.0
        assert before[Reading.NVLINK_SENT_BYTES] == 0.0
        # A tenth of 18 links of 25 GB/s, to the KiB.
        assert after[Reading.NVLINK_SENT_BYTES] == pytest.approx(10 * 18 * 2.5e9, rel=1e-6)
        assert after[Reading.FABRIC_STATE] == 3.0
        # The last is a registration that is over, with an error.
        for state in (1, 2, 4):
            rig.node.faults.set_fabric_state(rig.uuid(0), state)
            assert rig.slow(0)[Reading.FABRIC_STATE] == state
        rig.node.devices[0].wear.nvlink_errors = 4
        assert rig.slow(0)[Reading.NVLINK_ERRORS] == 4.0


@pytest.mark.parametrize("product", ["h100-sxm5-80gb", "b200"])
def test_link_errors_are_counted_by_old_and_by_new_fields(way: str, product: str) -> None:
    with open_rig(way, *[GpuSpec(product=product)] * 2) as rig:
        rig.node.devices[1].wear.nvlink_errors = 11
        assert [rig.slow(index)[Reading.NVLINK_ERRORS] for index in (0, 1)] == [0.0, 11.0]
