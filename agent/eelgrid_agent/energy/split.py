"""Splits the joules of one device over one interval among the owners that held and used it.

It takes two or more samples of one device and the energy between the first and the last; it knows no clock.

The energy E of an interval is divided in three, in this order: bare idle (what the board draws with no context, for the
whole interval), context idle (the step that open contexts add, for the share of the interval in which they were seen),
and the rest, active. Whole millijoules are apportioned, so the shares add up to E exactly, whatever the weights.

  bare idle      to whoever the device is allocated to, by the slice's share of the SMs; what is allocated to nobody is
                 the node's own.
  context idle   equally to every open context: a context costs the same whatever it does and whatever memory it holds.
                 A process that cannot be inspected is one context, in portions of those who share its device.
  active         exclusive: to the only owner. MIG: SM share x activity where every slice with a context reports it, SM
                 share alone otherwise. Time-slicing: by SM ratio; else, and under MPS, equally.

Whether an owner is alone on a device is decided by accounts, not by processes: two processes of one pod are one owner.
A process seen at one end of an interval only counts half: it came or went somewhere between. The activity and ratios of
a sample describe the time since the sample before. A missing reading changes the method, never the sum.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from eelgrid_agent.energy.accounts import (
    UNALLOCATED,
    UNATTRIBUTED,
    EnergyShare,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    apportion_total,
)
from eelgrid_protos.values import dataclass

# Over a longer interval, what was seen at its ends says little of what was between.
LONG_S = 60.0
# Rounding noise of slice fractions.
_NOTHING = 1e-9

_Portion = tuple[UsageOwner, int | None, ShareMethod, ShareConfidence]
_Weights = dict[_Portion, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceActivity:
    """A GPU instance, or the whole device (no id); activity is None where it is not reported."""

    gpu_instance_id: int | None = None
    sm_fraction: float = 1.0
    activity: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextHolder:
    """An open context; `inferred` marks an owner that was taken from the allocations of its device.

    `portion` is below one where several share that device: the context is then listed once for each of them.
    """

    owner: UsageOwner
    pid: int
    gpu_instance_id: int | None = None
    sm_ratio: float | None = None
    mps_server: bool = False
    inferred: bool = False
    portion: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClaim:
    """An allocation; without an instance it is of the whole device."""

    owner: UsageOwner
    gpu_instance_id: int | None = None
    shares: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceObservation:
    """One device at one moment; `holders` and `utilization` are None where the driver does not report them."""

    monotonic_ns: int
    slices: tuple[SliceActivity, ...] = (SliceActivity(),)
    holders: tuple[ContextHolder, ...] | None = ()
    claims: tuple[DeviceClaim, ...] = ()
    utilization: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePower:
    """Watts of the bare board and of the step that contexts add, and how well they are known."""

    bare_w: float
    context_w: float
    confidence: ShareConfidence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Present:
    """A context over a pair of looks: seen at both ends (1.0) or at one (0.5), by the owner's mean portion of it."""

    holder: ContextHolder
    presence: float
    sm_ratio: float | None


def split_energy(energy_mj: int, glances: Sequence[DeviceObservation], idle: IdlePower) -> tuple[EnergyShare, ...]:
    """The shares of `energy_mj`, which add up to it; `glances` are the interval's looks, its two ends included."""
    assert energy_mj >= 0, "energy never falls"
    assert len(glances) >= 2, "an interval has two ends"
    elapsed_s = max(0, glances[-1].monotonic_ns - glances[0].monotonic_ns) / 1e9
    pairs = [_ObservationPair(before, now, elapsed_s, len(glances) - 1) for before, now in pairwise(glances)]
    bare: _Weights = {}
    context: _Weights = {}
    for pair in pairs:
        _add(bare, _bare_weights(pair.before, idle.confidence), scale=pair.weight)
        _add(bare, _bare_weights(pair.now, idle.confidence), scale=pair.weight)
        _add(context, _context_weights(pair, idle.confidence), scale=pair.weight * min(1.0, pair.presence))
    bare_mj = min(energy_mj, round(1000.0 * idle.bare_w * elapsed_s))
    open_share = min(1.0, sum(pair.weight * min(1.0, pair.presence) for pair in pairs))
    context_mj = min(energy_mj - bare_mj, round(1000.0 * idle.context_w * elapsed_s * open_share)) if context else 0
    active_mj = energy_mj - bare_mj - context_mj
    active = _active_weights(pairs)
    if not active and all(pair.is_quiet for pair in pairs):
        # With no context and no activity, what the board drew is its idle power, whatever was learnt of it.
        bare_mj, active_mj = bare_mj + active_mj, 0
    active = active or _last_resort(pairs)
    long = elapsed_s > LONG_S
    shares = [
        *_shares(EnergyUse.BARE_IDLE, bare_mj, bare, long=long),
        *_shares(EnergyUse.CONTEXT_IDLE, context_mj, context, long=long),
        *_shares(EnergyUse.ACTIVE, active_mj, active, long=long),
    ]
    assert sum(share.energy_mj for share in shares) == energy_mj, "shares add up to the device"
    return tuple(shares)


