"""Following: what the core is to be told of a Ray cluster, given how it is and what the core holds of it.

`Following.decide` compares one look at Ray with the core's workloads and returns instructions, level-triggered: whatever was
missed is decided anew at the next look. Owns which of Ray's work is a workload of the core and what is external usage. Must
not know how requests are made, nor clocks; times are arguments.

Theory. Ray decides where its work runs unless somebody has asked the core first, so nothing is changed in Ray here, except
that a job is stopped whose workload somebody has cancelled: ends of the engine's own have a reason, and that of a person has
none. There are two kinds of workloads. Those of the client library were placed by the core; what is reserved in Ray names its workload, and
counts as that workload's up to what the core has granted on that node, the rest as external usage. So a name that is wrong, or
not its own, frees nothing. Jobs that asked nobody are adopted: a replica for each GPU that a job has to itself, on the very
device, so that its energy is its own. All else that Ray holds is external usage: CPUs and memory of jobs, GPUs whose index
is not known yet, GPUs that jobs share. Everything is thus known to the core in one of three ways, and nothing in two.

A workload of the client library that nothing in Ray holds any more is ended after a while: its program has died, or has
forgotten to release it. A job that lets its last GPU go keeps its workload as long, for it may be between two tasks.

Sources: docs.ray.io (resources, accelerators: a share of a GPU is of one device, several GPUs are whole).
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, TypeAlias

from eelgrid_controller.engines.node_reports import (
    CorrectDevices,
    NodeReporter,
    RegisterNode,
    RemoveNode,
    ReportUsage,
)
from eelgrid_controller.engines.ray.answers import GpuSlot, RayHolding, RayJob, RayLook, RayNode
from eelgrid_controller.state.engine_reports import Adoption, ExternalUsage, RunningReplica
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    Gpu,
    Inventory,
    Placement,
    ResourceRequest,
    SubmitWorkloadRequest,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.quantities import GPU_MILLI_WHOLE
from eelgrid_protos.ray_names import NODE_TRAIT, OF_CLIENT, OF_JOB, ORIGIN, SERVE_LABEL, label_trait

# Ids of the workloads of jobs begin with it.
JOB_PREFIX = "ray-"
_NODE_TRAITS_MOST = 256
_TRAIT_MOST = 253
_GENERATIONS_MOST = 10_000
_DRIVER_NAME = re.compile(r"[0-9a-f]+-[0-9]+")


@dataclass(frozen=True, slots=True)
class AdoptRayJob:
    """A job holds these GPUs."""

    request: SubmitWorkloadRequest
    adoption: Adoption


@dataclass(frozen=True, slots=True)
class ReportRayEnd:
    """A submitted job has ended in Ray, and how."""

    status: AttemptStatus


@dataclass(frozen=True, slots=True)
class EndRayWork:
    """A workload of the core is over in Ray."""

    workload_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopRayJob:
    """Somebody has cancelled the workload of a submitted job: stop the job in Ray."""

    submission_id: str
    workload_id: str


RayInstruction: TypeAlias = (
    RegisterNode | RemoveNode | ReportUsage | CorrectDevices | AdoptRayJob | ReportRayEnd | EndRayWork | StopRayJob
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingSettings:
    """`patience_s` is how long a workload may be held by nothing in Ray before it is ended."""

    patience_s: float = 30.0
    namespace: str = "default"


class _Device(NamedTuple):
    """A GPU of a node by its index."""

    node_name: str
    gpu: int


@dataclass(slots=True)
class Following:
    """What is remembered between looks: since when workloads are held by nothing, which GPUs work has, what was said of nodes."""

    settings: FollowingSettings = field(default_factory=FollowingSettings)
    _unheld_since_s: dict[str, float] = field(default_factory=dict)
    # By holder and node: the most that was ever known of its GPUs, since statistics come late and may fail to come.
    _slots: dict[tuple[str, str], tuple[GpuSlot, ...]] = field(default_factory=dict)
    reports: NodeReporter = field(default_factory=NodeReporter)
    # Names of nodes that were Ray's.
    _were_of_ray: set[str] = field(default_factory=set)

    def decide(
        self,
        look: RayLook,
        workloads: Mapping[str, Workload],
        *,
        has_agent: frozenset[str],
        gpus: Mapping[str, Mapping[int, str]],
        now_s: float,
    ) -> list[RayInstruction]:
        """Returns what is to be done; `has_agent` names all nodes of agents, `gpus` the core's ids of GPUs by node and index."""
        names = {node.node_id: node.name for node in look.nodes}
        holdings = self._remember_slots([one for one in look.holdings if one.node_id in names])
        mine = {key: one for key, one in workloads.items() if is_of_ray(one)}
        grants = list_grants(mine)
        found: list[RayInstruction] = []
        found += self._end_unheld(look, holdings, mine, now_s)
        found += self._follow_nodes(look.nodes, sum_external_usage(holdings, names, mine, grants), has_agent)
        held = group_by_job(holdings, names, mine, grants)
        for job in sorted(look.jobs, key=lambda one: (one.start_s, one.job_id, one.submission_id)):
            found += self._follow_job(job, held.list_own_devices(job), held.list_unsaid_nodes(job), mine, now_s)
        found += _end_forgotten(look.jobs, mine)
        found += list_corrections(holdings, names, mine, gpus, grants)
        for key in self._unheld_since_s.keys() - mine.keys():
            del self._unheld_since_s[key]
        return found

    def _remember_slots(self, holdings: Sequence[RayHolding]) -> list[RayHolding]:
        present = {(one.holder, one.node_id) for one in holdings}
        for gone in self._slots.keys() - present:
            del self._slots[gone]
        remembered = []
        for one in holdings:
            key = one.holder, one.node_id
            if len(one.slots) >= len(self._slots.get(key, ())) and one.slots:
                self._slots[key] = one.slots
            remembered.append(replace(one, slots=self._slots.get(key, ())))
        return remembered

    def _is_patience_over(self, key: str, now_s: float) -> bool:
        return now_s - self._unheld_since_s.setdefault(key, now_s) >= self.settings.patience_s

    def _end_unheld(
        self, look: RayLook, holdings: Sequence[RayHolding], mine: Mapping[str, Workload], now_s: float
    ) -> Iterable[RayInstruction]:
        """Ends what the client library had placed and nothing in Ray holds."""
        held = {one.workload_id for one in holdings} | look.expected
        for key, workload in mine.items():
            if workload.spec.labels.get(ORIGIN) != OF_CLIENT:
                continue
            if workload.phase is not WorkloadPhase.PLACED or key in held:
                self._unheld_since_s.pop(key, None)
            elif self._is_patience_over(key, now_s):
                yield EndRayWork(key, "nothing in Ray holds it")

    def _follow_nodes(
        self, nodes: Sequence[RayNode], usage: Mapping[str, ExternalUsage], has_agent: frozenset[str]
    ) -> Iterable[RayInstruction]:
        # The agent of a node speaks on when its raylet is gone: then nothing of Ray's may come there.
        closed, names = "Ray: the node has left the cluster", {node.name for node in nodes}
        self._were_of_ray |= names
        # One that never was Ray's is free for what agents run, such as nodes of Ray from our own queue.
        others = has_agent - self._were_of_ray
        yield from self.reports.remove_missing(names | others, has_agent=has_agent, closed=closed)
        for name in sorted(others):
            yield from self.reports.report(name, ExternalUsage(), None)
        for node in nodes:
            held = replace(usage.get(node.name, ExternalUsage()), traits=list_node_traits(node), closed=node.closed)
            inventory = None if node.name in has_agent else build_ray_inventory(node)
            yield from self.reports.report(node.name, held, inventory)

    def _follow_job(
        self,
        job: RayJob,
        wanted: frozenset[_Device],
        unsaid: frozenset[str],
        mine: Mapping[str, Workload],
        now_s: float,
    ) -> Iterable[RayInstruction]:
        """Has the core hold the GPUs that a job has to itself; on nodes where it is `unsaid` which, those that it holds."""
        key, last = name_ray_job(job, mine), find_last_workload(job, mine)
        if last is not None and last.phase is WorkloadPhase.CANCELLED and not last.reason and job.submission_id:
            # Until it has ended, what it holds is external usage. A driver that somebody started is not Ray's to stop.
            if not job.is_over:
                yield StopRayJob(job.submission_id, last.workload_id)
            return
        workload = mine.get(key)
        places = () if workload is None else workload.placements
        held = {_device_of(place): place.replica for place in places}
        wanted |= {one for one in held if one.node_name in unsaid}
        if not wanted:
            if not held:
                return
            if workload is not None and job.submission_id and job.status in ("SUCCEEDED", "FAILED"):
                yield ReportRayEnd(describe_job_end(job, workload))
                return
            if job.is_over or self._is_patience_over(key, now_s):
                yield EndRayWork(key, f"{job.status.lower()} in Ray" if job.is_over else "holds no GPU in Ray any more")
                return
            # One place keeps the workload, so that its next task is no other workload.
            wanted = frozenset((min(held),))
        else:
            self._unheld_since_s.pop(key, None)
        new = sorted(wanted - held.keys())
        gone = tuple(sorted(held[one] for one in held.keys() - wanted))
        if not new and not gone:
            return
        standing = tuple(
            RunningReplica(
                node_name=one.node_name,
                gpu_indexes=(one.gpu,),
                is_exact=True,
                counted=ExternalUsage(gpu_count=1, gpu_indexes=(one.gpu,)),
            )
            for one in new
        )
        first = 1 + max((place.replica for place in places), default=-1)
        adoption = Adoption(standing=standing, first=first, released=gone, in_parts=True)
        yield AdoptRayJob(build_job_request(job, key, len(new), self.settings), adoption)


