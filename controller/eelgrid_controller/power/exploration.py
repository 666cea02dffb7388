"""A running job's power limit while its curve is unknown: windows in, the next limit out.

Owns the state machine of one job. Must not know how windows are measured, what a
limit is set with, or other jobs' budgets beyond a ceiling.

Theory. The job starts at its largest limit and is measured in windows; each step
adds what came to the state and picks the next limit (eelgrid_controller.power.picking).
Exploration is part of the job: its windows count against the promise and in the
energy. When the job itself changes (cumulative sums of evidence.Drift pass the
alarm) a new phase begins: what was known becomes a prior that may be off by
CHANGED, what was earned or is owed is carried over, and the search runs again.
Phase k+1 ends no earlier than FIRST_PHASE 2^k windows after it began, so that n
windows see at most log2(n / FIRST_PHASE) searches: their cost is bounded whatever
the job does. Without measurements the largest allowed limit is held, which is
what a job without a planner has.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from eelgrid_controller.power.curves import LIMITS_MOST, Curve
from eelgrid_controller.power.evidence import Arm, Drift, Noise, Shown, Window
from eelgrid_controller.power.picking import Ledger, Manner, Pick, Why, permitted, pick
from eelgrid_controller.power.priors import Prior, Ratio, from_relatives
from eelgrid_controller.power.promise import MaxSlowdown, Promise
from eelgrid_controller.power.refusals import CurveRefused
from eelgrid_controller.power.standing import Standing, standings

__all__ = [
    "SHOWN_MOST",
    "Ceiling",
    "Decision",
    "Exploration",
    "Foreseen",
    "Missed",
    "Unusable",
    "Window",
    "affords",
    "begin",
    "known",
    "step",
]

_CHANGED = 0.05  # by which a limit's ratios may change with the job
_FIRST_PHASE = 16  # windows
SHOWN_MOST = 64  # windows of a limit that are believed of before
_SAME_W = 0.5
_OPENING = Ledger()
_LEVEL = Drift()
_NOTHING_SHOWN = Shown()


class Unusable(Enum):
    """Why a window says nothing."""

    NO_POWER = "power was not measured"
    NO_PROGRESS = "the job told no progress"
    IMPOSSIBLE = "a number is missing, negative or not finite"
    OTHER_LIMIT = "it ran at a limit that is none of the job's"


class Missed(NamedTuple):
    """A window without a measurement."""

    reason: Unusable


class Ceiling(NamedTuple):
    """The largest limit that budgets allow each GPU from now on; None for no ceiling."""

    limit_w: float | None


class Foreseen(NamedTuple):
    """What a model says of the job's curve, in place of relatives; None takes back what was said before."""

    prior: Prior | None


Event = Window | Missed | Ceiling | Foreseen


@dataclass(frozen=True, slots=True)
class Decision:
    """The limit of the next window, the same on all GPUs of the job."""

    limit_w: float
    why: Why
    settled: bool  # the search is over until the job changes
    refused: Unusable | None = None  # what the last event could not be used for


@dataclass(frozen=True, slots=True)
class Exploration:
    """All that is known of one job; values, so that a step makes another."""

    promise: Promise
    manner: Manner
    gpus: int
    arms: tuple[Arm, ...]  # limits fall
    noise: Noise
    ledger: Ledger = _OPENING
    drift: Drift = _LEVEL
    relatives: tuple[Curve, ...] = ()
    foreseen: Prior | None = None  # begins to count once the largest limit is measured, as relatives do
    prior: Prior | None = None
    kept: int | None = None  # the limit settled on
    first: int = 0  # the largest limit that is allowed now
    windows: int = 0  # of this phase
    phase: int = 0
    missed: int = 0  # in a row

    @property
    def limits_w(self) -> tuple[float, ...]:
        """The limits, falling."""
        return tuple(arm.limit_w for arm in self.arms)

    @property
    def reference(self) -> int | None:
        """The largest limit that was measured in this phase; None before there is one."""
        return next((index for index, arm in enumerate(self.arms) if arm.windows), None)


