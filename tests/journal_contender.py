"""A process that tries to lead a journal on PostgreSQL, appends while it does, and notes what was acknowledged.

    python -m tests.journal_contender URL NAME LOG

Each line of LOG is written after the answer: `began EPOCH`, `ok NUMBER SEQ` or `no NUMBER`. It begins anew when another
leads, as systemd would start it again; it ends when it is killed.
"""

import sys
import time

from eelgrid_controller.errors import ControllerError, JournalError
from eelgrid_controller.runtime.postgresql.connections import parse_url
from eelgrid_controller.runtime.postgresql.journal import open_postgres_journal
from eelgrid_controller.runtime.postgresql.leadership import LeaseTimes
from eelgrid_controller.state.journal import JournalEntry

TIMES = LeaseTimes(ttl_s=1.0, renew_s=0.2, deadline_s=0.8, statement_s=0.4)


def contend(url, name, log):
    """Leads whenever it can."""
    number = 0
    while True:
        try:
            journal = open_postgres_journal(
                parse_url(url), new_cluster_id="contended", address=name, times=TIMES, wait_s=60
            )
        except ControllerError:
            time.sleep(0.1)
            continue
        print("began", journal.term.epoch, file=log, flush=True)
        try:
            # What went before is read by every leader.
            for _ in journal.entries_after(max(0, journal.last_seq - 10)):
                pass
            while True:
                number += 1
                entries = [JournalEntry("node_lost", {"by": name, "number": number, "of": at}) for at in range(3)]
                try:
                    print("ok", number, journal.append(entries), file=log, flush=True)
                except JournalError:
                    print("no", number, file=log, flush=True)
                    time.sleep(0.05)
        except ControllerError:
            # Another leads.
            print("no", number, file=log, flush=True)
        finally:
            journal.close()


if __name__ == "__main__":
    with open(sys.argv[3], "a") as file:  # noqa: PTH123  # nothing but a name to write to
        contend(sys.argv[1], sys.argv[2], file)
