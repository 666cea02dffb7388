"""What a node's certificate may send to the energy ledger, and that nobody else sees a difference."""

import logging
import time
from dataclasses import replace

import pytest
from tests.builders.cluster import build_node as node_inventory
from tests.builders.energy import (
    BEGIN_NS,
    CLOCK,
    OWNERS,
    SECOND_NS,
    EnergyNode,
    LedgerSite,
    build_ledger_node,
    build_window,
)
from tests.builders.server import run_controller
from tests.waiting import wait_until as rig_until

from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import (
    PAST_S_MOST,
    PIECES_MOST,
    ClaimAllowance,
    EnergyHolder,
    LedgerAmount,
    LedgerEntry,
    LedgerPlace,
    MeasuredEnergy,
    count_pieces,
    judge_window,
    parse_query,
    spread_window,
)
from eelgrid_controller.energy.store import ledger_writer
from eelgrid_controller.energy.store.ledger_store import open_ledger
from eelgrid_controller.energy.store.query_execution import answer_queries
from eelgrid_controller.state.measurements import WorkInterval, spread_work
from eelgrid_protos.messages import (
    ConnectResponse,
    EnergyAcknowledgement,
    EnergyOwner,
    Gpu,
    OwnerKind,
    WindowDevice,
    WindowShare,
)

DAY_NS = 86_400 * SECOND_NS
YEAR_2262_NS = 2**63 - 1
NOW_S = BEGIN_NS / SECOND_NS + 1800.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ledger_writer, "_BATCH_S", 0.005)
    monkeypatch.setattr(ledger_writer, "_AGAIN_S", 0.02)


def with_device(one, **changes):
    return replace(one, devices=(replace(one.devices[0], **changes),))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(build_window(1), number=2**64 - 1), "number"),
        (with_device(build_window(1), uncertainty_mj=2**64 - 1), "uncertainty"),
        (with_device(build_window(1), uncertainty_mj=2**63), "uncertainty"),
        (build_window(1, 10**15), "energy"),
        (build_window(1, 2**63), "energy"),
        (with_device(build_window(1), uncounted_s=1e9), "nobody measured"),
        (replace(build_window(1, 2_000), devices=(WindowDevice(gpu_uuid="g", total_mj=2_000),) * 2), "twice"),
        # 10^12 J within a second, and within a second of long ago.
        (replace(build_window(1, 10**15), end_ns=BEGIN_NS + SECOND_NS), "energy"),
        (replace(build_window(1, 10**15), begin_ns=0, end_ns=SECOND_NS), "energy"),
    ],
)
async def test_a_window_that_cannot_be_is_refused_alone_and_its_agent_is_told_why(tmp_path, bad, reason):
    async with LedgerSite(tmp_path) as site:
        site.take(bad)
        site.take(build_window(1), node="n2")
        await site.until(lambda: {node for node, _ in site.acknowledged} == {"n1", "n2"})
        assert site.acknowledged[0] == ("n1", bad.number) or ("n1", bad.number) in site.acknowledged
        ((node, many, why),) = site.refused
        assert (node, many) == ("n1", 1)
        assert reason in why
        assert (site.writer.refused, site.writer.failures, site.writer.fault) == (1, 0, "")
        site.take(build_window(1 if bad.number > 2**63 else 2))  # and the next of the same node is taken
        await site.until(lambda: len(site.acknowledged) == 3)
        assert (await site.total()).measured_mj == 2_000


async def test_windows_that_add_up_to_2_to_the_63_are_refused_before_they_do(tmp_path):
    async with LedgerSite(tmp_path) as site:
        # Each is what a board can draw in the years that it names; all of them are more than has passed.
        for number in range(1, 9):
            site.take(replace(build_window(number, 5 * 10**12), begin_ns=BEGIN_NS - 20 * DAY_NS, end_ns=BEGIN_NS))
        site.take(build_window(1), node="n2")
        await site.until(lambda: len({node for node, _ in site.acknowledged}) == 2)
        most_mj = 1000.0 * 1.5 * 5_000.0 * (PAST_S_MOST + 3600.0)
        assert 0 < (await site.total()).measured_mj < most_mj
        assert site.writer.refused == 0
        again = [replace(build_window(number, 3 * 10**13), begin_ns=BEGIN_NS - 80 * DAY_NS) for number in (41, 42, 43)]
        for one in again:
            site.take(one)
        await site.until(lambda: site.refused)
        assert "have passed since their last windows" in site.refused[0][2]


async def test_a_board_that_the_catalogue_knows_is_judged_by_its_own_power(tmp_path):
    gpu = Gpu(uuid="g", index=0, product="T4", model="T4", catalogue_key="t4", power_limit_max_w=20_000.0)
    async with LedgerSite(tmp_path) as site:
        known = replace(build_ledger_node("n1"), gpus=(gpu,))
        most_j = 1.5 * 70.0 * (3600.0 + 2 * 60.0)
        for number, energy_mj in ((1, int(999 * most_j)), (2, int(1001 * most_j))):
            site.writer.add_window(known, build_window(number, energy_mj), lambda told: site.hear("n1", told))
        await site.until(lambda: ("n1", 2) in site.acknowledged)
        assert site.writer.refused == 1
        assert "at 105 W" in site.refused[0][2]


