"""Faults of the database under a pair of controllers with agents and a client, each judged by what clients were told.

Owns how each fault is made on a real PostgreSQL and how it passes. A round makes one fault while the client of `HaScene`
submits: where the fault lasts, the client has to be refused with a reason that names it, and once it has passed, the client
is served again without anybody's help. That nothing was lost or doubled is for `HaScene.judge`.
"""

import contextlib
import random
import re
import signal
import time
from dataclasses import dataclass

from eelgrid.client import Client
from eelgrid.errors import EelgridError
from tests.builders.stores import PostgresStore
from tests.postgres_rig import CuttingProxy, PostgresServer, fill_disk
from tests.waiting import poll_until

# What a client may be told of each; that there is no leader for a moment is a reason, too, where the lease may end.
_NO_LEADER = "work resumes by itself|does not lead|leads with epoch|is stopping|no controller|cannot be reached|lease"
REASONS = {
    "cut": "",
    "restart": f"{_NO_LEADER}|the server|connection",
    "full": "free space on the server",
    "read-only": f"read-only|{_NO_LEADER}",
    "slow": f"{_NO_LEADER}|did not answer|timeout|Deadline|too slow",
    "promote": f"{_NO_LEADER}|a standby has replaced|connection",
}
_WITHIN_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRound:
    """One fault: what the client was told meanwhile, if that was needed, and the seconds from its end until it is served."""

    fault: str
    reason: str
    served_s: float


class DatabaseFaults:
    """A primary behind a proxy, with the tables of the journal on a small disk; makes each fault but a promotion."""

    kinds = ("cut", "restart", "full", "read-only", "slow")
    # Nothing that was acknowledged may be lost.
    windows_ns = ()

    def __init__(self, *, seed=1):
        self._rng = random.Random(seed)
        self._stack = contextlib.ExitStack()
        self.server = PostgresServer()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.server.remove)
            self.server.start()
            self._ballast = stack.enter_context(self.server.small_disk(256)) / "ballast"
            self.server.execute(f"CREATE TABLESPACE small LOCATION '{self._ballast.parent}'")
            self._store = PostgresStore(self.server.create_database())
            self._store.open().close()
            self._store.run("ALTER TABLE eelgrid.journal SET TABLESPACE small")
            self._proxy = stack.enter_context(CuttingProxy(self.server.port))
            self.url = self._store.url.replace(f":{self.server.port}/", f":{self._proxy.port}/")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *reason):
        self._stack.close()

    def run(self, kind, client):
        """Makes a fault, waits until the client was refused if it lasts, and ends it; returns the round."""
        began_ns = time.time_ns()
        reason = getattr(self, "_" + kind.replace("-", "_"))(lambda: client.wait_until_refused(REASONS[kind], began_ns))
        ended_ns = time.time_ns()
        return FaultRound(fault=kind, reason=reason, served_s=client.wait_until_served(ended_ns))

    def _cut(self, _refused):
        """The connection is cut at a commit, before or after the server has it."""
        cuts = len(self._proxy.cuts)
        self._proxy.cut_next(b"COMMIT", is_forwarded=self._rng.random() < 0.5)
        poll_until(lambda: len(self._proxy.cuts) > cuts, "a commit was cut", within_s=_WITHIN_S)
        return ""

    def _restart(self, refused):
        """It is stopped fast, or crashes."""
        self.server.stop(self._rng.choice((signal.SIGINT, signal.SIGQUIT)))
        reason = refused()
        self.server.start()
        return reason

    def _full(self, refused):
        fill_disk(self._ballast)
        reason = refused()
        self._ballast.unlink()
        return reason

    def _read_only(self, refused):
        name = self._store.url.rpartition("/")[2]
        self.server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        self.server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)
        reason = refused()
        self.server.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        return reason

    def _slow(self, refused):
        self._proxy.delay_s = 6.0
        reason = refused()
        self._proxy.delay_s = 0.0
        return reason


def await_replay(primary, standby):
    """Waits until a standby has what its primary has now."""
    ((end,),) = primary.execute("SELECT pg_current_wal_flush_lsn()::text")

    def has_replayed():
        return standby.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", end) == [(True,)]

    poll_until(has_replayed, "the standby has what the primary has", within_s=_WITHIN_S)


