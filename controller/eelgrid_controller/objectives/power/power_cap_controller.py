"""Controls the power limits of all managed jobs within every budget.

Offers the target limit of each job to the limit rollout for the whole gang, keeps raises that have no room
waiting, and asks for a new budget allocation when wishes, budgets or prices change.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budget_allocation import (
    AllocationRequest,
    AllocationTask,
    BudgetAllocation,
    BudgetShortfall,
    is_same_limit,
    preview_limits,
    solve_allocation,
)
from eelgrid_controller.objectives.power.budgets import BudgetTree
from eelgrid_controller.objectives.power.control_events import JobMeasured, JobStarted, SetPowerLimit, SolveAllocation
from eelgrid_controller.objectives.power.job_controller import JobController, PriceHorizon, start_job
from eelgrid_controller.objectives.power.limit_allocation import AllocationGoal
from eelgrid_controller.objectives.power.limit_rollout import (
    CommandConfirmed,
    CommandFailed,
    Holding,
    HoldingStatus,
    LimitCommand,
    LimitRollout,
    LimitSetting,
    RolloutLeaseEnded,
    RolloutNodeLost,
    RolloutNodeReturned,
)
from eelgrid_controller.objectives.power.settings import ALLOCATION_JOBS, ControlSettings
from eelgrid_controller.objectives.power.tariffs import EnergyTariff


def allocation_task(
    jobs: Iterable[tuple[JobController, Mapping[Holding, HoldingStatus]]],
    budgets: BudgetTree,
    lowest: Callable[[Holding], tuple[str, ...]],
    *,
    prices: PriceHorizon,
    at_s: float,
    want: AllocationGoal,
) -> AllocationTask:
    """The question of now, for jobs with how each of their holdings stands; `lowest` are the budgets of a holding."""
    asking, wishes, fixed_w = [], [], [0.0] * len(budgets)
    for job, known in jobs:
        asking.append(_allocation_request(job, known, lowest))
        wishes.append(job.desired_limit(prices, at_s))
        for holding, how in known.items():
            if how.lost or how.given_up:
                claim_w = max(how.claim_w, (holding.restored_w or 0.0) if how.lost else 0.0)
                for place in budgets.chain_indices(lowest(holding)):
                    fixed_w[place] += claim_w
    return AllocationTask(tuple(asking), tuple(wishes), budgets, tuple(fixed_w), want)


def _allocation_request(
    job: JobController, known: Mapping[Holding, HoldingStatus], lowest: Callable[[Holding], tuple[str, ...]]
) -> AllocationRequest:
    limits_w = job.search.limits_w
    return AllocationRequest(
        name=job.began.name,
        wish_w=math.nan,  # worked out with the division
        held_w=max(one.limit_w for one in known.values()),
        limits_w=limits_w,
        charges_w=tuple(job.charge_w(limit_w) for limit_w in limits_w),
        gpus=tuple((lowest(one), one.gpus) for one, how in known.items() if not (how.lost or how.given_up)),
        curve=job.curve,
        promise=job.remaining_promise(),
        weight=job.began.weight,
        owes=(job.earned_s() or 0.0) < 0.0,
    )


_LOOKS = 64  # at jobs that wait for room, an event


class PowerCapController:
    """All jobs. Methods answer with instructions, or the reason why an event changes nothing."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.prices = PriceHorizon(None, settings.horizon_s)
        self.budgets = BudgetTree(())
        self._budget_names: frozenset[str] = frozenset()
        self.shortfalls: dict[str, BudgetShortfall] = {}
        self.jobs: dict[str, JobController] = {}
        self.changes = LimitRollout(self.budgets, (), {})
        self._owner: dict[str, str] = {}  # job of each holding
        self._numbers: dict[int, str] = {}  # holding of each command under way
        self._waiting: dict[str, None] = {}
        self._stale: bool = False  # ceilings are
        self._urgent: bool = False
        self._shared_s: float | None = None
        self._divides: int = 0  # number of the last division that was asked for
        self._divide_until_s: float | None = None  # while its answer is awaited

    def start_job(self, event: JobStarted) -> list[SetPowerLimit] | str:
        """A new job, or one that promises something else, or one that has moved."""
        known = self.jobs.get(event.name)
        if known is not None:
            old = known.began
            if (old.holdings, old.limits_w) == (event.holdings, event.limits_w):
                if (old.promise, old.weight) == (event.promise, event.weight):
                    return "a job that came twice"
                known.update_promise(event)
                self._stale = True
                return self._offer_target(known, event.at_s)
        names = [holding.name for holding in event.holdings]
        held_w = event.held_w or (max(event.limits_w, default=0.0),) * len(names)
        if len(set(names)) < len(names) or not names or len(held_w) != len(names) or not min(held_w) > 0.0:
            return "a job with holdings that are none"
        if any(self._owner.get(name, event.name) != event.name for name in names) or not 0.0 < event.weight < 1e9:
            return "a job with holdings of another, or an impossible weight"
        if known is None and len(self.jobs) >= self.settings.jobs_most:
            return "more jobs than are steered"
        try:
            job = start_job(event, self.settings.manner, self.prices)
        except ControllerError:
            return "a job with limits that are none"
        if any(holding.gpus < 1 for holding in event.holdings) or not max(held_w) < 1e9:
            return "a job with holdings that are none"
        made = [] if known is None else self.end_job(event.name)
        assert not isinstance(made, str), "it was known"
        for holding, limit_w in zip(event.holdings, held_w, strict=True):
            self.changes.add_holding(self._known_budgets(holding), LimitSetting(limit_w, holding.gpus * limit_w))
            self._owner[holding.name] = event.name
        self.jobs[event.name] = job
        if len(self.budgets):
            # Nothing is raised before watts are shared; a limit that was found is a limit that fits.
            job.set_ceiling(min((one for one in event.limits_w if one >= max(held_w) - 0.5), default=None))
            self._urgent |= bool(self.changes.shortfalls())
        self._stale = True
        return [*made, *self._offer_target(job, event.at_s)]

    def end_job(self, name: str) -> list[SetPowerLimit] | str:
        """Forgets a job; its watts are free."""
        job = self.jobs.pop(name, None)
        if job is None:
            return "an end of what is not known"
        self._waiting.pop(name, None)
        commands: list[LimitCommand] = []
        for holding in job.began.holdings:
            self._owner.pop(holding.name)
            commands = [one for one in commands if one.holding != holding.name] + self.changes.remove_holding(
                holding.name
            )
        self._numbers = {number: one for number, one in self._numbers.items() if one in self._owner}
        self._stale = True
        return self._sent(commands)

    def add_window(self, event: JobMeasured) -> list[SetPowerLimit] | str:
        """A window of a job, and the limit that follows from it."""
        job = self.jobs.get(event.name)
        if job is None:
            return "a window of what is not known"
        misread = job.window_problem(event)
        known = list(self.holding_statuses(job).values())
        if misread is None and any(
            one.under_way or one.lost or not is_same_limit(one.limit_w, known[0].limit_w) for one in known
        ):
            misread = "a window while limits change or differ"
        if misread is not None:
            job.heard_s = max(job.heard_s, event.at_s)
            return misread
        before = job.allocation_signature
        job.add_window(event)
        self._stale |= job.allocation_signature != before
        return self._offer_target(job, event.at_s)

    def add_missed_window(self, at_s: float, name: str, reason: MissedWindowReason) -> list[SetPowerLimit] | str:
        """A window without a measurement."""
        job = self.jobs.get(name)
        if job is None or at_s <= job.heard_s:
            return "a missed window that is old, or of what is not known"
        job.add_missed_window(at_s, reason)
        return self._offer_target(job, at_s)

    def confirm_command(
        self, at_s: float, number: int, limit_w: float | None, *, done: bool
    ) -> list[SetPowerLimit] | str:
        """A command came to an end; a reading that is none counts as no reading."""
        name = self._numbers.pop(number, None)
        if name is None:
            return "an answer to what was not asked, or twice"
        if limit_w is not None and not 0.0 < limit_w < 1e9:
            limit_w, done = None, False
        event = CommandConfirmed(number, limit_w) if done and limit_w is not None else CommandFailed(number, limit_w)
        made = self._sent(self.changes.handle_event(event))
        job = self.jobs[self._owner[name]]
        job.since_s = at_s
        if self.changes.holding_status(name).given_up:
            job.pinned_w, job.pinned_until_s = (
                self.changes.holding_status(name).limit_w,
                at_s + self.settings.retry_after_s,
            )
            self._stale = True
            self._urgent |= bool(self.changes.shortfalls())
            made += self._offer_target(job, at_s)
        return made + self._retry_waiting(at_s)

    def mark_node_lost(self, node: str) -> list[SetPowerLimit] | str:
        """Nothing is known of the node: its holdings keep their claims."""
        gone = {one.name for job in self.jobs.values() for one in job.began.holdings if one.node == node}
        if not gone:
            return "a node without jobs"
        self.changes.handle_event(RolloutNodeLost(node))
        self._numbers = {number: one for number, one in self._numbers.items() if one not in gone}
        self._stale = self._urgent = True  # its lease will end: room has to be made before
        return []

    def mark_lease_ended(self, at_s: float, node: str) -> list[SetPowerLimit] | str:
        """A lost node has put back what it found."""
        if all(one.node != node for job in self.jobs.values() for one in job.began.holdings):
            return "a node without jobs"
        self.changes.handle_event(RolloutLeaseEnded(node))
        self._stale = self._urgent = True
        return self._retry_waiting(at_s)

    def mark_node_returned(self, at_s: float, node: str, limits_w: Mapping[str, float]) -> list[SetPowerLimit] | str:
        """The node tells what it has; holdings that it does not tell of stay lost."""
        told = {name: limit_w for name, limit_w in limits_w.items() if 0.0 < limit_w < 1e9}
        back = {self._owner[name] for name in told if name in self._owner and self.changes.holding_status(name).lost}
        made = self._sent(self.changes.handle_event(RolloutNodeReturned(node, told)))
        self._stale = True
        for name in sorted(back):
            job = self.jobs[name]
            job.since_s, job.pinned_w = at_s, None
            made += self._offer_target(job, at_s)
        return made + self._retry_waiting(at_s)

    def set_budgets(self, at_s: float, budgets: BudgetTree) -> list[SetPowerLimit]:
        """Other budgets: watts are shared at once."""
        self.budgets = budgets
        self._divide_until_s = None  # what is under way is of budgets that are no more
        self._budget_names = frozenset(one.name for one in budgets.all)
        drawn = {one.name: self._known_budgets(one).budgets for job in self.jobs.values() for one in job.began.holdings}
        made = self._sent(self.changes.set_budgets(budgets, drawn))
        self.shortfalls = {}
        self._stale = self._urgent = True
        return made + self._retry_waiting(at_s)

    def set_tariff(self, at_s: float, tariff: EnergyTariff | None) -> list[SetPowerLimit]:
        """Other prices."""
        self.prices = PriceHorizon(tariff, self.settings.horizon_s)
        made = []
        for job in self.jobs.values():
            job.plan = None
            made += self._reprice_job(job, at_s, force=True)
        return made

    def on_tick(self, at_s: float) -> list[SetPowerLimit]:
        """What time alone changes: prices, jobs that are not heard of, limits that may be tried again."""
        made = []
        for job in self.jobs.values():
            if at_s - job.heard_s > self.settings.stale_after_s:
                job.add_missed_window(at_s, MissedWindowReason.NO_PROGRESS)
                made += self._offer_target(job, at_s)
            else:
                made += self._reprice_job(job, at_s, force=job.pinned_w is not None and at_s >= job.pinned_until_s)
        return made + self._retry_waiting(at_s)

    def allocate_if_due(self, at_s: float) -> list[SetPowerLimit] | list[SolveAllocation]:
        """New ceilings, or the question for them, if they are due: at once where a budget may be passed."""
        every_s = self.settings.divide_every_s * min(1.0, len(self.jobs) / ALLOCATION_JOBS)
        due = self._shared_s is None or at_s - self._shared_s >= every_s
        awaited = self._divide_until_s is not None and at_s < self._divide_until_s
        if not self._stale or not (due or self._urgent) or awaited:
            return []
        self._stale = self._urgent = False
        self._shared_s, self._divide_until_s = at_s, None
        if not len(self.budgets):
            return self._set_ceilings(at_s, BudgetAllocation(dict.fromkeys(self.jobs), self.shortfalls))
        problem = self._problem(at_s, self.budgets, lambda holding: self._known_budgets(holding).budgets)
        if len(self.jobs) <= self.settings.divided_inside:
            return self._set_ceilings(at_s, solve_allocation(problem))
        self._divides += 1
        self._divide_until_s = at_s + self.settings.divided_within_s
        return [SolveAllocation(self._divides, problem)]

    def apply_allocation(self, at_s: float, number: int, shared: BudgetAllocation | None) -> list[SetPowerLimit] | str:
        """The answer to the last question; without one it is asked again when it is due."""
        if self._divide_until_s is None or number != self._divides:
            return "a division that was not asked for, is void, or came twice"
        self._divide_until_s = None
        if shared is None:
            self._stale = True
            return []
        return self._set_ceilings(at_s, shared)

    def _set_ceilings(self, at_s: float, shared: BudgetAllocation) -> list[SetPowerLimit]:
        """Every job under its ceiling; one that began since the question keeps what it has."""
        self.shortfalls = shared.shortfalls
        made: list[SetPowerLimit] = []
        for name, job in self.jobs.items():
            job.set_ceiling(shared.ceilings_w.get(name, job.ceiling_w))
            made += self._offer_target(job, at_s)
        return made + self._retry_waiting(at_s)

    def initial_limit_w(self, limits_w: Iterable[float], holdings: Iterable[Holding]) -> float | None:
        """The largest limit that a new job could begin with now; None where not even the least has room.

        What promised jobs gave back while they search is kept for them: they may have to go up again.
        """
        claims, room = self.changes.claims_w(), self.budgets.available_w()
        gpus = [0] * len(room)
        for job in self.jobs.values():
            back_w = job.reclaimable_w()
            for holding in job.began.holdings if back_w > 0.0 else ():
                for place in self.budgets.chain_indices(self._known_budgets(holding).budgets):
                    room[place] -= holding.gpus * back_w
        for holding in holdings:
            for place in self.budgets.chain_indices(self._known_budgets(holding).budgets):
                gpus[place] += holding.gpus
        for limit_w in sorted(limits_w, reverse=True):
            if all(
                claims[one.name] + count * limit_w <= watts + 1e-6
                for one, count, watts in zip(self.budgets.all, gpus, room, strict=True)
                if count
            ):
                return limit_w
        return None

    def holding_statuses(self, job: JobController) -> dict[Holding, HoldingStatus]:
        """How each holding of a job stands."""
        return {holding: self.changes.holding_status(holding.name) for holding in job.began.holdings}

    def _known_budgets(self, holding: Holding) -> Holding:
        """The holding with those of its budgets that there are."""
        there = tuple(name for name in holding.budgets if name in self._budget_names)
        return Holding(holding.name, holding.node, holding.gpus, there, holding.restored_w)

    def _reprice_job(self, job: JobController, at_s: float, *, force: bool) -> list[SetPowerLimit]:
        """The job at the price of now; nothing where that has hardly changed."""
        weight = self.prices.price_weight(at_s)
        if abs(weight - job.priced) > self.settings.reprice * job.priced:
            job.set_price_weight(weight)
        elif not force and (job.plan is None or at_s < job.plan_until_s):
            return []
        return self._offer_target(job, at_s)

    def _offer_target(self, job: JobController, at_s: float) -> list[SetPowerLimit]:
        """The limit that the job should have now, offered to all its holdings."""
        aim = job.target_limit(self.prices, at_s)
        limit_w, job.reason = aim.limit_w, aim.reason
        known = self.holding_statuses(job)
        refusing: set[str] = set()
        if job.pinned_w is not None and at_s >= job.pinned_until_s:
            job.pinned_w = None
        if job.pinned_w is not None:
            stuck = {holding.name: one.limit_w for holding, one in known.items() if one.given_up}
            refusing = set(stuck)
            least_w = min(stuck.values(), default=limit_w)
            if self._is_short(job):  # the rest makes up for what cannot be lowered
                limit_w = min([limit_w, *(one.limit_w for one in known.values())])
            elif least_w <= limit_w or job.ceiling_w is None or least_w <= job.ceiling_w:
                limit_w = least_w
            job.reason = "a holding refuses another limit, and the slowest paces the rest"
        job.target_w = limit_w
        commands = self._offer_limit(job, limit_w, refusing)
        if commands is None:
            self._waiting[job.began.name] = None
            commands = []
            if not any(one.under_way for one in known.values()):
                # A gang that is uneven and has no room comes down to its least: that frees watts and costs no time.
                least_w = min([limit_w, *(one.limit_w for one in known.values())])
                commands = self._offer_limit(job, least_w, refusing) or []
        else:
            self._waiting.pop(job.began.name, None)
        return self._sent(commands)

    def _is_short(self, job: JobController) -> bool:
        """Whether a budget that the job draws from is exceeded, or will be."""
        lacks = self.changes.shortfalls()
        places = {
            at for one in job.began.holdings for at in self.budgets.chain_indices(self._known_budgets(one).budgets)
        }
        return any(self.budgets.all[at].name in lacks for at in places)

    def _offer_limit(self, job: JobController, limit_w: float, refusing: set[str]) -> list[LimitCommand] | None:
        settings = {name: one for name, one in job.holding_settings(limit_w).items() if name not in refusing}
        return self.changes.offer_settings(settings)

    def _retry_waiting(self, at_s: float) -> list[SetPowerLimit]:
        """Jobs that wait for room, a few of many; those that wait on go to the end."""
        made = []
        for name in list(self._waiting)[:_LOOKS]:
            self._waiting.pop(name)
            made += self._offer_target(self.jobs[name], at_s)
        return made

    def _sent(self, commands: Iterable[LimitCommand]) -> list[SetPowerLimit]:
        made = []
        for command in commands:
            owner = self._owner[command.holding]
            self._numbers[command.number] = command.holding
            made.append(
                SetPowerLimit(
                    owner, command.holding, command.node, command.limit_w, command.number, self.jobs[owner].reason
                )
            )
        return made

    def preview_budgets(
        self, at_s: float, budgets: BudgetTree, lowest: Mapping[str, tuple[str, ...]]
    ) -> BudgetAllocation:
        """What jobs would share under other budgets, of which each node names the lowest; nothing is changed."""
        return preview_limits(self._problem(at_s, budgets, lambda holding: lowest.get(holding.node, ())))

    def _problem(
        self, at_s: float, budgets: BudgetTree, lowest: Callable[[Holding], tuple[str, ...]]
    ) -> AllocationTask:
        jobs = ((job, self.holding_statuses(job)) for job in self.jobs.values())
        return allocation_task(jobs, budgets, lowest, prices=self.prices, at_s=at_s, want=self.settings.want)
