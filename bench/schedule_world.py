"""The world of a fault schedule: a simulated node, a disk, and everybody else who is at work on them.

Owns what befalls the node and the truth about it: which instance is whose, who
runs on what, who has a right to what. Sits between the agent and the driver,
where it lets the agent die, answers late or not at all, lets others act between
two calls, and notes in `broken` what the agent must never ask for. Knows
nothing of what the agent has in mind.

Others act before a listing and while the agent waits, so that whatever the
agent asks for was decided on what it could know; the one exception is a rival
who takes a place just before the agent does.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from bench.fault_world import Crash
from eelgrid_agent.devices.port import DeviceTimeout, GpuProcess, ModeChange
from eelgrid_agent.enforce.mig.journal import (
    MIG_JOURNAL,
    InstanceOrigin,
    MigRecord,
)
from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.mig import DriverRefusal, DriverRefused, SimCompute, SimInstance
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.operations import OperationKind
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec, SpecError
from eelgrid_agent.state_files import StateUnwritable
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.catalogue.products import MigGeometry, Product
from eelgrid_protos.messages import AccessLevel, Gpu

__all__ = ["Dangers", "World"]

_T = TypeVar("_T")

_DRIVERS = ("470.256.02", "535.230.02", "550.163.01", "570.172.08", "580.95.05")
_RIGHTS = (AccessLevel.ROOT, AccessLevel.ROOT, AccessLevel.MIG_CONFIG, AccessLevel.MIG_MONITOR, AccessLevel.READ_ONLY)
_XIDS = (13, 31, 43, 48, 63, 79, 94, 119)
# A person who resets, a tool that lays out GPUs, and work that comes and goes.
_INSIDE = (
    "process",
    "process",
    "ends",
    "client",
    "client gone",
    "stranger",
    "removal",
    "hang",
    "lose",
    "reset",
    "reload",
)


@dataclass(frozen=True, kw_only=True)
class Dangers:
    """How likely each is at each of its moments."""

    crash: float = 0.0
    act: float = 0.0
    refusal: float = 0.0
    timeout: float = 0.0
    rival: float = 0.0
    unwritable: float = 0.0

    @classmethod
    def draw(cls, chance: random.Random) -> "Dangers":
        """A schedule has some dangers and not others."""

        def some(most: float) -> float:
            return chance.uniform(0.0, most) if chance.random() < 0.5 else 0.0

        return cls(
            crash=some(0.06),
            act=some(0.15),
            refusal=some(0.3),
            timeout=some(0.15),
            rival=some(0.1),
            unwritable=some(0.05),
        )


class World:
    """One node and all that happens to it. Is the device port, the control port and the journal of the agent."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.dangers = Dangers()
        self.now_s = 1000.0
        self.boots = self.loads = 1
        self.records: tuple[MigRecord, ...] = ()
        self.broken: list[str] = []
        # How often somebody else acted, and how often the agent changed a device.
        self.acts = self.changes = 0
        # Made by somebody else, and known to be so by an agent that looked before.
        self.strangers: list[SimInstance] = []
        self.made: list[SimInstance | SimCompute] = []
        self.leased: dict[str, SimCompute] = {}
        # Resets that a running agent will be told of.
        self.resets: list[str] = []
        self._late: list[Callable[[], object]] = []
        self._pid = 100
        catalogue = load_catalogue()
        able = [product for product in catalogue.products.values() if product.mig is not None]
        others: list[Product] = [catalogue.products["l40s"], catalogue.products["v100-sxm2-16gb"]]
        chosen = [chance.choice(able)]
        if chance.random() < 0.3:
            chosen.append(chance.choice(able if chance.random() < 0.7 else others))
        spec = NodeSpec(
            node_name="n",
            cpu_milli=1000,
            memory_bytes=2**30,
            driver_version=chance.choice(_DRIVERS),
            gpus=tuple(GpuSpec(product=one.key, mig=() if self._starts_on(one) else None) for one in chosen),
        )
        self.node = SimulatedNode(spec, monotonic_ns=lambda: int(self.now_s * 1e9), seed=chance.randrange(2**32))
        self.faults = self.node.faults
        for gpu in self.node.devices:
            gpu.mig.resets_itself = chance.random() < 0.5
            if gpu.mig.enabled and chance.random() < 0.7:
                self._lay_out(gpu)

    def _starts_on(self, product: Product) -> bool:
        return product.mig is not None and self.chance.random() < 0.8

    def _lay_out(self, gpu: SimGpu) -> None:
        """What stands before the agent is there for the first time."""
        assert gpu.mig.geometry is not None, "MIG is on"
        profiles = list(gpu.mig.geometry.profiles.values())
        for _ in range(self.chance.randrange(1, 7)):
            profile = self.chance.choice(profiles)
            try:
                instance = gpu.mig.create_instance(profile.id, self.chance.choice(profile.starts))
            except DriverRefused:
                # It does not fit beside the others.
                continue
            gpu.mig.create_compute(instance.id, profile.whole.id)

    # The truth

    @property
    def uuids(self) -> tuple[str, ...]:
        """The devices."""
        return tuple(gpu.identity.uuid for gpu in self.node.devices)

    def boot_id(self) -> str:
        """Since when instances stand, as far as the machine tells."""
        return f"boot-{self.boots}/{self.loads}"

    def sleep(self, seconds: float) -> None:
        """Time passes, late calls take effect, and others act."""
        self.now_s += seconds
        self.land()
        self._others()

    def land(self) -> None:
        """Calls that were given up take effect after all, where they still can."""
        late, self._late = self._late, []
        for call in late:
            try:
                call()
            except DriverRefused:
                continue
            self.acts += 1

    def record(self, uuid: str) -> MigRecord | None:
        """What is on the disk of a device."""
        return next((record for record in self.records if record.uuid == uuid), None)

    def users(self, uuid: str) -> set[int | None]:
        """GPU instances with a process; None stands for the whole device."""
        return {instance for instance, _ in self.node.get_device(uuid).mig.holds.values()}

    def died(self) -> None:
        """The agent is dead: what it had begun to claim is its own as far as anybody can tell, and no news reaches it."""
        self.resets.clear()
        self.disown()

    def disown(self) -> None:
        """Strangers whose place the agent had written down as its own, and could not take back, are none any more."""
        claimed = {
            (r.uuid, place) for r in self.records for place, origin in r.known.items() if origin is InstanceOrigin.MADE
        }
        self.strangers = [one for one in self.strangers if (self._owner(one), _place(one)) not in claimed]

    def _owner(self, instance: SimInstance) -> str:
        return next((g.identity.uuid for g in self.node.devices if instance in g.mig.instances.values()), "")

    # The device port

    def gpus(self) -> tuple[Gpu, ...]:
        """As the node lists them, after others acted."""
        self._others()
        self._dies("list")
        return self.node.gpus()

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """As the node tells."""
        return self.node.processes(uuid)

    # The control port

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """As the node tells."""
        return self.node.mig_geometry(uuid)

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """The mode, unless something is in the way."""
        gpu = self.node.get_device(uuid)
        if gpu.mig.enabled != enabled and (gpu.mig.instances or gpu.mig.holds):
            self.broken.append(f"MIG mode of {uuid} was to change over {gpu.mig.instances} and {gpu.mig.holds}")
        return self._called(uuid, OperationKind.SET_MODE, lambda: self.node.set_mig_mode(uuid, enabled=enabled))

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """An instance, unless a rival is faster."""
        if self.chance.random() < self.dangers.rival and self._stranger(uuid, profile_id, start, rival=True):
            return self.node.create_gpu_instance(uuid, profile_id, start)

        def make() -> int:
            number = self.node.create_gpu_instance(uuid, profile_id, start)
            self.made.append(self.node.get_device(uuid).mig.instances[number])
            return number

        mig = self.node.get_device(uuid).mig
        return self._called(
            uuid, OperationKind.CREATE_INSTANCE, make, late=lambda: mig.create_instance(profile_id, start)
        )

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """A compute instance."""
        self._spared(uuid, instance_id, "a compute instance was to be made in")

        def make() -> int:
            number = self.node.create_compute_instance(uuid, instance_id, profile_id)
            self.made.append(self.node.get_device(uuid).mig.instances[instance_id].compute[number])
            return number

        return self._called(uuid, OperationKind.CREATE_COMPUTE, make)

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """Removes an instance."""
        self._spared(uuid, instance_id, "was to be destroyed:", in_use=True)
        node = self.node
        self._called(uuid, OperationKind.DESTROY_INSTANCE, lambda: node.destroy_gpu_instance(uuid, instance_id))

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""
        self._spared(uuid, instance_id, "was to lose a compute instance:", in_use=True)
        node = self.node
        self._called(
            uuid, OperationKind.DESTROY_COMPUTE, lambda: node.destroy_compute_instance(uuid, instance_id, compute_id)
        )

    # The journal

    def load(self) -> tuple[MigRecord, ...]:
        """What is on the disk."""
        return self.records

    def store(self, records: Iterable[MigRecord]) -> None:
        """Replaces what is on the disk, unless it is full or the agent dies."""
        kept = tuple(records)
        self._dies("write")
        if self.chance.random() < self.dangers.unwritable:
            self.disown()
            raise StateUnwritable("no space left on the disk; make room")
        for record in kept:
            earlier = self.record(record.uuid)
            fell = (
                [] if earlier is None else [s for s, n in earlier.generations.items() if n > record.get_generation(*s)]
            )
            if fell:
                self.broken.append(f"generations of {fell} fell in the journal")
        self.records = MIG_JOURNAL.from_bytes(MIG_JOURNAL.to_bytes(kept))
        self._dies("write")

    # How

    def _called(
        self, uuid: str, act: OperationKind, call: Callable[[], _T], late: Callable[[], object] | None = None
    ) -> _T:
        self.changes += 1
        self._dies("call")
        chance = self.chance.random()
        if chance < self.dangers.refusal:
            why = (
                DriverRefusal.NO_ROOM
                if act in (OperationKind.CREATE_INSTANCE, OperationKind.CREATE_COMPUTE)
                else DriverRefusal.IN_USE
            )
            self.faults.refuse_next(uuid, act, why)
        elif self.chance.random() < self.dangers.timeout:
            way = self.chance.randrange(3)
            if way == 1:
                call()
            elif way == 2 and late is not None:
                self._late.append(late)
            raise DeviceTimeout(f"{uuid} did not answer in time; wait")
        answer = call()
        self._dies("call")
        return answer

    def _dies(self, moment: str) -> None:
        if self.chance.random() < self.dangers.crash:
            raise Crash(moment)

    def _spared(self, uuid: str, instance_id: int, what: str, *, in_use: bool = False) -> None:
        """Notes a call that touches what it must not."""
        mig = self.node.get_device(uuid).mig
        instance = mig.instances.get(instance_id)
        if instance is None:
            return
        if any(instance is stranger for stranger in self.strangers):
            self.broken.append(f"somebody else's GPU instance {instance_id} {what} {instance.value}")
        leased = any(one is other for one in instance.compute.values() for other in self.leased.values())
        if in_use and (self.users(uuid) & {instance_id, None} or leased):
            self.broken.append(f"GPU instance {instance_id}, in use or leased, {what} {instance.value}")

    # What others do

    def _others(self) -> None:
        while self.chance.random() < self.dangers.act:
            self.act(self.chance.choice(_INSIDE))

    def act(self, what: str) -> None:
        """Somebody does this to some device."""
        self.acts += 1
        gpu = self.chance.choice(self.node.devices)
        uuid, chance = gpu.identity.uuid, self.chance
        match what:
            case "process":
                self._process(gpu)
            case "ends":
                if gpu.mig.holds:
                    self.faults.end_process(uuid, chance.choice(list(gpu.mig.holds)))
            case "client":
                self.faults.add_foreign_client(uuid)
            case "client gone":
                self.faults.remove_foreign_client(uuid)
            case "stranger":
                if gpu.mig.geometry is not None and gpu.mig.enabled:
                    profile = chance.choice(list(gpu.mig.geometry.profiles.values()))
                    self._stranger(uuid, profile.id, chance.choice(profile.starts))
            case "removal":
                if gpu.mig.instances:
                    self.faults.destroy_foreign_instance(uuid, chance.choice(list(gpu.mig.instances)))
            case "hang":
                self.faults.hang_gpu(uuid)
            case "lose":
                self.faults.lose_gpu(uuid)
            case "restore":
                if gpu.health.value == "lost":
                    self.resets.append(uuid)
                self.faults.restore_gpu(uuid)
            case "reset":
                self.resets.append(uuid)
                self.faults.reset_gpu(uuid)
            case "reload":
                self.loads += 1
                self.faults.reload_driver()
            case "noise":
                self.faults.announce_xid(uuid, chance.choice(_XIDS))
                self.faults.cap_power(uuid, chance.choice((None, 150.0)))
            case "rights":
                self.faults.set_rights(chance.choice(_RIGHTS))
            case _:
                raise AssertionError(what)

    def reset_and_mirror(self, gpu: SimGpu) -> None:
        """Somebody resets a device and lays it out as it was."""
        self.acts += 1
        uuid = gpu.identity.uuid
        before = [(one.profile.id, one.start) for one in gpu.mig.instances.values() if one.compute]
        self.resets.append(uuid)
        self.faults.reset_gpu(uuid)
        for profile_id, start in before:
            self._stranger(uuid, profile_id, start)

    def _process(self, gpu: SimGpu) -> None:
        self._pid += 1
        places: list[tuple[int | None, int | None]] = [
            (number, child) for number, one in gpu.mig.instances.items() for child in one.compute
        ]
        if not gpu.mig.enabled:
            places = [(None, None)]
        if places:
            self.faults.start_process(gpu.identity.uuid, self._pid, *self.chance.choice(places))

    def _stranger(self, uuid: str, profile_id: int, start: int, *, rival: bool = False) -> bool:
        record = self.record(uuid)
        # Whoever does not know this boot, or will be told of a reset, adopts what it finds.
        looked = record is not None and record.boot_id == self.boot_id() and uuid not in self.resets
        try:
            number = self.faults.create_foreign_instance(uuid, profile_id, start, compute=self.chance.random() < 0.8)
        except (SpecError, DriverRefused):
            return False
        instance = self.node.get_device(uuid).mig.instances[number]
        # What stands again where the agent's own stood cannot be told from it: even its UUID is the same.
        known = record is not None and _place(instance) in record.known
        if looked and (rival or not known):
            self.strangers.append(instance)
        return True


def _place(instance: SimInstance) -> tuple[int, int]:
    return instance.profile.id, instance.start
