"""Places given at admission: reservations, and what becomes of them where the pod comes, does not, or is another."""

import random
from dataclasses import replace

import pytest
from tests.gate_rig import Api, Side, check, settle

from eelgrid_controller.engines.kubernetes.model.objects import parse_pod
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN, RESOURCE_GPU, SCHEDULER
from eelgrid_controller.engines.kubernetes.pods import admission_pins as pins
from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.admission_pins import AdmissionPins
from eelgrid_controller.engines.kubernetes.pods.intent import view_pod
from eelgrid_controller.engines.kubernetes.pods.placement_unit import GateSettings
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import PodPlan, format_plan
from eelgrid_protos.messages import WorkloadPhase

SETTINGS = GateSettings(unbound_s=10.0, retry_s=5.0, busy_s=1.0, conflict_s=1.0, binds=True)


class Cluster:
    """Two nodes of 8 GPUs, a leader, and the API server's part of an admission."""

    def __init__(self):
        self.api = Api()
        for name in ("a", "b"):
            self.api.node(name)
        self.at_s = 0.0
        self.leader = Side(self.api, SETTINGS)
        self.leader.lead(1)
        self.asked = 0
        self.settle()

    def settle(self, *sides, rounds=2):
        self.at_s = settle(self.api, sides or [self.leader], self.at_s, rounds=rounds)

    def ask(self, *, gpus=1, side=None, cores=True):
        """A review comes; the uid of ours. Without `cores` its command has not been carried out yet."""
        side = side or self.leader
        if not side.gate.may_pin_admitted("x", self.at_s):
            return None
        self.asked += 1
        uid = f"admitted-{self.asked}"
        sight, _ = view_pod(parse_pod(_pod(uid, f"p{self.asked}", gpus)), {"spec": {}}, {})
        side.events.append(told.PodAdmitted(sight._replace(spec=replace(sight.spec, never_preempts=True))))
        side.round(self.at_s)
        if cores:
            side.round(self.at_s)
        return uid

    def answer(self, uid, side=None):
        return (side or self.leader).answers.pop(uid, None)

    def pin(self, **options):
        """A review that is answered with a node."""
        found = self.answer(self.ask(**options))
        assert isinstance(found, told.PinAdmitted), found
        return found

    def create(self, pin, *, gpus=1, uid="", copied=""):
        """The API server creates the pod as it was answered."""
        name = copied or pin.uid
        found = _pod(uid or f"real-{name}", name, gpus)
        found["metadata"]["annotations"] = {ANNOTATION_PLAN: pin.plan}
        if pin.node_name:
            found["spec"]["nodeName"] = pin.node_name
        self.api.put("pod", found)
        return found["metadata"]["uid"]

    @property
    def held(self):
        """Workloads that the core has a place for, and their GPUs in all."""
        found = [one for one in self.leader.core.state.workloads.values() if one.phase is WorkloadPhase.PLACED]
        return {one.workload_id: one.spec.request.gpu_count for one in found}

    def pass_time(self, seconds, *sides):
        for _ in range(int(seconds) + 1):
            self.settle(*sides, rounds=1)


def _pod(uid, name, gpus):
    asked = {"cpu": "1", "memory": "1Gi", RESOURCE_GPU: str(gpus)}
    return {
        "metadata": {"name": name, "namespace": "x", "uid": uid},
        "spec": {"schedulerName": SCHEDULER, "containers": [{"name": "main", "resources": {"requests": asked}}]},
        "status": {"phase": "Pending"},
    }


@pytest.fixture
def cluster():
    return Cluster()


def test_the_pod_takes_the_place_that_was_answered_and_nothing_more_is_written(cluster):
    found = cluster.pin()
    uid = cluster.create(found)
    cluster.settle(rounds=4)
    assert cluster.held == {f"pod-{found.uid}": 1}
    gate = cluster.leader.gate
    assert cluster.api.patches == []
    assert gate.units[f"pod-{found.uid}"].slots == {0: uid}
    assert gate.others.used_gpus(found.node_name) == 0, "counted by the core, and by nobody beside it"
    assert (len(gate.admissions), gate.admissions.counts.confirmed) == (0, 1)
    check(cluster.api)


def test_a_pod_that_ended_gives_its_place_back(cluster):
    found = cluster.pin()
    cluster.create(found)
    cluster.settle()
    cluster.api.remove(found.uid)
    cluster.settle()
    assert cluster.held == {}


