"""The right to submit for other users, which a front of several clusters has: for those that it names, and no further."""

import pytest
from tests.builders.cluster import build_request

from eelgrid_controller.runtime.access_control import bind_spec, check_owner, owner_of
from eelgrid_protos.certificate import Certificate
from eelgrid_protos.messages import Policy, Workload, WorkloadPhase
from eelgrid_protos.roles import BadGrant, RoleRefused, RoleRules, build_caller, parse_binds

REQUIRE = RoleRules(demanded=True)


def caller(*rights, role="submitter", name="front"):
    organizations = [("O", f"eelgrid:{role}"), *(("O", f"eelgrid:{right}") for right in rights)]
    return build_caller(Certificate(0.0, 1e12, subject=(("CN", name), *organizations)), {})


def spec(user="", namespace="default"):
    return build_request("w-x", user=user, namespace=namespace).spec


def bind(who, wanted):
    return bind_spec(who, wanted, Policy(), REQUIRE)


def work(owner):
    return Workload(workload_id="w-x", spec=spec(owner), phase=WorkloadPhase.PENDING, submitted_ns=1, owner=owner)


def test_work_that_is_submitted_for_somebody_is_his():
    front = caller("impersonate:alice")
    assert bind(front, spec("alice")).user == "alice"
    assert owner_of(front, "alice") == "alice"
    check_owner(front, work("alice"), "CancelWorkload", REQUIRE)


def test_only_for_those_that_the_right_names():
    front = caller("impersonate:alice")
    with pytest.raises(RoleRefused, match="as bob needs that user's certificate"):
        bind(front, spec("bob"))
    assert owner_of(front, "bob") == "front"
    with pytest.raises(RoleRefused, match="needs its owner bob"):
        check_owner(front, work("bob"), "CancelWorkload", REQUIRE)
    everybody = caller("impersonate:*")
    assert bind(everybody, spec("bob")).user == "bob"


def test_its_own_namespaces_still_bind_it():
    front = caller("impersonate:alice", "namespace:research")
    assert bind(front, spec("alice", "research")).namespace == "research"
    with pytest.raises(RoleRefused, match="namespace"):
        bind(front, spec("alice", "secret"))


def test_without_a_stated_user_the_work_is_its_own():
    front = caller("impersonate:*")
    assert bind(front, spec()).user == "front"
    assert owner_of(front, "") == "front"


def test_a_viewer_with_the_right_submits_for_nobody():
    assert owner_of(caller("impersonate:alice", role="viewer"), "alice") == ""


def test_the_right_is_bound_like_the_others():
    assert parse_binds(["impersonate:alice=CN:front"]) == {("CN", "front"): (("impersonate", "alice"),)}
    assert parse_binds(["impersonate:*=CN:front"]) == {("CN", "front"): (("impersonate", "*"),)}
    with pytest.raises(BadGrant):
        parse_binds(["user:*=CN:front"])
