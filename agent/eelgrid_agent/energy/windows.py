"""Energy windows: charges by minute and owner, queued until the controller acknowledges them, over restarts too.

A window closes when a multiple of its length has passed and is kept until it is acknowledged. Windows are used instead
of totals since the start of the agent, which would have to be told apart from those of the previous run. Shares are
whole millijoules and are only added, so everything that was charged is in exactly one window. While the controller is
away for long, the oldest neighbours within one hour are merged: names and sums stay, and only the minute is lost.
Beyond `most` windows the two oldest are merged whatever their hour, so the number of windows is bounded and no joule is
lost.

The wall clock may be set while the agent runs, by decades where a machine boots without one. It is compared with the
monotonic clock at each tick, and windows that are not acknowledged are shifted with it, including those that an earlier
agent of the same boot left. Windows of another boot stay where they were. Windows of one clock never overlap.

The outbox charges attributions to the queue, or, without attribution, divides a device's energy between two changes of
its assignments by GPU share; what is assigned to nobody is the node's own. Bare idle power goes first, as in `energy.split`,
by what the catalogue says of the part; contexts are not seen, so what they draw is active.
Totals are read when the plan changes and when a window ends, not at every tick: a process that simulates a thousand
nodes has six thousand devices.

The counter of a device outlives the agent. What it counted between the last stored window and the first sample of the
next agent is charged as unattributed; after a boot or a driver load only what the new counter holds is known.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.devices.sampler import SampleTick
from eelgrid_agent.energy.accounts import (
    UNALLOCATED,
    UNATTRIBUTED,
    EnergyShare,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
    apportion_total,
)
from eelgrid_agent.energy.attributor import Attribution, build_idle_prior
from eelgrid_agent.energy.report import build_owner_message
from eelgrid_protos import messages as wire
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import READING_RANGES, Assignment, EnergyWindow, Gpu, Reading
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

WINDOW_S = 60.0
# Under way to the controller at once: after a day away it is not to get all in one burst.
_SENT_MOST = 8
_UNHEARD_MOST = 3
# Of the run before so many may have been sent: those under way, and what was acknowledged since its last write.
_TRIED_MOST = 64
_HOUR_NS = 3600 * 10**9
_TIME_NS_MOST = 2**63 - 1
# A window of another run that ends further ahead is of a clock that was wrong, and no reason to begin after it.
_OVERLAP_NS_MOST = _HOUR_NS
_Key = tuple[str, UsageOwner, int | None, EnergyUse, ShareMethod, ShareConfidence]


@dataclass(slots=True)
class DeviceCharge:
    """One device in the open window."""

    uncertainty_mj: int = 0
    uncounted_s: float = 0.0


@dataclass(slots=True)
class _Open:
    begin_ns: int
    end_ns: int
    charged_mj: dict[_Key, int] = field(default_factory=dict)
    devices: dict[str, DeviceCharge] = field(default_factory=dict)


class EnergyWindowQueue:
    """One node's."""

    def __init__(
        self,
        incarnation: int,
        *,
        length_s: float = WINDOW_S,
        many: int = 240,
        most: int = 1000,
        kept: Iterable[wire.EnergyWindow] = (),
        number: int = 0,
        before_ns: int = 0,
    ) -> None:
        """`kept` are of the run before, whose last window had this `number`; both of this incarnation.

        `before_ns` is where that one ended, if its clock was ours.
        """
        self.incarnation = incarnation
        self.number = number
        self.ended_ns = 0  # of the last window that was closed
        self.changes = 0  # whoever writes them down looks whether this has risen
        self._length_ns = int(length_s * 1e9)
        self._many = many
        self._most = most
        # Times may be before 1970 for a while, when a clock is set back; those that are told never are.
        self._closed: list[wire.EnergyWindow] = list(kept)
        self._before_ns = before_ns
        self._foreign = number  # windows up to it are of a clock that this run knows nothing of
        self._open: _Open | None = None
        self._sent = 0
        # The controller may have these already, under their numbers: merged into a later one, they would count twice.
        self._tried = max((window.number for window in self._closed[:_TRIED_MOST]), default=0)
        self._unheard = 0  # windows that were closed since the last acknowledgement

    @property
    def closed(self) -> tuple[wire.EnergyWindow, ...]:
        """Closed windows that are not acknowledged, oldest first."""
        return tuple(map(_sane, self._closed))

    def shift_clock(self, by_ns: int, *, foreign: bool = False) -> None:
        """The clock was set by so much.

        `foreign` windows, of the run before, move only where they are of this clock.
        """
        if foreign:
            self._foreign = 0
            self._before_ns += by_ns
        if self._open is not None:
            self._open.begin_ns += by_ns
            self._open.end_ns += by_ns
        self._closed = [
            replace(one, begin_ns=one.begin_ns + by_ns, end_ns=one.end_ns + by_ns)
            if one.number > self._foreign
            else one
            for one in self._closed
        ]
        if self.ended_ns:
            self.ended_ns += by_ns
        self.changes += 1

    def _floor_ns(self, begin_ns: int) -> int:
        """Where a window that would begin then may begin at the earliest: windows of one clock never overlap."""
        if self.ended_ns:
            return self.ended_ns
        return self._before_ns if self._before_ns - begin_ns <= _OVERLAP_NS_MOST else 0

    def charge(
        self,
        shares: Mapping[str, Iterable[EnergyShare]],
        *,
        at_ns: int,
        since_ns: int | None = None,
        spent: Mapping[str, DeviceCharge] | None = None,
    ) -> None:
        """Adds what was spent up to now, by device; closes the window when its time is over.

        `since_ns` is when the first of it may have been spent, where that is before the open window.
        """
        window = self._open
        if window is None:
            begin_ns = at_ns if since_ns is None else min(since_ns, at_ns)
            begin_ns = max(begin_ns, self._floor_ns(begin_ns))
            window = self._open = _Open(begin_ns, max(begin_ns, at_ns))
        window.end_ns = max(window.end_ns, at_ns)
        for uuid, parts in shares.items():
            window.devices.setdefault(uuid, DeviceCharge())
            for share in parts:
                key = (uuid, share.owner.account(), share.gpu_instance_id, share.part, share.method, share.confidence)
                window.charged_mj[key] = window.charged_mj.get(key, 0) + share.energy_mj
        for uuid, more in (spent or {}).items():
            told = window.devices.setdefault(uuid, DeviceCharge())
            told.uncertainty_mj += more.uncertainty_mj
            told.uncounted_s += more.uncounted_s
        is_over = at_ns // self._length_ns > window.begin_ns // self._length_ns
        is_full = len(window.charged_mj) >= wire.WINDOW_SHARES_MOST // 2
        if is_over or is_full or at_ns < window.begin_ns:
            self.close_window()

    def close_window(self) -> None:
        """Ends the open window now, as an agent does that stops."""
        window, self._open = self._open, None
        if window is None or not window.devices:
            return
        self.number += 1
        self.ended_ns = window.end_ns
        self.changes += 1
        self._closed.append(_window(window, self.incarnation, self.number))
        self._unheard += 1
        if self._unheard > _UNHEARD_MOST:
            # The controller had no room, or its disk fails: everything goes again.
            self.resume()
        self._shrink()

    @property
    def is_waiting(self) -> bool:
        """Whether there is one to send."""
        return self._sent < min(len(self._closed), _SENT_MOST)

    def next_window(self) -> wire.EnergyWindow | None:
        """The next one to send, which then counts as sent."""
        if not self.is_waiting:
            return None
        self._sent += 1
        window = self._closed[self._sent - 1]
        self._tried = max(self._tried, window.number)
        return _sane(window)

    def acknowledge(self, incarnation: int, number: int) -> None:
        """Removes the windows that the controller has stored."""
        if incarnation != self.incarnation:
            return
        before = len(self._closed)
        self._closed = [window for window in self._closed if window.number > number]
        gone = before - len(self._closed)
        if gone:
            self._unheard = 0
            self.changes += 1
            self._sent = max(0, self._sent - gone)

    def resume(self) -> None:
        """A connection is new: nothing counts as sent."""
        self._sent = self._unheard = 0

    def _shrink(self) -> None:
        """What was ever sent stays as it is: the controller may have it already, under its number."""
        first_free = next((at for at, one in enumerate(self._closed) if one.number > self._tried), len(self._closed))
        while len(self._closed) > self._many:
            first = next(
                (at for at in range(first_free, len(self._closed) - 1) if self._are_of_one_hour(at)),
                first_free if len(self._closed) > self._most else None,
            )
            if first is None or first + 1 >= len(self._closed):
                return
            joined = merge_windows(self._closed[first], self._closed[first + 1])
            self._closed[first : first + 2] = [joined]

    def _are_of_one_hour(self, at: int) -> bool:
        one, other = self._closed[at : at + 2]
        return one.begin_ns // _HOUR_NS == max(one.begin_ns, other.end_ns - 1) // _HOUR_NS


