"""Nodes of a Ray cluster as jobs in the queue of an Eelgrid controller: as many as Ray's work needs, taken back with notice.

    RAY_CLOUD_INSTANCE_ID=head RAY_NODE_TYPE_NAME=head ray start --head --no-monitor
    python -m eelgrid.ray_capacity autoscale capacity.yaml

`autoscale` runs Ray's own autoscaler (v2) with an instance provider over the queue: what it launches is a job that waits for
its turn as any other, and runs `python -m eelgrid.ray_capacity raylet` where the controller places it. Before such a job must
make room, its raylet is drained with the job's grace as the deadline; when the job is placed again, a new raylet comes.
Owns which jobs are instances, and the life of a raylet. Must not know how demand is reckoned, which is Ray's, nor who gets
which devices, which is the controller's. Needs Ray in the programs that run it; to be imported it needs none.

Theory. Ray's autoscaler is level-triggered over the instances that its provider lists, so everything here follows from the
jobs that the controller holds: after a restart nothing has to be known. An instance is one run of a job, JOB.ATTEMPT, since
an instance that is gone must never come back under its name. A job that has to make room is listed twice: the run that ends,
and the next one that waits; so Ray neither asks for another job in its place, nor ends one that has returned to the queue when
it clears away the run before. Submissions have ids made of Ray's request, so that one which is repeated is no second job.
These decisions are the same whatever a node is: `RayCapacity` makes them over a `NodeSupply`, which is the queue here, and the
worker groups of a RayCluster in `eelgrid.kuberay`.

Sources: ray/autoscaler/v2/instance_manager/node_provider.py (ICloudInstanceProvider) and reconciler.py, tried on Ray 2.60.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_origin

from eelgrid.client import Client
from eelgrid.errors import EelgridError, FailedPreconditionError, InvalidSettingsError, NotFoundError
from eelgrid_protos import ray_names
from eelgrid_protos.messages import (
    JobSchedule,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)

_LOG = logging.getLogger("eelgrid.ray_capacity")
_CONFIG_BYTES_MOST = 2**20
_PROBLEMS_MOST = 1_000
_NODES_MOST = 1_000
# A job whose raylet fails is tried again so often, with the controller's growing pauses.
_RETRIES = 5
# Of the notice, what is kept to end a raylet that has not left by itself.
_END_S = 5.0
_LOOK_S = 0.2
# Instances may wait in the queue for long; Ray would give one up after an hour.
_WAIT_MOST_S = 7 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNodeType:
    """What one raylet of a type has, and how many there may be."""

    name: str
    most: int
    least: int = 0
    cpus: int = 1
    gpus: int = 0
    memory_bytes: int = 0
    gpu_models: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    # Resources of its users' own.
    resources: Mapping[str, int] = field(default_factory=dict)
    # Further options of `ray start`.
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings:
    """What `autoscale` reads from its file; `address` is that of the head, HOST:6379, and `drain_s` the notice of an end."""

    address: str
    nodes: tuple[RayNodeType, ...]
    cluster: str = "ray"
    queue: str = ""
    user: str = ""
    priority: int = 0
    idle_s: float = 60.0
    drain_s: float = 60.0
    poll_s: float = 5.0
    head_type: str = "head"
    python: str = sys.executable
    working_directory: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)


def parse_settings(found: object) -> CapacitySettings:
    """Returns the settings, given what the file holds; raises InvalidSettingsError, which names the field."""
    if not isinstance(found, dict) or not isinstance(found.get("nodes"), dict) or not found["nodes"]:
        raise InvalidSettingsError("nodes is empty", "name a type of nodes, such as gpu: {gpus: 1, cpus: 8, most: 4}")
    types = [
        RayNodeType(**_read_fields(RayNodeType, f"nodes.{name}.", {**(one or {}), "name": str(name)}))
        for name, one in found["nodes"].items()
    ]
    settings = CapacitySettings(**_read_fields(CapacitySettings, "", {**found, "nodes": types}))
    for name in (settings.cluster, settings.head_type, *(one.name for one in types)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", name):
            raise InvalidSettingsError(f"{name!r} is no name", "use up to 40 letters, digits, _ and -")
    for one in types:
        if one.name == settings.head_type:
            raise InvalidSettingsError(f"nodes.{one.name} is the type of the head", "give it another name")
        if not 0 <= one.least <= one.most <= _NODES_MOST:
            asked = f"nodes.{one.name} has least {one.least} and most {one.most}"
            raise InvalidSettingsError(asked, f"give 0 <= least <= most <= {_NODES_MOST}")
    if settings.drain_s <= _END_S or settings.idle_s < 0.0 or settings.poll_s <= 0.0:
        raise InvalidSettingsError("drain_s, idle_s or poll_s is too short", f"give a drain_s of more than {_END_S:g}")
    return settings


def _read_fields(kind: Any, where: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a dataclass of settings, checked."""
    known = {one.name: one for one in fields(kind)}
    if strange := sorted(map(str, found.keys() - known.keys())):
        raise InvalidSettingsError(f"{where}{strange[0]} is no setting", f"choose from {', '.join(known)}")
    if missing := [one for one in ("address", "most") if one in known and one not in found]:
        raise InvalidSettingsError(f"{where}{missing[0]} is missing", "add it")
    values: dict[str, Any] = {}
    for name, value in found.items():
        wanted: Any = get_origin(known[name].type) or known[name].type
        accepted: Any = {tuple: (list, tuple), Mapping: (dict,), float: (int, float)}.get(wanted, (wanted,))
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise InvalidSettingsError(f"{where}{name} is {value!r}", f"give a {wanted.__name__.lower()}")
        values[name] = tuple(value) if wanted is tuple else float(value) if wanted is float else value
    return values


