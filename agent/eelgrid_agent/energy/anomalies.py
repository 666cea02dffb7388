"""Anomalies between the holder of a device and its users: what is wrong, since when, and what it costs.

Each of the five anomalies is a condition on one sample. It counts from the first sample at which it held, is reported
after it lasted long enough, and ends at the first sample at which it does not hold. A condition that cannot be
evaluated (activity of a slice without a sensor) neither starts nor ends an anomaly. Wasted joules are the shares of the
subject that the anomaly is about. Time is an argument.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from eelgrid_agent.energy.accounts import EnergyShare, EnergyUse, UsageOwner, UsageOwnerKind
from eelgrid_agent.energy.split import DeviceObservation, IdlePower

# Below this a device is idle: drivers report a per cent or two for housekeeping.
ACTIVE_RATIO = 0.02
# A collective that waits spins: everything busy, and power near that of an idle device with its clocks up.
STALLED_UTILIZATION = 0.95
STALLED_POWER_SHARE = 0.25
SUBJECTS_MOST = 1024


class EnergyAnomalyKind(Enum):
    """The kind of an anomaly."""

    # Allocated, and nothing is at work.
    HELD_IDLE = "held_idle"
    # A context is open, and nothing is at work.
    IDLE_CONTEXT = "idle_context"
    # Somebody uses what nobody gave them.
    PROCESS_WITHOUT_ALLOCATION = "process_without_allocation"
    # Somebody holds what they do not even open.
    ALLOCATION_WITHOUT_PROCESS = "allocation_without_process"
    # Fully utilised at low power: a collective that waits for a rank that does not come.
    STALLED = "stalled"


# How long each must last before it is told: model loading, restarts and checkpoints are no anomalies.
_LASTS_S: Mapping[EnergyAnomalyKind, float] = {
    EnergyAnomalyKind.HELD_IDLE: 300.0,
    EnergyAnomalyKind.IDLE_CONTEXT: 300.0,
    EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION: 60.0,
    EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS: 120.0,
    EnergyAnomalyKind.STALLED: 120.0,
}
_WASTES: Mapping[EnergyAnomalyKind, frozenset[EnergyUse]] = {
    EnergyAnomalyKind.HELD_IDLE: frozenset(EnergyUse),
    EnergyAnomalyKind.IDLE_CONTEXT: frozenset({EnergyUse.CONTEXT_IDLE}),
    EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION: frozenset({EnergyUse.CONTEXT_IDLE, EnergyUse.ACTIVE}),
    EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS: frozenset(EnergyUse),
    EnergyAnomalyKind.STALLED: frozenset({EnergyUse.ACTIVE}),
}

# What is said of an allocation, and not of a process.
_OF_HOLDERS = frozenset({EnergyAnomalyKind.HELD_IDLE, EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS})


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalySubject:
    """The owner, the device or instance, and the kind of an anomaly."""

    kind: EnergyAnomalyKind
    gpu_uuid: str
    owner: UsageOwner
    gpu_instance_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingAnomaly:
    """One anomaly that has lasted; clocks as in the look that began it."""

    subject: AnomalySubject
    since_ns: int
    since_wall_ns: int
    wasted_mj: int


@dataclass(slots=True)
class _Running:
    since_ns: int
    since_wall_ns: int
    wasted_mj: int = 0
    seen_ns: int = 0


class AnomalyDetector:
    """Detects the anomalies of one node; `hurry` divides how long each must last."""

    def __init__(self, lasts_s: Mapping[EnergyAnomalyKind, float] = _LASTS_S, *, hurry: float = 1.0) -> None:
        self._lasts_s = {kind: seconds / hurry for kind, seconds in lasts_s.items()}
        self._running: dict[AnomalySubject, _Running] = {}

    def observe(
        self,
        gpu_uuid: str,
        glance: DeviceObservation,
        *,
        shares: Iterable[EnergyShare],
        allocations_known: bool,
        wall_ns: int,
        mean_power_w: float | None,
        busy_w: float | None,
        idle: IdlePower,
    ) -> None:
        """One look at one device and what it was charged since the look before; `busy_w` is its full power."""
        spent = tuple(shares)
        holding = _merge_conditions(_conditions(glance, allocations_known=allocations_known))
        holding.update(_find_stalls(glance, mean_power_w, busy_w, idle))
        subjects = {
            AnomalySubject(kind=kind, gpu_uuid=gpu_uuid, owner=owner, gpu_instance_id=place): holds
            for (kind, owner, place), holds in holding.items()
        }
        for subject in [one for one in self._running if one.gpu_uuid == gpu_uuid]:
            if subjects.get(subject, False) is False:
                del self._running[subject]
        for subject, holds in subjects.items():
            running = self._running.get(subject)
            if running is not None:
                running.wasted_mj += _wasted_energy_mj(subject, spent)
                running.seen_ns = glance.monotonic_ns
            elif holds and len(self._running) < SUBJECTS_MOST:
                # The interval before this look is not known to be wasted.
                self._running[subject] = _Running(glance.monotonic_ns, wall_ns, seen_ns=glance.monotonic_ns)

    def forget_gpus(self, gpu_uuids: frozenset[str]) -> None:
        """Devices that are gone have no anomalies; those named stay."""
        for subject in [one for one in self._running if one.gpu_uuid not in gpu_uuids]:
            del self._running[subject]

    def list_anomalies(self) -> tuple[OngoingAnomaly, ...]:
        """Those that have lasted long enough, the longest first."""
        found = [
            OngoingAnomaly(
                subject=subject,
                since_ns=running.since_ns,
                since_wall_ns=running.since_wall_ns,
                wasted_mj=running.wasted_mj,
            )
            for subject, running in self._running.items()
            if running.seen_ns - running.since_ns >= self._lasts_s[subject.kind] * 1e9
        ]
        return tuple(sorted(found, key=lambda anomaly: anomaly.since_ns))


_Key = tuple[EnergyAnomalyKind, UsageOwner, int | None]
_Condition = tuple[_Key, bool | None]


def _merge_conditions(conditions: Iterable[_Condition]) -> dict[_Key, bool | None]:
    """One answer for an owner with several processes on a place: one at work is enough, and so is one intruder."""
    found: dict[_Key, bool | None] = {}
    for key, holds in conditions:
        decides = key[0] is EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION
        before = found.get(key, holds)
        if decides in (before, holds):
            found[key] = decides
        else:
            found[key] = before if before == holds else None
    return found


def _conditions(glance: DeviceObservation, *, allocations_known: bool) -> Iterable[_Condition]:
    """Each condition and whether it holds; None is what nothing can tell."""
    holders = glance.holders
    for claim in glance.claims:
        place = claim.gpu_instance_id
        working = _working(glance, place)
        opened = None if holders is None else any(place in (None, one.gpu_instance_id) for one in holders)
        yield (EnergyAnomalyKind.HELD_IDLE, claim.owner, place), None if working is None else not working
        yield (EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS, claim.owner, place), None if opened is None else not opened
    for holder in holders or ():
        place = holder.gpu_instance_id
        working = _holder_working(glance, place, holder.sm_ratio)
        owner = holder.owner.account()
        yield (EnergyAnomalyKind.IDLE_CONTEXT, owner, place), None if working is None else not working
        if allocations_known and not holder.mps_server:
            claims = [claim for claim in glance.claims if claim.gpu_instance_id in (None, place)]
            # What only a UID names cannot be told from what only a name names.
            covered = any(claim.owner.covers(holder.owner) for claim in claims)
            nameless = not holder.owner.pod and any(claim.owner.kind is holder.owner.kind for claim in claims)
            # A plan knows workloads and no processes: whoever is on its device is taken to be its own.
            placed = any(claim.owner.kind is UsageOwnerKind.WORKLOAD for claim in claims)
            unknown = (nameless and not holder.owner.job) or placed
            holds = False if covered else None if unknown else True
            yield (EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION, owner, place), holds


def _working(glance: DeviceObservation, place: int | None) -> bool | None:
    """Whether anything is at work on a place; no context is no work."""
    if glance.holders is not None and not any(place in (None, one.gpu_instance_id) for one in glance.holders):
        return False
    slices = [one for one in glance.slices if place in (None, one.gpu_instance_id)]
    told = [one.activity for one in slices if one.activity is not None]
    if any(activity > ACTIVE_RATIO for activity in told):
        return True
    whole = all(one.gpu_instance_id is None for one in glance.slices)
    if whole and glance.utilization is not None:
        return glance.utilization > ACTIVE_RATIO
    return False if told and len(told) == len(slices) else None


def _holder_working(glance: DeviceObservation, place: int | None, sm_ratio: float | None) -> bool | None:
    """Whether one context is at work: by its own ratio where it has one, else by its place."""
    if sm_ratio is not None and sm_ratio > ACTIVE_RATIO:
        return True
    # Processes, of which one that cannot be inspected may be listed for several owners.
    others = {one.pid for one in glance.holders or () if one.gpu_instance_id == place}
    if len(others) > 1 and sm_ratio is not None:
        return False
    working = _working(glance, place)
    return None if working and len(others) > 1 else working


def _find_stalls(
    glance: DeviceObservation, mean_power_w: float | None, busy_w: float | None, idle: IdlePower
) -> Mapping[_Key, bool | None]:
    """Only of a whole device: a slice has no power."""
    if mean_power_w is None or busy_w is None or glance.utilization is None or not glance.holders:
        return {}
    floor_w = idle.bare_w + idle.context_w
    low = mean_power_w < floor_w + STALLED_POWER_SHARE * max(0.0, busy_w - floor_w)
    holds = low and glance.utilization >= STALLED_UTILIZATION
    return {(EnergyAnomalyKind.STALLED, one.owner.account(), one.gpu_instance_id): holds for one in glance.holders}


def _wasted_energy_mj(subject: AnomalySubject, shares: Iterable[EnergyShare]) -> int:
    account = subject.owner.account()
    return sum(
        share.energy_mj
        for share in shares
        if share.part in _WASTES[subject.kind]
        and account == _charged_account(share.owner, subject)
        and subject.gpu_instance_id in (None, share.gpu_instance_id)
    )


def _charged_account(owner: UsageOwner, subject: AnomalySubject) -> UsageOwner:
    """Whose waste it is: what is held idle is the holder's, whichever Ray job of it has the contexts."""
    account = owner.account()
    return replace(account, ray_job=subject.owner.ray_job) if subject.kind in _OF_HOLDERS else account