def _end_forgotten(jobs: Iterable[RayJob], mine: Mapping[str, Workload]) -> Iterable[RayInstruction]:
    """Ends workloads of jobs that Ray has no more: it was started anew."""
    bases = {_base_name(job) for job in jobs}
    for key, workload in mine.items():
        is_live = workload.phase in (WorkloadPhase.PENDING, WorkloadPhase.PLACED)
        if workload.spec.labels.get(ORIGIN) == OF_JOB and is_live and _strip_generation(key) not in bases:
            yield EndRayWork(key, "the job is no more in Ray")


# Names


def is_of_ray(workload: Workload) -> bool:
    """Whether a workload is one of Ray's: made by its client library or for one of its jobs, or stands for a deployment."""
    return ORIGIN in workload.spec.labels or SERVE_LABEL in workload.spec.labels


def _base_name(job: RayJob) -> str:
    # Numbers of drivers begin anew with each cluster, so the time is a part of their name.
    name = job.submission_id or f"{job.job_id}-{job.start_s}"
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:100].strip("-_")
    if plain != name or (job.submission_id and _DRIVER_NAME.fullmatch(name)):
        # People choose ids of submissions: one that is changed here, or is as a driver's name, must be no other job's.
        plain = f"{plain}-{sha256(name.encode(errors='replace')).hexdigest()[:16]}".lstrip("-")
    return JOB_PREFIX + plain


