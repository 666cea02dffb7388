"""The real Core and the simulated world's interface to it: nodes, submissions, replicas, placements.

Owns ids of workloads and the difference between two states. Must not know physics,
watts or who decides. What the engine of a real cluster would do is done here for every
policy equally: replicas and jobs of a lost node are removed from it and submitted again.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from bench.loop.scene import QUANTILE, Job, Node, Scene, Service
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CoreStep
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_protos.messages import (
    OBJECTIVES,
    Gpu,
    Inventory,
    LatencyMetric,
    LatencyObjective,
    Placement,
    Policy,
    ResourceRequest,
    ServicePromise,
    SubmitWorkloadRequest,
    WorkloadKind,
    WorkloadSpec,
)

__all__ = ["Cluster", "Place"]

_GIB = 2**30
_WHOLE = 1000


class Place(NamedTuple):
    """Where one replica of a service, or one part of a job, stands."""

    node: str
    gpus: tuple[int, ...]  # in the fleet


def _inventory(node: Node, scene: Scene) -> Inventory:
    product = scene.catalogue.products[node.key]
    return Inventory(
        node_name=node.name,
        cpu_milli=128_000,
        memory_bytes=1024 * _GIB,
        topology=("hall", node.rack),
        gpus=tuple(
            Gpu(
                uuid=f"GPU-{node.name}-{index}",
                index=index,
                product=product.nvml_names[0],
                model=product.model,
                catalogue_key=node.key,
                memory_bytes=product.memory_bytes,
                power_limit_default_w=product.power_default_w,
                power_limit_min_w=product.power_min_w,
                power_limit_max_w=product.power_max_w,
            )
            for index in range(node.gpus)
        ),
    )


class Cluster:
    """One fleet under one Core."""

    def __init__(self, scene: Scene, placement: str, objective: str) -> None:
        """`placement` is a policy of the Core by name, `objective` one of its weightings; only ours heeds that."""
        self.scene = scene
        self.core = Core(ClusterState(), scene.catalogue)
        policy = Policy(placement=placement, objective=objective, weights=OBJECTIVES[objective])
        self.core.update_policy(policy, now_ns=0)
        self._inventories = {node.name: _inventory(node, scene) for node in scene.nodes}
        self.index: dict[str, int] = {}
        for inventory in self._inventories.values():
            for gpu in inventory.gpus:
                self.index[gpu.uuid] = len(self.index)
            self.core.register_node(inventory, now_ns=0)
        self._specs = {service.name: self._service_spec(service) for service in scene.services}
        self._wanted: dict[str, int] = {}  # replicas by service
        self._lost: set[str] = set()
        self._read: dict[str, tuple[tuple[Placement, ...], dict[str, Place]]] = {}  # replicas by service, as last read
        self._job_ids: dict[str, str] = {}
        self._drawn = 0

    def _service_spec(self, service: Service) -> WorkloadSpec:
        request = ResourceRequest(
            cpu_milli=4_000 * service.gpus,
            memory_bytes=32 * _GIB * service.gpus,
            gpu_count=service.gpus,
            gpu_milli=_WHOLE,
            gpu_models=(self.scene.catalogue.products[service.points[0].configuration.gpu_model].model,),
        )
        promise = ServicePromise(
            profile=service.points[0].workload,
            objectives=(
                LatencyObjective(metric=LatencyMetric.INTER_TOKEN, quantile=QUANTILE, latency_s=service.objective_s),
            ),
            replicas_least=service.least,
            replicas_most=service.most,
            output_tokens=service.engine.output_tokens,
        )
        return WorkloadSpec(
            name=service.name[:60], request=request, kind=WorkloadKind.INFERENCE_SERVICE, service=promise
        )

    def _job_spec(self, job: Job) -> WorkloadSpec:
        each = job.gpus // job.parts
        key = next(node.key for node in self.scene.nodes if node.name.startswith(job.curve.gpu_model))
        request = ResourceRequest(
            cpu_milli=4_000 * each,
            memory_bytes=32 * _GIB * each,
            gpu_count=each,
            gpu_milli=_WHOLE,
            gpu_models=(self.scene.catalogue.products[key].model,),
        )
        return WorkloadSpec(name=job.name, request=request, kind=WorkloadKind.TRAINING_JOB, replicas=job.parts)

    def begin(self, service: Service, now_s: float) -> None:
        """A service with its first replicas."""
        spec = replace(self._specs[service.name], replicas=service.starts)
        self.core.submit(SubmitWorkloadRequest(spec=spec, workload_id=service.name), now_ns=_ns(now_s))
        self._wanted[service.name] = service.starts

    def scale(self, name: str, replicas: int, now_s: float) -> None:
        """So many replicas from now on, or as many as there is room for."""
        self._wanted[name] = replicas
        self.core.scale(name, replicas, now_ns=_ns(now_s))

    def replicas(self, name: str) -> dict[str, Place]:
        """The replicas of a service on nodes that are there, by number; the same object while nothing changed."""
        placements = self._placements(name)
        known = self._read.get(name)
        if known is not None and known[0] is placements:
            return known[1]
        placed = zip(placements, self._places(name), strict=True)
        found = {f"{one.replica}": place for one, place in placed if place.node not in self._lost}
        self._read[name] = (placements, found)
        return found

    def limit(self, job: str, limit_w: float, now_s: float) -> None:
        """The power limit of a job's GPUs, for the plans of its nodes."""
        self.core.set_limit(self._job_ids[job], limit_w, now_ns=_ns(now_s))

    def _placements(self, key: str) -> tuple[Placement, ...]:
        return self.core.workload(key).placements

    def _places(self, key: str) -> list[Place]:
        return [
            Place(one.node_name, tuple(self.index[uuid] for uuid in one.gpu_uuids)) for one in self._placements(key)
        ]

    def submit(self, job: Job, now_s: float) -> None:
        """A job waits for a place, or has one at once."""
        self._drawn += 1
        key = self._job_ids[job.name] = f"{job.name}.{self._drawn}"
        self.core.submit(SubmitWorkloadRequest(spec=self._job_spec(job), workload_id=key), now_ns=_ns(now_s))

    def end(self, job: Job, now_s: float) -> None:
        """A job is done."""
        self.core.cancel(self._job_ids[job.name], now_ns=_ns(now_s))

    def parts(self, job: Job) -> Mapping[str, list[int]]:
        """GPUs of a job by node; empty while it waits."""
        found: dict[str, list[int]] = {}
        for place in self._places(self._job_ids[job.name]):
            found.setdefault(place.node, []).extend(place.gpus)
        return found

    def lose(self, node: str, jobs: list[Job], now_s: float) -> None:
        """The node is lost; what stood there is asked for anew."""
        self.core.mark_node_lost(node, now_ns=_ns(now_s))
        self._lost.add(node)
        self._read.clear()
        for name, wanted in self._wanted.items():
            if any(place.node == node for place in self._places(name)):
                self.scale(name, wanted, now_s)
        for job in jobs:
            self.core.cancel(self._job_ids[job.name], now_ns=_ns(now_s))
            self.submit(job, now_s)

    def back(self, node: str, now_s: float) -> None:
        """The node is there again, with nothing on it."""
        self._lost.discard(node)
        self._read.clear()
        self.core.register_node(self._inventories[node], now_ns=_ns(now_s))

    def go_on(self, now_s: float) -> None:
        """Tries what waits, where the Core stopped."""
        while self.core.has_backlog:
            step: CoreStep[None] = self.core.retry(now_ns=_ns(now_s))
            if not step.events and not self.core.has_backlog:
                break


def _ns(now_s: float) -> int:
    return round(now_s * 1e9)
