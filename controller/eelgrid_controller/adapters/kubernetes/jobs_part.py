"""The ability `jobs`: suspended jobs are right-sized before they start.

Owns the informers of jobs, the rounds and the writes. Must not know what is chosen
(`kubernetes/jobs.py`), nor how an API server is spoken to.

Theory. Jobs, and Kubeflow's and JobSet's where they are served when the part begins, are listed and watched
by the label that opts in. Whatever changes becomes an event; a round asks the machine what follows from them, with
the nodes and points of that moment. A patch carries uid and resource version and is sent only while
this process leads, so it may be repeated. What was done is an Event on the job.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.boosts_part import BoostsPart
from eelgrid_controller.adapters.kubernetes.elector import is_of
from eelgrid_controller.adapters.kubernetes.errors import ClusterError
from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.informer import Informer, Selection
from eelgrid_controller.adapters.kubernetes.port import Object, PatchKind
from eelgrid_controller.adapters.kubernetes.resources import (
    EVENTS,
    JOB_SETS,
    JOBS,
    PYTORCH_JOBS,
    TRAIN_JOBS,
    Resource,
)
from eelgrid_controller.adapters.kubernetes.retry import Limits, with_retries
from eelgrid_controller.adapters.kubernetes.under_way import UnderWay
from eelgrid_controller.adapters.kubernetes.writes import Stale, failure_of
from eelgrid_controller.core import Core
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.jobs import (
    Event,
    Ground,
    Instruction,
    JobGone,
    Jobs,
    JobSeen,
    NotWritten,
    Site,
    Tell,
    Write,
    Written,
)
from eelgrid_controller.kubernetes.jobs_ground import between, known_of, site_of
from eelgrid_controller.kubernetes.names import LABEL_MANAGED, MANAGED
from eelgrid_controller.kubernetes.people_events import Regarding, event_of
from eelgrid_controller.kubernetes.right_sizing import Known
from eelgrid_controller.kubernetes.views import KubeNode, node_of
from eelgrid_controller.steward.forecasts import NOT_YET, OfCounts
from eelgrid_protos.messages import Inventory

__all__ = ["JobsPart"]

_JOBS_MOST = 50_000
_ROUND_S = 0.5
_AT_ONCE = 8
_LIMITS = Limits(attempts=4, whole_s=15.0, first_s=0.1, most_s=3.0)
_RESOURCES = {one.kind: one for one in (JOBS, PYTORCH_JOBS, JOB_SETS, TRAIN_JOBS)}
_REASONS = {"changed": "EelgridRightSized", "failed": "EelgridProblem"}


class JobsPart:
    """The ability."""

    def __init__(self, around: Surroundings, *, round_s: float = _ROUND_S) -> None:
        self.failures = 0
        self._around = around
        self._round_s = round_s
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._nodes: dict[str, tuple[str, KubeNode]] = {}
        self._begin()

    def _begin(self) -> None:
        self.machine = Jobs()
        self._queue: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._under_way = UnderWay(self._around.log, "jobs")
        self._served: dict[str, Resource] = {}

    async def run(self) -> None:
        """Work until cancelled; what is known begins from lists."""
        self._begin()
        around = self._around
        served = await around.cluster.discover()
        self._served = {kind: one for kind, one in _RESOURCES.items() if one is JOBS or served.has(one)}
        informers = [
            Informer(
                around.cluster, one, rng=around.rng, monotonic_s=around.clock.monotonic_s, log=around.log,
                selection=Selection(labels=f"{LABEL_MANAGED}={MANAGED}"), keep=_pruned, most=_JOBS_MOST,
            )
            for one in self._served.values()
        ]  # fmt: skip
        for kind, informer in zip(self._served, informers, strict=True):
            informer.hear(partial(self._deltas, kind))
        try:
            async with asyncio.TaskGroup() as group:
                for informer in informers:
                    group.create_task(informer.run())
                group.create_task(BoostsPart(around, served, wasteful=self.machine.is_wasteful).run())
                await self._rounds()
        finally:
            await self._under_way.end()

    def _deltas(self, kind: str, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.new is None:
                assert delta.old is not None
                self._feed(JobGone(delta.old["metadata"]["uid"]))
            else:
                self._feed(JobSeen(kind, delta.new))

    def _feed(self, event: Event) -> None:
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
            self._carry_out(self.machine.take(events, Ground(0.0), at_s, leads=False), None)
            # An engine that began anew has no nodes for a while, which does not mean that there are none.
            if term is None or not around.engine.nodes.is_synced or not self.machine.is_waiting(at_s):
                continue
            ground = await self._ground()
            self._carry_out(self.machine.take((), ground, at_s, leads=True), term.epoch)

    async def _ground(self) -> Ground:
        """Nodes and points of this moment."""
        wanted = self.machine.profiles()

        def look(core: Core) -> tuple[dict[str, Inventory], dict[str, tuple[Known, ...]]]:
            points = core.state.points
            known = {profile: known_of(points[profile]) for profile in wanted if profile in points}
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
        return Ground(self._around.clock.now_ns() / 1e9, sites, known, frozenset(coming))

    def _foreseen(self, profile: str, model: str, known: tuple[Known, ...]) -> tuple[Known, ...] | None:
        """What is predicted between what was measured; None while that is on its way."""
        counts = between(known, model)
        if self._around.foresees is None or not counts:
            return ()
        found = self._around.foresees(OfCounts(profile, model, counts))
        if found is None or found.why_none == NOT_YET:
            return None
        basis = f"predicted from {found.learned_from} configurations"
        return tuple(Known(model, "", one.gpus, *one.throughput_hz, *one.power_w, basis) for one in found.counts)

    def _sites(self, inventories: dict[str, Inventory]) -> list[Site]:
        found, nodes = [], self._around.engine.nodes.objects
        for key, one in nodes.items():
            version = one["metadata"]["resourceVersion"]
            held = self._nodes.get(key.name)
            if held is None or held[0] != version:
                try:
                    held = version, node_of(one)
                except KubernetesUnreadable:
                    continue
                self._nodes[key.name] = held
            found.append(site_of(held[1], inventories.get(key.name)))
        if len(self._nodes) > len(nodes):
            self._nodes = {key.name: self._nodes[key.name] for key in nodes if key.name in self._nodes}
        return found

    # Writes

    def _carry_out(self, told: Sequence[Instruction], epoch: int | None) -> None:
        for one in told:
            match one:
                case Tell() if self._around.elector.term() is not None:
                    self._under_way.begin(self._tell(one))
                case Write() if epoch is not None:
                    self._under_way.begin(self._write(one, epoch))

    async def _write(self, asked: Write, epoch: int) -> None:
        job = asked.job

        async def call() -> None:
            if not is_of(self._around.elector.term(), epoch):
                raise Stale
            await self._around.cluster.patch(
                self._served[job.kind], job.name, asked.operations, PatchKind.JSON, namespace=job.namespace
            )

        try:
            async with self._turns:
                await self._repeated(call)
        except (ClusterError, Stale) as error:
            self.failures += 1
            self._around.log.info(
                "job=%s/%s patched=no outcome=%s error=%s", job.namespace, job.name, asked.outcome, error
            )
            self._feed(NotWritten(job.uid, failure_of(error), str(error)))
            return
        self._around.log.info("job=%s/%s outcome=%s reason=%s", job.namespace, job.name, asked.outcome, asked.why)
        self._feed(Written(job.uid))

    async def _tell(self, told: Tell) -> None:
        """An Event on the job; one that is lost is lost: the record says the same."""
        job = told.job
        body = event_of(
            Regarding(self._served[job.kind].api_version, job.kind, job.namespace, job.name, job.uid), told.text,
            is_warning=told.is_warning, reason=_REASONS.get(told.outcome, "EelgridNotRightSized"),
            action="RightSizing", identity=self._around.identity, now_ns=self._around.clock.now_ns(),
        )  # fmt: skip
        try:
            await self._around.cluster.create(EVENTS, body, namespace=job.namespace)
        except ClusterError as error:
            self._around.log.debug("job=%s/%s told=no error=%s", job.namespace, job.name, error)

    async def _repeated(self, call: Callable[[], Any]) -> None:
        clock = self._around.clock
        await with_retries(
            call, rng=self._around.rng, is_idempotent=True, limits=_LIMITS, monotonic_s=clock.monotonic_s
        )


def _pruned(found: Object) -> Object:
    """A job without what nobody here reads: who wrote which field, and what its containers run."""
    metadata = {key: value for key, value in found["metadata"].items() if key != "managedFields"}
    return {**found, "metadata": metadata}
