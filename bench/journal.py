"""Commits of the journal: what one costs in SQLite and on PostgreSQL, by its size, beside the ways that were not taken.

Every way appends the same batches of the same entries, each batch durable on return, in turns in one run, so that all meet
the same disk and load: `sqlite` is the journal as it is; `sqlite-bare` the insert and commit of its rows alone, by the
driver; `sqlite-core` the same rows by SQLAlchemy Core on the same driver; `postgresql` the journal on a server of this
run's own, on loopback, fsync on. The server is left out, with a word, where PostgreSQL is not installed.

    python -m bench.journal [--rounds 300] [--out bench-out]
"""

import contextlib
import json
import sqlite3
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from bench.runner import Options, Progress, benchmark
from bench.tables import write_csv
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.journal import JournalEntry

_SIZES = (1, 16, 256)
_COLUMNS = ("way", "entries", "p50_ms", "p90_ms", "p99_ms", "cpu_ms", "of_sqlite")
Append = Callable[[list[JournalEntry]], object]


def build_entries(number: int, count: int) -> list[JournalEntry]:
    """Entries as large as those of a placement, some 700 bytes."""
    body = {"time_ns": 1_700_000_000_000_000_000, "workload_id": f"job-{number}", "replicas": [[0, "node-1", [3]]]}
    return [JournalEntry("replicas_placed", {**body, "explanation": ["x" * 100] * 6, "of": at}) for at in range(count)]


def _rows(entries: list[JournalEntry], first: int) -> list[tuple[int, str, str, int]]:
    rows = []
    for seq, entry in enumerate(entries, first):
        body = json.dumps(entry.body, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        rows.append((seq, entry.kind, body, zlib.crc32(b"%d\n%b\n%b" % (seq, entry.kind.encode(), body.encode()))))
    return rows


_TABLE = "CREATE TABLE events (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, crc32 INTEGER NOT NULL)"
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=4096")


@contextlib.contextmanager
def _bare(folder: Path) -> Iterator[Append]:
    connection = sqlite3.connect(folder / "bare.sqlite3", isolation_level=None)
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")
    connection.execute(_TABLE)
    last = 0

    def append(entries: list[JournalEntry]) -> None:
        nonlocal last
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", _rows(entries, last + 1))
        connection.execute("COMMIT")
        last += len(entries)

    yield append
    connection.close()


@contextlib.contextmanager
def _core(folder: Path) -> Iterator[Append]:
    """The rows of `sqlite-bare` through SQLAlchemy Core: a compiled insert, its cache warm."""
    import sqlalchemy as sa

    engine = sa.create_engine(f"sqlite:///{folder}/core.sqlite3", isolation_level="AUTOCOMMIT")
    connection = engine.connect()
    for pragma in _PRAGMAS:
        connection.exec_driver_sql(f"PRAGMA {pragma}")
    connection.exec_driver_sql(_TABLE)
    names = ("seq", "kind", "body", "crc32")
    insert = sa.insert(sa.Table("events", sa.MetaData(), *(sa.Column(name) for name in names)))
    begin, commit = sa.text("BEGIN IMMEDIATE"), sa.text("COMMIT")
    last = 0

    def append(entries: list[JournalEntry]) -> None:
        nonlocal last
        rows = [dict(zip(names, row, strict=True)) for row in _rows(entries, last + 1)]
        connection.execute(begin)
        connection.execute(insert, rows)
        connection.execute(commit)
        last += len(entries)

    yield append
    connection.close()
    engine.dispose()


@contextlib.contextmanager
def _sqlite(folder: Path) -> Iterator[Append]:
    with contextlib.closing(open_journal(folder / "sqlite", new_cluster_id="bench")) as journal:
        yield journal.append


@contextlib.contextmanager
def _postgresql(_folder: Path) -> Iterator[Append]:
    from tests.postgres_rig import PostgresServer

    from eelgrid_controller.runtime.postgresql.connections import parse_url
    from eelgrid_controller.runtime.postgresql.journal import open_postgres_journal

    server = PostgresServer()
    try:
        server.start()
        url = parse_url(server.create_database())
        with contextlib.closing(open_postgres_journal(url, new_cluster_id="bench")) as journal:
            yield journal.append
    finally:
        server.remove()


def _ways() -> dict[str, Callable[[Path], contextlib.AbstractContextManager[Append]]]:
    from tests.postgres_rig import find_missing

    ways = {"sqlite": _sqlite, "sqlite-bare": _bare, "sqlite-core": _core, "postgresql": _postgresql}
    if missing := find_missing():
        print(f"without sqlite-core and postgresql: not installed: {missing}")
        return {name: ways[name] for name in ("sqlite", "sqlite-bare")}
    return ways


def measure(
    ways: dict[str, Append], size: int, rounds: int, progress: Progress
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of this process for each commit, by way; each round begins with another way."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 10):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            entries = build_entries(number, size)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            ways[name](entries)
            taken = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            if number >= 10:  # caches and connections are warm
                found[name].append(taken)
        progress.show(number + 1, rounds + 10, f"{size} entries")
    return found


@benchmark()
@click.option(
    "--rounds", type=click.IntRange(20, 100_000), default=300, show_default=True, help="Commits of each size."
)
def main(options: Options) -> int:
    """Measures and prints."""
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-journal-", dir=options.out)))
        ways = {name: stack.enter_context(make(folder)) for name, make in _ways().items()}
        for size in _SIZES:
            found = measure(ways, size, options.rounds, Progress("rounds"))
            base_s = statistics.median(wall_s for wall_s, _ in found["sqlite"])
            for name, taken in found.items():
                walls_s = sorted(wall_s for wall_s, _ in taken)
                cuts = statistics.quantiles(walls_s, n=100)
                figures_s = (
                    statistics.median(walls_s),
                    cuts[89],
                    cuts[98],
                    statistics.median(cpu_s for _, cpu_s in taken),
                )
                rows.append((name, size, *(f"{one * 1e3:.3f}" for one in figures_s), f"{figures_s[0] / base_s:.2f}"))
    write_csv(options.out / "journal.csv", _COLUMNS, rows)
    for row in (_COLUMNS, *rows):
        print(" ".join(f"{cell:>12}" for cell in map(str, row)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
