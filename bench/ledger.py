"""`python -m bench.ledger --out DIR`: Size of a year of the energy ledger, and time of a month's report.

First it measures the controller's cost of a window: 1,213 nodes of eight GPUs send one each, as in a minute of a cluster.

The ledger has a thousand GPUs in 125 nodes. In each hour a node has `--holders` owners, and jobs last some hours, so
names come and go: a year has about a third of a million jobs. `--beside` copies it to a PostgreSQL and compares the two. Real windows arrive every minute; here the hourly sums are
written, which gives the same rows. Targets: a year in under 5 GB, a month's report in under a second.
"""

import asyncio
import json
import logging
import random
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import click
import numpy as np

from bench.runner import Options, benchmark
from bench.tables import format_table, write_csv
from eelgrid_controller.cli.report import SECTIONS
from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import (
    DAY_S,
    HOUR_S,
    LedgerEntry,
    LedgerPlace,
    LedgerQuery,
    MeasuredEnergy,
    parse_query,
    resolve_holder,
    spread_window,
)
from eelgrid_controller.energy.store.ledger_migration import copy_ledger
from eelgrid_controller.energy.store.ledger_store import LastWindow, LedgerStore, open_ledger
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.energy.store.sqlite_database import CHECKS_BUILT, FILE_NAME, register_sql_functions
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
_HOLDER = "id, kind, namespace, name, workload, title, user, queue, labels"
Row: TypeAlias = tuple[str, float, str]


def _holder(number: int, rng: random.Random) -> tuple[Any, ...]:
    """A row of holders: a pod of a job with two labels."""
    team = rng.randrange(40)
    labels = json.dumps({"app": f"app-{rng.randrange(100)}", "team": f"team-{team}"})
    return (
        number,
        "pod",
        f"team-{team}",
        f"job-{number}-worker-0",
        f"pod-{number:032x}",
        f"job-{number}",
        f"user-{rng.randrange(300)}",
        f"queue-{team % 8}",
        labels,
    )


@contextmanager
def _suspend_checks(connection: sqlite3.Connection) -> Iterator[None]:
    """Rows may be written as they are meanwhile; checksums of all rows are made anew at the end."""
    yield
    register_sql_functions(connection)
    connection.executescript(CHECKS_BUILT)


def _fill(path: Path, days: int, holders: int) -> int:
    """Writes the rows of so many days; how many jobs there were.

    Straight into the tables and a day at once: half an hour of inserts less for a year. As in life, nodes tell of an
    hour in any order, which is what decides how full pages are.
    """
    rng, values = random.Random(1), np.random.default_rng(1)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous=OFF")
    nodes = list(range(1, _NODES + 1))
    connection.executemany(
        "INSERT INTO places (id, node, pool, gpu_model) VALUES (?, ?, ?, 'h100-sxm5-80gb')",
        [(one, f"node-{one}", f"pool-{one % 4}") for one in nodes],
    )
    nobody = 1
    connection.execute(
        f"INSERT INTO holders ({_HOLDER}) VALUES (?, 'unallocated', '', '', '', '', '', '', '{{}}')",  # noqa: S608
        (nobody,),
    )
    made = nobody
    running: dict[int, list[tuple[int, int]]] = {node: [] for node in nodes}
    began_s = time.monotonic()
    with _suspend_checks(connection):
        for day in range(days):
            spent, worked, new = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[tuple[Any, ...]]()
            for hour in range(24 * day, 24 * day + 24):
                at_s = _BEGIN_S + hour * HOUR_S
                rng.shuffle(nodes)
                for node in nodes:
                    jobs = running[node] = [one for one in running[node] if one[1] > hour]
                    while len(jobs) < holders - 1:
                        made += 1
                        new.append(_holder(made, rng))
                        jobs.append((made, hour + 1 + int(rng.expovariate(1 / 36))))
                    spent += [(at_s, node, holder) for holder, _ in jobs]
                    spent.append((at_s, node, nobody))
                    # Every fourth job tells how far it is.
                    worked += [(at_s, holder) for holder, _ in jobs if holder % 4 == 0]
            _write_day(connection, values, new, spent, worked)
            if sys.stderr.isatty():
                print(f"\rday {day + 1} of {days}, {time.monotonic() - began_s:.0f} s", end="", file=sys.stderr)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return made - nobody