def begin(
    limits_w: Sequence[float],
    promise: Promise,
    *,
    gpus: int = 1,
    manner: Manner | None = None,
    relatives: Sequence[Curve] = (),
    shown: Shown = _NOTHING_SHOWN,
) -> tuple[Exploration, Decision]:
    """A job whose curve is unknown, and its first limit, the largest; or one that goes on from what it has `shown`.

    `relatives` are curves of other jobs on the same GPU model; without them the job starts cold. What was shown at a
    limit that is none of these is left out, and each counts as SHOWN_MOST windows at most: it may be of long ago.
    Raises CurveRefused for no limits, too many, or one that is not a positive number of watts.
    """  # fmt: skip
    falling = sorted(set(limits_w), reverse=True)
    if not falling or len(falling) > LIMITS_MOST:
        raise CurveRefused("limits_w", f"{len(falling)} limits", f"give 1 to {LIMITS_MOST} that may be set")
    if not all(limit > 0.0 and math.isfinite(limit) for limit in falling) or gpus < 1:
        raise CurveRefused("limits_w", f"{falling} on {gpus} GPUs", "limits are positive watts of at least one GPU")
    manner = manner or Manner()
    noise = Noise.prior(manner.time_scatter, manner.energy_scatter, manner.scatter_windows)
    state = Exploration(
        promise,
        manner,
        gpus,
        tuple(_shown_at(limit, shown.arms) for limit in falling),
        shown.noise or noise,
        relatives=tuple(relatives),
    )
    windows = sum(arm.windows for arm in state.arms)
    if not windows:
        return state, Decision(falling[0], Why.REFERENCE, settled=len(falling) == 1)
    ledger = Ledger(sum(arm.work for arm in state.arms), sum(arm.time_s for arm in state.arms))
    state, picked = _picked(replace(state, windows=windows, ledger=ledger))
    return state, Decision(state.arms[picked.place].limit_w, picked.why, picked.settled)


def _shown_at(limit_w: float, shown: Sequence[Arm]) -> Arm:
    found = next((arm for arm in shown if abs(arm.limit_w - limit_w) <= _SAME_W and arm.windows), None)
    if found is None:
        return Arm(limit_w)
    share = min(1.0, SHOWN_MOST / found.windows)
    counted = min(SHOWN_MOST, found.windows)
    return Arm(limit_w, counted, share * found.work, share * found.time_s, share * found.energy_j)


def step(state: Exploration, event: Event) -> tuple[Exploration, Decision]:
    """What is known after an event, and the next limit. Deterministic: same state and event, same answer."""
    refused = None
    if isinstance(event, Ceiling):
        state = _under(state, event.limit_w)
    elif isinstance(event, Foreseen):
        state = _with_foreseen(state, event.prior)
    elif isinstance(event, Missed):
        refused = event.reason
        state = replace(state, missed=state.missed + 1)
    else:
        index = _arm_of(state, event)
        if isinstance(index, Unusable):
            refused = index
            state = replace(state, missed=state.missed + 1)
        else:
            state = _with_window(state, index, event)
    state, picked = _picked(state)
    return state, Decision(state.arms[picked.place].limit_w, picked.why, picked.settled, refused)


def known(state: Exploration) -> tuple[Standing | None, ...]:
    """How each limit stands, limits falling; None where nothing is known of it."""
    reference = state.reference
    if reference is None:
        return (None,) * len(state.arms)
    return standings(state.arms, reference, state.noise, state.prior)


def affords(state: Exploration, limit_w: float, windows: int = 1) -> bool:
    """Whether so many windows at a known limit leave the promise kept, whenever the job may end after them."""
    place = next((index for index, arm in enumerate(state.arms) if abs(arm.limit_w - limit_w) <= _SAME_W), None)
    reference = state.reference
    if place is None or reference is None or state.windows < 1:
        return False
    return permitted(
        state.promise, state.manner, state.ledger, known(state), state.limits_w, reference=reference,
        windows=state.windows, gpus=state.gpus, place=place, ahead=windows,
    )  # fmt: skip


def _under(state: Exploration, limit_w: float | None) -> Exploration:
    """The largest allowed limit; the least one where even that is above the ceiling, which the budget then refuses."""
    if limit_w is None:
        return replace(state, first=0)
    last = len(state.arms) - 1
    first = next((i for i, arm in enumerate(state.arms) if arm.limit_w <= limit_w + _SAME_W), last)
    kept = state.kept if state.kept is None or state.kept >= first else None
    return replace(state, first=first, kept=kept)


def _with_foreseen(state: Exploration, prior: Prior | None) -> Exploration:
    """Another word of the model; what counted only because of the last one counts no longer."""
    if prior is not None and not len(prior.time) == len(prior.energy) == len(state.arms):
        return state
    counted = state.prior is not None and state.prior == state.foreseen
    return replace(state, foreseen=prior, prior=None if counted else state.prior)


