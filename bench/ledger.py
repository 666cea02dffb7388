"""`python -m bench.ledger --out DIR`: how large a year of the energy ledger is, and how long a month's report takes.

Before that, what a window costs the controller: 1,213 nodes of eight GPUs send one each, as in a minute of a cluster.

A thousand GPUs in 125 nodes. In each hour a node has `--holders` holders, and jobs last some hours, so that names come
and go: a year has about a quarter of a million jobs. Windows come by the minute in life; here their sums are added by
the hour, which leaves the same rows. Asked: a year in under 5 GB, a month's report in under a second.
"""

import argparse
import asyncio
import csv
import logging
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from eelgrid_controller.adapters.energy_desk import EnergyDesk
from eelgrid_controller.adapters.energy_store import FILE_NAME, open_energy
from eelgrid_controller.clock import Clock
from eelgrid_controller.energy_ledger.asking import DAY_S, asked_of
from eelgrid_controller.energy_ledger.entries import HOUR_S, Booked, Entry, Holder, Measured, Place
from eelgrid_controller.energy_ledger.working import WorkEntry
from eelgrid_protos import codec
from eelgrid_protos.messages import (
    AttributionConfidence,
    AttributionMethod,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    Inventory,
    OwnerKind,
    WindowDevice,
    WindowShare,
)

_BEGIN_S = 1_767_225_600  # 2026-01-01
_NODES = 125


def _holder(number: int, rng: random.Random) -> Holder:
    team = rng.randrange(40)
    return Holder(
        "pod", f"team-{team}", f"job-{number}-worker-0", f"pod-{number:032x}", f"job-{number}", f"user-{rng.randrange(300)}",
        f"queue-{team % 8}", (("app", f"app-{rng.randrange(100)}"), ("team", f"team-{team}")),
    )  # fmt: skip


