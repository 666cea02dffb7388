"""Which devices resource claims get: for all that wait together, none in conflict, groups whole or not at all.

Pure: owns the choice and the body that is written. Must not know how slices and claims are read or
written, nor which pods wait for them. The API server compares no two claims, so whoever
allocates must be alone; the taint on our devices sees to that.

Theory. Claims that end on one node (of one pod, or shared by pods) are a bundle. A bundle goes to
the first node, by name, that is right for it and has its devices: nodes fill one after another, so GPUs
and nodes stay whole. On a node the best free device is taken for each that is asked for
(`device_pools.py` says which is best), the largest first; where that leads nowhere, others
are tried, a bounded number of times. What a claim may have instead (`firstAvailable`) is tried in its order, over all
nodes each. Within one call nodes only fill, so for each kind of bundle the search goes on where it
ended; a node that had no room for a kind is not looked at again before something on it came free.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, NamedTuple, Protocol

from eelgrid_controller.kubernetes.device_choice import Choice
from eelgrid_controller.kubernetes.device_pools import DRIVER, Offer, Pool, Pools, Result

__all__ = [
    "DEVICES_MOST", "VARIANTS_MOST", "Allocation", "AskedClaim", "Bundle", "Room", "Same", "Unallocated", "Want", "allocate",
    "allocation_body",
]  # fmt: skip

DEVICES_MOST = 32  # of one claim, by the API
VARIANTS_MOST = 64
_VALUES_MOST = 64
_STEPS_MOST = 200


class Want(NamedTuple):
    """Devices for one request: so many that all expressions take, or just these by name."""

    request: str
    driver: str = DRIVER
    choices: tuple[Choice, ...] = ()
    many: int = 1
    devices: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """How many devices."""
        return len(self.devices) or self.many


class Same(NamedTuple):
    """Devices of these requests, or of all where none are named, have one value of an attribute."""

    requests: frozenset[str]
    attribute: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedClaim:
    """One claim. `variants` are what it may have, the first rather than the next.

    `config` is the claim's own, `classes` the name and the config of each request's class: both go into the allocation.
    """

    namespace: str
    name: str
    uid: str
    variants: tuple[tuple[Want, ...], ...]
    same: tuple[Same, ...] = ()
    config: tuple[Mapping[str, Any], ...] = ()
    classes: Mapping[str, tuple[str, tuple[Mapping[str, Any], ...]]] = field(default_factory=dict)
    tolerations: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)  # by request


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Claims that end on one node, on this one where it is named; `group` binds bundles together.

    Bundles of one `kind` are equal for whoever looks for a node; the default is by what they ask for. `token` is for
    whoever made the bundle.
    """

    token: str = ""
    claims: tuple[AskedClaim, ...]
    node_name: str = ""
    group: str = ""
    kind: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Devices of one node, for each claim of a bundle in its order."""

    bundle: Bundle
    node_name: str
    results: tuple[tuple[Result, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unallocated:
    """A bundle that waits, and why."""

    bundle: Bundle
    reason: str


class Room(Protocol):
    """What else decides about a node: rules, CPU, memory, how many pods."""

    def is_right(self, bundle: Bundle, node_name: str) -> bool:
        """Whether the bundle's pods may go there now."""

    def take(self, bundle: Bundle, node_name: str, sign: int) -> None:
        """They go there; with -1 they do not."""


class _Anywhere:
    def is_right(self, bundle: Bundle, node_name: str) -> bool:  # noqa: ARG002
        return True

    def take(self, bundle: Bundle, node_name: str, sign: int) -> None:
        """Nothing is counted."""


def allocate(pools: Pools, bundles: Sequence[Bundle], room: Room | None = None) -> list[Allocation | Unallocated]:
    """An answer for each bundle, in their order; `pools` and `room` are less what was given afterwards."""
    search = _Search(pools, room or _Anywhere())
    groups: dict[str, list[int]] = {}
    for number, bundle in enumerate(bundles):
        groups.setdefault(bundle.group or f"\0{number}", []).append(number)
    answers: dict[int, Allocation | Unallocated] = {}
    for members in groups.values():
        made: list[Allocation] = []
        for number in members:
            answer = search.find(bundles[number])
            answers[number] = answer
            if isinstance(answer, Allocation):
                made.append(answer)
                continue
            search.give_back(made)
            waits = f"{_named(answer.bundle)} of its group has no devices: {answer.reason}"
            answers |= {other: Unallocated(bundle=bundles[other], reason=waits) for other in members if other != number}
            break
    return [answers[number] for number in range(len(bundles))]


