"""Scheduling: what is to be done about the jobs and nodes of Flux, given what the core holds of them.

`FluxScheduling.decide` compares what Flux has said (`FluxInstance`) with the core's workloads and returns instructions,
level-triggered, for all jobs or for those of which something has changed. Owns which job is which workload, and the answers
to jobs that are placed. Must not know sockets nor clocks; times are arguments.

Theory. Two pictures are brought together. Flux's: which ranks are up, which jobs hold which R, which wait. The core's: a
workload for each of them, under the job's id. A job that waits is submitted; where the core places it, its places become an
exact R, which Flux gets as its answer. A job that runs is adopted where it runs, also after a restart of either side: the
module begins by saying all that stands (`hello`), and only its end (`ready`) puts that picture in force. What runs and
cannot be adopted, because its ranks are not alike, is external usage. Flux is the only truth of what runs: where the core
differs, the core is corrected, by ending its workload and beginning another with the next number (flux-JOB.N). What an
operator ends here is denied or cancelled in Flux.

A look at a job depends on that job alone, on its workloads, and on time: so a look at those that have changed since the last
one comes to the same as a look at all. What waits for time notes when it is due (`ChangedJobs`). What others hold on a node is
kept by job, and summed up anew where it changes.

Without a scheduler of ours (mode `observe`) what runs is taken from the journal alone, so that energy and queues are
answered for, and nothing is decided.

Sources: flux-framework/rfc 20, 21, 25, 27, 31.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from eelgrid_controller.engines.flux.allocations import (
    AllocationConflict,
    RankPlace,
    split_equally,
)
from eelgrid_controller.engines.flux.instance import (
    PARTS_MOST,
    RETRY_MOST_S,
    WORKLOAD_PREFIX,
    FluxInstance,
    FluxJob,
    FluxReply,
    FluxView,
)
from eelgrid_controller.engines.flux.jobspecs import (
    JobRequest,
    group_whole_nodes,
    list_plain_properties,
    match_ranks,
    parse_jobspec,
)
from eelgrid_controller.engines.flux.journal import JournalJob
from eelgrid_controller.engines.flux.resource_sets import (
    FluxUnreadable,
    RankResources,
    ResourceSet,
    describe_resource_set,
    format_job_id,
    format_resource_set,
    parse_job_id,
)
from eelgrid_controller.engines.node_reports import NodeReporter, RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.state.engine_reports import Adoption, ExternalUsage, RunningReplica
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    Gpu,
    Inventory,
    Mobility,
    ResourceRequest,
    SubmitWorkloadRequest,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)
from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

# Jobs that are in the core and wait; those behind them come as these start.
WAITING_MOST = 10_000
_CPU_MILLI_MOST, _RUNTIME_MOST_S = 10_000_000, 3e8
_TRAITS_MOST = 16
_NODE_TRAITS_MOST = 256
_SIGNALS_MOST = 64
# For so long the event that says how a job ended may come after its resources are free.
_EVENT_WAIT_S = 1.0
_PRIORITY_MOST = 1_000_000
# Each round of the core over its pending work asks for the number of each.
_JOBS_KEPT = 65_536
_RETRY_FIRST_S = 1.0
# What a job waits for is told at most so often: most jobs that start within that time need no word, and each word is a
# message to Flux, which passes it on to everybody who listens.
_TELL_EVERY_S = 1.0
_INSTANCE_TRAIT = "flux/instance"
_LIVE = (WorkloadPhase.PENDING, WorkloadPhase.PLACED)


@dataclass(frozen=True, slots=True)
class FluxSubmit:
    """Have the core place a job that waits."""

    request: SubmitWorkloadRequest
    job: int


@dataclass(frozen=True, slots=True)
class FluxAdopt:
    """A job holds what it holds."""

    request: SubmitWorkloadRequest
    adoption: Adoption
    job: int


@dataclass(frozen=True, slots=True)
class FluxReportEnd:
    """A job has ended by itself, and how."""

    status: AttemptStatus


@dataclass(frozen=True, slots=True)
class FluxEnd:
    """A workload is over, or another stands for its job."""

    workload_id: str
    reason: str


# What the core is told one by one, and all that is to be done.
FluxCommand: TypeAlias = RegisterNode | RemoveNode | ReportUsage | FluxAdopt | FluxEnd
FluxInstruction: TypeAlias = FluxCommand | FluxSubmit | FluxReportEnd | FluxReply


class _Held(NamedTuple):
    """The workloads of one job: the live ones, and the number of the newest."""

    live: tuple[tuple[int, Workload], ...]
    newest: int
    is_newest_cancelled: bool


class FluxScheduling:
    """Decides what is to be done about the jobs and nodes of one instance."""

    def __init__(self, *, namespace: str = "default") -> None:
        self.instance = FluxInstance()
        self._namespace = namespace
        self.reports = NodeReporter()
        self._ended: set[str] = set()
        # Of jobs that are over in Flux and live in the core: since when.
        self._over_since_s: dict[str, float] = {}
        # Jobs that wait and are in the core, and those that wait and are restricted beyond traits.
        self._submitted: set[int] = set()
        self._restricted: set[int] = set()
        # By job what it holds that the core does not hold as placed there, by node.
        self._external: dict[int, dict[str, ExternalUsage]] = {}
        # What is known of nodes since they were last looked at: their inventories, and which an agent speaks for.
        self._inventories: Mapping[str, Inventory] = {}
        self._has_agent: frozenset[str] = frozenset()
        self._names = NodeNames(ResourceSet(ranks={}))
        # Jobs that are about to be submitted to another scheduler, by the id under which the core is asked.
        self._asked: dict[str, JobRequest] = {}
        self._advices = 0

    # What is to be done

    def decide(
        self,
        workloads: Mapping[str, Workload],
        inventories: Mapping[str, Inventory] | None,
        *,
        has_agent: frozenset[str] = frozenset(),
        now_s: float,
        jobs: frozenset[int] | None = None,
    ) -> list[FluxInstruction]:
        """Returns what is to be done about some jobs, None for all, and about nodes.

        `workloads` are all workloads of these jobs; `inventories` are by name those of the core's nodes, and None if nodes
        are not due.
        """
        view = self.instance.view
        if view is None or self.instance.is_away:
            return []
        if jobs is None:
            self._ended.intersection_update(workloads)
        names, held = self.name_nodes(view), _group_workloads(workloads)
        self._note_jobs(view, held, jobs)
        found: list[FluxInstruction] = list(self._end_others(view, held, now_s))
        has_new_usage = self._follow_external_usage(view, names, held, jobs)
        if inventories is not None:
            self._inventories, self._has_agent = inventories, has_agent
            self._learn_properties()
        if inventories is not None or has_new_usage:
            found += self._follow_nodes(view)
        nothing = _Held((), -1, is_newest_cancelled=False)
        for job in _select_jobs(view.running, jobs):
            if now_s >= job.not_before_s:
                found += self._follow_run(view, job, held.get(job.base_id, nothing))
            else:
                self.instance.changed.add_later(job.number, job.not_before_s)
        submitted = len(self._submitted)
        for job in sorted(_select_jobs(view.waiting, jobs), key=lambda one: (-one.priority, one.number)):
            for one in self._follow_waiting(view, job, held.get(job.base_id, nothing), now_s):
                if isinstance(one, FluxSubmit):
                    submitted += 1
                    if submitted > WAITING_MOST:
                        self.instance.changed.add_later(job.number, now_s + _RETRY_FIRST_S)
                        continue
                found.append(one)
        return found

    def _note_jobs(self, view: FluxView, held: Mapping[str, _Held], jobs: frozenset[int] | None) -> None:
        """Brings up to date what is counted over jobs."""
        if jobs is None:
            self._over_since_s = {base: since_s for base, since_s in self._over_since_s.items() if base in held}
            self._submitted.clear()
            self._restricted.clear()
        else:
            self._submitted -= jobs
            self._restricted -= jobs
        for job in _select_jobs(view.waiting, jobs):
            if job.base_id in held and held[job.base_id].live:
                self._submitted.add(job.number)
            if job.request is not None and needs_rules(job.request):
                self._restricted.add(job.number)

    def name_nodes(self, view: FluxView) -> "NodeNames":
        """Returns the names of the nodes of the pool that is in force."""
        if self._names.pool is not view.allocations.pool:
            self._names = NodeNames(view.allocations.pool)
        return self._names

    def has_rules(self) -> bool:
        """Returns whether any job that waits, or is asked about, is restricted by more than traits, as far as is known."""
        view = self.instance.view
        is_waiting = view is None or any(number in view.waiting for number in self._restricted)
        return is_waiting or any(map(needs_rules, self._asked.values()))

    def _end(self, workload_id: str, reason: str) -> FluxEnd:
        self._ended.add(workload_id)
        return FluxEnd(workload_id, reason)

    def _end_others(self, view: FluxView, held: Mapping[str, _Held], now_s: float) -> Iterator[FluxEnd | FluxReportEnd]:
        """Ends workloads whose job Flux has no more, and all but the newest of a job that has several."""
        for base, one in held.items():
            number = find_job_number(base)
            is_known = number in view.waiting or number in view.running
            if is_known or not one.live:
                self._over_since_s.pop(base, None)
            elif one.live[-1][1].phase is WorkloadPhase.PLACED:
                told = self.instance.journal.jobs.get(number)
                if told is not None and self._is_end_awaited(view, base, told, now_s):
                    continue
                if told is not None and told.wait_status is not None and told.exception != "cancel":
                    yield FluxReportEnd(describe_job_end(told, told.wait_status, one.live[-1][1]))
                    continue
            for times, workload in one.live[:-1] if is_known else one.live:
                reason = f"number {times} is followed by another" if is_known else "the job is over in Flux"
                yield self._end(workload.workload_id, reason)

    def _is_end_awaited(self, view: FluxView, base: str, told: JournalJob, now_s: float) -> bool:
        """Returns whether the event that says how a job ended, whose resources are free already, is still on its way."""
        if told.is_over or view.observes:
            return False
        until_s = self._over_since_s.setdefault(base, now_s) + _EVENT_WAIT_S
        if now_s < until_s:
            self.instance.changed.add_later(find_job_number(base), until_s)
        return now_s < until_s

    def _follow_run(self, view: FluxView, job: FluxJob, held: _Held) -> Iterator[FluxInstruction]:
        resources = view.allocations.get(job.number)
        if resources is None or job.is_left:
            return
        if not held.live:
            if held.is_newest_cancelled and job.was_live and name_attempt(job, held.newest) not in self._ended:
                job.is_left = True
                yield FluxReply("raise", {"id": job.number, "note": "cancelled in Eelgrid"})
                return
            request, adoption = self._build_adoption(job, resources, held.newest + 1)
            if request is None:
                job.is_left = True
            else:
                yield FluxAdopt(request, adoption, job.number)
            return
        _, workload = held.live[-1]
        wanted = {self._names.by_rank[rank]: (len(one.cores), one.gpus) for rank, one in resources.ranks.items()}
        places = _sum_places(workload)
        if workload.phase is WorkloadPhase.PLACED and places == wanted:
            job.was_live = True
        elif workload.phase is WorkloadPhase.PLACED and {key: places.get(key) for key in wanted} == wanted:
            released = tuple(one.replica for one in workload.placements if one.node_name not in wanted)
            first = 1 + max(one.replica for one in workload.placements)
            request = SubmitWorkloadRequest(spec=workload.spec, workload_id=workload.workload_id)
            yield FluxAdopt(request, Adoption(first=first, released=released), job.number)
        else:
            yield self._end(workload.workload_id, "runs in Flux elsewhere")

    def _follow_waiting(self, view: FluxView, job: FluxJob, held: _Held, now_s: float) -> Iterator[FluxInstruction]:
        if not held.live:
            if held.is_newest_cancelled and job.was_live and name_attempt(job, held.newest) not in self._ended:
                del view.waiting[job.number]
                yield self.instance.deny(job.number, "cancelled by an operator")
            elif now_s >= job.not_before_s:
                yield FluxSubmit(self.build_submission(job, held.newest + 1), job.number)
            else:
                self.instance.changed.add_later(job.number, job.not_before_s)
            return
        _, workload = held.live[-1]
        job.was_live = True
        if workload.phase is WorkloadPhase.PLACED:
            yield from self._answer(view, job, workload, now_s)
            return
        if workload.spec.priority != _clamp_priority(job.priority):
            yield FluxSubmit(self.build_submission(job, held.newest + 1), job.number)
            yield self._end(workload.workload_id, "its priority has changed in Flux")
            return
        promise = workload.promise
        said = {
            "t_estimate": promise.start_ns / 1e9 if promise is not None and promise.start_ns else None,
            "reason_pending": workload.reason[:200] or None,
        }
        if said == job.annotated or not (any(said.values()) or job.annotated):
            return
        job.tell_from_s = job.tell_from_s or now_s + _TELL_EVERY_S
        if now_s < job.tell_from_s:
            self.instance.changed.add_later(job.number, job.tell_from_s)
        else:
            job.annotated, job.tell_from_s = said, now_s + _TELL_EVERY_S
            yield FluxReply("alloc", {"id": job.number, "type": 1, "annotations": {"sched": said}})

    def _answer(self, view: FluxView, job: FluxJob, workload: Workload, now_s: float) -> Iterator[FluxInstruction]:
        """Answers a placed job with its R; one that is not free is placed anew."""
        assert job.request is not None
        try:
            places = [RankPlace(self._names.by_name[one.node_name], one.gpu_indexes) for one in workload.placements]
            self._check_rules(view, job.request, places)
            resources = view.allocations.assign(job.request, places, down=view.down, now_s=now_s)
            view.allocations.hold(job.number, resources)
        except (AllocationConflict, KeyError):
            self.instance.counts.conflicts += 1
            job.not_before_s = now_s + min(RETRY_MOST_S, _RETRY_FIRST_S * 2.0**job.conflicts)
            job.conflicts = min(job.conflicts + 1, 10)
            self.instance.changed.add_later(job.number, job.not_before_s)
            yield self._end(workload.workload_id, "its place is not free in Flux")
            return
        del view.waiting[job.number]
        view.running[job.number] = job
        job.not_before_s, job.is_answered = 0.0, True
        self.instance.counts.placed += 1
        formatted = format_resource_set(resources)
        sched = dict.fromkeys(job.annotated) | {"resource_summary": describe_resource_set(formatted)[:200]}
        answer = {"id": job.number, "type": 0, "R": formatted, "annotations": {"sched": sched}}
        yield FluxReply("alloc", answer)

    def _check_rules(self, view: FluxView, request: JobRequest, places: list[RankPlace]) -> None:
        """Checks the places of a job against its rules, without which a core may have decided that has just begun.

        Raises AllocationConflict.
        """
        if not needs_rules(request):
            return
        ranks = frozenset(place.rank for place in places)
        if not ranks <= self.list_matching_ranks(view, request) or (request.nodes and len(ranks) < len(places)):
            raise AllocationConflict("its places are not as its constraints have them")

    # What the core is told

    def build_submission(self, job: FluxJob, number: int, *, dry_run: bool = False) -> SubmitWorkloadRequest:
        """Returns the submission of a job that waits."""
        assert job.request is not None
        request = job.request
        cores, gpus = request.shape
        if request.is_exclusive and self.instance.view is not None:
            cores, gpus = self._choose_size(request, self.instance.view)
        spec = self._build_spec(job, request.replicas, cores, gpus, request.name)
        spec = replace(
            spec,
            queue=request.queue,
            required_traits=self._list_traits(request),
            expected_runtime_s=min(request.duration_s, _RUNTIME_MOST_S) if request.duration_s >= 1.0 else None,
        )
        return SubmitWorkloadRequest(spec=spec, workload_id=name_attempt(job, number), dry_run=dry_run)

    def ask_advice(self, jobspec: str, user: str) -> SubmitWorkloadRequest:
        """Returns a submission that only asks where a job would go; its end is `end_advice`. Raises FluxUnreadable."""
        self._advices += 1
        job = FluxJob(0, user, 0, 0.0, parse_jobspec(jobspec))
        request = replace(self.build_submission(job, 0, dry_run=True), workload_id=f"flux-advice-{self._advices}")
        assert job.request is not None
        self._asked[request.workload_id] = job.request
        return request

    def end_advice(self, workload_id: str) -> None:
        """Forgets what was asked."""
        self._asked.pop(workload_id, None)

    def list_ranks(self, node_names: Iterable[str]) -> frozenset[int]:
        """Returns the ranks of nodes."""
        wanted, view = frozenset(node_names), self.instance.view
        names = {} if view is None else self.name_nodes(view).by_name
        return frozenset(names[name] for name in wanted & names.keys())

    def _build_spec(self, job: FluxJob, replicas: int, cores: int, gpus: int, name: str) -> WorkloadSpec:
        written = format_job_id(job.number)
        return WorkloadSpec(
            name=re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100].strip("-._") or f"job-{written}",
            kind=WorkloadKind.BATCH_JOB,
            replicas=replicas,
            namespace=self._namespace,
            user=job.user,
            priority=_clamp_priority(job.priority),
            # Flux moves no running job, and ends one only if it is told to.
            mobility=Mobility.FIXED,
            request=ResourceRequest(
                cpu_milli=min(1000 * cores, _CPU_MILLI_MOST),
                memory_bytes=0,
                gpu_count=gpus,
                gpu_milli=GPU_MILLI_WHOLE if gpus else 0,
            ),
            labels={"flux/job": written},
        )

    def _build_adoption(
        self, job: FluxJob, resources: ResourceSet, number: int
    ) -> tuple[SubmitWorkloadRequest | None, Adoption]:
        """Returns how a running job is adopted, in equal parts; None if its ranks are not alike."""
        split = split_equally(resources)
        if split is None or sum(split[1].values()) > PARTS_MOST or split[0][1] > GPUS_PER_NODE_MOST:
            return None, Adoption()
        (cores, gpus), times = split
        standing = []
        for rank, count in times.items():
            ids = sorted(resources.ranks[rank].gpus)
            for part in range(count):
                mine = tuple(ids[part * gpus : (part + 1) * gpus])
                counted = ExternalUsage(cpu_milli=1000 * cores, gpu_count=gpus, gpu_indexes=mine)
                standing.append(
                    RunningReplica(
                        node_name=self._names.by_rank[rank], gpu_indexes=mine, is_exact=True, counted=counted
                    )
                )
        name = job.request.name if job.request is not None else ""
        spec = self._build_spec(job, len(standing), cores, gpus, name)
        left_s = resources.expiration - resources.starttime
        if resources.expiration and left_s >= 1.0:
            spec = replace(spec, expected_runtime_s=min(left_s, _RUNTIME_MOST_S))
        request = SubmitWorkloadRequest(spec=spec, workload_id=name_attempt(job, number))
        return request, Adoption(standing=tuple(standing))

    def _list_traits(self, request: JobRequest) -> tuple[str, ...]:
        names = list_plain_properties(request.constraint) or ()
        return (_INSTANCE_TRAIT, *(f"flux/property/{name}" for name in names))[:_TRAITS_MOST]

    def find_rules(self, workload_id: str) -> tuple[FluxView, JobRequest] | None:
        """Returns what restricts the nodes of a waiting job beyond its traits; None if nothing does."""
        view, base = self.instance.view, workload_id.partition(".")[0]
        if view is None or not base.startswith(WORKLOAD_PREFIX):
            return None
        if (asked := self._asked.get(workload_id)) is not None:
            return (view, asked) if needs_rules(asked) else None
        job = view.waiting.get(find_job_number(base))
        if job is None or job.request is None:
            return None
        return (view, job.request) if needs_rules(job.request) else None

    def list_matching_ranks(self, view: FluxView, request: JobRequest) -> frozenset[int]:
        """Returns the ranks that a job may go to, regardless of what is free."""
        pool = self.instance.extend_pool(view.allocations.pool)
        ranks = frozenset(pool.ranks) if request.constraint is None else match_ranks(request.constraint, pool)
        if request.is_exclusive:
            size = self._choose_size(request, view)
            ranks = group_whole_nodes(request, pool.select_ranks(ranks)).get(size, frozenset())
        return ranks - view.down

    def _choose_size(self, request: JobRequest, view: FluxView) -> tuple[int, int]:
        """Returns the size of the nodes that an exclusive job gets: the smallest of which there are enough."""
        pool = self.instance.extend_pool(view.allocations.pool)
        ranks = pool.ranks if request.constraint is None else match_ranks(request.constraint, pool)
        groups = group_whole_nodes(request, pool.select_ranks(ranks))
        return next((size for size, alike in groups.items() if len(alike) >= request.nodes), request.shape)

    def _learn_properties(self) -> None:
        """Makes properties of what agents have said of nodes: rack, pool, GPU model and its power limit in watts."""
        found: dict[str, set[int]] = {}
        for rank, name in self._names.by_rank.items():
            one = self._inventories.get(name)
            if one is None:
                continue
            said = [f"eelgrid.rack={one.topology[-1]}"] if one.topology else []
            said += [f"eelgrid.pool={one.pool}"] if one.pool else []
            for gpu in one.gpus:
                said.append(f"eelgrid.gpu={gpu.model}")
                if gpu.power_limit_max_w is not None:
                    said.append(f"eelgrid.gpu-watts={gpu.power_limit_max_w:.0f}")
            for word in said:
                found.setdefault(word, set()).add(rank)
        self.instance.known = {word: frozenset(ranks) for word, ranks in found.items()}

    def _follow_nodes(self, view: FluxView) -> Iterator[FluxInstruction]:
        pool, names = self.instance.extend_pool(view.allocations.pool), self._names.by_rank
        usage: dict[str, ExternalUsage] = {}
        for amounts in self._external.values():
            for name, one in amounts.items():
                usage[name] = usage.get(name, ExternalUsage()).add(one)
        yield from self.reports.remove_missing(set(names.values()))
        traits: dict[int, list[str]] = {rank: [_INSTANCE_TRAIT] for rank in names}
        for word, ranks in sorted(pool.properties.items()):
            for rank in ranks & traits.keys():
                traits[rank].append(f"flux/property/{word}")
        for rank, name in names.items():
            whole = pool.ranks[rank]
            others, inventory = usage.get(name, ExternalUsage()), None
            if name in self._has_agent:
                if name not in self._inventories:
                    continue
                others = others.add(_find_beyond(whole, self._inventories[name]))
            else:
                inventory = build_flux_inventory(name, whole, traits[rank])
            closed = "Flux: the rank is down, drained or excluded" if rank in view.down else ""
            others = replace(others, traits=tuple(traits[rank][:_NODE_TRAITS_MOST]), closed=closed)
            yield from self.reports.report(name, others, inventory)

    def _follow_external_usage(
        self, view: FluxView, names: "NodeNames", held: Mapping[str, _Held], jobs: frozenset[int] | None
    ) -> bool:
        """Notes by job what it holds that the core does not hold as placed there; returns whether anything changed."""
        numbers = self._external.keys() if jobs is None else self._external.keys() & jobs
        before, after = {number: self._external.pop(number) for number in tuple(numbers)}, {}
        for job in _select_jobs(view.running, jobs):
            resources = view.allocations.get(job.number)
            live = held[job.base_id].live if job.base_id in held else ()
            places = _sum_places(live[-1][1]) if live else {}
            amounts = {
                names.by_rank[rank]: ExternalUsage(
                    cpu_milli=1000 * len(one.cores), gpu_count=len(one.gpus), gpu_indexes=tuple(sorted(one.gpus))
                )
                for rank, one in (resources.ranks.items() if resources is not None else ())
                if names.by_rank[rank] not in places
            }
            if amounts:
                after[job.number] = amounts
        self._external |= after
        return before != after


class FluxEligibility:
    """Eligibility rules of jobs with constraints, with several nodes, or with whole nodes."""

    # A constraint of Flux is no part of a spec.
    follows_specs = False

    def __init__(self, scheduling: FluxScheduling) -> None:
        self._scheduling = scheduling

    def has_rules_for(self, workload_id: str) -> bool:
        """Returns whether a workload is such a job."""
        return self._scheduling.find_rules(workload_id) is not None

    def list_eligible_nodes(
        self, workload_id: str, placed: Mapping[int, str], workloads: Mapping[str, Workload]
    ) -> frozenset[str]:
        """Returns the nodes that the next part may use; parts that are nodes are each another one."""
        del workloads  # what else is placed is a matter of capacity here
        found = self._scheduling.find_rules(workload_id)
        if found is None:
            return frozenset()
        view, request = found
        names = self._scheduling.name_nodes(view).by_rank
        eligible = frozenset(names[rank] for rank in self._scheduling.list_matching_ranks(view, request))
        return eligible - frozenset(placed.values()) if request.nodes else eligible

    def list_equivalent_nodes(self, workload_id: str, node_name: str) -> frozenset[str]:
        """Returns the nodes that restrict the following parts in the same way: of nodes only itself, else all."""
        found = self._scheduling.find_rules(workload_id)
        if found is None or found[1].nodes:
            return frozenset((node_name,))
        return self.list_eligible_nodes(workload_id, {}, {}) | {node_name}


def needs_rules(request: JobRequest) -> bool:
    """Whether a job restricts its nodes by more than properties that they must have."""
    plain = list_plain_properties(request.constraint)
    return request.nodes > 1 or request.is_exclusive or plain is None or len(plain) >= _TRAITS_MOST


def name_attempt(job: FluxJob, number: int) -> str:
    """Returns the id of a job's workload with a number."""
    return job.base_id + (f".{number}" if number else "")


