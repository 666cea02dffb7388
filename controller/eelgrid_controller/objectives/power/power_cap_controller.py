"""Controls the power limits of all managed jobs within every budget.

`PowerCapController` offers the target limit of each job to `LimitRollout` for the whole gang, keeps raises that have no
room waiting, and asks for a new budget allocation when desired limits, budgets or prices change. `LimitRollout` changes
limits so that no budget is exceeded at any moment: until a command is confirmed a holding claims the larger of its old
and new limit, so decreases go first.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.power.bandit import MissedWindowReason
from eelgrid_controller.objectives.power.budget_allocation import (
    AllocationRequest,
    AllocationTask,
    BudgetAllocation,
    BudgetShortfall,
    preview_limits,
    solve_allocation,
)
from eelgrid_controller.objectives.power.budgets import (
    ROUNDING_W,
    BudgetTooSmall,
    BudgetTree,
    Holding,
    InvalidBudget,
    LimitSetting,
)
from eelgrid_controller.objectives.power.control_events import (
    ControlSettings,
    JobMeasured,
    JobStarted,
    LimitConfirmed,
    LimitEvent,
    LimitFailed,
    NodeLeaseExpired,
    NodeReachable,
    NodeUnreachable,
    SetPowerLimit,
    SolveAllocation,
)
from eelgrid_controller.objectives.power.job_controller import JobController, start_job
from eelgrid_controller.objectives.power.limit_allocation import AllocationGoal
from eelgrid_controller.objectives.power.power_model import is_higher_limit, is_same_limit
from eelgrid_controller.objectives.power.tariffs import EnergyTariff, PriceHorizon

TRIES_MOST = 3
_LINE_LOOKS = 32  # at waiting raises, an event and budget


class HoldingStatus(NamedTuple):
    """The state of a holding."""

    limit_w: float  # last read back
    claim_w: float
    under_way: bool
    lost: bool
    given_up: bool


@dataclass(slots=True)
class _HoldingState:
    """What is known of a holding."""

    holding: Holding
    places: tuple[int, ...]  # of its budgets
    now: LimitSetting
    wanted: LimitSetting
    asked: LimitSetting | None = None
    number: int = 0  # of the command under way
    unread_w: float = 0.0  # the largest charge it may have since it was last read
    tries: int = 0  # failed, of what is wanted
    lost: bool = False
    restored: bool = False

    @property
    def claim_w(self) -> float:
        claim = max(self.now.charge_w, self.unread_w, 0.0 if self.asked is None else self.asked.charge_w)
        if self.restored and self.holding.restored_w is not None:
            return max(claim, self.holding.restored_w)
        return claim

    @property
    def done(self) -> bool:
        """Whether it is known to have what is wanted."""
        return (
            not self.lost
            and self.asked is None
            and self.unread_w == 0.0
            and is_same_limit(self.now.limit_w, self.wanted.limit_w)
        )

    @property
    def idle(self) -> bool:
        """Whether it could be commanded and should be."""
        return not self.done and not self.lost and self.asked is None and self.tries < TRIES_MOST


class LimitRollout:
    """Changes the limits of a fleet: events in, instructions out."""

    def __init__(self, budgets: BudgetTree, holdings: Iterable[Holding], now: Mapping[str, LimitSetting]) -> None:
        """`now` is what was read back of each holding, by name; nothing else is wanted yet.

        Raises InvalidBudget for a holding twice, without a setting, or in no budget.
        """
        self._budgets = budgets
        self._held: dict[str, _HoldingState] = {}
        self._by_number: dict[int, str] = {}
        self._numbers = 0
        self._room = budgets.available_w()
        self._claims = [0.0] * len(budgets)
        self._uncounted: Mapping[str, float] = {}  # watts by budget
        # Raises that wait, in order and by holding, by the budget that lacks room.
        self._lines: dict[int, dict[str, _HoldingState]] = {}
        for holding in holdings:
            self.add_holding(holding, now.get(holding.name))

    def add_holding(self, holding: Holding, now: LimitSetting | None, planned_w: float | None = None) -> None:
        """One more holding as it was read back; its claim counts from now on. Raises InvalidBudget as above.

        A planned limit that was not read back is as one that was commanded without an answer.
        """
        if holding.name in self._held or now is None or holding.gpus < 1:
            raise InvalidBudget(
                "holding",
                f"{holding.name!r} comes twice, has no GPU, or nothing was read back of it",
                "name each once, with its GPUs and its present setting",
            )
        held = _HoldingState(holding, self._budgets.chain_indices(holding.budgets), now, now)
        if planned_w is not None and not is_same_limit(planned_w, now.limit_w):
            held.unread_w = holding.gpus * planned_w
        self._held[holding.name] = held
        self._add(held, held.claim_w)

    def remove_holding(self, name: str) -> list[SetPowerLimit]:
        """Removes a holding: its claim ends, and raises that waited for its watts may go."""
        held = self._held.pop(name)
        self._by_number.pop(held.number, None)
        self._add(held, -held.claim_w)
        for line in self._lines.values():
            line.pop(name, None)
        return self._release_waiting(held.places)

    def set_budgets(self, budgets: BudgetTree, drawn: Mapping[str, tuple[str, ...]]) -> list[SetPowerLimit]:
        """Another tree, with the lowest budgets of each holding; what is under way stays so.

        Claims may be more than a new room: only lowerings go until they fit. Raises InvalidBudget, nothing changed,
        for a budget that is none.
        """
        places = {name: budgets.chain_indices(drawn[name]) for name in self._held}
        self._budgets, self._room, self._claims = budgets, budgets.available_w(), [0.0] * len(budgets)
        self._lines.clear()
        for name, held in self._held.items():
            held.places = places[name]
            self._add(held, held.claim_w)
        return [command for held in self._held.values() for command in self._try_command(held)]

    def set_uncounted(self, watts: Mapping[str, float]) -> list[SetPowerLimit]:
        """Watts by budget that are in no claim yet, and that no raise may use; those that wait for fewer may go."""
        before, self._uncounted = self._uncounted, watts
        return self._release_waiting(
            at for at, one in enumerate(self._budgets.all) if watts.get(one.name, 0.0) < before.get(one.name, 0.0)
        )

    def offer_settings(self, settings: Mapping[str, LimitSetting]) -> list[SetPowerLimit] | None:
        """Settings of one gang, taken together; None, nothing changed, where a raise among them cannot go now.

        A raise goes when every budget has room for all of it and no GPU of the gang is lost or being changed. What
        others want is not looked at, and lowerings are taken whatever a budget lacks.
        """
        more: dict[int, float] = {}
        for name, setting in settings.items():
            held = self._held[name]
            rise = setting.charge_w - held.claim_w
            for place in held.places if rise > ROUNDING_W else ():
                more[place] = more.get(place, 0.0) + rise
            least_w = held.now.limit_w if held.asked is None else min(held.now.limit_w, held.asked.limit_w)
            busy = held.lost or any(self._held[one].asked is not None for one in settings)
            if busy and is_higher_limit(setting.limit_w, least_w):
                return None
        if any(self._lacks(place, rise) for place, rise in more.items()):
            return None
        for name, setting in settings.items():
            self._set_desired(self._held[name], setting)
        return [command for name in settings for command in self._try_command(self._held[name])]

    def request_settings(
        self, settings: Mapping[str, LimitSetting], budgets: BudgetTree | None = None
    ) -> list[SetPowerLimit]:
        """New settings, by holding, and new watts for the same budgets; what else was wanted stays so.

        Raises BudgetTooSmall, and changes nothing, where what is wanted and what cannot be changed would not fit.
        """
        room = self._room if budgets is None else self._new_room(budgets)
        unknown = [name for name in settings if name not in self._held]
        if unknown:
            raise InvalidBudget("holding", f"{unknown[0]!r} is unknown", "set limits of known holdings only")
        totals: list[list[float]] = [[] for _ in room]
        for name, held in self._held.items():
            fixed = held.lost or (held.tries >= TRIES_MOST and name not in settings)
            charge_w = held.claim_w if fixed else settings.get(name, held.wanted).charge_w
            for place in held.places:
                totals[place].append(charge_w)
        lacks = [math.fsum(charges) - watts for charges, watts in zip(totals, room, strict=True)]
        if lacks and max(lacks) > ROUNDING_W:
            worst = lacks.index(max(lacks))
            raise BudgetTooSmall(self._budgets.all[worst].name, lacks[worst])
        self._room = room
        for name, setting in settings.items():
            self._set_desired(self._held[name], setting)
        self._lines.clear()
        idle = [held for held in self._held.values() if held.idle]
        idle.sort(key=lambda held: held.wanted.charge_w > held.claim_w)  # lowerings first
        return [command for held in idle for command in self._try_command(held)]

    def handle_event(self, event: LimitEvent) -> list[SetPowerLimit]:
        """What is known after an event, and the commands that it makes possible."""
        match event:
            case LimitConfirmed(_, number, limit_w) | LimitFailed(_, number, limit_w):
                name = self._by_number.pop(number, None)
                return [] if name is None else self._on_command_end(self._held[name], limit_w)
            case NodeUnreachable(_, node):
                for held in self._on_node(node):
                    held.lost = True
                    self._by_number.pop(held.number, None)
                return []
            case NodeLeaseExpired(_, node):
                for held in self._on_node(node):
                    if held.lost and not held.restored:
                        self._change(held, restored=True)
                return []
            case NodeReachable(_, node, limits_w):
                made = []
                for held in self._on_node(node):
                    if held.lost and held.holding.name in limits_w:
                        held.lost, held.tries = False, 0
                        made += self._on_limit_confirmed(held, limits_w[held.holding.name])
                return made

    def holding_status(self, name: str) -> HoldingStatus:
        """How a holding stands."""
        held = self._held[name]
        return HoldingStatus(
            held.now.limit_w, held.claim_w, held.asked is not None, held.lost, held.tries >= TRIES_MOST
        )

    def claims_w(self) -> dict[str, float]:
        """Watts that each budget may be drawn from at this moment, by name."""
        return {budget.name: max(0.0, claim) for budget, claim in zip(self._budgets.all, self._claims, strict=True)}

    def unfinished_holdings(self) -> tuple[str, ...]:
        """Holdings that are not known to have what is wanted: under way, waiting for room, lost or given up."""
        return tuple(name for name, held in self._held.items() if not held.done)

    def abandoned_holdings(self) -> tuple[str, ...]:
        """Holdings that refused too often; they keep their claim until something else is wanted of them."""
        return tuple(name for name, held in self._held.items() if held.tries >= TRIES_MOST)

    def shortfalls(self) -> dict[str, float]:
        """Watts to make free, by budget, before the leases of lost nodes end, or now where a budget was cut."""
        extra = [0.0] * len(self._claims)
        for held in self._held.values():
            if held.lost and not held.restored and held.holding.restored_w is not None:
                for place in held.places:
                    extra[place] += max(0.0, held.holding.restored_w - held.claim_w)
        lacks = (
            (budget.name, claim + more - room)
            for budget, claim, more, room in zip(self._budgets.all, self._claims, extra, self._room, strict=True)
        )
        return {name: lack for name, lack in lacks if lack > ROUNDING_W}

    def _new_room(self, budgets: BudgetTree) -> list[float]:
        if [(one.name, one.parent) for one in budgets.all] != [(one.name, one.parent) for one in self._budgets.all]:
            raise InvalidBudget(
                "budgets", "have other names or parents", "change only watts here; another tree replaces all budgets"
            )
        return budgets.available_w()

    def _set_desired(self, held: _HoldingState, setting: LimitSetting) -> None:
        """Sets what is wanted of a holding; a new charge for the limit that it has counts at once."""
        if not is_same_limit(setting.limit_w, held.wanted.limit_w) or held.tries >= TRIES_MOST:
            held.tries = 0
        held.wanted = setting
        if is_same_limit(setting.limit_w, held.now.limit_w) and setting.charge_w > held.now.charge_w:
            self._change(held, now=held.now._replace(charge_w=setting.charge_w))

    def _add(self, held: _HoldingState, watts: float) -> None:
        for place in held.places:
            self._claims[place] += watts

    def _change(self, held: _HoldingState, **fields: object) -> None:
        """Any change of a holding's claim goes through here, so that the sums stay right."""
        before = held.claim_w
        for name, value in fields.items():
            setattr(held, name, value)
        self._add(held, held.claim_w - before)

    def _on_command_end(self, held: _HoldingState, limit_w: float | None) -> list[SetPowerLimit]:
        """A command came to an end; without a reading the holding may have any of what it was commanded."""
        assert held.asked is not None, "it was commanded"
        if limit_w is None:
            held.tries += 1
            self._change(held, unread_w=held.claim_w, asked=None)
            return self._try_command(held)
        if not is_same_limit(limit_w, held.asked.limit_w):
            held.tries += 1
        return self._on_limit_confirmed(held, limit_w)

    def _on_limit_confirmed(self, held: _HoldingState, limit_w: float) -> list[SetPowerLimit]:
        """What was read back is what there is; commands that the watts set free make possible.

        What was commanded and is not there may be set yet: its plan still says it, and an agent tries again by itself.
        """
        asked = held.asked
        unread_w = 0.0 if asked is None or is_same_limit(limit_w, asked.limit_w) else asked.charge_w
        for setting in (held.asked, held.now, held.wanted):
            if setting is not None and is_same_limit(setting.limit_w, limit_w):
                break
        else:
            setting = LimitSetting(limit_w, held.holding.gpus * limit_w)
        self._change(held, now=setting, asked=None, unread_w=unread_w, restored=False)
        return [*self._try_command(held), *self._release_waiting(held.places)]

    def _on_node(self, node: str) -> list[_HoldingState]:
        return [held for held in self._held.values() if held.holding.node == node]

    def _try_command(self, held: _HoldingState) -> list[SetPowerLimit]:
        """The command to what is wanted, if there is one to give and room for it; else it gets in line."""
        if not held.idle:
            return []
        lacking = self._lacking(held)
        if lacking is not None:
            self._lines.setdefault(lacking, {})[held.holding.name] = held
            return []
        self._numbers += 1
        self._change(held, asked=held.wanted, number=self._numbers)
        self._by_number[self._numbers] = held.holding.name
        return [SetPowerLimit(held.holding.name, held.holding.node, held.wanted.limit_w, self._numbers)]

    def _lacking(self, held: _HoldingState) -> int | None:
        """A budget without room for what is wanted, in place of what is claimed; none for a lowering.

        A raise that was interrupted claims no more than before, and waits all the same where a budget is passed.
        """
        if held.wanted.charge_w <= held.now.charge_w:
            return None
        more = held.wanted.charge_w - held.claim_w
        return next((at for at in held.places if self._lacks(at, more)), None)

    def _lacks(self, place: int, more_w: float) -> bool:
        """Whether a budget has no room for so many more watts."""
        uncounted_w = self._uncounted.get(self._budgets.all[place].name, 0.0)
        return self._claims[place] + uncounted_w + more_w > self._room[place] + ROUNDING_W

    def _release_waiting(self, places: Iterable[int]) -> list[SetPowerLimit]:
        """Raises that waited at these budgets and fit now; a few of a long line, all where nothing else is under way."""
        made = []
        for place in places:
            line = self._lines.setdefault(place, {})
            for name in list(islice(line, _LINE_LOOKS if self._by_number else len(line))):
                held = line.pop(name)
                if held.idle and self._lacking(held) == place:
                    line[name] = held
                else:
                    made += self._try_command(held)
        return made


