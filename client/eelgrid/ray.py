"""Places work of Ray where an Eelgrid controller decides.

    with eelgrid.Client() as client, eelgrid.ray.place(client, replicas=2, gpus=1, cpus=4) as placed:
        workers = [Worker.options(**placed.options(number)).remote() for number in range(2)]

The controller decides on which node each replica runs; what it decided is reserved in Ray as a placement group of one bundle
for each replica, which names the workload, so that the controller counts nothing twice and energy is the workload's. At the
end of the block the group is removed and the workload released; a program that dies has both done for it. Needs Ray in the
program that calls it, and a controller that follows the cluster (`eelgrid-controller --ray`).

`python -m eelgrid.ray NODE` prints what to start the raylet of a node with.
"""

import contextlib
import importlib
import math
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eelgrid.client import Client
from eelgrid.errors import DeadlineExceededError, EelgridError, FailedPreconditionError, InvalidSettingsError
from eelgrid_protos import ray_names
from eelgrid_protos.messages import (
    Gpu,
    GpuStatus,
    Node,
    Placement,
    ResourceRequest,
    ServicePromise,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RayReplica:
    """Where one replica runs, in Ray's terms."""

    label_selector: Mapping[str, str]
    # What it reserves, by Ray's names of resources.
    bundle: Mapping[str, float]
    env_vars: Mapping[str, str]


class RayPlacement:
    """A workload that is placed, and the placement group that reserves it in Ray."""

    def __init__(self, client: Client, workload: Workload, replicas: Sequence[RayReplica], group: Any) -> None:
        self.workload, self.replicas, self.group = workload, tuple(replicas), group
        self._client = client

    def options(self, replica: int, **others: Any) -> dict[str, Any]:
        """Returns what to give to `.options()` of the actor or task that is this replica; `others` are added to it.

        An actor takes all that is reserved for the replica. For several tasks in one replica give `num_cpus` and `num_gpus`.
        """
        found, ray = self.replicas[replica], _load_ray()
        bundle = dict(found.bundle)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=replica, placement_group_capture_child_tasks=True
        )
        asked = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "memory": bundle.pop("memory", None),
            "resources": bundle or None,
            "scheduling_strategy": strategy,
            **others,
        }
        environment = dict(others.get("runtime_env") or {})
        environment["env_vars"] = {**environment.get("env_vars", {}), **found.env_vars}
        return {**{key: value for key, value in asked.items() if value is not None}, "runtime_env": environment}

    def release(self) -> None:
        """Frees what is reserved, in Ray and then in Eelgrid; harmless a second time."""
        _load_ray().util.remove_placement_group(self.group)
        with contextlib.suppress(FailedPreconditionError):
            self._client.cancel_workload(self.workload.workload_id)


def build_spec(
    *,
    name: str = "ray",
    kind: WorkloadKind = WorkloadKind.BATCH_JOB,
    replicas: int = 1,
    cpus: float = 1.0,
    memory_bytes: int = 0,
    gpus: float = 0.0,
    gpu_models: Iterable[str] = (),
    labels: Mapping[str, str] | None = None,
    own_labels: Mapping[str, str] | None = None,
    **spec: Any,
) -> WorkloadSpec:
    """Returns the spec of a workload for Ray; `labels` are required of the raylets, `spec` are other fields of WorkloadSpec.

    `cpus`, `memory_bytes` and `gpus` are of one replica; less than one GPU is a share of one. Raises InvalidSettingsError.
    """
    if gpus > 1.0 and gpus != int(gpus):
        raise InvalidSettingsError(f"gpus is {gpus}", "give a whole number, or a share of one GPU below 1")
    milli = round(1000 * gpus) if gpus < 1.0 else 1000
    traits = [ray_names.NODE_TRAIT]
    traits += [ray_names.label_trait(key, value) for key, value in sorted((labels or {}).items())]
    request = ResourceRequest(
        cpu_milli=round(1000 * cpus),
        memory_bytes=memory_bytes,
        gpu_count=math.ceil(gpus),
        gpu_milli=milli if gpus else 0,
        gpu_models=tuple(gpu_models),
    )
    return WorkloadSpec(
        name=name,
        kind=kind,
        replicas=replicas,
        request=request,
        required_traits=tuple(traits),
        labels=own_labels or {ray_names.ORIGIN: ray_names.OF_CLIENT},
        **spec,
    )


