"""Expressions over devices, claims as they are read, and the machine of mode dra, by example."""

import re
from fractions import Fraction

import pytest
from tests.builders.kubernetes import DRIVER, build_claim_spec, build_device_class, build_node_model
from tests.claims_sim import Cluster, Side

from eelgrid_controller.engines.kubernetes.claims.cel import CelDevice, ExpressionUnreadable, compile_selector
from eelgrid_controller.engines.kubernetes.claims.events import ClaimGpusReported
from eelgrid_controller.engines.kubernetes.claims.requests import ClaimRejection, ParsedClaim, parse_claim
from eelgrid_controller.engines.kubernetes.model.objects import parse_pod
from eelgrid_controller.engines.kubernetes.pods.external_usage import ExternalUsageTracker
from eelgrid_controller.engines.kubernetes.pods.intent import view_pod

SLICE = CelDevice(
    DRIVER,
    {
        (DRIVER, "type"): "mig",
        (DRIVER, "profile"): "1g.10gb",
        (DRIVER, "index"): 3,
        (DRIVER, "throttled"): False,
        ("example.com", "rack"): "r1",
    },
    {(DRIVER, "memory"): Fraction(10 * 2**30)},
)
A = f"device.attributes['{DRIVER}']"


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (f"device.driver == '{DRIVER}'", True),
        ('device.driver == "gpu.nvidia.com"', False),
        (f"{A}.profile == '1g.10gb' && {A}.index >= 3", True),
        (f"{A}['profile'] in ['2g.20gb', '1g.10gb']", True),
        (f"{A}.index < 3 || !{A}.throttled", True),
        (f"{A}.profile.startsWith('1g') && !({A}.index == 4)", True),
        (f"device.capacity['{DRIVER}'].memory.compareTo(quantity('10Gi')) >= 0", True),
        (f"device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('10Gi'))", False),
        ("device.attributes['example.com'].rack == 'r1'", True),
        (f"has({A}.uuid)", False),
        (f"'profile' in {A}", True),
        (f"'uuid' in {A} || {A}.index == -3", False),
        # What is missing is an error: absorbed by || true and && false, else the device is not taken.
        (f"{A}.uuid == 'x' || {A}.index == 3", True),
        (f"!({A}.uuid == 'x' && {A}.index == 4)", True),
        (f"!({A}.uuid == 'x')", False),
        (f"{A}.index == '3'", False),
        ("true", True),
    ],
)
def test_expressions_choose_as_cel_does(text, is_taken):
    assert compile_selector(text).matches(SLICE) is is_taken


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("&&".join(["true"] * 1500), True),
        ("||".join(["false"] * 1200 + ["true"]), True),
        ("!" * 5000 + "true", True),
        ("!" * 5001 + "true", False),
        ("!!1", False),
        (f"{A}.nothing && true && false || true", True),
        (f"{A}.nothing || false || false", False),
        ("['a'] < [1]", False),
    ],
)
def test_an_expression_may_be_as_long_as_the_api_takes_it(text, is_taken):
    assert compile_selector(text).matches(SLICE) is is_taken


@pytest.mark.parametrize(
    "text", ["[" * 2000 + "1" + "]" * 2000, "'x'" + ".lowerAscii()" * 700 + " == 'x'", "9" * 5000 + " == 1"]
)
def test_what_is_too_deep_or_no_number_of_the_api_is_unreadable(text):
    with pytest.raises(ExpressionUnreadable):
        compile_selector(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "device",
        "device.attributes['x'].y.matches('a')",
        "device.driver = 'x'",
        "a.b",
        "(device.driver == 'x'",
        "device.name == 'x'",
        "[1",
        "quantity('x')",
        "1 +",
        "'a\\n'",
        "(" * 50 + "true" + ")" * 50,
        "x" * 20_000,
    ],
)
def test_expressions_that_are_not_read_are_refused(text):
    with pytest.raises(ExpressionUnreadable):
        compile_selector(text)


