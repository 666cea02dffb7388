"""Job reconciler: right-sizes suspended jobs, and boosts Kueue Workloads that are costly to preempt."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.api.elector import is_of
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError
from eelgrid_controller.engines.kubernetes.api.informer import Informer, InformerSelector
from eelgrid_controller.engines.kubernetes.api.object_store import Delta
from eelgrid_controller.engines.kubernetes.api.port import (
    CLUSTER_QUEUES,
    EVENTS,
    JOB_SETS,
    JOBS,
    KUEUE_WORKLOADS,
    PYTORCH_JOBS,
    TRAIN_JOBS,
    Object,
    PatchKind,
    Resource,
    ServedResources,
)
from eelgrid_controller.engines.kubernetes.api.retry import BackgroundTasks, RetryLimits, call_with_retries
from eelgrid_controller.engines.kubernetes.jobs.preemption_cost import (
    boost_patch,
    compute_boost,
    max_boost_of,
    parse_boost,
    parse_interruptible,
)
from eelgrid_controller.engines.kubernetes.jobs.right_sizer import (
    CandidateNode,
    JobPatched,
    JobPatchFailed,
    JobRightSizer,
    PatchJob,
    RecordJobEvent,
    RightSizingEvent,
    RightSizingInputs,
    RightSizingInstruction,
    SuspendedJobDeleted,
    SuspendedJobUpdated,
    candidate_node_of,
    measured_sizes,
    unmeasured_gpu_counts,
)
from eelgrid_controller.engines.kubernetes.jobs.right_sizing import SizeMeasurement
from eelgrid_controller.engines.kubernetes.model.objects import KubeNode, parse_node
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference, build_event
from eelgrid_controller.engines.kubernetes.model.well_known import LABEL_MANAGED, MANAGED
from eelgrid_controller.engines.kubernetes.reconcilers.pod_writer import StaleTerm, describe_failure
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ReconcilerContext
from eelgrid_controller.objectives.forecasts import NOT_LEARNED_REASON, ScaleQuestion
from eelgrid_protos.messages import Inventory

KUEUE_VERSIONS = ("v1beta2", "v1beta1")
_MOST = 50_000
_EVERY_S = 15.0
_LOOK_S = 1.0  # whether any queue asks for it
_WRITES_MOST = 64  # in one turn


class PreemptionBoostReconciler:
    """Boosts of one cluster's Workloads."""

    def __init__(
        self,
        around: ReconcilerContext,
        served: ServedResources,
        *,
        wasteful: Callable[[str], bool],
        every_s: float = _EVERY_S,
    ) -> None:
        """`wasteful` says of the uid of a Workload's owner whether it wastes."""
        self.written = 0
        self.failures = 0
        self._around = around
        self._queues = served.find_served(CLUSTER_QUEUES, KUEUE_VERSIONS)
        self._workloads = served.find_served(KUEUE_WORKLOADS, KUEUE_VERSIONS)
        self._wasteful = wasteful
        self._every_s = every_s

    async def run(self) -> None:
        """Judge for ever, or not at all where Kueue is not served."""
        if self._queues is None or self._workloads is None:
            return
        queues, workloads = self._informer(self._queues), self._informer(self._workloads)
        async with asyncio.TaskGroup() as group:
            group.create_task(queues.run())
            await queues.wait_synced()
            is_begun = False
            while True:
                most = {key.name: max_boost_of(one) for key, one in queues.objects.items()}
                if any(most.values()) and not is_begun:
                    is_begun = True
                    group.create_task(workloads.run())
                    await workloads.wait_synced()
                if is_begun:
                    await self._run_cycle(list(workloads.objects.values()), most, self._workloads)
                await asyncio.sleep(self._every_s if is_begun else _LOOK_S)

    def _informer(self, resource: Resource) -> Informer:
        around = self._around
        return Informer(
            around.cluster,
            resource,
            rng=around.rng,
            monotonic_s=around.clock.monotonic_s,
            log=around.log,
            keep=_prune_object,
            most=_MOST,
        )

    async def _run_cycle(self, workloads: list[Object], most: Mapping[str, int], resource: Resource) -> None:
        writes = 0
        for workload in workloads:
            if self._around.elector.term() is None or writes >= _WRITES_MOST:
                return
            body = self._plan_patch(workload, most)
            if body is None:
                continue
            writes += 1
            metadata = workload["metadata"]
            try:
                await self._around.cluster.patch(resource, metadata["name"], body, namespace=metadata["namespace"])
            except ClusterError as error:
                self.failures += 1
                self._around.log.info("workload=%s boosted=no error=%s", metadata["name"], error)
            else:
                self.written += 1

    def _plan_patch(self, workload: Object, most: Mapping[str, int]) -> dict[str, Any] | None:
        """The patch that a Workload needs."""
        admission = (workload.get("status") or {}).get("admission") or {}
        limit = most.get(str(admission.get("clusterQueue", "")), 0)
        has = parse_boost(workload)
        if not limit and has.ours is None:
            return None
        owners = workload["metadata"].get("ownerReferences") or ()
        is_wasteful = any(self._wasteful(owner["uid"]) for owner in owners)
        try:
            run = parse_interruptible(workload, now_s=self._around.clock.now_ns() / 1e9, is_wasteful=is_wasteful)
        except KubernetesUnreadable as error:
            self._around.log.debug("workload=%s read=no error=%s", workload["metadata"]["name"], error)
            return None
        before = int(has.ours) if has.ours is not None and has.ours.isdigit() else 0
        return boost_patch(workload, compute_boost(run, limit, before) if run is not None else 0)


