"""Chooses the autoscaler's target of each service: python -m bench.loop.targets services.csv.

Owns the choice, and the file that the policy `hpa-each` reads. Must not know how a day is played.

The input is services.csv of one run of bench.loop with `ours` and the autoscaler at several targets for all services
alike, on seeds of its own. Services share nothing under the autoscaler, so a target for each is chosen from these
runs alone: the least energy with no more broken windows a day than `ours`. First by a price of a broken window, the
same for all services, which is found by bisection; then what that leaves of the windows is spent one service after
another, where it saves most.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.tables import write_csv

__all__ = ["FILE", "Choice", "best_targets", "load_targets", "main", "read_choices"]

FILE = Path(__file__).with_name("targets.csv")
_STEPS = 60
_PRICE_MOST_J = 1e9  # of a broken window: some 280 kWh


class Choice(NamedTuple):
    """One service at one target, all seeds together."""

    target_pct: int
    drawn_j: float  # above what the same GPUs draw idle, which they do when another service has them
    broken: int


def read_choices(lines: Sequence[Mapping[str, str]]) -> tuple[dict[str, list[Choice]], int]:
    """What each service can choose from, and as many windows as ours broke in as many days."""
    sums: dict[str, dict[int, tuple[float, int]]] = {}
    broken, days, own_days = 0, set[str](), set[str]()
    for line in lines:
        kind, _, target = line["policy"].partition("-")
        if line["policy"] == "ours":
            broken += int(line["violated"])
            own_days.add(line["seed"])
        elif kind == "hpa" and target.isdigit():
            days.add(line["seed"])
            at = sums.setdefault(line["name"], {})
            drawn_j, before = at.get(int(target), (0.0, 0))
            above_j = float(line["drawn_j"]) - float(line["idle_j"])
            at[int(target)] = (drawn_j + above_j, before + int(line["violated"]))
    allowed = round(broken * len(days) / max(1, len(own_days)))
    return {name: [Choice(target, *one) for target, one in sorted(at.items())] for name, at in sums.items()}, allowed


def best_targets(choices: Mapping[str, Sequence[Choice]], allowed: int) -> dict[str, Choice]:
    """The least energy with at most so many broken windows; the fewest broken where no choice keeps within them."""

    def at_price(price_j: float) -> dict[str, Choice]:
        return {
            name: min(of, key=lambda one: (one.drawn_j + price_j * one.broken, one.broken))
            for name, of in choices.items()
        }

    low_j, high_j = 0.0, _PRICE_MOST_J
    if _broken(at_price(low_j)) <= allowed:
        return at_price(low_j)
    for _ in range(_STEPS):
        middle_j = (low_j + high_j) / 2.0
        low_j, high_j = (low_j, middle_j) if _broken(at_price(middle_j)) <= allowed else (middle_j, high_j)
    chosen = at_price(high_j)
    while True:
        left = allowed - _broken(chosen)
        better = [
            (chosen[name].drawn_j - one.drawn_j, name, one)
            for name, of in choices.items()
            for one in of
            if one.drawn_j < chosen[name].drawn_j and one.broken - chosen[name].broken <= left
        ]
        if not better:
            return chosen
        _, name, one = max(better)
        chosen[name] = one


def _broken(chosen: Mapping[str, Choice]) -> int:
    return sum(one.broken for one in chosen.values())


def load_targets(path: Path = FILE) -> dict[str, float]:
    """Shares by service, as they were chosen."""
    with path.open(newline="", encoding="utf-8") as file:
        return {line["service"]: int(line["target_pct"]) / 100.0 for line in csv.DictReader(file)}


def main(arguments: Sequence[str]) -> int:
    """Writes the file; 2 where the runs are not there."""
    if len(arguments) != 1:
        print("give one file: services.csv of bench.loop with ours and hpa-50 to hpa-85", file=sys.stderr)
        return 2
    with Path(arguments[0]).open(newline="", encoding="utf-8") as file:
        choices, allowed = read_choices(list(csv.DictReader(file)))
    if not choices:
        print(f"{arguments[0]} has no policy hpa-N: run bench.loop with them", file=sys.stderr)
        return 2
    chosen = best_targets(choices, allowed)
    write_csv(FILE, ("service", "target_pct"), [[name, one.target_pct] for name, one in sorted(chosen.items())])
    print(f"{_broken(chosen)} windows broken of {allowed} allowed; written to {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
