"""A node's energy report as the answer of NodeService.GetNodeEnergy.

Owns the translation, the bounds of the answer and what goes where there is no
room: of devices those that are gone, of the last interval the smallest rows.
Must not know who asks; the time is an argument.

Theory. Names come from other programs (pods, units, jobs) and may hold what the
contract forbids: characters that are not printed and bytes that are no text
are shown as "?", and what is too long is cut. Rows stay apart as the ledger
keeps them, so nothing is lost where two names then look alike.
"""

from collections.abc import Sequence

from eelgrid_agent.attribution.anomalies import Anomaly
from eelgrid_agent.attribution.owner import Owner
from eelgrid_agent.attribution.report import DeviceEnergy, EnergyReport, EnergyRow
from eelgrid_agent.attribution.uncertainty import EnergyEstimate
from eelgrid_protos import messages as wire

__all__ = ["energy_answer", "shown_owner"]

_LABEL_MOST = 253


def energy_answer(report: EnergyReport, *, now_ns: int) -> wire.GetNodeEnergyResponse:
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


def _largest(rows: tuple[EnergyRow, ...], most: int) -> Sequence[EnergyRow]:
    return rows if len(rows) <= most else sorted(rows, key=lambda row: -row.energy_mj)[:most]


def _row(row: EnergyRow) -> wire.OwnedEnergy:
    return wire.OwnedEnergy(
        gpu_uuid=row.gpu_uuid, gpu_instance_id=row.gpu_instance_id, owner=shown_owner(row.owner),
        part=wire.EnergyPart[row.part.name], method=wire.AttributionMethod[row.method.name],
        confidence=wire.AttributionConfidence[row.confidence.name], energy_mj=row.energy_mj,
    )  # fmt: skip


def _device(device: DeviceEnergy) -> wire.DeviceEnergy:
    unowned = tuple(
        wire.UnownedEnergy(reason=wire.UnownedReason[reason.upper()], energy_mj=energy_mj)
        for reason, energy_mj in device.nobody_mj
    )
    return wire.DeviceEnergy(
        gpu_uuid=device.gpu_uuid, total_mj=device.total_mj, unowned=unowned, recent_s=device.recent_s,
        estimate=None if device.estimate is None else _estimate(device.estimate),
    )  # fmt: skip


def _estimate(estimate: EnergyEstimate) -> wire.EnergyEstimate:
    return wire.EnergyEstimate(
        energy_j=estimate.energy_j, uncertainty_j=estimate.uncertainty_j,
        method=wire.EnergyMethod[estimate.method.name], seconds=estimate.seconds, uncounted_s=estimate.uncounted_s,
    )  # fmt: skip


def _anomaly(anomaly: Anomaly, now_ns: int) -> wire.EnergyAnomaly:
    subject = anomaly.subject
    return wire.EnergyAnomaly(
        kind=wire.AnomalyKind[subject.kind.name], gpu_uuid=subject.gpu_uuid, gpu_instance_id=subject.gpu_instance_id,
        owner=shown_owner(subject.owner), since_ns=max(0, anomaly.since_wall_ns),
        lasted_s=max(0, now_ns - anomaly.since_ns) / 1e9, wasted_mj=anomaly.wasted_mj,
    )  # fmt: skip


def shown_owner(owner: Owner) -> wire.EnergyOwner:
    """An owner as the contract has it."""
    return wire.EnergyOwner(
        kind=wire.OwnerKind[owner.kind.name],
        namespace=_label(owner.namespace), pod=_label(owner.pod), container=_label(owner.container),
        pod_uid=_label(owner.pod_uid), container_id=_label(owner.container_id), job=_label(owner.job),
        step=_label(owner.step), workload=_label(owner.workload), user=_label(owner.user), unit=_label(owner.unit),
        ray_job=_label(owner.ray_job), pid=owner.pid,
    )  # fmt: skip


def _label(text: str) -> str:
    if text.isascii() and text.isprintable() and len(text) <= _LABEL_MOST:
        return text
    return "".join(character if character.isprintable() else "?" for character in text[:_LABEL_MOST])
