"""Simulated MIG of one device: mode, instances, holders, and the effects of resets, reloads and reboots.

The rules are the driver's: an id is a function of the span; a UUID is a function of the device, the GPU instance's id
and its first engine, so the same span gets the same UUID again; an instance object dies with its destruction; an
occupied place, a full device and an unfortunate order are all refused alike (NO_ROOM). Without an explicit place a
policy chooses one, which deliberately is not the first fit: it prefers places as real listings show them.

Parts that need a reset keep a new mode pending until one; the others change at once. What remains:

                     instances   mode of reset parts   mode of the others
    reset            lost        pending applies       kept
    driver reload    lost        pending applies       off
    reboot           lost        pending applies       off

It knows neither NVML's calls, nor permissions, nor time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from eelgrid_protos.catalogue.products import CiProfile, GiProfile, MigGeometry
from eelgrid_protos.messages import ComputeInstance, GpuInstance

try:
    # As `random` does: `hashlib`, which uuid5 uses, loads OpenSSL, 4 MB of a driver's process that has no other use for it.
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:
    from hashlib import sha1

# Before this branch a 4-slice and a 3-slice instance could not stand side by side.
_MIXED_HALVES_SINCE = 510


def make_uuid(space: UUID, name: str) -> UUID:
    """The UUID that `uuid.uuid5` makes."""
    return UUID(bytes=sha1(space.bytes + name.encode(), usedforsecurity=False).digest()[:16], version=5)


class DriverRefusal(Enum):
    """The driver's answers other than success."""

    NOT_SUPPORTED = "not supported"
    NO_PERMISSION = "no permission"
    IN_USE = "in use"
    NO_ROOM = "insufficient resources"
    NOT_FOUND = "not found"
    INVALID = "invalid argument"


class DriverRefused(Exception):
    """The driver does not do it; `why` is its answer."""

    def __init__(self, why: DriverRefusal) -> None:
        self.why = why
        super().__init__(why.value)


class ModeActivation(Enum):
    """The effect of a mode that the driver accepted; it reports success in every case."""

    DONE = "done"
    RESET_REQUIRED = "reset required"
    IN_USE = "in use"


PlacementPolicy = Callable[[MigGeometry, GiProfile, Sequence[int]], int]


# Where the driver looks first, by size of the instance, as creation orders on real parts show; a place that no
# listing shows comes last. The upper half first keeps 0 to 3 for a 4-slice instance, and 6 strands slice 7 only.
_EIGHT = {1: (6, 4, 5, 0, 1, 2, 3), 2: (4, 0, 2, 6), 4: (4, 0)}
# An H100 NVL put its first 3-slice instance at 0; taken for Hopper and newer.
_EIGHT_SINCE_HOPPER = {**_EIGHT, 4: (0, 4)}
# An A30 held its 2-slice instance at 2 beside two small ones at 0 and 1.
_FOUR = {1: (0, 1, 2, 3), 2: (2, 0)}


def choose_driver_placement(geometry: MigGeometry, profile: GiProfile, free: Sequence[int]) -> int:
    """The place that the driver takes by itself among those that are free."""
    if geometry.memory_slices == 8:
        table = _EIGHT if geometry.architecture == "ampere" else _EIGHT_SINCE_HOPPER
    else:
        table = _FOUR
    order = table.get(profile.size, ())
    return min(free, key=lambda start: (order.index(start) if start in order else len(order), start))


def arrange_compute_instances(profile: GiProfile, parts: Iterable[int]) -> tuple[tuple[CiProfile, int], ...] | None:
    """Compute instances of these slices with their first slices, in the given order; None where there is no way."""
    by_slices = {ci.compute_slices: ci for ci in profile.compute_instances}
    wanted = tuple(parts)
    if not set(wanted) <= set(by_slices):
        return None

    def place(number: int, taken: frozenset[int]) -> tuple[tuple[CiProfile, int], ...] | None:
        if number == len(wanted):
            return ()
        ci = by_slices[wanted[number]]
        for start in ci.starts:
            span = frozenset(range(start, start + ci.compute_slices))
            if not span & taken and (rest := place(number + 1, taken | span)) is not None:
                return ((ci, start), *rest)
        return None

    return place(0, frozenset())


@dataclass(eq=False, slots=True, kw_only=True)
class SimCompute:
    """One compute instance on slices [start, start + size) of its GPU instance."""

    id: int
    profile: CiProfile
    start: int
    uuid: str
    alive: bool = True

    @property
    def span(self) -> range:
        """Its compute slices."""
        return range(self.start, self.start + self.profile.compute_slices)

    @property
    def value(self) -> ComputeInstance:
        """The compute instance as a value of the port."""
        return ComputeInstance(
            id=self.id, profile_id=self.profile.id, uuid=self.uuid, start=self.start, size=self.profile.compute_slices
        )


