"""The scraper against real servers: who is asked when, what a round holds, and what windows say when replicas are missing."""

import asyncio
import contextlib
import itertools
import logging
import time

import pytest
from tests.fakes.metrics_servers import Listener, Replica, answer

from eelgrid_controller.objectives.service_observer import ScrapeWindows, required_names
from eelgrid_controller.objectives.services.service_metrics import (
    SERVER_NAMES,
    ExpositionPage,
    ScrapeRound,
    ScrapeTarget,
    generic_names,
    server_metric_names,
)
from eelgrid_controller.runtime.scraper import (
    PAGES_MOST,
    FetchError,
    FetchLimits,
    HttpFetcher,
    Scraper,
    next_due_s,
    parse_samples,
)

LOG = logging.getLogger("test.scraper")
GENERIC = generic_names("app_latency_seconds", waiting="app_waiting", running="app_running")


@contextlib.asynccontextmanager
async def scraping(get=None, every_s=0.05):
    """A scraper that runs."""
    getter = HttpFetcher(FetchLimits(connect_s=0.3, whole_s=0.3), allows_loopback=True)
    scraper = Scraper(get or getter.get, every_s=every_s, monotonic_s=time.monotonic, log=LOG)
    running = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def taken(scraper, name, *, want=lambda _: True):
    """The next round of a workload that is as wanted."""
    async with asyncio.timeout(5.0):
        while True:
            one = scraper.collect_rounds().get(name)
            if one is not None and want(one):
                return one
            await asyncio.sleep(0.005)


def test_due_moments_are_one_interval_apart_and_spread_by_name():
    for name in ("a", "b", "w-17"):
        first = next_due_s(name, 1000.0, 15.0)
        assert 1000.0 < first <= 1015.0
        assert next_due_s(name, first, 15.0) == pytest.approx(first + 15.0)
        assert next_due_s(name, first - 1e-3, 15.0) == pytest.approx(first)
    offsets = sorted(next_due_s(f"w-{number}", 0.0, 15.0) for number in range(300))
    assert max(b - a for a, b in itertools.pairwise(offsets)) < 1.0
    assert offsets[0] < 1.0
    assert offsets[-1] > 14.0


@pytest.mark.parametrize("kind", ["vllm", "sglang", "generic"])
async def test_rounds_of_real_servers_become_windows(kind):
    names = GENERIC if kind == "generic" else server_metric_names(kind)
    replicas = [Replica(kind), Replica(kind)]
    with Listener(replicas[0].reply) as one, Listener(replicas[1].reply) as other:
        async with scraping() as scraper:
            scraper.set_targets({"w-1": ScrapeTarget({0: one.url, 1: other.url}, required_names(names))})
            rounds = ScrapeWindows(names, "m", grace_s=60.0, age_most_s=60.0)
            first = rounds.add_round(await taken(scraper, "w-1"))
            assert first.window is None
            assert (first.serving, first.answered) == (2, 2)
            for replica in replicas:
                replica.served(150, response_s=0.2)
                replica.waiting = 5
            second = rounds.add_round(await taken(scraper, "w-1", want=lambda one: _finished(one, names) == 300))
    seen = second.window
    assert second.reason == ""
    assert seen.finished_hz * seen.seconds == pytest.approx(300)
    assert seen.arrived_hz * seen.seconds == pytest.approx(310)
    assert (seen.waiting, seen.waiting_growth) == (10, 10)
    assert 0.1 < seen.response.quantile(0.95).value_s <= 0.25
    if kind != "generic":
        assert seen.output_token_hz * seen.seconds == pytest.approx(30_000)


def _finished(one, names):
    pages = [page for page in one.pages.values() if isinstance(page, ExpositionPage)]
    return sum(sample.value for page in pages for sample in page.samples_of(names.finished.names[0]))