class _Search:
    def __init__(self, pools: Pools, room: Room) -> None:
        self._pools = pools
        self._room = room
        self._begin: dict[tuple[Hashable, int], int] = {}

    def find(self, bundle: Bundle) -> Allocation | Unallocated:
        """Devices for a bundle, taken; or why there are none."""
        kind = bundle.kind if bundle.kind is not None else tuple((one.variants, one.same) for one in bundle.claims)
        variants = list(islice(product(*(one.variants for one in bundle.claims)), VARIANTS_MOST))
        for wants in variants[0]:
            if not all(want.number >= 1 for want in wants) or sum(want.number for want in wants) > DEVICES_MOST:
                return Unallocated(bundle=bundle, reason=f"a claim has 1 to {DEVICES_MOST} devices; ask for so many")
        for number, variant in enumerate(variants):
            found = self._over_nodes(bundle, (kind, number), variant)
            if found is not None:
                return found
        where = bundle.node_name or f"any of {len(self._nodes(variants[0]))} nodes"
        return Unallocated(bundle=bundle, reason=f"{_words(variants[0])} not free on {where}")

    def give_back(self, made: Iterable[Allocation]) -> None:
        """What a group gave up is free again, also for those whose search went past it."""
        for one in made:
            for claim in one.bundle.claims:
                self._pools.hold(claim.uid, ())
            self._room.take(one.bundle, one.node_name, -1)
            self._begin.clear()

    def _nodes(self, variant: Sequence[Sequence[Want]]) -> Sequence[str]:
        drivers = [want.driver for wants in variant for want in wants]
        return self._pools.nodes(DRIVER if DRIVER in drivers else drivers[0])

    def _over_nodes(
        self, bundle: Bundle, kind: tuple[Hashable, int], variant: Sequence[Sequence[Want]]
    ) -> Allocation | None:
        if bundle.node_name:
            return self._at(bundle, kind, variant, bundle.node_name)
        nodes = self._nodes(variant)
        for number in range(self._begin.get(kind, 0), len(nodes)):
            self._begin[kind] = number
            found = self._at(bundle, kind, variant, nodes[number])
            if found is not None:
                return found
        self._begin[kind] = len(nodes)
        return None

    def _at(
        self, bundle: Bundle, kind: Hashable, variant: Sequence[Sequence[Want]], node_name: str
    ) -> Allocation | None:
        pools: dict[str, Pool] = {}
        for wants in variant:
            for want in wants:
                pool = self._pools.at(want.driver, node_name)
                if pool is None or kind in pool.full:
                    return None
                pools[want.driver] = pool
        if not self._room.is_right(bundle, node_name):
            return None
        chosen = _choose(pools, bundle.claims, variant)
        if chosen is None:
            # Several drivers may each have room again without the other.
            if len(pools) == 1:
                next(iter(pools.values())).full.add(kind)
            return None
        for claim, results in zip(bundle.claims, chosen, strict=True):
            self._pools.hold(claim.uid, results)
        self._room.take(bundle, node_name, 1)
        return Allocation(bundle=bundle, node_name=node_name, results=chosen)


# One node


class _Need(NamedTuple):
    claim: int
    order: int  # in the claim
    want: Want
    name: str  # one exact device


def _choose(
    pools: Mapping[str, Pool], claims: Sequence[AskedClaim], variant: Sequence[Sequence[Want]]
) -> tuple[tuple[Result, ...], ...] | None:
    """Devices for each claim; the pools are left as they were."""
    needs = [
        _Need(number, order, want, want.devices[step] if want.devices else "")
        for number, wants in enumerate(variant)
        for order, want in enumerate(wants)
        for step in range(want.number)
    ]
    needs.sort(key=lambda one: -_size(pools[one.want.driver], one.want))
    for allowed in islice(_agreements(pools, claims, variant), _VALUES_MOST):
        found: list[tuple[_Need, Offer]] = []
        steps = [_STEPS_MOST]
        is_found = _descend(pools, needs, allowed, found, steps)
        for need, offer in found:
            pools[need.want.driver].take(offer.name, -1)
        if is_found:
            found.sort(key=lambda pair: (pair[0].claim, pair[0].order))
            return tuple(
                tuple(
                    Result(need.want.request, need.want.driver, offer.pool, offer.name)
                    for need, offer in found
                    if need.claim == number
                )
                for number in range(len(claims))
            )
    return None


