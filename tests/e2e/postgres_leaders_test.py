"""Leaders that are killed and paused: one writes at a time, and what was acknowledged is in the journal, once.

Three processes contend for one database. Whoever leads is killed, or stopped for three times its lease, in turns, while all
append as fast as they can. What they acknowledged is in their own logs; the judge reads those and the tables, and nothing of
the journal's code. EELGRID_HA_ROUNDS says how often (6; a long run has 200).
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import postgres_rig
from tests.builders.stores import postgres_store
from tests.journal_contender import TIMES
from tests.waiting import poll_until

pytestmark = postgres_rig.needs_server
ROUNDS = int(os.environ.get("EELGRID_HA_ROUNDS", "6"))
ROOT = Path(__file__).resolve().parents[2]


class _Contenders:
    """Processes by name; one that is killed has a successor under another name."""

    def __init__(self, url, folder):
        self.processes = {}
        self.folder = folder
        self._url = url
        self._numbers = itertools.count()

    def begin(self):
        name = f"c{next(self._numbers)}"
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.journal_contender", self._url, name, self.folder / name], cwd=ROOT
        )

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait(10.0)

    def end(self):
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.processes[name].send_signal(signal.SIGCONT)
            self.kill(name)


def leader_of(store):
    rows = store.run("SELECT t.address, t.epoch FROM eelgrid.term t, eelgrid.lease l WHERE l.expires_at > now()")
    return rows[0] if rows else None


def read_logs(folder):
    """Sequence numbers by what was acknowledged; and what was refused."""
    acknowledged, refused, began = {}, set(), []
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            words = line.split()
            if words[0] == "ok" and len(words) == 3:
                acknowledged[path.name, int(words[1])] = int(words[2])
            elif words[0] == "no":
                refused.add((path.name, int(words[1])))
            elif words[0] == "began":
                began.append(int(words[1]))
    return acknowledged, refused, began


def wait_for_another(store, epoch, what):
    """Waits for a higher epoch than that; says who holds what if none comes."""
    try:
        poll_until(lambda: (leader_of(store) or ("", 0))[1] > epoch, what, within_s=60.0)
    except AssertionError:
        for table in ("eelgrid.term", "eelgrid.lease", "pg_locks WHERE NOT granted"):
            print(table, store.run(f"SELECT * FROM {table}"))  # names of our own
        query = "SELECT pid, state, wait_event, xact_start, query_start, query FROM pg_stat_activity WHERE datname IS NOT NULL"
        print(*store.run(query), sep="\n")
        raise


def judge(store, folder):
    """Fails on a double, a gap, an epoch that falls, a lost acknowledgement, or a refused write that is there."""
    rows = store.run("SELECT seq, epoch, body FROM eelgrid.journal ORDER BY seq")
    assert [seq for seq, _, _ in rows] == list(range(1, len(rows) + 1))
    epochs = [epoch for _, epoch, _ in rows]
    assert epochs == sorted(epochs)
    found = {}
    for seq, epoch, text in rows:
        body = json.loads(text)
        found.setdefault((body["by"], body["number"]), []).append((body["of"], seq, epoch))
    # A batch is whole, in order and of one epoch.
    for parts in found.values():
        assert [of for of, _, _ in parts] == [0, 1, 2]
        assert len({epoch for _, _, epoch in parts}) == 1
        assert parts[2][1] - parts[0][1] == 2
    acknowledged, refused, began = read_logs(folder)
    lost = {key for key, seq in acknowledged.items() if key not in found or found[key][2][1] != seq}
    assert not lost
    assert len(began) == len(set(began)), "two leaders began with one epoch"
    return len(rows), len(acknowledged), len(refused & found.keys())


def test_leaders_that_are_killed_and_paused_lose_and_double_nothing(tmp_path):
    waits_s = []
    with postgres_store(None) as store:
        store.open().close()
        contenders = _Contenders(store.url, tmp_path)
        try:
            for _ in range(3):
                contenders.begin()
            poll_until(lambda: leader_of(store) and leader_of(store)[0], "one leads", within_s=60.0)
            for number in range(2 * ROUNDS):
                name, epoch = poll_until(lambda: leader_of(store), "one leads")
                began_s = time.monotonic()
                process = contenders.processes[name]
                if number % 2:
                    process.send_signal(signal.SIGSTOP)
                else:
                    contenders.kill(name)
                wait_for_another(store, epoch, f"another than {name} leads")
                waits_s.append(time.monotonic() - began_s)
                if number % 2:
                    time.sleep(max(0.0, 3.0 * TIMES.ttl_s - waits_s[-1]))
                    process.send_signal(signal.SIGCONT)
                else:
                    contenders.begin()
        finally:
            contenders.end()
        entries, acknowledged, doubtful = judge(store, tmp_path)
        ((terms,),) = store.run("SELECT epoch FROM eelgrid.term")
    waits_s.sort()
    print(
        f"{ROUNDS} kills, {ROUNDS} pauses: {terms} terms, {entries} entries, {acknowledged} acknowledged, 0 lost, 0 double, "
        f"{doubtful} refused whose fate was unknown; fail-over p50 {waits_s[len(waits_s) // 2]:.2f} s, "
        f"longest {waits_s[-1]:.2f} s with a lease of {TIMES.ttl_s:g} s"
    )
    assert acknowledged > 2 * ROUNDS
    assert terms > 2 * ROUNDS
