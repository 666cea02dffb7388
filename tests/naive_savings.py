"""Slow, obvious twin of eelgrid_controller.energy: what stands where is a list, and every node is made of it anew.

No arrays, no queues by kind: after each event everything that waits is tried on every node, in
its order. Formulas of power and best fit are those of tests.naive and tests.naive_openb.
"""

from dataclasses import dataclass, field

from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.state.engine_reports import NO_EXTERNAL_USAGE
from eelgrid_controller.state.events import (
    GpuLost,
    GpuReturned,
    NodeJoined,
    NodeLost,
    NodeOccupied,
    WorkloadCancelled,
    WorkloadMoved,
    WorkloadPlaced,
    WorkloadScaled,
    WorkloadSubmitted,
)
from eelgrid_protos import catalogue
from tests import naive
from tests.naive_openb import best_fit, tightest

POWER = PriorPowerModel(catalogue.load_catalogue())


@dataclass
class Twin:
    """Both plans; a place is a node's name and the UUIDs of its GPUs."""

    inventories: dict = field(default_factory=dict)
    lost: set = field(default_factory=set)  # names of nodes and UUIDs of GPUs
    others: dict = field(default_factory=dict)
    specs: dict = field(default_factory=dict)  # in the order of arrival
    numbers: dict = field(default_factory=dict)
    here: dict = field(default_factory=dict)  # by workload and replica
    there: dict = field(default_factory=dict)
    waits: list = field(default_factory=list)  # workload and replicas that begin together

    def follow(self, event):
        match event:
            case WorkloadSubmitted(workload_id=key, spec=spec):
                self.specs[key], self.numbers[key] = spec, len(self.numbers)
                self.waits.append((key, tuple(range(spec.replicas))))
                self.try_all(only=self.waits[-1])
            case WorkloadPlaced(workload_id=key, placements=new) | WorkloadMoved(workload_id=key, placements=new):
                self.stand(key, new)
            case WorkloadScaled(workload_id=key, placements=new, released=released):
                for replica in released:
                    self.end(key, replica)
                for one in new:
                    self.waits.append((key, (one.replica,)))
                    self.try_all(only=self.waits[-1])
                self.stand(key, new)
            case WorkloadCancelled(workload_id=key):
                for replica in {r for k, r in (*self.here, *self.there) if k == key}:
                    self.end(key, replica)
                self.waits = [one for one in self.waits if one[0] != key]
            case NodeJoined(inventory=inventory):
                self.inventories[inventory.node_name] = inventory
                self.lost.discard(inventory.node_name)
                self.lost -= {gpu.uuid for gpu in inventory.gpus}
            case NodeLost(node_name=name):
                self.lost.add(name)
            case GpuLost(gpu_uuid=uuid):
                self.lost.add(uuid)
            case GpuReturned(gpu_uuid=uuid):
                self.lost.discard(uuid)
            case NodeOccupied(node_name=name, others=others):
                self.others[name] = others
        self.try_all()

    def stand(self, key, placements):
        for one in placements:
            self.here[key, one.replica] = (one.node_name, one.gpu_uuids)

    def end(self, key, replica):
        self.here.pop((key, replica), None)
        self.there.pop((key, replica), None)
        for one in [one for one in self.waits if one[0] == key and replica in one[1]]:
            self.waits.remove(one)
            left = tuple(other for other in one[1] if other != replica)
            if left:
                self.waits.append((key, left))

    def order(self, one):
        key, replicas = one
        return -self.specs[key].priority, self.numbers[key], replicas

    def try_all(self, only=None):
        """What waits in its order, or one thing alone."""
        for one in [only] if only else sorted(self.waits, key=self.order):
            key, replicas = one
            before = self.there.copy()
            if all(self.put(key, replica) for replica in replicas):
                self.waits.remove(one)
            else:
                self.there = before

    def put(self, key, replica):
        request, required = self.specs[key].request, set(self.specs[key].required_traits)
        best = None
        for name in sorted(self.inventories):
            node, uuids, models = self.node(name, self.there)
            allowed = {models.index(model) for model in request.gpu_models if model in models}
            task = naive.Task(
                request.cpu_milli,
                request.memory_bytes,
                request.gpu_count,
                request.gpu_milli,
                allowed if request.gpu_models else None,
            )
            if naive.verdict(node, task) or not required <= set(self.others.get(name, NO_EXTERNAL_USAGE).traits):
                continue
            score = best_fit(node, task)
            if best is None or score > best[0]:
                best = score, name, tuple(uuids[slot] for slot in tightest(node, task))
        if best is not None:
            self.there[key, replica] = best[1:]
        return best is not None

    def node(self, name, held):
        """A node that holds these replicas and what others hold; its UUIDs, and its models by code."""
        inventory, others = self.inventories[name], self.others.get(name, NO_EXTERNAL_USAGE)
        mine = [(place[1], self.specs[key].request) for (key, _), place in held.items() if place[0] == name]
        gpus = sorted(inventory.gpus, key=lambda gpu: gpu.index)
        models = sorted({gpu.model for gpu in gpus})
        free = {gpu.uuid: 1000 for gpu in gpus}
        for uuids, request in mine:
            for uuid in uuids:
                free[uuid] -= request.gpu_milli
        unheld = [gpu.uuid for gpu in gpus if free[gpu.uuid] == 1000]
        for uuid in unheld[len(unheld) - min(others.gpu_count, len(unheld)) :]:
            free[uuid] = 0
        cpu = sum(request.cpu_milli for _, request in mine) + others.cpu_milli
        memory = sum(request.memory_bytes for _, request in mine) + others.memory_bytes
        devices = [
            None if gpu.uuid in self.lost else naive.Gpu(models.index(gpu.model), free[gpu.uuid], *POWER.gpu(gpu)[:2])
            for gpu in gpus
        ]
        node = naive.Node(
            inventory.cpu_milli,
            max(0, inventory.cpu_milli - cpu),
            max(0, inventory.memory_bytes - memory),
            devices,
            available=name not in self.lost and not others.closed,
        )
        return node, [gpu.uuid for gpu in gpus], models

    def power_w(self, plan):
        """Of the nodes with what stands in both plans."""
        both = {one: place for one, place in plan.items() if one in self.here and one in self.there}
        return sum(naive.node_power(self.node(name, both)[0]) for name in self.inventories)
