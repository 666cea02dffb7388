"""The simulated node in the dress of the small crashing device: the same scenarios over another driver's rules.

Calls go to SimulatedNode's port; what befalls the device goes to its faults.
Compute instances are placed by the simulated driver's own choice, which is not
the first fit of the small device, and listings never lag.
"""

from collections.abc import Callable
from typing import TypeVar

from bench.mig_device import Fault, Held
from eelgrid_agent.devices.port import GpuProcess, ModeChange
from eelgrid_agent.simulation.mig import SimCompute, SimInstance
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuSpec, NodeSpec
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.catalogue.products import MigGeometry
from eelgrid_protos.messages import Gpu

__all__ = ["SimulatedMig", "simulated_geometries"]

_T = TypeVar("_T")


def simulated_geometries() -> list[MigGeometry]:
    """Every geometry that some product of the catalogue has."""
    found = {product.mig.key: product.mig for product in load_catalogue().products.values() if product.mig is not None}
    return list(found.values())


class SimulatedMig:
    """One simulated GPU."""

    def __init__(self, geometry: MigGeometry, hook: Callable[[str], None], *, mig_enabled: bool = True) -> None:
        product = next(p for p in load_catalogue().products.values() if p.mig is not None and p.mig.key == geometry.key)
        spec = GpuSpec(product=product.key, mig=() if mig_enabled else None)
        self.now_s = 0.0
        self.node = SimulatedNode(
            NodeSpec(node_name="node-0", cpu_milli=1000, memory_bytes=2**30, gpus=(spec,)),
            monotonic_ns=lambda: int(self.now_s * 1e9),
            seed=1,
        )
        self.geometry = geometry
        self.hook = hook
        self.uuid = self.node.devices[0].identity.uuid
        self.mig = self.node.devices[0].mig
        self.foreign: set[int] = set()
        self.faults: list[Fault] = []
        self.violations: list[str] = []
        self.lag_s = 0.0
        # Objects are kept, so that none is ever mistaken for another.
        self._seen: list[SimInstance | SimCompute] = []

    @property
    def mig_enabled(self) -> bool:
        """The mode in force."""
        return self.mig.enabled

    @property
    def mig_pending(self) -> bool:
        """The mode after the next reset."""
        return self.mig.pending

    @property
    def users(self) -> dict[int, tuple[int | None, int | None]]:
        """Processes, and the GPU and compute instance of each."""
        return self.mig.holds

    @property
    def held(self) -> dict[int, Held]:
        """What stands."""
        return {
            number: Held(
                self._serial(instance),
                instance.profile,
                instance.start,
                {ci: (held.profile.id, held.start, self._serial(held)) for ci, held in instance.compute.items()},
            )
            for number, instance in self.mig.instances.items()
        }

    def serials(self) -> dict[int, tuple[int, ...]]:
        """Every instance and compute instance by what no driver tells."""
        return {
            number: (held.serial, *sorted(serial for _, _, serial in held.compute.values()))
            for number, held in self.held.items()
        }

    def stand(self, profile_id: int, start: int, compute: tuple[int, ...], *, foreign: bool = False) -> int:
        """An instance that somebody made; returns its id."""
        instance = self.mig.create_instance(profile_id, start)
        for ci in compute:
            self.mig.create_compute(instance.id, ci)
        if foreign:
            self.foreign.add(self._serial(instance))
        return instance.id

    def reset(self) -> None:
        """The device starts anew."""
        self.node.faults.reset_gpu(self.uuid)

    def reboot(self) -> None:
        """The machine starts anew."""
        self.node.faults.reboot_node()

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds

    # The ports

    def gpus(self) -> tuple[Gpu, ...]:
        """The device."""
        return self.node.gpus()

    def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Who holds it."""
        return self.node.processes(uuid)

    def mig_geometry(self, uuid: str) -> MigGeometry:
        """What it can hold."""
        return self.node.mig_geometry(uuid)

    def set_mig_mode(self, uuid: str, *, enabled: bool) -> ModeChange:
        """Asks for the mode."""
        return self._called("set_mig_mode", lambda: self.node.set_mig_mode(uuid, enabled=enabled))

    def create_gpu_instance(self, uuid: str, profile_id: int, start: int) -> int:
        """Makes an instance."""
        return self._called("create_gpu_instance", lambda: self.node.create_gpu_instance(uuid, profile_id, start))

    def destroy_gpu_instance(self, uuid: str, instance_id: int) -> None:
        """Removes an instance."""
        self._spare(instance_id, instance_id in {gi for gi, _ in self.users.values()})
        self._called("destroy_gpu_instance", lambda: self.node.destroy_gpu_instance(uuid, instance_id))

    def create_compute_instance(self, uuid: str, instance_id: int, profile_id: int) -> int:
        """Makes a compute instance."""
        self._spare(instance_id, in_use=False)
        node = self.node
        return self._called(
            "create_compute_instance", lambda: node.create_compute_instance(uuid, instance_id, profile_id)
        )

    def destroy_compute_instance(self, uuid: str, instance_id: int, compute_id: int) -> None:
        """Removes a compute instance."""
        self._spare(instance_id, (instance_id, compute_id) in self.users.values())
        node = self.node
        self._called("destroy_compute_instance", lambda: node.destroy_compute_instance(uuid, instance_id, compute_id))

    def _spare(self, instance_id: int, in_use: bool) -> None:
        held = self.held.get(instance_id)
        if held is not None and (in_use or held.serial in self.foreign):
            self.violations.append(f"GPU instance {instance_id}, in use or foreign, was to be changed")

    def _called(self, name: str, call: Callable[[], _T]) -> _T:
        self.hook(f"before {name}")
        self._fail(name, after=False)
        result = call()
        self._fail(name, after=True)
        self.hook(f"after {name}")
        return result

    def _fail(self, name: str, *, after: bool) -> None:
        fault = next((fault for fault in self.faults if (fault.call, fault.after) == (name, after)), None)
        if fault is not None:
            self.faults.remove(fault)
            raise fault.error

    def _serial(self, one: SimInstance | SimCompute) -> int:
        for serial, known in enumerate(self._seen):
            if known is one:
                return serial
        self._seen.append(one)
        return len(self._seen) - 1
