"""Electors over the fake API server, in short times: who leads, who follows, and what a slow or lying network does."""

import asyncio
import contextlib
import logging

from tests.fakes.kubernetes import faults
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.waiting import wait_for

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.election import Elector, Timing
from eelgrid_controller.engines.kubernetes.api.port import LEASES

TIMING = Timing(lease_s=1.5, renew_s=1.0, retry_s=0.2)


class Race:
    """Candidates for one Lease of a fake."""

    def __init__(self, fake):
        self.fake = fake
        self.tasks = {}
        self.electors = {}
        self.terms = []  # (who, epoch) and (who, None), as they were told

    def enter(self, who, floor=0):
        elector = Elector(
            self.fake.client(),
            namespace="default",
            name="eelgrid",
            identity=who,
            clock=Clock(),
            log=logging.getLogger("eelgrid.test"),
            timing=TIMING,
            floor=floor,
        )
        elector.add_listener(lambda term: self._told(who, term))
        self.electors[who] = elector
        self.tasks[who] = asyncio.create_task(elector.run())

    def _told(self, who, term):
        epoch = term.epoch if term is not None else None
        if not self.terms or self.terms[-1] != (who, epoch):
            self.terms.append((who, epoch))

    def leaders(self):
        return [who for who, elector in self.electors.items() if elector.term() is not None]

    async def leader(self, *, other_than=""):
        async def look():
            found = self.leaders()
            assert len(found) <= 1
            return found if found and found[0] != other_than else None

        return (await wait_for(look))[0]

    async def end(self):
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@contextlib.asynccontextmanager
async def racing():
    async with FakeCluster() as fake:
        race = Race(fake)
        try:
            yield race
        finally:
            await race.end()


async def test_one_leads_and_says_so_in_the_lease():
    async with racing() as race:
        for who in "abc":
            race.enter(who)
        leader = await race.leader()
        found = await race.fake.client().get(LEASES, "eelgrid", namespace="default")
        assert found["spec"]["holderIdentity"] == leader
        assert found["spec"]["leaseTransitions"] == race.electors[leader].term().epoch == 1
        assert found["spec"]["leaseDurationSeconds"] == 2
        await wait_for(lambda: _renewed(race, found["spec"]["renewTime"]))


async def _renewed(race, before):
    found = await race.fake.client().get(LEASES, "eelgrid", namespace="default")
    return found["spec"]["renewTime"] > before and found["spec"]["acquireTime"] <= before


async def test_a_leader_that_stops_frees_the_lease():
    async with racing() as race:
        race.enter("a")
        await race.leader()
        race.electors["a"].stop()
        await asyncio.wait_for(race.tasks["a"], 5.0)
        found = await race.fake.client().get(LEASES, "eelgrid", namespace="default")
        assert "holderIdentity" not in found["spec"]
        race.enter("b")
        await race.leader()
        assert race.terms == [("a", 1), ("a", None), ("b", 2)]


async def test_a_leader_that_dies_is_followed_when_its_lease_is_over():
    async with racing() as race:
        race.enter("a")
        await race.leader()
        race.enter("b")
        race.tasks["a"].cancel()
        assert await race.leader(other_than="a") == "b"
        assert race.electors["b"].term().epoch == 2


async def test_answers_that_are_lost_unseat_nobody():
    async with racing() as race:
        race.enter("a")
        await race.leader()
        lost = race.fake.knobs.add("lose", times=2, verbs={"patch"}, part="leases")
        await wait_for(lambda: _met(lost))
        await asyncio.sleep(0.3)
        assert race.leaders() == ["a"]
        assert race.terms == [("a", 1)]


async def _met(trouble):
    return trouble.met == trouble.times


async def test_a_server_that_is_away_ends_the_term_and_a_new_one_has_a_new_epoch():
    async with racing() as race:
        race.enter("a")
        await race.leader()
        away = race.fake.knobs.add("refuse", part="leases", fault=faults.server_error)

        async def nobody():
            return not race.leaders()

        await wait_for(nobody)
        race.fake.knobs.end(away)
        await race.leader()
        assert race.terms == [("a", 1), ("a", None), ("a", 2)]


async def test_the_epoch_begins_above_its_floor():
    async with racing() as race:
        race.enter("a", floor=7)
        await race.leader()
        assert race.electors["a"].term().epoch == 8
