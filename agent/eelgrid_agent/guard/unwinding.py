"""What to write to put one device back as it was found.

Owns the rule that only a value of ours is ever undone. Must not write.

Theory. A device that shows one of our limits or profiles still is as we left
it, so that what the journal found is put back. A device that shows anything
else was changed by somebody since, whose setting it is now. After a boot or a
driver load nothing of ours can be left: limits, locks and profiles all die
with the driver. A lock of clocks cannot be read back; on the same driver it is
released.
"""

from dataclasses import dataclass

from eelgrid_agent.device import PowerSettings
from eelgrid_agent.guard.events import Cause, DeviceRecord, Origin, SetLimit, SetProfile, UnlockClocks, Write

__all__ = ["Unwinding", "shows", "unwind"]

# Nearer than this no write can bring a limit: NVML counts milliwatts.
EXACT_W = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwinding:
    """The writes in order, and in words what is put back and what is somebody else's now."""

    writes: tuple[Write, ...]
    detail: str
    foreign: str


def shows(value_w: float | None, ours_w: tuple[float, ...], tolerance_w: float) -> bool:
    """Whether the limit is one of ours, as far as a driver that rounds lets us know."""
    return value_w is not None and any(abs(value_w - ours) <= tolerance_w for ours in ours_w)


def unwind(record: DeviceRecord, settings: PowerSettings, origin: Origin, *, tolerance_w: float) -> Unwinding:
    """See the module."""
    if record.origin != origin:
        since = "the machine booted" if record.origin.boot_id != origin.boot_id else "the driver was loaded anew"
        return Unwinding(writes=(), detail=f"{since} and with it every setting of ours is gone", foreign="")
    uuid, writes, done, left = record.gpu_uuid, list[Write](), list[str](), list[str]()
    if record.limits_w and record.found_w is not None:
        now_w = settings.requested_w
        if now_w is not None and abs(now_w - record.found_w) <= EXACT_W:
            done.append(f"the power limit stands at {record.found_w:g} W as before")
        elif shows(now_w, record.limits_w, tolerance_w):
            writes.append(SetLimit(gpu_uuid=uuid, limit_w=record.found_w, cause=Cause.RESTORE))
            done.append(f"power limit back from {now_w:g} W to {record.found_w:g} W")
        else:
            ours = " or ".join(f"{ours:g}" for ours in record.limits_w)
            shown = "no limit" if now_w is None else f"{now_w:g} W"
            left.append(f"the power limit shows {shown} where ours was {ours} W: somebody else's, left alone")
    if record.clocks is not None:
        writes.append(UnlockClocks(gpu_uuid=uuid, cause=Cause.RESTORE))
        done.append("SM clocks unlocked")
    # Who may not set profiles is not told which one stands.
    is_untold = not settings.power_profiles
    if record.profiles and (is_untold or settings.power_profile != record.found_profile):
        if is_untold or settings.power_profile in record.profiles:
            writes.append(SetProfile(gpu_uuid=uuid, profile=record.found_profile, cause=Cause.RESTORE))
            done.append(f"power profile back from {settings.power_profile} to {record.found_profile}")
        else:
            left.append(f"power profile {settings.power_profile} is somebody else's, left alone")
    return Unwinding(writes=tuple(writes), detail="; ".join(done), foreign="; ".join(left))
