"""Spending limits that stop jobs: who is stopped, who runs on, and when they run again."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, build_spending_limit
from tests.state_invariants import check_invariants
from tests.unit.requeue_test import drain, end, job, reload, report
from tests.unit.spending_test import HOUR, NOON, look

from eelgrid_controller.cli.policy import parse_spending_limit
from eelgrid_controller.state.events import PolicyChanged, WorkloadStopping, event_from_plain, event_to_plain
from eelgrid_controller.state.spending import format_limit
from eelgrid_protos.messages import EnforcementMode, JobSchedule, WorkloadPhase
from eelgrid_protos.schema import list_violations

LIMIT = build_spending_limit(stops=True)


def limited(*limits):
    core = build_core(build_node("a", gpus=8, runs_processes=True, agent_version="1"))
    core.update_policy(replace(core.state.policy, spending=limits), now_ns=NOON)
    return core


def begin(core, key, namespace="research", **spec):
    core.submit(job(key, namespace=namespace, **spec), now_ns=NOON)
    report(core, key, now_ns=NOON)


def stopped(events):
    return [event.workload_id for event in events if isinstance(event, WorkloadStopping)]


def test_jobs_that_are_charged_to_a_spent_limit_stop_and_go_on_in_the_next_period():
    core = limited(LIMIT)
    for key in ("one", "two"):
        begin(core, key)
    begin(core, "other", "else")
    begin(core, "cpu", gpus=0, cpu=1.0)
    begin(core, "once", schedule=JobSchedule(no_requeue=True))
    core.submit(build_request("placed", gpus=1, namespace="research"), now_ns=NOON)
    later = NOON + 9 * HOUR
    assert drain(core, later) == []
    (judged, *_) = look(core, later).events
    assert event_from_plain(*event_to_plain(judged)) == judged
    events = drain(core, later)
    assert sorted(stopped(events)) == ["one", "two"]
    assert all(event.requeues for event in events if isinstance(event, WorkloadStopping))
    assert drain(core, later + 1) == []
    for key in ("one", "two"):
        end(core, key, now_ns=later + 2)
        found = core.workload(key)
        assert (found.phase, found.failures) == (WorkloadPhase.PENDING, 0)
        assert found.reason == "spending: namespace research has spent its GPU-hours of the day"
    check_invariants(core.state)
    look(core, NOON + 13 * HOUR)
    assert drain(core, NOON + 13 * HOUR) == []
    assert [core.workload(key).attempt for key in ("one", "two")] == [2, 2]


def test_a_limit_that_does_not_stop_or_is_only_observed_stops_nothing():
    for limit in (build_spending_limit(), build_spending_limit(mode=EnforcementMode.OBSERVE)):
        core = limited(limit)
        begin(core, "one", gpus=4)
        look(core, NOON + 9 * HOUR)
        assert drain(core, NOON + 9 * HOUR) == []


def test_a_limit_that_is_made_to_stop_while_it_is_spent_stops_and_so_does_one_after_a_restart():
    core = limited(build_spending_limit())
    begin(core, "one", gpus=4)
    begin(core, "two", gpus=4)
    later = NOON + 9 * HOUR
    look(core, later)
    assert drain(core, later) == []
    core.update_policy(replace(core.state.policy, spending=(LIMIT,)), now_ns=later + 1)
    core = reload(core)
    assert sorted(stopped(drain(core, later + 2))) == ["one", "two"]


def test_a_limit_that_is_raised_before_jobs_were_told_stops_none():
    core = limited(LIMIT)
    for number in range(40):
        begin(core, f"j-{number}", milli=100, cpu=0.1)
    later = NOON + 9 * HOUR
    look(core, later)
    assert core.is_drain_due(later)
    first = core.continue_drains(now_ns=later).events
    assert len(stopped(first)) == 32
    core.update_policy(replace(core.state.policy, spending=(replace(LIMIT, most=1e9),)), now_ns=later + 1)
    assert stopped(drain(core, later + 2)) == []


@pytest.mark.parametrize(
    "text", ["namespace=trial gpu-hours=100 per week, stop, warn at 80%", "user=ada kwh=3 per day, stop"]
)
def test_the_command_line_reads_what_it_prints(text):
    limit, _ = parse_spending_limit(text)
    assert limit.stops
    assert format_limit(limit) == text


def test_a_policy_keeps_it_and_a_limit_that_is_observed_cannot_stop():
    core = limited(LIMIT)
    event = PolicyChanged(time_ns=1, policy=core.state.policy)
    assert event_from_plain(*event_to_plain(event)) == event
    wrong = replace(LIMIT, mode=EnforcementMode.OBSERVE)
    assert [one.field for one in list_violations(wrong)] == ["stops"]