def _arm_of(state: Exploration, window: Window) -> int | Unusable:
    """The limit that a window is of."""
    if not (window.work > 0.0 and math.isfinite(window.work)):
        return Unusable.NO_PROGRESS
    if not (window.energy_j > 0.0 and math.isfinite(window.energy_j)):
        return Unusable.NO_POWER
    if not (window.time_s > 0.0 and math.isfinite(window.time_s)):
        return Unusable.IMPOSSIBLE
    for index, arm in enumerate(state.arms):
        if abs(arm.limit_w - window.limit_w) <= _SAME_W:
            return index
    return Unusable.OTHER_LIMIT


def _with_window(state: Exploration, index: int, window: Window) -> Exploration:
    """One more window: sums, ledger, drift; a new phase where the job has changed."""
    arm, noise, drift = state.arms[index], state.noise, state.drift
    off = arm.deviations(window)
    tamed = arm.tamed(window, noise)
    if off is not None:
        fair = math.sqrt(1.0 + 1.0 / arm.windows)
        drift = drift.with_deviation(
            off[0] / (noise.time_share * fair), off[1] / (noise.energy_share * fair), state.manner.drift_allowed
        )
        counted = arm.deviations(tamed)
        assert counted is not None, "the limit has windows"
        noise = noise.with_deviation(*counted, arm.windows)
    ledger = state.ledger
    ledger = Ledger(
        ledger.work + tamed.work, ledger.time_s + tamed.time_s, ledger.carried_s,
        ledger.all_work + window.work, ledger.all_time_s + window.time_s,
    )  # fmt: skip
    arms = (*state.arms[:index], arm.with_window(tamed), *state.arms[index + 1 :])
    windows = state.windows + 1
    state = replace(state, arms=arms, noise=noise, drift=drift, ledger=ledger, windows=windows, missed=0)
    changed = max(drift) > state.manner.drift_alarm and windows >= _FIRST_PHASE << min(state.phase, 40)
    if changed:
        return _next_phase(state, window, index)
    if state.prior is not None or state.arms[0].windows < state.manner.first_windows:
        return state
    if state.foreseen is not None:
        return replace(state, prior=state.foreseen)
    if state.relatives:
        power_w = state.arms[0].power_w / state.gpus
        return replace(state, prior=from_relatives(state.relatives, state.limits_w, power_w))
    return state


def _next_phase(state: Exploration, window: Window, index: int) -> Exploration:
    """The job is another: limits start anew, with what was known as a prior, and the books go on."""
    found = known(state)
    reference = state.reference
    assert reference is not None, "a window came"
    base = found[reference]
    assert base is not None, "the reference was measured"
    carried = 0.0
    if isinstance(state.promise, MaxSlowdown):
        ledger = state.ledger
        carried = ledger.carried_s + (1.0 + state.promise.share) * base.time_s * ledger.work - ledger.time_s

    def ratio(one: Standing | None, *, energy: bool) -> Ratio | None:
        if one is None:
            return None
        value = one.energy_j / base.energy_j if energy else one.ratio
        error = math.hypot(one.energy_error, base.energy_error) if energy else one.ratio_error
        return Ratio(math.log(value), math.hypot(error, _CHANGED))

    prior = Prior(tuple(ratio(one, energy=False) for one in found), tuple(ratio(one, energy=True) for one in found))
    arms = [Arm(arm.limit_w) for arm in state.arms]
    arms[index] = arms[index].with_window(window)  # the first of the new phase that is sure to be of it
    return replace(
        state, arms=tuple(arms), drift=_LEVEL, prior=prior if reference == 0 else None, kept=None, windows=1,
        phase=state.phase + 1,
        ledger=state.ledger._replace(work=window.work, time_s=window.time_s, carried_s=carried),
    )  # fmt: skip


def _picked(state: Exploration) -> tuple[Exploration, Pick]:
    """The next limit; what was settled on is remembered."""
    if state.missed >= state.manner.missing_most:
        return replace(state, kept=None), Pick(state.first, Why.BLIND, settled=False)
    reference = state.reference
    if reference is None or reference > state.first:  # a ceiling was lifted: slowdowns are relative to what it hid
        return state, Pick(state.first, Why.REFERENCE, settled=False)
    picked = pick(
        state.promise, state.manner, state.ledger, standings(state.arms, reference, state.noise, state.prior),
        state.limits_w, reference=reference, first=state.first, windows=state.windows, gpus=state.gpus,
        kept=state.kept,
    )  # fmt: skip
    if picked.why is Why.KEEP and picked.place != state.kept:
        state = replace(state, kept=picked.place)
    elif not picked.settled and state.kept is not None:
        state = replace(state, kept=None)
    return state, picked
