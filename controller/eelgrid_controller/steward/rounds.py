"""From rounds of pages to windows of a service, also where some replicas did not answer.

Owns which two pages make a pair and what a missing page means. Must not know how pages
are fetched, nor what a window is used for.

Theory. All replicas of a service are asked in one round, so that a window is of one
moment. A replica is new until its first page; new within its grace it is starting, and
nothing is expected of it. Any other replica without a page is missing: it may well serve,
since a page that cannot be had is no proof against it. Leaving its share out would look
like less load and could take replicas away while all are busy; so what was counted is
scaled to all, as if the missing did what the others did:
    counts x (paired + missing) / paired        and `paired + missing` replicas serve
which keeps the load of each replica as it was seen. If a missing one is dead in truth,
this asks for too many replicas and not for too few. With fewer than half paired nothing
is said: then the service is blind and keeps what it has. Quantiles are of those that
answered. A replica that begins to answer within its grace has counted from 0 since the
round before, in which it did not; left out, its share would look like less load for one
window. One that answers later may have served for long, and waits for its second page. A
pair whose first page is older than a few rounds says more of the past than of now and is
left out.

What was done is another matter: a counter tells it over any gap, and of nobody else. So the
increments of all pairs are kept as they are, neither scaled nor left out for their age; of a
replica whose first page is not its first minute, what it had done before is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.serving.exposition import Scrape
from eelgrid_controller.serving.live import Pair, Window, gained, window
from eelgrid_controller.serving.metric_names import Distribution, ServerNames, Sum

__all__ = ["Asked", "Counted", "Outcome", "Round", "Rounds", "names_read"]

_STARTED = "process_start_time_seconds"  # tells that a process began anew
_SHARE_LEAST = 0.5  # of the expected replicas that must be paired


class Asked(NamedTuple):
    """Whose pages are wanted: where, by replica, and which metrics of them."""

    urls: Mapping[int, str]
    names: frozenset[str]  # all that is kept of a page


class Round(NamedTuple):
    """What all replicas of one workload answered; a text says why there is no page."""

    at_s: float  # when it began
    pages: Mapping[tuple[int, str], Scrape | str]  # by replica and address


class Counted(NamedTuple):
    """What all replicas of a round have done since their pages before, at least; None where no server tells."""

    seconds: float  # since the oldest of those pages
    requests: float | None
    tokens: float | None
    is_whole: bool  # False where some of it is not known


class Outcome(NamedTuple):
    """What a round says of a service."""

    window: Window | None
    serving: int  # replicas that serve, as far as is known
    answered: int
    expected: int  # of which a page was to be had
    reason: str  # what is missing; "" when nothing is
    counted: Counted | None = None


@dataclass(slots=True)
class _Replica:
    since_s: float  # first asked
    page: Scrape | None = None


def names_read(names: ServerNames) -> frozenset[str]:
    """Every name on a page that a window is read from."""
    found = {_STARTED}
    for field in (getattr(names, slot) for slot in names.__slots__):
        if isinstance(field, Distribution):
            found.update(f"{name}_bucket" for name in field.names)
            found.update(field.summaries)
        elif isinstance(field, Sum):
            for name in field.names:
                found.update((name, name.removesuffix("_total"), f"{name.removesuffix('_total')}_total"))
    return frozenset(found)


class Rounds:
    """The pages of one service's replicas; one round in, one outcome out."""

    def __init__(self, names: ServerNames, model: str, *, grace_s: float, age_most_s: float) -> None:
        """`grace_s` is how long a replica may take to its first page, `age_most_s` how old a pair's first may be."""
        self._names = names
        self._model = model
        self._grace_s = grace_s
        self._age_most_s = age_most_s
        self._replicas: dict[tuple[int, str], _Replica] = {}
        self._round_s: float | None = None  # of the round before

    def took(
        self, taken: Round, doubtful: frozenset[int] = frozenset(), grown: frozenset[int] = frozenset()
    ) -> Outcome:
        """What the round says; replicas that were not asked are forgotten.

        `doubtful` replicas stand on lost nodes: without a page, too, nothing is expected of them. `grown` ones
        served before they were asked: what they have counted is not of this window.
        """
        known = self._replicas
        self._replicas = {key: known.get(key) or _Replica(taken.at_s) for key in taken.pages}
        pairs, every = list[Pair](), list[Pair]()
        answered = missing = strangers = 0
        why = ""
        for key, page in taken.pages.items():
            replica = self._replicas[key]
            if isinstance(page, str):
                is_due = replica.page is not None or taken.at_s - replica.since_s >= self._grace_s
                missing += is_due and key[0] not in doubtful
                why = why or f"replica {key[0]}: {page}"
                continue
            answered += 1
            nothing = None if key[0] in grown else self._nothing(replica, taken.at_s)
            before, replica.page = replica.page or nothing, page
            strangers += before is None
            if before is not None and page.at_s > before.at_s:
                every.append(Pair(before, page))
            if before is not None and page.at_s - before.at_s <= self._age_most_s:
                pairs.append(Pair(before, page))
        self._round_s = taken.at_s if taken.pages else self._round_s
        counted = self._counted(every, strangers)
        expected = len(pairs) + missing
        said = _said(answered, answered + missing, why)
        told = Outcome(None, answered + missing, answered, answered + missing, said, counted)
        if not pairs:
            return told._replace(reason=told.reason or ("no second page yet" if answered else "no replica yet"))
        if len(pairs) < _SHARE_LEAST * expected:
            return told._replace(reason=f"{told.reason}: too few to judge by")
        seen = window(self._names, pairs, self._model)
        return told if seen is None else told._replace(window=_scaled(seen, expected / len(pairs)))

    def _counted(self, pairs: Sequence[Pair], strangers: int) -> Counted | None:
        found = [gained(self._names, pair, self._model) for pair in pairs]
        requests = [one.requests for one in found if one.requests is not None]
        tokens = [one.tokens for one in found if one.tokens is not None]
        if not requests and not tokens:
            return None
        return Counted(
            max(pair.after.at_s - pair.before.at_s for pair in pairs),
            sum(requests) if requests else None,
            sum(tokens) if tokens else None,
            not strangers and all(one.is_whole for one in found),
        )

    def _nothing(self, replica: _Replica, at_s: float) -> Scrape | None:
        """The page that a replica which has just begun had in the round before: all counters at 0."""
        if self._round_s is None or at_s - replica.since_s >= self._grace_s:
            return None
        return Scrape(self._round_s, {})


def _said(answered: int, expected: int, why: str) -> str:
    if answered == expected:
        return why  # of replicas that are starting
    return f"{answered} of {expected} replicas answered ({why})"


def _scaled(seen: Window, factor: float) -> Window:
    """The window as if all had answered alike."""
    if factor == 1.0:
        return seen

    def all_of(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        seen,
        arrived_hz=all_of(seen.arrived_hz),
        finished_hz=all_of(seen.finished_hz),
        waiting=all_of(seen.waiting),
        waiting_growth=all_of(seen.waiting_growth),
        running=all_of(seen.running),
        output_token_hz=all_of(seen.output_token_hz),
        context_token_hz=all_of(seen.context_token_hz),
    )
