"""The counters of ResourceSlices allow exactly what a GPU's geometry allows, and every object keeps the API's limits."""

import re
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_catalogue_gpu

from eelgrid_agent.kubelet.resource_slices import (
    GpuCondition,
    GpuPlacement,
    build_resource_slices,
    device_name,
    list_placements,
    parse_placement,
    placements_overlap,
)
from eelgrid_protos.catalogue.loader import load_catalogue

CATALOGUE = load_catalogue()
CUTTABLE = sorted(key for key, product in CATALOGUE.products.items() if product.mig is not None)
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def gpu(index, key, **changes):
    watts = CATALOGUE.products[key].power_default_w
    uuid = f"GPU-{index:08x}-1111-2222-3333-444444444444"
    return build_catalogue_gpu(key, index, uuid=uuid, power_limit_default_w=watts, **changes)


def published(gpus, *, node="node-1", is_changeable=True, conditions=None):
    return build_resource_slices(
        node, gpus, CATALOGUE, conditions=conditions or {}, is_changeable=is_changeable, generation=3, owner_uid="u"
    )


def devices_of(slices):
    return {one["name"]: one for piece in slices for one in piece["spec"].get("devices", ())}


def counters_of(slices):
    sets = [one for piece in slices for one in piece["spec"].get("sharedCounters", ())]
    return {one["name"]: {name: int(c["value"]) for name, c in one["counters"].items()} for one in sets}


def fit(chosen, counters):
    """As a scheduler judges: each device once, and what all of them take within each counter."""
    taken = Counter()
    for device in chosen:
        for use in device["consumesCounters"]:
            for name, value in use["counters"].items():
                taken[use["counterSet"], name] += int(value["value"])
    return all(count <= counters[set_][name] for (set_, name), count in taken.items())


@pytest.mark.parametrize(("key", "count"), [("a100-sxm4-40gb", 298), ("a30", 26)])
def test_the_counters_allow_every_layout_of_the_plain_profiles_and_no_other(key, count):
    geometry = CATALOGUE.products[key].mig
    slices = published([gpu(0, key, mig_enabled=True)])
    devices, counters = devices_of(slices), counters_of(slices)
    names = ("1g", "2g", "3g", "4g", "7g") if key.startswith("a100") else ("1g", "2g", "4g")
    plain = [geometry.profiles[name] for name in names]
    places = [GpuPlacement(0, profile, start) for profile in plain for start in profile.starts]
    layouts = 0
    for size in range(geometry.most + 1):
        for some in combinations(places, size):
            stands = geometry.conflict([(one.profile, one.start) for one in some]) is None
            if size <= 3 or stands:
                assert fit([devices[device_name(one)] for one in some], counters) == stands, some
            layouts += stands
    assert layouts == count


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_set_of_devices_fits_exactly_when_the_geometry_lets_it_stand(data):
    key = data.draw(st.sampled_from(CUTTABLE))
    geometry = CATALOGUE.products[key].mig
    part = gpu(0, key, mig_enabled=True)
    slices = published([part])
    devices, counters = devices_of(slices), counters_of(slices)
    every = [place for place in list_placements(part, geometry, is_changeable=True) if place.profile is not None]
    # Small ones mostly, so that many sets stand.
    small = [place for place in every if place.profile.size <= 2]
    some = data.draw(
        st.lists(st.sampled_from(data.draw(st.sampled_from([every, small]))), unique_by=device_name, max_size=8)
    )
    stands = geometry.conflict([(one.profile, one.start) for one in some]) is None
    assert fit([devices[device_name(one)] for one in some], counters) == stands
    if any(placements_overlap(one, other) for one, other in combinations(some, 2)):
        assert not stands


