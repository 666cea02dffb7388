"""The training jobs at the desk: each cycle's view becomes events of the steering.

Owns which jobs are steered, when they are taken up, and why others are not. Must not know
which limit is chosen.

Theory. A job is taken up when the limits of its GPUs were read and, if it has run for a
while, its progress is known: after a restart of the daemon the steering begins with what
is set and what was done. What does not come in READINGS is not waited for longer: then
the journal's limit counts as held. A job that stands elsewhere than before, or whose
budgets have other names, ends and begins anew with its past; so does one whose pool is no
longer enforced, since its node then puts back what it found.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.boards import Board, board_of, limits_between
from eelgrid_controller.energy_ledger.working import Worked
from eelgrid_controller.measured import OWN, own_profile
from eelgrid_controller.power.changes import Holding
from eelgrid_controller.power.curves import Curve
from eelgrid_controller.power.exploration import Unusable
from eelgrid_controller.serving.exposition import Scrape
from eelgrid_controller.steering.events import Ended, Event, JobBegan, JobMeasured, JobMissed, Past
from eelgrid_controller.steward.forecasts import OfJob
from eelgrid_controller.steward.job_work import JobWork
from eelgrid_controller.steward.jobs import gpus_by_node, holdings_of, promise_of, relatives_of
from eelgrid_controller.steward.keepsakes import shown_by
from eelgrid_controller.steward.meters import GpuLook, Meter, Progress
from eelgrid_controller.steward.prices import lowest_budgets
from eelgrid_controller.steward.rounds import Asked
from eelgrid_controller.steward.services import urls_of
from eelgrid_controller.steward.settings import StewardSettings
from eelgrid_controller.steward.world import World, enforced
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import TrainingPromise, Workload

__all__ = ["JobDesk"]


class _Stand(NamedTuple):
    """Where a job stands and what it may be set to; another one makes it begin anew."""

    promise: TrainingPromise
    holdings: tuple[Holding, ...]
    uuids: Mapping[str, tuple[str, ...]]  # by node
    limits_w: tuple[float, ...]
    gpu_model: str


@dataclass(slots=True)
class _Job:
    since_s: float
    stand: _Stand | str = ""
    meter: Meter | None = None  # of one that has begun
    progress: Progress | None = None
    asked: Asked | None = None
    is_enforced: bool = False


def _spellings(counter: str) -> tuple[str, str]:
    """A counter may end in _total or not."""
    bare = counter.removesuffix("_total")
    return bare, f"{bare}_total"


def _progress_in(pages: Mapping[tuple[int, str], Scrape | str], counter: str) -> Progress | None:
    """The furthest of all pages: workers of a gang count the same steps, and one of them may tell for all."""
    found = [
        Progress(page.at_s, sample.value)
        for page in pages.values()
        if isinstance(page, Scrape)
        for name in _spellings(counter)
        for sample in page.named(name)
    ]
    return max(found, key=lambda one: one.work, default=None)


class JobDesk:
    """All training jobs with a promise."""

    def __init__(self, settings: StewardSettings, catalogue: Catalogue) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._jobs: dict[str, _Job] = {}
        self._work = JobWork()
        self._worked: list[Worked] = []
        self._relatives: tuple[float, dict[str, tuple[Curve, ...]]] = (0.0, {})  # of one cycle, by GPU model

    @property
    def waits(self) -> bool:
        """Whether a job is not taken up yet that could be."""
        return any(job.meter is None and not isinstance(job.stand, str) for job in self._jobs.values())

    def worked(self) -> list[Worked]:
        """What jobs have done since the last time."""
        found, self._worked = self._worked, []
        return found

    def asked(self) -> dict[str, Asked]:
        """Whose pages are wanted."""
        return {name: job.asked for name, job in self._jobs.items() if job.asked is not None}

    def unsteered(self) -> dict[str, str]:
        """Why some are not steered."""
        return {name: job.stand for name, job in self._jobs.items() if isinstance(job.stand, str)}

    def begun(self) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """Jobs that the steering knows, with their GPUs by node."""
        return {
            name: job.stand.uuids
            for name, job in self._jobs.items()
            if job.meter is not None and not isinstance(job.stand, str)
        }

    def question(self, name: str) -> OfJob | None:
        """What a prediction of a job that the steering knows would be of; None for one that it does not know."""
        job = self._jobs.get(name)
        if job is None or job.meter is None or isinstance(job.stand, str):
            return None
        stand = job.stand
        gpus = sum(len(uuids) for uuids in stand.uuids.values())
        return OfJob(stand.promise.profile, stand.gpu_model, gpus, stand.limits_w)

    def restart(self, name: str) -> None:
        """A limit of the job has changed: its window begins anew."""
        job = self._jobs.get(name)
        if job is not None and job.meter is not None:
            job.meter.restart()

    def gone(self, kept: Mapping[str, Workload], world: World) -> list[Event]:
        """What is to be told of jobs that are no more or stand elsewhere; before any budget changes."""
        left = sorted(self._jobs.keys() - kept.keys())
        self._work.keep(set(kept), world.at_s)
        made: list[Event] = [Ended(world.at_s, name) for name in left if self._jobs.pop(name).meter is not None]
        for name, workload in kept.items():
            job = self._jobs.setdefault(name, _Job(world.at_s))
            stand = self._stand(workload, world)
            was_enforced, job.is_enforced = job.is_enforced, enforced(world, workload)
            if stand == job.stand and job.is_enforced >= was_enforced:
                continue
            if job.meter is not None:
                made.append(Ended(world.at_s, name))
            job.stand, job.meter, job.since_s = stand, None, world.at_s
        return made

    def look(self, name: str, workload: Workload, world: World, earned_s: float) -> list[Event]:
        """What is to be told of one job in this cycle; `earned_s` is of its promise, before it began anew."""
        job = self._jobs[name]
        self._hear(job, name, workload, world)
        told, promise = job.progress, workload.spec.training
        if told is not None and promise is not None and promise.metrics is not None:
            # Pages have a clock of their own, which is none of Unix time.
            told = told._replace(at_s=world.at_s) if name in world.rounds else None
        worked = self._work.look(name, "" if promise is None else promise.work_unit, told, workload.placed_ns / 1e9)
        if worked is not None:
            self._worked.append(worked)
        stand = job.stand
        if isinstance(stand, str):
            return []
        looks = self._looks(stand, world)
        made: list[Event] = []
        if job.meter is None:
            begun = self._begun(job, stand, workload, world, earned_s)
            if begun is None:
                return []
            job.meter = Meter(
                frozenset(uuid for uuids in stand.uuids.values() for uuid in uuids),
                world.at_s,
                window_s=self._settings.window_s,
                missed_s=self._settings.missed_s,
            )
            made.append(begun)
        found = job.meter.look(world.at_s, job.progress, looks)
        if isinstance(found, Unusable):
            made.append(JobMissed(world.at_s, name, found))
        elif found is not None:
            made.append(JobMeasured(world.at_s, name, found))
        return made

    def _stand(self, workload: Workload, world: World) -> _Stand | str:
        training = workload.spec.training
        assert training is not None, "jobs have a promise"
        uuids = gpus_by_node(workload)
        boards, models = list[Board](), set[str]()
        budgets, restored_w = dict[str, tuple[str, ...]](), dict[str, float]()
        for name, held in uuids.items():
            node = world.nodes.get(name)
            gpus = {} if node is None else {gpu.uuid: gpu for gpu in node.inventory.gpus}
            if node is None or not gpus.keys() >= set(held):
                return f"node {name} has not all of its GPUs now"
            found = [board_of(gpus[uuid], self._catalogue) for uuid in held]
            known = [board for board in found if board is not None]
            if len(known) < len(found):
                return f"the power limits of {gpus[held[0]].product} are not known; add it to the catalogue"
            boards += known
            models.update(gpus[uuid].model for uuid in held)
            budgets[name] = lowest_budgets(world.policy, node.inventory)
            restored_w[name] = sum(board.default_w for board in known)
        if not boards:
            return "it holds no GPU"
        limits_w = limits_between(boards)
        return _Stand(training, holdings_of(workload, restored_w, budgets), uuids, limits_w, min(models))

    def _hear(self, job: _Job, name: str, workload: Workload, world: World) -> None:
        """The newest word of its progress, and where to ask for the next."""
        training = workload.spec.training
        source = None if training is None else training.metrics
        job.asked = None
        if source is not None:
            urls = urls_of(source, workload)
            job.asked = Asked(
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
    def _looks(stand: _Stand, world: World) -> dict[str, GpuLook]:
        """What is known of its GPUs now."""
        return {
            uuid: look.gpus[uuid]
            for node, uuids in stand.uuids.items()
            if (look := world.looks.get(node)) is not None
            for uuid in uuids
            if uuid in look.gpus
        }

    def _begun(self, job: _Job, stand: _Stand, workload: Workload, world: World, earned_s: float) -> JobBegan | None:
        """The job as the steering takes it up; None while that would be too early."""
        waited = world.at_s - job.since_s >= self._settings.readings_s
        ran_s = max(0.0, world.at_s - workload.placed_ns / 1e9)
        limits_w = self._held_w(stand, world)
        is_old = ran_s > self._settings.readings_s and stand.promise.deadline_ns > 0
        if not waited and (len(limits_w) < len(stand.holdings) or (is_old and job.progress is None)):
            return None
        default_w = stand.limits_w[0] if workload.power_limit_w is None else workload.power_limit_w
        return JobBegan(
            world.at_s,
            workload.workload_id,
            promise_of(workload),
            stand.limits_w,
            stand.holdings,
            relatives=self._related(stand.gpu_model, world),
            held_w=tuple(limits_w.get(holding.node, default_w) for holding in stand.holdings),
            shown=shown_by(
                workload,
                stand.gpu_model,
                world.points.get(own_profile(workload.workload_id), ()),
                self._settings.window_s,
            ),
            past=Past(0.0 if job.progress is None else job.progress.work, ran_s, earned_s),
        )

    def _related(self, gpu_model: str, world: World) -> tuple[Curve, ...]:
        at_s, known = self._relatives
        if at_s != world.at_s:
            known = {}
            self._relatives = (world.at_s, known)
        if gpu_model not in known:
            known[gpu_model] = relatives_of(
                (point for name, found in world.points.items() if not name.startswith(OWN) for point in found),
                gpu_model,
            )
        return known[gpu_model]

    @staticmethod
    def _held_w(stand: _Stand, world: World) -> dict[str, float]:
        """The limit of its GPUs by node, the highest of each; of nodes that told all."""
        found = {}
        for node, uuids in stand.uuids.items():
            look = world.looks.get(node)
            if look is not None and look.limits_w.keys() >= set(uuids):
                found[node] = max(look.limits_w[uuid] for uuid in uuids)
        return found
