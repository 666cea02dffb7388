"""Correctness of the node's enforcement: layout transitions, crashes and fault schedules, from any seed.

`python -m bench.node --seeds N --out DIR` runs every check and writes
DIR/summary.csv with the columns check, cases, failures and seconds. A failure
is printed with its seed and the command that runs that seed alone; the exit
status is 1 then. A seed of the two exhaustive checks is a layout to begin
from, so that they are whole from 298 seeds on; a seed of the crash checks is a
transition, with a crash at every moment of it.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import click

from bench import power_schedules
from bench.fault_world import Tally, tally_seeds
from bench.node_crashes import check_crashes, check_simulated_crashes
from bench.node_schedules import check_schedules
from bench.node_transitions import check_maximal, check_sampled, check_whole
from bench.runner import Options, Progress, benchmark, seeds_option, split_names
from bench.tables import write_csv

__all__ = ["CHECKS", "Check", "Outcome", "main", "run_check"]

_FAILURES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise; `one` runs a seed, `share` is the part of the seeds that it takes, `most` where there are no more."""

    name: str
    one: Callable[[int], Tally]
    share: float = 1.0
    most: int | None = None

    def seeds(self, asked: int) -> int:
        """How many of so many seeds it runs."""
        count = max(1, round(asked * self.share))
        return count if self.most is None else min(count, self.most)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a check found; `failed` are the seeds with the first problem of each."""

    check: str
    cases: int
    failures: int
    seconds: float
    failed: tuple[tuple[int, str], ...]


CHECKS: tuple[Check, ...] = (
    Check(name="maximal", one=partial(check_maximal, count=1), most=19),
    Check(name="layouts", one=partial(check_whole, count=1), most=298),
    Check(name="sampled", one=partial(check_sampled, count=1)),
    Check(name="crashes", one=partial(check_crashes, count=1), share=0.1),
    Check(name="simulated-crashes", one=partial(check_simulated_crashes, count=1), share=0.1),
    Check(name="schedules", one=partial(check_schedules, count=1)),
    Check(name="power-schedules", one=partial(tally_seeds, power_schedules.run_schedule, count=1)),
)


def run_check(check: Check, *, first: int, seeds: int, progress: Progress) -> Outcome:
    """Every seed of a check; an error in a schedule is a failure of its seed and ends nothing."""
    began, cases, failures = time.perf_counter(), 0, 0
    failed: list[tuple[int, str]] = []
    for number, seed in enumerate(range(first, first + seeds), 1):
        try:
            tally = check.one(seed)
        except Exception as error:  # noqa: BLE001  # whatever it is, this seed brings it again
            tally = Tally(cases=1, failures=1, first=[f"{type(error).__name__}: {error}"])
        cases += tally.cases
        failures += tally.failures
        if tally.failures:
            failed.append((seed, tally.first[0]))
        progress.show(number, seeds, f"{len(failed)} failed")
    return Outcome(
        check=check.name, cases=cases, failures=failures, seconds=time.perf_counter() - began, failed=tuple(failed)
    )


@benchmark()
@seeds_option(10_000)
@click.option("--first-seed", default=0, help="first seed")
@click.option("--only", multiple=True, help="A check by its name; may be repeated.")
def main(options: Options, checks: Sequence[Check] = CHECKS) -> int:
    """Runs the checks; 1 where one failed."""
    if options.seeds < 1 or options.first_seed < 0:
        raise click.UsageError("--seeds is 1 at least, and --first-seed 0")
    only = split_names(",".join(options.only) or "all", [check.name for check in checks])
    chosen = [check for check in checks if check.name in only]
    outcomes = []
    for check in chosen:
        # Whoever asks for one check means its seeds and no share of them.
        seeds = options.seeds if options.only and check.most is None else check.seeds(options.seeds)
        outcome = run_check(check, first=options.first_seed, seeds=seeds, progress=Progress(f"seeds of {check.name}"))
        outcomes.append(outcome)
        rows = [(one.check, one.cases, one.failures, f"{one.seconds:.1f}") for one in outcomes]
        write_csv(options.out / "summary.csv", ("check", "cases", "failures", "seconds"), rows)
        _report(outcome, seeds)
    return 1 if any(outcome.failures for outcome in outcomes) else 0


def _report(outcome: Outcome, seeds: int) -> None:
    print(
        f"{outcome.check}: {seeds:,} seeds, {outcome.cases:,} cases, {outcome.failures} failures, "
        f"{outcome.seconds:.1f} s",
        flush=True,
    )
    for seed, problem in outcome.failed[:_FAILURES_SHOWN]:
        print(f"  seed {seed}: {problem}")
        print(f"    again: python -m bench.node --only {outcome.check} --first-seed {seed} --seeds 1 --out DIR")
    if len(outcome.failed) > _FAILURES_SHOWN:
        print(f"  and {len(outcome.failed) - _FAILURES_SHOWN} more seeds")


if __name__ == "__main__":
    sys.exit(main())
