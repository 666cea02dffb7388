"""Deadlines of elastic jobs as decisions and events: the share that is admitted, what grown jobs give back, and measured progress.

`ElasticDeadlines` chooses the least number of replicas with which a new job ends by its deadline, wherever and whenever it
starts. Must not know how a start is searched or reserved (start_search.py, backfill.py), nor how fast jobs are (queueing/
elastic_shares.py).

Theory (ElasticFlow, ASPLOS 2023). The numbers of replicas of the scaling curve are tried from the smallest that would be enough
if it started at once; the first that has a start from which it ends by the deadline is the share. It is held on places from
that start to the end, so that nothing which is admitted later takes it. Jobs that have more than they need give that back where
a new job would have to be refused otherwise, if nothing promised waits for their end, which would become later.
"""

from collections.abc import Iterator
from dataclasses import replace

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.start_decision import StartDecider
from eelgrid_controller.core.workloads import plan_scaling
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.elastic_shares import (
    ScalingCurve,
    advance_share,
    compute_elastic_end_ns,
    find_least_share,
    list_enough,
    make_curve,
    make_share,
    measure_scaling,
    measure_share,
    read_curve,
    thin_curve,
)
from eelgrid_controller.queueing.runtime_estimates import compute_end_ns, estimate_runtime
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event, PricesQuoted, WorkloadScaled
from eelgrid_controller.state.measurement_events import WorkloadShareChanged
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import Workload, WorkloadPhase, WorkloadSpec

# Sizes of which a start is searched at an admission; each takes some milliseconds.
_SIZES_MOST = 12