class NodeNames:
    """The nodes of a pool by rank, and the reverse: its hosts; where several ranks are on one host, with the rank."""

    def __init__(self, pool: ResourceSet) -> None:
        self.pool = pool
        hosts = Counter(one.hostname for one in pool.ranks.values())
        self.by_rank = {
            rank: one.hostname if hosts[one.hostname] == 1 else f"{one.hostname}-rank{rank}"
            for rank, one in sorted(pool.ranks.items())
        }
        self.by_name = {name: rank for rank, name in self.by_rank.items()}


@lru_cache(maxsize=_JOBS_KEPT)
def find_job_number(base: str) -> int:
    """Returns the number of the job whose workload has an id without its own number; -1 if it is no job's."""
    try:
        return parse_job_id(base.removeprefix(WORKLOAD_PREFIX))
    except FluxUnreadable:
        return -1


def _select_jobs(jobs: Mapping[int, FluxJob], numbers: frozenset[int] | None) -> list[FluxJob]:
    """Selects the jobs of some numbers, None for all."""
    return list(jobs.values()) if numbers is None else [jobs[number] for number in sorted(numbers & jobs.keys())]


def build_flux_inventory(name: str, whole: RankResources, traits: Iterable[str]) -> Inventory:
    """Returns the inventory of a node for which no agent speaks; a property such as a100@gpu names the model of its GPUs."""
    words = (one.rpartition("/")[2] for one in traits if one.endswith("@gpu"))
    model = next(
        (word[:-4] for word in words if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]", word[:-4])), "GPU"
    )
    gpus = tuple(
        Gpu(uuid=f"{name}/gpu-{index}", index=index, product=model, model=model)
        for index in sorted(whole.gpus)[:GPUS_PER_NODE_MOST]
    )
    cpu_milli = min(1000 * len(whole.cores), _CPU_MILLI_MOST)
    return Inventory(node_name=name, cpu_milli=cpu_milli, memory_bytes=0, gpus=gpus)