async def test_hung_garbled_and_broken_pages_are_reasons_and_the_others_still_count():
    replica = Replica()
    bad = {
        1: lambda _: (2.0,),
        2: lambda _: (answer(b"<html>\nsecret words\n</html>\n"),),
        3: lambda _: (answer(b"vllm:num_requests_waiting{ 1\n"),),
        4: lambda _: (answer(replica.page().encode())[:-9],),
        5: lambda _: (answer(replica.page().encode()[:-9]),),
        6: lambda _: (answer(b"\xff\xfe\n"),),
    }
    with contextlib.ExitStack() as stack:
        urls = {0: stack.enter_context(Listener(replica.reply)).url}
        urls |= {number: stack.enter_context(Listener(reply)).url for number, reply in bad.items()}
        async with scraping() as scraper:
            scraper.set_targets({"w": ScrapeTarget(urls, required_names(server_metric_names("vllm")))})
            found = {number: page for (number, _), page in (await taken(scraper, "w")).pages.items()}
            assert sum(scraper.failures.values()) == 6
    assert isinstance(found.pop(0), ExpositionPage)
    assert found == {
        1: "no whole answer in 0.3 s",
        2: "line 1 is not in Prometheus' text format",
        3: "line 1 is not in Prometheus' text format",
        4: "the answer broke off",
        5: "the page breaks off in a line",
        6: "the page is no text",
    }


async def test_one_that_hangs_or_breaks_holds_up_nobody_else():
    replica = Replica()

    async def get(url):
        if url == "hangs":
            await asyncio.sleep(60.0)
        if url == "breaks":
            raise RuntimeError("a fault of ours")
        return replica.page().encode()

    async with scraping(get) as scraper:
        names = required_names(server_metric_names("vllm"))
        scraper.set_targets({name: ScrapeTarget({0: name}, names) for name in ("hangs", "breaks", "fine")})
        for _ in range(3):
            assert isinstance((await taken(scraper, "fine")).pages[0, "fine"], ExpositionPage)
        assert "hangs" not in scraper.collect_rounds()
        scraper.set_targets({})  # the round under way ends with the wish for it
        await asyncio.sleep(0.1)
        assert scraper.collect_rounds() == {}


async def test_an_address_that_keeps_failing_is_asked_seldom_and_comes_back():
    asked, replica = [], Replica()

    async def get(url):
        asked.append(url)
        if replica is None:
            raise FetchError("gone")
        return replica.page().encode()

    kept, replica = replica, None
    async with scraping(get, every_s=0.01) as scraper:
        scraper.set_targets({"w": ScrapeTarget({0: "u"}, required_names(server_metric_names("vllm")))})
        for _ in range(15):
            assert (await taken(scraper, "w")).pages[0, "u"] == "gone"
        assert len(asked) <= 3 + 15 / 4 + 2
        replica = kept
        await taken(scraper, "w", want=lambda one: isinstance(one.pages[0, "u"], ExpositionPage))
        before = len(asked)
        for _ in range(5):
            await taken(scraper, "w")
        # The first of them may have been asked before it was counted.
        assert len(asked) >= before + 4


def test_too_many_pages_are_refused_by_name():
    scraper = Scraper(lambda _: None, every_s=15.0, monotonic_s=lambda: 0.0, log=LOG)
    many = ScrapeTarget(dict.fromkeys(range(PAGES_MOST), "u"), frozenset())
    assert scraper.set_targets({"a": many, "b": ScrapeTarget({0: "u"}, frozenset())}) == {"b"}


def test_only_what_is_wanted_is_parsed_and_kept():
    page = Replica().page() + "other_total 5\nvllm:num_requests_waiting_else 3\n"
    found = parse_samples(page.encode(), required_names(server_metric_names("vllm")), 7.0)
    assert found.at_s == 7.0
    assert "other_total" not in found.samples
    assert "vllm:num_requests_waiting_else" not in found.samples
    assert found.samples_of("vllm:num_requests_waiting")[0].value == 0
    # A server that has not begun to count is no error, one that speaks something else is.
    assert parse_samples(b"other_total 5\n", required_names(server_metric_names("vllm")), 7.0).samples == {}
    assert parse_samples(b"", required_names(server_metric_names("vllm")), 7.0).samples == {}


def test_every_name_that_a_window_reads_is_asked_for():
    for server, names in SERVER_NAMES.items():
        read = required_names(names)
        for name in (*names.finished.names, *names.waiting.names, *names.arrived.names, *names.output_tokens.names):
            assert name in read, server
        assert {f"{name}_bucket" for name in names.response.names} <= read
        assert set(names.response.summaries) <= read


