"""What the plan wants of each device, once those that work in step are held to one limit.

Owns the gang rule and hysteresis. Must not know devices.

Theory. A workload that spreads over devices goes at the pace of its slowest, so
a higher limit on the others only burns power waiting. Devices that share a
workload, also by way of a third, are one gang and get the lowest limit, the
lowest lock and no profile that another member was not given too. A limit that
moved by less than the hysteresis is no news, for the whole gang or for none of
it, or the gang would come apart by a few watts.
"""

from collections.abc import Iterable, Mapping

from eelgrid_agent.guard.events import Wish
from eelgrid_agent.guard.rules import GuardLimits
from eelgrid_protos.messages import Assignment, GpuSetting

__all__ = ["gangs_of", "wishes_of"]


def gangs_of(assignments: Iterable[Assignment], parent_of: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """For every device of a gang all its members, sorted."""
    gang_of: dict[str, set[str]] = {}
    by_workload: dict[str, set[str]] = {}
    for assignment in assignments:
        devices = {parent_of.get(uuid, uuid) for uuid in assignment.gpu_uuids}
        by_workload.setdefault(assignment.workload_id, set()).update(devices)
    for devices in by_workload.values():
        joined = set(devices)
        for uuid in devices:
            joined |= gang_of.get(uuid, set())
        for uuid in joined:
            gang_of[uuid] = joined
    return {uuid: tuple(sorted(members)) for uuid, members in gang_of.items() if len(members) > 1}


def wishes_of(
    settings: Iterable[GpuSetting], gangs: Mapping[str, tuple[str, ...]], before: Mapping[str, Wish],
    limits: GuardLimits,
) -> dict[str, Wish]:  # fmt: skip
    """What is wanted of each device; `before` are the wishes that stood."""
    by_uuid = {setting.gpu_uuid: setting for setting in settings}
    wishes: dict[str, Wish] = {}
    for uuid in by_uuid:
        if uuid in wishes:
            continue
        members = gangs.get(uuid, (uuid,))
        asked = [by_uuid[member] for member in members if member in by_uuid]
        limit_w = min((one.power_limit_w for one in asked if one.power_limit_w is not None), default=None)
        held = {before[member].limit_w if member in before else None for member in members}
        if len(held) == 1 and limit_w is not None:
            (held_w,) = held
            if held_w is not None and abs(held_w - limit_w) < limits.hysteresis_w:
                limit_w = held_w
        locks = [
            (one.sm_clock_min_mhz, one.sm_clock_max_mhz)
            for one in asked
            if one.sm_clock_min_mhz is not None and one.sm_clock_max_mhz is not None
        ]
        lock = (min(low for low, _ in locks), min(high for _, high in locks)) if locks else None
        profiles = {one.power_profile for one in asked} if len(asked) == len(members) else {None}
        for member in members:
            profile = next(iter(profiles)) if len(profiles) == 1 else None
            wishes[member] = Wish(limit_w=limit_w, clocks=lock, profile=profile)
    return wishes