def _prune_object(found: Object) -> Object:
    """Without who wrote which field."""
    return {**found, "metadata": {key: value for key, value in found["metadata"].items() if key != "managedFields"}}


_JOBS_MOST = 50_000
_ROUND_S = 0.5
_AT_ONCE = 8
_LIMITS = RetryLimits(attempts=4, whole_s=15.0, first_s=0.1, most_s=3.0)
_RESOURCES = {one.kind: one for one in (JOBS, PYTORCH_JOBS, JOB_SETS, TRAIN_JOBS)}
_REASONS = {"changed": "EelgridRightSized", "failed": "EelgridProblem"}


class JobReconciler:
    """The ability."""

    def __init__(self, around: ReconcilerContext, *, round_s: float = _ROUND_S) -> None:
        self.failures = 0
        self._around = around
        self._round_s = round_s
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._nodes: dict[str, tuple[str, KubeNode]] = {}
        self._start()

    def _start(self) -> None:
        self.machine = JobRightSizer()
        self._queue: deque[RightSizingEvent] = deque()
        self._wake = asyncio.Event()
        self._under_way = BackgroundTasks(self._around.log, "jobs")
        self._served: dict[str, Resource] = {}

    async def run(self) -> None:
        """Work until cancelled; what is known begins from lists."""
        self._start()
        around = self._around
        served = await around.cluster.discover()
        self._served = {kind: one for kind, one in _RESOURCES.items() if one is JOBS or served.has(one)}
        informers = [
            Informer(
                around.cluster,
                one,
                rng=around.rng,
                monotonic_s=around.clock.monotonic_s,
                log=around.log,
                selection=InformerSelector(labels=f"{LABEL_MANAGED}={MANAGED}"),
                keep=_jobs_part_pruned,
                most=_JOBS_MOST,
            )
            for one in self._served.values()
        ]
        for kind, informer in zip(self._served, informers, strict=True):
            informer.add_listener(partial(self._deltas, kind))
        try:
            async with asyncio.TaskGroup() as group:
                for informer in informers:
                    group.create_task(informer.run())
                group.create_task(PreemptionBoostReconciler(around, served, wasteful=self.machine.is_wasteful).run())
                await self._rounds()
        finally:
            await self._under_way.end()

    def _deltas(self, kind: str, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                assert delta.old is not None
                self._enqueue(SuspendedJobDeleted(delta.old["metadata"]["uid"]))
            else:
                self._enqueue(SuspendedJobUpdated(kind, delta.new))

    def _enqueue(self, event: RightSizingEvent) -> None:
        self._queue.append(event)
        self._wake.set()

    async def _rounds(self) -> None:
        around = self._around
        while True:
            try:
                # Time is an event, too: waits and deadlines.
                async with asyncio.timeout(self._round_s * 4.0 if not len(self.machine) else self._round_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            events, self._queue = list(self._queue), deque()
            term = around.elector.term()
            at_s = around.clock.monotonic_s()
            self._carry_out(self.machine.on_events(events, RightSizingInputs(0.0), at_s, leads=False), None)
            # An engine that began anew has no nodes for a while, which does not mean that there are none.
            if term is None or not around.engine.nodes.is_synced or not self.machine.is_waiting(at_s):
                continue
            ground = await self._ground()
            self._carry_out(self.machine.on_events((), ground, at_s, leads=True), term.epoch)

    async def _ground(self) -> RightSizingInputs:
        """Nodes and points of this moment."""
        wanted = self.machine.pending_profiles()

        def look(core: Core) -> tuple[dict[str, Inventory], dict[str, tuple[SizeMeasurement, ...]]]:
            points = core.state.points
            known = {profile: measured_sizes(points[profile]) for profile in wanted if profile in points}
            return {name: record.inventory for name, record in core.state.nodes.items()}, known

        inventories, known = await self._around.loop.read(look)
        sites = tuple(self._sites(inventories))
        coming = set()
        for profile, models in ((profile, {site.gpu_model for site in sites}) for profile in known):
            for model in sorted(models):
                foreseen = self._foreseen(profile, model, known[profile])
                if foreseen is None:
                    coming.add(profile)
                else:
                    known[profile] += foreseen
        return RightSizingInputs(self._around.clock.now_ns() / 1e9, sites, known, frozenset(coming))

    def _foreseen(
        self, profile: str, model: str, known: tuple[SizeMeasurement, ...]
    ) -> tuple[SizeMeasurement, ...] | None:
        """What is predicted between what was measured; None while that is on its way."""
        counts = unmeasured_gpu_counts(known, model)
        if self._around.foresees is None or not counts:
            return ()
        found = self._around.foresees(ScaleQuestion(profile, model, counts))
        if found is None or found.why_none == NOT_LEARNED_REASON:
            return None
        basis = f"predicted from {found.learned_from} configurations"
        return tuple(
            SizeMeasurement(model, "", one.gpus, *one.throughput_hz, *one.power_w, basis) for one in found.counts
        )

    def _sites(self, inventories: dict[str, Inventory]) -> list[CandidateNode]:
        found, nodes = [], self._around.engine.nodes.objects
        for key, one in nodes.items():
            version = one["metadata"]["resourceVersion"]
            held = self._nodes.get(key.name)
            if held is None or held[0] != version:
                try:
                    held = version, parse_node(one)
                except KubernetesUnreadable:
                    continue
                self._nodes[key.name] = held
            found.append(candidate_node_of(held[1], inventories.get(key.name)))
        if len(self._nodes) > len(nodes):
            self._nodes = {key.name: self._nodes[key.name] for key in nodes if key.name in self._nodes}
        return found

    # Writes

    def _carry_out(self, told: Sequence[RightSizingInstruction], epoch: int | None) -> None:
        for one in told:
            match one:
                case RecordJobEvent() if self._around.elector.term() is not None:
                    self._under_way.start_task(self._write_event(one))
                case PatchJob() if epoch is not None:
                    self._under_way.start_task(self._write(one, epoch))

    async def _write(self, asked: PatchJob, epoch: int) -> None:
        job = asked.job

        async def call() -> None:
            if not is_of(self._around.elector.term(), epoch):
                raise StaleTerm
            await self._around.cluster.patch(
                self._served[job.kind], job.name, asked.operations, PatchKind.JSON, namespace=job.namespace
            )

        try:
            async with self._turns:
                await self._call_with_retries(call)
        except (ClusterError, StaleTerm) as error:
            self.failures += 1
            self._around.log.info(
                "job=%s/%s patched=no outcome=%s error=%s", job.namespace, job.name, asked.outcome, error
            )
            self._enqueue(JobPatchFailed(job.uid, describe_failure(error), str(error)))
            return
        self._around.log.info("job=%s/%s outcome=%s reason=%s", job.namespace, job.name, asked.outcome, asked.why)
        self._enqueue(JobPatched(job.uid))

    async def _write_event(self, told: RecordJobEvent) -> None:
        """An Event on the job; one that is lost is lost: the record says the same."""
        job = told.job
        body = build_event(
            EventReference(self._served[job.kind].api_version, job.kind, job.namespace, job.name, job.uid),
            told.text,
            is_warning=told.is_warning,
            reason=_REASONS.get(told.outcome, "EelgridNotRightSized"),
            action="RightSizing",
            identity=self._around.identity,
            now_ns=self._around.clock.now_ns(),
        )
        try:
            await self._around.cluster.create(EVENTS, body, namespace=job.namespace)
        except ClusterError as error:
            self._around.log.debug("job=%s/%s told=no error=%s", job.namespace, job.name, error)

    async def _call_with_retries(self, call: Callable[[], Any]) -> None:
        clock = self._around.clock
        await call_with_retries(
            call, rng=self._around.rng, is_idempotent=True, limits=_LIMITS, monotonic_s=clock.monotonic_s
        )


def _jobs_part_pruned(found: Object) -> Object:
    """A job without what nobody here reads: who wrote which field, and what its containers run."""
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    return {**found, "metadata": metadata}