def test_without_room_the_answer_is_none_and_the_core_holds_nothing(cluster):
    cluster.pin(gpus=8)
    cluster.pin(gpus=8)
    uid = cluster.ask()
    assert isinstance(cluster.answer(uid), told.DeclineAdmitted)
    cluster.leader.round(cluster.at_s)
    cluster.leader.round(cluster.at_s)
    assert sorted(cluster.held.values()) == [8, 8]
    assert all(one.phase is not WorkloadPhase.PENDING for one in cluster.leader.core.state.workloads.values())
    assert cluster.ask() is None, "the next is not tried at once"


def test_a_creation_that_failed_gives_its_place_back_in_bounded_time(cluster):
    cluster.pin(gpus=8)
    cluster.pin(gpus=8)
    cluster.pass_time(pins.RESERVED_S - 4.0)
    assert sorted(cluster.held.values()) == [8, 8]
    cluster.pass_time(8.0)
    assert cluster.held == {}
    assert cluster.leader.gate.admissions.counts.expired == 2
    cluster.pin(gpus=8)
    assert cluster.ask() is None, "after failures one at a time, until a pod comes"


def test_a_pod_that_comes_after_its_place_was_given_back_counts_where_it_is(cluster):
    found = cluster.pin()
    cluster.pass_time(pins.RESERVED_S + 2.0)
    assert cluster.held == {}
    cluster.create(found)
    cluster.settle(rounds=4)
    assert list(cluster.held.values()) == [1]
    assert cluster.api.free(found.node_name) == 7


def test_a_pod_that_requests_more_than_was_planned_is_counted_with_what_it_requests(cluster):
    found = cluster.pin()
    uid = cluster.create(found, gpus=3)
    cluster.settle(rounds=6)
    assert list(cluster.held.values()) == [3]
    assert cluster.leader.gate.admissions.counts.changed == 1
    assert [one.text for one in cluster.leader.tells if one.uid == uid] == [
        "changed after it was placed at its admission: it requests nvidia.com/gpu 3 instead of 1; its plan follows"
    ]


def test_a_pod_that_was_sent_to_another_node_counts_there(cluster):
    found = cluster.pin()
    other = "b" if found.node_name == "a" else "a"
    cluster.create(found._replace(node_name=other))
    cluster.settle(rounds=4)
    assert cluster.held == {}
    assert cluster.leader.gate.others.used_gpus(other) == 1


def test_a_copy_of_the_annotations_is_none_of_ours(cluster):
    found = cluster.pin()
    first = cluster.create(found)
    cluster.settle()
    cluster.create(found, copied="again")
    cluster.settle(rounds=4)
    assert cluster.held == {f"pod-{found.uid}": 1}
    assert cluster.leader.gate.units[f"pod-{found.uid}"].slots == {0: first}
    assert cluster.leader.gate.others.used_gpus(found.node_name) == 1


def test_nobody_who_does_not_lead_answers(cluster):
    cluster.leader.lead(None)
    cluster.settle(rounds=1)
    assert cluster.ask() is None


def test_a_review_that_waits_as_the_term_ends_is_answered_without(cluster):
    uid = cluster.ask(cores=False)
    cluster.leader.lead(None)
    cluster.leader.round(cluster.at_s)
    assert isinstance(cluster.answer(uid), told.DeclineAdmitted)


def _abandon(cluster, **options):
    """A review whose time ran out before the core has answered; its pod's plan names no node."""
    uid = cluster.ask(cores=False, **options)
    cluster.leader.events.insert(0, told.AdmissionAbandoned(uid))
    cluster.leader.round(cluster.at_s)
    cluster.leader.round(cluster.at_s)
    assert cluster.answer(uid) is None
    assert cluster.leader.gate.admissions.counts.late == 1
    return told.PinAdmitted(uid, "", format_plan(PodPlan(1, f"pod-{uid}", 0, "", uid=uid)), 1)


def test_what_was_decided_too_late_for_the_answer_is_kept_for_the_pod(cluster):
    found = _abandon(cluster)
    assert cluster.held == {f"pod-{found.uid}": 1}
    uid = cluster.create(found)
    decided = len(cluster.leader.core.state.workloads)
    cluster.settle(rounds=3)
    assert cluster.held == {f"pod-{found.uid}": 1}
    assert len(cluster.leader.core.state.workloads) == decided
    assert [one[0] for one in cluster.api.patches] == [uid], "bound, by one write"
    gate = cluster.leader.gate
    assert (len(gate.admissions), gate.admissions.counts.confirmed) == (0, 1)
    assert all(gate.others.used_gpus(node) == 0 for node in cluster.api.nodes)
    cluster.pass_time(pins.RESERVED_S + 2.0)
    assert cluster.held == {f"pod-{found.uid}": 1}
    check(cluster.api)


