"""Answers of Ray's dashboard: nodes, jobs and what they hold as values, from the JSON of the state API and the Jobs API.

Owns what Ray calls its resources, which of them are GPUs, and how a process's GPUs are found. Must not know how requests
are made, nor what is done with a job.

Theory. What is held is read from its holders and not from a node's sum: an alive actor, a running task and a bundle of a
placement group each say what they reserve, and at once; the sums that Ray keeps are seconds old. Work inside a placement
group holds nothing besides the group. Which of a node's GPUs a process has is known from the statistics of that node alone,
which come up to a quarter of a minute later: until then a number of GPUs is known and not which they are. One element that cannot be read
is left out and counted. A list that is cut short, or is none, is refused as a whole, since "no actors" would free all that
they hold.

Sources: docs.ray.io (State API, Jobs API, resources, labels), tried on Ray 2.60.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eelgrid_controller.engines.element_lists import UnreadableAnswer, read_elements
from eelgrid_protos.ray_names import CAPACITY_LABEL, GROUP_PREFIX, NODE_LABEL, WORKLOAD_VARIABLE

# A record is some kilobytes, and Ray gives ten thousand of them at the most.
ANSWER_BYTES_MOST = 256 * 2**20
ELEMENTS_MOST = 10_000
_MODEL_LABELS = ("eelgrid.io/gpu-model", "ray.io/accelerator-type")
_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?")
_GPUS_MOST = 64
_SIGNALS_MOST, _EXIT_CODE_MOST = 64, 255


class RayUnreadable(UnreadableAnswer):
    """An answer, or an element of one, that no supported version of Ray gives."""


class GpuSlot(NamedTuple):
    """A GPU of a node by its index, and how much of it is held, up to 1."""

    gpu: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A raylet that is alive; its name is the one under which an agent would speak for it."""

    node_id: str
    name: str
    address: str = ""
    cpus: float = 0.0
    memory_bytes: int = 0
    gpus: int = 0
    gpu_model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    # Resources of its users' own: their names.
    resources: frozenset[str] = frozenset()
    start_ms: int = 0
    is_draining: bool = False
    # Where the agent of the node tells its metrics; 0 if not known yet.
    metrics_port: int = 0

    @property
    def closed(self) -> str:
        """Why nothing new may start there, in words; empty where it may."""
        return "Ray: the node is drained" if self.is_draining else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """A job of the Jobs API, or a driver that somebody started; times are seconds since 1970."""

    # What actors and tasks call it; empty before its driver has begun.
    job_id: str
    submission_id: str = ""
    entrypoint: str = ""
    status: str = "PENDING"
    start_s: int = 0
    end_s: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    # Of the driver of a submitted job; below 0 the signal that ended it, None if Ray does not know it.
    exit_code: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether its driver has ended."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHolding:
    """What an actor, a task or the bundles of a placement group on one node reserve there."""

    node_id: str
    # Of an actor, a task, or a group.
    holder: str
    job_id: str = ""
    # The workload that it says it belongs to; it may say anything.
    workload_id: str = ""
    actor_name: str = ""
    cpus: float = 0.0
    memory_bytes: int = 0
    gpus: float = 0.0
    # Of these, those that are known.
    slots: tuple[GpuSlot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayLook:
    """A cluster at one moment."""

    nodes: tuple[RayNode, ...] = ()
    jobs: tuple[RayJob, ...] = ()
    holdings: tuple[RayHolding, ...] = ()
    # Workloads for which a placement group is there that holds nothing yet.
    expected: frozenset[str] = frozenset()
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAnswers:
    """The texts of one look; `details` are those of nodes by id, of as many as have answered."""

    nodes: bytes
    actors: bytes
    tasks: bytes
    groups: bytes
    jobs: bytes
    details: Mapping[str, bytes] = field(default_factory=dict)


class _NodeDetail(NamedTuple):
    """What a node's statistics tell: the GPUs of processes by id, whether it is drained, where its metrics are."""

    slots: Mapping[int, tuple[GpuSlot, ...]]
    is_draining: bool
    metrics_port: int


class _Group(NamedTuple):
    """A placement group: its bundles by node, added."""

    group_id: str
    name: str
    job_id: str
    is_pending: bool
    bundles: Mapping[str, Mapping[str, float]]


class _Process(NamedTuple):
    """An alive actor, or a running task."""

    node_id: str
    holder: str
    job_id: str
    group_id: str
    pid: int
    workload_id: str
    actor_name: str
    resources: Mapping[str, float]


def parse_look(answers: RayAnswers) -> RayLook:
    """Parses the answers of one look; raises RayUnreadable if a list is none, or is not whole."""
    unreadable: list[str] = []
    details = _read_details(answers.details, unreadable)
    nodes = read_elements(_list_state(answers.nodes, "nodes"), "node_id", _read_node, unreadable)
    # A raylet that is itself a job of ours is no node here: what Ray does there is within what the job was given.
    known = name_nodes([node for node in nodes if node is not None and CAPACITY_LABEL not in node.labels])
    processes = [
        *read_elements(_list_state(answers.actors, "actors"), "actor_id", _read_actor, unreadable),
        *read_elements(_list_state(answers.tasks, "tasks"), "task_id", _read_task, unreadable),
    ]
    groups = read_elements(
        _list_state(answers.groups, "placement groups"), "placement_group_id", _read_group, unreadable
    )
    present = [group for group in groups if group is not None]
    alive = [one for one in processes if one is not None]
    node_ids = {node.node_id for node in known}
    holdings = list_holdings(present, alive, {key: one.slots for key, one in details.items()})
    return RayLook(
        nodes=tuple(_add_detail(node, details.get(node.node_id)) for node in known),
        jobs=tuple(read_elements(_list_jobs(answers.jobs), "job_id", _read_job, unreadable)),
        holdings=tuple(one for one in holdings if one.node_id in node_ids),
        expected=frozenset(_workload_of_group(group.name) for group in present if group.is_pending) - {""},
        unreadable=tuple(unreadable),
    )


# Lists


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; raises RayUnreadable."""
    if len(text) > ANSWER_BYTES_MOST:
        raise RayUnreadable(f"the answer has {len(text)} bytes; {ANSWER_BYTES_MOST} are read at the most")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RayUnreadable(f"the answer is no JSON: {str(error)[:100]}") from None


def _list_state(text: bytes, what: str) -> list[Any]:
    answer = parse_json(text)
    data = answer.get("data") if isinstance(answer, dict) else None
    found = data.get("result") if isinstance(data, dict) else None
    listed = found.get("result") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(listed, list):
        said = answer.get("msg") if isinstance(answer, dict) else None
        raise RayUnreadable(f"the answer has no list of {what}" + (f": {str(said)[:200]}" if said else ""))
    total = found.get("total")
    if isinstance(total, int) and max(total, len(listed)) > ELEMENTS_MOST:
        raise RayUnreadable(f"there are {total} {what}; {ELEMENTS_MOST} are read at the most")
    if warning := found.get("partial_failure_warning"):
        raise RayUnreadable(f"the list of {what} is not whole: {str(warning)[:200]}")
    return listed


def _list_jobs(text: bytes) -> list[Any]:
    answer = parse_json(text)
    if not isinstance(answer, list):
        raise RayUnreadable("the answer has no list of jobs")
    return answer


# Fields


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RayUnreadable(f"{name} has {str(value)[:40]!r} where text is expected")
    return value


def _number(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name, 0)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0.0 <= value < 2.0**63):
        raise RayUnreadable(f"{name} has {str(found.get(name))[:40]!r} where an amount is expected")
    return value


def _texts(found: Mapping[str, Any], name: str) -> dict[str, str]:
    value = found.get(name) or {}
    if not isinstance(value, dict):
        raise RayUnreadable(f"{name} has {str(value)[:40]!r} where names and values are expected")
    return {str(key): str(one) for key, one in value.items()}


def _amounts(found: Mapping[str, Any], name: str) -> dict[str, float]:
    value = found.get(name) or {}
    if not isinstance(value, dict):
        raise RayUnreadable(f"{name} has {str(value)[:40]!r} where resources are expected")
    return {key: _number(value, key) for key in value}


# Elements


def _read_node(found: Mapping[str, Any]) -> RayNode | None:
    """Reads a raylet; None of one that is gone."""
    node_id, state = _text(found, "node_id"), _text(found, "state")
    if not node_id or not state:
        raise RayUnreadable("node_id or state is missing")
    if state != "ALIVE":
        return None
    labels, resources = _texts(found, "labels"), _amounts(found, "resources_total")
    models = [labels[key] for key in _MODEL_LABELS if labels.get(key)]
    models += [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    return RayNode(
        node_id=node_id,
        name=labels.get(NODE_LABEL) or _text(found, "node_name"),
        address=_text(found, "node_ip"),
        cpus=resources.get("CPU", 0.0),
        memory_bytes=int(resources.get("memory", 0.0)),
        gpus=min(_GPUS_MOST, int(resources.get("GPU", 0.0))),
        gpu_model=models[0] if models else "",
        labels=labels,
        resources=frozenset(name for name in resources if _is_custom(name)),
        start_ms=int(_number(found, "start_time_ms")),
    )


def _is_custom(name: str) -> bool:
    known = ("CPU", "GPU", "memory", "object_store_memory")
    return name not in known and ":" not in name and not re.search(r"_group_[0-9a-f_]{16,}$", name)


def name_nodes(nodes: Sequence[RayNode]) -> list[RayNode]:
    """Gives each node a name of its own: its label, else Ray's name of it; where that is another's, too, or none, its id."""
    taken: set[str] = set()
    named = []
    for node in sorted(nodes, key=lambda one: (one.start_ms, one.node_id)):
        name = node.name if _NODE_NAME.fullmatch(node.name) and node.name not in taken else f"ray-{node.node_id[:12]}"
        taken.add(name)
        named.append(replace(node, name=name))
    return named


def _add_detail(node: RayNode, detail: _NodeDetail | None) -> RayNode:
    if detail is None:
        return node
    return replace(node, is_draining=detail.is_draining, metrics_port=detail.metrics_port)


def _read_job(found: Mapping[str, Any]) -> RayJob:
    status = _text(found, "status")
    if not status:
        raise RayUnreadable("status is missing")
    return RayJob(
        job_id=_text(found, "job_id"),
        submission_id=_text(found, "submission_id"),
        entrypoint=_text(found, "entrypoint"),
        status=status,
        start_s=int(_number(found, "start_time") // 1000) if found.get("start_time") else 0,
        end_s=int(_number(found, "end_time") // 1000) if found.get("end_time") else 0,
        metadata=_texts(found, "metadata"),
        exit_code=_read_exit_code(found.get("driver_exit_code")),
    )


def _read_exit_code(value: Any) -> int | None:
    """Reads an exit code; None for one that Ray does not know, or that no process has."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise RayUnreadable(f"driver_exit_code has {str(value)[:40]!r} where an exit code is expected")
    return value if value is not None and -_SIGNALS_MOST <= value <= _EXIT_CODE_MOST else None


def _read_actor(found: Mapping[str, Any]) -> _Process | None:
    if _text(found, "state") != "ALIVE":
        return None
    return _read_process(found, "actor_id", "pid", _text(found, "serialized_runtime_env"))


def _read_task(found: Mapping[str, Any]) -> _Process | None:
    """Reads a task; None of a method of an actor, which holds nothing of its own."""
    if _text(found, "state") != "RUNNING" or _text(found, "type") != "NORMAL_TASK":
        return None
    runtime = found.get("runtime_env_info")
    environment = _text(runtime, "serialized_runtime_env") if isinstance(runtime, dict) else ""
    return _read_process(found, "task_id", "worker_pid", environment)


def _read_process(found: Mapping[str, Any], key: str, pid: str, environment: str) -> _Process:
    holder, node_id = _text(found, key), _text(found, "node_id")
    if not holder or not node_id:
        raise RayUnreadable(f"{key} or node_id is missing")
    return _Process(
        node_id=node_id,
        holder=holder,
        job_id=_text(found, "job_id"),
        group_id=_text(found, "placement_group_id"),
        pid=int(_number(found, pid)) if found.get(pid) else 0,
        workload_id=_read_workload(environment),
        actor_name=_text(found, "name"),
        resources=_amounts(found, "required_resources"),
    )


def _read_workload(environment: str) -> str:
    """Returns the workload that a runtime environment names; empty if it names none."""
    if WORKLOAD_VARIABLE not in environment:
        return ""
    found = parse_json(environment)
    variables = found.get("env_vars") if isinstance(found, dict) else None
    value = variables.get(WORKLOAD_VARIABLE) if isinstance(variables, dict) else None
    return value if isinstance(value, str) else ""


def _read_group(found: Mapping[str, Any]) -> _Group | None:
    """Reads a placement group; None of one that was removed."""
    state = _text(found, "state")
    if state not in ("CREATED", "PENDING", "RESCHEDULING", "PREPARED"):
        return None
    bundles: dict[str, dict[str, float]] = {}
    for one in found.get("bundles") or ():
        if not isinstance(one, dict):
            raise RayUnreadable("bundles has one that is no object")
        node_id = _text(one, "node_id")
        # A group that waits holds nothing: all of it is reserved, or none.
        if not node_id or not node_id.strip("f"):
            continue
        into = bundles.setdefault(node_id, {})
        for name, amount in _amounts(one, "unit_resources").items():
            into[name] = into.get(name, 0.0) + amount
    return _Group(
        group_id=_text(found, "placement_group_id"),
        name=_text(found, "name"),
        job_id=_text(found, "creator_job_id"),
        is_pending=state != "CREATED",
        bundles=bundles,
    )


def _workload_of_group(name: str) -> str:
    return name.removeprefix(GROUP_PREFIX) if name.startswith(GROUP_PREFIX) else ""


def _read_details(details: Mapping[str, bytes], unreadable: list[str]) -> dict[str, _NodeDetail]:
    found = {}
    for node_id, text in details.items():
        try:
            found[node_id] = _read_detail(parse_json(text))
        except RayUnreadable as error:
            unreadable.append(f"node {node_id[:12]}: {error}")
    return found


def _read_detail(answer: Any) -> _NodeDetail:
    data = answer.get("data") if isinstance(answer, dict) else None
    detail = data.get("detail") if isinstance(data, dict) else None
    raylet = detail.get("raylet") if isinstance(detail, dict) else None
    if not isinstance(detail, dict) or not isinstance(raylet, dict):
        raise RayUnreadable("the answer has no statistics of a raylet")
    slots: dict[int, tuple[GpuSlot, ...]] = {}
    for worker in detail.get("workers") or ():
        for stats in worker.get("coreWorkerStats") or () if isinstance(worker, dict) else ():
            gpus = _read_slots(stats) if isinstance(stats, dict) else ()
            if gpus and isinstance(stats.get("pid"), int):
                slots[stats["pid"]] = gpus
    snapshot = raylet.get("stateSnapshot")
    state = snapshot.get("state") if isinstance(snapshot, dict) else None
    port = raylet.get("metricsExportPort")
    return _NodeDetail(slots, state == "DRAINING", port if isinstance(port, int) and 0 < port < 65_536 else 0)


def _read_slots(stats: Mapping[str, Any]) -> tuple[GpuSlot, ...]:
    """Reads {"GPU": {"resourceSlots": [{"slot": "1", "allocation": 1.0}]}}.

    In a placement group it is GPUGroupID and, of a bundle, GPUGroup0ID, with the same devices.
    """
    used = stats.get("usedResources") or {}
    found: dict[int, float] = {}
    for name, one in used.items() if isinstance(used, dict) else ():
        if name != "GPU" and not name.startswith(("GPU_group_", "GPUGroup")):
            continue
        for slot in one.get("resourceSlots") or () if isinstance(one, dict) else ():
            index, share = int(_number(slot, "slot")), _number(slot, "allocation")
            if share > 0.0 and index < _GPUS_MOST:
                found[index] = max(found.get(index, 0.0), min(1.0, share))
    return tuple(GpuSlot(index, share) for index, share in sorted(found.items()))


# Holdings


def list_holdings(
    groups: Iterable[_Group],
    processes: Iterable[_Process],
    slots: Mapping[str, Mapping[int, tuple[GpuSlot, ...]]],
) -> Iterable[RayHolding]:
    """Yields what is held: by processes outside of placement groups, and by each group on each node."""
    inside: dict[tuple[str, str], list[GpuSlot]] = {}
    for one in processes:
        own = slots.get(one.node_id, {}).get(one.pid, ())
        if one.group_id:
            inside.setdefault((one.group_id, one.node_id), []).extend(own)
            continue
        named = RayHolding(
            node_id=one.node_id,
            holder=one.holder,
            job_id=one.job_id,
            workload_id=one.workload_id,
            actor_name=one.actor_name,
        )
        yield _add_amounts(named, one.resources, own)
    for group in groups:
        for node_id, amounts in group.bundles.items():
            named = RayHolding(
                node_id=node_id,
                holder=group.group_id,
                job_id=group.job_id,
                workload_id=_workload_of_group(group.name),
            )
            yield _add_amounts(named, amounts, inside.get((group.group_id, node_id), ()))


def _add_amounts(named: RayHolding, amounts: Mapping[str, float], slots: Iterable[GpuSlot]) -> RayHolding:
    gpus = amounts.get("GPU", 0.0)
    shares: dict[int, float] = {}
    for slot in slots:
        shares[slot.gpu] = min(1.0, shares.get(slot.gpu, 0.0) + slot.share)
    # Statistics may be of a process that had the same id before: never more than is held.
    kept = sorted(shares.items())[: math.ceil(gpus)]
    return replace(
        named,
        cpus=amounts.get("CPU", 0.0),
        memory_bytes=int(amounts.get("memory", 0.0)),
        gpus=gpus,
        slots=tuple(GpuSlot(gpu, share) for gpu, share in kept),
    )
