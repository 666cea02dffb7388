"""The order of changes, step by step."""

import pytest

from eelgrid_controller.objectives.power.budgets import (
    BudgetTooSmall,
    BudgetTree,
    Holding,
    InvalidBudget,
    LimitSetting,
    PowerBudgetNode,
)
from eelgrid_controller.objectives.power.control_events import (
    LimitConfirmed,
    LimitFailed,
    NodeLeaseExpired,
    NodeReachable,
    NodeUnreachable,
)
from eelgrid_controller.objectives.power.power_cap_controller import TRIES_MOST, LimitRollout


def changes(limits, room_w=500.0, restored_w=None):
    """One holding of one GPU on each of several nodes, in one budget."""
    holdings = [Holding(name, f"node-{name}", 1, ("row",), restored_w) for name in limits]
    return LimitRollout(
        BudgetTree([PowerBudgetNode("row", room_w)]), holdings, {name: at(limit) for name, limit in limits.items()}
    )


def at(limit_w):
    return LimitSetting(limit_w, limit_w)


def test_lower_first_then_raise_what_the_confirmed_lowering_made_room_for():
    fleet = changes({"a": 300.0, "b": 200.0})
    (lower,) = fleet.request_settings({"a": at(200.0), "b": at(300.0)})
    assert (lower.holding, lower.limit_w) == ("a", 200.0)
    assert fleet.claims_w() == {"row": 500.0}
    (higher,) = fleet.handle_event(LimitConfirmed(0.0, lower.number, 200.0))
    assert (higher.holding, higher.limit_w) == ("b", 300.0)
    assert fleet.handle_event(LimitConfirmed(0.0, higher.number, 300.0)) == []
    assert fleet.unfinished_holdings() == ()
    assert [fleet.holding_status(name).limit_w for name in ("a", "b")] == [200.0, 300.0]


def test_a_lowering_that_read_back_otherwise_makes_no_room():
    fleet = changes({"a": 300.0, "b": 200.0})
    (lower,) = fleet.request_settings({"a": at(200.0), "b": at(300.0)})
    (again,) = fleet.handle_event(LimitConfirmed(0.0, lower.number, 300.0))
    assert again.holding == "a"
    assert fleet.unfinished_holdings() == ("a", "b")


def test_what_was_commanded_and_never_read_stays_claimed():
    fleet = changes({"a": 200.0}, room_w=300.0)
    (command,) = fleet.request_settings({"a": at(300.0)})
    for _ in range(TRIES_MOST - 1):
        (command,) = fleet.handle_event(LimitFailed(0.0, command.number, None))
    assert fleet.handle_event(LimitFailed(0.0, command.number, None)) == []
    assert fleet.abandoned_holdings() == ("a",)
    assert fleet.claims_w() == {"row": 300.0}  # it may have it, after all
    (back,) = fleet.request_settings({"a": at(100.0)})
    assert fleet.claims_w() == {"row": 300.0}
    fleet.handle_event(LimitConfirmed(0.0, back.number, 100.0))
    assert fleet.claims_w() == {"row": 100.0}


def test_an_answer_of_the_past_changes_nothing():
    fleet = changes({"a": 300.0})
    (command,) = fleet.request_settings({"a": at(200.0)})
    fleet.handle_event(NodeUnreachable(0.0, "node-a"))
    assert fleet.handle_event(LimitConfirmed(0.0, command.number, 200.0)) == []
    assert fleet.claims_w() == {"row": 300.0}
    (again,) = fleet.handle_event(NodeReachable(0.0, "node-a", {"a": 300.0}))
    assert again.limit_w == 200.0
    assert again.number != command.number


def test_a_lost_node_keeps_its_claim_and_what_its_guard_will_put_back_is_reported():
    fleet = changes({"a": 200.0, "b": 200.0}, room_w=500.0, restored_w=400.0)
    fleet.handle_event(NodeUnreachable(0.0, "node-a"))
    assert fleet.claims_w() == {"row": 400.0}
    assert fleet.shortfalls() == {"row": 100.0}
    (lower,) = fleet.request_settings({"b": at(100.0)})
    fleet.handle_event(LimitConfirmed(0.0, lower.number, 100.0))
    assert fleet.shortfalls() == {}
    fleet.handle_event(NodeLeaseExpired(0.0, "node-a"))
    assert fleet.claims_w() == {"row": 500.0}
    fleet.handle_event(NodeReachable(0.0, "node-a", {"a": 200.0}))
    assert fleet.claims_w() == {"row": 300.0}


def test_what_cannot_fit_is_refused_before_anything_changes():
    fleet = changes({"a": 200.0, "b": 200.0}, room_w=500.0)
    with pytest.raises(BudgetTooSmall, match=r"'row'.* 100\.0 W") as refused:
        fleet.request_settings({"a": at(300.0), "b": at(300.0)})
    assert (refused.value.budget, refused.value.missing_w) == ("row", pytest.approx(100.0))
    assert fleet.unfinished_holdings() == ()


def test_a_lost_holding_counts_with_what_it_may_have():
    fleet = changes({"a": 300.0, "b": 200.0}, room_w=500.0)
    fleet.handle_event(NodeUnreachable(0.0, "node-a"))
    with pytest.raises(BudgetTooSmall):
        fleet.request_settings({"a": at(100.0), "b": at(300.0)})


def test_a_budget_that_is_cut_lowers_only():
    fleet = changes({"a": 300.0, "b": 200.0}, room_w=500.0)
    commands = fleet.request_settings({"a": at(150.0), "b": at(250.0)}, BudgetTree([PowerBudgetNode("row", 400.0)]))
    assert [command.holding for command in commands] == ["a"]
    assert fleet.shortfalls() == {"row": 100.0}
    (higher,) = fleet.handle_event(LimitConfirmed(0.0, commands[0].number, 150.0))
    assert higher.holding == "b"


def test_a_raise_that_does_not_fit_does_not_hold_up_one_that_does():
    fleet = changes({"a": 100.0, "b": 100.0, "c": 300.0, "d": 100.0}, room_w=700.0)
    commands = fleet.request_settings({"a": at(300.0), "b": at(150.0), "c": at(100.0), "d": at(150.0)})
    assert {command.holding for command in commands} == {"b", "c", "d"}
    (lower,) = (command for command in commands if command.holding == "c")
    assert {command.holding for command in fleet.handle_event(LimitConfirmed(0.0, lower.number, 100.0))} == {"a"}


@pytest.mark.parametrize(
    ("now", "other"),
    [({}, None), ({"a": at(1.0)}, BudgetTree([PowerBudgetNode("column", 1.0)]))],
)
def test_what_makes_no_sense_is_refused(now, other):
    with pytest.raises(InvalidBudget):
        LimitRollout(BudgetTree([PowerBudgetNode("row", 9.0)]), [Holding("a", "n", 1, ("row",))], now).request_settings(
            {}, other
        )