def test_an_expression_names_its_driver_where_it_must_hold():
    assert compile_selector(f"{A}.type == 'mig' && device.driver == \"d\"").driver == "d"
    assert compile_selector("device.driver == 'd' || device.driver == 'e'").driver == ""
    assert compile_selector("(device.driver == 'd' || true) && true").driver == ""


def claim(spec):
    return {"metadata": {"namespace": "x", "name": "c", "uid": "u"}, "spec": spec}


CLASSES = {"eelgrid": build_device_class(), "nv": build_device_class("nv", "gpu.nvidia.com"), "any": {"spec": {}}}


def of(*requests, **more):
    return claim({"devices": {"requests": list(requests), **more}})


def exactly(name="r", class_name="eelgrid", **more):
    return {"name": name, "exactly": {"deviceClassName": class_name, **more}}


def cel(text):
    return {"selectors": [{"cel": {"expression": text}}]}


def test_a_claim_with_alternatives_has_a_variant_for_each():
    first = {
        "name": "g",
        "firstAvailable": [
            {"name": "big", "deviceClassName": "eelgrid", "count": 2},
            {"name": "small", "deviceClassName": "eelgrid", **cel(f"{A}.profile == '1g.10gb'")},
        ],
    }
    read = parse_claim(of(first, exactly("n"), constraints=[{"matchAttribute": f"{DRIVER}/parentUUID"}]), CLASSES)
    assert isinstance(read, ParsedClaim)
    assert read.is_ours
    assert [[(one.request, one.many) for one in variant] for variant in read.asked.variants] == [
        [("g/big", 2), ("n", 1)],
        [("g/small", 1), ("n", 1)],
    ]
    assert read.asked.same[0].attribute == (DRIVER, "parentUUID")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            of(exactly(adminAccess=True)),
            r"requests\[0\].exactly.adminAccess: gives devices that others hold; leave it out",
        ),
        (of(exactly(allocationMode="All")), r"allocationMode: All is not supported.*; ask for ExactCount"),
        (of(exactly(capacity={"requests": {"memory": "5Gi"}})), r"capacity: .*choose a MIG profile"),
        (of(exactly(count=40)), r"count: is more than 32; make several"),
        (of(exactly(class_name="none")), r"deviceClassName: there is no DeviceClass none; make it"),
        (of(exactly(**cel("device.driver.matches('x')"))), r"selectors\[0\].cel.expression: .*not read here"),
        (of(exactly(), exactly("n", "nv")), r"gpu.nvidia.com are in one claim; make a claim for each driver"),
        (
            of(exactly(), constraints=[{"distinctAttribute": "a/b"}]),
            r"constraints\[0\]: is not a matchAttribute constraint; use sel",
        ),
        (of(), "requests no device"),
        (
            of(
                {"name": "g", "firstAvailable": [{"name": str(n), "deviceClassName": "eelgrid"} for n in range(8)]},
                {"name": "h", "firstAvailable": [{"name": str(n), "deviceClassName": "eelgrid"} for n in range(8)]},
                {"name": "i", "firstAvailable": [{"name": str(n), "deviceClassName": "eelgrid"} for n in range(2)]},
            ),
            "128 combinations; list fewer",
        ),
        (of(exactly(class_name="any", **cel(f"device.driver == '{DRIVER}' && device.x"))), "device.x is not read"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_field_and_the_remedy(found, said):
    read = parse_claim(found, CLASSES)
    assert isinstance(read, ClaimRejection)
    assert re.search(said, str(read)), str(read)


def test_claims_of_other_drivers_are_read_as_far_as_they_can_be():
    read = parse_claim(of(exactly(class_name="nv", count=2, **cel("device.driver.matches('x')"))), CLASSES)
    assert isinstance(read, ParsedClaim)
    assert (read.driver, read.is_ours, read.asked.variants[0][0].many) == ("gpu.nvidia.com", False, 2)
    for found in (exactly(class_name="nv", adminAccess=True), exactly(class_name="any")):
        read = parse_claim(of(found), CLASSES)
        assert isinstance(read, ParsedClaim)
        assert read.driver == ""


@pytest.fixture
def api():
    return Cluster(nodes=("a", "b"))


# Beside mode gate


def test_the_gate_leaves_pods_with_claims_alone_and_counts_them_where_their_plan_says(api):
    api.pod("p", "1g.10gb")
    gated = api.pods["p"]
    sight, _ = view_pod(parse_pod(gated), gated, {}, leaves_claims=True)
    assert (sight.unit, sight.pinned) == ("", "")
    sight, _ = view_pod(parse_pod(gated), gated, {})
    assert "requests devices by claim" in sight.refused
    Side(api, epoch=1).play()
    sight, _ = view_pod(parse_pod(api.pods["p"]), api.pods["p"], {})
    assert (sight.unit, sight.pinned) == ("", "a")


def test_gpus_that_are_given_by_claims_are_anothers_to_the_core(api):
    side = Side(api, epoch=1)
    sliced = [one for one in side.machine.on_events(side.events, 0.0, "") if isinstance(one, ClaimGpusReported)]
    assert sliced == [ClaimGpusReported("a", 2), ClaimGpusReported("b", 2)]
    others = ExternalUsageTracker()
    others.update_node(build_node_model("a", gpus=2), has_agent=True)
    others.on_node_acknowledged("a")
    (told,) = others.flush_reports()
    assert told.others.gpu_count == 0
    others.set_claim_gpus("a", 2)
    (told,) = others.flush_reports()
    assert told.others.gpu_count == 2


# The machine


def test_a_pod_waits_for_its_claim_and_then_goes_where_its_devices_are(api):
    side = Side(api, epoch=1)
    api.pod("p", "1g.10gb", is_made=False)
    side.play()
    assert api.gated("p")
    assert not side.tells
    api.make_claims()
    side.play()
    api.schedule()
    assert api.where("p") == "a"
    (found,) = api.claims.values()
    assert found["status"]["reservedFor"] == [{"resource": "pods", "name": "p", "uid": "u-p"}]
    assert found["status"]["allocation"]["devices"]["results"][0]["device"] == "gpu-0-1g-6"


def test_a_gang_gets_all_of_its_devices_or_none(api):
    side = Side(api, epoch=1)
    for number in range(5):
        api.pod(f"g{number}", "", group="g", size=5)
    side.play(10)
    assert all(api.gated(f"g{number}") for number in range(5))
    assert not any(found["status"] for found in api.claims.values())
    api.node("c")
    side.play(10)
    api.schedule()
    assert all(api.where(f"g{number}") for number in range(5))


def test_an_allocation_is_taken_back_while_nobody_runs_and_given_elsewhere(api):
    side = Side(api, epoch=1)
    api.pod("p", "3g.40gb")
    side.play()
    assert not api.gated("p")
    api.node("a", cordoned=True)
    side.play(1)
    assert api.claim_of("p")["status"].get("allocation") is None
    side.play(1)
    # It rests: a binding that is under way is to fail before it is given again.
    assert api.claim_of("p")["status"].get("allocation") is None
    side.play(5)
    api.schedule()
    assert api.where("p") == "b"


def test_where_kube_scheduler_cannot_put_it_another_node_is_tried(api):
    side = Side(api, epoch=1)
    api.pod("p", "1g.10gb")
    side.play()
    api.unschedulable("p")
    side.play(16)
    api.schedule()
    assert api.where("p") == "b"


def test_a_device_that_vanishes_is_replaced_and_one_in_use_is_left(api):
    side = Side(api, epoch=1)
    api.pod("p", "1g.10gb")
    api.pod("q", "1g.10gb")
    side.play()
    api.schedule(only=("p",))
    api.node("a", gpus=0)
    side.play(10)
    api.schedule()
    assert (api.where("p"), api.where("q")) == ("a", "b")


def test_claims_that_pods_share_bring_them_to_one_node(api):
    side = Side(api, epoch=1)
    api.shared("s", "4g.40gb")
    api.pod("p", "3g.40gb", claims=("s",))
    api.pod("q", claims=("s",))
    api.pod("r", "", claims=())
    side.play()
    api.schedule()
    assert api.where("p") == api.where("q") == "a"
    assert len({one["status"]["allocation"]["devices"]["results"][0]["pool"] for one in api.claims.values()}) == 1


def test_what_no_pod_needs_any_more_is_freed_and_what_the_leader_before_gave_is_kept(api):
    first = Side(api, epoch=1)
    api.shared("s", "7g.80gb")
    api.pod("p", claims=("s",))
    api.pod("q", "7g.80gb")
    first.play()
    api.remove("p")
    first.lead(None)
    second = Side(api, epoch=2)
    held = api.claim_of("q")["status"]["allocation"]
    second.play(10)
    assert api.claims["s"]["status"].get("allocation") is None
    assert api.claim_of("q")["status"]["allocation"] == held


def test_two_claims_on_one_device_are_parted_again(api):
    side = Side(api, epoch=1)
    api.pod("p", "7g.80gb")
    side.play()
    api.pod("q", "7g.80gb")
    api.steal("q", api.claim_of("p")["status"]["allocation"])
    side.play(10)
    api.schedule()
    assert api.overdrawn() == []
    assert api.where("p")
    assert api.where("q")
    assert side.machine.conflicts == 1


def test_a_pod_that_does_not_fit_its_cpu_goes_where_it_does_and_selectors_hold(api):
    side = Side(api, epoch=1)
    api.pod("big", "1g.10gb", cpu="60")
    api.pod("more", "1g.10gb", cpu="60")
    api.pod("third", "1g.10gb", cpu="60")
    api.pod("there", "1g.10gb", selector={"kubernetes.io/hostname": "b"})
    side.play()
    api.schedule()
    assert {api.where("big"), api.where("more")} == {"a", "b"}
    assert api.where("there") == "b"
    assert api.gated("third")
    assert any("waits: 1 of" in one.text for one in side.tells)


def test_claims_of_other_drivers_pin_the_pod_to_a_node_where_they_are_free(api):
    side = Side(api, epoch=1)
    api.foreign("a", 1)
    api.foreign("b", 2)
    for number in range(3):
        api.pod(f"n{number}", spec=build_claim_spec(None, class_name="nv", selectors=[]))
    side.play()
    assert sorted(api.pinned(f"n{number}") for number in range(3)) == ["a", "b", "b"]
    assert not any(found["status"] for found in api.claims.values())


def test_a_refused_claim_is_reported_and_the_pod_goes_free_only_if_it_says_so(api):
    side = Side(api, epoch=1)
    api.pod("p", spec=build_claim_spec("1g.10gb", adminAccess=True))
    api.pod("q", spec=build_claim_spec("1g.10gb", adminAccess=True), annotations={"eelgrid.io/on-error": "schedule"})
    side.play()
    assert api.gated("p")
    assert not api.gated("q")
    assert any("adminAccess: gives devices that others hold; leave it out" in one.text for one in side.tells)


def test_nothing_is_written_before_all_claims_were_read_in_a_term(api):
    side = Side(api, epoch=None)
    api.pod("p", "1g.10gb")
    side.play(5)
    side.lead(3, is_listed=False)
    side.play(5)
    assert api.gated("p")
    side.listed()
    side.play()
    assert not api.gated("p")


def test_a_pod_bound_away_from_its_claim_is_made_again(api):
    side = Side(api, epoch=1)
    api.pod("p", "1g.10gb", owner="o")
    side.play()
    api.bind("p", "b")
    side.play()
    assert side.recreated == ["u-p"]


def test_a_deleted_claim_of_a_pod_that_runs_frees_nothing(api):
    side = Side(api, epoch=1)
    api.pod("p", "7g.80gb")
    api.pod("q", "7g.80gb")
    side.play()
    api.schedule()
    api.drop_claim("p")
    for number in range(3):
        api.pod(f"more{number}", "7g.80gb")
    side.play(10)
    assert sum(not api.gated(f"more{number}") for number in range(3)) == 2
    api.remove("p")
    side.play(5)
    assert all(not api.gated(f"more{number}") for number in range(3))
