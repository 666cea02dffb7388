"""Terms of leaders: agents keep the highest on disk and obey no older one, and a controller asks its database who is right."""

import asyncio
import contextlib
import logging
from dataclasses import replace

import pytest
from tests import postgres_rig
from tests.builders.cluster import build_node, build_request
from tests.builders.server import AgentStream, run_controller
from tests.builders.stores import JOURNAL_STORES, postgres_store
from tests.fake_controller import EACH_SECOND, Agent, running, serving
from tests.waiting import wait_until

from eelgrid.async_client import AsyncClient
from eelgrid.errors import UnavailableError
from eelgrid_agent.node.leader_terms import LEADER_FILE, LEADER_RECORD, LeaderTerms, TermTooOld
from eelgrid_agent.state_files import StateFile
from eelgrid_controller.errors import JournalFenced
from eelgrid_protos.faults import InvalidArgument, NotLeader, Unavailable
from eelgrid_protos.messages import Assignment, Hello, LeaderTerm, NodePlan, PlanApplied, TermRefused, Welcome

logging.getLogger("alembic").setLevel(logging.WARNING)


def term(timeline, epoch, holder="a"):
    return LeaderTerm(timeline=timeline, epoch=epoch, holder=holder)


def welcome(leader):
    return Welcome(acknowledged_sequence=0, cadence=EACH_SECOND, term=leader)


# The agent


def test_a_higher_term_is_kept_on_disk_and_a_lower_one_refused_after_a_restart(tmp_path):
    store = StateFile(tmp_path / LEADER_FILE, LEADER_RECORD)
    first = LeaderTerms(store)
    first.accept(term(1, 5))
    first.accept(term(1, 7, "b"))
    again = LeaderTerms(store)
    assert again.known == term(1, 7, "b")
    with pytest.raises(TermTooOld, match=r"term 1\.6 of c is older than 1\.7 of b"):
        again.accept(term(1, 6, "c"))
    assert again.refusals_total == 1
    assert LeaderTerms(store).known == term(1, 7, "b")


@pytest.mark.parametrize(
    ("offered", "is_obeyed"),
    [
        (term(1, 9), True),
        (term(1, 8), False),
        (term(1, 10, "b"), True),
        # A standby was promoted that lacked the last epochs.
        (term(2, 1, "b"), True),
        (term(0, 99, "b"), False),
        # Two leaders of one epoch: the first one that was met.
        (term(1, 9, "b"), False),
        # Somebody made the agent call another cluster.
        (LeaderTerm(timeline=0, epoch=1, holder="c", cluster="other"), True),
        (None, True),
    ],
)
def test_terms_are_ordered_by_timeline_then_epoch_then_who_came_first(offered, is_obeyed):
    terms = LeaderTerms()
    terms.accept(term(1, 9))
    with contextlib.nullcontext() if is_obeyed else pytest.raises(TermTooOld):
        terms.accept(offered)


def test_a_damaged_record_is_put_aside_and_the_agent_begins_anew(tmp_path, caplog):
    path = tmp_path / LEADER_FILE
    for content in (
        "{",
        '{"schema": 1, "timeline": -1, "epoch": 3, "holder": "x", "cluster": ""}',
        '{"schema": 1, "timeline": 1}',
    ):
        path.write_text(content)
        assert LeaderTerms(StateFile(path, LEADER_RECORD)).known is None
        assert not path.exists()
    assert caplog.text.count("leader_record_unusable") == 3


async def test_a_controller_that_was_followed_is_told_so_and_changes_nothing():
    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                reply(welcome(term(1, 5, "new") if number == 1 else term(1, 4, "old")))
                reply(NodePlan(node_name="n", epoch=number, lease_s=60.0))
            if isinstance(message, PlanApplied):
                return

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: controller.of(TermRefused))
        assert controller.of(TermRefused)[0] == TermRefused(refused=term(1, 4, "old"), known=term(1, 5, "new"))
        await wait_until(lambda: len(agent.reports) > 1)
        assert agent.node.guard.epoch == 1
        assert [hello.term for hello in controller.of(Hello)][:2] == [None, term(1, 5, "new")]
        assert "its term 1.4 of old is older than 1.5 of new" in agent.reports[1]
        assert agent.uplink.connections_total == 1


