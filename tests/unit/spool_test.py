"""The spool: numbering, window, dropping and resending, case by case."""

import pytest
from tests.builders.agent import build_tick

from eelgrid_agent.node.spool import BATCH_TICKS_MOST, Acknowledged, EventQueue, Spool
from eelgrid_protos.messages import NodeEvent, NodeEventKind


def spool(*times, window=2, ticks_most=100):
    made = Spool(window=window, ticks_most=ticks_most)
    for time_ns in times:
        made.add(build_tick(time_ns))
    return made


def test_ticks_become_one_batch_and_an_acknowledgement_releases_it():
    one = spool(1, 2, 3)
    batch = one.next_batch()
    assert (batch.sequence, batch.time_ns) == (1, (1, 2, 3))
    assert one.next_batch() is None
    assert one.acknowledge(1) is Acknowledged.NEWER
    assert (one.unacknowledged_ticks, one.in_flight) == (0, 0)


def test_the_window_bounds_what_is_under_way():
    one = spool(window=2)
    for time_ns in range(3):
        one.add(build_tick(time_ns))
        one.next_batch()
    assert one.in_flight == 2
    assert one.acknowledge(1) is Acknowledged.NEWER
    assert one.next_batch().sequence == 3


def test_a_narrower_window_holds_at_once():
    one = spool(window=3)
    for time_ns in range(3):
        one.add(build_tick(time_ns))
        one.next_batch()
    one.set_window(1)
    one.acknowledge(1)
    one.add(build_tick(9))
    assert one.next_batch() is None
    one.acknowledge(3)
    assert one.next_batch().time_ns == (9,)


def test_an_acknowledgement_is_cumulative_and_may_come_twice():
    one = spool(window=4)
    for time_ns in range(3):
        one.add(build_tick(time_ns))
        one.next_batch()
    assert one.acknowledge(2) is Acknowledged.NEWER
    assert one.acknowledge(2) is Acknowledged.STALE
    assert one.acknowledge(1) is Acknowledged.STALE
    assert one.in_flight == 1


def test_an_acknowledgement_of_what_was_never_sent_is_refused():
    one = spool(1)
    one.next_batch()
    assert one.acknowledge(2) is Acknowledged.FUTURE
    assert one.unacknowledged_ticks == 1


def test_a_new_connection_sends_what_is_not_acknowledged_again_in_order():
    one = spool(window=4)
    sent = []
    for time_ns in range(3):
        one.add(build_tick(time_ns))
        sent.append(one.next_batch())
    assert one.resume(1) is Acknowledged.NEWER
    assert one.is_urgent
    assert [one.next_batch(), one.next_batch()] == sent[1:]
    assert one.next_batch() is None


def test_a_controller_that_forgot_everything_gets_what_is_held():
    one = spool(1)
    first = one.next_batch()
    one.acknowledge(1)
    one.add(build_tick(2))
    one.next_batch()
    assert one.resume(0) is Acknowledged.STALE
    assert one.next_batch().sequence == first.sequence + 1


def test_a_controller_that_claims_too_much_gets_another_incarnation():
    one = spool(1)
    one.next_batch()
    one.acknowledge(1)
    one.add(build_tick(2))
    one.next_batch()
    assert one.resume(50) is Acknowledged.FUTURE
    one.restart()
    assert (one.next_batch().sequence, one.upcoming_sequence) == (1, 2)


def test_dropping_takes_the_oldest_waiting_tick_and_is_counted_in_the_next_batch():
    one = spool(1, 2, 3, 4, 5, ticks_most=3)
    batch = one.next_batch()
    assert (batch.time_ns, batch.dropped_ticks, one.dropped_total) == ((3, 4, 5), 2, 2)
    one.add(build_tick(6))
    assert one.next_batch().dropped_ticks == 0


def test_dropping_never_touches_a_numbered_batch():
    one = spool(1, window=1, ticks_most=2)
    first = one.next_batch()
    for time_ns in range(2, 9):
        one.add(build_tick(time_ns))
    assert one.resume(0) is Acknowledged.STALE
    assert one.next_batch() == first
    one.acknowledge(1)
    assert (one.next_batch().sequence, one.dropped_total) == (2, 5)


@pytest.mark.parametrize("second", [build_tick(2, generation=2), build_tick(2, opens_batch=True), build_tick(0)])
def test_a_batch_ends_where_generation_or_time_break(second):
    one = spool(1)
    one.add(second)
    assert one.next_batch().time_ns == (1,)
    assert one.next_batch().time_ns == (second.time_ns,)


def test_a_backlog_goes_in_large_batches():
    one = spool(*range(BATCH_TICKS_MOST + 5), ticks_most=1000)
    assert one.is_urgent
    assert len(one.next_batch().time_ns) == BATCH_TICKS_MOST
    assert not one.is_urgent


@pytest.mark.parametrize("limits", [{"window": 0}, {"ticks_most": 0}])
def test_bounds_are_at_least_one(limits):
    with pytest.raises(ValueError, match="at least 1"):
        Spool(**{"window": 1, "ticks_most": 1} | limits)


def event(time_ns):
    return NodeEvent(kind=NodeEventKind.CLOCK_STEP, time_ns=time_ns)


def test_events_are_kept_until_a_batch_behind_them_arrived():
    queue = EventQueue()
    queue.add(event(1))
    assert queue.next_event(covered_by=4) == event(1)
    assert queue.next_event(covered_by=4) is None
    queue.acknowledge(3)
    queue.resume()
    assert queue.next_event(covered_by=4) == event(1)
    queue.acknowledge(4)
    queue.resume()
    assert queue.next_event(covered_by=5) is None


def test_events_keep_their_order_over_connections():
    queue = EventQueue()
    queue.add(event(1))
    queue.add(event(2))
    queue.next_event(covered_by=1)
    queue.add(event(3))
    queue.resume()
    assert [one.time_ns for one in queue] == [1, 2, 3]


def test_events_are_bounded():
    queue = EventQueue(most=3)
    for time_ns in range(5):
        queue.add(event(time_ns))
    assert [one.time_ns for one in queue] == [2, 3, 4]
    assert queue.dropped_total == 2
