"""Worker groups of a RayCluster of KubeRay as the nodes of Ray's autoscaler; runs in the place of the autoscaler that KubeRay adds.

    python -m eelgrid.kuberay

What Ray needs is asked for by `replicas` of a worker group, and what it gives back is named in `workersToDelete`; KubeRay makes
and deletes the pods. Whether and where a pod runs is decided as for any pod of the cluster: with the label eelgrid.io/managed it
waits for its turn in the controller's queue, and is evicted when it must make room. Owns which pods are which runs of a node, and
what is written into the RayCluster. Must not know how demand is reckoned (`eelgrid.ray_capacity`, with Ray).

Theory. A pod is one run, since KubeRay gives each a name of its own. One that is evicted, or has ended by itself, still counts
among the replicas, and KubeRay makes another in its place as soon as it is gone: so it is listed with the run that waits, and when
Ray clears away the run that has ended, nothing is written, else the group would shrink by one that is needed. A write is a JSON
patch that tests what it was planned on, since users and other programs change a RayCluster, too; one that no longer fits is
planned anew. KubeRay never clears `workersToDelete`: names stay until their pods are gone, and the next write leaves them out.

A pod that is deleted drains its raylet: `ray start --block` does it on SIGTERM, within RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S.

Sources: ray-operator/apis/ray/v1/raycluster_types.go, controllers/ray/raycluster_controller.go (reconcilePods) and common/pod.go
of KubeRay 1.7; ray/autoscaler/_private/kuberay/autoscaling_config.py of Ray 2.60.
"""

