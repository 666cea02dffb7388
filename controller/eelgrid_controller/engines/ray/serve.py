"""Deployments of Ray Serve: which number of replicas each is given, by the workload that stands for it.

`decide_scaling` compares Serve's applications with the core's workloads. Owns how a workload names its deployment, and why one
is not scaled. Must not know how requests are made.

Theory. A workload with the label ray/serve=APPLICATION/DEPLOYMENT stands for a deployment: its objective is the user's, the
autoscaler of objectives changes its replicas as anybody's, and Serve is given their number by its external scaler. Serve starts
replicas where it likes, so the core's places follow them (`list_replica_moves`), like those of any work that an engine runs. Serve
stays the only truth: a deployment that scales itself is refused with the reason, since two scalers undo each other, and one
that is not there or was not opened to external scaling is told, not forced. Nothing depends on what was written before: after a
redeployment, which may bring the number of the configuration back, the next look writes again.

Sources: docs.ray.io (Serve REST API v2, external scaling), tried on Ray 2.60: 412 where it is off, 400 beside autoscaling_config.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from eelgrid_controller.engines.ray.answers import RayHolding, RayNode, RayUnreadable, parse_json
from eelgrid_controller.state.engine_reports import Adoption, ExternalUsage, RunningReplica
from eelgrid_protos.messages import Workload, WorkloadPhase
from eelgrid_protos.ray_names import SERVE_LABEL

_REPLICA_PREFIX = "SERVE_REPLICA::"
_REDEPLOY = "and deploy it again"


class DeploymentKey(NamedTuple):
    """A deployment by its application and its name."""

    application: str
    deployment: str

    def __str__(self) -> str:
        """`application/deployment`."""
        return f"{self.application}/{self.deployment}"


@dataclass(frozen=True, slots=True)
class ServeDeployment:
    """A deployment as Serve has it."""

    key: DeploymentKey
    target_replicas: int
    running: int
    is_scaled_by_serve: bool
    is_open: bool


class ServeLook(NamedTuple):
    """Serve at one moment: its deployments, and the ids of nodes whose proxies route requests to them."""

    deployments: Mapping[DeploymentKey, ServeDeployment]
    routers: frozenset[str]


@dataclass(frozen=True, slots=True)
class ScaleServeDeployment:
    """Give a deployment its number of replicas."""

    workload_id: str
    key: DeploymentKey
    replicas: int


@dataclass(frozen=True, slots=True)
class LeaveServeDeployment:
    """A deployment is not scaled, and why."""

    workload_id: str
    reason: str


def parse_applications(text: bytes) -> ServeLook:
    """Parses the answer of GET /api/serve/applications/; raises RayUnreadable. An unreadable deployment is left out."""
    answer = parse_json(text)
    applications = answer.get("applications") if isinstance(answer, dict) else None
    if not isinstance(applications, dict):
        raise RayUnreadable("the answer has no applications")
    found: dict[DeploymentKey, ServeDeployment] = {}
    for name, application in applications.items():
        deployments = application.get("deployments") if isinstance(application, dict) else None
        config = application.get("deployed_app_config") if isinstance(application, dict) else None
        is_open = isinstance(config, dict) and config.get("external_scaler_enabled") is True
        is_open |= isinstance(application, dict) and application.get("external_scaler_enabled") is True
        for title, one in deployments.items() if isinstance(deployments, dict) else ():
            key = DeploymentKey(name, title)
            if isinstance(one, dict) and (read := _read_deployment(key, one, is_open=is_open)) is not None:
                found[key] = read
    proxies = answer.get("proxies")
    return ServeLook(found, frozenset(map(str, proxies)) if isinstance(proxies, dict) else frozenset())


def _read_deployment(key: DeploymentKey, found: Mapping[str, Any], *, is_open: bool) -> ServeDeployment | None:
    target, config = found.get("target_num_replicas"), found.get("deployment_config")
    if not isinstance(target, int) or not isinstance(config, dict):
        return None
    replicas = found.get("replicas") or ()
    running = sum(isinstance(one, dict) and one.get("state") == "RUNNING" for one in replicas)
    return ServeDeployment(key, target, running, config.get("autoscaling_config") is not None, is_open)


def name_deployment(workload: Workload) -> DeploymentKey | None:
    """Returns the deployment that a workload stands for; None if it stands for none."""
    application, slash, deployment = workload.spec.labels.get(SERVE_LABEL, "").partition("/")
    return DeploymentKey(application, deployment) if application and slash and deployment else None


def decide_scaling(
    deployments: Mapping[DeploymentKey, ServeDeployment], workloads: Mapping[str, Workload]
) -> list[ScaleServeDeployment | LeaveServeDeployment]:
    """Returns what is to be done about each workload that stands for a deployment and is placed."""
    found: list[ScaleServeDeployment | LeaveServeDeployment] = []
    taken: dict[DeploymentKey, str] = {}
    for key, workload in sorted(workloads.items(), key=lambda item: (item[1].submitted_ns, item[0])):
        name = name_deployment(workload)
        if name is None or workload.phase is not WorkloadPhase.PLACED:
            continue
        first, deployment = taken.setdefault(name, key), deployments.get(name)
        if first != key:
            found.append(
                LeaveServeDeployment(key, f"the workload {first} stands for {name} already; cancel one of them")
            )
        elif deployment is None:
            found.append(
                LeaveServeDeployment(key, f"Serve has no deployment {name}; deploy it, or cancel the workload")
            )
        elif deployment.is_scaled_by_serve:
            remedy = f"take autoscaling_config out of its configuration {_REDEPLOY}"
            found.append(LeaveServeDeployment(key, f"Serve scales {name} itself; {remedy}"))
        elif not deployment.is_open:
            remedy = f"set external_scaler_enabled: true in its application {_REDEPLOY}"
            found.append(LeaveServeDeployment(key, f"Serve does not let {name} be scaled from outside; {remedy}"))
        elif deployment.target_replicas != len(workload.placements):
            found.append(ScaleServeDeployment(key, name, len(workload.placements)))
    return found


def count_running(workload: Workload, deployments: Mapping[DeploymentKey, ServeDeployment]) -> int:
    """Returns how many replicas of a workload's deployment serve; one that is placed may still begin."""
    name = name_deployment(workload)
    deployment = None if name is None else deployments.get(name)
    return 0 if deployment is None else deployment.running