def _sane(window: wire.EnergyWindow) -> wire.EnergyWindow:
    """The window with times that can be told."""
    if window.begin_ns >= 0 and window.end_ns <= _TIME_NS_MOST:
        return window
    begin_ns, end_ns = (min(max(0, at_ns), _TIME_NS_MOST) for at_ns in (window.begin_ns, window.end_ns))
    return replace(window, begin_ns=begin_ns, end_ns=end_ns)


def _window(window: _Open, incarnation: int, number: int) -> wire.EnergyWindow:
    return _pack_window(
        incarnation,
        number,
        begin_ns=window.begin_ns,
        end_ns=window.end_ns,
        spent={uuid: (one.uncertainty_mj, one.uncounted_s) for uuid, one in window.devices.items()},
        rows=[
            (
                uuid,
                build_owner_message(owner),
                instance,
                wire.EnergyPart[part.name],
                wire.AttributionMethod[method.name],
                wire.AttributionConfidence[confidence.name],
                energy_mj,
            )
            for (uuid, owner, instance, part, method, confidence), energy_mj in window.charged_mj.items()
        ],
    )


_Row = tuple[
    str, wire.EnergyOwner, int | None, wire.EnergyPart, wire.AttributionMethod, wire.AttributionConfidence, int
]


def _pack_window(
    incarnation: int,
    number: int,
    *,
    begin_ns: int,
    end_ns: int,
    spent: Mapping[str, tuple[int, float]],
    rows: Iterable[_Row],
) -> wire.EnergyWindow:
    """Rows by index; what goes beyond the bounds of a message is charged to nobody, and stays in the sum."""
    places = {uuid: index for index, uuid in enumerate(spent)}
    owners: dict[wire.EnergyOwner, int] = {_NOBODY: 0}
    totals = dict.fromkeys(spent, 0)
    summed: dict[tuple[int, int, int | None, int, int, int], int] = {}
    for uuid, owner, instance, part, method, confidence, energy_mj in rows:
        if energy_mj == 0:
            continue
        totals[uuid] += energy_mj
        place = owners.get(owner)
        if place is None and len(owners) < wire.WINDOW_OWNERS_MOST:
            place = owners[owner] = len(owners)
        key = (places[uuid], place or 0, instance, int(part), int(method), int(confidence))
        if key not in summed and (place is None or len(summed) >= wire.WINDOW_SHARES_MOST - 2 * len(places)):
            key = (places[uuid], 0, None, *_LOST)
        summed[key] = summed.get(key, 0) + energy_mj
    return wire.EnergyWindow(
        incarnation=incarnation,
        number=number,
        begin_ns=begin_ns,
        end_ns=end_ns,
        devices=tuple(
            wire.WindowDevice(
                gpu_uuid=uuid, total_mj=totals[uuid], uncertainty_mj=uncertainty_mj, uncounted_s=uncounted_s
            )
            for uuid, (uncertainty_mj, uncounted_s) in spent.items()
        ),
        owners=tuple(owners),
        shares=tuple(
            wire.WindowShare(
                device=device,
                owner=owner,
                gpu_instance_id=instance,
                part=wire.EnergyPart(part),
                method=wire.AttributionMethod(method),
                confidence=wire.AttributionConfidence(confidence),
                energy_mj=energy_mj,
            )
            for (device, owner, instance, part, method, confidence), energy_mj in summed.items()
        ),
    )


