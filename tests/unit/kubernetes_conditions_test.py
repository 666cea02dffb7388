"""Conditions of a status: their times, their limits, and their way through JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.engines.kubernetes.model.quantities import format_time, parse_time
from eelgrid_controller.engines.kubernetes.model.status_reporting import (
    MAX_CONDITIONS,
    MAX_MESSAGE_LENGTH,
    ConditionSet,
    StatusCondition,
)

S = 1_000_000_000


def test_the_time_is_that_of_the_last_other_status():
    found = ConditionSet().with_condition("Accepted", True, "Valid", "is read", generation=1, at_ns=10 * S)
    again = found.with_condition("Accepted", True, "Valid", "is read anew", generation=2, at_ns=20 * S)
    assert again.get("Accepted") == StatusCondition("Accepted", True, "Valid", "is read anew", 2, 10)
    turned = again.with_condition("Accepted", False, "Invalid", "a rack lacks", generation=3, at_ns=30 * S)
    assert turned.get("Accepted").since_s == 30
    unknown = turned.with_condition("Accepted", None, "Stale", "", generation=3, at_ns=40 * S)
    assert (unknown.get("Accepted").since_s, unknown.is_true("Accepted")) == (40, False)
    assert found.is_true("Accepted")
    assert found.with_condition("Accepted", True, "Valid", "is read", generation=1, at_ns=99 * S) == found


def test_as_kubernetes_writes_them():
    found = ConditionSet().with_condition(
        "InForce", False, "NotAccepted", "see Accepted", generation=4, at_ns=1_795_332_600 * S + 5
    )
    assert found.to_json() == [
        {
            "type": "InForce",
            "status": "False",
            "reason": "NotAccepted",
            "message": "see Accepted",
            "observedGeneration": 4,
            "lastTransitionTime": "2026-11-22T07:30:00Z",
        }
    ]
    assert ConditionSet.from_json(found.to_json()) == found


def test_there_is_one_of_each_type_in_the_order_of_their_coming():
    found = (
        ConditionSet()
        .with_condition("A", True, "R", "", generation=1, at_ns=0)
        .with_condition("B", None, "R", "", generation=1, at_ns=0)
        .with_condition("A", False, "R", "", generation=1, at_ns=0)
    )
    assert [(one.type, one.status) for one in found] == [("A", False), ("B", None)]
    assert [one.type for one in found.without("A")] == ["B"]
    assert [one.type for one in found.retain(["A", "C"])] == ["A"]
    assert found.get("C") is None


def test_limits():
    found = ConditionSet().with_condition("A", True, "R", "x" * (MAX_MESSAGE_LENGTH + 1), generation=1, at_ns=0)
    assert len(found.get("A").message) == MAX_MESSAGE_LENGTH
    assert found.get("A").message.endswith(" ...")
    for number in range(MAX_CONDITIONS - 1):
        found = found.with_condition(f"C{number}", True, "R", "", generation=1, at_ns=0)
    with pytest.raises(ValueError, match="one too many"):
        found.with_condition("More", True, "R", "", generation=1, at_ns=0)
    assert found.with_condition("A", False, "R", "", generation=1, at_ns=0).get("A").status is False
    with pytest.raises(ValueError, match="no reason"):
        ConditionSet().with_condition("A", True, "two words", "", generation=1, at_ns=0)
    with pytest.raises(ValueError, match="no name"):
        ConditionSet().with_condition("", True, "R", "", generation=1, at_ns=0)


def test_what_is_no_condition_is_dropped():
    good = {"type": "A", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-11-22T07:30:00Z"}
    bad = [
        "x",
        None,
        {},
        {**good, "status": True},
        {**good, "status": "true"},
        {**good, "reason": ""},
        {**good, "lastTransitionTime": "soon"},
        {**good, "lastTransitionTime": "2026-11-22T07:30:00"},
        {**good, "message": 3},
        {**good, "type": "a b"},
    ]
    assert ConditionSet.from_json(bad) == ConditionSet()
    assert ConditionSet.from_json({"a": 1}) == ConditionSet()
    assert ConditionSet.from_json([*bad, good, {**good, "status": "False"}]).is_true("A")
    assert ConditionSet.from_json([{**good, "observedGeneration": -1}]).get("A").generation == 0
    assert len(ConditionSet.from_json([{**good, "type": f"A{n}"} for n in range(99)]).items) == MAX_CONDITIONS


@given(st.integers(0, 253_402_300_799))
def test_times_come_back(at_s):
    assert parse_time(format_time(at_s)) == at_s
    assert len(format_time(at_s)) == 20


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ABC"),
            st.sampled_from([True, False, None]),
            st.sampled_from(["R", "Q"]),
            st.text(),
            st.integers(0, 9),
            st.integers(0, 10**19),
        ),
        max_size=20,
    )
)
def test_any_course_comes_back_from_json_and_changes_times_only_with_the_status(course):
    found = ConditionSet()
    for step in course:
        before = found.get(step[0])
        found = found.with_condition(*step[:4], generation=step[4], at_ns=step[5])
        after = found.get(step[0])
        if before is not None and before.status is after.status:
            assert after.since_s == before.since_s
        else:
            assert after.since_s == step[-1] // S
        assert found.with_condition(*step[:4], generation=step[4], at_ns=step[5]) == found
    assert ConditionSet.from_json(found.to_json()) == found
