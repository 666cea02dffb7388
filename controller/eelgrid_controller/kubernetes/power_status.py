"""The status of a PowerPolicy object: what of it is in force, what is drawn against it, and what its people should know.

Owns the words and the numbers. Must not know how they are written, nor how objects are merged.

Theory. Watts move all the time, and a status that follows them is a write every few seconds
for nobody. So the watts that are shown stay until what is drawn has moved by NOISE of the
budget, or has crossed it. All words are made of the watts that are shown: an equal status
means that there is nothing to say. The status before is read from the object itself, so a
leader that takes over goes on from there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eelgrid_controller.budget_places import CLUSTER, budget_words
from eelgrid_controller.kubernetes.conditions import Conditions
from eelgrid_controller.kubernetes.policy_fields import Aim, Value, field_words, place_of
from eelgrid_controller.kubernetes.power_policies import Standing
from eelgrid_protos.messages import EnergyPrices, PoolMode

__all__ = [
    "ACCEPTED",
    "CONFLICTING",
    "IN_FORCE",
    "NOISE",
    "SHOWN_MOST",
    "WITHIN_BUDGET",
    "Applied",
    "Draw",
    "status_of",
]

ACCEPTED = "Accepted"
IN_FORCE = "InForce"
WITHIN_BUDGET = "WithinBudget"
CONFLICTING = "Conflicting"

NOISE = 0.02
SHOWN_MOST = 256  # budgets and fields
_NAMED_MOST = 5
_SCOPES = {"cluster": "Cluster", "rack": "Rack", "node": "Node"}


class Draw(NamedTuple):
    """What the GPUs of a place draw, of those that were read, and how many were not."""

    power_w: float
    unread: int = 0


class Applied(NamedTuple):
    """The policy in force, and why it is not the one that objects want."""

    revision: int
    limits_w: Mapping[str, float]  # by place
    fault: str = ""


class _Shown(NamedTuple):
    place: str
    limit_w: float  # in force, which another object may have made tighter
    power_w: int | None  # None where nothing was read
    unread: int


def status_of(one: Standing, applied: Applied, draws: Mapping[str, Draw], *, at_ns: int) -> dict[str, Any]:
    """The status of an object now; the same as before where nothing is worth telling."""
    metadata, before = one.found["metadata"], one.found.get("status") or {}
    wanted = {place: value for place, value in _budgets(one).items() if place in applied.limits_w}
    places = sorted(wanted, key=lambda place: (place != CLUSTER, not place.startswith("rack/"), place))
    shown = [_shown(place, applied.limits_w[place], draws.get(place), before) for place in places]
    rows = [_row(found, one, wanted[found.place]) for found in shown[:SHOWN_MOST]]
    generation = int(metadata.get("generation") or 0)
    conditions = Conditions.from_json(before.get("conditions")).only((ACCEPTED, IN_FORCE, WITHIN_BUDGET, CONFLICTING))
    for type_, said in (
        (ACCEPTED, _accepted(one)), (IN_FORCE, _in_force(one, applied)), (CONFLICTING, _conflicting(one)),
        (WITHIN_BUDGET, _within(shown)),
    ):  # fmt: skip
        if said is None:
            conditions = conditions.without(type_)
        else:
            conditions = conditions.set(type_, *said, generation=generation, at_ns=at_ns)
    told: dict[str, Any] = {
        "observedGeneration": generation,
        "revision": applied.revision,
        "inForce": [] if applied.fault else list(_words(one))[:SHOWN_MOST],
        "budgets": rows,
        "conditions": conditions.to_json(),
    }
    if len(shown) > len(rows):
        told["budgetsNotShown"] = len(shown) - len(rows)
    whole = _whole(shown)
    if whole is not None:
        told["powerWatts"], told["headroomWatts"] = whole
    return told


def _budgets(one: Standing) -> dict[str, float]:
    return {
        place: value
        for key, value in one.values.items()
        if (place := place_of(key)) is not None and isinstance(value, float)
    }


def _shown(place: str, limit_w: float, draw: Draw | None, before: Mapping[str, Any]) -> _Shown:
    if draw is None:
        return _Shown(place, limit_w, None, 0)
    power_w = round(draw.power_w)
    last_w = next((row.get("powerWatts") for row in before.get("budgets") or () if _place(row) == place), None)
    if (
        isinstance(last_w, int)
        and abs(last_w - power_w) <= NOISE * limit_w
        and (last_w > limit_w) == (power_w > limit_w)
    ):
        power_w = last_w
    return _Shown(place, limit_w, power_w, draw.unread)


def _place(row: Mapping[str, Any]) -> str:
    scope = str(row.get("scope", "")).lower()
    return CLUSTER if scope == CLUSTER else f"{scope}/{row.get('name', '')}"


def _row(found: _Shown, one: Standing, wanted_w: float) -> dict[str, Any]:
    scope, _, name = found.place.partition("/")
    row: dict[str, Any] = {"scope": _SCOPES[scope], "limitWatts": round(wanted_w)}
    if name:
        row["name"] = name
    if found.limit_w != wanted_w:
        row["inForceWatts"] = round(found.limit_w)
        row["inForceBy"] = next((by for key, by in one.tighter.items() if place_of(key) == found.place), "")
    if found.power_w is not None:
        row["powerWatts"] = found.power_w
        row["headroomWatts"] = round(found.limit_w) - found.power_w
        if found.unread:
            row["unreadGpus"] = found.unread
    return row


def _whole(shown: Sequence[_Shown]) -> tuple[int, int] | None:
    """Watts and headroom of all that the object bounds: of the cluster, else of its racks, else of its nodes."""
    for head in (CLUSTER, "rack/", "node/"):
        level = [one for one in shown if one.place.startswith(head)]
        if level:
            read = [one for one in level if one.power_w is not None]
            drawn_w = sum(one.power_w or 0 for one in read)
            return (drawn_w, round(sum(one.limit_w for one in level)) - drawn_w) if len(read) == len(level) else None
    return None


# What conditions say: status, reason and message.


def _accepted(one: Standing) -> tuple[bool | None, str, str]:
    if one.fault:
        return False, "Invalid", one.fault
    count = len(one.values)
    nodes = sum(key.startswith("budget/node/") for key in one.values)
    if one.order is not None and one.order.selections and not nodes:
        return True, "NoNodeSelected", "is read, and no node has the labels of its node selectors"
    return True, "Valid", f"names {_count(count, 'field')} of the policy"


def _in_force(one: Standing, applied: Applied) -> tuple[bool | None, str, str]:
    if one.order is None:
        return False, "NotAccepted", "no generation of it could be read; see Accepted"
    if applied.fault:
        return False, "NotApplied", applied.fault
    if one.fault:
        return True, "EarlierGeneration", f"generation {one.order.generation} is in force, the last that could be read"
    lost = len(one.values) - len(one.held)
    if not one.values:
        return True, "NothingNamed", "names nothing, so nothing is changed"
    if not one.held:
        return False, "Overruled", "nothing of it is in force; see Conflicting, and budgets in its status"
    if lost:
        return True, "InPart", f"{len(one.held)} of {len(one.values)} fields are in force, {lost} by other objects"
    return True, "Whole", "all that it names is in force"


def _conflicting(one: Standing) -> tuple[bool | None, str, str]:
    if not one.beaten:
        return False, "NoConflict", "no older object names the same field differently"
    named = [f"{field_words(key)} is that of {by}" for key, by in sorted(one.beaten.items())]
    more = f", and {len(named) - _NAMED_MOST} more" if len(named) > _NAMED_MOST else ""
    text = f"{', '.join(named[:_NAMED_MOST])}{more}: the older object counts; name each in one object alone"
    return True, "OlderObjectCounts", text


def _within(shown: Sequence[_Shown]) -> tuple[bool | None, str, str] | None:
    if not shown:
        return None
    over = [one for one in shown if one.power_w is not None and one.power_w > one.limit_w]
    if over:
        worst = max(over, key=lambda one: (one.power_w or 0) - one.limit_w)
        rest = f"; {_count(len(over) - 1, 'other budget')} are passed, too" if len(over) > 1 else ""
        text = f"{budget_words(worst.place)} draws {worst.power_w:,} W of {worst.limit_w:,.0f} W{rest}"
        return False, "Passed", text
    unread = [one for one in shown if one.power_w is None]
    if unread:
        return None, "NotMeasured", f"nothing was read yet below {_count(len(unread), 'budget')}"
    partly = [one for one in shown if one.unread]
    if partly:
        most = max(partly, key=lambda one: one.unread)
        text = f"{_count(most.unread, 'GPU')} of {budget_words(most.place)} are not read: they have no agent, or it is away"
        return None, "PartlyMeasured", text
    least = min(shown, key=lambda one: (one.limit_w - (one.power_w or 0)) / max(one.limit_w, 1.0))
    return True, "Kept", f"the fullest is {budget_words(least.place)}: {least.power_w:,} W of {least.limit_w:,.0f} W"


def _words(one: Standing) -> Iterator[str]:
    """Fields in force that are no budgets, each with its value."""
    for key in sorted(one.held):
        if place_of(key) is None:
            yield f"{field_words(key)}: {_value_words(one.values[key])}"


def _value_words(value: Value) -> str:
    match value:
        case Aim(objective, _):
            return objective
        case PoolMode():
            return value.mode.name.lower() + (", partitioned" if value.partitioned else "")
        case EnergyPrices():
            return f"{value.currency}, {_count(len(value.periods), 'period')} a week, PUE {value.pue:g}"
    return str(value)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
