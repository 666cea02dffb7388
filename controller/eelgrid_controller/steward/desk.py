"""The desk: one cycle's view in, what is to be carried out back; synchronous, no clock, no I/O.

Owns the steering and the order in which it is told things. Must not know how views are
read, nor how a command travels.

Theory. The order of a turn: answers to limits and nodes first, so that what is known to be
set is right; then who is gone; then budgets and prices, whose names new jobs draw from;
then services and jobs, each apart, so that an error in one stops no other; time last. A
job's limit is one command to the core, whatever number of holdings it has. What may not be
carried out, since a node's pool is only observed, is kept as advice: a scaling is said
again by the steering, a limit waits here until its pool is enforced or something else is
wanted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from eelgrid_controller.energy_ledger.working import Worked
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.power.budgets import Budget, Budgets
from eelgrid_controller.power.evidence import Shown
from eelgrid_controller.replicas import sliced
from eelgrid_controller.steering.events import (
    BudgetsSet,
    Divide,
    Divided,
    Event,
    Instruction,
    JobBegan,
    JobForeseen,
    JobMeasured,
    LimitConfirmed,
    LimitFailed,
    NodeLost,
    PricesSet,
    Scale,
    SetLimit,
    Ticked,
)
from eelgrid_controller.steering.standing import Imagined, Standing
from eelgrid_controller.steering.steering import Steering
from eelgrid_controller.steward.asked_limits import Asked as AskedLimit
from eelgrid_controller.steward.asked_limits import AskedLimits, NodeWord
from eelgrid_controller.steward.elastic_desk import ElasticDesk
from eelgrid_controller.steward.foreseen import Foreseen
from eelgrid_controller.steward.imagining import imagined
from eelgrid_controller.steward.job_desk import JobDesk
from eelgrid_controller.steward.keepsakes import Keepsakes
from eelgrid_controller.steward.lessons import Lessons
from eelgrid_controller.steward.presence import NodeSeen, Watched
from eelgrid_controller.steward.prices import NodeDraw, budgets_of, tariff_of
from eelgrid_controller.steward.rounds import Asked
from eelgrid_controller.steward.service_desk import ServiceDesk, ServiceSeen
from eelgrid_controller.steward.settings import StewardSettings
from eelgrid_controller.steward.watts import Drawn, drawn_of
from eelgrid_controller.steward.world import World, enforced
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import EnergyPrices, ImagineBudgetsResponse, MeasuredPoint, Policy, Workload

__all__ = ["Desk", "LimitJob", "Steers", "StewardStanding", "Turn"]


class Steers(Protocol):
    """What the desk needs of the steering."""

    def on(self, event: Event) -> list[Instruction]:
        """What should be done after an event."""

    def imagined(self, budgets: Budgets, lowest: Mapping[str, tuple[str, ...]]) -> Imagined:
        """The limits that jobs would have under other budgets."""

    def shown(self) -> Mapping[str, Shown]:
        """What settled jobs did at each limit."""

    def standing(self) -> Standing:
        """How everything stands."""


class LimitJob(NamedTuple):
    """One limit on all GPUs of a job; the numbers that are to be answered, with their nodes and GPUs."""

    name: str
    limit_w: float
    reason: str
    numbers: tuple[tuple[int, str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class StewardStanding:
    """How everything stands, for operators."""

    steering: Standing
    services: dict[str, ServiceSeen] = field(default_factory=dict)
    unsteered: dict[str, str] = field(default_factory=dict)  # promised workloads that are not, and why
    bases: dict[str, str] = field(default_factory=dict)  # where what is known of a workload comes from
    drawn: Mapping[str, Drawn] = field(default_factory=dict)  # below each budget, as last read
    advice: frozenset[str] = frozenset()  # workloads of which nothing is carried out: their pools are only observed


class Turn(NamedTuple):
    """What one turn asks for."""

    scales: tuple[Scale, ...]
    limits: tuple[LimitJob, ...]
    asked: dict[str, Asked]
    standing: StewardStanding
    faults: tuple[tuple[str, Exception], ...]  # by workload; what was passed over
    points: tuple[MeasuredPoint, ...] = ()  # that windows taught
    division: Divide | None = None  # to be worked out apart
    answers: tuple[LimitConfirmed | LimitFailed, ...] = ()  # to limits, as the steering was told
    said: tuple[tuple[str, str], ...] = ()  # for the log, by workload
    worked: tuple[Worked, ...] = ()  # by workloads, since the turn before


class Desk:
    """Holds the steering; one turn at a time."""

    def __init__(
        self,
        settings: StewardSettings,
        catalogue: Catalogue,
        *,
        steering: Steers | None = None,
        foreseen: Foreseen | None = None,
    ) -> None:
        self.settings = settings
        self.steering: Steers = Steering(settings.steering) if steering is None else steering
        self._foreseen = foreseen or Foreseen()
        self._services = ServiceDesk(settings, self._foreseen)
        self._jobs = JobDesk(settings, catalogue)
        self._limits = AskedLimits(confirm_s=settings.confirm_s)
        self._watched = Watched(grace_s=settings.away_grace_s)
        self._budgets: tuple[Budget, ...] = ()
        self._prices: EnergyPrices | None = None
        self._drawn: Mapping[str, Drawn] = {}
        self._lessons = Lessons()
        self._keepsakes = Keepsakes()
        self._elastic = ElasticDesk(horizon_s=settings.elastic_s)
        self._numbers: dict[int, str] = {}  # jobs of the numbers that are to be answered
        self._refused: list[LimitFailed] = []  # to be told in the next turn
        self._advised: dict[str, dict[str, SetLimit]] = {}  # limits that wait for their pools, by job and holding

    def turn(self, world: World) -> Turn:
        """One cycle."""
        faults: list[tuple[str, Exception]] = []
        told: list[tuple[str, str]] = []
        services = {name: one for name, one in world.workloads.items() if one.spec.service and not sliced(one)}
        jobs = {name: one for name, one in world.workloads.items() if one.spec.training is not None}
        earned = {job.name: job.earned_s or 0.0 for job in self.steering.standing().jobs}
        of_nodes = self._of_nodes(world)
        said = self._hear(of_nodes)
        said += self._hear(self._services.gone(services, world.at_s))
        said += self._hear(self._jobs.gone(jobs, world))
        said += self._hear(self._of_policy(world, faults))
        said += self._hear(Divided(world.at_s, number, shared) for number, shared in world.divided)
        for name, workload in services.items():
            try:
                said += self._hear(self._services.look(name, workload, world))
            except Exception as error:  # noqa: BLE001  # one service's fault stops no other
                faults.append((name, error))
        for name, workload in jobs.items():
            try:
                events = self._jobs.look(name, workload, world, earned.get(name, 0.0))
                events += self._of_predictions(name, world, events, told)
                said += self._hear(events)
                for event in events:
                    if isinstance(event, JobMeasured):
                        self._lessons.heard(workload, world, event.window)
            except Exception as error:  # noqa: BLE001
                faults.append((name, error))
        said += self._hear([Ticked(world.at_s)])
        advice = frozenset(name for name, one in world.workloads.items() if not enforced(world, one))
        scales = [one for one in said if isinstance(one, Scale) and one.name in services]
        scales += self._elastic.look(jobs, world)
        limits = self._to_set([one for one in said if isinstance(one, SetLimit)], advice)
        self._foreseen.gone(services, jobs)
        standing = self._standing(advice)
        told += self._foreseen.served(standing.steering.services, self._services.planned())
        return Turn(
            tuple(one for one in scales if one.name not in advice),
            limits,
            self._services.asked() | self._jobs.asked(),
            standing,
            tuple(faults),
            self._lessons.due() + self._keepsakes.due(self.steering.shown(), jobs, world),
            next((one for one in reversed(said) if isinstance(one, Divide)), None),
            tuple(one for one in of_nodes if isinstance(one, LimitConfirmed | LimitFailed)),
            tuple(told),
            (*self._services.worked(), *self._jobs.worked()),
        )

    def was_asked(self, limit: LimitJob, epochs: dict[str, int], at_s: float) -> None:
        """A limit is in the journal; its nodes' plans have it from these epochs on."""
        self._jobs.restart(limit.name)
        for number, node, uuids in limit.numbers:
            self._limits.ask(AskedLimit(number, node, uuids, limit.limit_w, epochs.get(node, 0), at_s))

    def was_refused(self, limit: LimitJob, at_s: float) -> None:
        """The core did not take a limit; what its GPUs have is what they had. Told with the next turn."""
        self._refused += [LimitFailed(at_s, number, None) for number, _, _ in limit.numbers]

    @property
    def learns(self) -> bool:
        """Whether a job is to be taken up, which may learn from the points of other profiles."""
        return self._jobs.waits

    def unsteered(self) -> dict[str, str]:
        """Promised workloads that are not steered, and why."""
        return self._services.unsteered() | self._jobs.unsteered()

    def imagined(
        self, policy: Policy, draws: Sequence[NodeDraw], workloads: Mapping[str, Workload]
    ) -> ImagineBudgetsResponse:
        """What jobs would have under a policy's budgets; nothing changes. Raises BudgetRefused."""
        begun = self._jobs.begun()
        gpus = {name: {node: len(uuids) for node, uuids in by_node.items()} for name, by_node in begun.items()}
        return imagined(self.steering, policy, draws, gpus, workloads)

    def _hear(self, events: Iterable[Event]) -> list[Instruction]:
        return [instruction for event in events for instruction in self.steering.on(event)]

    def _of_nodes(self, world: World) -> list[Event]:
        """Answers to limits, and nodes that went or came back."""
        seen: dict[str, NodeSeen] = {}
        begun = self._jobs.begun()
        for job, uuids in begun.items():
            for name, held in uuids.items():
                limit_w = _highest_w(world, name, held)
                view, before = world.nodes.get(name), seen.get(name)
                known = {} if before is None else before.limits_w
                whole = None if known is None or limit_w is None else {**known, f"{job}/{name}": limit_w}
                seen[name] = NodeSeen(view is not None and view.is_ready, whole)
        words = {
            name: NodeWord(look.applied, look.limits_w, look.age_s)
            for name in self._limits.nodes
            if (look := world.looks.get(name)) is not None
        }
        answers: list[LimitConfirmed | LimitFailed] = [*self._refused, *self._limits.answers(words, world.at_s)]
        self._refused = []
        for answer in answers:
            self._jobs.restart(self._numbers.pop(answer.number, ""))
        changes = self._watched.look(seen, world.at_s, lease_s=world.policy.lease_s)
        for change in changes:
            if isinstance(change, NodeLost):
                self._limits.forget_node(change.node)
        return [*answers, *changes]

    def _of_predictions(
        self, name: str, world: World, heard: Sequence[Event], told: list[tuple[str, str]]
    ) -> list[Event]:
        """A job's curve as it is foreseen, once; or that what was foreseen is wrong."""
        question = self._jobs.question(name)
        if question is None:
            return []
        made: list[Event] = []
        is_new = any(isinstance(event, JobBegan) for event in heard)
        prior = self._foreseen.job(name, question, world.points.get(question.profile, ()), is_new=is_new)
        if prior is not None:
            made.append(JobForeseen(world.at_s, name, prior))
        for event in heard:
            if isinstance(event, JobMeasured) and (words := self._foreseen.trained(name, event.window)) is not None:
                told.append((name, words))
                made.append(JobForeseen(world.at_s, name, None))
        return made

    def _of_policy(self, world: World, faults: list[tuple[str, Exception]]) -> list[Event]:
        """Budgets and prices where they are others than before."""
        made: list[Event] = []
        try:
            if world.draws is not None:
                self._drawn = drawn_of(world.policy, world.draws)
            if world.draws is not None and (budgets := budgets_of(world.policy, world.draws)).all != self._budgets:
                self._budgets = budgets.all
                made.append(BudgetsSet(world.at_s, budgets))
            if world.policy.prices != self._prices:
                tariff = tariff_of(world.policy.prices)
                self._prices = world.policy.prices
                made.append(PricesSet(world.at_s, tariff))
        except ControllerError as error:
            faults.append(("policy", error))
        return made

    def _to_set(self, said: Iterable[SetLimit], advice: frozenset[str]) -> tuple[LimitJob, ...]:
        """One command for each job; what only waits for its pool is kept."""
        begun = self._jobs.begun()
        self._advised = {job: kept for job, kept in self._advised.items() if job in begun}
        for one in said:
            self._advised.setdefault(one.job, {})[one.holding] = one
        made = []
        for job in [job for job in self._advised if job not in advice and job in begun]:
            wanted = list(self._advised.pop(job).values())
            last = wanted[-1]
            numbers = tuple((one.number, one.node, begun[job].get(one.node, ())) for one in wanted)
            self._numbers.update(dict.fromkeys((one.number for one in wanted), job))
            made.append(LimitJob(job, last.limit_w, last.reason, numbers))
        return tuple(made)

    def _standing(self, advice: frozenset[str]) -> StewardStanding:
        bases = {name: one.basis for name, one in self._services.planned().items() if one.basis}
        return StewardStanding(
            self.steering.standing(),
            self._services.seen(),
            self.unsteered(),
            bases | self._foreseen.bases(),
            self._drawn,
            advice,
        )


def _highest_w(world: World, node: str, uuids: Iterable[str]) -> float | None:
    """The highest limit of these GPUs as read just now; None while one is not known."""
    look = world.looks.get(node)
    held = list(uuids)
    if look is None or not look.limits_w.keys() >= set(held):
        return None
    return max(look.limits_w[uuid] for uuid in held)