def _find_beyond(whole: RankResources, inventory: Inventory) -> ExternalUsage:
    """Returns what an agent has found on a node that Flux does not manage."""
    indexes = tuple(sorted(gpu.index for gpu in inventory.gpus if gpu.index not in whole.gpus))
    return ExternalUsage(
        cpu_milli=max(0, inventory.cpu_milli - 1000 * len(whole.cores)), gpu_count=len(indexes), gpu_indexes=indexes
    )


def _group_workloads(workloads: Mapping[str, Workload]) -> dict[str, _Held]:
    """Groups the workloads of jobs by the job; live ones by their number."""
    grouped: dict[str, list[tuple[int, Workload]]] = {}
    for key, workload in workloads.items():
        base, _, number = key.partition(".")
        if base.startswith(WORKLOAD_PREFIX) and (not number or number.isdigit()):
            grouped.setdefault(base, []).append((int(number or 0), workload))
    found = {}
    for base, several in grouped.items():
        several.sort(key=lambda item: item[0])
        newest, last = several[-1]
        live = tuple(item for item in several if item[1].phase in _LIVE)
        found[base] = _Held(live, newest, last.phase is WorkloadPhase.CANCELLED)
    return found


def _sum_places(workload: Workload) -> dict[str, tuple[int, frozenset[int]]]:
    """Sums by node the cores and GPUs that a workload holds."""
    cores = workload.spec.request.cpu_milli // 1000
    found: dict[str, tuple[int, frozenset[int]]] = {}
    for one in workload.placements:
        before = found.get(one.node_name, (0, frozenset()))
        found[one.node_name] = (before[0] + cores, before[1] | frozenset(one.gpu_indexes))
    return found


def describe_job_end(told: JournalJob, wait_status: int, workload: Workload) -> AttemptStatus:
    """Returns how a job has ended by its events, as the attempt of all its replicas; a status as wait(2) has it."""
    code, signal = wait_status >> 8 & 0xFF, wait_status & 0x7F
    # Flux's own ends, such as timeout, have a name.
    reason = told.exception and f"{told.exception} in Flux"
    return AttemptStatus(
        workload_id=workload.workload_id,
        replica=min(place.replica for place in workload.placements),
        attempt=workload.attempt,
        state=AttemptState.ENDED,
        exit_code=None if signal else code,
        signal=min(signal, _SIGNALS_MOST),
        reason=re.sub(r"[^ -~]+", "?", reason),
        started_ns=int(1e9 * (told.start_s or told.alloc_s)),
        ended_ns=int(1e9 * told.finish_s),
    )


def _clamp_priority(priority: int) -> int:
    return min(priority, _PRIORITY_MOST)