def merge_windows(one: wire.EnergyWindow, other: wire.EnergyWindow) -> wire.EnergyWindow:
    """Both as one, under the number of the later."""
    spent: dict[str, tuple[int, float]] = {}
    for device in (*one.devices, *other.devices):
        uncertainty_mj, uncounted_s = spent.get(device.gpu_uuid, (0, 0.0))
        spent[device.gpu_uuid] = (uncertainty_mj + device.uncertainty_mj, uncounted_s + device.uncounted_s)
    rows = [
        (
            window.devices[share.device].gpu_uuid,
            window.owners[share.owner],
            share.gpu_instance_id,
            share.part,
            share.method,
            share.confidence,
            share.energy_mj,
        )
        for window in (one, other)
        for share in window.shares
    ]
    return _pack_window(
        other.incarnation, other.number, begin_ns=one.begin_ns, end_ns=other.end_ns, spent=spent, rows=rows
    )


_LOST = (int(wire.EnergyPart.ACTIVE), int(wire.AttributionMethod.UNATTRIBUTED), int(wire.AttributionConfidence.LOW))
_NOBODY = wire.EnergyOwner(kind=wire.OwnerKind[UNATTRIBUTED.kind.name])


_COUNTER_J_MOST = READING_RANGES[Reading.ENERGY_J].high
# As the sampler's: a jump of wall against monotonic clock above this is a step.
_CLOCK_STEP_NS = 500_000_000
# No device draws so much: a counter that says so is another device's.
_GAP_W_MOST = 5_000.0