class _ObservationPair:
    """Two looks in a row, and who was there between them; `weight` is their part of the interval's time."""

    __slots__ = ("before", "known", "now", "present", "slices", "weight")

    def __init__(self, before: DeviceObservation, now: DeviceObservation, elapsed_s: float, pairs: int) -> None:
        self.before, self.now = before, now
        seconds = max(0, now.monotonic_ns - before.monotonic_ns) / 1e9
        self.weight = seconds / elapsed_s if elapsed_s > 0.0 else 1.0 / pairs
        self.known = before.holders is not None or now.holders is not None
        self.present = _present(before, now)
        standing = {one.gpu_instance_id: one for one in before.slices}
        # A slice that a new layout removed was there for a part of the time, with its last activity.
        standing.update((one.gpu_instance_id, one) for one in now.slices)
        self.slices = tuple(standing.values())

    @property
    def presence(self) -> float:
        """For how much of the time a context was open, at most the sum of all."""
        return sum(one.presence for one in self.present)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing can have been at work: no context, and no activity at either end."""
        idle = all(not look.utilization for look in (self.before, self.now) if look.utilization is not None)
        told = self.before.utilization is not None or self.now.utilization is not None
        activities = [one.activity for one in self.slices if one.activity is not None]
        return self.known and not self.present and idle and (told or bool(activities)) and not any(activities)

    def on(self, gpu_instance_id: int | None) -> list[_Present]:
        """The contexts on a slice."""
        return [one for one in self.present if one.holder.gpu_instance_id == gpu_instance_id]


def _present(before: DeviceObservation, now: DeviceObservation) -> tuple[_Present, ...]:
    """Everyone seen at either end; a list that could not be had is taken to be the other one."""
    earlier = now.holders if before.holders is None else before.holders
    later = before.holders if now.holders is None else now.holders
    first = {(one.pid, one.gpu_instance_id, one.owner): one for one in earlier or ()}
    last = {(one.pid, one.gpu_instance_id, one.owner): one for one in later or ()}
    found = []
    for key, holder in {**first, **last}.items():
        portions = [seen[key].portion for seen in (first, last) if key in seen]
        found.append(_Present(holder=holder, presence=0.5 * sum(portions), sm_ratio=holder.sm_ratio))
    return tuple(found)


def _claims_on(glance: DeviceObservation, gpu_instance_id: int | None) -> list[DeviceClaim]:
    """Claims of just this place, else those of the whole device."""
    exact = [claim for claim in glance.claims if claim.gpu_instance_id == gpu_instance_id]
    return exact or [claim for claim in glance.claims if claim.gpu_instance_id is None]


def _claim_weights(
    claims: Sequence[DeviceClaim], *, mig: bool, gpu_instance_id: int | None
) -> Iterator[tuple[_Portion, float]]:
    """Claims of one place, by their shares; the weights add up to one."""
    whole = sum(claim.shares for claim in claims)
    alone = len({claim.owner for claim in claims}) == 1
    method = (ShareMethod.MIG_SLICE if mig else ShareMethod.EXCLUSIVE) if alone else ShareMethod.EQUAL_SHARE
    confidence = ShareConfidence.HIGH if alone else ShareConfidence.MEDIUM
    for claim in claims:
        yield (claim.owner, gpu_instance_id, method, confidence), claim.shares / whole


def _bare_weights(glance: DeviceObservation, known: ShareConfidence) -> _Weights:
    mig = any(one.gpu_instance_id is not None for one in glance.slices)
    weights: _Weights = {}
    own = ShareMethod.MIG_SLICE if mig else ShareMethod.EXCLUSIVE
    for one in glance.slices:
        claims = _claims_on(glance, one.gpu_instance_id)
        if not claims:
            _add(weights, {(UNALLOCATED, one.gpu_instance_id, own, known): one.sm_fraction})
        for (owner, place, method, confidence), weight in _claim_weights(
            claims, mig=mig, gpu_instance_id=one.gpu_instance_id
        ):
            _add(weights, {(owner, place, method, min(known, confidence)): weight * one.sm_fraction})
    rest = 1.0 - sum(one.sm_fraction for one in glance.slices)
    if rest > _NOTHING:
        whole = _claims_on(glance, None)
        for (owner, _, method, confidence), weight in _claim_weights(whole, mig=mig, gpu_instance_id=None):
            _add(weights, {(owner, None, method, min(known, confidence)): weight * rest})
        if not whole:
            _add(weights, {(UNALLOCATED, None, own, known): rest})
    return weights


def _context_weights(pair: _ObservationPair, known: ShareConfidence) -> _Weights:
    alone = len({one.holder.owner.account() for one in pair.present}) == 1
    method = ShareMethod.EXCLUSIVE if alone else ShareMethod.EQUAL_SHARE
    weights: _Weights = {}
    for one in pair.present:
        sure = ShareConfidence.HIGH if alone and not one.holder.inferred else ShareConfidence.MEDIUM
        sure = ShareConfidence.LOW if one.holder.portion < 1.0 else sure
        _add(weights, {(one.holder.owner, one.holder.gpu_instance_id, method, min(known, sure)): one.presence})
    return _to_one(weights)


def _active_weights(pairs: Sequence[_ObservationPair]) -> _Weights:
    """The mean over all pairs that saw activity, by their time; where none did, of what was held."""
    weights: _Weights = {}
    for by_activity in (True, False):
        for pair in pairs:
            _add(weights, _to_one(_pair_weights(pair, by_activity=by_activity)), scale=pair.weight)
        if weights:
            return weights
    return weights


def _pair_weights(pair: _ObservationPair, *, by_activity: bool) -> _Weights:
    places = {one.gpu_instance_id for one in pair.slices}
    if any(one.holder.gpu_instance_id not in places for one in pair.present):
        # Contexts that cannot be placed: all that is left is to count them.
        return _context_user_weights(pair.present, None, exact=False)
    live = {one.gpu_instance_id: takers for one in pair.slices if (takers := _user_weights(pair, one))}
    if not live:
        return {}
    if len(pair.slices) == 1:
        return next(iter(live.values()))
    told = by_activity and all(one.activity is not None for one in pair.slices if one.gpu_instance_id in live)
    method = ShareMethod.MIG_ACTIVITY if told else ShareMethod.MIG_SLICE
    trust = ShareConfidence.MEDIUM if told else ShareConfidence.LOW
    weights: _Weights = {}
    for one in pair.slices:
        users = live.get(one.gpu_instance_id, {})
        if not users and told and one.activity:
            users = _claimant_weights(pair, one)
        factor = one.sm_fraction * ((one.activity or 0.0) if told else _presence_on(pair, one))
        for (owner, place, inner, confidence), weight in users.items():
            outer = inner if inner is ShareMethod.UNATTRIBUTED else method
            _add(weights, {(owner, place, outer, min(trust, confidence)): weight * factor})
    return weights


def _presence_on(pair: _ObservationPair, one: SliceActivity) -> float:
    return min(1.0, sum(each.presence for each in pair.on(one.gpu_instance_id))) if pair.known else 1.0


def _user_weights(pair: _ObservationPair, one: SliceActivity) -> _Weights:
    """Who uses a slice: its contexts; where contexts are not told, its claims."""
    if not pair.known:
        return _claimant_weights(pair, one) if _claims_on(pair.now, one.gpu_instance_id) else {}
    claims = _claims_on(pair.now, one.gpu_instance_id)
    return _context_user_weights(pair.on(one.gpu_instance_id), one.gpu_instance_id, exact=True, claims=claims)


def _claimant_weights(pair: _ObservationPair, one: SliceActivity) -> _Weights:
    """A slice that worked although no context of it was seen: a short-lived process, most likely its holder's."""
    weights: _Weights = {}
    claims = _claims_on(pair.now, one.gpu_instance_id) or _claims_on(pair.before, one.gpu_instance_id)
    for (owner, place, method, confidence), weight in _claim_weights(
        claims, mig=one.gpu_instance_id is not None, gpu_instance_id=one.gpu_instance_id
    ):
        # Shares of a shared device say who may use it, and little of who did.
        doubt = ShareConfidence.LOW if method is ShareMethod.EQUAL_SHARE else ShareConfidence.MEDIUM
        _add(weights, {(owner, place, method, min(doubt, confidence)): weight})
    return weights or {(UNATTRIBUTED, one.gpu_instance_id, ShareMethod.UNATTRIBUTED, ShareConfidence.LOW): 1.0}