# Instances


class RayInstance(NamedTuple):
    """One run of a job that is a node of Ray; it is placed, or waits for it."""

    instance_id: str
    node_type: str
    is_placed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityProblem:
    """A launch that failed, of a type, or the end of an instance."""

    reason: str
    request_id: str
    node_type: str = ""
    instance_id: str = ""


class JobQueue(Protocol):
    """Of `eelgrid.Client`, what is used here."""

    def submit_workload(self, spec: WorkloadSpec, *, workload_id: str = "") -> Workload:
        """Submits a workload."""

    def list_workloads(self, *, phases: Iterable[WorkloadPhase] = (), name_contains: str = "") -> Iterable[Workload]:
        """Lists workloads."""

    def cancel_workload(self, workload_id: str) -> Workload:
        """Ends a workload."""


class NodeRun(NamedTuple):
    """One run of a node, as its supply has it.

    `next_id` is the run that waits in its place, of one that makes room or has ended by itself; empty if none does.
    """

    instance_id: str
    node_type: str
    is_placed: bool
    next_id: str = ""


class NodeSupply(Protocol):
    """Where nodes come from: the queue of a controller, or the worker groups of KubeRay."""

    def list_runs(self) -> list[NodeRun]:
        """Returns the runs that are there or wait. Raises EelgridError."""

    def add(self, node_type: str, count: int, request_id: str) -> list[str]:
        """Asks for so many nodes, for a request repeated not again; returns why, for each that is refused."""

    def remove(self, runs: Sequence[NodeRun]) -> list[tuple[NodeRun, str]]:
        """Gives nodes back, whichever of their runs is there; returns those that are refused, and why."""