def test_a_pod_that_is_seen_before_the_core_has_decided_takes_the_decision(cluster):
    uid = cluster.ask(cores=False)
    core = cluster.leader.events
    cluster.leader.events = [told.AdmissionAbandoned(uid)]
    pod = cluster.create(told.PinAdmitted(uid, "", format_plan(PodPlan(1, f"pod-{uid}", 0, "", uid=uid)), 1))
    cluster.leader.hear()
    cluster.leader.round(cluster.at_s)
    cluster.leader.events += core
    cluster.settle(rounds=3)
    assert cluster.held == {f"pod-{uid}": 1}
    assert [one[0] for one in cluster.api.patches] == [pod]


def test_a_review_whose_time_ran_out_without_a_pod_leaves_nothing_behind(cluster):
    _abandon(cluster)
    cluster.pass_time(pins.RESERVED_S + 2.0)
    assert cluster.held == {}


def test_a_late_pod_without_room_waits_as_any_other(cluster):
    full = [cluster.pin(gpus=8) for _ in range(2)]
    for one in full:
        cluster.create(one, gpus=8)
    cluster.settle()
    found = _abandon(cluster)
    assert len(cluster.leader.gate.admissions) == 0
    uid = cluster.create(found)
    cluster.settle(rounds=3)
    assert cluster.leader.reports[uid].reason == "NoRoom"
    cluster.api.remove(full[0].uid)
    cluster.settle(rounds=20)
    assert sorted(cluster.held.values()) == [1, 8]
    assert [one[0] for one in cluster.api.patches] == [uid]


def test_a_late_pod_that_requests_more_than_was_planned_is_placed_anew(cluster):
    uid = cluster.create(_abandon(cluster), gpus=3)
    cluster.settle(rounds=6)
    assert list(cluster.held.values()) == [3]
    assert [one[0] for one in cluster.api.patches] == [uid]


def test_a_copy_of_a_late_pod_has_a_place_of_its_own(cluster):
    found = _abandon(cluster)
    cluster.create(found)
    cluster.create(found, copied="again")
    cluster.settle(rounds=4)
    assert cluster.held == {f"pod-{found.uid}": 1, "pod-real-again": 1}
    check(cluster.api)


@pytest.mark.parametrize("is_created", [True, False])
def test_the_next_leader_keeps_a_place_of_the_same_journal_until_its_pod_is_seen(cluster, is_created):
    found = cluster.pin(gpus=8)
    cluster.leader.lead(None)
    cluster.settle(rounds=1)
    state = cluster.leader.core.state
    cluster.api.watchers.remove(cluster.leader)
    cluster.leader = Side(cluster.api, SETTINGS, state=state)
    cluster.leader.take_over(2)
    cluster.settle(rounds=3)
    assert cluster.held == {f"pod-{found.uid}": 8}
    if is_created:
        cluster.create(found, gpus=8)
    cluster.pass_time(pins.RESERVED_S + 2.0)
    assert cluster.held == ({f"pod-{found.uid}": 8} if is_created else {})
    assert cluster.api.patches == []
    assert cluster.leader.gate.others.used_gpus(found.node_name) == 0


def test_a_leader_with_another_journal_takes_the_pod_over_where_it_is(cluster):
    found = cluster.pin()
    cluster.create(found)
    cluster.settle()
    cluster.leader = Side(cluster.api, SETTINGS)
    cluster.leader.take_over(2)
    cluster.settle(rounds=6)
    assert list(cluster.held.values()) == [1]
    assert cluster.leader.gate.others.used_gpus(found.node_name) == 0


def test_a_fence_writes_to_no_pod_that_is_not_there(cluster):
    cluster.pin()
    cluster.leader.lead(2)
    for _ in range(3):
        cluster.leader.round(cluster.at_s)
    assert cluster.leader.under_way == []


def test_a_closed_node_gets_no_pod_and_one_that_was_answered_is_waited_for(cluster):
    cluster.api.node("b", cordoned=True)
    cluster.settle()
    found = cluster.pin()
    assert found.node_name == "a"
    cluster.api.node("a", cordoned=True)
    cluster.settle()
    assert isinstance(cluster.answer(cluster.ask()), told.DeclineAdmitted)
    cluster.create(found)
    cluster.settle(rounds=4)
    assert cluster.held == {f"pod-{found.uid}": 1}