def _context_user_weights(
    present: Sequence[_Present], place: int | None, *, exact: bool, claims: Sequence[DeviceClaim] = ()
) -> _Weights:
    """Contexts that share one place; the weights add up to one."""
    mps = any(one.holder.mps_server for one in present)
    takers = [one for one in present if not one.holder.mps_server] or list(present)
    owners = {one.holder.owner.account() for one in takers}
    # A process that the driver gave no sample for, while it gave one for another, was idle.
    ratios = [one.presence * (one.sm_ratio or 0.0) for one in takers]
    told = not mps and sum(ratios) > 0.0
    weights = ratios if exact and told else [one.presence for one in takers]
    if mps:
        weights = _weigh_clients(takers, claims)
    if exact and len(owners) == 1:
        inferred = any(one.holder.inferred for one in takers)
        method, confidence = ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM if inferred else ShareConfidence.HIGH
    elif exact and told:
        silent = any(one.sm_ratio is None for one in takers)
        method, confidence = ShareMethod.PROCESS_SM, ShareConfidence.LOW if silent else ShareConfidence.MEDIUM
    else:
        # Under MPS the ratios are the server's doing.
        method, confidence = ShareMethod.EQUAL_SHARE, ShareConfidence.LOW
    found: _Weights = {}
    for one, weight in zip(takers, weights, strict=True):
        is_divided = one.holder.portion < 1.0
        sure = (ShareMethod.EQUAL_SHARE, ShareConfidence.LOW) if is_divided else (method, confidence)
        _add(found, {(one.holder.owner, place, *sure): weight})
    return _to_one(found)