class RayCapacity:
    """The instances of one cluster by their supply: what Ray's instance provider does, in our own terms."""

    def __init__(self, supply: NodeSupply) -> None:
        self._supply = supply
        self._problems: deque[CapacityProblem] = deque(maxlen=_PROBLEMS_MOST)

    def list_instances(self) -> list[RayInstance]:
        """Returns the instances that run or wait. Raises EelgridError."""
        found = []
        for run in self._supply.list_runs():
            found.append(RayInstance(run.instance_id, run.node_type, run.is_placed))
            if run.next_id:
                found.append(RayInstance(run.next_id, run.node_type, is_placed=False))
        return found

    def launch(self, shape: Mapping[str, int], request_id: str) -> None:
        """Asks for so many nodes of each type; what is refused is told by `take_problems`."""
        for name, count in shape.items():
            for reason in self._supply.add(name, count, request_id):
                self._problems.append(CapacityProblem(reason=reason, request_id=request_id, node_type=name))

    def terminate(self, instance_ids: Iterable[str], request_id: str) -> None:
        """Ends instances; the node of one that has ended by itself, and waits for its next run, goes on."""
        asked = list(instance_ids)
        try:
            newest = {run.next_id or run.instance_id: run for run in self._supply.list_runs()}
            refused = self._supply.remove([newest[key] for key in asked if key in newest])
        except EelgridError as error:
            self._problems += [
                CapacityProblem(reason=str(error), request_id=request_id, instance_id=key) for key in asked
            ]
            return
        self._problems += [
            CapacityProblem(reason=reason, request_id=request_id, instance_id=run.next_id or run.instance_id)
            for run, reason in refused
        ]

    def take_problems(self) -> list[CapacityProblem]:
        """Returns what has failed since the call before."""
        found = list(self._problems)
        self._problems.clear()
        return found


class JobSupply:
    """Nodes as jobs in the queue of a controller."""

    def __init__(self, jobs: JobQueue, settings: CapacitySettings) -> None:
        self._jobs, self._settings = jobs, settings
        self._types = {one.name: one for one in settings.nodes}

    def list_runs(self) -> list[NodeRun]:
        """Returns the runs of jobs that are nodes of the cluster. Raises EelgridError."""
        phases = (WorkloadPhase.PENDING, WorkloadPhase.PLACED)
        return [
            _describe_run(job)
            for job in self._jobs.list_workloads(phases=phases, name_contains=self._settings.cluster)
            if job.spec.labels.get(ray_names.CAPACITY_OF) == self._settings.cluster
        ]

    def add(self, node_type: str, count: int, request_id: str) -> list[str]:
        """Submits so many jobs; their ids are made of the request, so that one which is repeated is no second job."""
        refused, name = [], re.sub("[^A-Za-z0-9]", "", request_id)[:32]
        for number in range(count):
            try:
                if node_type not in self._types:
                    raise InvalidSettingsError(f"there is no type {node_type}", "add it to nodes")
                spec = build_node_job(self._settings, self._types[node_type])
                key = f"{self._settings.cluster}-{node_type}-{name}-{number}"
                self._jobs.submit_workload(spec, workload_id=key)
            except EelgridError as error:
                refused.append(str(error))
        return refused

    def remove(self, runs: Sequence[NodeRun]) -> list[tuple[NodeRun, str]]:
        """Cancels jobs."""
        refused = []
        for run in runs:
            try:
                self._jobs.cancel_workload(run.instance_id.rpartition(".")[0])
            except (NotFoundError, FailedPreconditionError):
                # It has ended.
                continue
            except EelgridError as error:
                refused.append((run, str(error)))
        return refused


def _describe_run(job: Workload) -> NodeRun:
    node_type, following = job.spec.labels.get(ray_names.NODE_TYPE, ""), f"{job.workload_id}.{job.attempt + 1}"
    if job.phase is WorkloadPhase.PENDING:
        return NodeRun(following, node_type, is_placed=False)
    next_id = following if job.returns_to_queue else ""
    return NodeRun(f"{job.workload_id}.{job.attempt}", node_type, is_placed=True, next_id=next_id)


