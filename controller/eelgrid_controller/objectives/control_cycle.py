"""One control cycle: an observation in, instructions out; synchronous, without clock or I/O.

Order: answers to pending limits and node liveness, ended workloads, budgets and prices, then services and
jobs. Pending limits are answered by the plan epoch that a node has applied and the limits it reads back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.controller import ObjectiveController
from eelgrid_controller.objectives.elastic import ElasticObserver
from eelgrid_controller.objectives.job_observer import JobHistories, JobObserver, ProfileUpdates
from eelgrid_controller.objectives.observation import ClusterObservation, allows_enforcement
from eelgrid_controller.objectives.policy_budgets import (
    BudgetUsage,
    NodePowerDraw,
    budget_usage,
    evaluate_policy_budgets,
    policy_budgets,
    policy_tariff,
)
from eelgrid_controller.objectives.power.budgets import BudgetTree, PowerBudgetNode
from eelgrid_controller.objectives.power.control_events import (
    AllocationSolved,
    BudgetPreview,
    BudgetsSet,
    ControlEvent,
    ControlInstruction,
    ControllerStatus,
    ControlTick,
    JobMeasured,
    JobPredicted,
    JobStarted,
    LimitChange,
    LimitConfirmed,
    LimitFailed,
    NodeLeaseExpired,
    NodeLimitReport,
    NodeReachable,
    NodeUnreachable,
    PendingLimit,
    PricesSet,
    ScaleService,
    SetPowerLimit,
    SolveAllocation,
)
from eelgrid_controller.objectives.power.estimates import LimitHistory
from eelgrid_controller.objectives.power.power_model import is_same_limit
from eelgrid_controller.objectives.predicted_plans import PredictedPlans
from eelgrid_controller.objectives.service_observer import ServiceObservation, ServiceObserver
from eelgrid_controller.objectives.services.prometheus_text import ScrapeTarget
from eelgrid_controller.objectives.settings import ObjectiveSettings
from eelgrid_controller.state.measurements import WorkInterval
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import (
    ApplyStatus,
    EnergyPrices,
    ImagineBudgetsResponse,
    MeasuredPoint,
    Policy,
    Workload,
)

_DONE = frozenset((ApplyStatus.REFUSED, ApplyStatus.FAILED))


class PendingLimits:
    """All instructions that no node has answered yet, by number."""

    def __init__(self, *, confirm_s: float) -> None:
        self._confirm_s = confirm_s
        self._asked: dict[int, PendingLimit] = {}

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes that are to answer."""
        return frozenset(asked.node for asked in self._asked.values())

    def add_request(self, asked: PendingLimit) -> None:
        """Awaits an answer; an older instruction for the same GPUs gets none any more."""
        uuids = frozenset(asked.uuids)
        self._asked = {
            number: one for number, one in self._asked.items() if one.node != asked.node or uuids.isdisjoint(one.uuids)
        }
        self._asked[asked.number] = asked

    def forget_node(self, node: str) -> None:
        """The node is lost: its numbers are void."""
        self._asked = {number: one for number, one in self._asked.items() if one.node != node}

    def collect_answers(self, words: Mapping[str, NodeLimitReport], at_s: float) -> list[LimitConfirmed | LimitFailed]:
        """The answers that node reports give by now; each instruction is answered once."""
        made: list[LimitConfirmed | LimitFailed] = []
        for number in sorted(self._asked):
            one = self._asked[number]
            word = words.get(one.node)
            answer = None if word is None else self._answer_request(one, word, at_s)
            if answer is not None:
                del self._asked[number]
                made.append(answer)
        return made

    def _answer_request(
        self, one: PendingLimit, word: NodeLimitReport, at_s: float
    ) -> LimitConfirmed | LimitFailed | None:
        told = {}
        if word.applied is not None and word.applied.epoch >= one.epoch:
            told = {result.subject: result for result in word.applied.results}
        results = [told[uuid] for uuid in one.uuids if uuid in told]
        read_w = [result.power_limit_w for result in results]
        known_w = [limit_w for limit_w in read_w if limit_w is not None]
        if any(result.status in _DONE for result in results):
            highest = max(known_w) if len(known_w) == len(one.uuids) else None
            return LimitFailed(at_s, one.number, highest)
        if len(known_w) == len(one.uuids) and all(result.status is ApplyStatus.APPLIED for result in results):
            return LimitConfirmed(at_s, one.number, max(known_w))
        seen_w = [word.limits_w[uuid] for uuid in one.uuids if uuid in word.limits_w]
        waited_s = at_s - one.at_s
        is_seen = len(seen_w) == len(one.uuids) and word.age_s is not None and word.age_s < waited_s
        if is_seen and all(is_same_limit(limit_w, one.limit_w) for limit_w in seen_w):
            return LimitConfirmed(at_s, one.number, max(seen_w))
        if waited_s >= self._confirm_s:
            return LimitFailed(at_s, one.number, max(seen_w) if is_seen else None)
        return None