def _strip_generation(key: str) -> str:
    return key.partition(".")[0]


def name_ray_job(job: RayJob, workloads: Mapping[str, Workload]) -> str:
    """Returns the core's id of a job: after one that was ended while the job went on, the next number of it."""
    for key in _list_generations(job):
        workload = workloads.get(key)
        if workload is None or not workload.phase.is_ended:
            return key
    return _base_name(job)


def find_last_workload(job: RayJob, workloads: Mapping[str, Workload]) -> Workload | None:
    """Returns the newest workload of a job, ended or not; None if it has none."""
    last = None
    for key in _list_generations(job):
        workload = workloads.get(key)
        if workload is None:
            break
        last = workload
    return last


def _list_generations(job: RayJob) -> Iterable[str]:
    base = _base_name(job)
    yield base
    for number in range(1, _GENERATIONS_MOST):
        yield f"{base}.{number}"


def build_job_request(job: RayJob, key: str, replicas: int, settings: FollowingSettings) -> SubmitWorkloadRequest:
    """Returns the submission of a job: a replica for each GPU."""
    words = job.metadata.get("name") or job.metadata.get("job_name") or _name_program(job.entrypoint)
    labels = {ORIGIN: OF_JOB, "ray/job": job.job_id, "ray/submission": job.submission_id}
    spec = WorkloadSpec(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", words)[:100].strip("-._") or "ray-job",
        kind=WorkloadKind.BATCH_JOB,
        replicas=replicas,
        namespace=settings.namespace,
        user=re.sub(r"[^ -~]+", "", job.metadata.get("user", ""))[:100],
        request=ResourceRequest(gpu_count=1, gpu_milli=GPU_MILLI_WHOLE),
        labels={name: value for name, value in labels.items() if value},
    )
    return SubmitWorkloadRequest(spec=spec, workload_id=key)


def describe_job_end(job: RayJob, workload: Workload) -> AttemptStatus:
    """Returns how a submitted job has ended, by Ray's word, as the attempt of all its replicas.

    Of a driver that somebody started Ray does not know it.
    """
    is_good, code = job.status == "SUCCEEDED", job.exit_code
    return AttemptStatus(
        workload_id=workload.workload_id,
        replica=min(place.replica for place in workload.placements),
        attempt=workload.attempt,
        state=AttemptState.ENDED,
        exit_code=0 if is_good else code if code is not None and code > 0 else None,
        signal=-code if code is not None and code < 0 and not is_good else 0,
        reason="" if is_good or code else "failed in Ray",
        started_ns=job.start_s * 10**9,
        ended_ns=max(job.start_s, job.end_s) * 10**9,
    )


