"""Rolls out power limits so that no budget is exceeded at any moment of the change.

Until a command is confirmed a holding claims the larger of its old and new limit, so decreases go first.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_controller.objectives.power.budgets import BudgetTree
from eelgrid_controller.objectives.power.errors import BudgetTooSmall, InvalidBudget

TRIES_MOST = 3
_HAIR_W = 1e-6
_SAME_W = 0.5
_LINE_LOOKS = 32  # at waiting raises, an event and budget


class LimitSetting(NamedTuple):
    """A limit on all GPUs of a holding, and the watts that it is charged with."""

    limit_w: float  # of each GPU
    charge_w: float  # of all of them together


@dataclass(frozen=True, slots=True)
class Holding:
    """GPUs of one job on one node."""

    name: str
    node: str
    gpus: int
    budgets: tuple[str, ...]  # the lowest they draw from
    restored_w: float | None = None  # charge of what the node puts back when its lease ends; None if it never does


class LimitCommand(NamedTuple):
    """Set this limit on all GPUs of a holding, read it back, and answer with the number."""

    holding: str
    node: str
    limit_w: float
    number: int


class CommandConfirmed(NamedTuple):
    """What was read back from the GPUs after a command."""

    number: int
    limit_w: float


class CommandFailed(NamedTuple):
    """A command that came to nothing; what the GPUs have now, or None where it could not be read."""

    number: int
    limit_w: float | None


class RolloutNodeLost(NamedTuple):
    """Nothing is known of the node from now on."""

    node: str


class RolloutLeaseEnded(NamedTuple):
    """A lost node has put back what it found."""

    node: str


class RolloutNodeReturned(NamedTuple):
    """The node is there again; limits of each GPU by holding, as read back."""

    node: str
    limits_w: Mapping[str, float]


RolloutEvent = CommandConfirmed | CommandFailed | RolloutNodeLost | RolloutLeaseEnded | RolloutNodeReturned


class HoldingStatus(NamedTuple):
    """How a holding stands."""

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
            and abs(self.now.limit_w - self.wanted.limit_w) <= _SAME_W
        )

    @property
    def idle(self) -> bool:
        """Whether it could be commanded and should be."""
        return not self.done and not self.lost and self.asked is None and self.tries < TRIES_MOST


class LimitRollout:
    """One fleet's limits on their way; events in, commands out."""

    def __init__(self, budgets: BudgetTree, holdings: Iterable[Holding], now: Mapping[str, LimitSetting]) -> None:
        """`now` is what was read back of each holding, by name; nothing else is wanted yet.

        Raises BudgetRefused for a holding twice, without a setting, or in no budget.
        """
        self._budgets = budgets
        self._held: dict[str, _HoldingState] = {}
        self._by_number: dict[int, str] = {}
        self._numbers = 0
        self._room = budgets.available_w()
        self._claims = [0.0] * len(budgets)
        self._lines: dict[int, deque[_HoldingState]] = {}  # of raises that wait, by the budget that lacks room
        for holding in holdings:
            self.add_holding(holding, now.get(holding.name))

    def add_holding(self, holding: Holding, now: LimitSetting | None) -> None:
        """One more holding as it was read back; its claim counts from now on. Raises BudgetRefused as above."""
        if holding.name in self._held or now is None or holding.gpus < 1:
            raise InvalidBudget(
                "holding",
                f"{holding.name!r} comes twice, has no GPU, or nothing was read back of it",
                "name each once, with its GPUs and its present setting",
            )
        held = _HoldingState(holding, self._budgets.chain_indices(holding.budgets), now, now)
        self._held[holding.name] = held
        self._add(held, held.claim_w)

    def remove_holding(self, name: str) -> list[LimitCommand]:
        """A holding that is no more: its claim ends, and what waited for its watts may go."""
        held = self._held.pop(name)
        self._by_number.pop(held.number, None)
        self._add(held, -held.claim_w)
        for line in self._lines.values():
            if held in line:
                line.remove(held)
        return self._release_waiting(held.places)

    def set_budgets(self, budgets: BudgetTree, drawn: Mapping[str, tuple[str, ...]]) -> list[LimitCommand]:
        """Another tree, with the lowest budgets of each holding; what is under way stays so.

        Claims may be more than a new room: only lowerings go until they fit. Raises BudgetRefused, nothing changed,
        for a budget that is none.
        """
        places = {name: budgets.chain_indices(drawn[name]) for name in self._held}
        self._budgets, self._room, self._claims = budgets, budgets.available_w(), [0.0] * len(budgets)
        self._lines.clear()
        for name, held in self._held.items():
            held.places = places[name]
            self._add(held, held.claim_w)
        return [command for held in self._held.values() for command in self._try_command(held)]

    def offer_settings(self, settings: Mapping[str, LimitSetting]) -> list[LimitCommand] | None:
        """Settings of one gang, taken together; None, nothing changed, where a raise among them cannot go now.

        A raise goes when every budget has room for all of it and no GPU of the gang is lost or being changed. What
        others want is not looked at, and lowerings are taken whatever a budget lacks.
        """
        more: dict[int, float] = {}
        for name, setting in settings.items():
            held = self._held[name]
            rise = setting.charge_w - held.claim_w
            for place in held.places if rise > _HAIR_W else ():
                more[place] = more.get(place, 0.0) + rise
            least_w = held.now.limit_w if held.asked is None else min(held.now.limit_w, held.asked.limit_w)
            busy = held.lost or any(self._held[one].asked is not None for one in settings)
            if busy and setting.limit_w > least_w + _SAME_W:
                return None
        if any(self._claims[place] + rise > self._room[place] + _HAIR_W for place, rise in more.items()):
            return None
        for name, setting in settings.items():
            self._set_desired(self._held[name], setting)
        return [command for name in settings for command in self._try_command(self._held[name])]

    def request_settings(
        self, settings: Mapping[str, LimitSetting], budgets: BudgetTree | None = None
    ) -> list[LimitCommand]:
        """New settings, by holding, and new watts for the same budgets; what else was wanted stays so.

        Raises BudgetTooSmall, and changes nothing, where what is wanted and what cannot be changed would not fit.
        """
        room = self._room if budgets is None else self._new_room(budgets)
        unknown = [name for name in settings if name not in self._held]
        if unknown:
            raise InvalidBudget("holding", f"{unknown[0]!r} is none", "want settings of holdings that were given")
        totals: list[list[float]] = [[] for _ in room]
        for name, held in self._held.items():
            fixed = held.lost or (held.tries >= TRIES_MOST and name not in settings)
            charge_w = held.claim_w if fixed else settings.get(name, held.wanted).charge_w
            for place in held.places:
                totals[place].append(charge_w)
        lacks = [math.fsum(charges) - watts for charges, watts in zip(totals, room, strict=True)]
        if lacks and max(lacks) > _HAIR_W:
            worst = lacks.index(max(lacks))
            raise BudgetTooSmall(self._budgets.all[worst].name, lacks[worst])
        self._room = room
        for name, setting in settings.items():
            self._set_desired(self._held[name], setting)
        self._lines.clear()
        idle = [held for held in self._held.values() if held.idle]
        idle.sort(key=lambda held: held.wanted.charge_w > held.claim_w)  # lowerings first
        return [command for held in idle for command in self._try_command(held)]

    def handle_event(self, event: RolloutEvent) -> list[LimitCommand]:
        """What is known after an event, and the commands that it makes possible."""
        match event:
            case CommandConfirmed(number, limit_w) | CommandFailed(number, limit_w):
                name = self._by_number.pop(number, None)
                return [] if name is None else self._on_command_end(self._held[name], limit_w)
            case RolloutNodeLost(node):
                for held in self._on_node(node):
                    held.lost = True
                    self._by_number.pop(held.number, None)
                return []
            case RolloutLeaseEnded(node):
                for held in self._on_node(node):
                    if held.lost and not held.restored:
                        self._change(held, restored=True)
                return []
            case RolloutNodeReturned(node, limits_w):
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

    def confirmed_settings(self) -> dict[str, LimitSetting]:
        """What was last read back of each holding."""
        return {name: held.now for name, held in self._held.items()}

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
        return {name: lack for name, lack in lacks if lack > _HAIR_W}

    def _new_room(self, budgets: BudgetTree) -> list[float]:
        if [(one.name, one.parent) for one in budgets.all] != [(one.name, one.parent) for one in self._budgets.all]:
            raise InvalidBudget("budgets", "they are others", "change watts here, and begin anew with another tree")
        return budgets.available_w()

    def _set_desired(self, held: _HoldingState, setting: LimitSetting) -> None:
        """What is wanted of a holding; a charge that was measured anew for what it has counts at once."""
        if abs(setting.limit_w - held.wanted.limit_w) > _SAME_W or held.tries >= TRIES_MOST:
            held.tries = 0
        held.wanted = setting
        if abs(setting.limit_w - held.now.limit_w) <= _SAME_W and setting.charge_w > held.now.charge_w:
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

    def _on_command_end(self, held: _HoldingState, limit_w: float | None) -> list[LimitCommand]:
        """A command came to an end; without a reading the holding may have any of what it was commanded."""
        assert held.asked is not None, "it was commanded"
        if limit_w is None:
            held.tries += 1
            self._change(held, unread_w=held.claim_w, asked=None)
            return self._try_command(held)
        if abs(limit_w - held.asked.limit_w) > _SAME_W:
            held.tries += 1
        return self._on_limit_confirmed(held, limit_w)

    def _on_limit_confirmed(self, held: _HoldingState, limit_w: float) -> list[LimitCommand]:
        """What was read back is what there is; commands that the watts set free make possible."""
        for setting in (held.asked, held.now, held.wanted):
            if setting is not None and abs(setting.limit_w - limit_w) <= _SAME_W:
                break
        else:
            setting = LimitSetting(limit_w, held.holding.gpus * limit_w)
        self._change(held, now=setting, asked=None, unread_w=0.0, restored=False)
        return [*self._try_command(held), *self._release_waiting(held.places)]

    def _on_node(self, node: str) -> list[_HoldingState]:
        return [held for held in self._held.values() if held.holding.node == node]

    def _try_command(self, held: _HoldingState) -> list[LimitCommand]:
        """The command to what is wanted, if there is one to give and room for it; else it gets in line."""
        if not held.idle:
            return []
        lacking = self._lacking(held)
        if lacking is not None:
            self._lines.setdefault(lacking, deque()).append(held)
            return []
        self._numbers += 1
        self._change(held, asked=held.wanted, number=self._numbers)
        self._by_number[self._numbers] = held.holding.name
        return [LimitCommand(held.holding.name, held.holding.node, held.wanted.limit_w, self._numbers)]

    def _lacking(self, held: _HoldingState) -> int | None:
        """A budget without room for what is wanted; none for a lowering, which claims no more."""
        more = held.wanted.charge_w - held.claim_w
        if more <= 0.0:
            return None
        return next((at for at in held.places if self._claims[at] + more > self._room[at] + _HAIR_W), None)

    def _release_waiting(self, places: Iterable[int]) -> list[LimitCommand]:
        """Raises that waited at these budgets and fit now; a few of a long line, all where nothing else is under way."""
        made = []
        for place in places:
            line = self._lines.setdefault(place, deque())
            for _ in range(min(len(line), _LINE_LOOKS if self._by_number else len(line))):
                held = line.popleft()
                if held.idle and self._lacking(held) == place:
                    line.append(held)
                else:
                    made += self._try_command(held)
        return made
