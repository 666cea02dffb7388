"""A machine with the power half of the control port, a journal in memory, and everything that befalls them.

A first-class fake: it refuses what a driver refuses, rounds as one rounds, and
forgets with the driver what a driver forgets. Its crash points end the
process of the agent between any two things that it does to the world.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.fault_world import CrashPoints

from eelgrid_agent.devices.port import (
    DeviceTimeout,
    DriverUnavailable,
    GpuLostError,
    ModeChange,
    NoPermission,
    NotSupported,
    OutOfRange,
    PowerSettings,
    UnknownGpu,
)
from eelgrid_agent.enforce.guard.events import DriverOrigin
from eelgrid_protos.catalogue.products import MigGeometry

__all__ = ["FakeMachine", "FakePart"]


@dataclass(slots=True, kw_only=True)
class FakePart:
    """One device; `round_w` is the step to which its driver rounds a limit."""

    default_w: float = 700.0
    min_w: float | None = 200.0
    max_w: float | None = 700.0
    idle_w: float = 70.0
    round_w: float = 0.001
    clocks_mhz: tuple[int, ...] = tuple(range(345, 1981, 15))
    profiles: tuple[int, ...] = ()
    can_lock: bool = True
    # What stands now.
    limit_w: float = 0.0
    ceiling_w: float | None = None
    lock: tuple[int, int] | None = None
    profile: int | None = None
    demand_w: float = 0.0
    is_lost: bool = False
    is_hung: bool = False
    energy_j: float = 0.0
    writes: list[tuple[str, object]] = field(default_factory=list)

    def forget(self) -> None:
        """The driver or the device begins anew."""
        self.limit_w, self.lock, self.profile, self.energy_j = self.default_w, None, None, 0.0

    @property
    def enforced_w(self) -> float:
        return self.limit_w if self.ceiling_w is None else min(self.limit_w, self.ceiling_w)

    @property
    def power_w(self) -> float:
        return 0.0 if self.is_lost else max(self.idle_w, min(self.demand_w, self.enforced_w))


class FakeMachine:
    """A node's devices as Control, and its world."""

    def __init__(self, parts: dict[str, FakePart], crashes: CrashPoints) -> None:
        self.parts = parts
        self.crashes = crashes
        self.now_ns = 1_000_000_000
        self.boots = 1
        self.loads = 1
        self.is_forbidden = False
        self.is_driver_gone = False
        for part in parts.values():
            part.forget()

    # The world

    @property
    def control(self) -> "FakeMachine":
        return self

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def origin(self) -> DriverOrigin:
        return DriverOrigin(boot_id=f"boot-{self.boots}", driver_start=f"{self.boots}.{self.loads}")

    def advance(self, seconds: float) -> None:
        for part in self.parts.values():
            part.energy_j += part.power_w * seconds
        self.now_ns += int(seconds * 1e9)

    def load(self, uuid: str, demand_w: float) -> None:
        self.parts[uuid].demand_w = demand_w

    def set_behind(self, uuid: str, limit_w: float) -> None:
        self.parts[uuid].limit_w = limit_w

    def cap(self, uuid: str, cap_w: float | None) -> None:
        self.parts[uuid].ceiling_w = cap_w

    def reload(self) -> None:
        self.loads += 1
        for part in self.parts.values():
            part.forget()

    def reboot(self) -> None:
        self.boots += 1
        for part in self.parts.values():
            part.forget()
            part.is_lost = part.is_hung = False

    def lose(self, uuid: str) -> None:
        self.parts[uuid].is_lost = True

    def hang(self, uuid: str) -> None:
        self.parts[uuid].is_hung = True

    def restore(self, uuid: str) -> None:
        part = self.parts[uuid]
        if part.is_lost:
            part.forget()
        part.is_lost = part.is_hung = False

    def forbid(self, *, is_forbidden: bool = True) -> None:
        self.is_forbidden = is_forbidden

    def power_w(self, uuid: str) -> float | None:
        part = self.parts[uuid]
        return None if part.is_lost or part.is_hung else part.power_w

    def true_power_w(self) -> float:
        return sum(part.power_w for part in self.parts.values())

    def energy_j(self, uuid: str) -> float | None:
        part = self.parts[uuid]
        return None if part.is_lost or part.is_hung else part.energy_j

    def answers(self, uuid: str) -> bool:
        return not (self.parts[uuid].is_lost or self.parts[uuid].is_hung)

    def shown(self, uuid: str) -> tuple[float, tuple[int, int] | None, int | None]:
        """Limit, lock and profile as they truly are."""
        part = self.parts[uuid]
        return part.limit_w, part.lock, part.profile

    # The control port

    def power_settings(self, uuid: str) -> PowerSettings:
        part = self._answering(uuid)
        return PowerSettings(
            requested_w=part.limit_w,
            enforced_w=part.enforced_w,
            default_w=part.default_w,
            min_w=part.min_w,
            max_w=part.max_w,
            sm_clock_mhz=part.clocks_mhz[-1] if part.lock is None else part.lock[1],
            sm_clocks_mhz=part.clocks_mhz,
            power_profiles=part.profiles,
            power_profile=part.profile,
        )

    def set_power_limit(self, uuid: str, limit_w: float) -> None:
        with self._writing(uuid, "limit", limit_w) as part:
            assert part.min_w is not None, "no limit may be asked where none is told"
            assert part.max_w is not None
            if not part.min_w <= limit_w <= part.max_w:
                raise OutOfRange(f"{limit_w} W is not in [{part.min_w}, {part.max_w}] W")
            part.limit_w = round(limit_w / part.round_w) * part.round_w

    def lock_sm_clocks(self, uuid: str, min_mhz: int, max_mhz: int) -> None:
        with self._writing(uuid, "lock", (min_mhz, max_mhz)) as part:
            if not part.can_lock:
                raise NotSupported(f"{uuid} locks no clocks")
            if not part.clocks_mhz[0] <= min_mhz <= max_mhz <= part.clocks_mhz[-1]:
                raise OutOfRange(f"{uuid}: ask for clocks in its range")
            part.lock = (min_mhz, max_mhz)

    def unlock_sm_clocks(self, uuid: str) -> None:
        with self._writing(uuid, "unlock", None) as part:
            if not part.can_lock:
                raise NotSupported(f"{uuid} locks no clocks")
            part.lock = None

    def set_power_profile(self, uuid: str, profile: int | None) -> None:
        with self._writing(uuid, "profile", profile) as part:
            if profile is not None and profile not in part.profiles:
                raise OutOfRange(f"{uuid} has no profile {profile}")
            part.profile = profile

    def mig_geometry(self, uuid: str) -> MigGeometry:
        raise NotSupported(f"{uuid} has no MIG")

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        raise NotSupported(f"{uuid} has no MIG")

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        raise NotSupported(f"{uuid} has no MIG")

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        raise NotSupported(f"{uuid} has no MIG")

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        raise NotSupported(f"{uuid} has no MIG")

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        raise NotSupported(f"{uuid} has no MIG")

    def _answering(self, uuid: str) -> FakePart:
        if self.is_driver_gone:
            raise DriverUnavailable("the driver is not loaded; load it")
        if uuid not in self.parts:
            raise UnknownGpu(f"no device {uuid}")
        part = self.parts[uuid]
        if part.is_lost:
            raise GpuLostError(f"{uuid} is lost")
        if part.is_hung:
            raise DeviceTimeout(f"{uuid} did not answer in time")
        return part

    @contextmanager
    def _writing(self, uuid: str, what: str, value: object) -> Iterator[FakePart]:
        part = self._answering(uuid)
        if self.is_forbidden:
            raise NoPermission(f"{uuid}: not as this user")
        self.crashes()
        yield part
        part.writes.append((what, value))
        self.crashes()
