"""Allocations of claims: no device twice, no counter overdrawn, nothing refused that would fit, groups whole or not at all."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.kubernetes import build_slices

from eelgrid_agent.kubelet.resource_slices import DRA_DRIVER as AGENT_DRIVER
from eelgrid_controller.engines.kubernetes.claims import allocation
from eelgrid_controller.engines.kubernetes.claims.allocation import (
    BundleAllocation,
    ClaimBundle,
    ClaimRequest,
    DeviceRequest,
    MatchAttribute,
    UnallocatedBundle,
    allocation_body,
)
from eelgrid_controller.engines.kubernetes.claims.cel import compile_selector
from eelgrid_controller.engines.kubernetes.claims.device_pools import DRIVER_NAME, DevicePools, allocation_results
from eelgrid_protos.catalogue.loader import load_catalogue

CATALOGUE = load_catalogue()
PROFILES = ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", ""]


class Anywhere:
    """Room for whatever comes, on every node."""

    def can_host(self, bundle, node_name):
        return True

    def reserve(self, bundle, node_name, sign):
        """Nothing is counted."""


def allocate_claims(pools, bundles):
    return allocation.allocate_claims(pools, bundles, Anywhere())


def want(profile="1g.10gb", count=1, *, request="r", devices=()):
    says = f'.profile == "{profile}"' if profile else '.type == "gpu"'
    choice = compile_selector(f'device.driver == "{DRIVER_NAME}" && device.attributes["{DRIVER_NAME}"]{says}')
    return DeviceRequest(request, DRIVER_NAME, () if devices else (choice,), count, tuple(devices))


def claim(number, profile="1g.10gb", *, count=1, node_name="", group="", devices=(), variants=None, **changes):
    variants = variants or ((want(profile, count, devices=devices),),)
    asked = ClaimRequest(namespace="n", name=f"c{number}", uid=f"u{number}", variants=variants, **changes)
    return ClaimBundle(claims=(asked,), node_name=node_name, group=group)


def names(answer):
    return tuple(one.device for results in answer.results for one in results)


def pools_of(every, claims=()):
    pools = DevicePools()
    for number, piece in enumerate(every):
        pools.put_slice(f"{number}-{piece['metadata']['name']}", piece["spec"])
    for number, one in enumerate(claims):
        pools.set_allocation(f"held-{number}", allocation_results(one))
    return pools


def written(answers):
    """Claims as they stand after their allocations were written."""
    return [
        {"status": {"allocation": allocation_body(asked, results, one.node_name, "2026-11-22T00:00:00Z")}}
        for one in answers
        if isinstance(one, BundleAllocation)
        for asked, results in zip(one.bundle.claims, one.results, strict=True)
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
            number,
            draw(st.sampled_from(PROFILES)),
            count=draw(st.sampled_from([1, 1, 1, 2, 3])),
            node_name=draw(st.sampled_from(["", "", *nodes])),
            group=draw(st.sampled_from(["", "", "", "g", "h"])),
        )
        for number in range(draw(st.integers(0, 24)))
    ]
    return nodes, asked


@settings(max_examples=60, deadline=None)
@given(cases())
def test_nothing_is_given_twice_and_nothing_that_fits_is_refused(case):
    nodes, asked = case
    every = [piece for node in nodes for piece in build_slices(node)]
    answers = allocate_claims(pools_of(every), asked)
    assert [one.bundle for one in answers] == asked
    claims = written(answers)
    assert overdrawn(every, claims) == []
    for one in answers:
        if isinstance(one, BundleAllocation):
            assert len(names(one)) == one.bundle.claims[0].variants[0][0].many
            assert one.bundle.node_name in ("", one.node_name)
    for group in {one.group for one in asked} - {""}:
        assert len({type(answer) for answer in answers if answer.bundle.group == group}) == 1
    # What waits alone does not fit after all others either; what is taken is seen in the claims that stand.
    for one in answers:
        if (
            isinstance(one, UnallocatedBundle)
            and not one.bundle.group
            and one.bundle.claims[0].variants[0][0].many == 1
        ):
            (again,) = allocate_claims(pools_of(every, claims), [one.bundle])
            if not any(answer.bundle.group and isinstance(answer, UnallocatedBundle) for answer in answers):
                assert isinstance(again, UnallocatedBundle)


def test_the_whole_of_the_room_is_given():
    every = [piece for node in ("a", "b") for piece in build_slices(node)]
    answers = allocate_claims(pools_of(every), [claim(number) for number in range(30)])
    assert sum(isinstance(one, BundleAllocation) for one in answers) == 28
    assert "not free on any of 2 nodes" in answers[-1].reason
    assert DRIVER_NAME == AGENT_DRIVER


def test_small_ones_fill_a_gpu_from_its_end_and_leave_halves():
    pools = pools_of(build_slices("a"))
    first, second, half, other = allocate_claims(
        pools, [claim(0), claim(1), claim(2, "3g.40gb"), claim(3, "", node_name="a")]
    )
    assert (names(first), names(second)) == (("gpu-0-1g-6",), ("gpu-0-1g-4",))
    assert names(half) == ("gpu-0-3g-0",)
    assert names(other) == ("gpu-1",)


def test_exact_devices_are_given_or_none():
    pools = pools_of(build_slices("a"))
    asked = [
        claim(0, devices=("gpu-0-1g-4", "gpu-1-2g-0"), node_name="a"),
        claim(1, devices=("gpu-1-3g-4", "gpu-0-2g-4"), node_name="a"),
        claim(2, devices=("gpu-1-3g-4",), node_name="a"),
        claim(3, devices=("gpu-1-3g-4",), node_name="b"),
    ]
    found = allocate_claims(pools, asked)
    assert [type(one) for one in found] == [BundleAllocation, UnallocatedBundle, BundleAllocation, UnallocatedBundle]


def test_pools_that_are_not_whole_or_not_well_are_not_used():
    assert pools_of(build_slices("a")[:1]).get_pool(DRIVER_NAME, "a") is None
    old, new = build_slices("a", gpus=1), build_slices("a", gpus=2, generation=2)
    assert "gpu-1" in pools_of([*old, *new]).get_pool(DRIVER_NAME, "a").offers
    (answer,) = allocate_claims(pools_of(build_slices("a", cordon="xid 79")), [claim(0)])
    assert isinstance(answer, UnallocatedBundle)


def test_the_body_is_what_the_api_server_wants():
    config = {"requests": ["r"], "opaque": {"driver": DRIVER_NAME, "parameters": {}}}
    other = {"requests": ["s"], "opaque": {"driver": DRIVER_NAME, "parameters": {"x": 1}}}
    of_class = {"opaque": {"driver": DRIVER_NAME, "parameters": {"y": 2}}}
    (answer,) = allocate_claims(
        pools_of(build_slices("a")),
        [claim(0, config=(config, other), classes={"r": ("k", (of_class,)), "s": ("k", ())})],
    )
    body = allocation_body(answer.bundle.claims[0], answer.results[0], answer.node_name, "2026-11-22T05:00:00Z")
    assert body["allocationTimestamp"] == "2026-11-22T05:00:00Z"
    assert body["nodeSelector"]["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["a"]
    assert body["devices"]["results"] == [{"request": "r", "driver": DRIVER_NAME, "pool": "a", "device": "gpu-0-1g-6"}]
    assert body["devices"]["config"] == [
        {"source": "FromClass", "requests": ["r"], **of_class},
        {"source": "FromClaim", **config},
    ]


def test_alternatives_are_tried_in_their_order_over_all_nodes():
    every = [piece for node in ("a", "b") for piece in build_slices(node, gpus=1)]
    pools = pools_of(every)
    either = ((want("7g.80gb", request="r/big"),), (want("1g.10gb", request="r/small"),))
    answers = allocate_claims(pools, [claim(number, variants=either) for number in range(4)])
    assert [one.node_name for one in answers[:2]] == ["a", "b"]
    assert all(isinstance(one, UnallocatedBundle) for one in answers[2:])
    answers = allocate_claims(
        pools_of(every), [claim(0, node_name="b"), claim(1, variants=either), claim(2, variants=either)]
    )
    assert [names(one) for one in answers[1:]] == [("gpu-0-7g-0",), ("gpu-0-1g-4",)]
    assert answers[2].results[0][0].request == "r/small"


def test_devices_agree_about_what_they_are_to_share():
    pools = pools_of(build_slices("a"))
    allocate_claims(pools, [claim(number, node_name="a") for number in range(5)])
    wants = (want("1g.10gb", 3), want("3g.40gb", request="s"))
    (apart,) = allocate_claims(pools_of(build_slices("a", gpus=1)), [claim(9, variants=(wants,))])
    assert isinstance(apart, BundleAllocation)
    same = MatchAttribute(frozenset(), (DRIVER_NAME, "parentUUID"))
    (found,) = allocate_claims(pools, [claim(9, variants=(wants,), same=(same,))])
    assert {name.partition("-")[2][0] for name in names(found)} == {"1"}
    assert len(names(found)) == 4
    (none,) = allocate_claims(pools, [claim(10, variants=(wants,), same=(same,))])
    assert isinstance(none, UnallocatedBundle)


def test_claims_of_one_pod_end_on_one_node():
    every = [piece for node in ("a", "b") for piece in build_slices(node, gpus=1)]
    two = ClaimBundle(claims=(claim(0, "4g.40gb").claims[0], claim(1, "3g.40gb").claims[0]))
    pools = pools_of(every)
    (first, pair, after) = allocate_claims(pools, [claim(7, "1g.10gb", node_name="a"), two, claim(8, "4g.40gb")])
    assert (first.node_name, pair.node_name, after.node_name) == ("a", "b", "a")
    assert len(pair.results) == 2


@pytest.mark.parametrize("count", [0, 33])
def test_a_claim_of_too_many_waits(count):
    (answer,) = allocate_claims(pools_of(build_slices("a")), [claim(0, count=count)])
    assert "1 to 32 devices" in answer.reason