class _Total(NamedTuple):
    """What a device had spent at a cut, and when that was by the wall clock."""

    energy_mj: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxState:
    """What one run of the agent leaves to the next; `boot` is what counters live as long as."""

    incarnation: int
    number: int = 0
    boot: str = ""
    end_ns: int = 0
    counters_j: Mapping[str, float] = field(default_factory=dict)
    windows: tuple[EnergyWindow, ...] = ()
    # Wall less monotonic clock; None where it is not known.
    offset_ns: int | None = None


class EnergyOutbox:
    """See the module."""

    def __init__(
        self,
        kept: OutboxState,
        *,
        boot: str = "",
        by_plan: bool = False,
        length_s: float = WINDOW_S,
        phase: float = 0.0,
    ) -> None:
        """`phase` from 0 to 1 is when in a window totals are read by the plan, so that a thousand nodes take turns."""
        self.windows = EnergyWindowQueue(
            kept.incarnation,
            length_s=length_s,
            kept=kept.windows,
            number=kept.number,
            before_ns=kept.end_ns if kept.boot == boot else 0,
        )
        self._length_ns = int(length_s * 1e9)
        self._phase_ns = int(phase * length_s * 1e9)
        self.refused = 0  # windows that the controller refused
        self.refused_reason = ""  # of the last one
        self._boot = boot
        # None until the first tick, or where the clock of the run before is another.
        self._offset_ns = kept.offset_ns if kept.boot == boot and boot else None
        self._is_same_clock = self._offset_ns is not None
        self._by_plan = by_plan
        # Of devices that this run has not seen yet.
        self._before_j = dict(kept.counters_j) if kept.boot == boot else {}
        self._before_ns = kept.end_ns
        self._counters_j: dict[str, float] = {}
        self._first_j: dict[str, float] = {}  # as this run saw them first, from where its own totals begin
        self._closed_j: dict[str, float] = dict(kept.counters_j)
        self._closed_ns = kept.end_ns
        self._number = kept.number
        # By the plan: what devices draw with nothing on them, totals at the last cut and when, and who was assigned since.
        self._bare_w: dict[str, float] = {}
        self._totals: dict[str, _Total] = {}
        self._assigned: tuple[Assignment, ...] | None = None
        self._cut_turn = 0
        # By the attributor: how far its totals may be off, and what no total holds, at the last look.
        self._told: dict[str, tuple[float, float]] = {}

    def state(self) -> OutboxState:
        """What the next run needs to go on, as of the last window that was closed."""
        return OutboxState(
            incarnation=self.windows.incarnation,
            number=self.windows.number,
            boot=self._boot,
            end_ns=self._closed_ns,
            counters_j=dict(self._closed_j),
            windows=self.windows.closed,
            offset_ns=self._offset_ns,
        )

    def update_inventory(self, gpus: Iterable[Gpu]) -> None:
        """The devices of the node, at each change."""
        products = load_catalogue().products
        self._bare_w = {
            gpu.uuid: build_idle_prior(products.get(gpu.catalogue_key), mig_enabled=gpu.mig_enabled).bare_w
            for gpu in gpus
        }

    def on_tick(
        self, tick: SampleTick, looks: Sequence[tuple[str, RawReadings]], assignments: tuple[Assignment, ...] | None
    ) -> None:
        """A tick of the sampler, its looks in the order of its columns, and what the plan in force assigns."""
        if not self._by_plan:
            for uuid, raw in looks:
                counter = raw.energy_counter_j
                if not isinstance(counter, Missing) and 0.0 <= counter <= _COUNTER_J_MOST:
                    self._counters_j[uuid] = counter
                    if uuid in self._before_j:
                        self._first_j.setdefault(uuid, counter)
            return
        turn = (tick.time_ns + self._phase_ns) // self._length_ns
        if assignments is self._assigned and turn == self._cut_turn:
            return
        self._cut(tick, looks)
        self._assigned, self._cut_turn = assignments, turn

    def update_clock(self, *, wall_ns: int, monotonic_ns: int) -> None:
        """Both clocks, at each tick before it is taken."""
        before_ns, self._offset_ns = self._offset_ns, wall_ns - monotonic_ns
        step_ns = 0 if before_ns is None else self._offset_ns - before_ns
        if abs(step_ns) > _CLOCK_STEP_NS:
            self.windows.shift_clock(step_ns, foreign=self._is_same_clock)
            self._totals = {uuid: _Total(mj, at_ns + step_ns) for uuid, (mj, at_ns) in self._totals.items()}
            if self._is_same_clock or self.windows.ended_ns:
                self._closed_ns += step_ns
            if self._is_same_clock:
                self._before_ns += step_ns

    def wall_ns(self, *, monotonic_ns: int) -> int | None:
        """The time of a moment by the clock of the last tick; None before the first."""
        return None if self._offset_ns is None else max(0, self._offset_ns + monotonic_ns)

    def record_refusal(self, many: int, reason: str) -> None:
        """The controller counts so many windows in no sum."""
        self.refused += many
        self.refused_reason = reason

    def charge_attribution(self, found: Attribution, *, at_ns: int) -> None:
        """What the attributor found at a look."""
        self._charge_gap(at_ns)
        spent = {}
        for uuid, estimate in found.estimates.items():
            uncertainty_j, uncounted_s = self._told.get(uuid, (0.0, 0.0))
            # Independent ends do not add up, so a difference may be below zero.
            spent[uuid] = DeviceCharge(
                max(0, round(1000.0 * (estimate.uncertainty_j - uncertainty_j))),
                max(0.0, estimate.uncounted_s - uncounted_s),
            )
            self._told[uuid] = (estimate.uncertainty_j, estimate.uncounted_s)
        self._charge({uuid: shares for uuid, shares in found.shares.items() if shares}, at_ns=at_ns, spent=spent)

    def close(self) -> None:
        """The agent stops: the open window ends now."""
        self.windows.close_window()
        self._record_marks()

    def _charge(
        self,
        shares: Mapping[str, Iterable[EnergyShare]],
        *,
        at_ns: int,
        since_ns: int | None = None,
        spent: Mapping[str, DeviceCharge] | None = None,
    ) -> None:
        self.windows.charge(shares, at_ns=at_ns, since_ns=since_ns, spent=spent)
        self._record_marks()

    def _record_marks(self) -> None:
        """When a window was closed, the counters of that moment belong to it."""
        if self.windows.number != self._number:
            self._number = self.windows.number
            self._closed_j, self._closed_ns = dict(self._counters_j), self.windows.ended_ns

    def _charge_gap(self, at_ns: int) -> None:
        """What was counted while no agent ran, of devices that are seen for the first time."""
        if not self._before_j:
            return
        found = {}
        seconds = max(0.0, (at_ns - self._before_ns) / 1e9)
        for uuid in self._before_j.keys() & self._first_j.keys():
            gap_j = self._first_j.pop(uuid) - self._before_j.pop(uuid)
            if 0.0 < gap_j <= seconds * _GAP_W_MOST:
                found[uuid] = (
                    _make_share(UNATTRIBUTED, round(1000.0 * gap_j), ShareMethod.UNATTRIBUTED, ShareConfidence.LOW),
                )
        if found:
            self._charge(found, at_ns=at_ns, since_ns=self._before_ns)

    def _cut(self, tick: SampleTick, looks: Sequence[tuple[str, RawReadings]]) -> None:
        """Charges what every device spent since the last cut to whom it was assigned in between."""
        shares: dict[str, tuple[EnergyShare, ...]] = {}
        assigned = _by_device(self._assigned or ())
        for column, (uuid, _) in enumerate(looks):
            total_j = tick.reading(Reading.ENERGY_J, column)
            if total_j is None:
                continue
            total_mj = round(1000.0 * total_j)
            # A total below the last is another meter's, which began at zero.
            before = self._totals.get(uuid, _Total(0, tick.time_ns))
            spent_mj = total_mj - (before.energy_mj if total_mj >= before.energy_mj else 0)
            self._totals[uuid] = _Total(total_mj, tick.time_ns)
            elapsed_s = max(0, tick.time_ns - before.at_ns) / 1e9
            bare_mj = min(spent_mj, round(1000.0 * self._bare_w.get(uuid, 0.0) * elapsed_s))
            shares[uuid] = _planned_shares(spent_mj, bare_mj, assigned.get(uuid, {}))
        if shares:
            self._charge(shares, at_ns=tick.time_ns)