def _name_program(entrypoint: str) -> str:
    """Returns what an entrypoint runs: train.py of `python /srv/train.py --lr 1`."""
    for word in entrypoint.split():
        program = word.rpartition("/")[2]
        if not word.startswith("-") and not re.match(r"(env|uv|run|python[0-9.]*)$", program) and "=" not in word:
            return program
    return ""


# Who holds what


def _device_of(place: Placement) -> _Device:
    return _Device(place.node_name, place.gpu_indexes[0] if place.gpu_indexes else -1)


def _list_placed(mine: Mapping[str, Workload]) -> Iterable[tuple[str, Workload, Placement]]:
    for key, workload in mine.items():
        if workload.phase is WorkloadPhase.PLACED:
            for place in workload.placements:
                yield key, workload, place


class _Grant(NamedTuple):
    """That the core has placed a workload on a node, other than one that follows a job."""

    workload_id: str
    node_name: str


def list_grants(mine: Mapping[str, Workload]) -> frozenset[_Grant]:
    """Returns where workloads may hold what names them: those of the client library, and those that stand for deployments."""
    return frozenset(
        _Grant(key, place.node_name)
        for key, workload, place in _list_placed(mine)
        if workload.spec.labels.get(ORIGIN) != OF_JOB
    )


@dataclass(frozen=True, slots=True)
class JobHoldings:
    """What jobs hold that is granted to no workload, grouped once for all jobs of a look."""

    # By device, the jobs that use it; an empty id stands for what is granted, and for users of which no job is known.
    users: Mapping[_Device, AbstractSet[str]]
    # By job.
    devices: Mapping[str, AbstractSet[_Device]]
    unsaid: Mapping[str, AbstractSet[str]]
    # By device, the names of jobs, or ids of others, to whose workloads the core has given it.
    placed: Mapping[_Device, AbstractSet[str]]

    def list_own_devices(self, job: RayJob) -> frozenset[_Device]:
        """Returns the GPUs that a job has to itself, without those that the core has given to another workload."""
        base, only = {_base_name(job)}, {job.job_id}
        return frozenset(
            one
            for one in self.devices.get(job.job_id, ())
            if job.job_id and self.users[one] == only and self.placed.get(one, base) == base
        )

    def list_unsaid_nodes(self, job: RayJob) -> frozenset[str]:
        """Returns the nodes whose statistics have not told which GPUs a job has there, as after a restart of the controller."""
        return frozenset(self.unsaid.get(job.job_id, ()) if job.job_id else ())


def group_by_job(
    holdings: Iterable[RayHolding], names: Mapping[str, str], mine: Mapping[str, Workload], grants: Collection[_Grant]
) -> JobHoldings:
    """Groups what is held by job and by device."""
    users: dict[_Device, set[str]] = {}
    devices: dict[str, set[_Device]] = {}
    unsaid: dict[str, set[str]] = {}
    placed: dict[_Device, set[str]] = {}
    for key, _, place in _list_placed(mine):
        for index in place.gpu_indexes:
            placed.setdefault(_Device(place.node_name, index), set()).add(_strip_generation(key))
    for one in holdings:
        name = names[one.node_id]
        job_id = "" if _Grant(one.workload_id, name) in grants else one.job_id
        known = {_Device(name, slot.gpu) for slot in one.slots}
        for device in known:
            users.setdefault(device, set()).add(job_id)
        devices.setdefault(job_id, set()).update(known)
        if len(one.slots) < one.gpus:
            unsaid.setdefault(job_id, set()).add(name)
    return JobHoldings(users, devices, unsaid, placed)


