"""The core asks an engine which nodes will do: at the moment of each decision, replica by replica."""

import pytest
from tests.builders.cluster import build_node, build_request

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Eligibility
from eelgrid_controller.state.spending import SpendingState
from eelgrid_protos import catalogue
from eelgrid_protos.messages import WorkloadPhase


class OneEach:
    """Every replica of every workload it judges has a node of its own, among those that are open."""

    follows_specs = False

    def __init__(self, *judged, domains=None):
        self.judged, self.open, self.asked = set(judged), {"a", "b", "c"}, 0
        self.domains = domains or {}

    def has_rules_for(self, workload_id):
        return workload_id in self.judged

    def list_eligible_nodes(self, workload_id, placed, workloads):
        self.asked += 1
        taken = {place.node_name for one in self.judged & workloads.keys() for place in workloads[one].placements}
        free = self.open - taken - set(placed.values())
        if placed and self.domains:
            free = {name for name in free if self.domains[name] == self.domains[placed[0]]}
        return frozenset(free)

    def list_equivalent_nodes(self, workload_id, node_name):
        return frozenset(name for name, one in self.domains.items() if one == self.domains[node_name])


def core(rules, *, gpus=8):
    made, eligibility = Core(ClusterState(), catalogue.load_catalogue()), Eligibility()
    eligibility.rules = rules
    made.set_eligibility(eligibility)
    for at, name in enumerate("abc", start=1):
        made.register_node(build_node(name, gpus=gpus), now_ns=at)
    return made


def nodes(workload):
    return [place.node_name for place in workload.placements]


def test_workloads_of_one_batch_see_where_the_others_went():
    made = core(OneEach("x", "y", "z"))
    found = [nodes(made.submit(build_request(name), now_ns=9).result) for name in "xyz"]
    assert sorted(name for (name,) in found) == ["a", "b", "c"]


def test_a_gang_is_placed_replica_by_replica_or_not_at_all():
    made = core(OneEach("gang", "more"))
    whole = made.submit(build_request("gang", replicas=3), now_ns=9).result
    assert sorted(nodes(whole)) == ["a", "b", "c"]
    assert [place.replica for place in whole.placements] == [0, 1, 2]
    more = made.submit(build_request("more", replicas=1), now_ns=10).result
    assert more.phase is WorkloadPhase.PENDING
    assert "traits" in more.reason


def test_a_gang_begins_elsewhere_where_its_first_place_leaves_no_room_for_the_rest():
    # Whoever begins on a, alone in its domain, cannot go on.
    rules = OneEach("gang", domains={"a": 1, "b": 2, "c": 2})
    for first in ("a", "b", "c"):
        made = core(rules)
        rules.open = {"a", "b", "c"}
        for other in {"a", "b", "c"} - {first}:
            made.submit(build_request(f"filler-{other}", gpus=1), now_ns=5)
        found = made.submit(build_request("gang", replicas=2), now_ns=9).result
        assert sorted(nodes(found)) == ["b", "c"]


def test_what_waits_is_tried_again_when_the_engine_says_so():
    rules = OneEach("x")
    made = core(rules)
    rules.open = set()
    assert made.submit(build_request("x"), now_ns=9).result.phase is WorkloadPhase.PENDING
    rules.open = {"b"}
    made.retry_waiting(now_ns=10)
    assert nodes(made.state.workloads["x"]) == ["b"]


def test_what_is_not_judged_is_asked_of_nobody():
    rules = OneEach("x")
    made = core(rules)
    made.submit(build_request("plain"), now_ns=9)
    assert rules.asked == 0


def test_work_that_grows_is_asked_about_for_its_new_replicas_alone():
    rules = OneEach("svc")
    made = core(rules)
    (first,) = nodes(made.submit(build_request("svc"), now_ns=9).result)
    grown = made.scale("svc", 3, now_ns=10).result
    assert sorted(nodes(grown)) == ["a", "b", "c"]
    assert nodes(grown)[0] == first


class OfSpecs(OneEach):
    """Rules that say the same of all workloads with equal specs."""

    follows_specs = True


@pytest.mark.parametrize(("kind", "looked_at"), [(OneEach, 40), (OfSpecs, 1)])
def test_a_round_passes_over_work_that_asks_for_the_same_where_rules_follow_specs(monkeypatch, kind, looked_at):
    made = core(kind(), gpus=1)
    for number in range(3):
        made.submit(build_request(f"runs-{number}"), now_ns=9)
    for number in range(40):
        made.submit(build_request(f"waits-{number:02}"), now_ns=10)
    made.retry_waiting(now_ns=11)
    found, ask = list[object](), SpendingState.blocking_limit
    monkeypatch.setattr(SpendingState, "blocking_limit", lambda self, spec: found.append(spec) or ask(self, spec))
    made.retry_waiting(now_ns=12)
    assert len(found) == looked_at
    # A freed GPU goes to the first that waits, and the reasons of the others stay.
    made.cancel("runs-1", now_ns=13)
    found = made.state.workloads
    assert (found["waits-00"].phase, found["waits-01"].phase) == (WorkloadPhase.PLACED, WorkloadPhase.PENDING)
    assert len({found[f"waits-{number:02}"].reason for number in range(1, 40)}) == 1


def test_rules_that_follow_specs_still_bind_the_work_that_they_judge():
    made = core(OfSpecs("pair"), gpus=1)
    made.submit(build_request("a"), now_ns=9)
    found = [made.submit(build_request(name, replicas=2), now_ns=10).result for name in ("pair", "free")]
    assert [one.phase for one in found] == [WorkloadPhase.PLACED, WorkloadPhase.PENDING]
    assert len(set(nodes(found[0]))) == 2
