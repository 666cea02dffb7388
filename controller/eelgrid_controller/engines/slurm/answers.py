"""Answers of Slurm's commands: jobs and nodes as values, from the JSON of any supported data parser.

Owns what differs between versions: 22.05 (v0.0.38) writes plain numbers and one state; from 23.02 on (v0.0.39) a number is
an object that says whether it is set or infinite, from 23.11 on (v0.0.40) a state is a list of flags. Owns the syntax of
GRES and TRES. Must not know how commands run, nor what is done with a job.

Theory. An answer is read by what it holds and not by the version that it states: each field has one reader that takes all
its known forms, and raises SlurmUnreadable for any other. One element that cannot be read is left out and counted; an
answer without its list is refused as a whole, since "no jobs" would end all of them here.

Sources: slurm.schedmd.com/rest_api.html by version, man pages of squeue, sinfo and scontrol (NODE STATE CODES, GRES).
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from eelgrid_controller.engines.element_lists import UnreadableAnswer, read_elements
from eelgrid_controller.engines.host_lists import HOST_NAME, expand_hosts, expand_ranges

_MIB = 2**20
# A record is some kilobytes; an answer beyond this is not read.
ANSWER_BYTES_MOST = 512 * _MIB
# Tasks of one array that are read one by one; Slurm's own MaxArraySize is 1,001 by default.
_TASKS_MOST = 10_000
# gpu:2, gpu:a100:2, gres:gpu:a100:2(IDX:0-1), gres/gpu:a100=2
_GRES = re.compile(
    r"(?:gres[:/])?gpu(?:[:/]([A-Za-z][A-Za-z0-9._-]*|[0-9][A-Za-z0-9._-]*[A-Za-z][A-Za-z0-9._-]*))?[:=]([0-9]{1,6})"
)
# What is asked of steps; a list of nodes that fills its column may be cut.
_STEP_NODES_WIDTH = 4000
STEP_COLUMNS = f"StepID:64|,Nodes:{_STEP_NODES_WIDTH}|"
_INDEXES = re.compile(r"(?:^|,)gpu(?::[^:(),]+)?:[0-9]+\(IDX:([0-9][0-9,-]*)\)")

_Read = TypeVar("_Read")


class SlurmUnreadable(UnreadableAnswer):
    """An answer, or an element of one, that no supported version of Slurm gives."""


@dataclass(frozen=True, slots=True)
class GresCount:
    """GPUs of one GRES type; the type is empty where none is named. MIG slices are a type of their own here."""

    type: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A job, or one task of an array; times are seconds since 1970, 0 if unknown."""

    # What scontrol calls it: 12, or 12_3 for a task of an array.
    job_id: str
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    comment: str = ""
    admin_comment: str = ""
    state: str = "PENDING"
    # Flags beside the state, such as COMPLETING, REQUEUED.
    flags: frozenset[str] = frozenset()
    reason: str = ""
    is_held: bool = False
    nodes: tuple[str, ...] = ()
    node_count: int = 1
    cpus: int = 1
    memory_bytes: int = 0
    # By node; for a job that states them by job or task, an equal share of them.
    gpus: tuple[GresCount, ...] = ()
    gpu_indexes: Mapping[str, tuple[int, ...]] | None = None
    required_nodes: tuple[str, ...] = ()
    features: str = ""
    time_limit_s: float = 0.0
    submit_s: int = 0
    eligible_s: int = 0
    start_s: int = 0
    restarts: int = 0
    # Whether Slurm may requeue it: not with --no-requeue.
    can_requeue: bool = False
    # Why it cannot be steered, in words; empty if it can.
    peculiar: str = ""
    dependency: str = ""
    # How its batch script ended: what it exited with, and the signal that ended it.
    exit_code: int = 0
    exit_signal: int = 0
    end_s: int = 0
    # Of a task, or of an array's tasks that wait.
    array_id: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether it waits."""
        return self.state == "PENDING"

    @property
    def holds_resources(self) -> bool:
        """Whether it holds its nodes."""
        return self.state in _HOLDING or "COMPLETING" in self.flags

    @property
    def has_ended(self) -> bool:
        """Whether it has ended for good and holds nothing any more."""
        return self.state in _ENDED and not self.holds_resources


# In 22.05 a flag hides the state beside it, so some of these are flags.
_HOLDING = frozenset(["RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SUSPENDED", "STOPPED", "SIGNALING"])
_ENDED = frozenset(
    [
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED",
        "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node; `used` is what its jobs hold."""

    name: str
    cpus: int = 0
    memory_bytes: int = 0
    gpus: tuple[GresCount, ...] = ()
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    # Flags of its state: IDLE, ALLOCATED, MIXED, DOWN, DRAIN, POWERED_DOWN, and so on.
    states: frozenset[str] = frozenset()
    reason: str = ""
    # Slurm tries nodes of a lower weight first.
    weight: int = 1

    @property
    def closed(self) -> str:
        """Why nothing new may start there, in words; empty where it may."""
        # A node on its way to sleep or back does not respond, and is there for who waits for it.
        is_moving = bool(self.states & {"POWERING_DOWN", "POWERED_DOWN", "POWERING_UP"})
        for state, words in _CLOSED:
            if state in self.states and not (is_moving and state == "NOT_RESPONDING"):
                return f"Slurm: {words}" + (f" ({self.reason})" if self.reason else "")
        return ""