async def test_a_plan_on_an_open_stream_is_refused_once_another_node_has_met_a_later_leader():
    sent = asyncio.Event()

    async def script(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                reply(welcome(term(1, 4, "old") if number == 1 else term(1, 5, "new")))
            if number == 1 and not sent.is_set():
                await sent.wait()
                reply(NodePlan(node_name="n", epoch=9, lease_s=60.0))

    async with serving(script) as controller, running(Agent(controller.port)) as agent:
        await wait_until(lambda: agent.node.connected)
        agent.node.terms.accept(term(1, 5, "new"))
        sent.set()
        await wait_until(lambda: controller.of(TermRefused))
        assert controller.of(TermRefused)[0].plan_epoch == 9
        await wait_until(lambda: agent.uplink.connections_total == 2)
        assert agent.node.guard.epoch == 0
        assert agent.node.terms.refusals_total == 1


# The controller


@pytest.mark.parametrize("make", JOURNAL_STORES)
def test_a_term_is_raised_above_another_and_stays_so(make, tmp_path):
    with make(tmp_path) as store:
        with contextlib.closing(store.open()) as journal:
            before = journal.term
            raised = journal.raise_term(term(before.timeline, before.epoch + 10, "other"))
            assert raised.token == (before.timeline, before.epoch + 11)
            assert raised.holder == before.holder
            assert journal.term == raised
            journal.append([])
            if hasattr(journal, "_keeper"):
                journal._keeper.renew()
                journal.check_files()
        with contextlib.closing(store.open()) as journal:
            assert journal.term.token >= raised.token


def test_a_leader_that_was_followed_cannot_raise_its_term(tmp_path):
    postgres_rig.find_missing() and pytest.skip("no PostgreSQL")
    with postgres_store(tmp_path) as store, contextlib.closing(store.open()) as old:
        store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")
        with contextlib.closing(store.open()) as new:
            with pytest.raises(JournalFenced):
                old.raise_term(term(1, 50, "x"))
            assert store.run("SELECT epoch FROM eelgrid.term") == [(new.term.epoch,)]


async def say_hello(rig, known):
    agent = AgentStream(rig.address)
    rig.agents.append(agent)
    await agent.say(Hello(incarnation=5, inventory=build_node(), term=known))
    return agent


async def test_a_controller_that_still_leads_rises_above_what_an_agent_has_met(tmp_path):
    async with run_controller(tmp_path) as rig:
        mine = rig.controller.loop.term
        agent = await say_hello(rig, replace(mine, epoch=mine.epoch + 3, holder="elsewhere"))
        told = (await agent.hear(Welcome)).term
        assert told == replace(mine, epoch=mine.epoch + 4)
        assert rig.controller.agents.claims.raises == 1
        # Not again at once, whoever asks.
        agent = await say_hello(rig, replace(told, epoch=told.epoch + 1))
        with pytest.raises(Unavailable, match="raised a moment ago"):
            await agent.hear()
        assert rig.controller.loop.term == told
    async with run_controller(tmp_path) as rig:
        assert rig.controller.loop.term == told


async def test_a_controller_whose_database_was_replaced_is_not_made_the_leader_by_it(tmp_path):
    async with run_controller(tmp_path) as rig:
        mine = rig.controller.loop.term
        agent = await say_hello(rig, replace(mine, timeline=mine.timeline + 1, holder="promoted"))
        with pytest.raises(NotLeader, match="later timeline of the database"):
            await agent.hear()
        assert rig.controller.loop.term == mine
        # Of another cluster: somebody made the agent call this one.
        agent = await say_hello(rig, replace(mine, timeline=9, cluster="another"))
        assert (await agent.hear(Welcome)).term == mine


async def test_a_term_that_no_leader_can_have_is_refused(tmp_path):
    async with run_controller(tmp_path) as rig:
        mine = rig.controller.loop.term
        agent = await say_hello(rig, replace(mine, epoch=mine.epoch + 2**40))
        with pytest.raises(InvalidArgument, match=r"leader\.json"):
            await agent.hear()
        assert rig.controller.loop.term == mine


async def test_a_controller_that_was_followed_learns_it_from_an_agent_and_ends(tmp_path):
    postgres_rig.find_missing() and pytest.skip("no PostgreSQL")
    with postgres_store(tmp_path) as store:
        async with run_controller(tmp_path / "one", database=store.url) as rig:
            loop = rig.controller.loop
            agent = await rig.join(build_node())
            store.run("UPDATE eelgrid.lease SET expires_at = '-infinity'")
            with contextlib.closing(await asyncio.to_thread(store.open)) as successor:
                assert loop.may_lead
                await agent.say(TermRefused(refused=loop.term, known=successor.term, plan_epoch=3))
                with pytest.raises(Unavailable, match="leads with epoch 2"):
                    await agent.hear_to_the_end()
                assert isinstance(await asyncio.wait_for(loop.failed, 5.0), JournalFenced)
                assert not loop.may_lead
                assert rig.controller.agents.claims.refusals == 1


async def test_plans_wait_while_the_lease_cannot_be_renewed(tmp_path):
    async with run_controller(tmp_path) as rig:
        loop = rig.controller.loop
        agent = await rig.join(build_node())
        loop.journal.may_lead = False
        await loop.submit(build_request("job-a"))
        await asyncio.sleep(0.3)
        assert rig.controller.agents.plans_sent == 0
        loop.journal.may_lead = True
        assert isinstance((await agent.hear(NodePlan)).assignments[0], Assignment)


async def test_reads_are_refused_or_told_to_be_stale_once_the_lease_has_run_out(tmp_path):
    """A leader that was stopped may have been followed by one that has accepted more."""
    async with run_controller(tmp_path) as rig, AsyncClient(rig.address) as client:
        journal = rig.controller.loop.journal
        await rig.join(build_node())
        reads = (
            lambda client: client.get_summary(),
            lambda client: client.get_policy(),
            lambda client: anext(client.list_nodes()),
            lambda client: client.get_overview(),
        )
        for read in reads:
            await read(client)
        journal.may_lead, journal.lease_age_s = False, 3.5
        for read in reads:
            with pytest.raises(UnavailableError, match="lease has run out"):
                await read(client)
        stale = client.allow_stale()
        assert [one.inventory.node_name async for one in stale.list_nodes()] == ["n1"]
        assert stale.staleness.age_s == 3.5
        journal.may_lead = True
        for read in reads:
            await read(client)