class ElasticDeadlines:
    """The shares of one state's elastic jobs with promised deadlines."""

    def __init__(
        self, state: ClusterState, placer: WorkloadPlacer, backfill: BackfillPlanner, starts: StartDecider
    ) -> None:
        self._state, self._placer, self._backfill, self._starts = state, placer, backfill, starts
        backfill.list_releases = self.list_releases

    def choose_share(self, workload: Workload, early: str, quoted: tuple[PricesQuoted, ...], now_ns: int) -> Workload:
        """Returns work that is being submitted with the least share with which it ends by its promised deadline.

        Without any, with that which ends first; other work as it is. `early` is why it may not start now. Raises
        InvalidArgument if no rates are known.
        """
        spec = workload.spec
        if spec.training is None or not spec.training.is_elastic or not spec.has_promised_deadline:
            return workload
        assert spec.deadline is not None
        best: tuple[int, Workload] | None = None
        sizes = list(self._list_sizes(workload))
        for one in sizes:
            end_ns = self._find_end_ns(one, early, quoted, now_ns)
            if end_ns is not None and end_ns <= spec.deadline.end_ns:
                return one
            if end_ns is not None and (best is None or end_ns < best[0]):
                best = end_ns, one
        return sizes[-1] if best is None else best[1]

    def _list_sizes(self, workload: Workload) -> Iterator[Workload]:
        """Yields the sizes that a job may have, on each model of which rates are known, the fewest replicas first."""
        asked, training = workload.spec.request, workload.spec.training
        assert training is not None
        points = self._state.points.get(training.profile, ())
        found: list[tuple[int, float, str, ScalingCurve]] = []
        for model in asked.gpu_models or sorted(self._placer.snapshot().models):
            rates_hz, _ = measure_scaling(
                points, model, asked.gpu_count, least=training.replicas_least, most=training.replicas_most
            )
            curve = make_curve(rates_hz)
            if curve is not None:
                curve = thin_curve(curve, _SIZES_MOST)
                found += [(count, -curve.get_rate_hz(count), model, curve) for count in curve.workers]
        if not found:
            problem = f"is {training.profile!r}, which has no point between {training.replicas_least} and {training.replicas_most} replicas"
            remedy = "import its throughput (eelctl profile import), or set best_effort to run it without the promise"
            raise InvalidArgument(
                "the deadline cannot be promised", (Violation("spec.training.profile", problem, remedy),)
            )
        for count, _, model, curve in sorted(found, key=lambda one: one[:3]):
            spec = replace(workload.spec, replicas=count, request=replace(asked, gpu_models=(model,)))
            share = replace(make_share(curve, count, workload.spec.replicas), gpu_models_asked=asked.gpu_models)
            yield replace(workload, spec=spec, share=share)

    def _find_end_ns(self, workload: Workload, early: str, quoted: tuple[PricesQuoted, ...], now_ns: int) -> int | None:
        """Returns when work that is being submitted ends at the earliest, None if no start is known."""
        deadline = workload.spec.deadline
        run_ns = compute_end_ns(now_ns, estimate_runtime(workload, self._state))
        assert deadline is not None
        if workload.held_by or run_ns > deadline.end_ns:
            # Too slow even if it started now: the end is all that counts.
            return run_ns
        decision = PlacementDecision(placements=(), explanation=(), room=0, withheld=early)
        if not early:
            decision = self._starts.decide_start(workload, quoted, now_ns)
        if decision.placements:
            return run_ns
        found, _ = self._backfill.find_promised_start(workload, decision, now_ns)
        return None if found is None else found.end_ns

    def find_floor(self, workload: Workload, now_ns: int) -> int:
        """Returns how many replicas a running job must keep for its deadline, and for starts that wait for its end."""
        if workload.share is None:
            return 0
        reserved = self._backfill.list_reserved_nodes()
        if any(one.node_name in reserved for one in workload.placements):
            return workload.spec.replicas
        return find_least_share(workload, now_ns)

    def list_releases(self, now_ns: int) -> list[WorkloadScaled]:
        """Lists what running jobs could give back and still meet their deadlines, each as the event of its change."""
        events = []
        for workload in self._backfill.deadlines.list_live():
            if workload.share is None or workload.phase is not WorkloadPhase.PLACED:
                continue
            floor = self.find_floor(workload, now_ns)
            if floor < workload.spec.replicas:
                event = plan_scaling(
                    self._state, self._placer.snapshot(), workload, floor, _decide_nothing, floor=floor, now_ns=now_ns
                )
                events += [] if event is None else [event]
        return events

    def record_progress(
        self, workload: Workload, work_done: float, quoted: tuple[PricesQuoted, ...], *, at_ns: int, now_ns: int
    ) -> list[Event]:
        """Returns the events by which the progress at a time counts; a job that would be late grows if there is room.

        None for work without a share, or before a minute has passed since the last.
        """
        share = measure_share(workload, work_done, at_ns)
        if share is None or workload.phase is not WorkloadPhase.PLACED:
            return []
        events: list[Event] = [WorkloadShareChanged(time_ns=now_ns, workload_id=workload.workload_id, share=share)]
        measured = replace(workload, share=share)
        deadline, replicas = workload.spec.deadline, workload.spec.replicas
        if deadline is None or compute_elastic_end_ns(measured) <= deadline.end_ns:
            return events
        curve = read_curve(share.rates)
        faster = [count for count in curve.workers if curve.get_rate_hz(count) > curve.get_rate_hz(replicas)]
        enough = set(list_enough(replace(measured, share=advance_share(measured, now_ns))))
        wanted = next((count for count in faster if count in enough), faster[-1] if faster else replicas)
        if wanted <= replicas:
            return events
        grown = plan_scaling(
            self._state,
            self._placer.snapshot(),
            measured,
            wanted,
            lambda spec: self._starts.decide_growth(measured, spec, quoted, now_ns),
            floor=replicas,
            now_ns=now_ns,
        )
        if grown is None or curve.get_rate_hz(replicas + len(grown.placements)) <= curve.get_rate_hz(replicas):
            return events
        return [*events, *quoted, grown]


def _decide_nothing(_: WorkloadSpec) -> PlacementDecision:
    return PlacementDecision(placements=(), explanation=(), room=0)
