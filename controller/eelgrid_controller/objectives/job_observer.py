"""Observes training jobs: turns each cycle's view into controller events, and counts work.

A job is managed once the limits of its GPUs have been read. Work is counted from the totals that jobs report; a total
that falls means a restart from a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.forecasts import JobQuestion
from eelgrid_controller.objectives.job_history import limit_history
from eelgrid_controller.objectives.observation import (
    ClusterObservation,
    GpuCounters,
    JobMeter,
    ObjectiveSettings,
    ProgressReading,
    allows_enforcement,
    highest_limit_w,
)
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budgets import Holding, NodePowerDraw, nearest_budgets
from eelgrid_controller.objectives.power.control_events import (
    ControlEvent,
    JobMeasured,
    JobMissed,
    JobPast,
    JobStarted,
    WorkloadEnded,
)
from eelgrid_controller.objectives.power.power_model import PowerCurve
from eelgrid_controller.objectives.promises import gpus_by_node, job_holdings, job_promise, metric_urls, related_curves
from eelgrid_controller.objectives.services.service_metrics import ExpositionPage, ScrapeTarget
from eelgrid_controller.placement.power import PowerLimitRange, find_power_limit_range, list_limit_choices
from eelgrid_controller.state.attempts import awaits_limit
from eelgrid_controller.state.measurements import JOB_PROFILE_PREFIX, WORK, WorkInterval, make_job_profile_name
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import TrainingPromise, Workload


class JobWorkCounter:
    """All jobs'; totals in, increments out."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._last: dict[str, ProgressReading] = {}

    def retain(self, names: set[str], at_s: float) -> None:
        """Forgets all jobs but these."""
        if self._began_s is None:
            self._began_s = at_s
        self._last = {name: last for name, last in self._last.items() if name in names}

    def count_increment(
        self, name: str, unit: str, told: ProgressReading | None, placed_s: float
    ) -> WorkInterval | None:
        """What is new since the last total, in the job's own unit, which may not be known; None for nothing."""
        unit = unit or WORK
        if told is None:
            return None
        last = self._last.get(name)
        if last is not None and told.at_s <= last.at_s:
            return None
        self._last[name] = told
        if last is None:
            was_seen = self._began_s is not None and self._began_s <= placed_s <= told.at_s
            return WorkInterval(name, unit, 0.0, placed_s, told.at_s, is_whole=False) if was_seen else None
        if told.work < last.work:
            return WorkInterval(name, unit, 0.0, last.at_s, told.at_s, is_whole=False)
        return WorkInterval(name, unit, told.work - last.work, last.at_s, told.at_s)


class _JobPlacement(NamedTuple):
    """Where a job runs and which limits it may have; a change of it starts the job again for the controller."""

    promise: TrainingPromise
    holdings: tuple[Holding, ...]
    uuids: Mapping[str, tuple[str, ...]]  # by node
    limits_w: tuple[float, ...]
    gpu_model: str


@dataclass(slots=True)
class _Job:
    since_s: float
    stand: _JobPlacement | str = ""
    meter: JobMeter | None = None  # of one that has begun
    progress: ProgressReading | None = None
    asked: ScrapeTarget | None = None
    is_enforced: bool = False


def _spellings(counter: str) -> tuple[str, str]:
    """A counter may end in _total or not."""
    bare = counter.removesuffix("_total")
    return bare, f"{bare}_total"


def _progress_in(pages: Mapping[tuple[int, str], ExpositionPage | str], counter: str) -> ProgressReading | None:
    """The furthest of all pages: workers of a gang count the same steps, and one of them may tell for all."""
    found = [
        ProgressReading(page.at_s, sample.value)
        for page in pages.values()
        if isinstance(page, ExpositionPage)
        for name in _spellings(counter)
        for sample in page.samples_of(name)
    ]
    return max(found, key=lambda one: one.work, default=None)


