"""The outbox of one node's energy: what is charged at each look goes into windows, also over a restart of the agent.

Owns how shares come to windows: from the attributor where processes and allocations are looked
at, else from the plan alone; and what was spent while no agent ran. Must not know files,
sockets or clocks.

Theory. By the plan, a device's energy between two changes of its assignments is cut by GPU
share; what nobody was assigned is the node's own. Idle and active power are not told apart
there. Totals are read when the plan changes and when a window ends, not at every tick: a
process that simulates a thousand nodes has six thousand devices.

A device's counter outlives the agent. What it counted between the last window that was
written down and the first look of the next agent was spent by somebody whom nobody saw; a
boot or a load of the driver in between began it anew, and then only what it holds is known.

The wall clock may be set while the agent runs, by decades where a machine boots without one. It is
compared with the monotonic clock at each tick; what is not acknowledged moves along, also what an
agent of the same boot left.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from eelgrid_agent.attribution.attributor import Attribution
from eelgrid_agent.attribution.owner import UNALLOCATED, UNATTRIBUTED, Owner, OwnerKind
from eelgrid_agent.attribution.shares import Confidence, Method, Part, Share, apportion
from eelgrid_agent.attribution.windows import LENGTH_S, Spent, Windows
from eelgrid_agent.device import Missing, RawReadings
from eelgrid_agent.sampler import Tick
from eelgrid_protos.messages import READING_RANGES, Assignment, EnergyWindow, Reading
from eelgrid_protos.quantities import GPU_MILLI_WHOLE

__all__ = ["EnergyOutbox", "Kept"]

_COUNTER_J_MOST = READING_RANGES[Reading.ENERGY_J].high
# As the sampler's: a jump of wall against monotonic clock above this is a step.
_CLOCK_STEP_NS = 500_000_000
# No device draws so much: a counter that says so is another device's.
_GAP_W_MOST = 5_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
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
        self, kept: Kept, *, boot: str = "", by_plan: bool = False, length_s: float = LENGTH_S,
        phase: float = 0.0,
    ) -> None:  # fmt: skip
        """`phase` from 0 to 1 is when in a window totals are read by the plan, so that a thousand nodes take turns."""
        self.windows = Windows(
            kept.incarnation, length_s=length_s, kept=kept.windows, number=kept.number,
            before_ns=kept.end_ns if kept.boot == boot else 0,
        )  # fmt: skip
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
        # By the plan: totals at the last cut, and who was assigned since.
        self._totals_mj: dict[str, int] = {}
        self._assigned: tuple[Assignment, ...] | None = None
        self._cut_turn = 0
        # By the attributor: how far its totals may be off, and what no total holds, at the last look.
        self._told: dict[str, tuple[float, float]] = {}

    def kept(self) -> Kept:
        """What the next run needs to go on, as of the last window that was closed."""
        return Kept(
            incarnation=self.windows.incarnation, number=self.windows.number, boot=self._boot, end_ns=self._closed_ns,
            counters_j=dict(self._closed_j), windows=self.windows.closed, offset_ns=self._offset_ns,
        )  # fmt: skip

    def tick(
        self, tick: Tick, looks: Sequence[tuple[str, RawReadings]], assignments: tuple[Assignment, ...] | None
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

    def clock(self, *, wall_ns: int, monotonic_ns: int) -> None:
        """Both clocks, at each tick before it is taken."""
        before_ns, self._offset_ns = self._offset_ns, wall_ns - monotonic_ns
        step_ns = 0 if before_ns is None else self._offset_ns - before_ns
        if abs(step_ns) > _CLOCK_STEP_NS:
            self.windows.shift(step_ns, foreign=self._is_same_clock)
            if self._is_same_clock or self.windows.ended_ns:
                self._closed_ns += step_ns
            if self._is_same_clock:
                self._before_ns += step_ns

    def wall_ns(self, *, monotonic_ns: int) -> int | None:
        """The time of a moment by the clock of the last tick; None before the first."""
        return None if self._offset_ns is None else max(0, self._offset_ns + monotonic_ns)

    def refuse(self, many: int, reason: str) -> None:
        """The controller counts so many windows in no sum."""
        self.refused += many
        self.refused_reason = reason

    def attributed(self, found: Attribution, *, at_ns: int) -> None:
        """What the attributor found at a look."""
        self._charge_gap(at_ns)
        spent = {}
        for uuid, estimate in found.estimates.items():
            uncertainty_j, uncounted_s = self._told.get(uuid, (0.0, 0.0))
            # Independent ends do not add up, so a difference may be below zero.
            spent[uuid] = Spent(
                max(0, round(1000.0 * (estimate.uncertainty_j - uncertainty_j))),
                max(0.0, estimate.uncounted_s - uncounted_s),
            )
            self._told[uuid] = (estimate.uncertainty_j, estimate.uncounted_s)
        self._charge({uuid: shares for uuid, shares in found.shares.items() if shares}, at_ns=at_ns, spent=spent)

    def close(self) -> None:
        """The agent stops: the open window ends now."""
        self.windows.close()
        self._note()

    def _charge(
        self, shares: Mapping[str, Iterable[Share]], *, at_ns: int, since_ns: int | None = None,
        spent: Mapping[str, Spent] | None = None,
    ) -> None:  # fmt: skip
        self.windows.charge(shares, at_ns=at_ns, since_ns=since_ns, spent=spent)
        self._note()

    def _note(self) -> None:
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
                found[uuid] = (_share(UNATTRIBUTED, round(1000.0 * gap_j), Method.UNATTRIBUTED, Confidence.LOW),)
        if found:
            self._charge(found, at_ns=at_ns, since_ns=self._before_ns)

    def _cut(self, tick: Tick, looks: Sequence[tuple[str, RawReadings]]) -> None:
        """Charges what every device spent since the last cut to whom it was assigned in between."""
        shares: dict[str, tuple[Share, ...]] = {}
        assigned = _by_device(self._assigned or ())
        for column, (uuid, _) in enumerate(looks):
            total_j = tick.reading(Reading.ENERGY_J, column)
            if total_j is None:
                continue
            total_mj = round(1000.0 * total_j)
            # A total below the last is another meter's, which began at zero.
            before_mj = self._totals_mj.get(uuid, 0)
            spent_mj = total_mj - (before_mj if total_mj >= before_mj else 0)
            self._totals_mj[uuid] = total_mj
            shares[uuid] = _planned(spent_mj, assigned.get(uuid, {}))
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


def _planned(energy_mj: int, holders: Mapping[str, int]) -> tuple[Share, ...]:
    held = sum(holders.values())
    if not holders:
        return (_share(UNALLOCATED, energy_mj, Method.EXCLUSIVE, Confidence.HIGH, Part.BARE_IDLE),)
    method, confidence = (
        (Method.EXCLUSIVE, Confidence.MEDIUM) if len(holders) == 1 else (Method.EQUAL_SHARE, Confidence.LOW)
    )
    free = max(0, GPU_MILLI_WHOLE - held)
    parts = apportion(energy_mj, [*map(float, holders.values()), float(free)])
    shares = [
        _share(Owner(kind=OwnerKind.WORKLOAD, workload=name), part, method, confidence)
        for name, part in zip(holders, parts, strict=False)
    ]
    if free:
        shares.append(_share(UNALLOCATED, parts[-1], method, Confidence.LOW, Part.BARE_IDLE))
    return tuple(shares)


def _share(owner: Owner, energy_mj: int, method: Method, confidence: Confidence, part: Part = Part.ACTIVE) -> Share:
    return Share(owner=owner, part=part, energy_mj=energy_mj, method=method, confidence=confidence)
