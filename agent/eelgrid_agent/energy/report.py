"""Energy report of one node: rows by owner, and the GetNodeEnergy response built from them.

Names come from other programs (pods, units, jobs) and may hold what the contract forbids: unprintable characters and
bytes that are not text are shown as "?", and names that are too long are cut. Rows stay apart as the accounts keep
them, so nothing is lost where two names then look alike.
"""

from collections.abc import Sequence

from eelgrid_agent.energy.accounts import (
    EnergyAccount,
    EnergyShare,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
)
from eelgrid_agent.energy.anomalies import OngoingAnomaly
from eelgrid_agent.energy.attributor import Attribution
from eelgrid_agent.energy.metering import UncertainEnergy
from eelgrid_protos import messages as wire
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerEnergyRow:
    """Joules of one owner, or of one process of it, on one place."""

    gpu_uuid: str
    gpu_instance_id: int | None
    owner: UsageOwner
    part: EnergyUse
    method: ShareMethod
    confidence: ShareConfidence
    energy_mj: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergyTotals:
    """One device: energy without an owner, by reason; this and its owners' rows add up to `total_mj`."""

    gpu_uuid: str
    total_mj: int
    nobody_mj: tuple[tuple[str, int], ...]
    # Of the interval that `EnergyReport.recent` is about; zero where none was closed.
    recent_s: float
    estimate: UncertainEnergy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnergyReport:
    """One node."""

    devices: tuple[DeviceEnergyTotals, ...]
    owners: tuple[OwnerEnergyRow, ...]
    recent: tuple[OwnerEnergyRow, ...]
    anomalies: tuple[OngoingAnomaly, ...]


def build_report(found: Attribution) -> NodeEnergyReport:
    """The report of one attribution."""
    owners = tuple(_owner_row(account.gpu_uuid, account, energy_mj) for account, energy_mj in found.accounts.items())
    recent = tuple(
        _owner_row(uuid, share, share.energy_mj) for uuid, shares in found.shares.items() for share in shares
    )
    owned: dict[str, int] = {}
    for row in owners:
        owned[row.gpu_uuid] = owned.get(row.gpu_uuid, 0) + row.energy_mj
    devices = tuple(
        DeviceEnergyTotals(
            gpu_uuid=uuid,
            total_mj=owned.get(uuid, 0) + sum(parts.values()),
            nobody_mj=tuple(parts.items()),
            recent_s=found.elapsed_s.get(uuid, 0.0),
            estimate=found.estimates.get(uuid),
        )
        for uuid, parts in found.nobody.items()
    )
    return NodeEnergyReport(devices=devices, owners=owners, recent=recent, anomalies=found.anomalies)


def _owner_row(gpu_uuid: str, charged: EnergyAccount | EnergyShare, energy_mj: int) -> OwnerEnergyRow:
    return OwnerEnergyRow(
        gpu_uuid=gpu_uuid,
        gpu_instance_id=charged.gpu_instance_id,
        owner=charged.owner,
        part=charged.part,
        method=charged.method,
        confidence=charged.confidence,
        energy_mj=energy_mj,
    )


_LABEL_MOST = 253


def build_energy_response(report: NodeEnergyReport, *, now_ns: int) -> wire.GetNodeEnergyResponse:
    """The report within the bounds of the contract; `now_ns` is of the clock of the looks."""
    # A sort keeps the order of equals: devices that are there, then those that are gone.
    devices = sorted(report.devices, key=lambda device: device.estimate is None)
    recent = _largest(report.recent, wire.ENERGY_RECENT_MOST)
    shown = devices[: wire.ENERGY_DEVICES_MOST]
    return wire.GetNodeEnergyResponse(
        devices=tuple(map(_device, shown)),
        owners=tuple(map(_row, report.owners)),
        recent=tuple(map(_row, recent)),
        anomalies=tuple(_anomaly(one, now_ns) for one in report.anomalies),
        status=wire.EnergyStatus.KNOWN,
        rows_left_out=len(devices) - len(shown) + len(report.recent) - len(recent),
    )


def _largest(rows: tuple[OwnerEnergyRow, ...], most: int) -> Sequence[OwnerEnergyRow]:
    return rows if len(rows) <= most else sorted(rows, key=lambda row: -row.energy_mj)[:most]


def _row(row: OwnerEnergyRow) -> wire.OwnedEnergy:
    return wire.OwnedEnergy(
        gpu_uuid=row.gpu_uuid,
        gpu_instance_id=row.gpu_instance_id,
        owner=build_owner_message(row.owner),
        part=wire.EnergyPart[row.part.name],
        method=wire.AttributionMethod[row.method.name],
        confidence=wire.AttributionConfidence[row.confidence.name],
        energy_mj=row.energy_mj,
    )


def _device(device: DeviceEnergyTotals) -> wire.DeviceEnergy:
    unowned = tuple(
        wire.UnownedEnergy(reason=wire.UnownedReason[reason.upper()], energy_mj=energy_mj)
        for reason, energy_mj in device.nobody_mj
    )
    return wire.DeviceEnergy(
        gpu_uuid=device.gpu_uuid,
        total_mj=device.total_mj,
        unowned=unowned,
        recent_s=device.recent_s,
        estimate=None if device.estimate is None else _estimate(device.estimate),
    )


def _estimate(estimate: UncertainEnergy) -> wire.EnergyEstimate:
    return wire.EnergyEstimate(
        energy_j=estimate.energy_j,
        uncertainty_j=estimate.uncertainty_j,
        method=wire.EnergyMethod[estimate.method.name],
        seconds=estimate.seconds,
        uncounted_s=estimate.uncounted_s,
    )


def _anomaly(anomaly: OngoingAnomaly, now_ns: int) -> wire.EnergyAnomaly:
    subject = anomaly.subject
    return wire.EnergyAnomaly(
        kind=wire.AnomalyKind[subject.kind.name],
        gpu_uuid=subject.gpu_uuid,
        gpu_instance_id=subject.gpu_instance_id,
        owner=build_owner_message(subject.owner),
        since_ns=max(0, anomaly.since_wall_ns),
        lasted_s=max(0, now_ns - anomaly.since_ns) / 1e9,
        wasted_mj=anomaly.wasted_mj,
    )


def build_owner_message(owner: UsageOwner) -> wire.EnergyOwner:
    """An owner as the contract has it."""
    return wire.EnergyOwner(
        kind=wire.OwnerKind[owner.kind.name],
        namespace=_label(owner.namespace),
        pod=_label(owner.pod),
        container=_label(owner.container),
        pod_uid=_label(owner.pod_uid),
        container_id=_label(owner.container_id),
        job=_label(owner.job),
        step=_label(owner.step),
        workload=_label(owner.workload),
        user=_label(owner.user),
        unit=_label(owner.unit),
        ray_job=_label(owner.ray_job),
        pid=owner.pid,
    )


def _label(text: str) -> str:
    if text.isascii() and text.isprintable() and len(text) <= _LABEL_MOST:
        return text
    return "".join(character if character.isprintable() else "?" for character in text[:_LABEL_MOST])
