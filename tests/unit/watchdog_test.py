"""The watchdog's policy: blame sets a device apart, waits grow, starts and children left behind are bounded."""

from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.devices.process.watchdog import DriverWatchdog, WatchdogLimits

LIMITS = WatchdogLimits(
    probe_first_s=1.0,
    probe_most_s=100.0,
    again_factor=4.0,
    forgive_s=1000.0,
    restart_first_s=0.5,
    restart_most_s=60.0,
    steady_s=60.0,
    left_behind_most=4,
    left_behind_for_probes=2,
)


def test_a_device_that_hangs_is_set_apart_and_the_next_child_may_start_at_once():
    dog = DriverWatchdog(LIMITS)
    assert dog.start_in_s(0.0) == 0.0
    dog.failed(3, 10.0)
    assert dog.apart == {3}
    assert dog.start_in_s(10.0) == 0.0
    assert dog.probe_due(10.9) is None
    assert dog.probe_due(11.0) == 3
    dog.probe_answered(3)
    assert dog.apart == frozenset()


def test_probes_that_hang_wait_twice_as_long_up_to_a_bound():
    dog = DriverWatchdog(LIMITS)
    dog.failed(0, 0.0)
    now_s, waits = 1.0, []
    for _ in range(10):
        assert dog.probe_due(now_s) == 0
        dog.probe_failed(0, now_s)
        before_s = now_s
        while dog.probe_due(now_s) is None:
            now_s += 1.0
        waits.append(now_s - before_s)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0, 100.0, 100.0, 100.0]


def test_a_device_that_comes_back_and_hangs_again_waits_four_times_as_long_until_it_is_forgiven():
    dog = DriverWatchdog(LIMITS)
    for start_s, wait_s in ((0.0, 1.0), (10.0, 4.0), (20.0, 16.0), (60.0, 64.0), (200.0, 100.0)):
        dog.failed(0, start_s)
        assert dog.probe_due(start_s + wait_s - 0.01) is None
        assert dog.probe_due(start_s + wait_s) == 0
        dog.probe_answered(0)
        dog.answered([0], start_s + wait_s)
    dog.answered([0], 1300.0)
    dog.failed(0, 1300.0)
    assert dog.probe_due(1301.0) == 0


def test_a_child_that_fails_of_itself_is_started_at_once_and_then_ever_later():
    dog = DriverWatchdog(LIMITS)
    waits = []
    for _ in range(10):
        dog.failed(None, 5.0)
        waits.append(dog.start_in_s(5.0))
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert dog.start_in_s(35.0) == 30.0
    dog.failed(None, 100.0)
    assert dog.start_in_s(100.0) == 0.0, "it stood for a while"
    assert dog.apart == frozenset()


def test_children_that_cannot_be_ended_stop_the_probes_and_then_every_start():
    dog = DriverWatchdog(LIMITS)
    dog.failed(0, 0.0, unending=100)
    assert dog.probe_due(50.0) is None, "a device whose child hangs in it has not come back"
    dog.failed(1, 0.0)
    assert dog.probe_due(50.0) == 1
    dog.probe_failed(1, 50.0, unending=101)
    dog.failed(2, 50.0)
    assert dog.probe_due(90.0) is None, "two are left behind: no probes"
    dog.failed(None, 90.0, unending=102)
    assert dog.start_in_s(90.0) is not None
    dog.failed(None, 90.0, unending=103)
    assert dog.start_in_s(1e9) is None
    assert dog.left_behind == {100, 101, 102, 103}
    for process in (102, 103, 100):
        dog.ended(process, 200.0)
    assert dog.start_in_s(1e9) == 0.0
    assert dog.probe_due(200.0) in (0, 2), "its child is gone, so it is asked at once"


def test_another_enumeration_forgets_devices_but_not_processes():
    dog = DriverWatchdog(LIMITS)
    dog.failed(0, 0.0, unending=7)
    dog.forget_devices()
    assert (dog.apart, dog.left_behind) == (frozenset(), {7})
    dog.ended(7, 1.0)
    assert dog.probe_due(100.0) is None


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["failed", "died", "probe", "answered", "ended"]),
        st.integers(0, 3),
        st.booleans(),
        st.floats(0.0, 30.0),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_whatever_happens_the_bounds_hold(events):
    dog, now_s, process, probes = DriverWatchdog(LIMITS), 0.0, 1000, {}
    for kind, device, unending, passed_s in events:
        now_s += passed_s
        process += 1
        pid = process if unending else None
        if kind in ("failed", "died") and dog.start_in_s(now_s) is not None:
            dog.failed(device if kind == "failed" else None, now_s, unending=pid)
        elif kind == "probe" and (due := dog.probe_due(now_s)) is not None:
            assert due in dog.apart
            assert now_s - probes.get(due, -1e9) >= LIMITS.probe_first_s
            probes[due] = now_s
            dog.probe_failed(due, now_s, unending=pid)
        elif kind == "answered":
            dog.answered([device], now_s)
        elif kind == "ended" and dog.left_behind:
            gone = min(dog.left_behind)
            dog.ended(gone, now_s)
            probes.clear()
        assert len(dog.left_behind) <= LIMITS.left_behind_most
        assert (dog.start_in_s(now_s) or 0.0) <= LIMITS.restart_most_s
        assert (dog.start_in_s(now_s) is None) == (len(dog.left_behind) == LIMITS.left_behind_most)
