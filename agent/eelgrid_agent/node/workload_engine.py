"""The port to whatever runs the assignments of an accepted plan, and two engines: the users' own, and simulated GPUs.

Each call passes everything that the node should hold, so repeating it is harmless. Processes of our own have a port of
theirs (`engine.port`). Must not know plans, nor how results reach the controller.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from eelgrid_protos.messages import ApplyResult, ApplyStatus, Assignment, Gpu
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# (GPU UUID, utilisation ratio, memory bytes)
SetLoad = Callable[[str, float, int], None]


class WorkloadEngine(Protocol):
    """Runs the assignments of a plan."""

    def apply(self, assignments: tuple[Assignment, ...]) -> tuple[ApplyResult, ...]:
        """Holds exactly these from now on; a result for each that was not plainly applied."""

    def host_load(self) -> tuple[int, int]:
        """CPU milli and memory bytes of what it holds, as far as it knows."""


class NoEngine:
    """The users' own engine runs the work; the agent only observes."""

    def apply(self, assignments: tuple[Assignment, ...]) -> tuple[ApplyResult, ...]:
        """Changes nothing and answers OBSERVED for what is not a process."""
        detail = "observe-only: the users' engine runs the work"
        run_elsewhere = (assignment.workload_id for assignment in assignments if assignment.process is None)
        return tuple(
            ApplyResult(subject=workload_id, status=ApplyStatus.OBSERVED, detail=detail)
            for workload_id in dict.fromkeys(run_elsewhere)
        )

    def host_load(self) -> tuple[int, int]:
        """Unknown to the agent."""
        return 0, 0


class SimulatedEngine:
    """Work on simulated GPUs: a share of a GPU loads that share of its utilisation and memory."""

    def __init__(self, gpus: Iterable[Gpu], set_load: SetLoad) -> None:
        self._memory_bytes = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
        self._set_load = set_load
        self._host_load = (0, 0)

    def apply(self, assignments: tuple[Assignment, ...]) -> tuple[ApplyResult, ...]:
        """Loads each GPU by its shares and idles the rest; fails by name what the simulated node refuses.

        What did not change is set again: a device that was lost and came back has forgotten its load.
        """
        shares: dict[str, int] = {}
        for assignment in assignments:
            # A slice is there as a device of its own; what runs in it is no load that the simulation knows.
            for uuid in assignment.gpu_uuids if assignment.gpu_instance is None else ():
                shares[uuid] = shares.get(uuid, 0) + assignment.gpu_milli
        for uuid, memory_bytes in self._memory_bytes.items():
            ratio = min(1.0, shares.get(uuid, 0) / GPU_MILLI_WHOLE)
            self._set_load(uuid, ratio, int(ratio * memory_bytes))
        unknown = shares.keys() - self._memory_bytes.keys()
        self._host_load = (sum(a.cpu_milli for a in assignments), sum(a.memory_bytes for a in assignments))
        return tuple(
            ApplyResult(
                subject=assignment.workload_id,
                status=ApplyStatus.FAILED,
                detail=f"the simulated node has no GPU {', '.join(sorted(unknown.intersection(assignment.gpu_uuids)))}",
            )
            for assignment in assignments
            if not unknown.isdisjoint(assignment.gpu_uuids)
        )

    def host_load(self) -> tuple[int, int]:
        """What the assignments ask of the host."""
        return self._host_load