def build_serve_spec(
    application: str, deployment: str, *, service: ServicePromise | None = None, **spec: Any
) -> WorkloadSpec:
    """Returns the spec of a workload that stands for a deployment of Serve, which the controller scales from then on.

    The application needs `external_scaler_enabled: true`, and the deployment no `autoscaling_config`. `service` is what it
    promises; its metrics may be at http://{node}:8080/metrics, since the controller finds them in Ray. `spec` are arguments of
    `build_spec`, with what one replica asks for; submit it with `Client.submit_workload`, and end it with `cancel_workload`.
    """
    own = {ray_names.ORIGIN: ray_names.OF_SERVE, ray_names.SERVE_LABEL: f"{application}/{deployment}"}
    asked = {"name": f"{application}-{deployment}", "kind": WorkloadKind.INFERENCE_SERVICE, "service": service, **spec}
    return build_spec(own_labels=own, **asked)


@contextlib.contextmanager
def place(
    client: Client,
    spec: WorkloadSpec | None = None,
    *,
    timeout_s: float = 600.0,
    reserve_s: float = 20.0,
    **request: Any,
) -> Iterator[RayPlacement]:
    """Has the controller place a workload, reserves it in Ray, and releases both at the end of the block.

    Give a `spec` of `build_spec`, or its arguments. Waits for `timeout_s` until it is placed and for `reserve_s` until Ray has
    reserved it; where others have taken the place in Ray meanwhile, the controller is asked again. Raises EelgridError.
    """
    found = acquire(client, spec or build_spec(**request), timeout_s=timeout_s, reserve_s=reserve_s)
    try:
        yield found
    finally:
        found.release()


def acquire(client: Client, spec: WorkloadSpec, *, timeout_s: float = 600.0, reserve_s: float = 20.0) -> RayPlacement:
    """Does what `place` does, for a program that calls `release` itself."""
    for _ in range(_ATTEMPTS):
        key = client.submit_workload(spec).workload_id
        try:
            workload = client.wait(key, until=WorkloadPhase.PLACED, timeout_s=timeout_s)
            replicas = describe_replicas(client, workload)
            group = _reserve(key, replicas, reserve_s)
        except BaseException:
            with contextlib.suppress(EelgridError):
                client.cancel_workload(key)
            raise
        if group is not None:
            return RayPlacement(client, workload, replicas, group)
        client.cancel_workload(key)
    raise DeadlineExceededError(
        f"Ray did not reserve where {spec.name} was placed, {_ATTEMPTS} times in {reserve_s:g} s each",
        "look at `ray status` for who holds the nodes, and whether eelgrid-controller follows this cluster",
    )


def _reserve(key: str, replicas: Sequence[RayReplica], reserve_s: float) -> Any:
    """Returns the placement group of a workload; None if Ray has not reserved it in time."""
    ray = _load_ray()
    group = ray.util.placement_group(
        [dict(one.bundle) for one in replicas],
        strategy="PACK",
        name=ray_names.GROUP_PREFIX + key,
        bundle_label_selector=[dict(one.label_selector) for one in replicas],
    )
    try:
        if group.wait(timeout_seconds=reserve_s):
            return group
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    ray.util.remove_placement_group(group)
    return None


def describe_replicas(client: Client, workload: Workload) -> list[RayReplica]:
    """Returns where the replicas of a placed workload run, by their number. Raises EelgridError."""
    places = sorted(workload.placements, key=lambda one: one.replica)
    sliced = {one.node_name for one in places if one.gpu_instance is not None and one.gpu_instance.profile}
    gpus: dict[str, GpuStatus] = {}
    for name in sorted(sliced):
        gpus.update({one.gpu.uuid: one for one in client.list_gpus(node_name=name)})
    nodes = _load_ray().nodes()
    return [
        describe_replica(
            workload, place, select_node(place.node_name, nodes), {key: one.gpu for key, one in gpus.items()}
        )
        for place in places
    ]