@pytest.mark.parametrize("key", CUTTABLE)
def test_a_whole_gpu_goes_with_no_slice_of_it(key):
    slices = published([gpu(0, key), gpu(1, key)])
    devices, counters = devices_of(slices), counters_of(slices)
    assert fit([devices["gpu-0"], devices["gpu-1"]], counters)
    for name, device in devices.items():
        if name.startswith("gpu-0-"):
            assert not fit([devices["gpu-0"], device], counters)
            assert fit([devices["gpu-1"], device], counters)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_object_keeps_the_limits_of_the_api(data):
    keys = data.draw(st.lists(st.sampled_from([*CUTTABLE, "t4"]), max_size=20))
    gpus = [gpu(i, key, mig_enabled=key != "t4" and data.draw(st.booleans())) for i, key in enumerate(keys)]
    node = data.draw(st.from_regex(r"[a-z0-9]{1,20}(\.[a-z0-9]{1,60}){0,3}", fullmatch=True))
    slices = published(gpus, node=node)
    assert len({piece["metadata"]["name"] for piece in slices}) == len(slices)
    assert [p["metadata"]["name"] for p in slices] == sorted(p["metadata"]["name"] for p in slices)
    names, sets = [], counters_of(slices)
    for piece in slices:
        spec = piece["spec"]
        assert NAME.fullmatch(piece["metadata"]["name"])
        assert spec["pool"] == {"name": node, "generation": 3, "resourceSliceCount": len(slices)}
        assert ("devices" in spec) != ("sharedCounters" in spec)
        assert len(spec.get("devices", ())) <= 64
        assert len(spec.get("sharedCounters", ())) <= 8
        for device in spec.get("devices", ()):
            names.append(device["name"])
            assert LABEL.fullmatch(device["name"])
            assert len(device["attributes"]) + len(device.get("capacity", ())) <= 32
            assert {"key": "eelgrid.io/managed", "effect": "NoSchedule"} in device["taints"]
            for use in device.get("consumesCounters", ()):
                assert set(use["counters"]) <= set(sets[use["counterSet"]])
                assert len(use["counters"]) <= 32
    assert len(set(names)) == len(names)
    for counters in sets.values():
        assert 0 < len(counters) <= 32
        assert all(LABEL.fullmatch(name) for name in counters)
    assert published(list(reversed(gpus)), node=node) == slices


def test_long_node_names_stay_apart():
    long = "a" * 200 + "." + "b" * 50
    one, other = (published([gpu(0, "t4")], node=name)[0]["metadata"]["name"] for name in (long + "1", long + "2"))
    assert one != other
    assert max(len(one), len(other)) <= 253


@pytest.mark.parametrize("key", CUTTABLE)
def test_a_name_leads_back_to_its_place(key):
    geometry = CATALOGUE.products[key].mig
    for place in list_placements(gpu(3, key), geometry, is_changeable=True):
        assert parse_placement(device_name(place), geometry) == place
    for name in ("gpu", "gpu-3-9g-0", "gpu-3-1g-99", "gpu-x", "gpu-3-1g", ""):
        assert parse_placement(name, geometry) is None


def test_what_takes_a_reset_is_offered_as_its_mode_stands():
    off, on = (set(devices_of(published([gpu(0, "a100-sxm4-40gb", mig_enabled=on)]))) for on in (False, True))
    assert off == {"gpu-0"}
    assert "gpu-0" not in on
    assert "gpu-0-1g-6" in on
    assert {"gpu-0", "gpu-0-1g-6"} <= set(devices_of(published([gpu(0, "h100-sxm5-80gb")])))


def test_who_may_change_nothing_offers_what_stands():
    on = gpu(0, "h100-sxm5-80gb", mig_enabled=True)
    assert devices_of(published([on, gpu(1, "h100-sxm5-80gb")], is_changeable=False)).keys() == {"gpu-1"}


def test_attributes_say_where_a_slice_lies_and_how_its_gpu_fares():
    part = gpu(2, "h100-sxm5-80gb", cordon="xid 79")
    slices = published([part], conditions={part.uuid: GpuCondition(power_limit_w=399.6, is_throttled=True)})
    device = devices_of(slices)["gpu-2-3g-4"]
    assert device["attributes"] == {
        "type": {"string": "mig"},
        "parentUUID": {"string": part.uuid},
        "index": {"int": 2},
        "product": {"string": part.product},
        "architecture": {"string": "hopper"},
        "powerLimitWatts": {"int": 400},
        "throttled": {"bool": True},
        "profile": {"string": "3g.40gb"},
        "placementStart": {"int": 4},
        "placementSize": {"int": 4},
    }
    assert device["capacity"]["memory"]["value"].endswith("Mi")
    assert {"key": "eelgrid.io/unhealthy", "value": "cordoned", "effect": "NoSchedule"} in device["taints"]
    assert slices[0]["metadata"]["ownerReferences"][0]["uid"] == "u"
