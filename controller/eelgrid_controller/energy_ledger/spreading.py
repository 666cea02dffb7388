"""From a window to entries: cut at whole hours, charged to holders, priced by the time.

Owns the cut and the price. Must not know agents, files or clocks.

Theory. Power within a window is taken as even, which a minute allows; a window that spans
hours (an agent that was away, or did not run) is even over all of them. Energy goes to hours
by the length of each, as whole millijoules: the k-th hour gets what the first k have rounded,
less what the first k - 1 have, so that the hours add up to the window exactly. Shares are
cut each for itself, and what a place drew in an hour is the sum of them. A window
without length belongs to the hour that it is in. Hours times shares are bounded before any work
is done: beyond `PIECES_MOST` several hours are one piece, which counts in its first hour. Money is the integral of the price over the
same stretch, with carbon and PUE of the time; joules stay those of the devices, since PUE is
the building's.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

from eelgrid_controller.energy_ledger.entries import HOUR_S, Entry, Holder, Measured, Place, Spent
from eelgrid_controller.energy_ledger.plausibility import PIECES_MOST
from eelgrid_controller.power.tariff import Tariff
from eelgrid_protos.messages import EnergyOwner, EnergyPart, EnergyWindow

__all__ = ["Spread", "pieces_of", "spread"]

# Where a part stands in `Spent`; one of a newer agent that is not known is at work.
_COLUMNS = {EnergyPart.BARE_IDLE: 0, EnergyPart.CONTEXT_IDLE: 1}
_ACTIVE = 2


class Spread:
    """What one window adds to the ledger."""

    __slots__ = ("entries", "measured")

    def __init__(self, entries: list[Entry], measured: list[Measured]) -> None:
        self.entries = entries
        self.measured = measured


def spread(
    window: EnergyWindow, places: Mapping[str, Place], holder_of: Callable[[EnergyOwner], Holder],
    tariff: Tariff | None, *, came_s: float | None = None,
) -> Spread:  # fmt: skip
    """Entries of a window of one node; `places` by GPU UUID, for each of its devices.

    With `came_s` all of it belongs to the hour of that time, whatever the window's own times are.
    """
    hours = _hours(window) if came_s is None else [(came_s, came_s)]
    cuts = _fractions(hours)
    prices = [_price(tariff, begin_s, end_s) for begin_s, end_s in hours]
    holders = [holder_of(owner) for owner in window.owners]
    parts_mj: dict[tuple[int, Place, Holder], list[int]] = {}  # by number of the hour
    drawn: dict[tuple[int, Place], int] = {}
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
        spent = Spent(bare_mj, context_mj, active_mj, cost * energy_j, carbon_g * energy_j)
        entries.append(Entry(_hour_of(hours[hour][0]), place, holder, spent))
    return Spread(entries, _measured(window, places, hours, cuts, drawn))


def _measured(
    window: EnergyWindow, places: Mapping[str, Place], hours: list[tuple[float, float]], cuts: list[float],
    drawn: Mapping[tuple[int, Place], int],
) -> list[Measured]:  # fmt: skip
    """By hour and place; totals are `drawn`, the sums of shares as they were cut, so that each hour adds up, too."""
    found: dict[tuple[int, Place], Measured] = {}
    for device in window.devices:
        for hour, uncertainty_mj in enumerate(_cut(device.uncertainty_mj, cuts)):
            key = (_hour_of(hours[hour][0]), places[device.gpu_uuid])
            before = found.get(key, Measured(*key, drawn.get(key, 0), 0, 0.0))
            found[key] = Measured(
                *key,
                before.total_mj,
                before.uncertainty_mj + uncertainty_mj,
                before.uncounted_s + device.uncounted_s * (cuts[hour + 1] - cuts[hour]),
            )
    return list(found.values())


def _hour_of(at_s: float) -> int:
    return int(at_s // HOUR_S) * HOUR_S


def pieces_of(window: EnergyWindow) -> int:
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


def _price(tariff: Tariff | None, begin_s: float, end_s: float) -> tuple[float, float]:
    """Money and grams of carbon for a joule at a GPU, in the mean of a stretch."""
    if tariff is None:
        return 0.0, 0.0
    grams = Tariff(price=tariff.carbon, pue=tariff.pue, begins_s=tariff.begins_s)
    return _mean(tariff, begin_s, end_s), _mean(grams, begin_s, end_s)


def _mean(tariff: Tariff, begin_s: float, end_s: float) -> float:
    slices = tariff.slices(begin_s, end_s - begin_s) if end_s > begin_s else ()
    if len(slices) < 2:
        return tariff.at(0.5 * (begin_s + end_s))
    return math.fsum(one.price * one.seconds for one in slices) / (end_s - begin_s)