def _by_device(assignments: Iterable[Assignment]) -> dict[str, dict[str, int]]:
    """GPU shares by device and workload; slices weigh as their assignment says, or alike."""
    found: dict[str, dict[str, int]] = {}
    for one in assignments:
        for uuid in one.gpu_uuids:
            holders = found.setdefault(uuid, {})
            holders[one.workload_id] = holders.get(one.workload_id, 0) + (one.gpu_milli or 1)
    return found


def _planned_shares(energy_mj: int, bare_mj: int, holders: Mapping[str, int]) -> tuple[EnergyShare, ...]:
    """The shares of a device's energy, of which `bare_mj` is bare idle; what a holder has in all is by its GPU share."""
    held = sum(holders.values())
    if not holders:
        return (_make_share(UNALLOCATED, energy_mj, ShareMethod.EXCLUSIVE, ShareConfidence.HIGH, EnergyUse.BARE_IDLE),)
    method, confidence = (
        (ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM)
        if len(holders) == 1
        else (ShareMethod.EQUAL_SHARE, ShareConfidence.LOW)
    )
    free = max(0, GPU_MILLI_WHOLE - held)
    weights = [*map(float, holders.values()), float(free)]
    shares = []
    for name, part, bare in zip(
        holders, apportion_total(energy_mj, weights), apportion_total(bare_mj, weights), strict=False
    ):
        owner, idle = UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload=name), min(part, bare)
        shares += [
            _make_share(owner, idle, method, confidence, EnergyUse.BARE_IDLE),
            _make_share(owner, part - idle, method, confidence),
        ]
    if free:
        rest = energy_mj - sum(share.energy_mj for share in shares)
        shares.append(_make_share(UNALLOCATED, rest, method, ShareConfidence.LOW, EnergyUse.BARE_IDLE))
    return tuple(shares)


def _make_share(
    owner: UsageOwner,
    energy_mj: int,
    method: ShareMethod,
    confidence: ShareConfidence,
    part: EnergyUse = EnergyUse.ACTIVE,
) -> EnergyShare:
    return EnergyShare(owner=owner, part=part, energy_mj=energy_mj, method=method, confidence=confidence)