class Promotions:
    """A primary and an asynchronous standby that is cut off and promoted, round after round on the same two ports."""

    kinds = ("promote",)

    def __init__(self):
        self._servers = []
        # From when acknowledgements may be lost until when, by round.
        self.windows_ns = []
        self.nodes_ahead = 0

    def __enter__(self):
        primary = PostgresServer()
        self._servers = [primary]
        primary.start()
        name = primary.create_database().rpartition("/")[2]
        self._add_standby()
        hosts = "&".join(f"host=127.0.0.1:{one.port}" for one in self._servers)
        self.url = f"postgresql://postgres@/{name}?{hosts}"
        return self

    def __exit__(self, *reason):
        for server in self._servers:
            server.remove()

    def _add_standby(self, port=None):
        standby = PostgresServer(source=self._servers[0], port=port)
        self._servers.append(standby)
        standby.start()

    def run(self, kind, client, meanwhile=None):
        """The standby stops, the primary is lost with what it wrote since, and the standby is promoted.

        In between the client is served, and what `meanwhile` does is done.
        """
        primary, standby = self._servers
        await_replay(primary, standby)
        standby.stop()
        cut_ns = time.time_ns()
        client.wait_until_served(cut_ns, answers=5)
        if meanwhile is not None:
            meanwhile()
        primary.stop(signal.SIGQUIT)
        lost_ns = time.time_ns()
        reason = client.wait_until_refused(REASONS[kind], lost_ns)
        standby.start()
        standby.promote()
        ended_ns = time.time_ns()
        self.windows_ns.append((cut_ns, ended_ns))
        self.nodes_ahead += client.reconcile_until_work_runs(ended_ns)
        served_s = client.wait_until_served(ended_ns)
        self._servers = [standby]
        port = primary.port
        primary.remove()
        self._add_standby(port)
        return FaultRound(fault=kind, reason=reason, served_s=served_s)


class FaultClient:
    """What the client of a scene was told, by its log."""

    def __init__(self, scene):
        self._scene = scene

    def _answers(self, since_ns):
        for line in self._scene.answers.read_text().splitlines():
            word, key, at_ns, *rest = line.split(maxsplit=3)
            if int(at_ns) > since_ns:
                yield word, key, int(at_ns), rest[0] if rest else ""

    def wait_until_refused(self, pattern, since_ns):
        """Returns the first refusal since then whose reason fits."""

        def find():
            told = (reason for word, _, _, reason in self._answers(since_ns) if word == "no")
            return next((reason for reason in told if re.search(pattern, reason)), None)

        def describe():
            return f"a refusal like {pattern!r}; told was {sorted({one[3] for one in self._answers(since_ns)})[:5]}"

        try:
            return poll_until(find, "the client is refused", within_s=_WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {describe()}") from None

    def wait_until_served(self, since_ns, *, answers=1):
        """Returns the seconds until the client had so many answers since then."""

        def find():
            times = [at_ns for word, _, at_ns, _ in self._answers(since_ns) if word == "ok"]
            return times[answers - 1] if len(times) >= answers else None

        return (poll_until(find, "the client is served", within_s=_WITHIN_S) - since_ns) / 1e9

    def reconcile_until_work_runs(self, since_ns):
        """As an operator who gives up what agents hold beyond the journal, until new work runs; returns how many nodes.

        That it is accepted says nothing: agents may come back later, and what they hold beyond the journal keeps their
        nodes closed until someone looks.
        """
        reconciled = set()

        def does_work_run():
            with contextlib.suppress(EelgridError), Client(self._scene.addresses, timeout_s=10.0) as client:
                for node in client.list_nodes():
                    if node.ahead_epoch is not None:
                        client.reconcile_node(node.inventory.node_name)
                        reconciled.add(node.inventory.node_name)
                accepted = {key for word, key, *_ in self._answers(since_ns) if word == "ok"}
                return not accepted.isdisjoint(self._scene.list_ended())
            return False

        poll_until(does_work_run, "work that was accepted since has run", within_s=_WITHIN_S)
        return len(reconciled)

    def unexcused(self, lost, windows_ns):
        """Of acknowledged jobs that are lost, those that were not acknowledged while a standby was cut off."""
        times = {key: at_ns for word, key, at_ns, _ in self._answers(0) if word == "ok"}
        return [key for key in lost if not any(begin < times[key] < end for begin, end in windows_ns)]
