"""`energy` in plain text: an answer of GetNodeEnergy as lines for a terminal, for people and for grep.

On a terminal that is too narrow, the last column goes to a line of its own;
into a file or a pipe (`width` None) every row is one line. Joules are printed
to the millijoule, so that they can be added up. Knows messages and nothing of
how they came here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from eelgrid_protos.messages import (
    AttributionConfidence,
    AttributionMethod,
    DeviceEnergy,
    EnergyAnomaly,
    EnergyOwner,
    EnergyPart,
    EnergyStatus,
    GetNodeEnergyResponse,
    Inventory,
    OwnedEnergy,
)
from eelgrid_protos.plain import to_plain

__all__ = ["energy_lines"]

_STATUS = {
    EnergyStatus.NOT_YET: "nothing was looked at yet; ask again in a few seconds",
    EnergyStatus.NOT_KEPT: "this agent simulates several nodes and divides no energy; simulate one node alone",
    EnergyStatus.UNSPECIFIED: "the agent is newer than this command and says something that it does not know",
}
_PARTS = (EnergyPart.BARE_IDLE, EnergyPart.CONTEXT_IDLE, EnergyPart.ACTIVE)


@dataclass(slots=True)
class _Sum:
    """One owner on one place."""

    energy_mj: int = 0
    parts_mj: Counter[EnergyPart] = field(default_factory=Counter)
    methods_mj: Counter[AttributionMethod] = field(default_factory=Counter)
    confidences_mj: Counter[AttributionConfidence] = field(default_factory=Counter)


def energy_lines(answer: GetNodeEnergyResponse, inventory: Inventory, width: int | None = None) -> Iterator[str]:
    """Devices, owners with the most joules first, and anomalies."""
    kind = " (simulated)" if inventory.simulated else ""
    yield f"node {inventory.node_name}{kind}   joules since the agent began, up to its last look"
    if answer.status is not EnergyStatus.KNOWN:
        yield _STATUS[answer.status]
        return
    places = {gpu.uuid: str(gpu.index) for gpu in inventory.gpus}
    yield ""
    if not answer.devices:
        yield "no GPU"
    else:
        yield from _table(_DEVICES, [_device_row(one, answer.owners, places) for one in answer.devices], width)
    for device in answer.devices:
        if device.estimate is not None and device.estimate.uncounted_s > 0.0:
            lost = f"{device.estimate.uncounted_s:.0f} of {device.estimate.seconds:.0f} s"
            yield f"  GPU {_place(device.gpu_uuid, None, places)}: nobody measured {lost}; they are in no total"
    yield ""
    if answer.owners:
        yield from _table(_OWNERS, list(_owner_rows(answer.owners, places)), width)
    else:
        yield "no owner"
    yield ""
    if answer.anomalies:
        yield from _table(_ANOMALIES, [_anomaly_row(one, places) for one in answer.anomalies], width)
    else:
        yield "no anomaly"


# Headings; those of numbers stand to the right, as the numbers do.
_DEVICES = ("GPU", ">ENERGY J", ">+- J", "METHOD", ">SECONDS", ">OWNED J", "UNOWNED J", "UUID")
_OWNERS = ("GPU", ">ENERGY J", ">BARE IDLE J", ">CONTEXT IDLE J", ">ACTIVE J", "METHOD", "CONFIDENCE", "OWNER")
_ANOMALIES = ("ANOMALY", "GPU", ">FOR S", ">WASTED J", "OWNER")


def _device_row(device: DeviceEnergy, owners: Iterable[OwnedEnergy], places: Mapping[str, str]) -> tuple[str, ...]:
    owned_mj = sum(row.energy_mj for row in owners if row.gpu_uuid == device.gpu_uuid)
    unowned = [f"{_joules(one.energy_mj)} {one.reason.name.lower()}" for one in device.unowned if one.energy_mj]
    told = device.estimate
    doubt = ("-", "-", "-") if told is None else (
        f"{told.uncertainty_j:.1f}", told.method.name.lower(), f"{told.seconds:.0f}",
    )  # fmt: skip
    return (
        _place(device.gpu_uuid, None, places), _joules(device.total_mj), *doubt, _joules(owned_mj),
        ", ".join(unowned) or "-", device.gpu_uuid,
    )  # fmt: skip


def _owner_rows(rows: Iterable[OwnedEnergy], places: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """One row for each owner on each place; of methods and confidences those by which most of it was found."""
    sums: dict[tuple[EnergyOwner, str, int | None], _Sum] = {}
    for row in rows:
        one = sums.setdefault((row.owner, row.gpu_uuid, row.gpu_instance_id), _Sum())
        one.energy_mj += row.energy_mj
        one.parts_mj[row.part] += row.energy_mj
        one.methods_mj[row.method] += row.energy_mj
        one.confidences_mj[row.confidence] += row.energy_mj
    for (owner, uuid, instance), one in sorted(sums.items(), key=lambda item: -item[1].energy_mj):
        yield (
            _place(uuid, instance, places), _joules(one.energy_mj),
            *(_joules(one.parts_mj[part]) for part in _PARTS),
            _most(one.methods_mj), _most(one.confidences_mj), _title(owner),
        )  # fmt: skip


def _most(energies_mj: Mapping[AttributionMethod, int] | Mapping[AttributionConfidence, int]) -> str:
    return max(energies_mj.items(), key=lambda item: item[1])[0].name.lower()


def _anomaly_row(anomaly: EnergyAnomaly, places: Mapping[str, str]) -> tuple[str, ...]:
    return (
        anomaly.kind.name.lower(), _place(anomaly.gpu_uuid, anomaly.gpu_instance_id, places),
        f"{anomaly.lasted_s:.0f}", _joules(anomaly.wasted_mj), _title(anomaly.owner),
    )  # fmt: skip


def _place(gpu_uuid: str, instance: int | None, places: Mapping[str, str]) -> str:
    """A device's index and, after a colon, its GPU instance; a device that left has no index."""
    index = places.get(gpu_uuid, "gone")
    return index if instance is None else f"{index}:{instance}"


def _joules(energy_mj: int) -> str:
    """Without a float in between, which has no room for a large total's millijoules."""
    return f"{energy_mj // 1000}.{energy_mj % 1000:03}"


def _title(owner: EnergyOwner) -> str:
    """What it is and every name that is known."""
    names = {name: value for name, value in to_plain(owner, brief=True).items() if name != "kind"}
    return " ".join([owner.kind.name.lower(), *(f"{name}={value}" for name, value in names.items())])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Columns side by side; where they do not fit, the last one goes below its row."""
    names = [name.removeprefix(">") for name in head]
    sizes = [max(len(row[column]) for row in (names, *rows)) for column in range(len(head))]
    below = width is not None and sum(sizes) + 2 * len(sizes) > width
    beside = len(head) - below
    for row in (names, *rows):
        cells = [
            cell.rjust(size) if name.startswith(">") else cell.ljust(size)
            for name, cell, size in zip(head[:beside], row[:beside], sizes[:beside], strict=True)
        ]
        yield "  " + "  ".join(cells).rstrip()
        if below:
            yield f"      {row[-1]}"