def _write_day(
    connection: sqlite3.Connection,
    values: np.random.Generator,
    new: list[tuple[Any, ...]],
    spent: list[tuple[Any, ...]],
    worked: list[tuple[Any, ...]],
) -> None:
    """One transaction: `new` holders, hours that were `spent` (at, place, holder) and `worked` (at, work)."""
    many, day_s = len(spent), spent[0][0]
    columns = (
        values.integers(10**8, size=many),
        values.integers(10**7, size=many),
        values.integers(10**9, size=many),
        values.random(many),
        100.0 * values.random(many),
    )
    amounts = zip(*(column.tolist() for column in columns), strict=True)
    connection.execute("BEGIN")
    connection.executemany(f"INSERT INTO holders ({_HOLDER}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", new)  # noqa: S608
    connection.executemany(
        "INSERT INTO hourly VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (key + amount for key, amount in zip(spent, amounts, strict=True)),
    )
    connection.executemany(
        "INSERT INTO works (id, workload, unit, until) VALUES (?, ?, 'step', 0)",
        [(one[0], one[4]) for one in new if one[0] % 4 == 0],
    )
    connection.executemany("INSERT INTO hourly_work VALUES (?, ?, 3600.5, 3600, 0)", worked)
    connection.execute(
        "INSERT INTO hourly_measured SELECT at, place, sum(bare + context + active), sum(bare + context + active) / 20, 0 "
        "FROM hourly WHERE at >= ? GROUP BY at, place ORDER BY at, random()",
        (day_s,),
    )
    for table, sums in (
        ("", "place, holder, sum(bare), sum(context), sum(active), sum(cost), sum(carbon)"),
        ("_measured", "place, sum(total), sum(uncertainty), sum(uncounted)"),
        ("_work", "work, sum(amount), sum(counted), sum(missed)"),
    ):
        keys = sums.partition(", sum")[0]
        connection.execute(
            f"INSERT INTO daily{table} SELECT {day_s}, {sums} FROM hourly{table} WHERE at >= {day_s} GROUP BY {keys} "  # noqa: S608
            "ORDER BY random()"
        )
    connection.execute("COMMIT")


def _window(node: int, number: int) -> EnergyWindow:
    """A minute of eight GPUs: two held by two pods each, four by a job, two by nobody."""
    owners = [
        EnergyOwner(kind=OwnerKind.POD, namespace=f"team-{node % 40}", pod=f"pod-{node}-{one}") for one in range(4)
    ]
    owners += [EnergyOwner(kind=OwnerKind.SLURM, job=str(node), step="0"), EnergyOwner(kind=OwnerKind.UNALLOCATED)]
    held = {0: (0, 1), 1: (2, 3), 2: (4,), 3: (4,), 4: (4,), 5: (4,), 6: (5,), 7: (5,)}
    shares = [
        WindowShare(
            device=device,
            owner=owner,
            part=part,
            method=AttributionMethod.EXCLUSIVE,
            confidence=AttributionConfidence.HIGH,
            energy_mj=6_000_000 + owner,
        )
        for device, by in held.items()
        for owner in by
        for part in (EnergyPart.BARE_IDLE, EnergyPart.CONTEXT_IDLE, EnergyPart.ACTIVE)
    ]
    totals = [sum(share.energy_mj for share in shares if share.device == device) for device in range(8)]
    begin_ns = (_BEGIN_S + 60 * number) * 10**9
    return EnergyWindow(
        incarnation=1,
        number=number + 1,
        begin_ns=begin_ns,
        end_ns=begin_ns + 60 * 10**9,
        devices=tuple(WindowDevice(gpu_uuid=f"GPU-{node}-{one}", total_mj=total) for one, total in enumerate(totals)),
        owners=tuple(owners),
        shares=tuple(shares),
    )


