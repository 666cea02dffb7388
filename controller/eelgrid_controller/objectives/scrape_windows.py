"""Builds service windows from rounds of scraped metrics pages, also when some replicas did not answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eelgrid_controller.objectives.services.prometheus_text import ExpositionPage
from eelgrid_controller.objectives.services.service_metrics import (
    DistributionNames,
    MetricsWindow,
    ScrapePair,
    ServerNames,
    SumNames,
    served_increment,
    service_window,
)

_STARTED = "process_start_time_seconds"  # tells that a process began anew
_SHARE_LEAST = 0.5  # of the expected replicas that must be paired


class ScrapeTarget(NamedTuple):
    """Whose pages are wanted: where, by replica, and which metrics of them."""

    urls: Mapping[int, str]
    names: frozenset[str]  # all that is kept of a page


class ScrapeRound(NamedTuple):
    """What all replicas of one workload answered; a text says why there is no page."""

    at_s: float  # when it began
    pages: Mapping[tuple[int, str], ExpositionPage | str]  # by replica and address


class WorkIncrement(NamedTuple):
    """What all replicas of a round have done since their pages before, at least; None where no server tells."""

    seconds: float  # since the oldest of those pages
    requests: float | None
    tokens: float | None
    is_whole: bool  # False where some of it is not known


class ScrapeOutcome(NamedTuple):
    """What a round says of a service."""

    window: MetricsWindow | None
    serving: int  # replicas that serve, as far as is known
    answered: int
    expected: int  # of which a page was to be had
    reason: str  # what is missing; "" when nothing is
    counted: WorkIncrement | None = None


@dataclass(slots=True)
class _Replica:
    since_s: float  # first asked
    page: ExpositionPage | None = None


def required_names(names: ServerNames) -> frozenset[str]:
    """Every name on a page that a window is read from."""
    found = {_STARTED}
    for field in (getattr(names, slot) for slot in names.__slots__):
        if isinstance(field, DistributionNames):
            found.update(f"{name}_bucket" for name in field.names)
            found.update(field.summaries)
        elif isinstance(field, SumNames):
            for name in field.names:
                found.update((name, name.removesuffix("_total"), f"{name.removesuffix('_total')}_total"))
    return frozenset(found)


class ScrapeWindows:
    """The pages of one service's replicas; one round in, one outcome out."""

    def __init__(self, names: ServerNames, model: str, *, grace_s: float, age_most_s: float) -> None:
        """`grace_s` is how long a replica may take to its first page, `age_most_s` how old a pair's first may be."""
        self._names = names
        self._model = model
        self._grace_s = grace_s
        self._age_most_s = age_most_s
        self._replicas: dict[tuple[int, str], _Replica] = {}
        self._round_s: float | None = None  # of the round before

    def add_round(
        self, taken: ScrapeRound, doubtful: frozenset[int] = frozenset(), grown: frozenset[int] = frozenset()
    ) -> ScrapeOutcome:
        """What the round says; replicas that were not asked are forgotten.

        `doubtful` replicas stand on lost nodes: without a page, too, nothing is expected of them. `grown` ones
        served before they were asked: what they have counted is not of this window.
        """
        known = self._replicas
        self._replicas = {key: known.get(key) or _Replica(taken.at_s) for key in taken.pages}
        pairs, every = list[ScrapePair](), list[ScrapePair]()
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
                every.append(ScrapePair(before, page))
            if before is not None and page.at_s - before.at_s <= self._age_most_s:
                pairs.append(ScrapePair(before, page))
        self._round_s = taken.at_s if taken.pages else self._round_s
        counted = self._count_work(every, strangers)
        expected = len(pairs) + missing
        said = _reason_text(answered, answered + missing, why)
        told = ScrapeOutcome(None, answered + missing, answered, answered + missing, said, counted)
        if not pairs:
            return told._replace(reason=told.reason or ("no second page yet" if answered else "no replica yet"))
        if len(pairs) < _SHARE_LEAST * expected:
            return told._replace(reason=f"{told.reason}: too few to judge by")
        seen = service_window(self._names, pairs, self._model)
        return told if seen is None else told._replace(window=_scale_window(seen, expected / len(pairs)))

    def _count_work(self, pairs: Sequence[ScrapePair], strangers: int) -> WorkIncrement | None:
        found = [served_increment(self._names, pair, self._model) for pair in pairs]
        requests = [one.requests for one in found if one.requests is not None]
        tokens = [one.tokens for one in found if one.tokens is not None]
        if not requests and not tokens:
            return None
        return WorkIncrement(
            max(pair.after.at_s - pair.before.at_s for pair in pairs),
            sum(requests) if requests else None,
            sum(tokens) if tokens else None,
            not strangers and all(one.is_whole for one in found),
        )

    def _nothing(self, replica: _Replica, at_s: float) -> ExpositionPage | None:
        """The page that a replica which has just begun had in the round before: all counters at 0."""
        if self._round_s is None or at_s - replica.since_s >= self._grace_s:
            return None
        return ExpositionPage(self._round_s, {})


def _reason_text(answered: int, expected: int, why: str) -> str:
    if answered == expected:
        return why  # of replicas that are starting
    return f"{answered} of {expected} replicas answered ({why})"


def _scale_window(seen: MetricsWindow, factor: float) -> MetricsWindow:
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