# Windows with missing replicas


def rounds_of(*rows, grace_s=30.0, age_most_s=40.0):
    """Outcomes of rounds 10 s apart; each row has each replica's finished requests, or why there is no page."""
    rounds = ScrapeWindows(server_metric_names("vllm"), "", grace_s=grace_s, age_most_s=age_most_s)
    found = []
    for number, row in enumerate(rows):
        at_s = 100.0 + 10.0 * number
        pages = {}
        for place, cell in enumerate(row):
            if cell is None:
                continue
            if isinstance(cell, str):
                pages[place, "u"] = cell
            else:
                replica = Replica()
                replica.started_s = 1.0
                replica.served(cell)
                pages[place, "u"] = parse_samples(
                    replica.page().encode(), required_names(server_metric_names("vllm")), at_s
                )
        found.append(rounds.add_round(ScrapeRound(at_s, pages)))
    return found


def test_a_missing_replica_is_counted_as_if_it_did_what_the_others_do():
    _, whole, part = rounds_of((0, 0, 0, 0), (100, 100, 100, 100), (200, "hung", 200, 200))
    assert whole.window.arrived_hz == pytest.approx(40.0)
    assert part.window.arrived_hz == pytest.approx(40.0)
    assert part.window.output_token_hz == pytest.approx(4000.0)
    assert (part.serving, part.answered, part.expected) == (4, 3, 4)
    assert part.reason == "3 of 4 replicas answered (replica 1: hung)"


def test_with_fewer_than_half_nothing_is_reported():
    _, half, less = rounds_of((0, 0, 0), (100, "x", 100), (200, "x", "y"))
    assert half.window is not None
    assert less.window is None
    assert less.reason == "1 of 3 replicas answered (replica 1: x): too few to rely on"
    assert less.serving == 3


def test_a_replica_that_starts_is_not_missed_until_its_grace_is_over():
    found = rounds_of((0, None), (100, "starting"), (200, "starting"), (300, "starting"), (400, "starting"))
    assert [one.serving for one in found] == [1, 1, 1, 1, 2]
    assert found[2].window.arrived_hz == pytest.approx(10.0)
    assert found[4].window.arrived_hz == pytest.approx(20.0)


def test_a_replica_that_begins_has_counted_since_the_round_before():
    first, joined, both = rounds_of((0, "starting"), (100, 50), (200, 150))
    assert (first.serving, joined.serving) == (1, 2)
    assert joined.window.arrived_hz == pytest.approx(15.0)
    assert both.window.arrived_hz == pytest.approx(20.0)
    assert rounds_of((0, None), (100, 50))[-1].window.arrived_hz == pytest.approx(15.0)


def test_a_replica_that_answers_after_its_grace_waits_for_its_second_page():
    found = rounds_of((0, "x"), (100, "x"), (200, "x"), (300, "x"), (400, 9000), (500, 9100))
    assert found[-2].window.arrived_hz == pytest.approx(10.0)
    assert found[-1].window.arrived_hz == pytest.approx(20.0)


def test_a_replica_back_after_a_gap_counts_over_its_own_time_or_begins_again():
    back = rounds_of((0, 0), (100, "x"), (200, 200))[-1]
    assert back.window.arrived_hz == pytest.approx(20.0)
    late = rounds_of((0, 0), *(((100 * number), "x") for number in range(1, 5)), (500, 9000))[-1]
    assert late.window.arrived_hz == pytest.approx(10.0)  # its first page is too old for a pair
    # What was done is told by its counter all the same.
    assert (late.counted.requests, late.counted.is_whole) == (100.0 + 9000.0, True)


def test_counters_that_began_again_never_count_backwards():
    restarted = rounds_of((5000, 5000), (5100, 40))[-1]
    assert restarted.window.arrived_hz == pytest.approx(14.0)


def test_nobody_answers():
    assert rounds_of(("x", "x"))[0] == (None, 0, 0, 0, "replica 0: x", None)
    assert rounds_of(())[0].reason == "no replica yet"
    gone = rounds_of((0,), ("x",))[-1]
    assert (gone.window, gone.serving, gone.reason) == (None, 1, "0 of 1 replicas answered (replica 0: x)")