@dataclass(eq=False, slots=True, kw_only=True)
class SimInstance:
    """One GPU instance; another one on the same span is another object."""

    id: int
    profile: GiProfile
    start: int
    alive: bool = True
    compute: dict[int, SimCompute] = field(default_factory=dict)

    @property
    def value(self) -> GpuInstance:
        """The GPU instance as a value of the port."""
        return GpuInstance(
            id=self.id,
            profile_id=self.profile.id,
            profile=self.profile.name,
            start=self.start,
            size=self.profile.size,
            compute_instances=tuple(self.compute[number].value for number in sorted(self.compute)),
        )

    def get_profile(self, profile_id: int) -> CiProfile:
        """One of its compute instance profiles; raises DriverRefused."""
        for ci in self.profile.compute_instances:
            if ci.id == profile_id:
                return ci
        raise DriverRefused(DriverRefusal.NOT_SUPPORTED)

    def list_free_starts(self, ci: CiProfile) -> tuple[int, ...]:
        """Where a compute instance of this profile would fit now."""
        taken = {slice_ for child in self.compute.values() for slice_ in child.span}
        return tuple(start for start in ci.starts if not taken & set(range(start, start + ci.compute_slices)))

    def choose_start(self, ci: CiProfile) -> int:
        """Where the driver puts it by itself: where it takes the fewest places from others."""

        def spoilt(start: int) -> int:
            span = set(range(start, start + ci.compute_slices))
            return sum(
                bool(span & set(range(place, place + other.compute_slices)))
                for other in self.profile.compute_instances
                for place in other.starts
            )

        free = self.list_free_starts(ci)
        if not free:
            raise DriverRefused(DriverRefusal.NO_ROOM)
        return min(free, key=lambda start: (spoilt(start), start))