def build_node_job(settings: CapacitySettings, node_type: RayNodeType) -> WorkloadSpec:
    """Returns the job that is a node of Ray of this type."""
    asked = ["--address", settings.address, "--node-type", node_type.name, "--drain-s", f"{settings.drain_s:g}"]
    labels = {**node_type.labels, ray_names.CAPACITY_LABEL: settings.cluster}
    start = ["--num-cpus", str(node_type.cpus), "--num-gpus", str(node_type.gpus)]
    start += ["--labels", ",".join(f"{key}={value}" for key, value in sorted(labels.items()))]
    if node_type.memory_bytes:
        start += ["--memory", str(node_type.memory_bytes)]
    if node_type.resources:
        start += ["--resources", json.dumps(dict(node_type.resources))]
    argv = (settings.python, "-m", "eelgrid.ray_capacity", "raylet", *asked, "--", *start, *node_type.options)
    return WorkloadSpec(
        name=f"{settings.cluster}-{node_type.name}",
        request=ResourceRequest(
            cpu_milli=1000 * node_type.cpus,
            memory_bytes=node_type.memory_bytes,
            gpu_count=node_type.gpus,
            gpu_milli=1000 if node_type.gpus else 0,
            gpu_models=node_type.gpu_models,
        ),
        mobility=Mobility.FIXED,
        queue=settings.queue,
        user=settings.user,
        priority=settings.priority,
        labels={ray_names.CAPACITY_OF: settings.cluster, ray_names.NODE_TYPE: node_type.name},
        schedule=JobSchedule(retries_most=_RETRIES),
        process=ProcessSpec(
            argv=argv,
            environment=settings.environment,
            working_directory=settings.working_directory,
            grace_s=settings.drain_s,
        ),
    )


def build_ray_config(settings: CapacitySettings) -> dict[str, Any]:
    """Returns what Ray's autoscaler reads as the file of a cluster."""
    types: dict[str, Any] = {settings.head_type: {"resources": {}, "node_config": {}, "max_workers": 0}}
    for one in settings.nodes:
        resources = {"CPU": one.cpus, "GPU": one.gpus, "memory": one.memory_bytes, **one.resources}
        types[one.name] = {
            "resources": {name: amount for name, amount in resources.items() if amount},
            "labels": dict(one.labels),
            "node_config": {},
            "min_workers": one.least,
            "max_workers": one.most,
        }
    # Nothing is run on a node but its job.
    nothing = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        **{f"{name}_commands": [] for name in nothing},
        "cluster_name": settings.cluster,
        "provider": {"type": "external", "module": "eelgrid.ray_capacity", "disable_node_updaters": True},
        "max_workers": sum(one.most for one in settings.nodes),
        "idle_timeout_minutes": settings.idle_s / 60.0,
        "available_node_types": types,
        "head_node_type": settings.head_type,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
    }


# Ray's autoscaler


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerTimes:
    """Seconds between looks, and after how long Ray may withdraw what still waits, though it was asked for."""

    poll_s: float
    withdraw_s: float


def run_autoscaler(
    address: str,
    supply: NodeSupply,
    read_config: Callable[[], dict[str, Any]],
    times: AutoscalerTimes,
    is_stopped: Callable[[], bool],
) -> None:
    """Runs Ray's autoscaler over a supply of nodes until it is stopped; what fails is logged, and tried again at the next look.

    `address` is that of the head, and `read_config` is called at each look. Raises FailedPreconditionError if this program has
    no Ray, or the head does not say which instance it is; and EelgridError if there is no configuration at first.
    """
    os.environ.setdefault("RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S", str(_WAIT_MOST_S))
    os.environ.setdefault("RAY_AUTOSCALER_PENDING_NODE_IDLE_TIMEOUT_S", str(math.ceil(times.withdraw_s)))
    raylet, v2 = _load_ray("ray._raylet"), _load_ray("ray.autoscaler.v2.autoscaler")
    config = _RayConfig(read_config)
    head_type = config.get_cached_autoscaling_config().get_head_node_type()
    gcs = raylet.GcsClient(address=address)
    nodes = _load_ray("ray.autoscaler.v2.sdk").get_cluster_resource_state(gcs).node_states
    heads = [one for one in nodes if "node:__internal_head__" in one.total_resources]
    if not heads or not heads[0].instance_id or heads[0].ray_node_type_name != head_type:
        raise FailedPreconditionError(
            "the head does not say which instance it is",
            f"start it with RAY_CLOUD_INSTANCE_ID=head and RAY_NODE_TYPE_NAME={head_type} in its environment",
        )
    provider = _InstanceProvider(RayCapacity(supply), heads[0].instance_id, head_type)

    class SuppliedAutoscaler(v2.Autoscaler):  # type: ignore[misc, name-defined]
        def _init_cloud_instance_provider(self, *_: object) -> None:
            self._cloud_instance_provider = provider

    session = gcs.internal_kv_get(b"session_name", b"session", timeout=10) or b""
    scaler = SuppliedAutoscaler(session_name=session.decode(), config_reader=config, gcs_client=gcs)
    _LOG.info("address=%s head=%s", address, heads[0].instance_id)
    while not is_stopped():
        state = scaler.update_autoscaling_state()
        if state is not None:
            # The next look tells again.
            with contextlib.suppress(Exception):
                gcs.report_autoscaling_state(state.SerializeToString())
        again_s = time.monotonic() + times.poll_s
        while not is_stopped() and time.monotonic() < again_s:
            time.sleep(_LOOK_S)