@dataclass(frozen=True, slots=True)
class NodeLiveness:
    """A node at a moment: whether its agent is there, and each holding's limit as read just now, where all is known."""

    is_ready: bool
    limits_w: Mapping[str, float] | None = None


@dataclass(slots=True)
class _Absence:
    since_s: float
    is_ended: bool = False


class NodeLivenessTracker:
    """Tracks which nodes of managed jobs are unreachable, and until when their leases last."""

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._away: dict[str, _Absence] = {}

    def is_away(self, node: str) -> bool:
        """Whether the controller was told that the node is unreachable and not yet that it is back."""
        return node in self._away

    def observe_nodes(
        self, seen: Mapping[str, NodeLiveness], at_s: float, *, lease_s: float
    ) -> list[NodeUnreachable | NodeLeaseExpired | NodeReachable]:
        """The events that follow from who is ready; nodes that are not in `seen` are forgotten."""
        self._away = {name: away for name, away in self._away.items() if name in seen}
        made: list[NodeUnreachable | NodeLeaseExpired | NodeReachable] = []
        for name in sorted(seen):
            node, away = seen[name], self._away.get(name)
            if not node.is_ready:
                if away is None:
                    away = self._away[name] = _Absence(at_s)
                    made.append(NodeUnreachable(at_s, name))
                if not away.is_ended and at_s - away.since_s >= max(0.0, lease_s - self._grace_s):
                    away.is_ended = True
                    made.append(NodeLeaseExpired(at_s, name))
            elif away is not None and node.limits_w is not None:
                del self._away[name]
                made.append(NodeReachable(at_s, name, dict(node.limits_w)))
        return made


class ControllerPort(Protocol):
    """What the control cycle needs of the objective controller."""

    def handle_event(self, event: ControlEvent) -> list[ControlInstruction]:
        """What should be done after an event."""

    def evaluate_budgets(self, budgets: BudgetTree, lowest: Mapping[str, tuple[str, ...]]) -> BudgetPreview:
        """The limits that jobs would have under other budgets."""

    def limit_histories(self) -> Mapping[str, LimitHistory]:
        """What settled jobs did at each limit."""

    def controller_status(self) -> ControllerStatus:
        """How everything stands."""


@dataclass(frozen=True, slots=True)
class ObjectivesStatus:
    """How everything stands, for operators."""

    steering: ControllerStatus
    services: dict[str, ServiceObservation] = field(default_factory=dict)
    unsteered: dict[str, str] = field(default_factory=dict)  # promised workloads that are not, and why
    bases: dict[str, str] = field(default_factory=dict)  # where what is known of a workload comes from
    drawn: Mapping[str, BudgetUsage] = field(default_factory=dict)  # below each budget, as last read
    advice: frozenset[str] = frozenset()  # workloads of which nothing is carried out: their pools are only observed


class CycleResult(NamedTuple):
    """What one cycle asks for."""

    scales: tuple[ScaleService, ...]
    limits: tuple[LimitChange, ...]
    asked: dict[str, ScrapeTarget]
    standing: ObjectivesStatus
    faults: tuple[tuple[str, Exception], ...]  # by workload; what was passed over
    points: tuple[MeasuredPoint, ...] = ()  # that windows taught
    division: SolveAllocation | None = None  # to be worked out apart
    answers: tuple[LimitConfirmed | LimitFailed, ...] = ()  # to limits, as the steering was told
    said: tuple[tuple[str, str], ...] = ()  # for the log, by workload
    worked: tuple[WorkInterval, ...] = ()  # by workloads, since the turn before