class JobObserver:
    """All training jobs with a promise."""

    def __init__(self, settings: ObjectiveSettings, catalogue: Catalogue) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._jobs: dict[str, _Job] = {}
        self._work = JobWorkCounter()
        self._worked: list[WorkInterval] = []
        # Of jobs with an elastic deadline, since the last time.
        self._told: dict[str, ProgressReading] = {}
        self._relatives: tuple[float, dict[str, tuple[PowerCurve, ...]]] = (0.0, {})  # of one cycle, by GPU model

    @property
    def has_unstarted(self) -> bool:
        """Whether a job could be managed and is not yet."""
        return any(job.meter is None and not isinstance(job.stand, str) for job in self._jobs.values())

    def unstarted_draws(self, world: ClusterObservation) -> list[NodePowerDraw]:
        """The most that the GPUs of jobs may draw that could be managed and are not yet."""
        found: list[NodePowerDraw] = []
        for name, job in self._jobs.items():
            if job.meter is not None or isinstance(job.stand, str):
                continue
            workload = world.workloads[name]
            planned_w = job.stand.limits_w[0] if workload.power_limit_w is None else workload.power_limit_w
            for holding in job.stand.holdings:
                read_w = highest_limit_w(world, holding.node, job.stand.uuids[holding.node])
                draw_w = (holding.restored_w or 0.0) if read_w is None else read_w * holding.gpus
                limit_w = planned_w * holding.gpus
                draw_w = limit_w if awaits_limit(workload) else max(draw_w, limit_w)
                found.append(NodePowerDraw(world.nodes[holding.node].inventory, draw_w))
        return found

    def collect_progress(self) -> dict[str, ProgressReading]:
        """How far jobs with an elastic deadline are, since the last time."""
        found, self._told = self._told, {}
        return found

    def collect_work(self) -> list[WorkInterval]:
        """What jobs have done since the last time."""
        found, self._worked = self._worked, []
        return found

    def scrape_requests(self) -> dict[str, ScrapeTarget]:
        """Whose pages are wanted."""
        return {name: job.asked for name, job in self._jobs.items() if job.asked is not None}

    def unmanaged_reasons(self) -> dict[str, str]:
        """Jobs that are not managed, and why."""
        return {name: job.stand for name, job in self._jobs.items() if isinstance(job.stand, str)}

    def managed_jobs(self) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """Jobs that the controller manages, with their GPUs by node."""
        return {
            name: job.stand.uuids
            for name, job in self._jobs.items()
            if job.meter is not None and not isinstance(job.stand, str)
        }

    def forecast_question(self, name: str) -> JobQuestion | None:
        """The question for a prediction of a managed job; None for a job that is not managed."""
        job = self._jobs.get(name)
        if job is None or job.meter is None or isinstance(job.stand, str):
            return None
        stand = job.stand
        gpus = sum(len(uuids) for uuids in stand.uuids.values())
        return JobQuestion(stand.promise.profile, stand.gpu_model, gpus, stand.limits_w)

    def restart_window(self, name: str) -> None:
        """Starts the job's window again, because its limit has changed."""
        job = self._jobs.get(name)
        if job is not None and job.meter is not None:
            job.meter.restart_window()

    def end_missing(self, kept: Mapping[str, Workload], world: ClusterObservation) -> list[ControlEvent]:
        """Events of jobs that ended or run elsewhere; to be handled before budgets change."""
        left = sorted(self._jobs.keys() - kept.keys())
        self._work.retain(set(kept), world.at_s)
        made: list[ControlEvent] = [
            WorkloadEnded(world.at_s, name) for name in left if self._jobs.pop(name).meter is not None
        ]
        for name, workload in kept.items():
            job = self._jobs.setdefault(name, _Job(world.at_s))
            stand = self._placement_of(workload, world)
            was_enforced, job.is_enforced = job.is_enforced, allows_enforcement(world, workload)
            if stand == job.stand and job.is_enforced >= was_enforced:
                continue
            if job.meter is not None:
                made.append(WorkloadEnded(world.at_s, name))
            job.stand, job.meter, job.since_s = stand, None, world.at_s
        return made

    def observe_job(
        self, name: str, workload: Workload, world: ClusterObservation, earned_s: float
    ) -> list[ControlEvent]:
        """Events of one job in this cycle; `earned_s` is what it had earned of its promise before it started again."""
        job = self._jobs[name]
        self._observe_windows(job, name, workload, world)
        told, promise = job.progress, workload.spec.training
        if told is not None and promise is not None and promise.metrics is not None:
            # Pages have a clock of their own, which is none of Unix time.
            told = told._replace(at_s=world.at_s) if name in world.rounds else None
        if told is not None and workload.share is not None:
            self._told[name] = told
        worked = self._work.count_increment(
            name, "" if promise is None else promise.work_unit, told, workload.placed_ns / 1e9
        )
        if worked is not None:
            self._worked.append(worked)
        stand = job.stand
        if isinstance(stand, str):
            return []
        looks = self._gpu_counters(stand, world)
        made: list[ControlEvent] = []
        if job.meter is None:
            begun = self._begin_job(job, stand, workload, world, earned_s)
            if begun is None:
                return []
            job.meter = JobMeter(
                frozenset(uuid for uuids in stand.uuids.values() for uuid in uuids),
                world.at_s,
                window_s=self._settings.window_s,
                missed_s=self._settings.missed_s,
            )
            made.append(begun)
        found = job.meter.observe(world.at_s, job.progress, looks)
        if isinstance(found, MissedWindowReason):
            made.append(JobMissed(world.at_s, name, found))
        elif found is not None:
            made.append(JobMeasured(world.at_s, name, found))
        return made

    def _placement_of(self, workload: Workload, world: ClusterObservation) -> _JobPlacement | str:
        training = workload.spec.training
        assert training is not None, "jobs have a promise"
        uuids = gpus_by_node(workload)
        boards, models = list[PowerLimitRange](), set[str]()
        budgets, restored_w = dict[str, tuple[str, ...]](), dict[str, float]()
        for name, held in uuids.items():
            node = world.nodes.get(name)
            gpus = {} if node is None else {gpu.uuid: gpu for gpu in node.inventory.gpus}
            if node is None or not gpus.keys() >= set(held):
                return f"node {name} lacks some of its GPUs now"
            found = [find_power_limit_range(gpus[uuid], self._catalogue) for uuid in held]
            known = [board for board in found if board is not None]
            if len(known) < len(found):
                return f"the power limits of {gpus[held[0]].product} are not known; add it to the catalogue"
            boards += known
            models.update(gpus[uuid].model for uuid in held)
            budgets[name] = nearest_budgets(world.policy, node.inventory)
            restored_w[name] = sum(board.default_w for board in known)
        if not boards:
            return "it holds no GPU"
        limits_w = list_limit_choices(boards)
        return _JobPlacement(training, job_holdings(workload, restored_w, budgets), uuids, limits_w, min(models))

    def _observe_windows(self, job: _Job, name: str, workload: Workload, world: ClusterObservation) -> None:
        """Takes the newest progress, and sets where the next is read."""
        training = workload.spec.training
        source = None if training is None else training.metrics
        job.asked = None
        if source is not None:
            urls = metric_urls(source, workload)
            job.asked = ScrapeTarget(
                dict(sorted(urls.items())[:1]) if len(set(urls.values())) == 1 else urls,
                frozenset(_spellings(source.work_counter)),
            )
            taken = world.rounds.get(name)
            found = None if taken is None else _progress_in(taken.pages, source.work_counter)
            job.progress = found if found is not None else job.progress
        told = world.progress.get(name)
        if told is not None and source is None:
            job.progress = told

    @staticmethod
    def _gpu_counters(stand: _JobPlacement, world: ClusterObservation) -> dict[str, GpuCounters]:
        """What is known of its GPUs now."""
        return {
            uuid: look.gpus[uuid]
            for node, uuids in stand.uuids.items()
            if (look := world.looks.get(node)) is not None
            for uuid in uuids
            if uuid in look.gpus
        }

    def _begin_job(
        self, job: _Job, stand: _JobPlacement, workload: Workload, world: ClusterObservation, earned_s: float
    ) -> JobStarted | None:
        """The event that starts managing the job; None while that would be too early."""
        # Its processes start at this limit, whatever its GPUs have now.
        is_limited = awaits_limit(workload)
        waited = is_limited or world.at_s - job.since_s >= self._settings.readings_s
        ran_s = max(0.0, world.at_s - workload.placed_ns / 1e9)
        limits_w = {
            node: limit_w
            for node, uuids in stand.uuids.items()
            if not is_limited and (limit_w := highest_limit_w(world, node, uuids)) is not None
        }
        is_old = ran_s > self._settings.readings_s and stand.promise.deadline_ns > 0
        if not waited and (len(limits_w) < len(stand.holdings) or (is_old and job.progress is None)):
            return None
        default_w = stand.limits_w[0] if workload.power_limit_w is None else workload.power_limit_w
        return JobStarted(
            world.at_s,
            workload.workload_id,
            job_promise(workload),
            stand.limits_w,
            stand.holdings,
            relatives=self._related_curves(stand.gpu_model, world),
            held_w=tuple(limits_w.get(holding.node, default_w) for holding in stand.holdings),
            planned_w=default_w if job.is_enforced else None,
            shown=limit_history(
                workload,
                stand.gpu_model,
                world.points.get(make_job_profile_name(workload.workload_id), ()),
                self._settings.window_s,
            ),
            past=JobPast(0.0 if job.progress is None else job.progress.work, ran_s, earned_s),
        )

    def _related_curves(self, gpu_model: str, world: ClusterObservation) -> tuple[PowerCurve, ...]:
        at_s, known = self._relatives
        if at_s != world.at_s:
            known = {}
            self._relatives = (world.at_s, known)
        if gpu_model not in known:
            known[gpu_model] = related_curves(
                (
                    point
                    for name, found in world.points.items()
                    if not name.startswith(JOB_PROFILE_PREFIX)
                    for point in found
                ),
                gpu_model,
            )
        return known[gpu_model]