def autoscale(settings: CapacitySettings, jobs: JobQueue, is_stopped: Callable[[], bool]) -> None:
    """Runs Ray's autoscaler over the queue of a controller until it is stopped. Raises FailedPreconditionError."""
    # What waits in the queue and is needed no more is withdrawn as what runs and is idle; not before a run that makes room for
    # others has ended, since until then its work is there, and asks for no node.
    times = AutoscalerTimes(poll_s=settings.poll_s, withdraw_s=settings.idle_s + settings.drain_s)
    _LOG.info("cluster=%s types=%s", settings.cluster, [one.name for one in settings.nodes])
    supply = JobSupply(jobs, settings)
    run_autoscaler(settings.address, supply, lambda: build_ray_config(settings), times, is_stopped)


class StopSignal:
    """Whether a signal has asked for the end; a plain flag, since a handler must not take a lock."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._is_asked = False
        for number in signals:
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._is_asked = True

    def __call__(self) -> bool:
        """Whether one of the signals has come."""
        return self._is_asked


class _RayConfig:
    """Ray's reader of its configuration: the newest that could be read."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read, self._kind = read, _load_ray("ray.autoscaler.v2.instance_manager.config").AutoscalingConfig
        self._found = read()
        self._config = self._kind(self._found, skip_content_hash=True)

    def get_cached_autoscaling_config(self) -> Any:
        return self._config

    def refresh_cached_autoscaling_config(self) -> None:
        try:
            found = self._read()
        except EelgridError as error:
            _LOG.warning("configuration=kept error=%s", error)
            return
        if found != self._found:
            self._found, self._config = found, self._kind(found, skip_content_hash=True)


class _InstanceProvider:
    """Ray's ICloudInstanceProvider: the same, in Ray's types."""

    def __init__(self, capacity: RayCapacity, head_id: str, head_type: str) -> None:
        self._capacity, self._head_id, self._head_type = capacity, head_id, head_type
        self._ray = _load_ray("ray.autoscaler.v2.instance_manager.node_provider")
        self._kinds = _load_ray("ray.core.generated.instance_manager_pb2").NodeKind

    def get_non_terminated(self) -> dict[str, Any]:
        found = {self._head_id: self._describe(self._head_id, self._head_type, self._kinds.HEAD, is_running=True)}
        for one in self._capacity.list_instances():
            found[one.instance_id] = self._describe(
                one.instance_id, one.node_type, self._kinds.WORKER, is_running=one.is_placed
            )
        return found

    def _describe(self, instance_id: str, node_type: str, kind: Any, *, is_running: bool) -> Any:
        return self._ray.CloudInstance(
            cloud_instance_id=instance_id, node_type=node_type, node_kind=kind, is_running=is_running
        )

    def launch(self, shape: Mapping[str, int], request_id: str) -> None:
        _LOG.info("launch=%s request=%s", dict(shape), request_id)
        self._capacity.launch(shape, request_id)

    def terminate(self, ids: Sequence[str], request_id: str) -> None:
        _LOG.info("terminate=%s request=%s", list(ids), request_id)
        self._capacity.terminate([one for one in ids if one != self._head_id], request_id)

    def poll_errors(self) -> list[Any]:
        return [self._describe_problem(one) for one in self._capacity.take_problems()]

    def _describe_problem(self, one: CapacityProblem) -> Any:
        _LOG.warning("request=%s type=%s instance=%s error=%s",
                     one.request_id, one.node_type, one.instance_id, one.reason)  # fmt: skip
        if one.instance_id:
            return self._ray.TerminateNodeError(
                one.instance_id, one.request_id, timestamp_ns=time.time_ns(), details=one.reason
            )
        return self._ray.LaunchNodeError(
            one.node_type, 1, one.request_id, timestamp_ns=time.time_ns(), details=one.reason
        )


