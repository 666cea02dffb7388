"""Fail-over of two controllers on one PostgreSQL, under load: how long it takes, and whether anything is lost or doubled.

The leader is killed (SIGKILL), stopped (SIGTERM) and paused for three lease times (SIGSTOP), in turns, each as often as
asked; a controller that ends is started again. Printed are the seconds until another controller is ready, until all agents are there, and until a
client is served, and what the clients' and the jobs' own logs say: an acknowledged job ran exactly once, and no device had
two at a time. It fails if that does not hold, or if the 99th percentile until another is ready exceeds the lease by more
than 2 s after a kill or a pause, or is more than 1.5 s after a stop.

    python -m bench.ha [--kills 200] [--stops 20] [--pauses 200] [--lease 10] [--out bench-out]

With --faults each fault of the database is made as often instead: a connection cut at a commit, the server restarted or
crashed, its disk full, read-only, slow, and a standby promoted that lacks the last transactions. Where a fault lasts the
client has to be refused with a reason that fits, and once it has passed it has to be served again without help; the same
logs say that nothing was doubled, and nothing lost but what a promoted standby lacks.

    python -m bench.ha --faults 100 [--fault cut] [--lease 2]
"""

import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from bench.runner import Options, Progress, benchmark
from bench.tables import write_csv

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "pause": signal.SIGSTOP}
_COLUMNS = ("deed", "times", "what", "p50_s", "p99_s", "longest_s")
_FAULTS = ("cut", "restart", "full", "read-only", "slow", "promote")
_FAULT_COLUMNS = ("fault", "times", "served_p50_s", "served_p99_s", "longest_s", "reasons")
_STOP_S_MOST = 1.5
_BEYOND_LEASE_S = 2.0
_REASONS_SHOWN = 3


def _quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


@benchmark()
@click.option("--kills", default=20)
@click.option("--stops", default=20)
@click.option("--pauses", default=20)
@click.option("--lease", "lease_s", multiple=True, type=float, default=(10.0, 1.0), help="Seconds; repeatable.")
@click.option("--nodes", default=2)
@click.option("--faults", default=0, help="Rounds of each fault of the database, instead of fail-overs.")
@click.option("--fault", "kinds", multiple=True, type=click.Choice(_FAULTS), default=_FAULTS, help="Repeatable.")
def main(options: Options) -> int:
    """Runs all rounds for each lease and writes a CSV."""
    from tests import postgres_rig

    if missing := postgres_rig.find_missing():
        print(f"not measured: {missing}")
        return 2
    if options.faults:
        return _report_faults(options)
    rows: list[tuple[object, ...]] = []
    is_met = True
    for lease_s in options.lease_s:
        found, verdict, unplanned = _run(options, lease_s)
        print(
            f"lease {lease_s:g} s: {verdict.acknowledged} acknowledged, {verdict.refused} refused, {len(verdict.lost)} lost, "
            f"{len(verdict.doubled)} doubled, {len(verdict.overlapping)} overlapping, {unplanned} changes unasked"
        )
        is_met &= len(found) == options.kills + options.stops + options.pauses
        is_met &= not (verdict.lost or verdict.doubled or verdict.overlapping)
        for deed in _SIGNALS:
            ones = [one for one in found if one.deed == deed]
            for what in ("ready_s", "agents_s", "served_s") if ones else ():
                values = [getattr(one, what) for one in ones]
                row = (statistics.median(values), _quantile(values, 0.99), max(values))
                print(
                    f"  {deed:5s} {what:8s} p50 {row[0]:6.2f}  p99 {row[1]:6.2f}  longest {row[2]:6.2f} s ({len(ones)})"
                )
                rows.append((f"{deed} lease {lease_s:g}", len(ones), what, *(f"{value:.3f}" for value in row)))
                if what == "ready_s":
                    is_met &= row[1] <= (_STOP_S_MOST if deed == "stop" else lease_s + _BEYOND_LEASE_S)
    write_csv(options.out / "ha.csv", _COLUMNS, rows)
    return 0 if is_met else 1


