"""Decisions of a preemption on 500 nodes of 8 GPUs: `python -m bench.preemption --scale --out DIR`.

The cases are those of KAI Scheduler's scale test (DATA/kai_kueue: 500 nodes of 8 GPUs, 4,000 running jobs of one GPU): the
reclaim of one GPU, jobs of 2,000 and of 4,000 GPUs that reclaim half of it and everything, and the verdict on work that no
preemption helps. KAI's walls include a Kubernetes API server, so they are beside ours to give the order, not to compare.
Owns the cluster and the clock: CPU time of the core's steps from the submission to the placement or the verdict. No
process runs here: what stops take is in the other part of this benchmark.

Targets: one GPU within 0.2 s, 4,000 GPUs within 5 s, the verdict within 1 s. The longest step is told. It is a single check of
a place, which is a placement of the whole job, where that takes longer than the bound of a step.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.runner import Progress
from bench.tables import write_csv
from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadEvicted
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    Gpu,
    Inventory,
    PreemptionReclaim,
    PreemptionVictims,
    Queue,
    QueuePreemption,
    QueueQuota,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

_NS = 10**9
_GPUS_OF_NODE = 8
_SUBMITTED_NS = 100 * _NS
COLUMNS = (
    "case", "gpus", "outcome", "victims", "steps", "total_s", "longest_step_s", "target_s", "kai_wall_s",
)  # fmt: skip


@dataclass(frozen=True)
class ScaleCase:
    """Work that is submitted to a full cluster; with `is_protected` a third of the jobs there may not be preempted."""

    name: str
    gpus: int
    replicas: int
    target_s: float
    kai_s: float | None = None
    is_protected: bool = False


def list_cases(nodes: int) -> list[ScaleCase]:
    """Lists the cases for so many nodes."""
    return [
        ScaleCase("one GPU", 1, 1, 0.2, 13.928),
        ScaleCase("one node", 8, 1, 5.0),
        ScaleCase("half of all GPUs, by nodes", 8, nodes // 2, 5.0, 102.0),
        ScaleCase("all GPUs, by nodes", 8, nodes, 5.0, 85.0),
        ScaleCase("all GPUs, one by one", 1, 8 * nodes, 5.0),
        ScaleCase("impossible, ten nodes", 8, 10, 1.0, 249.5, is_protected=True),
        ScaleCase("impossible, all GPUs by fours", 4, 2 * nodes, 1.0, None, is_protected=True),
    ]


@dataclass(frozen=True)
class ScaleRun:
    """What one case took."""

    outcome: str
    victims: int
    steps: tuple[float, ...]


def build_full_core(nodes: int, *, is_protected: bool) -> Core:
    """Builds a core on whose nodes jobs of one GPU run, in a queue that borrows all; some are protected, if so wanted."""
    core = Core(ClusterState(), catalogue.load_catalogue())
    for number in range(nodes):
        gpus = tuple(
            Gpu(uuid=f"GPU-{number}-{index}", index=index, model="H100", product="NVIDIA H100")
            for index in range(_GPUS_OF_NODE)
        )
        inventory = Inventory(node_name=f"n{number:05}", cpu_milli=128_000, memory_bytes=2**40, gpus=gpus)
        core.register_node(inventory, now_ns=1)
    quota = (QueueQuota(resource="gpu", nominal=1000 * _GPUS_OF_NODE * nodes),)
    reclaim = QueuePreemption(reclaim=PreemptionReclaim.NOMINAL)
    queues = (
        Queue(name="root"),
        Queue(name="owner", parent="root", quotas=quota, preemption=reclaim),
        Queue(name="borrower", parent="root"),
        Queue(name="kept", parent="root", quotas=quota, preemption=QueuePreemption(victims=PreemptionVictims.NONE)),
    )
    core.update_policy(replace(core.state.policy, queues=queues), now_ns=2)
    for number in range(_GPUS_OF_NODE * nodes):
        queue = "kept" if is_protected and number % 3 == 0 else "borrower"
        core.submit(_build_request(f"job-{number}", queue, 1), now_ns=3 + number)
    return core


def _build_request(key: str, queue: str, gpus: int, replicas: int = 1) -> SubmitWorkloadRequest:
    request = ResourceRequest(cpu_milli=1000, gpu_count=gpus, gpu_milli=1000)
    spec = WorkloadSpec(name=key, queue=queue, kind=WorkloadKind.BATCH_JOB, replicas=replicas, request=request)
    return SubmitWorkloadRequest(spec=spec, workload_id=key)


def measure_case(core: Core, case: ScaleCase) -> ScaleRun:
    """Submits the work of a case, and times each step until it is placed or known not to be."""
    steps, victims = list[float](), 0

    def take_step(call: Any) -> None:
        nonlocal victims
        begin_s = time.process_time()
        events = call().events
        steps.append(time.process_time() - begin_s)
        victims += sum(isinstance(event, WorkloadEvicted) for event in events)

    request = _build_request("gainer", "owner", case.gpus, case.replicas)
    take_step(lambda: core.submit(request, now_ns=_SUBMITTED_NS))
    while core.has_backlog and core.workload("gainer").phase is WorkloadPhase.PENDING:
        take_step(lambda: core.retry(now_ns=_SUBMITTED_NS))
    return ScaleRun(core.workload("gainer").phase.name.lower(), victims, tuple(steps))


def run_scale(nodes: int, out: Path) -> bool:
    """Measures all cases and writes preemption-scale.csv; returns whether all targets are met."""
    cases, rows, missed = list_cases(nodes), [], list[str]()
    progress, cores = Progress("cases"), dict[bool, Any]()
    for done, case in enumerate(cases):
        if case.is_protected not in cores:
            cores[case.is_protected] = build_full_core(nodes, is_protected=case.is_protected).state.dump()
        core = Core(ClusterState.load(cores[case.is_protected]), catalogue.load_catalogue())
        while core.has_backlog:
            core.retry(now_ns=_SUBMITTED_NS - 1)
        run = measure_case(core, case)
        total_s, longest_s = sum(run.steps), max(run.steps)
        rows.append(
            (
                case.name, case.gpus * case.replicas, run.outcome, run.victims, len(run.steps),
                round(total_s, 4), round(longest_s, 4), case.target_s, case.kai_s or "",
            )
        )  # fmt: skip
        is_right = run.outcome == ("pending" if case.is_protected else "placed")
        if total_s > case.target_s or not is_right:
            missed.append(case.name)
        print(
            f"{case.name:<30} {run.outcome:<8} {run.victims:>5} victims, {len(run.steps):>3} steps: {total_s:6.3f} s "
            f"(target {case.target_s:g}), longest step {longest_s:.3f} s",
            flush=True,
        )
        progress.show(done + 1, len(cases))
    write_csv(out / "preemption-scale.csv", COLUMNS, rows)
    if missed:
        print(f"missed: {', '.join(missed)}")
    return not missed
