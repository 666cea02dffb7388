"""Energy windows of agents: plausibility checks, and their apportionment to hours, owners and prices.

Plausibility. A node reports its own devices, so its claim is bounded by what they can have drawn. In one window no
board draws more than its maximum power, with room for a counter that answers late (`LATE_S`). Over all windows of a
node no board draws more than its maximum power over the elapsed time: `ClaimAllowance` is that time, and each window
takes from it what its busiest board needs at full power. So overlapping or repeated windows gain nothing. Times are
the node's own and may be wrong: a window that is far from now is counted in the hour in which it arrived.

Apportionment. Power within a window is taken as constant. Energy goes to hours by the length of each, as whole
millijoules: the k-th hour gets the rounded sum of the first k less that of the first k - 1, so that the hours add up
to the window exactly. Shares are cut one by one. Beyond `PIECES_MOST` several hours are one piece, which counts in
its first hour. Money is the integral of the price over the same interval, with the carbon intensity and PUE of the
time; joules stay those of the devices, since PUE is the building's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from eelgrid_controller.energy.ledger import (
    HOUR_S,
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
)
from eelgrid_controller.objectives.power.tariffs import EnergyTariff
from eelgrid_protos.messages import EnergyOwner, EnergyPart, EnergyWindow

# What SQLite keeps as an integer.
NUMBER_MOST = 2**63 - 1
# Of a board that the catalogue does not know: the largest module limit known is 2,900 W.
BOARD_W_MOST = 5_000.0
# Counters are some per cent off, and boards exceed their limit for moments.
MARGIN = 1.5
# A device that answered nothing for so long and then does tells the energy of all that time in one window.
LATE_S = 3600.0
# An agent without a controller keeps its hours apart for a month, and then joins them: a quarter is late enough.
PAST_S_MOST = 92 * 86_400.0
# Clocks of nodes that are not synchronised differ by minutes.
AHEAD_S_MOST = 3600.0
# Hours times shares that a window is cut into: some 30 ms of the event loop. Beyond, the pieces are longer than an hour.
PIECES_MOST = 16_384
# Pieces that a node may send at once and then each second. Eight GPUs with 56 slices make some 350 a minute; what was
# kept over a day comes at once.
_PIECES_AT_ONCE = 200_000.0
_PIECES_HZ = 4_000.0


class WindowVerdict(NamedTuple):
    """Why a window is refused, "" where it is not; whether its times can be; and what its busiest board needs."""

    reason: str
    is_placed: bool = True
    board_s: float = 0.0


@dataclass(slots=True)
class ClaimAllowance:
    """What one node may still claim: seconds of its boards at full power, and pieces; as of a monotonic time."""

    at_s: float
    board_s: float = PAST_S_MOST
    pieces: float = _PIECES_AT_ONCE

    def advance(self, now_s: float) -> None:
        """Time has passed."""
        passed_s = max(0.0, now_s - self.at_s)
        self.at_s = max(self.at_s, now_s)
        self.board_s = min(PAST_S_MOST, self.board_s + passed_s)
        self.pieces = min(_PIECES_AT_ONCE, self.pieces + _PIECES_HZ * passed_s)


def judge_window(
    window: EnergyWindow, watts: Mapping[str, float], allowance: ClaimAllowance, *, now_s: float
) -> WindowVerdict:
    """Whether a window can be; `watts` are the greatest of boards by UUID, `now_s` is Unix time."""
    begin_s, end_s = window.begin_ns / 1e9, window.end_ns / 1e9
    is_placed = begin_s >= now_s - PAST_S_MOST and end_s <= now_s + AHEAD_S_MOST
    if window.number > NUMBER_MOST:
        return WindowVerdict(f"number {window.number} is above {NUMBER_MOST}")
    if len({device.gpu_uuid for device in window.devices}) < len(window.devices):
        return WindowVerdict("a device is named twice")
    board_s = 0.0
    # By its own times, twice: a window's first share is of the moments before it begins.
    longest_s = LATE_S + 2.0 * min(end_s - begin_s, PAST_S_MOST)
    for device in window.devices:
        full_w = MARGIN * watts.get(device.gpu_uuid, BOARD_W_MOST)
        most_mj = 1000.0 * full_w * longest_s
        for what, energy_mj in (("energy", device.total_mj), ("uncertainty", device.uncertainty_mj)):
            if energy_mj > most_mj:
                return WindowVerdict(
                    f"device {device.gpu_uuid} has {what} of {energy_mj / 1000.0:.6g} J in {end_s - begin_s:.6g} s, "
                    f"at {full_w:g} W it can have {most_mj / 1000.0:.6g} J"
                )
        if device.uncounted_s > PAST_S_MOST:
            return WindowVerdict(f"device {device.gpu_uuid} has {device.uncounted_s:.6g} s that nobody measured")
        board_s = max(board_s, device.total_mj / (1000.0 * full_w))
    if board_s > allowance.board_s + LATE_S:
        return WindowVerdict(
            f"its devices would have needed {board_s:.6g} s at full power, and {allowance.board_s:.6g} s have passed "
            "since their last windows"
        )
    return WindowVerdict("", is_placed, board_s)


# Where a part stands in `Spent`; one of a newer agent that is not known is at work.
_COLUMNS = {EnergyPart.BARE_IDLE: 0, EnergyPart.CONTEXT_IDLE: 1}
_ACTIVE = 2


class WindowSpread:
    """What one window adds to the ledger."""

    __slots__ = ("entries", "measured")

    def __init__(self, entries: list[LedgerEntry], measured: list[MeasuredEnergy]) -> None:
        self.entries = entries
        self.measured = measured


def spread_window(
    window: EnergyWindow,
    places: Mapping[str, LedgerPlace],
    holder_of: Callable[[EnergyOwner], EnergyHolder],
    tariff: EnergyTariff | None,
    *,
    came_s: float | None = None,
) -> WindowSpread:
    """Entries of a window of one node; `places` by GPU UUID, for each of its devices.

    With `came_s` all of it belongs to the hour of that time, whatever the window's own times are.
    """
    hours = _hours(window) if came_s is None else [(came_s, came_s)]
    cuts = _fractions(hours)
    prices = [_price(tariff, begin_s, end_s) for begin_s, end_s in hours]
    holders = [holder_of(owner) for owner in window.owners]
    parts_mj: dict[tuple[int, LedgerPlace, EnergyHolder], list[int]] = {}  # by number of the hour
    drawn: dict[tuple[int, LedgerPlace], int] = {}
    for share in window.shares:
        place = places[window.devices[share.device].gpu_uuid]
        for hour, energy_mj in enumerate(_cut(share.energy_mj, cuts)):
            if not energy_mj:
                continue
            at = (_hour_of(hours[hour][0]), place)
            drawn[at] = drawn.get(at, 0) + energy_mj
            parts = parts_mj.setdefault((hour, place, holders[share.owner]), [0, 0, 0])
            parts[_COLUMNS.get(share.part, _ACTIVE)] += energy_mj
    entries = []
    for (hour, place, holder), (bare_mj, context_mj, active_mj) in parts_mj.items():
        energy_j = (bare_mj + context_mj + active_mj) / 1000.0
        cost, carbon_g = prices[hour]
        spent = LedgerAmount(bare_mj, context_mj, active_mj, cost * energy_j, carbon_g * energy_j)
        entries.append(LedgerEntry(_hour_of(hours[hour][0]), place, holder, spent))
    return WindowSpread(entries, _measured_by_hour(window, places, hours, cuts, drawn))


def _measured_by_hour(
    window: EnergyWindow,
    places: Mapping[str, LedgerPlace],
    hours: list[tuple[float, float]],
    cuts: list[float],
    drawn: Mapping[tuple[int, LedgerPlace], int],
) -> list[MeasuredEnergy]:
    """By hour and place; totals are `drawn`, the sums of shares as they were cut, so that each hour adds up, too."""
    found: dict[tuple[int, LedgerPlace], MeasuredEnergy] = {}
    for device in window.devices:
        for hour, uncertainty_mj in enumerate(_cut(device.uncertainty_mj, cuts)):
            key = (_hour_of(hours[hour][0]), places[device.gpu_uuid])
            before = found.get(key, MeasuredEnergy(*key, drawn.get(key, 0), 0, 0.0))
            found[key] = MeasuredEnergy(
                *key,
                before.total_mj,
                before.uncertainty_mj + uncertainty_mj,
                before.uncounted_s + device.uncounted_s * (cuts[hour + 1] - cuts[hour]),
            )
    return list(found.values())


def _hour_of(at_s: float) -> int:
    return int(at_s // HOUR_S) * HOUR_S


def count_pieces(window: EnergyWindow) -> int:
    """How many pieces a window is cut into by time and share."""
    rows = max(1, len(window.shares), len(window.devices))
    return min(_hours_within(window), max(1, PIECES_MOST // rows)) * rows


def _hours_within(window: EnergyWindow) -> int:
    """How many hours a window touches."""
    hour_ns = HOUR_S * 10**9
    return max(1, -(-window.end_ns // hour_ns) - window.begin_ns // hour_ns)


def _hours(window: EnergyWindow) -> list[tuple[float, float]]:
    """The window cut at whole hours, each piece within one; at fewer of them where the pieces would be too many."""
    begin_s, end_s = window.begin_ns / 1e9, window.end_ns / 1e9
    hours, rows = _hours_within(window), max(1, len(window.shares), len(window.devices))
    step_s = HOUR_S * -(-hours // max(1, PIECES_MOST // rows))
    first = _hour_of(begin_s) + step_s
    if end_s <= first:
        return [(begin_s, end_s)]
    marks = [first + step_s * step for step in range(math.ceil((end_s - first) / step_s))]
    return [(low, high) for low, high in pairwise([begin_s, *marks, end_s]) if high > low]


def _fractions(hours: list[tuple[float, float]]) -> list[float]:
    """Where each piece begins and ends, as a share of all; rises from 0 to 1."""
    begin_s, length_s = hours[0][0], hours[-1][1] - hours[0][0]
    if length_s <= 0.0:
        return [0.0, 1.0]
    return [0.0, *((high - begin_s) / length_s for _, high in hours[:-1]), 1.0]


def _cut(total: int, cuts: list[float]) -> list[int]:
    marks = [0, *(round(total * cut) for cut in cuts[1:-1]), total]
    return [high - low for low, high in pairwise(marks)]


def _price(tariff: EnergyTariff | None, begin_s: float, end_s: float) -> tuple[float, float]:
    """Money and grams of carbon for a joule at a GPU, in the mean of a stretch."""
    if tariff is None:
        return 0.0, 0.0
    grams = EnergyTariff(price=tariff.carbon, pue=tariff.pue, begins_s=tariff.begins_s)
    return _mean(tariff, begin_s, end_s), _mean(grams, begin_s, end_s)


def _mean(tariff: EnergyTariff, begin_s: float, end_s: float) -> float:
    slices = tariff.price_slices(begin_s, end_s - begin_s) if end_s > begin_s else ()
    if len(slices) < 2:
        return tariff.price_at(0.5 * (begin_s + end_s))
    return math.fsum(one.price * one.seconds for one in slices) / (end_s - begin_s)