async def _taken(folder: Path, nodes: int, minutes: int) -> tuple[float, float]:
    """Milliseconds of CPU for each window: of the event loop to take it, and of all threads until it is on disk."""
    state = SimpleNamespace(workloads={}, policy=SimpleNamespace(prices=None))
    core: Any = SimpleNamespace(state=state)
    clock = Clock(now_ns=lambda: (_BEGIN_S + HOUR_S) * 10**9)
    desk = LedgerWriter(
        partial(open_ledger, folder),
        core=lambda: core,
        clock=clock,
        log=logging.getLogger("bench"),
        bytes_most=10**10,
    )
    running = asyncio.create_task(desk.run())
    places = [Inventory(node_name=f"node-{node}", cpu_milli=1, memory_bytes=1, pool="p") for node in range(nodes)]
    data = [[codec.encode_message(_window(node, minute)) for node in range(nodes)] for minute in range(minutes)]
    heard = 0

    def hear(_: object) -> None:
        nonlocal heard
        heard += 1

    while desk.windows == desk.dropped:
        desk.add_window(places[0], codec.decode_message(EnergyWindow, data[0][0]), hear)
        await asyncio.sleep(0.05)
    began_cpu_s, loop_s = time.process_time(), 0.0
    for minute in data:
        for place, one in zip(places, minute, strict=True):
            start_s = time.thread_time()
            desk.add_window(place, codec.decode_message(EnergyWindow, one), hear)
            loop_s += time.thread_time() - start_s
        while desk.waiting:  # noqa: ASYNC110  # it looks at a counter
            await asyncio.sleep(0.05)
    spent_s, many = time.process_time() - began_cpu_s, nodes * minutes
    running.cancel()
    await asyncio.wait((running,))
    assert heard >= nodes * minutes - 1, "windows were not acknowledged"
    return 1000.0 * loop_s / many, 1000.0 * spent_s / many


def _taken_rows(folder: Path) -> list[Row]:
    loop_ms, all_ms = asyncio.run(_taken(folder, 1_213, 3))
    return [
        ("ledger_window_loop_milliseconds", round(loop_ms, 3), "-"),
        ("ledger_window_cpu_milliseconds", round(all_ms, 3), "-"),
    ]


def _filled_rows(folder: Path, days: int, holders: int) -> list[Row]:
    began_s, path = time.monotonic(), folder / FILE_NAME
    open_ledger(folder).close()
    jobs = _fill(path, days, holders)
    return [("ledger_jobs", jobs, "-"), ("ledger_fill_seconds", round(time.monotonic() - began_s), "-")]


def _question(by: tuple[str, ...], begin_s: int, end_s: int) -> LedgerQuery:
    return parse_query(begin_ns=begin_s * 10**9, end_ns=end_s * 10**9, group_by=by, filters={}, rows_most=60)


def _timed(name: str, store: LedgerStore, asked: list[LedgerQuery], *, bound: str) -> list[Row]:
    """Medians of five times, and the spread of CPU time."""
    taken, worked = [], []
    for _ in range(5):
        start_s, began_s = time.perf_counter(), time.process_time()
        answers = store.query_all(asked)
        taken.append(time.perf_counter() - start_s)
        worked.append(time.process_time() - began_s)
    assert all(one.total.energy_mj == one.measured_mj for one in answers), "the ledger does not add up"
    return [
        (f"ledger_{name}_seconds", round(statistics.median(taken), 3), bound),
        (f"ledger_{name}_cpu_seconds", round(statistics.median(worked), 3), "-"),
        (f"ledger_{name}_cpu_seconds_least", round(min(worked), 3), "-"),
        (f"ledger_{name}_cpu_seconds_most", round(max(worked), 3), "-"),
    ]


