"""Summaries of workloads: one row of a long list; mirrored by workload.proto.

A listing of whole workloads carries commands, environments, placements and promises, which a table does not show: ten
thousand queued jobs took 1.4 s, most of it to make, check and read back values that nobody looked at. A summary is flat
and has what a table of jobs or of the queue needs. It is a view in the sense of AIP-157, and a message of its own
because every message that arrives is checked as a whole: a Workload without its spec would be none. So there is no field
mask either, which would leave a reader to guess whether a value is absent or was not asked for.
"""

from typing import Annotated

from eelgrid_protos.messages.job_array import ArrayStatus
from eelgrid_protos.messages.job_schedule import JobDeadline
from eelgrid_protos.messages.plan import JobProgress
from eelgrid_protos.messages.policy import Priority
from eelgrid_protos.messages.workload import (
    PROCESSES_MOST,
    Replicas,
    ResourceRequest,
    Workload,
    WorkloadKind,
    WorkloadPhase,
)
from eelgrid_protos.quantities import Identifier, Label, Name, Nanoseconds, OpenEnum, Range, Sentence, Uint32
from eelgrid_protos.values import dataclass


class WorkloadView(OpenEnum):
    """How much of each workload a listing sends."""

    UNSPECIFIED = 0
    FULL = 1
    SUMMARY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSummary:
    """What a table shows of one workload; fields mean what those of Workload and its spec mean."""

    workload_id: Identifier
    name: Name
    phase: WorkloadPhase
    # Of each replica.
    request: ResourceRequest
    namespace: Label = ""
    user: Label = ""
    owner: Label = ""
    queue: Label = ""
    priority: Priority = 0
    kind: WorkloadKind = WorkloadKind.UNSPECIFIED
    reason: Sentence = ""
    replicas: Replicas = 1
    submitted_ns: Nanoseconds = 0
    # When the first of its processes started.
    started_ns: Nanoseconds = 0
    stopping_ns: Nanoseconds = 0
    ended_ns: Nanoseconds = 0
    runs_processes: bool = False
    # Of how many of its processes an agent reported something.
    processes_reported: Annotated[int, Range(0, PROCESSES_MOST)] = 0
    # As a shell has it, of the first process that failed; None while it runs.
    exit_code: Annotated[int, Range(0, 255)] | None = None
    progress: JobProgress | None = None
    array: ArrayStatus | None = None
    # By when it starts, if it is promised that.
    promised_start_ns: Nanoseconds = 0
    deadline: JobDeadline | None = None
    deadline_broken: bool = False
    queue_position: Uint32 = 0

    @property
    def gpu_milli(self) -> int:
        """The GPU request of all its replicas, in thousandths of a GPU."""
        return self.replicas * self.request.gpu_count * self.request.gpu_milli


def summarize_workload(workload: Workload, *, progress: JobProgress | None, queue_position: int) -> WorkloadSummary:
    """Returns the summary of a workload, with what is known of its progress and of its place in the queue."""
    spec, attempts = workload.spec, workload.attempts
    return WorkloadSummary(
        workload_id=workload.workload_id,
        name=spec.name,
        namespace=spec.namespace,
        user=spec.user,
        owner=workload.owner,
        queue=spec.queue,
        priority=spec.priority,
        kind=spec.kind,
        phase=workload.phase,
        reason=workload.reason,
        replicas=spec.replicas,
        request=spec.request,
        submitted_ns=workload.submitted_ns,
        started_ns=min((one.started_ns for one in attempts if one.started_ns), default=0) if attempts else 0,
        stopping_ns=workload.stopping_ns,
        ended_ns=workload.ended_ns,
        runs_processes=spec.process is not None,
        processes_reported=len(attempts),
        exit_code=workload.exit_code,
        progress=progress,
        array=workload.array,
        promised_start_ns=0 if workload.promise is None else workload.promise.start_ns,
        deadline=spec.deadline,
        deadline_broken=workload.deadline_breach is not None,
        queue_position=queue_position,
    )