def claim_replicas(holdings: Iterable[RayHolding], workloads: Mapping[str, Workload]) -> dict[str, str]:
    """Returns the workload of each replica of Serve that one stands for, by the actor that the replica is."""
    stands_for: dict[DeploymentKey, str] = {}
    for key, workload in sorted(workloads.items(), key=lambda item: (item[1].submitted_ns, item[0])):
        name = name_deployment(workload)
        if name is not None and workload.phase is WorkloadPhase.PLACED:
            stands_for.setdefault(name, key)
    found = {}
    for one in holdings:
        # SERVE_REPLICA::application#deployment#id
        parts = one.actor_name.removeprefix(_REPLICA_PREFIX).split("#")
        if one.actor_name.startswith(_REPLICA_PREFIX) and len(parts) == 3:
            workload_id = stands_for.get(DeploymentKey(parts[0], parts[1]))
            if workload_id is not None:
                found[one.holder] = workload_id
    return found


def list_replica_moves(
    holdings: Iterable[RayHolding], names: Mapping[str, str], workloads: Mapping[str, Workload]
) -> list[tuple[Workload, Adoption]]:
    """Returns which workloads' places are elsewhere than their replicas run, once all of these are there, and the correction."""
    actual: dict[str, list[RayHolding]] = {}
    for one in holdings:
        if one.actor_name.startswith(_REPLICA_PREFIX) and one.workload_id in workloads:
            actual.setdefault(one.workload_id, []).append(one)
    found = []
    for key, replicas in actual.items():
        workload = workloads[key]
        if len(replicas) != len(workload.placements):
            continue
        wanted = Counter(names[one.node_id] for one in replicas)
        have = Counter(place.node_name for place in workload.placements)
        extra, released = have - wanted, list[int]()
        for place in workload.placements:
            if extra[place.node_name] > 0:
                extra[place.node_name] -= 1
                released.append(place.replica)
        missing = wanted - have
        if not released:
            continue
        counted = ExternalUsage(
            cpu_milli=workload.spec.request.cpu_milli,
            memory_bytes=workload.spec.request.memory_bytes,
            gpu_count=workload.spec.request.gpu_count,
        )
        standing = tuple(RunningReplica(node_name=name, counted=counted) for name in sorted(missing.elements()))
        first = 1 + max(place.replica for place in workload.placements)
        found.append((workload, Adoption(standing=standing, first=first, released=tuple(released))))
    return found


class MetricPages:
    """Where Serve's metrics are: one page for each node that has replicas of a deployment, or routes requests to them.

    What waits for a replica is told where it was sent, which is the node of a proxy; so its page is read even if no replica
    runs there. A page keeps its number while its node is there, since what it has counted goes on when replicas come and go.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def list_pages(
        self, nodes: Iterable[RayNode], routers: Collection[str], workloads: Mapping[str, Workload]
    ) -> dict[str, dict[int, str]]:
        """Returns by workload the URLs of pages by number; `routers` are the ids of nodes with a proxy."""
        known = {node.node_id: node for node in nodes if node.metrics_port and node.address}
        self._numbers = {key: number for key, number in self._numbers.items() if key in known}
        for key in sorted(known.keys() - self._numbers.keys()):
            self._numbers[key] = 1 + max(self._numbers.values(), default=-1)
        found: dict[str, dict[int, str]] = {}
        for key, workload in workloads.items():
            if name_deployment(workload) is None:
                continue
            places = {place.node_name for place in workload.placements}
            wanted = [one for one in known.values() if one.name in places or (places and one.node_id in routers)]
            found[key] = {self._numbers[one.node_id]: _build_page_url(one) for one in wanted}
        return found


def _build_page_url(node: RayNode) -> str:
    host = f"[{node.address}]" if ":" in node.address else node.address
    return f"http://{host}:{node.metrics_port}/metrics"
