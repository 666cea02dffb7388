"""Windows of energy: whatever is charged is in exactly one window, over merges, acknowledgements, restarts and clocks."""

import itertools
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.builders.agent import build_energy_share, build_slurm_owner

from eelgrid_agent.energy.accounts import UNALLOCATED
from eelgrid_agent.energy.node_energy import ENERGY_OUTBOX, load_outbox_state
from eelgrid_agent.energy.windows import EnergyOutbox, EnergyWindowQueue, OutboxState, merge_windows
from eelgrid_agent.state_files import StateFile
from eelgrid_protos import messages as wire
from eelgrid_protos.codec import decode_message, encode_message

_BEGIN_NS = 1_800_000_000 * 10**9
_SECOND_NS = 10**9


def counted(windows):
    """Millijoules by device and job, as a reader of windows adds them up."""
    found = Counter()
    for window in windows:
        for one in window.shares:
            owner = window.owners[one.owner]
            found[window.devices[one.device].gpu_uuid, owner.job or owner.kind.name] += one.energy_mj
    return +found


charges = st.tuples(
    st.just("charge"),
    st.sampled_from(["g0", "g1"]),
    st.sampled_from(["a", "b", ""]),
    st.integers(0, 10**9),
    st.integers(-5, 400),
)
steps = st.lists(
    st.one_of(
        charges,
        st.tuples(st.just("send"), st.integers(1, 9)),
        st.just(("acknowledge",)),
        st.just(("resume",)),
        st.just(("restart",)),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@example(
    [
        ("charge", "g0", "a", 0, 0),
        ("charge", "g0", "a", 0, -1),
        ("send", 1),
        ("acknowledge",),
        ("charge", "g0", "a", 0, 0),
    ],
    2,
    6,
)
@given(steps, st.integers(2, 6), st.integers(6, 12))
def test_everything_that_is_charged_arrives_once(script, many, most):
    windows = EnergyWindowQueue(7, many=many, most=most)
    at_ns, ended_ns, charged, arrived, on_the_way = _BEGIN_NS, 0, Counter(), {}, []
    for step in script:
        match step:
            case ("charge", uuid, name, energy_mj, seconds):
                at_ns += seconds * _SECOND_NS
                owner = build_slurm_owner(name) if name else UNALLOCATED
                windows.charge({uuid: [build_energy_share(owner, energy_mj)]}, at_ns=at_ns)
                charged[uuid, name or "UNALLOCATED"] += energy_mj
            case ("send", count):
                for _ in range(count):
                    window = windows.next_window()
                    if window is not None:
                        on_the_way.append(decode_message(wire.EnergyWindow, encode_message(window)))
            case ("acknowledge",) if on_the_way:
                # The controller keeps the first of each number, and answers for all up to it.
                for window in on_the_way:
                    if not arrived or window.number > max(arrived):
                        arrived[window.number] = window
                on_the_way.clear()
                windows.acknowledge(7, max(arrived))
            case ("resume",):
                on_the_way.clear()
                windows.resume()
            case ("restart",):
                windows.close_window()
                ended_ns = max(ended_ns, windows.ended_ns)
                on_the_way.clear()
                windows = EnergyWindowQueue(
                    7, many=many, most=most, kept=windows.closed, number=windows.number, before_ns=ended_ns
                )
        assert len(windows.closed) <= most + 8
    windows.close_window()
    left = [window for window in windows.closed if not arrived or window.number > max(arrived)]
    assert counted([*arrived.values(), *left]) == +charged
    everything = [*arrived.values(), *left]
    for one, other in itertools.pairwise(everything):
        assert one.number < other.number
        assert one.begin_ns <= one.end_ns <= other.begin_ns


def test_neighbours_of_one_hour_become_one_when_there_are_many():
    windows = EnergyWindowQueue(1, many=3, most=100)
    for minute in range(90):
        windows.charge(
            {"g0": [build_energy_share(build_slurm_owner("a"), 1000)]}, at_ns=_BEGIN_NS + minute * 60 * _SECOND_NS
        )
    windows.close_window()
    hours = [window.begin_ns // (3600 * _SECOND_NS) for window in windows.closed]
    assert len(hours) <= 5
    assert counted(windows.closed)["g0", "a"] == 90_000


def test_a_window_that_may_be_on_its_way_is_not_merged():
    windows = EnergyWindowQueue(1, many=2, most=3)
    windows.charge({"g0": [build_energy_share(build_slurm_owner("a"), 5)]}, at_ns=_BEGIN_NS)
    windows.close_window()
    sent = windows.next_window()
    for minute in range(1, 60):
        windows.charge(
            {"g0": [build_energy_share(build_slurm_owner("a"), 5)]}, at_ns=_BEGIN_NS + minute * 60 * _SECOND_NS
        )
    assert windows.closed[0] == sent


def test_merging_keeps_names_apart_and_adds_the_same():
    def window(number, name):
        made = EnergyWindowQueue(1, number=number - 1)
        made.charge(
            {"g0": [build_energy_share(build_slurm_owner(name), 10), build_energy_share(build_slurm_owner("all"), 1)]},
            at_ns=_BEGIN_NS + number * _SECOND_NS,
        )
        made.close_window()
        return made.closed[0]

    both = merge_windows(window(1, "a"), window(2, "b"))
    assert counted([both]) == {("g0", "a"): 10, ("g0", "b"): 10, ("g0", "all"): 2}
    assert both.number == 2
    assert len(both.shares) == 3


def test_more_owners_than_a_message_holds_are_charged_to_nobody_and_stay_in_the_sum():
    windows = EnergyWindowQueue(1)
    crowd = [build_energy_share(build_slurm_owner(f"j{number}"), 3) for number in range(wire.WINDOW_OWNERS_MOST + 50)]
    windows.charge({"g0": crowd}, at_ns=_BEGIN_NS)
    (window,) = windows.closed
    assert decode_message(wire.EnergyWindow, encode_message(window)) == window
    assert window.devices[0].total_mj == 3 * len(crowd)
    assert counted([window])["g0", "UNATTRIBUTED"] == 3 * 51


def test_a_window_file_gives_back_what_it_was_given_and_survives_nonsense(tmp_path):
    file = StateFile(tmp_path / "energy.json", ENERGY_OUTBOX)
    fresh = load_outbox_state(file, draw_incarnation=lambda: 5)
    assert fresh == OutboxState(incarnation=5)
    outbox = EnergyOutbox(fresh, boot="b")
    outbox.windows.charge({"g0": [build_energy_share(build_slurm_owner("a"), 9)]}, at_ns=_BEGIN_NS)
    outbox.close()
    file.store(outbox.state())
    assert load_outbox_state(file, draw_incarnation=lambda: 6) == outbox.state()
    (tmp_path / "energy.json").write_text('{"schema": 1, "windows": 7}')
    assert load_outbox_state(file, draw_incarnation=lambda: 6) == OutboxState(incarnation=6)
    assert (tmp_path / "energy.json.corrupt-1").exists()