def _weigh_clients(clients: Sequence[_Present], claims: Sequence[DeviceClaim]) -> list[float]:
    """Clients of MPS by the shares that they are held to, each owner's divided among its own; equal if one has none."""
    shares = Counter[UsageOwner]()
    for claim in claims:
        shares[claim.owner.account()] += claim.shares
    owners = [one.holder.owner.account() for one in clients]
    if any(owner not in shares for owner in owners):
        return [one.presence for one in clients]
    present = dict.fromkeys(owners, 0.0)
    for owner, one in zip(owners, clients, strict=True):
        present[owner] += one.presence
    return [shares[owner] * one.presence / present[owner] for owner, one in zip(owners, clients, strict=True)]


def _last_resort(pairs: Sequence[_ObservationPair]) -> _Weights:
    """Nobody was seen at work: the only holder of the whole device, else nobody that could be named."""
    owners = {claim.owner for pair in pairs for look in (pair.before, pair.now) for claim in look.claims}
    whole = all(claim.gpu_instance_id is None for pair in pairs for claim in (*pair.before.claims, *pair.now.claims))
    held = all(look.claims for pair in pairs for look in (pair.before, pair.now))
    if len(owners) == 1 and whole and held:
        return {(owners.pop(), None, ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM): 1.0}
    return {(UNATTRIBUTED, None, ShareMethod.UNATTRIBUTED, ShareConfidence.LOW): 1.0}


def _shares(part: EnergyUse, energy_mj: int, weights: _Weights, *, long: bool) -> Iterator[EnergyShare]:
    if energy_mj == 0:
        return
    portions = list(weights)
    for portion, share_mj in zip(portions, apportion_total(energy_mj, list(weights.values())), strict=True):
        owner, place, method, confidence = portion
        if share_mj:
            yield EnergyShare(
                owner=owner,
                part=part,
                energy_mj=share_mj,
                method=method,
                gpu_instance_id=place,
                confidence=ShareConfidence(max(ShareConfidence.LOW, confidence - 1)) if long else confidence,
            )


def _add(weights: _Weights, more: Mapping[_Portion, float], *, scale: float = 1.0) -> None:
    for portion, weight in more.items():
        if weight * scale > 0.0:
            weights[portion] = weights.get(portion, 0.0) + weight * scale


def _to_one(weights: _Weights) -> _Weights:
    whole = sum(weights.values())
    return {portion: weight / whole for portion, weight in weights.items()} if whole > 0.0 else {}