import argparse
import importlib
import json
import os
import signal
import ssl
import sys
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from eelgrid.errors import (
    AbortedError,
    EelgridError,
    FailedPreconditionError,
    InvalidSettingsError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from eelgrid.ray_capacity import AutoscalerTimes, NodeRun, StopSignal, log_to_stderr, run_autoscaler

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30.0
_ANSWER_BYTES_MOST = 64 * 2**20
_TOKEN_BYTES_MOST = 16_384
_SAID_MOST = 300
_ATTEMPTS = 5
_REQUESTS_KEPT = 1_000
_REPLICAS_MOST = 2**31 - 1
# A pod that waits in the queue is withdrawn when nothing has needed it for so long.
_WITHDRAW_S = 60.0


class ClusterApi(Protocol):
    """Of an API server of Kubernetes, what is used here. Every call raises EelgridError; `patch` AbortedError where a test fails."""

    def get(self, path: str) -> Any:
        """Returns what is at a path."""

    def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> Any:
        """Applies a JSON patch, all of it or nothing."""


class WorkerGroup(NamedTuple):
    """A worker group as KubeRay reads it: `replicas` are those that it wants, `stated` what the object says."""

    position: int
    name: str
    replicas: int
    stated: int | None
    least: int
    most: int
    deleted: tuple[str, ...]


class WorkerPod(NamedTuple):
    """A pod of a worker group; `is_ending` if it is being deleted, or has ended: KubeRay makes another in its place."""

    name: str
    group: str
    is_running: bool
    is_ending: bool


# What the API answers


def parse_groups(cluster: Any) -> tuple[WorkerGroup, ...]:
    """Returns the worker groups of a RayCluster. Raises FailedPreconditionError with the field of what is not supported."""
    spec = cluster.get("spec") if isinstance(cluster, dict) else None
    listed = spec.get("workerGroupSpecs") if isinstance(spec, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise FailedPreconditionError("the answer is no RayCluster with workerGroupSpecs", "look at --cluster")
    return tuple(_parse_group(position, one) for position, one in enumerate(listed))


def _parse_group(position: int, found: Mapping[str, Any]) -> WorkerGroup:
    where = f"spec.workerGroupSpecs[{position}]"
    hosts = _read_count(found, "numOfHosts", 1, where)
    if hosts > 1:
        remedy = "leave this RayCluster to the autoscaler of KubeRay"
        raise FailedPreconditionError(
            f"{where}.numOfHosts is {hosts}, and one host for each replica is supported", remedy
        )
    least = _read_count(found, "minReplicas", 0, where)
    most = _read_count(found, "maxReplicas", _REPLICAS_MOST, where)
    stated = _read_count(found, "replicas", 0, where) if found.get("replicas") is not None else None
    if found.get("suspend") is True:
        least = most = 0
    strategy = found.get("scaleStrategy")
    deleted = strategy.get("workersToDelete") if isinstance(strategy, dict) else None
    return WorkerGroup(
        position=position,
        name=str(found.get("groupName") or ""),
        # As KubeRay bounds it; the lower bound goes first.
        replicas=least if stated is None or stated < least else min(stated, most),
        stated=stated,
        least=least,
        most=most,
        deleted=tuple(map(str, deleted)) if isinstance(deleted, list) else (),
    )


def _read_count(found: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = found.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _REPLICAS_MOST:
        raise FailedPreconditionError(f"{where}.{name} is {str(value)[:40]!r}", "give a whole number")
    return value


def parse_pods(answer: Any) -> tuple[WorkerPod, ...]:
    """Returns the pods of worker groups; one without a name or a group is left out. Raises FailedPreconditionError."""
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list):
        raise FailedPreconditionError("the answer has no list of pods", "look at --server")
    pods = []
    for one in items:
        metadata, status = (_part(one, "metadata"), _part(one, "status"))
        labels = _part(metadata, "labels")
        name, group, phase = metadata.get("name"), labels.get("ray.io/group"), status.get("phase")
        if labels.get("ray.io/node-type") != "worker" or not isinstance(name, str) or not isinstance(group, str):
            continue
        is_ending = bool(metadata.get("deletionTimestamp")) or phase in ("Succeeded", "Failed")
        pods.append(WorkerPod(name, group, phase == "Running", is_ending))
    return tuple(sorted(pods))


def _part(found: Any, name: str) -> Mapping[str, Any]:
    part = found.get(name) if isinstance(found, dict) else None
    return part if isinstance(part, dict) else {}


# What is there, and what is written


class _GroupView(NamedTuple):
    """A group with its pods: those that stay, those in whose place others come, and those that are deleted for Ray."""

    group: WorkerGroup
    staying: tuple[WorkerPod, ...]
    replaced: tuple[WorkerPod, ...]
    deleted: tuple[WorkerPod, ...]

    @property
    def wanted(self) -> int:
        """How many there should be; never fewer than stay, since only Ray says which of them go."""
        return max(self.group.replicas, len(self.staying))


def _view(group: WorkerGroup, pods: Iterable[WorkerPod]) -> _GroupView:
    mine = [one for one in pods if one.group == group.name]
    kept = [one for one in mine if one.name not in group.deleted]
    return _GroupView(
        group,
        staying=tuple(one for one in kept if not one.is_ending),
        replaced=tuple(one for one in kept if one.is_ending),
        deleted=tuple(one for one in mine if one.name in group.deleted),
    )


def list_worker_runs(groups: Iterable[WorkerGroup], pods: Sequence[WorkerPod]) -> list[NodeRun]:
    """Returns the runs of nodes that the pods are, each with the next one where KubeRay makes another in its place."""
    found = []
    for group in groups:
        view = _view(group, pods)
        found += [NodeRun(one.name, group.name, one.is_running) for one in (*view.staying, *view.deleted)]
        missing = group.replicas - len(view.staying)
        for number, one in enumerate(view.replaced):
            next_id = f"{one.name}.next" if number < missing else ""
            found.append(NodeRun(one.name, group.name, one.is_running, next_id))
    return found


def plan_addition(group: WorkerGroup, pods: Iterable[WorkerPod], count: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the JSON patch that asks for so many more replicas, and how many the group does not allow."""
    view = _view(group, pods)
    allowed = max(0, min(count, group.most - view.wanted))
    if not allowed:
        return [], count
    return _write_group(view, view.wanted + allowed, ()), count - allowed


def plan_removal(
    groups: Iterable[WorkerGroup], pods: Sequence[WorkerPod], runs: Iterable[NodeRun]
) -> list[dict[str, Any]]:
    """Returns the JSON patch that gives back these nodes; of one that is ended already, the run that waits in its place."""
    asked = {run.instance_id: run for run in runs}
    found = []
    for group in groups:
        view = _view(group, pods)
        names = [one.name for one in view.staying if one.name in asked]
        waiting = sum(one.name in asked and bool(asked[one.name].next_id) for one in view.replaced)
        if names or waiting:
            found += _write_group(view, max(group.least, view.wanted - len(names) - waiting), names)
    return found


def _write_group(view: _GroupView, replicas: int, names: Iterable[str]) -> list[dict[str, Any]]:
    group, at = view.group, f"/spec/workerGroupSpecs/{view.group.position}"
    found: list[dict[str, Any]] = [{"op": "test", "path": f"{at}/groupName", "value": group.name}]
    if group.stated is not None:
        found.append({"op": "test", "path": f"{at}/replicas", "value": group.stated})
    if replicas != group.stated:
        found.append({"op": "add", "path": f"{at}/replicas", "value": replicas})
    deleted = [*(one.name for one in view.deleted), *names]
    if deleted != list(group.deleted):
        found.append({"op": "add", "path": f"{at}/scaleStrategy", "value": {"workersToDelete": deleted}})
    return found


class WorkerGroupSupply:
    """Nodes as pods of the worker groups of one RayCluster."""

    def __init__(self, api: ClusterApi, *, cluster: str, namespace: str) -> None:
        self._api = api
        self._cluster = f"/apis/ray.io/v1/namespaces/{quote(namespace, safe='')}/rayclusters/{quote(cluster, safe='')}"
        self._pods = (
            f"/api/v1/namespaces/{quote(namespace, safe='')}/pods?labelSelector={quote(f'ray.io/cluster={cluster}')}"
        )
        # Requests that were carried out, since a repeated one would add as many again.
        self._done: deque[tuple[str, str]] = deque(maxlen=_REQUESTS_KEPT)
        # What the configuration was made of, and the configuration.
        self._config: tuple[Any, dict[str, Any]] | None = None

    def read_config(self) -> dict[str, Any]:
        """Returns what Ray's autoscaler reads of the RayCluster. Raises EelgridError, also for one that is not to be scaled here."""
        found = self._api.get(self._cluster)
        parse_groups(found)
        if self._config is None or self._config[0] != found["spec"]:
            self._config = found["spec"], build_ray_config(found)
        return self._config[1]

    def _look(self) -> tuple[tuple[WorkerGroup, ...], tuple[WorkerPod, ...]]:
        return parse_groups(self._api.get(self._cluster)), parse_pods(self._api.get(self._pods))

    def list_runs(self) -> list[NodeRun]:
        """Returns the runs of pods. Raises EelgridError."""
        return list_worker_runs(*self._look())

    def add(self, node_type: str, count: int, request_id: str) -> list[str]:
        """Raises the replicas of a worker group."""
        if (request_id, node_type) in self._done:
            return []
        try:
            refused = self._add(node_type, count)
        except EelgridError as error:
            return [str(error)] * count
        self._done.append((request_id, node_type))
        return [f"the worker group {node_type} has as many as its maxReplicas; raise it"] * refused

    def _add(self, node_type: str, count: int) -> int:
        for _ in range(_ATTEMPTS):
            groups, pods = self._look()
            mine = [one for one in groups if one.name == node_type]
            if not mine:
                raise NotFoundError(f"the RayCluster has no worker group {node_type}", "it was removed meanwhile")
            operations, refused = plan_addition(mine[0], pods, count)
            if self._is_written(operations):
                return refused
        raise _tell_changes()

    def remove(self, runs: Sequence[NodeRun]) -> list[tuple[NodeRun, str]]:
        """Names pods in `workersToDelete` and lowers the replicas by as many, at once."""
        try:
            for _ in range(_ATTEMPTS):
                if self._is_written(plan_removal(*self._look(), runs)):
                    return []
            raise _tell_changes()
        except EelgridError as error:
            return [(run, str(error)) for run in runs]

    def _is_written(self, operations: Sequence[Mapping[str, Any]]) -> bool:
        try:
            if operations:
                self._api.patch(self._cluster, operations)
        except AbortedError:
            return False
        return True


def _tell_changes() -> EelgridError:
    return AbortedError(f"the RayCluster has changed before each of {_ATTEMPTS} writes", "look who else scales it")


def build_ray_config(cluster: Any) -> dict[str, Any]:
    """Returns what Ray's autoscaler reads of a RayCluster: Ray's own reading of it. Raises FailedPreconditionError."""
    try:
        ray = importlib.import_module("ray.autoscaler._private.kuberay.autoscaling_config")
        found: dict[str, Any] = ray._derive_autoscaling_config_from_ray_cr(cluster)  # noqa: SLF001  # its own client is of KubeRay's pods only
    except ImportError as error:
        raise FailedPreconditionError(f"this program has no Ray ({error})", "install Ray 2.60 there") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FailedPreconditionError(f"Ray cannot read the RayCluster: {error}", "correct it") from None
    return {**found, "provider": {"type": "external", "module": "eelgrid.kuberay", "disable_node_updaters": True}}


# The API server


class HttpClusterApi:
    """An API server over HTTP, with the token of a service account, which is read for each request since it is renewed."""

    def __init__(self, server: str, *, token_file: Path, ca_file: Path) -> None:
        self._server, self._token_file, self._ca_file = server.rstrip("/"), token_file, ca_file

    def get(self, path: str) -> Any:
        """Returns what is at a path. Raises EelgridError."""
        return self._request("GET", path)

    def patch(self, path: str, operations: Sequence[Mapping[str, Any]]) -> Any:
        """Applies a JSON patch. Raises AbortedError where a test fails, and EelgridError."""
        return self._request("PATCH", path, json.dumps(list(operations)).encode())

    def _request(self, method: str, path: str, body: bytes | None = None) -> Any:
        headers = {"Accept": "application/json", "Content-Type": "application/json-patch+json"}
        try:
            with self._token_file.open(encoding="ascii") as file:
                headers["Authorization"] = f"Bearer {file.read(_TOKEN_BYTES_MOST).strip()}"
            secure = ssl.create_default_context(cafile=self._ca_file) if self._server.startswith("https") else None
        except (OSError, UnicodeDecodeError, ssl.SSLError) as error:
            remedy = "correct --token-file and --ca-file; in a pod they are those of its service account"
            raise InvalidSettingsError(f"a credential cannot be read: {error}", remedy) from None
        asked = urllib.request.Request(self._server + path, data=body, method=method, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(asked, timeout=_TIMEOUT_S, context=secure) as answer:  # noqa: S310
                text = answer.read(_ANSWER_BYTES_MOST + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise _read_refusal(error.code, path, error.read(_ANSWER_BYTES_MOST)) from None
        except OSError as error:
            raise UnavailableError(f"{self._server} is not reached: {error}", "give --server its address") from None
        if len(text) > _ANSWER_BYTES_MOST:
            raise UnavailableError(f"{path} has more than {_ANSWER_BYTES_MOST} bytes", "look what is there")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise UnavailableError(f"{path}: the answer is no JSON", "give --server the API server's address") from None


def _read_refusal(status: int, path: str, text: bytes) -> EelgridError:
    said = f"{path.partition('?')[0]}: {status} {text[:_SAID_MOST].decode(errors='replace')}"
    if status in (401, 403):
        return PermissionDeniedError(said, "give the service account get on pods, get and patch on rayclusters")
    if status == 404:
        return NotFoundError(said, "look at --cluster and --namespace")
    # A JSON patch whose test fails is 422, and a write that has met another one is 409.
    return AbortedError(said, "") if status in (409, 422) else UnavailableError(said, "the next look tries again")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeRaySettings:
    """Of which RayCluster, where its head and the API server are, and how often Ray's demand is read."""

    cluster: str
    namespace: str
    server: str
    address: str
    token_file: Path
    ca_file: Path
    poll_s: float


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> KubeRaySettings:
    """Returns the settings: options, else what KubeRay and Kubernetes put into the environment. Raises InvalidSettingsError."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    parser = argparse.ArgumentParser(prog="python -m eelgrid.kuberay", description=__doc__.partition("\n")[0])
    parser.add_argument("--cluster", default=environment.get("RAY_CLUSTER_NAME", ""), help="name of the RayCluster")
    parser.add_argument("--namespace", default=environment.get("RAY_CLUSTER_NAMESPACE", ""), help="its namespace")
    parser.add_argument("--server", default=_build_url(host, port) if host else "", help="URL of the API server")
    parser.add_argument("--address", default="127.0.0.1:6379", help="HOST:PORT of Ray's head (%(default)s)")
    parser.add_argument("--token-file", type=Path, default=_ACCOUNT / "token", help="of the service account")
    parser.add_argument("--ca-file", type=Path, default=_ACCOUNT / "ca.crt", help="of the API server")
    parser.add_argument("--poll-s", type=float, default=5.0, help="seconds between looks (%(default)s)")
    found = KubeRaySettings(**vars(parser.parse_args(arguments)))
    for name in ("cluster", "namespace", "server"):
        if not getattr(found, name):
            raise InvalidSettingsError(f"--{name} is not given", "run this in the head's pod, or give it")
    if not 0.1 <= found.poll_s <= 3600.0:
        raise InvalidSettingsError(f"--poll-s is {found.poll_s:g}", "give 0.1 to 3600")
    return found


def _build_url(host: str, port: str) -> str:
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def main(arguments: Sequence[str]) -> int:
    """Scales the worker groups of one RayCluster until SIGTERM; returns an exit code."""
    log_to_stderr()
    try:
        settings = parse_settings(arguments, os.environ)
        api = HttpClusterApi(settings.server, token_file=settings.token_file, ca_file=settings.ca_file)
        supply = WorkerGroupSupply(api, cluster=settings.cluster, namespace=settings.namespace)
        times = AutoscalerTimes(poll_s=settings.poll_s, withdraw_s=_WITHDRAW_S)
        is_stopped = StopSignal(signal.SIGTERM, signal.SIGINT)
        run_autoscaler(settings.address, supply, supply.read_config, times, is_stopped)
    except EelgridError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
