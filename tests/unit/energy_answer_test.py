"""A node's energy report as an answer: every word has its number, every bound holds, and nothing that comes breaks it."""

from dataclasses import fields, replace

import pytest
from tests.builders.agent import build_slurm_owner

from eelgrid_agent.energy import accounts
from eelgrid_agent.energy.accounts import (
    UNALLOCATED,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.energy.anomalies import SUBJECTS_MOST, AnomalySubject, EnergyAnomalyKind, OngoingAnomaly
from eelgrid_agent.energy.attributor import DEVICES_MOST
from eelgrid_agent.energy.metering import EnergyMeasurement, UncertainEnergy
from eelgrid_agent.energy.report import DeviceEnergyTotals, NodeEnergyReport, OwnerEnergyRow, build_energy_response
from eelgrid_protos import codec, messages
from eelgrid_protos.messages import GetNodeEnergyResponse

NAMES = (
    "namespace",
    "pod",
    "container",
    "pod_uid",
    "container_id",
    "job",
    "step",
    "workload",
    "user",
    "unit",
    "ray_job",
)
ROW = OwnerEnergyRow(
    gpu_uuid="GPU-1",
    gpu_instance_id=None,
    owner=build_slurm_owner("7"),
    part=EnergyUse.ACTIVE,
    method=ShareMethod.EXCLUSIVE,
    confidence=ShareConfidence.HIGH,
    energy_mj=5,
)
ESTIMATE = UncertainEnergy(
    energy_j=2.0, uncertainty_j=0.5, method=EnergyMeasurement.MIXED, seconds=9.0, uncounted_s=1.0
)
NOTHING = NodeEnergyReport(devices=(), owners=(), recent=(), anomalies=())


def sent(report, now_ns=0):
    """The answer as it arrives."""
    return codec.decode_message(
        GetNodeEnergyResponse, codec.encode_message(build_energy_response(report, now_ns=now_ns))
    )


def device(uuid, estimate=ESTIMATE):
    return DeviceEnergyTotals(gpu_uuid=uuid, total_mj=7, nobody_mj=(("ended", 3),), recent_s=0.0, estimate=estimate)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (UsageOwnerKind, messages.OwnerKind),
        (EnergyUse, messages.EnergyPart),
        (ShareMethod, messages.AttributionMethod),
        (ShareConfidence, messages.AttributionConfidence),
        (EnergyMeasurement, messages.EnergyMethod),
        (EnergyAnomalyKind, messages.AnomalyKind),
    ],
    ids=lambda enumeration: enumeration.__module__.rpartition(".")[2] + "." + enumeration.__name__,
)
def test_every_word_of_ours_is_one_of_the_contract(ours, theirs):
    assert {member.name for member in ours} == {member.name for member in theirs} - {"UNSPECIFIED"}


def test_the_contract_has_room_for_whatever_the_agent_keeps():
    assert accounts.ACCOUNTS_MOST <= messages.ENERGY_OWNERS_MOST
    assert SUBJECTS_MOST <= messages.ENERGY_ANOMALIES_MOST
    assert DEVICES_MOST <= messages.ENERGY_DEVICES_MOST
    assert {entry.name for entry in fields(UsageOwner)} == {entry.name for entry in fields(messages.EnergyOwner)}


def test_rows_arrive_as_they_were():
    subject = AnomalySubject(kind=EnergyAnomalyKind.STALLED, gpu_uuid="GPU-1", owner=ROW.owner, gpu_instance_id=3)
    anomaly = OngoingAnomaly(subject=subject, since_ns=10**9, since_wall_ns=-5, wasted_mj=11)
    nobody = replace(ROW, owner=UNALLOCATED, gpu_instance_id=0, part=EnergyUse.BARE_IDLE, energy_mj=2**60)
    report = NodeEnergyReport(devices=(device("GPU-1"),), owners=(ROW,), recent=(nobody,), anomalies=(anomaly,))
    answer = sent(report, now_ns=4 * 10**9)
    assert answer.status is messages.EnergyStatus.KNOWN
    (one,) = answer.devices
    assert (one.total_mj, one.unowned[0].reason, one.unowned[0].energy_mj) == (7, messages.UnownedReason.ENDED, 3)
    assert one.estimate == messages.EnergyEstimate(
        energy_j=2.0, uncertainty_j=0.5, method=messages.EnergyMethod.MIXED, seconds=9.0, uncounted_s=1.0
    )
    assert (answer.owners[0].owner.job, answer.owners[0].gpu_instance_id, answer.owners[0].energy_mj) == ("7", None, 5)
    # Slice 0 is not the whole device, and no float ever held the joules.
    assert (answer.recent[0].gpu_instance_id, answer.recent[0].energy_mj) == (0, 2**60)
    # A wall clock that was set before 1970 is no reason for silence.
    (told,) = answer.anomalies
    assert (told.kind, told.since_ns, told.lasted_s) == (messages.AnomalyKind.STALLED, 0, 3.0)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("größe.service", "größe.service"),
        ("a\nb\x1b[2J\x85.scope", "a?b?[2J?.scope"),
        ("\udcff\udcfe.scope", "??.scope"),
        ("a\u2028b\u202eb", "a?b?b"),
        ("x" * 255, "x" * 253),
    ],
)
def test_names_of_others_break_no_answer(name, shown):
    row = replace(ROW, owner=UsageOwner(kind=UsageOwnerKind.UNIT, unit=name))
    assert sent(replace(NOTHING, owners=(row,))).owners[0].owner.unit == shown


def test_where_there_is_no_room_the_gone_and_the_smallest_are_left_out():
    gone = [device(f"GPU-gone-{index}", None) for index in range(messages.ENERGY_DEVICES_MOST)]
    recent = tuple(replace(ROW, energy_mj=index) for index in range(messages.ENERGY_RECENT_MOST + 7))
    answer = sent(replace(NOTHING, devices=(*gone, device("GPU-here")), recent=recent))
    assert [one.gpu_uuid for one in answer.devices][:2] == ["GPU-here", "GPU-gone-0"]
    assert len(answer.devices) == messages.ENERGY_DEVICES_MOST
    assert min(row.energy_mj for row in answer.recent) == 7
    assert answer.rows_left_out == 8


def test_the_longest_answer_fits_into_a_message():
    long = replace(
        ROW, owner=UsageOwner(kind=UsageOwnerKind.POD, pid=2**31, **dict.fromkeys(NAMES, "x" * 300)), energy_mj=2**60
    )
    subject = AnomalySubject(
        kind=EnergyAnomalyKind.HELD_IDLE, gpu_uuid="G" * 128, owner=long.owner, gpu_instance_id=2**31
    )
    anomaly = OngoingAnomaly(subject=subject, since_ns=0, since_wall_ns=2**62, wasted_mj=2**60)
    report = NodeEnergyReport(
        devices=tuple(device(f"{'G' * 120}{index}") for index in range(messages.ENERGY_DEVICES_MOST)),
        owners=(replace(long, gpu_uuid="G" * 128),) * messages.ENERGY_OWNERS_MOST,
        recent=(replace(long, gpu_uuid="G" * 128),) * messages.ENERGY_RECENT_MOST,
        anomalies=(anomaly,) * messages.ENERGY_ANOMALIES_MOST,
    )
    data = codec.encode_message(build_energy_response(report, now_ns=10**9))
    assert codec.MESSAGE_BYTES_MOST / 2 < len(data) <= codec.MESSAGE_BYTES_MOST
