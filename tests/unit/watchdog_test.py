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
    dog.on_failure(3, 10.0)
    assert dog.isolated_devices == {3}
    assert dog.start_in_s(10.0) == 0.0
    assert dog.probe_due(10.9) is None
    assert dog.probe_due(11.0) == 3
    dog.on_probe_answer(3)
    assert dog.isolated_devices == frozenset()


def test_probes_that_hang_wait_twice_as_long_up_to_a_bound():
    dog = DriverWatchdog(LIMITS)
    dog.on_failure(0, 0.0)
    now_s, waits = 1.0, []
    for _ in range(10):
        assert dog.probe_due(now_s) == 0
        dog.on_probe_failure(0, now_s)
        before_s = now_s
        while dog.probe_due(now_s) is None:
            now_s += 1.0
        waits.append(now_s - before_s)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 100.0, 100.0, 100.0, 100.0]


def test_a_device_that_comes_back_and_hangs_again_waits_four_times_as_long_until_it_is_forgiven():
    dog = DriverWatchdog(LIMITS)
    for start_s, wait_s in ((0.0, 1.0), (10.0, 4.0), (20.0, 16.0), (60.0, 64.0), (200.0, 100.0)):
        dog.on_failure(0, start_s)
        assert dog.probe_due(start_s + wait_s - 0.01) is None
        assert dog.probe_due(start_s + wait_s) == 0
        dog.on_probe_answer(0)
        dog.on_answers([0], start_s + wait_s)
    dog.on_answers([0], 1300.0)
    dog.on_failure(0, 1300.0)
    assert dog.probe_due(1301.0) == 0


def test_a_child_that_fails_of_itself_is_started_at_once_and_then_ever_later():
    dog = DriverWatchdog(LIMITS)
    waits = []
    for _ in range(10):
        dog.on_failure(None, 5.0)
        waits.append(dog.start_in_s(5.0))
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert dog.start_in_s(35.0) == 30.0
    dog.on_failure(None, 100.0)
    assert dog.start_in_s(100.0) == 0.0, "it stood for a while"
    assert dog.isolated_devices == frozenset()


def test_children_that_cannot_be_ended_stop_the_probes_and_then_every_start():
    dog = DriverWatchdog(LIMITS)
    dog.on_failure(0, 0.0, unending=100)
    assert dog.probe_due(50.0) is None, "a device whose child hangs in it has not come back"
    dog.on_failure(1, 0.0)
    assert dog.probe_due(50.0) == 1
    dog.on_probe_failure(1, 50.0, unending=101)
    dog.on_failure(2, 50.0)
    assert dog.probe_due(90.0) is None, "two are left behind: no probes"
    dog.on_failure(None, 90.0, unending=102)
    assert dog.start_in_s(90.0) is not None
    dog.on_failure(None, 90.0, unending=103)
    assert dog.start_in_s(1e9) is None
    assert dog.unkillable_processes == {100, 101, 102, 103}
    for process in (102, 103, 100):
        dog.on_process_exit(process, 200.0)
    assert dog.start_in_s(1e9) == 0.0
    assert dog.probe_due(200.0) in (0, 2), "its child is gone, so it is asked at once"


def test_another_enumeration_forgets_devices_but_not_processes():
    dog = DriverWatchdog(LIMITS)
    dog.on_failure(0, 0.0, unending=7)
    dog.forget_devices()
    assert (dog.isolated_devices, dog.unkillable_processes) == (frozenset(), {7})
    dog.on_process_exit(7, 1.0)
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
            dog.on_failure(device if kind == "failed" else None, now_s, unending=pid)
        elif kind == "probe" and (due := dog.probe_due(now_s)) is not None:
            assert due in dog.isolated_devices
            assert now_s - probes.get(due, -1e9) >= LIMITS.probe_first_s
            probes[due] = now_s
            dog.on_probe_failure(due, now_s, unending=pid)
        elif kind == "answered":
            dog.on_answers([device], now_s)
        elif kind == "ended" and dog.unkillable_processes:
            gone = min(dog.unkillable_processes)
            dog.on_process_exit(gone, now_s)
            probes.clear()
        assert len(dog.unkillable_processes) <= LIMITS.left_behind_most
        assert (dog.start_in_s(now_s) or 0.0) <= LIMITS.restart_most_s
        assert (dog.start_in_s(now_s) is None) == (len(dog.unkillable_processes) == LIMITS.left_behind_most)