async def test_a_part_that_cannot_be_written_stops_no_other_node(tmp_path, caplog):
    owners = (EnergyOwner(kind=OwnerKind.POD, namespace="a", pod="p"), *OWNERS[1:])
    async with LedgerSite(tmp_path) as site:
        # What no check knows: here a name that is no text in UTF-8.
        site.writer.user_of_pod = lambda _namespace, _pod: "\ud800"
        with caplog.at_level(logging.ERROR):
            site.take(replace(build_window(1), owners=owners), node="bad")
            site.take(build_window(1), node="good")
            await site.until(lambda: len(site.acknowledged) == 2)
        assert [node for node, *_ in site.refused] == ["bad"]
        assert (await site.total()).measured_mj == 1_000
        assert site.writer.waiting == 0
        assert "node=bad" in caplog.text


async def test_one_node_fills_neither_the_waiting_room_nor_the_event_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_writer, "_BATCH_S", 60.0)
    shares = tuple(replace(build_window(1).shares[0], owner=owner, energy_mj=1) for owner in range(3)) * 1365
    many = replace(build_window(1), shares=shares, devices=(WindowDevice(gpu_uuid="g", total_mj=len(shares)),))
    async with LedgerSite(tmp_path) as site:
        for number in range(1, 200):
            site.take(replace(many, number=number))
        assert site.writer.waiting <= ledger_writer._NODE_WAITING_MOST
        assert site.writer.dropped >= 199 - ledger_writer._NODE_WAITING_MOST
        site.take(build_window(1), node="n2")
        assert site.writer._batch.many["n2"] == 1


def test_a_window_from_1970_to_2262_is_cut_into_a_bounded_number_of_pieces():
    devices = tuple(WindowDevice(gpu_uuid=f"g{number}", total_mj=32) for number in range(128))
    shares = tuple(
        WindowShare(
            device=number % 128,
            owner=number % 3,
            part=build_window(1).shares[0].part,
            method=build_window(1).shares[0].method,
            confidence=build_window(1).shares[0].confidence,
            energy_mj=1,
        )
        for number in range(4096)
    )
    whole = replace(build_window(1), begin_ns=0, end_ns=YEAR_2262_NS, devices=devices, shares=shares)
    places = {one.gpu_uuid: LedgerPlace("n1", "p", "m") for one in devices}
    assert count_pieces(whole) <= PIECES_MOST
    began_s = time.thread_time()
    made = spread_window(whole, places, lambda owner: EnergyHolder(owner.kind.name), None)
    assert len(made.entries) <= PIECES_MOST
    assert time.thread_time() - began_s < 5.0, "it took minutes"
    assert sum(one.spent.energy_mj for one in made.entries) == sum(one.total_mj for one in made.measured) == 4096


