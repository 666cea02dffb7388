"""Allocations of claims: no device twice, no counter overdrawn, nothing refused that would fit, groups whole or not at all."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.kubelet.slices import DRIVER as AGENT_DRIVER
from eelgrid_agent.kubelet.slices import slices_of
from eelgrid_controller.kubernetes.claims import (
    DRIVER,
    Allocation,
    AskedClaim,
    Unallocated,
    allocate,
    allocation_body,
    pools_of,
)
from eelgrid_protos.catalogue import load
from eelgrid_protos.messages import Gpu

CATALOGUE = load()
PROFILES = ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", ""]


def slices(node, gpus=2, *, generation=1, **changes):
    product = CATALOGUE.products["h100-sxm5-80gb"]
    found = [
        Gpu(uuid=f"GPU-{node}-{i}", index=i, product="H100", model="H100", catalogue_key=product.key, mig_capable=True,
            memory_bytes=product.memory_bytes, **changes)
        for i in range(gpus)
    ]  # fmt: skip
    return list(slices_of(node, found, CATALOGUE, conditions={}, is_changeable=True, generation=generation))


def claim(number, profile="1g.10gb", **changes):
    return AskedClaim(namespace="n", name=f"c{number}", uid=f"u{number}", request="r", profile=profile, **changes)


def written(answers):
    """Claims as they stand after their allocations were written."""
    return [
        {"status": {"allocation": allocation_body(one, "2026-11-22T00:00:00Z")}}
        for one in answers
        if isinstance(one, Allocation)
    ]


def overdrawn(every, claims):
    """The slow and obvious judge: what is taken more than once or beyond its counter."""
    devices, room, taken, given = {}, {}, Counter(), Counter()
    for piece in every:
        node = piece["spec"]["nodeName"]
        for one in piece["spec"].get("devices", ()):
            devices[node, one["name"]] = one
        for set_ in piece["spec"].get("sharedCounters", ()):
            for name, counter in set_["counters"].items():
                room[node, set_["name"], name] = int(counter["value"])
    for one in claims:
        for result in one["status"]["allocation"]["devices"]["results"]:
            key = (result["pool"], result["device"])
            given[key] += 1
            for use in devices[key].get("consumesCounters", ()):
                for name, value in use["counters"].items():
                    taken[result["pool"], use["counterSet"], name] += int(value["value"])
    return [key for key, n in given.items() if n > 1] + [key for key, n in taken.items() if n > room[key]]


@st.composite
def cases(draw):
    nodes = [f"node-{i}" for i in range(draw(st.integers(1, 3)))]
    asked = [
        claim(
            number, draw(st.sampled_from(PROFILES)), count=draw(st.sampled_from([1, 1, 1, 2, 3])),
            node_name=draw(st.sampled_from(["", "", *nodes])), group=draw(st.sampled_from(["", "", "", "g", "h"])),
        )
        for number in range(draw(st.integers(0, 24)))
    ]  # fmt: skip
    return nodes, asked


@settings(max_examples=60, deadline=None)
@given(cases())
def test_nothing_is_given_twice_and_nothing_that_fits_is_refused(case):
    nodes, asked = case
    every = [piece for node in nodes for piece in slices(node)]
    answers = allocate(pools_of(every), asked)
    assert [one.asked for one in answers] == asked
    claims = written(answers)
    assert overdrawn(every, claims) == []
    for one in answers:
        if isinstance(one, Allocation):
            assert len(one.devices) == one.asked.count
            assert one.asked.node_name in ("", one.node_name)
    for group in {one.group for one in asked} - {""}:
        assert len({type(answer) for answer in answers if answer.asked.group == group}) == 1
    # What waits alone does not fit after all others either; what is taken is seen in the claims that stand.
    for one in answers:
        if isinstance(one, Unallocated) and not one.asked.group and one.asked.count == 1:
            (again,) = allocate(pools_of(every, claims), [one.asked])
            if not any(answer.asked.group and isinstance(answer, Unallocated) for answer in answers):
                assert isinstance(again, Unallocated)


def test_the_whole_of_the_room_is_given():
    every = [piece for node in ("a", "b") for piece in slices(node)]
    answers = allocate(pools_of(every), [claim(number) for number in range(30)])
    assert sum(isinstance(one, Allocation) for one in answers) == 28
    assert "1 of 1g.10gb not free on any of 2 nodes" in answers[-1].reason
    assert DRIVER == AGENT_DRIVER


def test_small_ones_fill_a_gpu_from_its_end_and_leave_halves():
    pools = pools_of(slices("a"))
    first, second, half, other = allocate(
        pools, [claim(0), claim(1), claim(2, "3g.40gb"), claim(3, "", node_name="a")]
    )  # fmt: skip
    assert (first.devices, second.devices) == (("gpu-0-1g-6",), ("gpu-0-1g-4",))
    assert half.devices == ("gpu-0-3g-0",)
    assert other.devices == ("gpu-1",)


def test_exact_devices_are_given_or_none():
    pools = pools_of(slices("a"))
    asked = [
        claim(0, devices=("gpu-0-1g-4", "gpu-1-2g-0"), node_name="a"),
        claim(1, devices=("gpu-1-3g-4", "gpu-0-2g-4"), node_name="a"),
        claim(2, devices=("gpu-1-3g-4",), node_name="a"),
        claim(3, devices=("gpu-1-3g-4",), node_name="b"),
    ]
    found = allocate(pools, asked)
    assert [type(one) for one in found] == [Allocation, Unallocated, Allocation, Unallocated]


def test_pools_that_are_not_whole_or_not_well_are_not_used():
    assert pools_of(slices("a")[:1]) == {}
    old, new = slices("a", gpus=1), slices("a", gpus=2, generation=2)
    assert "gpu-1" in pools_of([*old, *new])["a"].devices
    (answer,) = allocate(pools_of(slices("a", cordon="xid 79")), [claim(0)])
    assert isinstance(answer, Unallocated)


def test_the_body_is_what_the_api_server_wants():
    config = {"requests": ["r"], "opaque": {"driver": DRIVER, "parameters": {}}}
    (answer,) = allocate(pools_of(slices("a")), [claim(0, config=(config,))])
    body = allocation_body(answer, "2026-11-22T05:00:00Z")
    assert body["allocationTimestamp"] == "2026-11-22T05:00:00Z"
    assert body["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["a"]
    assert body["devices"]["results"] == [{"request": "r", "driver": DRIVER, "pool": "a", "device": "gpu-0-1g-6"}]
    assert body["devices"]["config"] == [{"source": "FromClaim", **config}]


@pytest.mark.parametrize("count", [0, 33])
def test_a_claim_of_too_many_waits(count):
    (answer,) = allocate(pools_of(slices("a")), [claim(0, count=count)])
    assert "1 to 32 devices" in answer.reason
