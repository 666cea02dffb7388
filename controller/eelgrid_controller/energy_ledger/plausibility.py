"""Whether an energy window can be true: its numbers, what its boards can have drawn, and where in time it lies.

Owns the bounds and the judgement. Must not know ledgers, agents or clocks: the time is an argument.

Theory. A node speaks for its own devices, so what it claims is bounded by what they can have
drawn, in two ways. In one window no board draws more than its greatest power over the window,
with room for a counter that answers late (`LATE_S`). Over all windows of a node no board draws
more than its greatest power over the time that has passed: `Allowance` is that time, and each
window takes from it what its busiest board needs at full power. So a window that overlaps
others, or is sent again under a new number, gains nothing.

Times are the node's own and may be wrong: a machine that boots begins in 1970. A window that
is far from now is not spread over the hours it names. Its joules are real, so they are counted,
in the hour in which the window came (`is_placed` is False).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from eelgrid_protos.messages import EnergyWindow

__all__ = [
    "AHEAD_S_MOST", "BOARD_W_MOST", "LATE_S", "MARGIN", "NUMBER_MOST", "PAST_S_MOST", "PIECES_MOST", "Allowance",
    "Verdict", "judge_window",
]  # fmt: skip

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


class Verdict(NamedTuple):
    """Why a window is refused, "" where it is not; whether its times can be; and what its busiest board needs."""

    reason: str
    is_placed: bool = True
    board_s: float = 0.0


@dataclass(slots=True)
class Allowance:
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
    window: EnergyWindow, watts: Mapping[str, float], allowance: Allowance, *, now_s: float
) -> Verdict:  # fmt: skip
    """Whether a window can be; `watts` are the greatest of boards by UUID, `now_s` is Unix time."""
    begin_s, end_s = window.begin_ns / 1e9, window.end_ns / 1e9
    is_placed = begin_s >= now_s - PAST_S_MOST and end_s <= now_s + AHEAD_S_MOST
    if window.number > NUMBER_MOST:
        return Verdict(f"number {window.number} is above {NUMBER_MOST}")
    if len({device.gpu_uuid for device in window.devices}) < len(window.devices):
        return Verdict("a device is named twice")
    board_s = 0.0
    # By its own times, twice: a window's first share is of the moments before it begins.
    longest_s = LATE_S + 2.0 * min(end_s - begin_s, PAST_S_MOST)
    for device in window.devices:
        full_w = MARGIN * watts.get(device.gpu_uuid, BOARD_W_MOST)
        most_mj = 1000.0 * full_w * longest_s
        for what, energy_mj in (("energy", device.total_mj), ("uncertainty", device.uncertainty_mj)):
            if energy_mj > most_mj:
                return Verdict(
                    f"device {device.gpu_uuid} has {what} of {energy_mj / 1000.0:.6g} J in {end_s - begin_s:.6g} s, "
                    f"at {full_w:g} W it can have {most_mj / 1000.0:.6g} J"
                )
        if device.uncounted_s > PAST_S_MOST:
            return Verdict(f"device {device.gpu_uuid} has {device.uncounted_s:.6g} s that nobody measured")
        board_s = max(board_s, device.total_mj / (1000.0 * full_w))
    if board_s > allowance.board_s + LATE_S:
        return Verdict(
            f"its devices would have needed {board_s:.6g} s at full power, and {allowance.board_s:.6g} s have passed "
            "since their last windows"
        )
    return Verdict("", is_placed, board_s)