ALLOCATION_JOBS = 1000


def allocation_task(
    jobs: Iterable[tuple[JobController, Mapping[Holding, HoldingStatus]]],
    budgets: BudgetTree,
    lowest: Callable[[Holding], tuple[str, ...]],
    *,
    prices: PriceHorizon,
    at_s: float,
    want: AllocationGoal,
) -> AllocationTask:
    """The allocation task of the moment, from jobs and the state of their holdings; `lowest` names a holding's budgets."""
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
    """Controls the limits of all jobs. Methods return instructions, or the reason why an event changes nothing."""

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
            setting = LimitSetting(limit_w, holding.gpus * limit_w)
            self.changes.add_holding(self._known_budgets(holding), setting, event.planned_w)
            self._owner[holding.name] = event.name
        self.jobs[event.name] = job
        if len(self.budgets):
            # Nothing is raised before watts are shared; a limit that was found is a limit that fits.
            job.set_ceiling(min((one for one in event.limits_w if not is_higher_limit(max(held_w), one)), default=None))
            self._urgent |= bool(self.changes.shortfalls())
        self._stale = True
        return [*made, *self._offer_target(job, event.at_s)]

    def end_job(self, name: str) -> list[SetPowerLimit] | str:
        """Forgets a job and frees its watts."""
        job = self.jobs.pop(name, None)
        if job is None:
            return "an end of what is not known"
        self._waiting.pop(name, None)
        commands: list[SetPowerLimit] = []
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

    def confirm_command(self, event: LimitConfirmed | LimitFailed) -> list[SetPowerLimit] | str:
        """An instruction came to an end; an impossible reading counts as no reading."""
        at_s, number, limit_w = event
        name = self._numbers.pop(number, None)
        if name is None:
            return "an answer to what was not asked, or twice"
        if limit_w is not None and not 0.0 < limit_w < 1e9:
            event = LimitFailed(at_s, number, None)
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

    def mark_node_lost(self, event: NodeUnreachable) -> list[SetPowerLimit] | str:
        """Nothing is known of the node: its holdings keep their claims."""
        gone = {one.name for job in self.jobs.values() for one in job.began.holdings if one.node == event.node}
        if not gone:
            return "a node without jobs"
        self.changes.handle_event(event)
        self._numbers = {number: one for number, one in self._numbers.items() if one not in gone}
        self._stale = self._urgent = True  # its lease will end: room has to be made before
        return []

    def mark_lease_ended(self, event: NodeLeaseExpired) -> list[SetPowerLimit] | str:
        """A lost node has put back what it found."""
        if all(one.node != event.node for job in self.jobs.values() for one in job.began.holdings):
            return "a node without jobs"
        self.changes.handle_event(event)
        self._stale = self._urgent = True
        return self._retry_waiting(event.at_s)

    def mark_node_returned(self, event: NodeReachable) -> list[SetPowerLimit] | str:
        """The node reports its limits; holdings that it does not report stay lost."""
        at_s, node, limits_w = event
        reported = {name: limit_w for name, limit_w in limits_w.items() if 0.0 < limit_w < 1e9}
        back = {
            self._owner[name] for name in reported if name in self._owner and self.changes.holding_status(name).lost
        }
        made = self._sent(self.changes.handle_event(NodeReachable(at_s, node, reported)))
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

    def set_uncounted(self, watts: Mapping[str, float]) -> list[SetPowerLimit]:
        """Watts below budgets that are in no claim yet."""
        return self._sent(self.changes.set_uncounted(watts))

    def set_tariff(self, at_s: float, tariff: EnergyTariff | None) -> list[SetPowerLimit]:
        """Other prices."""
        self.prices = PriceHorizon(tariff, self.settings.horizon_s)
        made = []
        for job in self.jobs.values():
            job.plan = None
            made += self._reprice_job(job, at_s, force=True)
        return made

    def on_tick(self, at_s: float) -> list[SetPowerLimit]:
        """What time alone changes: prices, jobs without measurements, limits that may be tried again."""
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
                claims[one.name] + count * limit_w <= watts + ROUNDING_W
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
            job.reason = "a node refuses to change its limit, and the slowest GPU sets the pace of the job"
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

    def _offer_limit(self, job: JobController, limit_w: float, refusing: set[str]) -> list[SetPowerLimit] | None:
        settings = {name: one for name, one in job.holding_settings(limit_w).items() if name not in refusing}
        return self.changes.offer_settings(settings)

    def _retry_waiting(self, at_s: float) -> list[SetPowerLimit]:
        """Jobs that wait for room, a few of many; those that wait on go to the end."""
        made = []
        for name in list(self._waiting)[:_LOOKS]:
            self._waiting.pop(name)
            made += self._offer_target(self.jobs[name], at_s)
        return made

    def _sent(self, commands: Iterable[SetPowerLimit]) -> list[SetPowerLimit]:
        made = []
        for command in commands:
            owner = self._owner[command.holding]
            self._numbers[command.number] = command.holding
            made.append(command._replace(job=owner, reason=self.jobs[owner].reason))
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
