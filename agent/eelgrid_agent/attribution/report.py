"""One node's attributed energy as rows, for whoever asks the node.

Owns the shape of the answer. Must not know how it is sent. Rows of owners are
totals since the agent began to count; rows of processes are of the last
interval only, since process ids end and are used again.
"""

from dataclasses import dataclass

from eelgrid_agent.attribution.anomalies import Anomaly
from eelgrid_agent.attribution.attributor import Attribution
from eelgrid_agent.attribution.owner import Owner
from eelgrid_agent.attribution.shares import Confidence, Method, Part
from eelgrid_agent.attribution.uncertainty import EnergyEstimate

__all__ = ["DeviceEnergy", "EnergyReport", "EnergyRow", "report_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyRow:
    """Joules of one owner, or of one process of it, on one place."""

    gpu_uuid: str
    gpu_instance_id: int | None
    owner: Owner
    part: Part
    method: Method
    confidence: Confidence
    energy_mj: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEnergy:
    """One device: what nobody owns, by reason; its owners' rows and these add up to `total_mj`."""

    gpu_uuid: str
    total_mj: int
    nobody_mj: tuple[tuple[str, int], ...]
    # Of the interval that `EnergyReport.recent` is about; zero where none was closed.
    recent_s: float
    estimate: EnergyEstimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReport:
    """One node."""

    devices: tuple[DeviceEnergy, ...]
    owners: tuple[EnergyRow, ...]
    recent: tuple[EnergyRow, ...]
    anomalies: tuple[Anomaly, ...]


def report_of(found: Attribution) -> EnergyReport:
    """The report of one attribution."""
    owners = tuple(
        EnergyRow(
            gpu_uuid=account.gpu_uuid, gpu_instance_id=account.gpu_instance_id, owner=account.owner,
            part=account.part, method=account.method, confidence=account.confidence, energy_mj=energy_mj,
        )
        for account, energy_mj in found.accounts.items()
    )  # fmt: skip
    recent = tuple(
        EnergyRow(
            gpu_uuid=uuid, gpu_instance_id=share.gpu_instance_id, owner=share.owner, part=share.part,
            method=share.method, confidence=share.confidence, energy_mj=share.energy_mj,
        )
        for uuid, shares in found.shares.items()
        for share in shares
    )  # fmt: skip
    owned: dict[str, int] = {}
    for row in owners:
        owned[row.gpu_uuid] = owned.get(row.gpu_uuid, 0) + row.energy_mj
    devices = tuple(
        DeviceEnergy(
            gpu_uuid=uuid, total_mj=owned.get(uuid, 0) + sum(parts.values()), nobody_mj=tuple(parts.items()),
            recent_s=found.elapsed_s.get(uuid, 0.0), estimate=found.estimates.get(uuid),
        )
        for uuid, parts in found.nobody.items()
    )  # fmt: skip
    return EnergyReport(devices=devices, owners=owners, recent=recent, anomalies=found.anomalies)