_Allowed = Callable[[_Need, Offer], bool]


def _descend(
    pools: Mapping[str, Pool], needs: Sequence[_Need], allowed: _Allowed, found: list[tuple[_Need, Offer]],
    steps: list[int],
) -> bool:  # fmt: skip
    """Whether all needs are met; what was taken for them stands in `found` and in the pools."""
    if len(found) == len(needs):
        return True
    need = needs[len(found)]
    pool = pools[need.want.driver]
    every = pool.chosen(need.want.choices)
    fitting = [
        one for one in every if (not need.name or one.name == need.name) and pool.fits(one) and allowed(need, one)
    ]
    is_last = len(found) + 1 == len(needs)
    for offer in [min(fitting, key=pool.order)] if is_last and fitting else sorted(fitting, key=pool.order):
        if steps[0] <= 0:
            return False
        steps[0] -= 1
        pool.take(offer.name)
        found.append((need, offer))
        if _descend(pools, needs, allowed, found, steps):
            return True
        found.pop()
        pool.take(offer.name, -1)
    return False


def _agreements(
    pools: Mapping[str, Pool], claims: Sequence[AskedClaim], variant: Sequence[Sequence[Want]]
) -> Iterator[_Allowed]:
    """Every way in which the devices of claims may agree about attributes; the one of the fullest GPUs first."""
    agreed = [(number, same) for number, claim in enumerate(claims) for same in claim.same]
    if not agreed:
        yield lambda _need, _offer: True
        return
    values: list[list[Any]] = []
    for number, same in agreed:
        offers = [
            (pools[want.driver].order(one), one.seen.attributes[same.attribute])
            for want in variant[number]
            if _covers(same, want)
            for one in pools[want.driver].chosen(want.choices)
            if same.attribute in one.seen.attributes and pools[want.driver].fits(one)
        ]
        values.append(list(dict.fromkeys(value for _, value in sorted(offers, key=lambda pair: pair[0]))))
    for chosen in product(*values):
        rules = list(zip(agreed, chosen, strict=True))
        yield lambda need, offer, rules=rules: all(  # type: ignore[misc]
            number != need.claim or not _covers(same, need.want) or offer.seen.attributes.get(same.attribute) == value
            for (number, same), value in rules
        )


def _covers(same: Same, want: Want) -> bool:
    return not same.requests or want.request in same.requests or want.request.partition("/")[0] in same.requests


def _size(pool: Pool, want: Want) -> int:
    return min((sum(count for _, count in one.takes) for one in pool.chosen(want.choices)), default=0)


def _named(bundle: Bundle) -> str:
    return ", ".join(one.name for one in bundle.claims)


def _words(variant: Sequence[Sequence[Want]]) -> str:
    """What was looked for, for people."""
    parts = []
    for wants in variant:
        for want in wants:
            what = ", ".join(want.devices) or " && ".join(one.text for one in want.choices) or want.driver
            parts.append(what if want.devices else f"{want.many} of [{what}]")
    return " and ".join(parts)[:400]


def allocation_body(asked: AskedClaim, results: Sequence[Result], node_name: str, timestamp: str) -> dict[str, Any]:
    """`status.allocation` of the claim; without the timestamp (RFC 3339) kube-scheduler never binds its pod."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node_name]}]}
    devices: dict[str, Any] = {"results": []}
    for one in results:
        tolerations = asked.tolerations.get(one.request)
        devices["results"].append(one._asdict() | ({"tolerations": list(tolerations)} if tolerations else {}))
    config = list(_config(asked, [one.request for one in results]))
    if config:
        devices["config"] = config
    return {"allocationTimestamp": timestamp, "devices": devices, "nodeSelector": {"nodeSelectorTerms": [term]}}


def _config(asked: AskedClaim, requests: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What drivers are told with the devices, in the order in which kube-scheduler writes it: classes first, each once."""
    by_class: dict[str, list[str]] = {}
    for request in dict.fromkeys(requests):
        if request in asked.classes:
            by_class.setdefault(asked.classes[request][0], []).append(request)
    for some in by_class.values():
        for one in asked.classes[some[0]][1]:
            yield {"source": "FromClass", "requests": some, **one}
    given = {*requests, *(request.partition("/")[0] for request in requests)}
    for one in asked.config:
        if not one.get("requests") or given & set(one["requests"]):
            yield {"source": "FromClaim", **one}
