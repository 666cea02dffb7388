"""Conditions of a status: their times, their limits, and their way through JSON."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.kubernetes.conditions import (
    CONDITIONS_MOST,
    MESSAGE_MOST,
    Condition,
    Conditions,
)
from eelgrid_controller.kubernetes.times import stamp_of, stamp_text

S = 1_000_000_000


def test_the_time_is_that_of_the_last_other_status():
    found = Conditions().set("Accepted", True, "Valid", "is read", generation=1, at_ns=10 * S)
    again = found.set("Accepted", True, "Valid", "is read anew", generation=2, at_ns=20 * S)
    assert again.get("Accepted") == Condition("Accepted", True, "Valid", "is read anew", 2, 10)
    turned = again.set("Accepted", False, "Invalid", "a rack lacks", generation=3, at_ns=30 * S)
    assert turned.get("Accepted").since_s == 30
    unknown = turned.set("Accepted", None, "Stale", "", generation=3, at_ns=40 * S)
    assert (unknown.get("Accepted").since_s, unknown.is_true("Accepted")) == (40, False)
    assert found.is_true("Accepted")
    assert found.set("Accepted", True, "Valid", "is read", generation=1, at_ns=99 * S) == found


def test_as_kubernetes_writes_them():
    found = Conditions().set("InForce", False, "NotAccepted", "see Accepted", generation=4, at_ns=1_795_332_600 * S + 5)
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
    assert Conditions.from_json(found.to_json()) == found


def test_there_is_one_of_each_type_in_the_order_of_their_coming():
    found = (
        Conditions()
        .set("A", True, "R", "", generation=1, at_ns=0)
        .set("B", None, "R", "", generation=1, at_ns=0)
        .set("A", False, "R", "", generation=1, at_ns=0)
    )
    assert [(one.type, one.status) for one in found] == [("A", False), ("B", None)]
    assert [one.type for one in found.without("A")] == ["B"]
    assert [one.type for one in found.only(["A", "C"])] == ["A"]
    assert found.get("C") is None


def test_limits():
    found = Conditions().set("A", True, "R", "x" * (MESSAGE_MOST + 1), generation=1, at_ns=0)
    assert len(found.get("A").message) == MESSAGE_MOST
    assert found.get("A").message.endswith(" ...")
    for number in range(CONDITIONS_MOST - 1):
        found = found.set(f"C{number}", True, "R", "", generation=1, at_ns=0)
    with pytest.raises(ValueError, match="one too many"):
        found.set("More", True, "R", "", generation=1, at_ns=0)
    assert found.set("A", False, "R", "", generation=1, at_ns=0).get("A").status is False
    with pytest.raises(ValueError, match="no reason"):
        Conditions().set("A", True, "two words", "", generation=1, at_ns=0)
    with pytest.raises(ValueError, match="no name"):
        Conditions().set("", True, "R", "", generation=1, at_ns=0)


def test_what_is_no_condition_is_dropped():
    good = {"type": "A", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-11-22T07:30:00Z"}
    bad = [
        "x", None, {}, {**good, "status": True}, {**good, "status": "true"}, {**good, "reason": ""},
        {**good, "lastTransitionTime": "soon"}, {**good, "lastTransitionTime": "2026-11-22T07:30:00"},
        {**good, "message": 3}, {**good, "type": "a b"},
    ]  # fmt: skip
    assert Conditions.from_json(bad) == Conditions()
    assert Conditions.from_json({"a": 1}) == Conditions()
    assert Conditions.from_json([*bad, good, {**good, "status": "False"}]).is_true("A")
    assert Conditions.from_json([{**good, "observedGeneration": -1}]).get("A").generation == 0
    assert len(Conditions.from_json([{**good, "type": f"A{n}"} for n in range(99)]).items) == CONDITIONS_MOST


@given(st.integers(0, 253_402_300_799))
def test_times_come_back(at_s):
    assert stamp_of(stamp_text(at_s)) == at_s
    assert len(stamp_text(at_s)) == 20


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ABC"), st.sampled_from([True, False, None]), st.sampled_from(["R", "Q"]), st.text(),
            st.integers(0, 9), st.integers(0, 10**19),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_any_course_comes_back_from_json_and_changes_times_only_with_the_status(course):
    found = Conditions()
    for step in course:
        before = found.get(step[0])
        found = found.set(*step[:4], generation=step[4], at_ns=step[5])
        after = found.get(step[0])
        if before is not None and before.status is after.status:
            assert after.since_s == before.since_s
        else:
            assert after.since_s == step[-1] // S
        assert found.set(*step[:4], generation=step[4], at_ns=step[5]) == found
    assert Conditions.from_json(found.to_json()) == found
