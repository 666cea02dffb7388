"""A day of changing budgets on a fleet whose nodes fail, and whether any is exceeded at any moment.

Owns the simulated nodes, their failures and the watch. Must not know how the
planner keeps its books: the watch counts what each GPU may have, from what was
sent and what is really set.

A course of levels is announced one after the other. Where the budget falls, the
new limits come first and the new budget holds once all is confirmed or the
failures are charged elsewhere; where it rises, the budget comes first. A command
is done, refused, done or not without an answer, or overtaken by the loss of its
node; a lost node keeps what it has and comes back after a while. With each level
the jobs' weights are drawn anew, so that some rise while others fall. Jobs on a lost
node are charged with all that they may have until it is back.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from bench.powercap.certified import allocate_certified
from bench.powercap.fleet import Fleet, with_level
from eelgrid_controller.objectives.power.budgets import (
    BudgetTooSmall,
    BudgetTree,
    Holding,
    LimitSetting,
    PowerBudgetNode,
)
from eelgrid_controller.objectives.power.control_events import (
    LimitConfirmed,
    LimitFailed,
    NodeReachable,
    NodeUnreachable,
    SetPowerLimit,
)
from eelgrid_controller.objectives.power.limit_allocation import AllocationGoal, AllocationJob, allocate_limits
from eelgrid_controller.objectives.power.power_cap_controller import LimitRollout

__all__ = ["LEVELS", "Counted", "lived_through"]

LEVELS = (0.7, 0.9, 0.6, 0.8, 0.55, 0.75, 0.65, 0.9)
_SAME_W = 0.5


class Counted(NamedTuple):
    """What a day came to."""

    moments: int  # at which every budget was looked at
    exceeded: int  # budgets over, in sum over the moments
    commands: int
    failures: int
    losses: int
    refused: int  # changes of level that failures made impossible, so that the old budget went on
    unfinished: int  # limits that were wrong when every node was back and the last change done


@dataclass
class _World:
    """Nodes as they are."""

    fleet: Fleet
    rng: np.random.Generator
    has: dict[str, float]  # limit by holding
    may: dict[str, set[float]] = field(default_factory=dict)  # what it may have since it was last read
    flight: list[SetPowerLimit] = field(default_factory=list)
    down: dict[str, int] = field(default_factory=dict)  # node: moments until it is back
    commands: int = 0
    failures: int = 0
    losses: int = 0

    def send(self, commands: list[SetPowerLimit]) -> None:
        for command in commands:
            self.may[command.holding].add(command.limit_w)
        self.flight += commands
        self.commands += len(commands)

    def answer(self) -> LimitConfirmed | LimitFailed:
        command = self.flight.pop(int(self.rng.integers(len(self.flight))))
        lucky = self.rng.random()
        if command.node in self.down:
            if lucky < 0.5:  # it arrived before the node was lost
                self.has[command.holding] = command.limit_w
            return LimitConfirmed(0.0, command.number, command.limit_w)  # late, and of the past
        if lucky < 0.9:
            self.has[command.holding] = command.limit_w
            return self._read(command)
        self.failures += 1
        if lucky < 0.94:
            return self._read(command)  # refused: what is read is the old limit
        if lucky < 0.97:
            self.has[command.holding] = command.limit_w
        return LimitFailed(0.0, command.number, None)

    def _read(self, command: SetPowerLimit) -> LimitConfirmed:
        self.may[command.holding] = {self.has[command.holding]}
        return LimitConfirmed(0.0, command.number, self.has[command.holding])


def _name(job: AllocationJob, place: int) -> str:
    return f"{job.name}/{place}"


def _node(job: AllocationJob, place: int) -> str:
    return job.shares[place].budgets[0]


class _AtOnce:
    """Every change sent the moment it is wanted."""

    def __init__(self, _: BudgetTree, holdings: list[Holding], now: dict[str, LimitSetting]) -> None:
        self.nodes = {one.name: one.node for one in holdings}
        self.now = {name: setting.limit_w for name, setting in now.items()}
        self.wanted = dict(self.now)
        self.asked: dict[int, str] = {}
        self.lost: set[str] = set()

    def request_settings(self, settings: dict[str, LimitSetting], _: BudgetTree | None = None) -> list[SetPowerLimit]:
        self.wanted.update({name: setting.limit_w for name, setting in settings.items()})
        return [self._command(name) for name in self.unfinished_holdings() if self.nodes[name] not in self.lost]

    def handle_event(
        self, event: LimitConfirmed | LimitFailed | NodeUnreachable | NodeReachable
    ) -> list[SetPowerLimit]:
        match event:
            case NodeUnreachable(0.0, node):
                self.lost.add(node)
            case NodeReachable(0.0, node, limits_w):
                self.lost.discard(node)
                self.now.update(limits_w)
                return [self._command(name) for name in limits_w if self.now[name] != self.wanted[name]]
            case LimitConfirmed(0.0, number, limit_w) | LimitFailed(0.0, number, limit_w):
                name = self.asked[number]
                if self.nodes[name] not in self.lost:
                    self.now[name] = self.now[name] if limit_w is None else limit_w
                    return [self._command(name)] if self.now[name] != self.wanted[name] else []
        return []

    def _command(self, name: str) -> SetPowerLimit:
        number = len(self.asked) + 1
        self.asked[number] = name
        return SetPowerLimit(name, self.nodes[name], self.wanted[name], number)

    def unfinished_holdings(self) -> tuple[str, ...]:
        return tuple(name for name, limit in self.wanted.items() if self.now[name] != limit)

    def abandoned_holdings(self) -> tuple[str, ...]:
        return ()


class _Day:
    """One course of levels."""

    def __init__(self, fleet: Fleet, seed: int, order: type[LimitRollout | _AtOnce]) -> None:
        self.fleet = fleet
        self.jobs = list(fleet.jobs)
        self.holdings = {
            _name(job, place): (job, share.gpus) for job in fleet.jobs for place, share in enumerate(job.shares)
        }
        self.parents = {budget.name: budget.parent for budget in fleet.budgets.all}
        self.chains = {
            _name(job, place): self._chain(share.budgets)
            for job in fleet.jobs
            for place, share in enumerate(job.shares)
        }
        self.budgets = with_level(fleet, LEVELS[0])
        limits = {
            given.job: given.limit_w
            for given in allocate_certified(fleet.jobs, self.budgets, AllocationGoal.THROUGHPUT).found.given
        }
        has = {name: limits[job.name] for name, (job, _) in self.holdings.items()}
        self.world = _World(fleet, np.random.default_rng(seed), has, {name: {limit} for name, limit in has.items()})
        self.changes = order(
            self.budgets,
            [
                Holding(_name(job, place), _node(job, place), share.gpus, share.budgets)
                for job in fleet.jobs
                for place, share in enumerate(job.shares)
            ],
            {name: self._setting(name, limit) for name, limit in has.items()},
        )
        self.moments = self.exceeded = self.refused = 0

    def _chain(self, lowest: tuple[str, ...]) -> set[str]:
        names: set[str] = set()
        for one in lowest:
            name: str | None = one
            while name is not None:
                names.add(name)
                name = self.parents[name]
        return names

    def _charge_w(self, name: str, limit_w: float) -> float:
        job, gpus = self.holdings[name]
        (drawn,) = (at.power_w / job.curve.gpus for at in job.curve.points if abs(at.limit_w - limit_w) < _SAME_W)
        return gpus * max(limit_w, drawn)

    def _setting(self, name: str, limit_w: float) -> LimitSetting:
        return LimitSetting(limit_w, self._charge_w(name, limit_w))

    def look(self) -> None:
        """Counts what is over, with the most that every GPU may have."""
        drawn = dict.fromkeys(self.parents, 0.0)
        for name, limits in self.world.may.items():
            most = max(self._charge_w(name, limit) for limit in limits)
            for budget in self.chains[name]:
                drawn[budget] += most
        self.moments += 1
        self.exceeded += sum(drawn[budget.name] > budget.limit_w + 1e-3 for budget in self.budgets.all)

    def level(self, level: float) -> None:
        """To a new level: limits first if it falls, budget first if it rises."""
        weights = self.world.rng.choice([1.0, 2.0, 4.0], size=len(self.fleet.jobs))
        self.jobs = [replace(job, weight=float(weight)) for job, weight in zip(self.fleet.jobs, weights, strict=True)]
        wanted = with_level(self.fleet, level)
        rises = wanted.all[0].limit_w >= self.budgets.all[0].limit_w
        if rises:
            self.budgets = wanted
        if not self._divide(wanted):
            self.refused += 1
            return
        self._settle(failing=True)
        if not rises:
            self._settle(failing=False)
            if not self.changes.abandoned_holdings() and not self.world.down:
                self.budgets = wanted
            else:
                self.refused += 1
            self.look()

    def _divide(self, wanted: BudgetTree) -> bool:
        """New limits for the jobs whose nodes are all there; whether there are any that fit."""
        lost = {
            job.name
            for job, _ in self.holdings.values()
            if any(_node(job, place) in self.world.down for place in range(len(job.shares)))
        }
        others = dict.fromkeys(self.parents, 0.0)
        for name, limits in self.world.may.items():
            if self.holdings[name][0].name in lost:
                for budget in self.chains[name]:
                    others[budget] += max(self._charge_w(name, limit) for limit in limits)
        free = [job for job in self.jobs if job.name not in lost]
        left = BudgetTree([PowerBudgetNode(one.name, one.limit_w, one.parent, others[one.name]) for one in wanted.all])
        try:
            given = {one.job: one.limit_w for one in allocate_limits(free, left, AllocationGoal.THROUGHPUT).given}
            self.world.send(
                self.changes.request_settings(
                    {
                        name: self._setting(name, given[job.name])
                        for name, (job, _) in self.holdings.items()
                        if job.name in given
                    },
                    wanted if wanted.all[0].limit_w >= self.budgets.all[0].limit_w else None,
                )
            )
        except BudgetTooSmall:
            return False
        self.look()
        return True

    def _settle(self, *, failing: bool) -> None:
        """Commands meet their fate until none is under way; nodes vanish and come back meanwhile."""
        world = self.world
        while world.flight or world.down:
            if failing and world.rng.random() < 0.01:
                node = f"node{int(world.rng.integers(64))}"
                if node not in world.down:
                    world.down[node] = int(world.rng.integers(1, 60))
                    world.losses += 1
                    world.send(self.changes.handle_event(NodeUnreachable(0.0, node)))
            for node in [name for name, left in world.down.items() if left <= 0 or not world.flight]:
                self._back(node)
            world.down = {node: left - 1 for node, left in world.down.items()}
            if world.flight:
                world.send(self.changes.handle_event(world.answer()))
            self.look()

    def _back(self, node: str) -> None:
        world = self.world
        del world.down[node]
        world.flight = [command for command in world.flight if command.node != node]
        mine = {name: world.has[name] for name in self.holdings if self._is_on(name, node)}
        world.may.update({name: {limit} for name, limit in mine.items()})
        world.send(self.changes.handle_event(NodeReachable(0.0, node, mine)))

    def _is_on(self, name: str, node: str) -> bool:
        job, _ = self.holdings[name]
        return _node(job, int(name.rsplit("/", 1)[1])) == node

    def lived(self) -> Counted:
        for level in LEVELS[1:]:
            self.level(level)
        world = self.world
        return Counted(
            self.moments,
            self.exceeded,
            world.commands,
            world.failures,
            world.losses,
            self.refused,
            len(set(self.changes.unfinished_holdings()) - set(self.changes.abandoned_holdings())),
        )


def lived_through(fleet: Fleet, seed: int, *, at_once: bool = False) -> Counted:
    """One course of levels on a fleet with a tree of budgets."""
    return _Day(fleet, seed, _AtOnce if at_once else LimitRollout).lived()
