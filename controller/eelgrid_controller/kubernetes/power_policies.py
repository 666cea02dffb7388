"""PowerPolicy objects together: what the core's policy becomes of them, and what each of them comes to.

Owns the rule by which several objects make one policy, and how a field is taken over from
the operator and given back. Must not know the API, watts or time.

Theory. Objects are the truth for the fields that they name, `eelctl policy` for all others.
Of one place the tightest budget counts; of any other field that two objects name differently
the oldest object's value does. So the outcome is a function of the objects alone, in whatever
order they come.

A field that no object named before is taken over: what the policy said of it is kept in a
record, and put back when no object names it any more. A value that nobody here has put there
is an operator's, who changed it in between: it becomes what is put back, and the objects'
value is put in force again. The record says both values while one replaces the other, so it
holds whether or not the change was carried out. Records lie where the policy lies, with the
controller's own data: they say what was done to that policy.

An object that cannot be read leaves what it said last in force, while it is there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.policy_fields import Aim, Value, place_of, values_of, with_values
from eelgrid_controller.kubernetes.power_orders import Order, order_of
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import OBJECTIVES, Policy

__all__ = ["ORDERS_MOST", "Decision", "Memory", "PowerPolicies", "Record", "Standing"]

ORDERS_MOST = 256
_FIELDS_MOST = {"pool/": 1_000, "budget/": 100_000}


class Record(NamedTuple):
    """A field that objects hold: what it was before them, and which of its values are theirs."""

    former: Value
    puts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """What has to outlive a process: the records, and of each object the last that could be read."""

    records: Mapping[str, Record] = field(default_factory=dict)
    good: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # uid -> the object, as far as it is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one object comes to; `order` is what it is taken for, None where nothing of it was ever read."""

    found: Mapping[str, Any]
    order: Order | None
    fault: str = ""  # why what it says now is not taken
    values: Mapping[str, Value] = field(default_factory=dict)  # all that it wants, by field
    held: frozenset[str] = frozenset()  # fields in force as it wants them
    tighter: Mapping[str, str] = field(default_factory=dict)  # places of which another object's budget is tighter
    beaten: Mapping[str, str] = field(default_factory=dict)  # other fields, by the name of the older object


class Decision(NamedTuple):
    """What is to be put in force, what is to be remembered before and after that, and how each object stands."""

    policy: Policy
    ahead: Memory
    after: Memory
    standings: tuple[Standing, ...]


class PowerPolicies:
    """Reads objects once each; all else is a function of what is given."""

    def __init__(self, violations: Callable[[Policy], Sequence[Violation]]) -> None:
        """`violations` says what contradicts itself in a policy."""
        self._violations = violations
        self._read: dict[tuple[str, int], Order | str] = {}

    def decide(
        self,
        objects: Iterable[Mapping[str, Any]],
        nodes: Mapping[str, Mapping[str, str]],
        policy: Policy,
        memory: Memory,
    ) -> Decision:
        """What follows from these objects, the labels of these nodes, the policy in force and what is remembered."""
        known = [one for one in objects if not one["metadata"].get("deletionTimestamp")]
        standings = [self._standing(one, nodes, memory) for one in sorted(known, key=_age)]
        self._read = {key: self._read[key] for key in map(_version, known) if key in self._read}
        values, standings = _merged(_bounded(standings))
        wanted, ahead, after = _settled(policy, values, memory.records)
        good = {one.order.uid: _brief(one, memory) for one in standings if one.order is not None}
        return Decision(wanted, Memory(ahead, good), Memory(after, good), tuple(standings))

    def _standing(self, found: Mapping[str, Any], nodes: Mapping[str, Mapping[str, str]], memory: Memory) -> Standing:
        order, fault = self._order(found), ""
        if isinstance(order, str):
            fault, last = order, memory.good.get(found["metadata"]["uid"])
            order = self._order(last) if last is not None else ""
        if isinstance(order, str):
            return Standing(found=found, order=None, fault=fault)
        return Standing(found=found, order=order, fault=fault, values=order.on(nodes))

    def _order(self, found: Mapping[str, Any]) -> Order | str:
        """The object's order, or why there is none."""
        key = _version(found)
        if key not in self._read:
            self._read[key] = self._fresh(found)
        return self._read[key]

    def _fresh(self, found: Mapping[str, Any]) -> Order | str:
        try:
            order = order_of(found)
        except KubernetesUnreadable as error:
            return str(error)
        broken = self._violations(with_values(Policy(), order.values))
        return str(broken[0].under("spec")).replace("spec.policy.", "spec.") if broken else order