def _asked_rows(folder: Path) -> list[Row]:
    """Opens the ledger and asks it, each question five times."""
    began_s = time.process_time()
    store = open_ledger(folder)
    rows: list[Row] = [("ledger_open_cpu_seconds", round(time.process_time() - began_s, 3), "-")]
    with sqlite3.connect(store.path) as connection:
        ((first_s, last_s),) = connection.execute("SELECT min(at), max(at) + 3600 FROM hourly")
    days = (last_s - first_s) // DAY_S
    # As eelctl report asks; a calendar month has whole days.
    month_s = (last_s - min(30, days) * DAY_S, last_s)
    pages = {f"report_by_{'_and_'.join(by)}": (by, *month_s) for _, by, _ in SECTIONS} | {
        "report_by_day": (("day",), *month_s)
    }
    # Not of whole days: the edges come from the hours.
    odd_s = (month_s[0] - 5 * HOUR_S, last_s - 5 * HOUR_S)
    others = {
        "odd_month_by_title": (("title", "namespace"), *odd_s),
        "odd_month_by_namespace_and_day": (("namespace", "day"), *odd_s),
        "odd_month_by_label": (("label:team",), *odd_s),
        "day_by_hour": (("hour",), last_s - DAY_S, last_s),
        "year_by_queue": (("queue",), first_s, last_s),
    }
    for name, (by, begin_s, end_s) in (pages | others).items():
        rows += _timed(name, store, [_question(by, begin_s, end_s)], bound="-" if name.startswith("year") else "1")
    rows += _timed("report", store, [_question(by, *month_s) for by, *_ in pages.values()], bound="1")
    store.close()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return [
        *rows,
        ("ledger_days", days, "-"),
        ("ledger_megabytes", round(Path(store.path).stat().st_size / 1e6, 1), "5000"),
        ("ledger_peak_megabytes", round(peak_mb), "-"),
    ]


@contextmanager
def _on_postgresql(source: LedgerStore) -> Iterator[LedgerStore]:
    """The same ledger on a PostgreSQL of this run's own, on loopback, fsync on."""
    from tests import postgres_rig

    from eelgrid_controller.energy.store.postgres_database import open_postgres_ledger
    from eelgrid_controller.runtime.postgresql.connections import parse_url
    from eelgrid_controller.runtime.postgresql.journal import open_postgres_journal

    rig: Any = postgres_rig
    server = rig.PostgresServer("shared_buffers = 256MB")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(server.remove)
        server.start()
        journal = open_postgres_journal(parse_url(server.create_database()), new_cluster_id="bench")
        stack.callback(journal.close)
        store = LedgerStore(open_postgres_ledger(journal, Path(folder)))
        stack.callback(store.close)
        copy_ledger(source, store)
        # As autovacuum would within minutes.
        server.run("vacuumdb", "-U", "postgres", "-h", "127.0.0.1", "-p", server.port, "--analyze", "--all")
        yield store


