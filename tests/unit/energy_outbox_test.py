"""The outbox: shares by the plan alone, what was spent while no agent ran, and the node's stream of windows."""

from array import array

import pytest

from eelgrid_agent.attribution.attributor import Attribution
from eelgrid_agent.attribution.outbox import EnergyOutbox, Kept
from eelgrid_agent.attribution.owner import Owner, OwnerKind
from eelgrid_agent.attribution.shares import Confidence, Method, Part, Share
from eelgrid_agent.attribution.windows import Windows
from eelgrid_agent.device import Missing, RawReadings
from eelgrid_agent.sampler import GPU_READINGS, Tick
from eelgrid_protos.messages import AbsenceReason, Assignment, EnergyPart, Reading
from eelgrid_protos.messages import OwnerKind as WireKind

BEGIN_NS = 1_800_000_000 * 10**9
SECOND_NS = 10**9
_ENERGY = GPU_READINGS.index(Reading.ENERGY_J)


def tick(at_s, *joules):
    """A tick at which each device has spent so much since the agent began; None where that cannot be said."""
    count = len(joules)
    values = array("d", [0.0] * (len(GPU_READINGS) * count))
    absences = []
    for column, value in enumerate(joules):
        if value is None:
            absences.append((_ENERGY * count + column, AbsenceReason.NOT_SAMPLED))
        else:
            values[_ENERGY * count + column] = value
    return Tick(
        time_ns=BEGIN_NS + int(at_s * SECOND_NS), generation=1, gpus=count, gpu_values=values,
        gpu_absences=tuple(absences), host_values=array("d"), host_absences=(),
    )  # fmt: skip


def looks(*counters_j):
    return [(f"g{index}", RawReadings(energy_counter_j=value, values={})) for index, value in enumerate(counters_j)]


def works(workload, gpu, milli=1000):
    return Assignment(workload_id=workload, replica=0, gpu_uuids=(gpu,), gpu_milli=milli)


def charged(outbox):
    found = {}
    for window in outbox.windows.closed:
        for share in window.shares:
            owner = window.owners[share.owner]
            key = (window.devices[share.device].gpu_uuid, owner.workload or owner.job or owner.kind.name)
            found[key] = found.get(key, 0) + share.energy_mj
    return found


def test_by_the_plan_energy_goes_to_who_was_assigned_while_it_was_spent():
    outbox = EnergyOutbox(Kept(incarnation=1), by_plan=True)
    both = looks(0.0, 0.0)
    first = (works("w1", "g0"),)
    second = (works("w2", "g0", 400), works("w3", "g0", 350), works("w2", "g1", 400))
    outbox.tick(tick(0, 0.0, 0.0), both, None)
    outbox.tick(tick(5, 10.0, 4.0), both, first)  # until now nobody was assigned
    outbox.tick(tick(20, 100.0, 9.0), both, first)
    outbox.tick(tick(30, 210.0, 14.0), both, second)  # until now the first
    outbox.tick(tick(50, None, 20.0), both, second)
    outbox.tick(tick(90, 410.0, 34.0), both, second)  # the next minute
    outbox.close()
    assert charged(outbox) == {
        ("g0", "UNALLOCATED"): 10_000 + 50_000, ("g0", "w1"): 200_000, ("g0", "w2"): 80_000, ("g0", "w3"): 70_000,
        ("g1", "UNALLOCATED"): 4_000 + 10_000 + 12_000, ("g1", "w2"): 8_000,
    }  # fmt: skip
    nobody = [
        share
        for window in outbox.windows.closed
        for share in window.shares
        if window.owners[share.owner].kind is WireKind.UNALLOCATED
    ]
    assert {share.part for share in nobody} == {EnergyPart.BARE_IDLE}