# The first that holds is said. Nodes that sleep are woken by Slurm when a job starts there.
_CLOSED = (
    ("DRAIN", "the node is drained"),
    ("DOWN", "the node is down"),
    ("FAIL", "the node fails"),
    ("NOT_RESPONDING", "the node does not respond"),
    ("MAINTENANCE", "the node is in maintenance"),
    ("REBOOT_ISSUED", "the node reboots"),
    ("FUTURE", "the node is not there yet"),
    ("UNKNOWN", "the node is unknown"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJobs:
    """All jobs, and how many of the answer could not be read."""

    jobs: tuple[SlurmJob, ...]
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodes:
    """All nodes, and how many of the answer could not be read."""

    nodes: tuple[SlurmNode, ...]
    unreadable: tuple[str, ...] = ()


def parse_jobs(text: str | bytes) -> SlurmJobs:
    """Parses the answer of `squeue --json`; raises SlurmUnreadable if it is no list of jobs."""
    unreadable: list[str] = []
    jobs = itertools.chain.from_iterable(_read_each(text, "jobs", "job_id", _read_job, unreadable))
    return SlurmJobs(jobs=tuple(jobs), unreadable=tuple(unreadable))


def parse_nodes(text: str | bytes) -> SlurmNodes:
    """Parses the answer of `scontrol show nodes --json`, or in 22.05 of `sinfo --json`; raises SlurmUnreadable."""
    unreadable: list[str] = []
    nodes = tuple(_read_each(text, "nodes", "name", _read_node, unreadable))
    return SlurmNodes(nodes=nodes, unreadable=tuple(unreadable))


def parse_step_nodes(text: str) -> frozenset[str]:
    """Parses what `squeue --steps` has of STEP_COLUMNS: the nodes of steps; a batch script and what holds a job open are none."""
    found = set[str]()
    for line in text.splitlines():
        step, mark, nodes = line.partition("|")
        if not line.strip():
            continue
        if not mark or (len(nodes.rstrip("|\n")) >= _STEP_NODES_WIDTH and not nodes.rstrip("|").endswith(" ")):
            raise SlurmUnreadable(f"has {line[:80]!r} where a step and its nodes are expected")
        if not step.strip().endswith((".batch", ".extern")):
            found.update(expand_hosts(nodes.strip().rstrip("|").strip()))
    return frozenset(found)


def _read_each(
    text: str | bytes, field: str, key: str, read: Callable[[Mapping[str, Any]], _Read], unreadable: list[str]
) -> list[_Read]:
    if len(text) > ANSWER_BYTES_MOST:
        raise SlurmUnreadable(f"the answer has {len(text)} bytes; {ANSWER_BYTES_MOST} are read at the most")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SlurmUnreadable(f"the answer is no JSON: {error}") from None
    found = answer.get(field) if isinstance(answer, dict) else None
    if not isinstance(found, list):
        said = answer.get("errors") if isinstance(answer, dict) else None
        raise SlurmUnreadable(f"the answer has no list of {field}" + (f": {str(said)[:200]}" if said else ""))
    return read_elements(found, key, read, unreadable)


# Fields


def read_number(value: Any) -> int | None:
    """Reads a number in any version's form; None if it is not set, or infinite."""
    if value is None:
        return None
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        raise SlurmUnreadable(f"has {str(value)[:40]!r} where a number is expected")
    return int(value)


def _number(found: Mapping[str, Any], name: str, default: int = 0) -> int:
    try:
        number = read_number(found.get(name))
    except SlurmUnreadable as error:
        raise SlurmUnreadable(f"{name} {error}") from None
    return default if number is None else number


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if value is None:
        return ""
    if isinstance(value, dict):
        # Comments by who wrote them, from 23.02 on: {"job": ..., "administrator": ..., "system": ...}.
        value = value.get("job", "")
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        raise SlurmUnreadable(f"{name} has {str(value)[:40]!r} where text is expected")
    return value


def _flags(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Reads a state with its flags: idle, mixed*, ["IDLE", "DRAIN"], IDLE+DRAIN."""
    value = found.get(name)
    parts: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(part, str) for part in parts):
        raise SlurmUnreadable(f"{name} has {str(value)[:40]!r} where a state is expected")
    words = (word for part in parts for word in re.split(r"[+,]", part.upper()))
    return tuple(word.strip("*~#!%$@^-") for word in words if word.strip("*~#!%$@^-"))


def parse_gres(text: str) -> tuple[GresCount, ...]:
    """Parses GPUs from a GRES or TRES string; other resources are not GPUs and are left out."""
    counts: dict[str, int] = {}
    for part in re.split(r",(?![^(]*\))", text):
        matched = _GRES.match(part.strip())
        if matched is None:
            # One GPU is written without a count: gres:gpu, gpu:a100.
            bare = re.fullmatch(r"(?:gres[:/])?gpu(?:[:/]([A-Za-z0-9._-]*[A-Za-z][A-Za-z0-9._-]*))?", part.strip())
            if bare is None:
                continue
            kind, count = bare[1] or "", 1
        else:
            kind, count = matched[1] or "", int(matched[2])
        counts[kind] = counts.get(kind, 0) + count
    # TRES names a total beside its types.
    if "" in counts and len(counts) > 1:
        counts[""] -= sum(count for kind, count in counts.items() if kind)
    return tuple(GresCount(kind, count) for kind, count in sorted(counts.items()) if count > 0)


def parse_gres_indexes(text: str) -> tuple[int, ...]:
    """Parses the indexes of the GPUs in nic:1(IDX:4),gpu:a100:2(IDX:0-1), of all types; none where none are said."""
    return tuple(int(one) for found in _INDEXES.findall(text) for one in expand_ranges(found))


# Elements


def _read_job(found: Mapping[str, Any]) -> list[SlurmJob]:
    """Reads a job; a record of an array's pending tasks is all of them."""
    number = _number(found, "job_id")
    if number < 1:
        raise SlurmUnreadable("job_id is missing")
    states = _flags(found, "job_state")
    if not states:
        raise SlurmUnreadable("job_state is missing")
    nodes = expand_hosts(_text(found, "nodes"))
    count = max(1, len(nodes) or _number(found, "node_count", 1))
    cpus = max(1, _number(found, "cpus", 1))
    exit_code, exit_signal = _read_exit(found)
    job = SlurmJob(
        job_id=str(number),
        name=_text(found, "name"),
        user=_text(found, "user_name"),
        account=_text(found, "account"),
        partition=_text(found, "partition"),
        qos=_text(found, "qos"),
        comment=_text(found, "comment"),
        admin_comment=_read_admin_comment(found),
        state=states[0],
        flags=frozenset(states[1:]),
        reason=_text(found, "state_reason"),
        is_held=_is_held(found),
        nodes=nodes,
        node_count=count,
        cpus=cpus,
        memory_bytes=_read_memory(found, cpus, count),
        gpus=_read_gpus(found, count),
        gpu_indexes=_read_indexes(found, nodes),
        required_nodes=expand_hosts(_text(found, "required_nodes")),
        features=_text(found, "features"),
        time_limit_s=60.0 * _number(found, "time_limit"),
        submit_s=_number(found, "submit_time"),
        eligible_s=_number(found, "eligible_time"),
        start_s=_number(found, "start_time"),
        restarts=_number(found, "restart_cnt"),
        can_requeue=found.get("requeue") is True,
        peculiar=_find_peculiarity(found),
        dependency=_text(found, "dependency"),
        exit_code=exit_code,
        exit_signal=exit_signal,
        end_s=_number(found, "end_time"),
        array_id=str(_number(found, "array_job_id") or ""),
    )
    return [replace(job, job_id=key) for key in _list_ids(found, number)]


def _list_ids(found: Mapping[str, Any], number: int) -> list[str]:
    array = _number(found, "array_job_id")
    if not array:
        return [str(number)]
    task = read_number(found.get("array_task_id"))
    if task is not None:
        return [f"{array}_{task}"]
    text = _text(found, "array_task_string").partition("%")[0]
    if not text:
        return [str(number)]
    if "..." in text:
        raise SlurmUnreadable("array_task_string is cut short; raise SLURM_BITSTR_LEN")
    tasks = list(itertools.islice(expand_ranges(text), _TASKS_MOST + 1))
    if len(tasks) > _TASKS_MOST:
        raise SlurmUnreadable(f"has more than {_TASKS_MOST} tasks that wait")
    return [f"{array}_{int(one)}" for one in tasks]


def _read_exit(found: Mapping[str, Any]) -> tuple[int, int]:
    """Reads its exit code and signal: in 22.05 the status of wait(2), later an object."""
    value = found.get("exit_code")
    if isinstance(value, dict) and "return_code" in value:
        signal = value.get("signal")
        # signal_id until v0.0.40.
        number = signal.get("id", signal.get("signal_id")) if isinstance(signal, dict) else signal
        return read_number(value["return_code"]) or 0, read_number(number) or 0
    status = read_number(value) or 0
    return status >> 8 & 0xFF, status & 0x7F


def _read_admin_comment(found: Mapping[str, Any]) -> str:
    comments = found.get("comment")
    if isinstance(comments, dict):
        return str(comments.get("administrator") or "")
    return _text(found, "admin_comment")


def _is_held(found: Mapping[str, Any]) -> bool:
    """Whether its priority is 0; versions that say so say it as `hold`."""
    if isinstance(found.get("hold"), bool):
        return bool(found["hold"])
    priority = read_number(found.get("priority"))
    return priority == 0


def _read_memory(found: Mapping[str, Any], cpus: int, nodes: int) -> int:
    """Reads the bytes that it needs on each node."""
    by_node = read_number(found.get("memory_per_node"))
    if by_node is not None:
        return by_node * _MIB
    by_cpu = read_number(found.get("memory_per_cpu")) or 0
    return by_cpu * -(-cpus // nodes) * _MIB


def _read_gpus(found: Mapping[str, Any], nodes: int) -> tuple[GresCount, ...]:
    """Reads the GPUs of each node; what is stated by job or task counts as spread evenly, rounded up."""
    by_node = parse_gres(_text(found, "tres_per_node"))
    if by_node:
        return by_node
    total = parse_gres(_text(found, "tres_per_job"))
    if not total:
        tasks = max(1, _number(found, "tasks", 1))
        total = tuple(GresCount(one.type, one.count * tasks) for one in parse_gres(_text(found, "tres_per_task")))
    if not total:
        total = parse_gres(_text(found, "tres_req_str"))
    return tuple(GresCount(one.type, -(-one.count // nodes)) for one in total)


def _read_indexes(found: Mapping[str, Any], nodes: tuple[str, ...]) -> Mapping[str, tuple[int, ...]] | None:
    details = found.get("gres_detail")
    if not isinstance(details, list) or len(details) != len(nodes) or not nodes:
        return None
    return {name: parse_gres_indexes(str(detail)) for name, detail in zip(nodes, details, strict=True)}


def _find_peculiarity(found: Mapping[str, Any]) -> str:
    """Returns why a job is left to Slurm alone; empty if it can be steered."""
    if _number(found, "het_job_id"):
        return "it is a part of a heterogeneous job"
    if _text(found, "resv_name"):
        return "it runs in a reservation of Slurm"
    if _text(found, "licenses"):
        return "it needs licenses, which only Slurm counts"
    features = _text(found, "features")
    if re.search(r"[|*\[\](]", features):
        return f"its constraint {features!r} is more than features joined by &"
    # The second from 23.11 on: which kind of exclusive it is.
    if found.get("shared") in ("none", ["none"]) or found.get("exclusive"):
        return "it wants its nodes for itself alone (--exclusive)"
    if len(_read_gpus(found, 1)) > 1:
        return "it asks for GPUs of several types"
    if "," in _text(found, "partition"):
        return "it names several partitions"
    return ""


def _read_node(found: Mapping[str, Any]) -> SlurmNode:
    name = _text(found, "name")
    if not HOST_NAME.fullmatch(name):
        raise SlurmUnreadable(f"name is {name[:64]!r}")
    states = {*_flags(found, "state"), *(_flags(found, "state_flags") if found.get("state_flags") else ())}
    states |= {
        word for state in states for word, short in (("DRAIN", "DRAINED"), ("DRAIN", "DRAINING")) if state == short
    }
    partitions = found.get("partitions") or []
    if not isinstance(partitions, list):
        raise SlurmUnreadable("partitions is no list")
    return SlurmNode(
        name=name,
        cpus=_number(found, "cpus"),
        memory_bytes=_number(found, "real_memory") * _MIB,
        gpus=parse_gres(_text(found, "gres")),
        features=frozenset(filter(None, (_text(found, "active_features") or _text(found, "features")).split(","))),
        partitions=frozenset(map(str, partitions)),
        states=frozenset(states),
        reason=_text(found, "reason"),
        weight=_number(found, "weight", 1),
    )