def _run(options: Options, lease_s: float) -> tuple[list, object, int]:
    from tests.builders.stores import postgres_store
    from tests.ha_scene import HaScene

    counts = {"kill": options.kills, "stop": options.stops, "pause": options.pauses}
    # In turns, as long as there are some of each.
    deeds = [deed for turn in range(max(counts.values())) for deed, count in counts.items() if turn < count]
    found, progress = [], Progress(f"fail-overs with a lease of {lease_s:g} s")
    with (
        tempfile.TemporaryDirectory(prefix="ha-") as folder,
        postgres_store(None) as store,
        HaScene(Path(folder), store.url, lease_s=lease_s, nodes=options.nodes) as scene,
    ):
        for number, deed in enumerate(deeds):
            try:
                found.append(scene.fail_over(deed, _SIGNALS[deed], stop_s=3.0 * lease_s))
            except AssertionError as error:
                # What the logs say until then is judged all the same.
                print(f"broken off at {deed} {number + 1} of {len(deeds)}: {error}")
                break
            progress.show(number + 1, len(deeds))
        return found, scene.judge(), scene.unplanned


def _report_faults(options: Options) -> int:
    """Makes each fault as often as asked, prints what clients were told, and writes a CSV."""
    from tests.ha_faults import DatabaseFaults, Promotions

    rows: list[tuple[object, ...]] = []
    is_met = True
    for world in (DatabaseFaults, Promotions):
        kinds = [kind for kind in world.kinds if kind in options.kinds]
        if not kinds:
            continue
        found, verdict, unexcused = _make_faults(options, world(), kinds)
        print(
            f"{', '.join(kinds)}: {verdict.acknowledged} acknowledged, {verdict.refused} refused, {len(verdict.lost)} lost, "
            f"{len(unexcused)} of them without a promotion, {len(verdict.doubled)} doubled, "
            f"{len(verdict.overlapping)} overlapping"
        )
        is_met &= len(found) == options.faults * len(kinds)
        is_met &= not (unexcused or verdict.doubled or verdict.overlapping)
        for kind in kinds:
            ones = [one for one in found if one.fault == kind]
            if not ones:
                continue
            served_s = [one.served_s for one in ones]
            row = (statistics.median(served_s), _quantile(served_s, 0.99), max(served_s))
            reasons = sorted({one.reason for one in ones if one.reason})
            print(f"  {kind:9s} {len(ones)} times, served p50 {row[0]:.2f}  p99 {row[1]:.2f}  longest {row[2]:.2f} s")
            for reason in reasons[:_REASONS_SHOWN]:
                print(f"    {reason[:200]}")
            rows.append((kind, len(ones), *(f"{value:.3f}" for value in row), len(reasons)))
    write_csv(options.out / "ha_faults.csv", _FAULT_COLUMNS, rows)
    return 0 if is_met else 1


def _make_faults(options: Options, world: Any, kinds: list[str]) -> tuple[list, object, list]:
    from tests.ha_faults import FaultClient
    from tests.ha_scene import HaScene

    found, progress = [], Progress(f"faults of the database: {', '.join(kinds)}")
    lease_s = options.lease_s[-1]
    with (
        tempfile.TemporaryDirectory(prefix="ha-faults-") as folder,
        world,
        HaScene(Path(folder), world.url, lease_s=lease_s, nodes=options.nodes) as scene,
    ):
        client = FaultClient(scene)
        # In turns, so that each kind follows each other one.
        todo = [kind for _ in range(options.faults) for kind in kinds]
        for number, kind in enumerate(todo):
            try:
                scene.wait_until_all_stand()
                found.append(world.run(kind, client))
            except AssertionError as error:
                # What the logs say until then is judged all the same.
                print(f"broken off at {kind} {number + 1} of {len(todo)}: {error}")
                break
            progress.show(number + 1, len(todo))
        verdict = scene.judge()
        return found, verdict, client.unexcused(verdict.lost, world.windows_ns)


if __name__ == "__main__":
    sys.exit(main())
