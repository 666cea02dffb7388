"""Small traces with times, and a simulation of them by a twin that does the obvious thing, slowly."""

from pathlib import Path
from typing import NamedTuple

from eelgrid_controller.replay.openb import NODE_LIST, TraceNode, TraceTask, task_list_name
from eelgrid_controller.replay.openb_protocol import TraceArrays, build_trace, node_order
from eelgrid_controller.replay.simulation import (
    ArrivalSchedule,
    Outage,
    SimulationOutcome,
    build_schedule,
    simulate_policy,
)
from eelgrid_kernels.baselines import find_policy
from eelgrid_kernels.simulation import SimulatedFleet
from eelgrid_protos.quantities import MIB


def write_small_openb(folder: Path) -> None:
    """Writes openb's files of eight nodes and of one list, `small`, of 48 tasks."""
    nodes = [f"n{i},{64 - 32 * (i % 2)}000,262144,4,{'T4' if i % 3 else 'V100M32'}" for i in range(8)]
    (folder / NODE_LIST).write_text("\n".join(["sn,cpu_milli,memory_mib,gpu,model", *nodes]) + "\n")
    titles = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time"
    tasks = [f"p{i:02d},{4 + i % 5 * 3}000,1024,{i % 4 > 0:d},{i % 4 * 330},,LS,Running,{i}" for i in range(48)]
    (folder / task_list_name("small")).write_text("\n".join([titles, *tasks]) + "\n")


def build_trace_node(name="n0", *, gpus=2, model="T4", vcpu=32, memory_mib=1000) -> TraceNode:
    """T4: 10 W idle, 70 W busy; 32 vCPU are one package: 15 W idle, 120 W busy."""
    return TraceNode(
        name=name, cpu_milli=vcpu * 1000, memory_bytes=memory_mib * MIB, gpu_count=gpus, gpu_model=model if gpus else ""
    )


def build_trace_task(
    name, arrival_s, duration_s, *, gpus=1, milli=1000, vcpu=1, memory_mib=10, models=(), priority=0
) -> TraceTask:
    """A task of one GPU that arrives and lasts so long."""
    return TraceTask(
        name=name,
        cpu_milli=int(vcpu * 1000),
        memory_bytes=memory_mib * MIB,
        gpu_count=gpus,
        gpu_milli=milli if gpus else 0,
        gpu_models=models if gpus else (),
        arrival_s=arrival_s,
        duration_s=duration_s,
        priority=priority,
    )


class Scene(NamedTuple):
    """A trace with its schedule."""

    trace: TraceArrays
    schedule: ArrivalSchedule

    def fleet(self, name="fgd", seed=42) -> SimulatedFleet:
        chosen, trace = find_policy(name), self.trace
        rank = node_order(trace, seed)
        return SimulatedFleet(trace.fleet, trace.specs, trace.typical, rank, chosen)

    def run(self, name="fgd", *, outages=(), end_s=None, seed=42) -> SimulationOutcome:
        end_s = self.schedule.end_s if end_s is None else end_s
        return simulate_policy(self.trace, self.schedule, self.fleet(name, seed), outages, end_s)


def build_scene(nodes, tasks) -> Scene:
    """A trace of these nodes and tasks with its schedule."""
    trace = build_trace("small", tuple(nodes), tuple(tasks))
    return Scene(trace, build_schedule(trace, tasks))


class Twin:
    """Asks the policy for every task that waits, in order, whenever anything was released or came back."""

    def __init__(self, scene: Scene, name: str, seed: int) -> None:
        self.schedule, self.fleet = scene.schedule, scene.fleet(name, seed)
        self.empty = scene.fleet(name, seed)
        self.waiting, self.held, self.decided, self.finished, self.refused, self.restarts = [], {}, [], [], [], []

    def _place(self, task, now_s):
        spec = int(self.schedule.spec[task])
        node, slots = self.fleet.place_task(spec, len(self.decided))
        if node >= 0:
            self.decided.append((now_s, task, node))
            self.held[task] = (node, spec, slots, now_s + float(self.schedule.duration_s[task]))
        return node >= 0

    def _release(self, task):
        node, spec, slots, _ = self.held.pop(task)
        self.fleet.release_task(node, spec, slots)

    def _ever(self, task):
        return self.empty.copy().place_task(int(self.schedule.spec[task]), 0)[0] >= 0

    def _retry(self, now_s):
        for task in sorted(self.waiting, key=lambda task: (-int(self.schedule.priority[task]), task)):
            if self._place(task, now_s):
                self.waiting.remove(task)

    def run(self, outages: tuple[Outage, ...], end_s: float) -> "Twin":
        arrival_s = self.schedule.arrival_s.tolist()
        arrived, now_s = set(), self.schedule.begin_s
        outages = [o._replace(down_s=max(o.down_s, now_s)) for o in outages if o.up_s > now_s]
        passed = set()  # a task that lasts for no time leaves in a second look at the moment
        while now_s <= end_s:
            before = len(self.decided), len(self.waiting)
            for task in [task for task in sorted(self.held) if self.held[task][3] == now_s]:
                self._release(task)
                self.finished.append(task)
            for outage in outages:
                if outage.up_s == now_s and (outage, "up") not in passed:
                    passed.add((outage, "up"))
                    self.fleet.set_available(outage.node, True)
            for outage in outages:
                if outage.down_s == now_s and (outage, "down") not in passed:
                    passed.add((outage, "down"))
                    self.fleet.set_available(outage.node, False)
                    for task in [task for task in sorted(self.held) if self.held[task][0] == outage.node]:
                        self._release(task)
                        self.restarts.append(task)
                        self.waiting.append(task)
            self._retry(now_s)
            for task, moment in enumerate(arrival_s):
                if moment == now_s and task not in arrived:
                    arrived.add(task)
                    if not self._ever(task):
                        self.refused.append(task)
                    elif not self._place(task, now_s):
                        self.waiting.append(task)
            if before == (len(self.decided), len(self.waiting)) and not any(h[3] == now_s for h in self.held.values()):
                moments = arrival_s + [h[3] for h in self.held.values()]
                moments += [moment for outage in outages for moment in outage[1:]]
                later = [moment for moment in moments if moment > now_s]
                if not later:
                    break
                now_s = min(later)
        return self
