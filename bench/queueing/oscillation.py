"""KAI's two-queue oscillation: two queues of weight 1 that each always have a job of all 16 GPUs, without end.

Owns the replay of DATA/kai_kueue's `two_queue_oscillation` on the product's own past use (`DecayedUsage`), and the rows
of this set. At every cycle the queue with the smaller past use may take the GPUs back, if it is smaller by more than a
margin: without one the two would change places at every cycle. The product has the past use and orders waiting work by
it; it has no reclaim between queues within their rights, so on its own the first job would keep the GPUs for ever. That
is the row `eelgrid today`.

Only the half-life of KAI's file is played, not its window. Theory: the difference of past use swings between the margin
and its negative, so the time that each queue has held the GPUs differs by at most one turn, which the margin bounds, and
the share tends to one half.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from bench.queueing.summary import SetResult, SummaryRow
from eelgrid_controller.state.queue_usage import DecayedUsage

_NS = 1_000_000_000
_HALF_LIVES = 10
_SHARE_ERROR_MOST = 0.01
# Of the use that a queue with all GPUs would have for ever.
MARGINS = (0.0, 0.02, 0.1)


@dataclass(frozen=True)
class Oscillation:
    """The share of the first queue after each cycle, since the begin, and how often the GPUs changed queues."""

    shares: tuple[float, ...]
    changes: int


def alternate(cycles: int, gpus: int, half_life: float, margin: float | None) -> Oscillation:
    """Plays cycles of a second; None as a margin is no reclaim at all."""
    rate = (1000.0 * gpus, 0.0, 0.0)
    idle = tuple(-one for one in rate)
    past = [DecayedUsage(0), DecayedUsage(0)]
    full = rate[0] * half_life / 0.6931471805599453
    holder, held, changes, shares = 0, [0, 0], 0, list[float]()
    past[0] = past[0].change(0, half_life, rate, charges=False)
    for cycle in range(cycles):
        now_ns = cycle * _NS
        uses = [one.at(now_ns, half_life)[0] for one in past]
        if margin is not None and uses[holder] - uses[1 - holder] > margin * full:
            past[holder] = past[holder].change(now_ns, half_life, idle, charges=False)
            holder = 1 - holder
            past[holder] = past[holder].change(now_ns, half_life, rate, charges=False)
            changes += 1
        held[holder] += 1
        shares.append(held[0] / (cycle + 1))
    return Oscillation(tuple(shares), changes)


def _play(folder: Path) -> tuple[dict[str, Oscillation], int]:
    load = json.loads((folder / "kai_kueue.json").read_text(encoding="utf-8"))["kai"]["two_queue_oscillation"]
    half_life, gpus = float(load["half_life"]), int(load["nodes"] * load["gpus_per_node"])
    cycles = int(_HALF_LIVES * half_life)
    found = {"eelgrid today": alternate(cycles, gpus, half_life, None)}
    for margin in MARGINS:
        found[f"reclaim by past use, margin {margin:g}"] = alternate(cycles, gpus, half_life, margin)
    return found, cycles


def run_set(folder: Path, *, quick: bool) -> SetResult:
    """Runs the set, which takes less than a second, quick or not."""
    del quick
    found, cycles = _play(folder)
    rows, targets = list[SummaryRow](), list[tuple[str, bool]]()
    for policy, one in found.items():
        share = one.shares[-1]
        rows.append(SummaryRow("kai oscillation", policy, "share_of_one_queue", share, None, 0.5))
        rows.append(SummaryRow("kai oscillation", policy, "changes", float(one.changes)))
        what = f"{policy}: share {share:.3f} within 0.5 +- {_SHARE_ERROR_MOST} over {cycles} cycles of a second"
        targets.append((what, abs(share - 0.5) <= _SHARE_ERROR_MOST))
    curves = {policy: one.shares for policy, one in found.items()}
    return SetResult(tuple(rows), tuple(targets), curves)


def draw(path: Path, result: SetResult) -> None:
    """Draws the share of one queue over time."""
    from bench.plotting import draw_figure  # a second to import

    with draw_figure(path, size=(9, 5)) as panels:
        for policy, shares in result.curves.items():
            panels[0].plot(range(1, len(shares) + 1), shares, label=policy)
        panels[0].axhline(0.5, color="0.5", linestyle="--")
        panels[0].set_xlabel("cycle of a second; the half-life is 128 cycles")
        panels[0].set_title("share of one of two queues of weight 1, since the begin")
        panels[0].legend()
