"""Hours of an energy ledger, questions to it, and all that an answer adds up."""

from contextlib import contextmanager

from eelgrid_controller.energy.ledger import (
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    parse_query,
)
from eelgrid_controller.energy.store.ledger_store import LastWindow
from eelgrid_controller.state.measurements import WorkInterval, spread_work

SECOND_NS = 10**9
BEGIN_S = 1_799_971_200  # a midnight
HOURS = 60
PLACES = [LedgerPlace(f"node-{number}", "train", "h100-sxm5-80gb") for number in range(3)]
HOLDERS = [
    EnergyHolder("workload", f"team-{number}", "", f"w-{number}", f"job-{number}", "ann", "q", (("team", str(number)),))
    for number in range(5)
] + [EnergyHolder("unallocated")]
QUESTIONS = [(), ("namespace",), ("title", "node"), ("hour",), ("day", "queue"), ("label:team",)]


def build_hour(hour):
    """What three nodes add in an hour, as `LedgerStore.add` takes it."""
    at_s = BEGIN_S + 3600 * hour
    entries = [
        LedgerEntry(
            at_s, place, holder, LedgerAmount(10**6 + hour, 10**5 + index, 10**7 * (index + 1) + 17 * hour, 0.25, 1.5)
        )
        for place in PLACES
        for index, holder in enumerate(HOLDERS)
    ]
    totals = [sum(one.spent.energy_mj for one in entries if one.place == place) for place in PLACES]
    measured = [
        MeasuredEnergy(at_s, place, total, total // 20, 1.5) for place, total in zip(PLACES, totals, strict=True)
    ]
    newest = [LastWindow(place.node_name, 7, hour + 1, at_s + 3600.0) for place in PLACES]
    work = spread_work(WorkInterval("w-1", "step", 12.5 + hour, at_s, at_s + 600.0), None)
    return entries, measured, newest, work


def book(store, hour):
    """Writes an hour."""
    store.add(*build_hour(hour), now_s=BEGIN_S + 3600 * hour + 3600)


def book_all(store):
    """Writes all hours in one transaction."""
    built = [build_hour(hour) for hour in range(HOURS)]
    entries, measured, _, work = ([one for many in parts for one in many] for parts in zip(*built, strict=True))
    store.add(entries, measured, built[-1][2], work, now_s=BEGIN_S + 3600 * HOURS)


def asked(*group_by, hours=HOURS, rows_most=1000, begin_s=BEGIN_S):
    """A question about the first hours."""
    return parse_query(
        begin_ns=begin_s * SECOND_NS,
        end_ns=(begin_s + 3600 * hours) * SECOND_NS,
        group_by=group_by,
        filters={},
        rows_most=rows_most,
    )


def figures(answer):
    """Everything that an answer adds up; money to a millionth, which is less than a price has digits."""

    def spent(found):
        return (*found[:3], round(found.cost, 6), round(found.carbon_g, 6))

    return (
        [(group.values, spent(group.spent), group.done) for group in answer.groups],
        spent(answer.left_out),
        spent(answer.unallocated),
        spent(answer.unattributed),
        answer.measured_mj,
        answer.uncertainty_mj,
        round(answer.uncounted_s, 6),
    )


def watch_reads(store, on_statement):
    """Calls back before each statement of a snapshot."""
    snapshot = store.database.snapshot

    class Watched:
        def __init__(self, read):
            self.dialect, self._read = read.dialect, read

        def __call__(self, sql, given):
            on_statement(sql)
            return self._read(sql, given)

    @contextmanager
    def watched():
        with snapshot() as read:
            yield Watched(read)

    store.database.snapshot = watched
