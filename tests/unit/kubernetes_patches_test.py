"""The patch that pins, the annotation that tells, and who waits too long."""

import pytest

from eelgrid_controller.engines.kubernetes.model.pod_group import attempt_of, unit_name, unit_of, workload_id
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN, GATE
from eelgrid_controller.engines.kubernetes.pods.inflight import UnboundPodWatchdog
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import (
    PodPlan,
    format_plan,
    gate_removal_patch,
    parse_plan,
    pinned_node,
    plan_for_pod,
    ungating_patch,
)
from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadSpec
from eelgrid_protos.schema import check_message

PIN = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
ZONE = {"key": "zone", "operator": "In", "values": ["a"]}


def pod(terms=None, gates=(GATE,)):
    spec = {"schedulingGates": [{"name": name} for name in gates]}
    if terms is not None:
        required = {"nodeSelectorTerms": terms}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {"metadata": {"uid": "u", "resourceVersion": "7", "name": "p"}, "spec": spec}


def terms_of(body):
    return body["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]


def test_one_patch_pins_annotates_and_ungates():
    body = ungating_patch(pod(), "n1", "the plan")
    assert body["metadata"] == {"uid": "u", "resourceVersion": "7", "annotations": {ANNOTATION_PLAN: "the plan"}}
    assert body["spec"]["schedulingGates"] is None
    assert terms_of(body) == [{"matchFields": [PIN]}]


def test_the_pin_goes_into_each_term_and_adds_none():
    other = {"key": "metadata.name", "operator": "NotIn", "values": ["n9"]}
    body = ungating_patch(pod([{"matchExpressions": [ZONE]}, {"matchFields": [other]}, {}]), "n1", "")
    assert terms_of(body) == [
        {"matchExpressions": [ZONE], "matchFields": [PIN]},
        {"matchFields": [other, PIN]},
        {},
    ]


def test_gates_of_others_stay():
    assert gate_removal_patch(pod(gates=("a", GATE, "b")))["spec"]["schedulingGates"] == [{"name": "a"}, {"name": "b"}]


def test_a_pin_is_read_back_where_every_term_has_it():
    assert pinned_node(pod()) == ""
    assert pinned_node(pod([{"matchFields": [PIN]}, {"matchExpressions": [ZONE], "matchFields": [PIN]}])) == "n1"
    assert pinned_node(pod([{"matchFields": [PIN]}, {"matchExpressions": [ZONE]}])) == ""


ENDLESS = '{"epoch":1e999,"workload":"pod-1","replica":0,"node":"n1"}'


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"epoch":"x"}', "[" * 9000, "x" * 20_000, ENDLESS])
def test_what_is_no_plan_is_none(text):
    assert parse_plan(text) is None


def test_plans_and_names_come_back_as_they_were():
    plan = PodPlan(3, "pod-1//2", 0, "n1", (4, 5), "1g.10gb", "1")
    assert parse_plan(format_plan(plan)) == plan
    assert (unit_of("pod-1//2"), attempt_of("pod-1//2")) == ("pod-1", 2)
    assert (unit_of("gang-x/y.7"), attempt_of("gang-x/y.7")) == ("gang-x/y.7", 1)
    assert workload_id("pod-1", 1) == "pod-1"
    assert unit_of(workload_id(unit_name("gang-a//7"), 3)) == unit_name("gang-a//7")
    assert len(workload_id(unit_name("gang-" + "x" * 200), 999)) <= 128


@pytest.mark.parametrize("attempt", ["²", "٣", "9" * 5000, "-1", ""])
def test_what_no_attempt_is_numbered_by_is_a_part_of_the_name(attempt):
    assert (unit_of(f"pod-1//{attempt}"), attempt_of(f"pod-1//{attempt}")) == (f"pod-1//{attempt}", 1)


@pytest.mark.parametrize("name", ["a b", "é", "train-", "..", "a\n", "\ud800"])
def test_a_name_that_is_no_id_gets_one(name):
    unit = unit_name(f"gang-x/{name}")
    spec = WorkloadSpec(name="a", request=ResourceRequest(cpu_milli=1))
    check_message(SubmitWorkloadRequest(workload_id=workload_id(unit, 2), spec=spec))
    assert unit == unit_name(f"gang-x/{name}") != unit_name(f"gang-x/{name}!")


def test_one_owner_waits_twice_as_long_in_each_round():
    dog = UnboundPodWatchdog(unbound_s=10.0, most_s=25.0)
    dog.watch_pod("u", 0.0)
    assert not list(dog.overdue_pods(9.0))
    assert list(dog.overdue_pods(10.0)) == [("u", 10.0)]
    assert dog.may_recreate("rs", 10.0, 10.0)
    dog.record_recreation("rs", 10.0, 10.0)
    assert not dog.may_recreate("rs", 19.0, 29.0)
    assert dog.may_recreate("rs", 20.0, 30.0)
    dog.record_recreation("rs", 20.0, 30.0)
    assert not dog.may_recreate("rs", 24.0, 54.0)
    assert dog.may_recreate("rs", 25.0, 55.0), "never longer than the most"
    dog.forget_pod("u")
    assert not list(dog.overdue_pods(99.0))


def test_pods_of_one_owner_that_are_stuck_together_are_made_again_together():
    dog = UnboundPodWatchdog(unbound_s=10.0)
    for uid in range(10):
        dog.watch_pod(f"u{uid}", uid / 10.0)
    due = [uid for uid, waited_s in dog.overdue_pods(11.0) if dog.may_recreate("rs", waited_s, 11.0)]
    assert len(due) == 10
    for _ in due:
        assert dog.may_recreate("rs", 10.0, 11.5)
        dog.record_recreation("rs", 10.0, 11.5)
    assert not dog.may_recreate("rs", 19.0, 31.0), "the next round waits twice as long, and no longer"
    assert dog.may_recreate("rs", 20.0, 32.0)


def test_all_that_were_pinned_at_once_are_made_again_at_once_and_those_after_them_wait_longer():
    dog = UnboundPodWatchdog(unbound_s=10.0, most_s=100.0)
    for number in range(20):
        assert dog.may_recreate("rs", 10.0, 10.0 + number / 10)
        dog.record_recreation("rs", 10.0, 10.0 + number / 10)
    assert not dog.may_recreate("rs", 10.0, 22.0), "these were made anew once already"
    assert dog.may_recreate("rs", 20.0, 32.0)


def test_a_plan_is_valid_for_the_uid_that_it_was_written_for():
    def text(workload, uid):
        return format_plan(PodPlan(3, workload, 0, "n1", (4,), "", uid))

    assert plan_for_pod("u1", text("gang-x", "u1")) is not None
    assert plan_for_pod("u2", text("gang-x", "u1")) is None, "somebody's YAML was applied again"
    # Plans of before name no uid: a pod alone is named by its workload, of a gang the core takes one for each replica.
    assert plan_for_pod("u1", text("pod-u1//3", "")) is not None
    assert plan_for_pod("u2", text("pod-u1//3", "")) is None
    assert plan_for_pod("u2", text("claim-u1", "")) is None
    assert plan_for_pod("u2", text("gang-x", "")) is not None
    assert plan_for_pod("u1", "no plan") is None