def test_nothing_is_pinned_while_a_pod_moves():
    api = Api()
    api.node("a")
    side = Side(api, replace(SETTINGS, moves=True))
    side.lead(1)
    at_s = settle(api, [side], 0.0, rounds=3)
    assert side.gate.may_pin_admitted("x", at_s)
    name = api.pod(own=True)
    at_s = settle(api, [side], at_s, rounds=3)
    unit = side.gate.units[f"pod-{api.pods[name]['metadata']['uid']}"]
    unit.moving[0] = "somebody"
    assert not side.gate.may_pin_admitted("x", at_s)


@pytest.mark.parametrize("seed", range(12))
def test_no_node_is_overbooked_whatever_fails(seed):
    """A third of the creations fails, some pods come late or changed, others end, and leaders change."""
    rng, cluster = random.Random(seed), Cluster()
    answered, created = [], []
    for _ in range(250):
        what = rng.random()
        if what < 0.45:
            gpus, is_late = rng.choice((1, 1, 2, 4)), rng.random() < 0.2
            uid = cluster.ask(gpus=gpus, cores=not is_late)
            found = cluster.answer(uid)
            if is_late and uid is not None:
                cluster.leader.events.insert(rng.randrange(2), told.AdmissionAbandoned(uid))
                found = told.PinAdmitted(uid, "", format_plan(PodPlan(1, f"pod-{uid}", 0, "", uid=uid)), 1)
            if isinstance(found, told.PinAdmitted) and rng.random() < 0.67:
                answered.append((found, gpus))
        elif what < 0.75 and answered:
            found, gpus = answered.pop(rng.randrange(len(answered)))
            cluster.create(found, gpus=gpus)
            created.append(found.uid)
        elif what < 0.85 and created:
            cluster.api.remove(created.pop(rng.randrange(len(created))))
        elif what < 0.9:
            cluster.api.pod(own=True, gpus=rng.choice((1, 2)))
        else:
            cluster.settle(rounds=1)
        for node in cluster.api.nodes:
            assert cluster.api.free(node) >= 0
    for found, gpus in answered:
        cluster.create(found, gpus=gpus)
    cluster.pass_time(pins.RESERVED_S + 5.0)
    check(cluster.api)
    there = {pod["metadata"]["uid"] for pod in cluster.api.pods.values() if pod["spec"].get("nodeName")}
    gate = cluster.leader.gate
    assert {uid for unit in gate.units.values() for uid in unit.slots.values() if unit.places} >= there
    assert sum(cluster.held.values()) == 16 - sum(map(cluster.api.free, cluster.api.nodes))
    assert len(gate.admissions) == 0


# The window


def test_a_namespace_whose_pods_come_may_have_more_on_their_way():
    found = AdmissionPins()
    for number in range(pins.FIRST_WINDOW):
        assert found.may_begin("x", 0.0)
        found.begin(f"u{number}", "x")
        found.give(f"u{number}", 0.0)
    assert not found.may_begin("x", 0.0)
    assert found.may_begin("y", 0.0)
    found.confirm("u0")
    assert found.may_begin("x", 0.0)
    for number in range(2):
        found.begin(f"v{number}", "x")
        found.give(f"v{number}", 0.0)
    assert not found.may_begin("x", 0.0)
    assert len(list(found.expire_overdue(pins.RESERVED_S))) == pins.FIRST_WINDOW + 1
    found.begin("w", "x")
    assert not found.may_begin("x", pins.RESERVED_S)
    found.give("w", pins.RESERVED_S)
    found.confirm("w")
    assert found.may_begin("x", pins.RESERVED_S)


def test_all_namespaces_together_are_bounded():
    found = AdmissionPins()
    for number in range(pins.MAX_RESERVATIONS):
        assert found.may_begin(f"n{number}", 0.0)
        found.begin(f"u{number}", f"n{number}")
        found.give(f"u{number}", 0.0)
    assert not found.may_begin("another", 0.0)


def test_fewer_reviews_wait_at_once_where_their_time_runs_out():
    found = AdmissionPins()

    def fill(at_s):
        number = 0
        while found.may_begin(f"n{number}", at_s):
            found.begin(f"u{number}", f"n{number}")
            number += 1
        return number

    first = fill(0.0)
    for uid in found.pending:
        found.abandon(uid, 0.0)
        found.drop(uid)
    assert fill(0.0) == first / 2
    for _ in range(3):
        for uid in found.pending:
            found.give(uid, 0.0)
            found.confirm(uid)
        fill(0.0)
    assert len(found.pending) > first / 2