@pytest.mark.parametrize("begin_ns", [0, BEGIN_NS + 3650 * DAY_NS])
@pytest.mark.parametrize("length_ns", [60 * SECOND_NS, 400 * DAY_NS, YEAR_2262_NS])
async def test_what_is_far_from_now_counts_in_the_hour_in_which_it_came(tmp_path, begin_ns, length_ns):
    async with LedgerSite(tmp_path) as site:
        site.take(replace(build_window(1), begin_ns=begin_ns, end_ns=min(begin_ns + length_ns, YEAR_2262_NS)))
        site.take(build_window(1), node="n2")
        await site.until(lambda: len(site.acknowledged) == 2)
        assert (site.writer.unplaced, site.writer.refused) == (1, 0)
        (group,) = (await site.total("hour")).groups
        assert (group.values, group.spent.energy_mj) == ((str(BEGIN_NS // SECOND_NS),), 2_000)
        # Its end is no reason to wait for the node, nor to think that nothing is late.
        assert site.writer.newest_ns <= BEGIN_NS + 2 * 3600 * SECOND_NS
        assert await site.writer.settled_s() <= NOW_S


async def test_a_window_of_weeks_is_spread_over_them(tmp_path):
    async with LedgerSite(tmp_path) as site:
        site.take(replace(build_window(1, 24_000_000), begin_ns=BEGIN_NS - 20 * DAY_NS, end_ns=BEGIN_NS))
        await site.until(lambda: site.acknowledged)
        asked = parse_query(
            begin_ns=BEGIN_NS - 30 * DAY_NS, end_ns=BEGIN_NS + DAY_NS, group_by=("day",), filters={}, rows_most=100
        )
        (answer,) = await site.writer.query((asked,))
        assert [group.spent.energy_mj for group in answer.groups] == [1_200_000] * 20


def test_time_that_has_passed_gives_back_what_a_node_may_claim():
    allowance = ClaimAllowance(at_s=0.0, board_s=0.0)
    whole = replace(build_window(1, 5_000 * 3600 * 1500), begin_ns=BEGIN_NS - 3600 * SECOND_NS, end_ns=BEGIN_NS)
    assert not judge_window(whole, {}, allowance, now_s=NOW_S).reason
    allowance.board_s -= 3600.0
    assert judge_window(whole, {}, allowance, now_s=NOW_S).reason
    allowance.advance(3600.0)
    assert not judge_window(whole, {}, allowance, now_s=NOW_S).reason
    allowance.advance(1e12)
    assert allowance.board_s == PAST_S_MOST


async def test_refusals_are_logged_once_in_a_while_with_their_number(tmp_path, caplog):
    now_s = [0.0]
    async with LedgerSite(tmp_path, clock=Clock(now_ns=CLOCK.now_ns, monotonic_s=lambda: now_s[0])) as site:
        with caplog.at_level(logging.ERROR):
            for number in range(1, 51):
                site.take(build_window(number, 10**15))
            now_s[0] = 61.0
            site.take(build_window(51, 10**15))
            site.take(build_window(1, 10**15), node="n2")
        lines = [one.getMessage() for one in caplog.records if "ledger=refused" in one.getMessage()]
        assert ["node=n1" in line for line in lines] == [True, True, False]
        assert "more=49" in lines[1]
        assert site.writer.refused == 52


async def test_an_agent_is_told_of_what_was_refused_and_its_stream_goes_on(tmp_path):
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(node_inventory("n1"))
        now_ns = rig.controller._clock.now_ns()
        await rig_until(lambda: rig.controller.ledger._store is not None)

        def told(number, energy_mj):
            one = build_window(number, energy_mj)
            return replace(one, begin_ns=now_ns - 60 * SECOND_NS, end_ns=now_ns)

        await agent.say(told(2**64 - 1, 1), told(1, 10**15), told(2, 1_000))
        refused, last = 0, 0
        while last != 2:
            heard = await agent.hear(EnergyAcknowledgement)
            refused, last = refused + heard.refused, heard.number
            assert not heard.refused or heard.refused_reason
        assert refused == 2
        await agent.say(told(3, 1_000))
        assert (await agent.hear(EnergyAcknowledgement)).number == 3


def test_the_agent_counts_and_keeps_why(tmp_path):
    site = EnergyNode(tmp_path)
    site.run(70)
    closed = site.node.outbox.windows.closed
    refusal = EnergyAcknowledgement(
        incarnation=site.node.outbox.windows.incarnation, number=closed[0].number, refused=1, refused_reason="too much"
    )
    site.node.on_message(ConnectResponse(message=refusal))
    assert (site.node.outbox.refused, site.node.outbox.refused_reason) == (1, "too much")
    assert closed[0] not in site.node.outbox.windows.closed


def test_sums_beyond_64_bits_are_sums(tmp_path):
    store = open_ledger(tmp_path)
    cell_mj, hours = 2**55, 1200
    entries = [
        LedgerEntry(hour * 3600, LedgerPlace("n", "p", "m"), EnergyHolder("pod", "a"), LedgerAmount(active_mj=2**60))
        for hour in range(hours)
    ]
    store.add(entries, [MeasuredEnergy(one.hour_s, one.place, 2**60, 0, 0.0) for one in entries], [], now_s=0)
    store.add(entries, [MeasuredEnergy(one.hour_s, one.place, 2**60, 0, 0.0) for one in entries], [], now_s=0)
    whole = {"begin_ns": 0, "end_ns": hours * 3600 * SECOND_NS, "filters": {}, "rows_most": 10}
    # An hour, and a day, holds at most so much; hours and days together exceed 64 bits.
    for by, many in (((), hours // 24), (("namespace",), hours // 24), (("hour",), hours)):
        answer = store.query(parse_query(**whole, group_by=by))
        assert answer.total.energy_mj == answer.measured_mj == pytest.approx(many * cell_mj)
    assert sum(store.namespaces.counters_mj().values()) <= 2**63 - 1
    store.add([entries[0]], [], [], now_s=0)
    store.close()


def test_work_that_is_no_number_or_of_another_time_costs_nothing():
    for amount in (float("nan"), float("inf"), -float("inf")):
        assert spread_work(WorkInterval("w", "step", amount, NOW_S, NOW_S), None) == []
    # Ten years without a word, and a stretch of ten years.
    decade = spread_work(WorkInterval("w", "step", 1.0, NOW_S, NOW_S + 3.2e8), NOW_S - 3.2e8)
    assert len(decade) < 200
    assert sum(one.amount for one in decade) == pytest.approx(1.0)
    # A clock that was ten years ahead for a moment.
    (late,) = spread_work(WorkInterval("w", "step", 2.0, NOW_S - 5.0, NOW_S), NOW_S + 3.2e8)
    assert (late.hour_s, late.amount, late.until_s) == (int(NOW_S) // 3600 * 3600, 2.0, NOW_S)


def test_answers_say_nothing_is_damaged_where_nothing_is(tmp_path):
    store = open_ledger(tmp_path)
    asked = parse_query(begin_ns=0, end_ns=3600 * SECOND_NS, group_by=(), filters={}, rows_most=5)
    with store.database.snapshot() as read:
        (answer,), damage = answer_queries(read, [asked])
    assert (answer.damaged, bool(damage)) == ((), False)
    store.close()