def _load_ray(name: str) -> Any:
    """Returns a module of Ray, which is no dependency of ours. Raises FailedPreconditionError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FailedPreconditionError(f"this program has no {name} ({error})", "install Ray 2.60 there") from None


# A raylet


def run_raylet(address: str, node_type: str, drain_s: float, start: Sequence[str]) -> int:
    """Runs one raylet until it leaves, or until SIGTERM, which drains it within `drain_s`; returns an exit code."""
    instance_id = f"{os.environ.get('EELGRID_WORKLOAD_ID', 'by-hand')}.{os.environ.get('EELGRID_ATTEMPT', '0')}"
    own = {
        "RAY_CLOUD_INSTANCE_ID": instance_id,
        "RAY_NODE_TYPE_NAME": node_type,
        # On SIGTERM `ray start --block` drains its node for so long, and then ends what still runs there.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{drain_s - _END_S:g}",
    }
    is_stopped = StopSignal(signal.SIGTERM)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, "--block", *start]
    # In a session of its own, since the agent's signal is for all of the job's group, and would end the raylet at once.
    raylet = subprocess.Popen(command, env={**os.environ, **own}, start_new_session=True)  # noqa: S603
    _LOG.info("instance=%s type=%s pid=%d", instance_id, node_type, raylet.pid)
    has_begun = False
    while not is_stopped():
        time.sleep(_LOOK_S)
        if raylet.poll() is not None:
            return raylet.returncode or 1
        if not has_begun:
            has_begun = _has_raylet(raylet.pid)
        elif not _has_raylet(raylet.pid):
            return _leave(raylet, instance_id)
    _LOG.info("instance=%s drained_within_s=%g", instance_id, drain_s - _END_S)
    _end_raylet(raylet, drain_s)
    return 0


def _leave(raylet: subprocess.Popen[bytes], instance_id: str) -> int:
    """Ends what a raylet that has ended by itself leaves behind; returns 0 if it was drained, and 1 if it has crashed.

    `ray start --block` looks once a second, ends itself after a crash, and stays after anything else.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        raylet.wait(_END_S / 2.0)
    has_crashed = bool(raylet.poll())
    _LOG.info("instance=%s left=%s", instance_id, "crashed" if has_crashed else "drained")
    _end_raylet(raylet, _END_S)
    return int(has_crashed)


def _has_raylet(pid: int) -> bool:
    """Whether a process has a child that is a raylet and lives."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return False
    for child in children:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{child}/stat").read_text(encoding="utf-8", errors="replace")
            # The command stands in parentheses, and the state after them.
            name, _, rest = stat.partition("(")[2].rpartition(")")
            if name == "raylet" and not rest.startswith((" Z", " X")):
                return True
    return False


def _end_raylet(raylet: subprocess.Popen[bytes], within_s: float) -> None:
    """Ends `ray start --block` and all that it has started."""
    raylet.terminate()
    try:
        raylet.wait(within_s - _END_S / 2.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(raylet.pid, signal.SIGKILL)
        raylet.wait()


def log_to_stderr() -> None:
    """Has this program say what it does."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Runs `autoscale FILE`, or `raylet --address A --node-type T --drain-s S -- OPTIONS`, which is for the jobs."""
    log_to_stderr()
    try:
        match arguments:
            case ["raylet", "--address", address, "--node-type", node_type, "--drain-s", drain_s, "--", *start]:
                return run_raylet(address, node_type, float(drain_s), start)
            case ["autoscale", name]:
                with Path(name).open(encoding="utf-8") as file:
                    found = _load_ray("yaml").safe_load(file.read(_CONFIG_BYTES_MOST))
                with Client() as client:
                    autoscale(parse_settings(found), client, StopSignal(signal.SIGTERM, signal.SIGINT))
                return 0
    except (EelgridError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write("usage: python -m eelgrid.ray_capacity autoscale FILE\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