class ControlCycle:
    """Runs the objective controller on observations, one cycle at a time."""

    def __init__(
        self,
        settings: ObjectiveSettings,
        catalogue: Catalogue,
        *,
        steering: ControllerPort | None = None,
        foreseen: PredictedPlans | None = None,
    ) -> None:
        self.settings = settings
        self.steering: ControllerPort = ObjectiveController(settings.steering) if steering is None else steering
        self._foreseen = foreseen or PredictedPlans()
        self._services = ServiceObserver(settings, self._foreseen)
        self._jobs = JobObserver(settings, catalogue)
        self._limits = PendingLimits(confirm_s=settings.confirm_s)
        self._watched = NodeLivenessTracker(grace_s=settings.away_grace_s)
        self._budgets: tuple[PowerBudgetNode, ...] = ()
        self._prices: EnergyPrices | None = None
        self._drawn: Mapping[str, BudgetUsage] = {}
        self._lessons = ProfileUpdates()
        self._keepsakes = JobHistories()
        self._elastic = ElasticObserver(horizon_s=settings.elastic_s)
        self._numbers: dict[int, str] = {}  # jobs of the numbers that are to be answered
        self._refused: list[LimitFailed] = []  # to be told in the next turn
        self._advised: dict[str, dict[str, SetPowerLimit]] = {}  # limits that wait for their pools, by job and holding

    def run_cycle(self, world: ClusterObservation) -> CycleResult:
        """One cycle."""
        faults: list[tuple[str, Exception]] = []
        told: list[tuple[str, str]] = []
        services = {name: one for name, one in world.workloads.items() if one.spec.service and not is_sliced(one)}
        jobs = {name: one for name, one in world.workloads.items() if one.spec.training is not None}
        earned = {job.name: job.earned_s or 0.0 for job in self.steering.controller_status().jobs}
        of_nodes = self._of_nodes(world)
        said = self._observe_nodes(of_nodes)
        said += self._observe_nodes(self._services.end_missing(services, world.at_s))
        said += self._observe_nodes(self._jobs.end_missing(jobs, world))
        said += self._observe_nodes(self._of_policy(world, faults))
        said += self._observe_nodes(AllocationSolved(world.at_s, number, shared) for number, shared in world.divided)
        for name, workload in services.items():
            try:
                said += self._observe_nodes(self._services.observe_service(name, workload, world))
            except Exception as error:  # noqa: BLE001  # one service's fault stops no other
                faults.append((name, error))
        for name, workload in jobs.items():
            try:
                events = self._jobs.observe_job(name, workload, world, earned.get(name, 0.0))
                events += self._of_predictions(name, world, events, told)
                said += self._observe_nodes(events)
                for event in events:
                    if isinstance(event, JobMeasured):
                        self._lessons.add_window(workload, world, event.window)
            except Exception as error:  # noqa: BLE001
                faults.append((name, error))
        said += self._observe_nodes([ControlTick(world.at_s)])
        advice = frozenset(name for name, one in world.workloads.items() if not allows_enforcement(world, one))
        scales = [one for one in said if isinstance(one, ScaleService) and one.name in services]
        scales += self._elastic.plan_resizes(jobs, world)
        limits = self._to_set([one for one in said if isinstance(one, SetPowerLimit)], advice)
        self._foreseen.retain(services, jobs)
        standing = self._standing(advice)
        told += self._foreseen.check_services(standing.steering.services, self._services.service_plans())
        return CycleResult(
            tuple(one for one in scales if one.name not in advice),
            limits,
            self._services.scrape_requests() | self._jobs.scrape_requests(),
            standing,
            tuple(faults),
            self._lessons.collect_points()
            + self._keepsakes.collect_points(self.steering.limit_histories(), jobs, world),
            next((one for one in reversed(said) if isinstance(one, SolveAllocation)), None),
            tuple(one for one in of_nodes if isinstance(one, LimitConfirmed | LimitFailed)),
            tuple(told),
            (*self._services.collect_work(), *self._jobs.collect_work()),
        )

    def record_request(self, limit: LimitChange, epochs: dict[str, int], at_s: float) -> None:
        """Records that a limit is in the journal; its nodes' plans have it from these epochs on."""
        self._jobs.restart_window(limit.name)
        for number, node, uuids in limit.numbers:
            self._limits.add_request(PendingLimit(number, node, uuids, limit.limit_w, epochs.get(node, 0), at_s))

    def record_refusal(self, limit: LimitChange, at_s: float) -> None:
        """Records that the core refused a limit, so that its GPUs keep what they had; reported with the next cycle."""
        self._refused += [LimitFailed(at_s, number, None) for number, _, _ in limit.numbers]

    @property
    def needs_related_points(self) -> bool:
        """Whether a job is to be taken up, which may learn from the points of other profiles."""
        return self._jobs.has_unstarted

    def unmanaged_reasons(self) -> dict[str, str]:
        """Workloads with a promise that are not managed, and why."""
        return self._services.unmanaged_reasons() | self._jobs.unmanaged_reasons()

    def evaluate_policy(
        self, policy: Policy, draws: Sequence[NodePowerDraw], workloads: Mapping[str, Workload]
    ) -> ImagineBudgetsResponse:
        """What jobs would have under a policy's budgets; nothing changes. Raises InvalidBudget."""
        begun = self._jobs.managed_jobs()
        gpus = {name: {node: len(uuids) for node, uuids in by_node.items()} for name, by_node in begun.items()}
        return evaluate_policy_budgets(self.steering, policy, draws, gpus, workloads)

    def _observe_nodes(self, events: Iterable[ControlEvent]) -> list[ControlInstruction]:
        return [instruction for event in events for instruction in self.steering.handle_event(event)]

    def _of_nodes(self, world: ClusterObservation) -> list[ControlEvent]:
        """Answers to limits, and nodes that went or came back."""
        seen: dict[str, NodeLiveness] = {}
        begun = self._jobs.managed_jobs()
        for job, uuids in begun.items():
            for name, held in uuids.items():
                limit_w = _highest_w(world, name, held)
                view, before = world.nodes.get(name), seen.get(name)
                known = {} if before is None else before.limits_w
                whole = None if known is None or limit_w is None else {**known, f"{job}/{name}": limit_w}
                seen[name] = NodeLiveness(view is not None and view.is_ready, whole)
        words = {
            name: NodeLimitReport(look.applied, look.limits_w, look.age_s)
            for name in self._limits.nodes
            if (look := world.looks.get(name)) is not None
        }
        answers: list[LimitConfirmed | LimitFailed] = [*self._refused, *self._limits.collect_answers(words, world.at_s)]
        self._refused = []
        for answer in answers:
            self._jobs.restart_window(self._numbers.pop(answer.number, ""))
        changes = self._watched.observe_nodes(seen, world.at_s, lease_s=world.policy.lease_s)
        for change in changes:
            if isinstance(change, NodeUnreachable):
                self._limits.forget_node(change.node)
        return [*answers, *changes]

    def _of_predictions(
        self, name: str, world: ClusterObservation, heard: Sequence[ControlEvent], told: list[tuple[str, str]]
    ) -> list[ControlEvent]:
        """A job's predicted curve, once; or that its prediction is wrong."""
        question = self._jobs.forecast_question(name)
        if question is None:
            return []
        made: list[ControlEvent] = []
        is_new = any(isinstance(event, JobStarted) for event in heard)
        prior = self._foreseen.predict_job(name, question, world.points.get(question.profile, ()), is_new=is_new)
        if prior is not None:
            made.append(JobPredicted(world.at_s, name, prior))
        for event in heard:
            if (
                isinstance(event, JobMeasured)
                and (words := self._foreseen.check_job_window(name, event.window)) is not None
            ):
                told.append((name, words))
                made.append(JobPredicted(world.at_s, name, None))
        return made

    def _of_policy(self, world: ClusterObservation, faults: list[tuple[str, Exception]]) -> list[ControlEvent]:
        """Budgets and prices where they are others than before."""
        made: list[ControlEvent] = []
        try:
            if world.draws is not None:
                self._drawn = budget_usage(world.policy, world.draws)
            if world.draws is not None and (budgets := policy_budgets(world.policy, world.draws)).all != self._budgets:
                self._budgets = budgets.all
                made.append(BudgetsSet(world.at_s, budgets))
            if world.policy.prices != self._prices:
                tariff = policy_tariff(world.policy.prices)
                self._prices = world.policy.prices
                made.append(PricesSet(world.at_s, tariff))
        except ControllerError as error:
            faults.append(("policy", error))
        return made

    def _to_set(self, said: Iterable[SetPowerLimit], advice: frozenset[str]) -> tuple[LimitChange, ...]:
        """One command for each job; those of pools that are only observed are kept until they may be enforced."""
        begun = self._jobs.managed_jobs()
        self._advised = {job: kept for job, kept in self._advised.items() if job in begun}
        for one in said:
            self._advised.setdefault(one.job, {})[one.holding] = one
        made = []
        for job in [job for job in self._advised if job not in advice and job in begun]:
            wanted = list(self._advised.pop(job).values())
            last = wanted[-1]
            numbers = tuple((one.number, one.node, begun[job].get(one.node, ())) for one in wanted)
            self._numbers.update(dict.fromkeys((one.number for one in wanted), job))
            made.append(LimitChange(job, last.limit_w, last.reason, numbers))
        return tuple(made)

    def _standing(self, advice: frozenset[str]) -> ObjectivesStatus:
        bases = {name: one.basis for name, one in self._services.service_plans().items() if one.basis}
        return ObjectivesStatus(
            self.steering.controller_status(),
            self._services.observations(),
            self.unmanaged_reasons(),
            bases | self._foreseen.job_bases(),
            self._drawn,
            advice,
        )


def _highest_w(world: ClusterObservation, node: str, uuids: Iterable[str]) -> float | None:
    """The highest limit of these GPUs as read just now; None while one is not known."""
    look = world.looks.get(node)
    held = list(uuids)
    if look is None or not look.limits_w.keys() >= set(held):
        return None
    return max(look.limits_w[uuid] for uuid in held)
