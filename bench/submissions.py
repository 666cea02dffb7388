"""Submissions that a controller acknowledges: how many a second, and what each costs, by where its journal is.

A controller on SQLite, one on a PostgreSQL of this machine, and one on a PostgreSQL that waits for a synchronous standby
of this machine, in turns. `--clients` submit equal jobs that wait, each client one at a time: an answer comes when the job
is on disk. Servers flush as in production. Processor time is that of the processes, so that it holds on a loaded machine too,
where the rate does not.

    python -m bench.submissions [--jobs 400] [--clients 1,16] [--rounds 5] [--out bench-out]
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil

from bench.processes import cpu_s, spread, sum_cpu_s
from bench.runner import Options, benchmark, split_numbers
from bench.tables import write_csv

_COLUMNS = ("store", "clients", "round", "per_s", "median_ms", "p99_ms", "controller_cpu_ms", "servers_cpu_ms")


class _Store(NamedTuple):
    name: str
    cluster: Any  # its controller and calls
    servers: list[psutil.Process]

    @property
    def controller(self) -> psutil.Process:
        return psutil.Process(self.cluster.children[0].process.pid)


@contextmanager
def _open_stores(folder: Path) -> Iterator[list[_Store]]:
    """A controller on each store, and their servers."""
    from tests.e2e.processes import Cluster
    from tests.postgres_rig import PostgresServer
    from tests.waiting import poll_until

    with ExitStack() as stack:

        def begin_server(**options: Any) -> Any:
            server = PostgresServer(**options)
            stack.callback(server.remove)
            server.start()
            return server

        def begin_controller(name: str, *servers: Any) -> _Store:
            (folder / name).mkdir()
            cluster = stack.enter_context(Cluster(folder / name))
            url = ("--database", servers[0].create_database()) if servers else ()
            cluster.controller(*url)
            return _Store(name, cluster, [psutil.Process(one.pid) for one in servers])

        alone, primary = begin_server(), begin_server()
        standby = begin_server(source=primary)
        stores = [begin_controller("sqlite"), begin_controller("postgresql", alone)]
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        poll_until(
            lambda: primary.execute("SELECT sync_state FROM pg_stat_replication") == [("sync",)],
            "the standby is synchronous",
        )
        yield [*stores, begin_controller("postgresql, synchronous standby", primary, standby)]


async def submit_all(address: str, jobs: int, clients: int, prefix: str) -> tuple[float, list[float]]:
    """Submits jobs by several clients; returns the seconds that it took, and those of each answer."""
    from tests.builders.cluster import build_request

    from eelgrid_protos import rpc, transport

    numbers, answers_s = iter(range(jobs)), list[float]()
    async with transport.open_channel(address, tls=None) as channel:
        client = rpc.build_client(rpc.OPERATOR_SERVICE, channel)

        async def submit() -> None:
            for number in numbers:
                request = build_request(f"{prefix}-{number}", gpus=0, cpu=0.001, memory_gib=0)
                asked_s = time.perf_counter()
                await client.submit_workload(request, timeout=60.0)
                answers_s.append(time.perf_counter() - asked_s)

        begun_s = time.perf_counter()
        await asyncio.gather(*(submit() for _ in range(clients)))
        return time.perf_counter() - begun_s, answers_s


def _measure(store: _Store, jobs: int, clients: int, prefix: str) -> tuple[float, ...]:
    before = cpu_s(store.controller), sum_cpu_s(store.servers)
    taken_s, answers_s = asyncio.run(submit_all(store.cluster.address, jobs, clients, prefix))
    after = cpu_s(store.controller), sum_cpu_s(store.servers)
    spent = (1000.0 * (now - then) / jobs for now, then in zip(after, before, strict=True))
    ranked = sorted(answers_s)
    return jobs / taken_s, 1000.0 * statistics.median(ranked), 1000.0 * ranked[int(0.99 * (jobs - 1))], *spent


@benchmark()
@click.option("--jobs", default=400, help="Submissions of a round.")
@click.option("--clients", default="1,16", help="Numbers of clients at once.")
@click.option("--rounds", default=5)
def main(options: Options) -> int:
    """Runs the rounds in turns, and writes a CSV."""
    rows: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory() as folder, _open_stores(Path(folder)) as stores:
        for store in stores:
            _measure(store, options.jobs, 16, "warm")
        for clients in map(int, split_numbers(options.clients)):
            for number in range(options.rounds):
                # The first of a round is another one each time.
                for store in stores[number % len(stores) :] + stores[: number % len(stores)]:
                    measured = _measure(store, options.jobs, clients, f"job-{clients}-{number}")
                    rows.append((store.name, clients, number, *measured))
            for store in stores:
                found = [row[3:] for row in rows if row[:2] == (store.name, clients)]
                per_s, median_ms, p99_ms, controller_ms, servers_ms = (
                    spread(column) for column in zip(*found, strict=True)
                )
                print(
                    f"{store.name}, {clients} clients: {per_s} a second, answered after {median_ms} ms, p99 {p99_ms}; processor ms "
                    f"each: controller {controller_ms}, servers {servers_ms}"
                )
    if options.out is not None:
        write_csv(options.out / "submissions.csv", _COLUMNS, rows)
    return 0


if __name__ == "__main__":
    main()
