"""The watchdog of driver processes: pure rules for blame, isolation, probes and restarts.

Owns the policy and nothing else: no process, no clock, no device. Devices are
known by their place in the driver's enumeration, since a device that hangs
before it was listed has no other name yet.

Theory. NVML has no deadlines, and a thread in an uninterruptible ioctl cannot
be ended, so the driver is asked by a child process that can be left behind.
One child asks all devices. A device that is being asked when a deadline
passes, or when the child dies, is set apart at once: the next child passes it
over, so that the other devices miss one look at most. A device apart is asked
by a probe, a child of its own. One answer brings it back; a probe that hangs
doubles the wait for the next. Every time that the device hangs the common
child again, its first wait is `again_factor` times the last, up to a bound, and
only a long time without a hang forgives it. While a child that it hung still
cannot be ended, it is not asked at all: it has not come back.

Starts are bounded. Where the blame fell on a device, the next start is free:
the growing waits of devices bound these. Otherwise the first is free and each
further one within `steady_s` waits twice as long as the one before. Children that the
kernel cannot end are counted; at `left_behind_most` nothing is started any
more, and probes stop earlier, so that the common child has the last places.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogLimits:
    """The bounds of the theory above."""

    probe_first_s: float = 1.0
    probe_most_s: float = 600.0
    again_factor: float = 4.0
    forgive_s: float = 1800.0
    restart_first_s: float = 0.5
    restart_most_s: float = 60.0
    steady_s: float = 60.0
    left_behind_most: int = 6
    left_behind_for_probes: int = 4


@dataclass(slots=True)
class _Apart:
    """A device that is asked by probes only."""

    due_s: float
    wait_s: float


class DriverWatchdog:
    """See the module. Moments are monotonic seconds."""

    def __init__(self, limits: WatchdogLimits | None = None) -> None:
        self._limits = limits or WatchdogLimits()
        self._strikes: dict[int, int] = {}
        self._struck_s: dict[int, float] = {}
        self._apart: dict[int, _Apart] = {}
        # Children that cannot be ended, by process id, and the device that each was asking.
        self._left_behind: dict[int, int | None] = {}
        self._failures = 0
        self._failed_s = 0.0
        self._start_s = 0.0
        self.restarts_total = 0
        self.hangs_total = 0

    @property
    def isolated_devices(self) -> frozenset[int]:
        """Devices that the common child passes over."""
        return frozenset(self._apart)

    @property
    def unkillable_processes(self) -> frozenset[int]:
        """Process ids of children that cannot be ended."""
        return frozenset(self._left_behind)

    def on_failure(self, device: int | None, now_s: float, *, unending: int | None = None) -> None:
        """The common child hung or died, asking this device if any; `unending` is its process id if it is still there."""
        self.hangs_total += 1
        self.restarts_total += 1
        if unending is not None:
            self._left_behind[unending] = device
        if device is not None:
            self._strike(device, now_s)
            self._start_s = now_s
            return
        if now_s - self._failed_s > self._limits.steady_s:
            self._failures = 0
        self._failures, self._failed_s = self._failures + 1, now_s
        if self._failures == 1:
            self._start_s = now_s
        else:
            wait_s = self._limits.restart_first_s * 2.0 ** min(self._failures - 2, 32)
            self._start_s = now_s + min(wait_s, self._limits.restart_most_s)

    def start_in_s(self, now_s: float) -> float | None:
        """How long until the common child may start; None while too many are left behind."""
        if len(self._left_behind) >= self._limits.left_behind_most:
            return None
        return max(0.0, self._start_s - now_s)

    def on_answers(self, devices: Iterable[int], now_s: float) -> None:
        """Devices that answered; hangs of long ago are forgiven."""
        if not self._strikes:
            return
        for device in devices:
            if device in self._strikes and now_s - self._struck_s[device] > self._limits.forgive_s:
                del self._strikes[device], self._struck_s[device]

    def probe_due(self, now_s: float) -> int | None:
        """The device apart that is to be asked now, longest due first."""
        if len(self._left_behind) >= self._limits.left_behind_for_probes:
            return None
        stuck = set(self._left_behind.values())
        due = [(state.due_s, device) for device, state in self._apart.items() if device not in stuck]
        return min(due)[1] if due and min(due)[0] <= now_s else None

    def on_probe_failure(self, device: int, now_s: float, *, unending: int | None = None) -> None:
        """The probe hung or died."""
        self.hangs_total += 1
        if unending is not None:
            self._left_behind[unending] = device
        state = self._apart.get(device)
        if state is not None:
            state.wait_s = min(2.0 * state.wait_s, self._limits.probe_most_s)
            state.due_s = now_s + state.wait_s

    def on_probe_cancelled(self, device: int, now_s: float, *, unending: int | None = None) -> None:
        """The probe was ended before it said anything; the device is asked again after the same wait."""
        if unending is not None:
            self._left_behind[unending] = device
        state = self._apart.get(device)
        if state is not None:
            state.due_s = now_s + state.wait_s

    def on_probe_answer(self, device: int) -> None:
        """The device answers again and goes back among the others."""
        self._apart.pop(device, None)

    def on_process_exit(self, process: int, now_s: float) -> None:
        """A child that was left behind has ended, so its device may answer."""
        device = self._left_behind.pop(process, None)
        state = None if device is None else self._apart.get(device)
        if state is not None:
            state.due_s = now_s

    def forget_devices(self) -> None:
        """The enumeration is another: no hang stands for a device any more."""
        self._strikes.clear()
        self._struck_s.clear()
        self._apart.clear()
        self._left_behind = dict.fromkeys(self._left_behind)

    def _strike(self, device: int, now_s: float) -> None:
        """Sets the device apart, for longer each time."""
        limits, strikes = self._limits, self._strikes.get(device, 0)
        wait_s = min(limits.probe_first_s * limits.again_factor ** min(strikes, 32), limits.probe_most_s)
        self._strikes[device], self._struck_s[device] = strikes + 1, now_s
        self._apart[device] = _Apart(now_s + wait_s, wait_s)