def _beside_rows(folder: Path) -> list[Row]:
    """Wall time on SQLite and on PostgreSQL in turns, and their ratio: what a report takes, and windows of a second."""
    from tests import postgres_rig

    rig: Any = postgres_rig
    if missing := rig.find_missing():
        print(f"without PostgreSQL: not installed: {missing}")
        return []
    with closing(open_ledger(folder)) as sqlite, _on_postgresql(sqlite) as postgresql:
        stores = {"sqlite": sqlite, "postgresql": postgresql}
        with sqlite.database.snapshot() as read:
            ((last_s, size),) = read("SELECT max(at) + 3600, sum(1) FROM hourly", ())
        month_s = (last_s - 30 * DAY_S, last_s)
        report = [_question(by, *month_s) for _, by, _ in SECTIONS] + [_question(("day",), *month_s)]
        asked = {
            "report": report,
            "month_by_namespace": [_question(("namespace",), *month_s)],
            "day_by_hour": [_question(("hour",), last_s - DAY_S, last_s)],
        }
        rows: list[Row] = [("beside_hourly_rows", size, "-")]
        for name, questions in asked.items():
            rows += _in_turns(name, {of: partial(one.query_all, questions) for of, one in stores.items()}, rounds=7)
        made = [_spread(node, last_s) for node in range(20)]
        numbers = count(1)

        def add(store: LedgerStore) -> None:
            newest = [LastWindow(f"node-{node}", 1, next(numbers), float(last_s)) for node in range(20)]
            entries, measured = ([one for many in parts for one in many] for parts in zip(*made, strict=True))
            store.add(entries, measured, newest, now_s=last_s)

        rows += _in_turns("second_of_1213_nodes", {of: partial(add, one) for of, one in stores.items()}, rounds=60)
        with postgresql.database.snapshot() as read:
            ((used,),) = read(
                "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relkind = 'r' "
                "AND relnamespace = CAST('eelgrid' AS regnamespace)",
                (),
            )
        return [
            *rows,
            ("beside_megabytes_postgresql", round(used / 1e6, 1), "-"),
            ("beside_megabytes_postgresql_as_counted", round(postgresql.used_bytes() / 1e6, 1), "-"),
            ("beside_megabytes_sqlite", round(sqlite.used_bytes() / 1e6, 1), "-"),
        ]


def _spread(node: int, at_s: int) -> tuple[list[LedgerEntry], list[MeasuredEnergy]]:
    """What a window of a minute adds to the hour that begins at `at_s`."""
    window = _window(node, (at_s - _BEGIN_S) // 60)
    place = LedgerPlace(f"node-{node}", "p", "h100-sxm5-80gb")
    places = {device.gpu_uuid: place for device in window.devices}
    made = spread_window(window, places, lambda owner: resolve_holder(owner, None), None)
    return made.entries, made.measured


def _in_turns(name: str, ways: dict[str, Callable[[], object]], *, rounds: int) -> list[Row]:
    """Median, least and most of each way, called in turns, and the second's median in those of the first."""
    taken: dict[str, list[float]] = {of: [] for of in ways}
    for number in range(rounds + 2):
        for of in list(ways)[:: 1 if number % 2 else -1]:
            start_s = time.perf_counter()
            ways[of]()
            if number >= 2:  # caches are warm
                taken[of].append(time.perf_counter() - start_s)
    rows: list[Row] = []
    for of, found in taken.items():
        figures = {"": statistics.median(found), "_least": min(found), "_most": max(found)}
        rows += [(f"beside_{name}_{of}_milliseconds{end}", round(1000.0 * one, 1), "-") for end, one in figures.items()]
    first, second = (statistics.median(found) for found in taken.values())
    return [*rows, (f"beside_{name}_ratio", round(second / first, 2), "-")]


@benchmark(out="bench-out/ledger")
@click.option("--days", default=365)
@click.option("--holders", default=12, help="owners per node and hour")
@click.option("--again", is_flag=True, help="query the existing ledger in DIR")
@click.option("--beside", is_flag=True, help="compare it with the same ledger on PostgreSQL, and nothing else")
def main(options: Options) -> None:
    """Fills a ledger, asks it, and writes DIR/summary.csv (measure, value, bound)."""
    rows: list[Row] = []
    if not options.again:
        path = options.out / FILE_NAME
        path.unlink(missing_ok=True)
        if not options.beside:
            rows += _taken_rows(options.out)
            path.unlink()
        rows += _filled_rows(options.out, options.days, options.holders)
    rows += _beside_rows(options.out) if options.beside else _asked_rows(options.out)
    write_csv(options.out / "summary.csv", ("measure", "value", "bound"), rows)
    print(format_table(("measure", "value", "bound"), rows, 1))


if __name__ == "__main__":
    sys.exit(main())
