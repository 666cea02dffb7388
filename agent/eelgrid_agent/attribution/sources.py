"""What attribution is made of, gathered: processes' owners and every source of allocations.

Owns which sources there are and the one look that they make together. Must not
know how joules are split. `read` opens small files, so a real node asks off the
event loop; the kubelet is asked elsewhere, and here only its kept answer is
taken.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from eelgrid_agent.attribution.allocation import Allocation, plan_allocations, pod_allocations
from eelgrid_agent.attribution.attributor import AttributionLook, DeviceLook
from eelgrid_agent.attribution.metering import Energies
from eelgrid_agent.attribution.owners import OwnerBook, ProcessOwner
from eelgrid_agent.attribution.slurm_jobs import slurm_allocations
from eelgrid_agent.slow import SlowLook
from eelgrid_protos.kubelet import ContainerDevices
from eelgrid_protos.messages import Assignment, Gpu

__all__ = ["NOTHING_FOUND", "Found", "Kubelet", "Sources"]


class Kubelet(Protocol):
    """What a kubelet said last."""

    @property
    def containers(self) -> tuple[ContainerDevices, ...] | None:
        """The containers that hold devices; None while nobody can say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the files of one moment said; `jobs` is None where no folder could be asked."""

    owners: Mapping[int, ProcessOwner] = field(default_factory=lambda: MappingProxyType({}))
    jobs: tuple[Allocation, ...] | None = None


NOTHING_FOUND = Found()


class Sources:
    """Everything that one node can be asked; without a book no process is looked up."""

    def __init__(
        self, book: OwnerBook | None = None, *, kubelet: Kubelet | None = None, slurm_folder: Path | None = None
    ) -> None:
        self._book = book
        self._kubelet = kubelet
        self._slurm_folder = slurm_folder

    def read(self, gpus: tuple[Gpu, ...], slow: SlowLook, *, now_ns: int) -> Found:
        """The owners of all processes of a slow look, and a prolog's folder; may block, for one caller at a time."""
        pids = sorted({one.pid for found in slow.processes.values() for one in found or ()})
        return Found(
            owners={} if self._book is None else self._book.resolve(pids, now_ns=now_ns),
            jobs=None if self._slurm_folder is None else slurm_allocations(self._slurm_folder, gpus),
        )

    def gather(
        self, gpus: tuple[Gpu, ...], energies: Energies, slow: SlowLook, found: Found, *,
        assignments: Iterable[Assignment] | None = None,
    ) -> AttributionLook:  # fmt: skip
        """One look; `assignments` are of the plan in force, None without one."""
        return AttributionLook(
            monotonic_ns=energies.monotonic_ns,
            wall_ns=energies.wall_ns,
            devices=tuple(_device(gpu, energies, slow) for gpu in gpus),
            owners=found.owners,
            allocations=self._allocations(gpus, found, assignments),
        )

    def _allocations(
        self, gpus: tuple[Gpu, ...], found: Found, assignments: Iterable[Assignment] | None
    ) -> tuple[Allocation, ...] | None:
        """What all sources say; None where none of them says anything, which is not the same as nothing."""
        said: list[tuple[Allocation, ...]] = []
        containers = None if self._kubelet is None else self._kubelet.containers
        if containers is not None:
            said.append(pod_allocations(containers, gpus))
        if found.jobs is not None:
            said.append(found.jobs)
        if assignments is not None:
            said.append(plan_allocations(assignments, gpus))
        return tuple(one for allocations in said for one in allocations) if said else None


def _device(gpu: Gpu, energies: Energies, slow: SlowLook) -> DeviceLook:
    return DeviceLook(
        gpu=gpu,
        energy_j=energies.total_j.get(gpu.uuid),
        utilization=energies.utilization.get(gpu.uuid),
        estimate=energies.estimates.get(gpu.uuid),
        limit_w=energies.limits_w.get(gpu.uuid),
        instances=slow.instances.get(gpu.uuid, ()),
        processes=slow.processes.get(gpu.uuid),
    )