class SimMig:
    """One device's MIG. `changes` counts what anybody could see change.

    `clients` are programs that hold the device and so keep it from a reset;
    `holds` are processes by id, with the GPU and compute instance that they
    run on (None, None: on the whole device).
    """

    __slots__ = (
        "_mixed_halves",
        "_uuid",
        "changes",
        "clients",
        "enabled",
        "geometry",
        "holds",
        "instances",
        "pending",
        "policy",
        "resets_itself",
    )

    def __init__(
        self,
        geometry: MigGeometry | None,
        uuid: UUID,
        *,
        branch: int,
        policy: PlacementPolicy = choose_driver_placement,
    ) -> None:
        self.geometry = geometry
        self.policy = policy
        self.enabled = self.pending = False
        # Whether a mode change brings its own reset where one is needed; in a virtual machine it cannot.
        self.resets_itself = False
        self.instances: dict[int, SimInstance] = {}
        self.clients: set[str] = set()
        self.holds: dict[int, tuple[int | None, int | None]] = {}
        self.changes = 0
        self._uuid = uuid
        self._mixed_halves = branch >= _MIXED_HALVES_SINCE

    @property
    def values(self) -> tuple[GpuInstance, ...]:
        """The GPU instances by id, as values of the port."""
        return tuple(self.instances[number].value for number in sorted(self.instances))

    # The mode

    def set_mode(self, *, enabled: bool, other_sessions: bool = False) -> ModeActivation:
        """Requests a mode; `other_sessions` says that the caller's own program holds the device elsewhere."""
        geometry = self._geometry()
        if enabled == self.enabled:
            # Nothing to do, or a pending mode is taken back.
            self._set(enabled=enabled, pending=enabled)
            return ModeActivation.DONE
        if self.instances:
            raise DriverRefused(DriverRefusal.IN_USE)
        held = bool(self.clients or self.holds)
        if not geometry.reset_to_change_mode:
            if held:
                raise DriverRefused(DriverRefusal.IN_USE)
            self._set(enabled=enabled, pending=enabled)
            return ModeActivation.DONE
        # Only a reset minds who looks at the device from the caller's own program.
        held = held or other_sessions
        done = self.resets_itself and not held
        self._set(enabled=enabled if done else self.enabled, pending=enabled)
        if done:
            return ModeActivation.DONE
        return ModeActivation.IN_USE if held else ModeActivation.RESET_REQUIRED

    def reset(self) -> None:
        """Restarts the device; everything that ran on it is gone."""
        self._lose_instances()
        self._set(enabled=self.pending, pending=self.pending)

    def reload(self) -> None:
        """The driver went and came back."""
        geometry = self.geometry
        kept = geometry is not None and geometry.mode_survives_reboot
        self._lose_instances()
        self._set(enabled=self.pending and kept, pending=self.pending and kept)

    def reboot(self) -> None:
        """The machine went and came back, and with it every program."""
        self.clients.clear()
        self.reload()

    # GPU instances

    def get_profile(self, profile_id: int) -> GiProfile:
        """The profile with this id; raises DriverRefused."""
        profile = self._geometry().profile_by_id(profile_id)
        if profile is None:
            raise DriverRefused(DriverRefusal.NOT_SUPPORTED)
        return profile

    def get_instance(self, instance_id: int) -> SimInstance:
        """The GPU instance with this id; raises DriverRefused."""
        self._switched_on()
        if instance_id not in self.instances:
            raise DriverRefused(DriverRefusal.NOT_FOUND)
        return self.instances[instance_id]

    def get_compute(self, instance_id: int, compute_id: int) -> SimCompute:
        """The compute instance with this id; raises DriverRefused."""
        instance = self.get_instance(instance_id)
        if compute_id not in instance.compute:
            raise DriverRefused(DriverRefusal.NOT_FOUND)
        return instance.compute[compute_id]

    def list_free_starts(self, profile: GiProfile) -> tuple[int, ...]:
        """Where an instance of this profile would fit now."""
        geometry = self._geometry()
        placed = [(held.profile, held.start) for held in self.instances.values()]
        halves = {held.compute_slices for held, _ in placed} | {profile.compute_slices}
        if not self._mixed_halves and geometry.memory_slices == 8 and {3, 4} <= halves:
            return ()
        return tuple(start for start in profile.starts if geometry.conflict([*placed, (profile, start)]) is None)

    def count_remaining(self, profile_id: int) -> int:
        """How many more instances of this profile fit."""
        self._switched_on()
        profile, geometry = self.get_profile(profile_id), self._geometry()
        held = list(self.instances.values())
        compute = geometry.compute_slices - sum(instance.profile.compute_slices for instance in held)
        alike = sum(instance.profile.id == profile_id for instance in held)
        # Places of one profile never overlap each other, so that counting them is enough.
        return min(
            len(self.list_free_starts(profile)),
            compute // profile.compute_slices,
            profile.most - alike,
            geometry.most - len(held),
        )

    def create_instance(self, profile_id: int, start: int | None = None) -> SimInstance:
        """Makes a GPU instance, at a place of the policy's choice where none is given."""
        self._switched_on()
        profile = self.get_profile(profile_id)
        free = self.list_free_starts(profile)
        if start is None and free:
            start = self.policy(self._geometry(), profile, free)
        elif start is not None and start not in profile.starts:
            raise DriverRefused(DriverRefusal.INVALID)
        if start is None or start not in free:
            raise DriverRefused(DriverRefusal.NO_ROOM)
        instance = SimInstance(id=self._geometry().gi_id(start, profile.size), profile=profile, start=start)
        self.instances[instance.id] = instance
        self.changes += 1
        return instance

    def destroy_instance(self, instance_id: int) -> None:
        """Removes a GPU instance without compute instances and holders."""
        instance = self.get_instance(instance_id)
        if instance.compute or any(held == instance_id for held, _ in self.holds.values()):
            raise DriverRefused(DriverRefusal.IN_USE)
        instance.alive = False
        del self.instances[instance_id]
        self.changes += 1

    # Compute instances

    def create_compute(self, instance_id: int, profile_id: int, start: int | None = None) -> SimCompute:
        """Makes a compute instance, where the driver likes where no place is given."""
        instance = self.get_instance(instance_id)
        profile = instance.get_profile(profile_id)
        if start is None:
            start = instance.choose_start(profile)
        elif start not in profile.starts:
            raise DriverRefused(DriverRefusal.INVALID)
        elif start not in instance.list_free_starts(profile):
            raise DriverRefused(DriverRefusal.NO_ROOM)
        number = next(number for number in range(len(instance.compute) + 1) if number not in instance.compute)
        uuid = f"MIG-{make_uuid(self._uuid, f'{instance_id}/{start}')}"
        compute = SimCompute(id=number, profile=profile, start=start, uuid=uuid)
        instance.compute[number] = compute
        self.changes += 1
        return compute

    def destroy_compute(self, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance that no process holds."""
        self.get_compute(instance_id, compute_id)
        if (instance_id, compute_id) in self.holds.values():
            raise DriverRefused(DriverRefusal.IN_USE)
        self.instances[instance_id].compute.pop(compute_id).alive = False
        self.changes += 1

    # How

    def apply_layout(self, layout: Iterable[tuple[GiProfile, int, Iterable[int] | None]]) -> None:
        """Turns MIG on with these instances: profile, start, slices of its compute instances (None: one over all)."""
        self._set(enabled=True, pending=True)
        for profile, start, parts in layout:
            arranged = arrange_compute_instances(profile, (profile.compute_slices,) if parts is None else parts)
            if arranged is None:
                raise DriverRefused(DriverRefusal.NO_ROOM)
            instance = self.create_instance(profile.id, start)
            for ci, place in arranged:
                self.create_compute(instance.id, ci.id, place)

    def _geometry(self) -> MigGeometry:
        if self.geometry is None:
            raise DriverRefused(DriverRefusal.NOT_SUPPORTED)
        return self.geometry

    def _switched_on(self) -> None:
        if not self.enabled:
            raise DriverRefused(DriverRefusal.NOT_SUPPORTED)

    def _set(self, *, enabled: bool, pending: bool) -> None:
        if (enabled, pending) != (self.enabled, self.pending):
            self.enabled, self.pending = enabled, pending
            self.changes += 1

    def _lose_instances(self) -> None:
        for instance in self.instances.values():
            instance.alive = False
            for compute in instance.compute.values():
                compute.alive = False
        self.changes += bool(self.instances)
        self.instances.clear()
        self.holds.clear()