def describe_replica(
    workload: Workload, place: Placement, selector: Mapping[str, str], gpus: Mapping[str, Gpu]
) -> RayReplica:
    """Returns where one replica runs; `gpus` are by UUID those that are cut into slices. Raises FailedPreconditionError."""
    request, bundle = workload.spec.request, dict[str, float]()
    # The agent reads it in the environment of the workers, and charges them to the workload.
    variables = {ray_names.WORKLOAD_VARIABLE: workload.workload_id}
    if request.cpu_milli:
        bundle["CPU"] = request.cpu_milli / 1000.0
    if request.memory_bytes:
        bundle["memory"] = float(request.memory_bytes)
    cut = place.gpu_instance
    if cut is not None and cut.profile:
        bundle[ray_names.mig_resource(cut.profile)] = 1.0
        variables["CUDA_VISIBLE_DEVICES"] = _find_slice(place, gpus)
        # Without a GPU of Ray's own it would hide all of them from the process.
        variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    elif request.gpu_count:
        bundle["GPU"] = request.gpu_count * request.gpu_milli / 1000.0
    return RayReplica(label_selector=selector, bundle=bundle, env_vars=variables)


def _find_slice(place: Placement, gpus: Mapping[str, Gpu]) -> str:
    """Returns the UUID of the MIG device that a replica was given."""
    assert place.gpu_instance is not None
    for uuid in place.gpu_uuids:
        for instance in gpus[uuid].gpu_instances if uuid in gpus else ():
            is_meant = (instance.profile, instance.start) == (place.gpu_instance.profile, place.gpu_instance.start)
            if is_meant and instance.compute_instances:
                return instance.compute_instances[0].uuid
    raise FailedPreconditionError(
        f"the slice {place.gpu_instance.profile} of {place.node_name} is not cut yet", "wait until its agent reports it"
    )


def select_node(name: str, nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the label selector of a node, given `ray.nodes()`. Raises FailedPreconditionError if none is it."""
    alive = [node for node in nodes if node.get("Alive")]
    if any(node.get("Labels", {}).get(ray_names.NODE_LABEL) == name for node in alive):
        return {ray_names.NODE_LABEL: name}
    for node in alive:
        known = (node.get("NodeName"), f"ray-{node['NodeID'][:12]}")
        if name in known:
            return {"ray.io/node-id": node["NodeID"]}
    raise FailedPreconditionError(
        f"no raylet is node {name}",
        f"start it with --labels {ray_names.NODE_LABEL}={name}, or look whether it has left",
    )


def _load_ray() -> Any:
    """Returns Ray, which is no dependency of ours. Raises FailedPreconditionError."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
        importlib.import_module("ray.util.placement_group")
    except ImportError:
        raise FailedPreconditionError("this program has no Ray", "install it: pip install ray") from None
    return ray


def recommend_start(node: Node) -> list[str]:
    """Returns the options of `ray start` for the raylet of a node: labels to select it by, and its MIG slices."""
    inventory = node.inventory
    labels = {ray_names.NODE_LABEL: inventory.node_name}
    models = sorted({gpu.model for gpu in inventory.gpus})
    if len(models) == 1:
        labels["eelgrid.io/gpu-model"] = models[0]
    if inventory.pool:
        labels["eelgrid.io/pool"] = inventory.pool
    slices: dict[str, int] = {}
    for gpu in inventory.gpus:
        for instance in gpu.gpu_instances:
            name = ray_names.mig_resource(instance.profile)
            slices[name] = slices.get(name, 0) + 1
    whole = sum(not gpu.mig_enabled for gpu in inventory.gpus)
    options = ["--labels", ",".join(f"{key}={value}" for key, value in labels.items()), "--num-gpus", str(whole)]
    if slices:
        pairs = ", ".join(f'"{name}": {count}' for name, count in sorted(slices.items()))
        options += ["--resources", f"{{{pairs}}}"]
    return options


def main(arguments: Sequence[str]) -> int:
    """Prints the options of `ray start` for a node, by default this machine's."""
    name = arguments[0] if arguments else socket.gethostname()
    try:
        with Client() as client:
            nodes = [one for one in client.list_nodes(name_contains=name) if one.inventory.node_name == name]
    except EelgridError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not nodes:
        sys.stderr.write(f"no node is called {name}; `eelctl nodes` lists them, or start an agent there\n")
        return 1
    sys.stdout.write(shlex.join(recommend_start(nodes[0])) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