def _bounded(standings: Sequence[Standing]) -> list[Standing]:
    """Objects, the oldest first, as far as the policy has room for them."""
    names: dict[str, set[str]] = {kind: set() for kind in _FIELDS_MOST}
    found = []
    for number, one in enumerate(standings):
        fault = f"is one too many; {ORDERS_MOST} objects are read, the oldest" if number >= ORDERS_MOST else ""
        for kind, most in _FIELDS_MOST.items():
            more = {key for key in one.values if key.startswith(kind)}
            if not fault and len(names[kind] | more) > most:
                fault = f"makes the objects name more than {most} {kind[:-1]}s together; name fewer"
        if fault:
            found.append(Standing(found=one.found, order=None, fault=fault))
            continue
        for kind, known in names.items():
            known.update(key for key in one.values if key.startswith(kind))
        found.append(one)
    return found


def _merged(standings: Sequence[Standing]) -> tuple[dict[str, Value], list[Standing]]:
    """The value of each field that any object names, and how each object fares; the oldest come first."""
    values: dict[str, Value] = {}
    of: dict[str, Standing] = {}
    for one in standings:
        for key, value in one.values.items():
            before = values.get(key)
            if key not in values or (isinstance(value, float) and isinstance(before, float) and value < before):
                values[key], of[key] = value, one
    told = []
    for one in standings:
        lost = {key: _name(of[key]) for key, value in one.values.items() if value != values[key]}
        told.append(
            replace(
                one,
                held=frozenset(one.values.keys() - lost.keys()),
                tighter={key: name for key, name in lost.items() if place_of(key) is not None},
                beaten={key: name for key, name in lost.items() if place_of(key) is None},
            )
        )
    return values, told


def _settled(
    policy: Policy, values: Mapping[str, Value], records: Mapping[str, Record]
) -> tuple[Policy, dict[str, Record], dict[str, Record]]:
    """The policy with these values and with what was before where there is none any more; records before and after."""
    now = values_of(policy)
    changed: dict[str, Value] = {}
    ahead: dict[str, Record] = {}
    after: dict[str, Record] = {}
    for key, value in values.items():
        current, record = now.get(key), records.get(key)
        if record is not None and any(_is_same(current, put) for put in record.puts):
            former, puts = record.former, (value,) if _is_same(current, value) else (current, value)
        else:
            former, puts = _kept(current), (value,)
        ahead[key], after[key] = Record(former, puts), Record(former, (value,))
        if not _is_same(current, value):
            changed[key] = value
    for key, record in records.items():
        if key in values:
            continue
        ahead[key] = record
        current = now.get(key)
        if any(_is_same(current, put) for put in record.puts) and not _is_same(current, record.former):
            changed[key] = _kept(record.former)
    return (with_values(policy, changed) if changed else policy), ahead, after


def _is_same(one: Value, other: Value) -> bool:
    # What a named objective weighs may differ between versions of the controller.
    return _kept(one) == _kept(other)


def _kept(value: Value) -> Value:
    if isinstance(value, Aim) and value.objective in OBJECTIVES:
        return Aim(value.objective, OBJECTIVES[value.objective])
    return value


def _brief(one: Standing, memory: Memory) -> Mapping[str, Any]:
    """What was read last of an object that is good, by itself or by what it said before."""
    metadata = one.found["metadata"]
    if one.fault:
        return memory.good[metadata["uid"]]
    kept = {key: metadata[key] for key in ("uid", "name", "creationTimestamp", "generation") if key in metadata}
    return {"metadata": kept, "spec": one.found.get("spec") or {}}


def _age(found: Mapping[str, Any]) -> tuple[str, str, str]:
    metadata = found["metadata"]
    # Texts of one form and one zone: their order is that of time.
    return str(metadata.get("creationTimestamp") or ""), str(metadata["name"]), str(metadata["uid"])


def _version(found: Mapping[str, Any]) -> tuple[str, int]:
    metadata = found["metadata"]
    return str(metadata["uid"]), int(metadata.get("generation") or 0)


def _name(one: Standing) -> str:
    return str(one.found["metadata"]["name"])
