"""What a caller with rights does to a node's devices, whichever way it came.

The direct way and the simulated library both end here, so that they cannot
differ in what happens: rights are checked, a refusal that a test asked for is
given, the device changes, and the change is announced. Only the translation of
`Refused` is theirs. Whether the device answers at all is asked before.

It has no clock of its own and never waits; `pause` is what somebody puts in.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from eelgrid_agent.device import DeviceEventKind
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.mig import Activation, Refusal, Refused, SimCompute, SimInstance
from eelgrid_protos.messages import AccessLevel

__all__ = ["Act", "Announcement", "Operations"]

# What nobody fetches is lost from the front, as an event set that nobody waits on loses it.
_ANNOUNCEMENTS_MOST = 1024
# Volta was the first part whose clocks can be locked, Blackwell the first with workload power profiles.
_UNLOCKABLE = frozenset({"pascal"})
_PROFILED = frozenset({"blackwell"})
_PROFILES = tuple(range(15))
_PROFILES_SINCE = 570


class Act(Enum):
    """What can be refused on demand."""

    SET_MODE = "set mode"
    CREATE_INSTANCE = "create instance"
    DESTROY_INSTANCE = "destroy instance"
    CREATE_COMPUTE = "create compute instance"
    DESTROY_COMPUTE = "destroy compute instance"
    SET_POWER = "set power limit"
    SET_CLOCKS = "set clocks"
    SET_PROFILE = "set power profile"


class Announcement(NamedTuple):
    """What the driver tells whoever listens; `code` is the XID or the recovery action."""

    kind: DeviceEventKind
    uuid: str
    code: int = 0
    gi: int | None = None


class Operations:
    """One node's. `rights` are those of the caller; `pause` is what every call takes first, by its name."""

    def __init__(self, monotonic_ns: Callable[[], int], *, branch: int) -> None:
        self.rights = AccessLevel.ROOT
        self.pause: Callable[[str], None] | None = None
        self.announcements: deque[Announcement] = deque(maxlen=_ANNOUNCEMENTS_MOST)
        self._monotonic_ns = monotonic_ns
        self._branch = branch
        self._refusals: dict[tuple[str, Act], deque[Refusal]] = {}

    def refuse_next(self, uuid: str, act: Act, why: Refusal, times: int = 1) -> None:
        """The next such acts on this device are refused."""
        self._refusals.setdefault((uuid, act), deque()).extend([why] * times)

    def may(self, level: AccessLevel) -> bool:
        """Whether the caller has this right."""
        return self.rights >= level

    def announce(self, kind: DeviceEventKind, gpu: SimGpu, code: int = 0, gi: int | None = None) -> None:
        """Tells whoever listens."""
        self.announcements.append(Announcement(kind, gpu.identity.uuid, code, gi))

    # Power and clocks

    def set_power_limit(self, gpu: SimGpu, limit_mw: int) -> None:
        """Asks for a power limit."""
        self._check(AccessLevel.ROOT)
        self._begin(gpu, Act.SET_POWER)
        low, high = gpu.limits_w
        if not low * 1000.0 <= limit_mw <= high * 1000.0 or limit_mw <= 0:
            raise Refused(Refusal.INVALID)
        gpu.limit_power(limit_mw / 1000.0, self._monotonic_ns())

    def lock_clocks(self, gpu: SimGpu, clocks_mhz: tuple[int, int] | None) -> None:
        """Locks the SM clock, or lets it go with None."""
        if gpu.product.architecture in _UNLOCKABLE:
            raise Refused(Refusal.NOT_SUPPORTED)
        self._check(AccessLevel.ROOT)
        self._begin(gpu, Act.SET_CLOCKS)
        if clocks_mhz is not None:
            low, high = clocks_mhz
            if not gpu.product.sm_clock_min_mhz <= low <= high <= gpu.product.sm_clock_max_mhz:
                raise Refused(Refusal.INVALID)
            steps = gpu.sm_clocks_mhz
            clocks_mhz = (_nearest(steps, low), _nearest(steps, high))
        gpu.lock_clocks(clocks_mhz, self._monotonic_ns())

    def offered_profiles(self, gpu: SimGpu) -> tuple[int, ...]:
        """The workload power profiles of a part; who may not set them is not told either."""
        if gpu.product.architecture not in _PROFILED or self._branch < _PROFILES_SINCE:
            raise Refused(Refusal.NOT_SUPPORTED)
        if not self.may(AccessLevel.ROOT):
            raise Refused(Refusal.NO_PERMISSION)
        return _PROFILES

    def set_profiles(self, gpu: SimGpu, profiles: frozenset[int]) -> None:
        """Asks for exactly these workload power profiles."""
        offered = self.offered_profiles(gpu)
        self._begin(gpu, Act.SET_PROFILE)
        if not profiles <= set(offered):
            raise Refused(Refusal.INVALID)
        gpu.profiles = profiles

    # MIG

    def set_mode(self, gpu: SimGpu, *, enabled: bool, other_sessions: bool = False) -> Activation:
        """Asks for a MIG mode; what came of it stands beside the success."""
        if gpu.mig.geometry is None:
            raise Refused(Refusal.NOT_SUPPORTED)
        self._check(AccessLevel.ROOT)
        self._begin(gpu, Act.SET_MODE)
        before, current = gpu.mig.changes, gpu.mig.enabled
        activation = gpu.mig.set_mode(enabled=enabled, other_sessions=other_sessions)
        if gpu.mig.enabled != current and gpu.mig.geometry.reset_to_change_mode:
            gpu.reset(self._monotonic_ns())
        if gpu.mig.changes != before:
            self._changed(gpu)
        return activation

    def create_instance(self, gpu: SimGpu, profile_id: int, start: int | None = None) -> SimInstance:
        """Makes a GPU instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.profile(profile_id)
        self._begin(gpu, Act.CREATE_INSTANCE)
        instance = gpu.mig.create(profile_id, start)
        self._changed(gpu, instance.id)
        return instance

    def destroy_instance(self, gpu: SimGpu, instance_id: int) -> None:
        """Removes a GPU instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.instance(instance_id)
        self._begin(gpu, Act.DESTROY_INSTANCE)
        gpu.mig.destroy(instance_id)
        self._changed(gpu, instance_id)

    def create_compute(self, gpu: SimGpu, instance_id: int, profile_id: int, start: int | None = None) -> SimCompute:
        """Makes a compute instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.instance(instance_id)
        self._begin(gpu, Act.CREATE_COMPUTE)
        compute = gpu.mig.create_compute(instance_id, profile_id, start)
        self._changed(gpu, instance_id)
        return compute

    def destroy_compute(self, gpu: SimGpu, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""
        self._check(AccessLevel.MIG_CONFIG)
        gpu.mig.compute(instance_id, compute_id)
        self._begin(gpu, Act.DESTROY_COMPUTE)
        gpu.mig.destroy_compute(instance_id, compute_id)
        self._changed(gpu, instance_id)

    def _changed(self, gpu: SimGpu, instance_id: int | None = None) -> None:
        gpu.settle(self._monotonic_ns())
        self.announce(DeviceEventKind.MIG_CHANGED, gpu, gi=instance_id)

    def _check(self, level: AccessLevel) -> None:
        if not self.may(level):
            raise Refused(Refusal.NO_PERMISSION)

    def _begin(self, gpu: SimGpu, act: Act) -> None:
        refusals = self._refusals.get((gpu.identity.uuid, act))
        if refusals:
            raise Refused(refusals.popleft())


def _nearest(steps: tuple[int, ...], clock_mhz: int) -> int:
    return min(steps, key=lambda step: abs(step - clock_mhz))