def _fill(folder: Path, days: int, holders: int) -> int:
    store, rng = open_energy(folder), random.Random(1)
    places = [Place(f"node-{node}", f"pool-{node % 4}", "h100-sxm5-80gb") for node in range(_NODES)]
    made = 0
    running: list[list[tuple[Holder, int]]] = [[] for _ in places]
    began_s = time.monotonic()
    for hour in range(24 * days):
        entries, measured = [], []
        for place, jobs in zip(places, running, strict=True):
            jobs[:] = [(holder, until) for holder, until in jobs if until > hour]
            while len(jobs) < holders - 1:
                made += 1
                jobs.append((_holder(made, rng), hour + 1 + int(rng.expovariate(1 / 36))))
            at_s, total_mj = _BEGIN_S + hour * HOUR_S, 0
            for holder in (*(holder for holder, _ in jobs), Holder("unallocated")):
                booked = Booked(rng.randrange(10**8), rng.randrange(10**7), rng.randrange(10**9), rng.random(), 9.0)
                total_mj += booked.energy_mj
                entries.append(Entry(at_s, place, holder, booked))
            measured.append(Measured(at_s, place, total_mj, total_mj // 20, 0.0))
        # Every fourth job tells how far it is.
        worked = [
            WorkEntry(at_s, holder.workload, "work", 3600.0, HOUR_S, 0.0, at_s + HOUR_S)
            for jobs in running
            for holder, _ in jobs
            if int(holder.title.removeprefix("job-")) % 4 == 0
        ]
        store.add(entries, measured, [(place.node_name, 1, hour + 1) for place in places], worked)
        if sys.stderr.isatty() and hour % 24 == 0:
            print(f"\rday {hour // 24} of {days}, {time.monotonic() - began_s:.0f} s", end="", file=sys.stderr)
    store.close()
    return made


def _window(node: int, number: int) -> EnergyWindow:
    """A minute of eight GPUs: two held by two pods each, four by a job, two by nobody."""
    owners = [
        EnergyOwner(kind=OwnerKind.POD, namespace=f"team-{node % 40}", pod=f"pod-{node}-{one}") for one in range(4)
    ]
    owners += [EnergyOwner(kind=OwnerKind.SLURM, job=str(node), step="0"), EnergyOwner(kind=OwnerKind.UNALLOCATED)]
    held = {0: (0, 1), 1: (2, 3), 2: (4,), 3: (4,), 4: (4,), 5: (4,), 6: (5,), 7: (5,)}
    shares = [
        WindowShare(
            device=device, owner=owner, part=part, method=AttributionMethod.EXCLUSIVE,
            confidence=AttributionConfidence.HIGH, energy_mj=6_000_000 + owner,
        )
        for device, by in held.items()
        for owner in by
        for part in (EnergyPart.BARE_IDLE, EnergyPart.CONTEXT_IDLE, EnergyPart.ACTIVE)
    ]  # fmt: skip
    totals = [sum(share.energy_mj for share in shares if share.device == device) for device in range(8)]
    begin_ns = (_BEGIN_S + 60 * number) * 10**9
    return EnergyWindow(
        incarnation=1, number=number + 1, begin_ns=begin_ns, end_ns=begin_ns + 60 * 10**9,
        devices=tuple(WindowDevice(gpu_uuid=f"GPU-{node}-{one}", total_mj=total) for one, total in enumerate(totals)),
        owners=tuple(owners), shares=tuple(shares),
    )  # fmt: skip


async def _taken(folder: Path, nodes: int, minutes: int) -> tuple[float, float]:
    """Milliseconds of CPU for each window: of the event loop to take it, and of all threads until it is on disk."""
    state = SimpleNamespace(workloads={}, policy=SimpleNamespace(prices=None))
    desk = EnergyDesk(folder, core=lambda: SimpleNamespace(state=state), clock=Clock(), log=logging.getLogger("bench"))  # type: ignore[arg-type, return-value]
    running = asyncio.create_task(desk.run())
    places = [Inventory(node_name=f"node-{node}", cpu_milli=1, memory_bytes=1, pool="p") for node in range(nodes)]
    data = [[codec.encode(_window(node, minute)) for node in range(nodes)] for minute in range(minutes)]
    heard = 0

    def hear(_: object) -> None:
        nonlocal heard
        heard += 1

    while desk.windows == desk.dropped:
        desk.take(places[0], codec.decode(EnergyWindow, data[0][0]), hear)
        await asyncio.sleep(0.05)
    began_cpu_s, loop_s = time.process_time(), 0.0
    for minute in data:
        for place, one in zip(places, minute, strict=True):
            start_s = time.thread_time()
            desk.take(place, codec.decode(EnergyWindow, one), hear)
            loop_s += time.thread_time() - start_s
        while desk.waiting:  # noqa: ASYNC110  # it looks at a counter
            await asyncio.sleep(0.05)
    spent_s, many = time.process_time() - began_cpu_s, nodes * minutes
    running.cancel()
    await asyncio.wait((running,))
    assert heard >= nodes * minutes - 1, "windows were not acknowledged"
    return 1000.0 * loop_s / many, 1000.0 * spent_s / many


def main() -> None:
    """Fills a ledger, asks it, and writes DIR/summary.csv (measure, value, bound)."""
    parser = argparse.ArgumentParser(prog="python -m bench.ledger", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--holders", type=int, default=12, help="of a node in an hour")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / FILE_NAME
    path.unlink(missing_ok=True)
    loop_ms, all_ms = asyncio.run(_taken(options.out, 1_213, 3))
    path.unlink()
    began_s = time.monotonic()
    jobs = _fill(options.out, options.days, options.holders)
    filled_s = time.monotonic() - began_s
    store = open_energy(options.out)
    rows: list[tuple[str, float, str]] = [
        ("ledger_window_loop_milliseconds", round(loop_ms, 3), "-"), ("ledger_window_cpu_milliseconds", round(all_ms, 3), "-"),
        ("ledger_days", options.days, "-"), ("ledger_jobs", jobs, "-"),
        ("ledger_megabytes", round(path.stat().st_size / 1e6, 1), "5000"), ("ledger_fill_seconds", round(filled_s), "-"),
    ]  # fmt: skip
    last_s = _BEGIN_S + options.days * DAY_S
    questions = {
        "month_by_title": (("title", "namespace"), 30), "month_by_namespace_and_day": (("namespace", "day"), 30),
        "month_by_label": (("label:team",), 30), "day_by_hour": (("hour",), 1), "year_by_queue": (("queue",), options.days),
    }  # fmt: skip
    for name, (group_by, days) in questions.items():
        # Not of whole days: the edges come from the hours.
        begin_s = last_s - min(days, options.days) * DAY_S - 5 * HOUR_S
        asked = asked_of(
            begin_ns=begin_s * 10**9, end_ns=(last_s - 5 * HOUR_S) * 10**9, group_by=group_by, filters={}, rows_most=50
        )
        taken, worked = [], []
        for _ in range(5):
            start_s, began_cpu_s = time.perf_counter(), time.process_time()
            answer = store.ask(asked)
            taken.append(time.perf_counter() - start_s)
            worked.append(time.process_time() - began_cpu_s)
        assert answer.total.energy_mj == answer.measured_mj, "the ledger does not add up"
        rows.append((f"ledger_{name}_seconds", round(statistics.median(taken), 3), "1" if days <= 31 else "-"))
        rows.append((f"ledger_{name}_cpu_seconds", round(statistics.median(worked), 3), "-"))
    store.close()
    with (options.out / "summary.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("measure", "value", "bound"))
        writer.writerows(rows)
    for row in rows:
        print(*row)


if __name__ == "__main__":
    main()