def test_by_the_plan_totals_are_looked_at_when_the_plan_or_the_minute_changes():
    outbox = EnergyOutbox(Kept(incarnation=1), by_plan=True)
    same = (works("w1", "g0"),)
    for second in range(120):
        outbox.tick(tick(second, 100.0 * second), looks(0.0), same)
    assert [window.end_ns - window.begin_ns for window in outbox.windows.closed] == [60 * SECOND_NS]


def attribution(**spent_mj):
    owner = Owner(kind=OwnerKind.SLURM, job="7")
    shares = {
        uuid: (Share(owner=owner, part=Part.ACTIVE, energy_mj=value, method=Method.EXCLUSIVE,
                     confidence=Confidence.HIGH),)
        for uuid, value in spent_mj.items()
    }  # fmt: skip
    return Attribution(shares=shares, accounts={}, nobody={}, estimates={}, anomalies=())


def run_of(kept, boot, counter_j, at_s):
    """A run of the agent that looks once and ends."""
    outbox = EnergyOutbox(kept, boot=boot)
    outbox.tick(tick(at_s, 0.0), looks(counter_j), None)
    outbox.attributed(attribution(g0=1_000), at_ns=BEGIN_NS + at_s * SECOND_NS)
    outbox.close()
    return outbox


def test_what_was_counted_while_no_agent_ran_is_charged_to_nobody():
    first = run_of(Kept(incarnation=3), "boot-1", 5_000.0, 0)
    second = run_of(first.kept(), "boot-1", 5_750.5, 600)
    assert charged(second) == {("g0", "7"): 2_000, ("g0", "UNATTRIBUTED"): 750_500}
    assert second.windows.incarnation == 3
    last = second.windows.closed[-2]
    assert (last.begin_ns, last.end_ns) == (BEGIN_NS, BEGIN_NS + 600 * SECOND_NS)


def test_what_this_run_counts_before_its_first_look_is_not_charged_twice():
    kept = run_of(Kept(incarnation=3), "boot-1", 5_000.0, 0).kept()
    outbox = EnergyOutbox(kept, boot="boot-1")
    for second in range(5):
        outbox.tick(tick(600 + second, 100.0 * second), looks(5_750.0 + 100.0 * second), None)
    outbox.attributed(attribution(g0=400_000), at_ns=BEGIN_NS + 604 * SECOND_NS)
    outbox.close()
    assert charged(outbox) == {("g0", "7"): 401_000, ("g0", "UNATTRIBUTED"): 750_000}


@pytest.mark.parametrize(
    ("boot", "counter_j", "why"),
    [
        ("boot-2", 5_750.0, "another boot"),
        ("boot-1", 4_999.0, "the counter fell"),
        ("boot-1", 5_000.0 + 601 * 5_000.0, "more than any device draws"),
        ("boot-1", Missing(AbsenceReason.NOT_SUPPORTED), "no counter"),
    ],
)
def test_a_counter_that_is_another_one_tells_nothing_of_the_gap(boot, counter_j, why):
    first = run_of(Kept(incarnation=3), "boot-1", 5_000.0, 0)
    second = run_of(first.kept(), boot, counter_j, 600)
    assert charged(second) == {("g0", "7"): 2_000}, why


def test_windows_that_the_controller_may_have_are_never_merged_into_later_ones():
    share = attribution(g0=1_000).shares["g0"]
    windows = Windows(1, many=4, most=6)
    for minute in range(12):
        windows.charge({"g0": share}, at_ns=BEGIN_NS + minute * 60 * SECOND_NS)
        windows.close()
        if minute == 1:
            sent = (windows.upcoming(), windows.upcoming())
    # No acknowledgement came: everything goes again, and the first two are as they were.
    assert windows.closed[:2] == sent
    assert len(windows.closed) == 4
    assert sum(device.total_mj for window in windows.closed for device in window.devices) == 12_000
    later = Windows(1, many=4, most=6, kept=windows.closed, number=windows.number)
    for minute in range(12, 24):
        later.charge({"g0": share}, at_ns=BEGIN_NS + minute * 60 * SECOND_NS)
        later.close()
    assert later.closed[:4] == windows.closed