def sum_external_usage(
    holdings: Iterable[RayHolding], names: Mapping[str, str], mine: Mapping[str, Workload], grants: Collection[_Grant]
) -> dict[str, ExternalUsage]:
    """Sums by node what is held in Ray beyond what the core has placed there."""
    planned: set[_Device] = set()
    granted: dict[tuple[str, str], list[float]] = {}
    for key, workload, place in _list_placed(mine):
        planned |= {_Device(place.node_name, index) for index in place.gpu_indexes}
        request, left = workload.spec.request, granted.setdefault((key, place.node_name), [0.0, 0.0, 0.0])
        left[0] += request.cpu_milli / 1000.0
        left[1] += request.memory_bytes
        left[2] += request.gpu_count * request.gpu_milli / GPU_MILLI_WHOLE
    indexes: dict[str, set[int]] = {}
    totals: dict[str, list[float]] = {}
    for one in holdings:
        name = names[one.node_id]
        amounts = [one.cpus, float(one.memory_bytes), one.gpus]
        if _Grant(one.workload_id, name) in grants:
            left = granted[one.workload_id, name]
            covered = [min(amount, rest) for amount, rest in zip(amounts, left, strict=True)]
            granted[one.workload_id, name] = [rest - part for rest, part in zip(left, covered, strict=True)]
            amounts = [amount - part for amount, part in zip(amounts, covered, strict=True)]
        else:
            known = {slot.gpu for slot in one.slots}
            indexes.setdefault(name, set()).update(index for index in known if _Device(name, index) not in planned)
            amounts[2] = max(0.0, amounts[2] - sum(slot.share for slot in one.slots))
        total = totals.setdefault(name, [0.0, 0.0, 0.0])
        for at, amount in enumerate(amounts):
            # Each share of a GPU may be on another device.
            total[at] += math.ceil(amount - 1e-6) if at == 2 else amount
    return {
        name: ExternalUsage(
            cpu_milli=math.ceil(1000.0 * cpus - 1e-3),
            memory_bytes=math.ceil(memory),
            gpu_count=int(gpus) + len(indexes.get(name, ())),
            gpu_indexes=tuple(sorted(indexes.get(name, ()))),
        )
        for name, (cpus, memory, gpus) in totals.items()
    }


def list_corrections(
    holdings: Iterable[RayHolding],
    names: Mapping[str, str],
    mine: Mapping[str, Workload],
    gpus: Mapping[str, Mapping[int, str]],
    grants: Collection[_Grant],
) -> Iterable[CorrectDevices]:
    """Yields by node the GPUs that workloads of the client library have there, where Ray chose others than planned."""
    held: dict[_Grant, dict[int, float]] = {}
    for one in holdings:
        grant = _Grant(one.workload_id, names[one.node_id])
        if grant in grants:
            shares = held.setdefault(grant, {})
            for slot in one.slots:
                shares[slot.gpu] = min(1.0, shares.get(slot.gpu, 0.0) + slot.share)
    by_node: dict[str, dict[tuple[str, int], tuple[str, ...]]] = {}
    for (key, name), shares in held.items():
        request, known = mine[key].spec.request, gpus.get(name, {})
        places = sorted((one for one in mine[key].placements if one.node_name == name), key=lambda one: one.replica)
        if any(one.gpu_instance is not None for one in places) or not request.gpu_milli:
            # Slices are chosen here, and told to the program itself.
            continue
        # Several replicas may share a GPU, each with its part of it.
        times = {index: round(share * GPU_MILLI_WHOLE / request.gpu_milli) for index, share in shares.items()}
        uuids = [known[index] for index in sorted(times) if index in known for _ in range(times[index])]
        planned = [uuid for one in places for uuid in one.gpu_uuids]
        if len(uuids) != len(planned) or sorted(uuids) == sorted(planned):
            continue
        into = by_node.setdefault(name, {})
        for at, place in enumerate(places):
            into[key, place.replica] = tuple(uuids[at * request.gpu_count : (at + 1) * request.gpu_count])
    for name, corrected in by_node.items():
        yield CorrectDevices(name, corrected)


# Nodes


def build_ray_inventory(node: RayNode) -> Inventory:
    """Returns the inventory of a node for which no agent speaks: what its raylet was started with."""
    model = node.gpu_model or "GPU"
    gpus = tuple(
        Gpu(uuid=f"{node.name}/gpu-{index}", index=index, product=model, model=model) for index in range(node.gpus)
    )
    return Inventory(node_name=node.name, cpu_milli=int(1000 * node.cpus), memory_bytes=node.memory_bytes, gpus=gpus)


def list_node_traits(node: RayNode) -> tuple[str, ...]:
    """Returns the traits of a node, bounded: that it is Ray's, its labels, and its users' own resources."""
    found = [NODE_TRAIT]
    found += [label_trait(key, value) for key, value in sorted(node.labels.items()) if key != "ray.io/node-id"]
    found += [f"ray/resource/{name}" for name in sorted(node.resources)]
    fitting = [one for one in found if len(one) <= _TRAIT_MOST and one.isprintable()]
    return tuple(fitting[:_NODE_TRAITS_MOST])
