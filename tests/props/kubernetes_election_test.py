"""Never two leaders: elections among clocks that run apart, over answers that come late or never.

The world is a Lease with versions, and candidates whose clocks differ in offset and in rate,
who are paused at times. Time is the world's; a candidate sees its own clock alone.
"""

import heapq
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.engines.kubernetes.api import election
from eelgrid_controller.engines.kubernetes.api.election import Election, LeaseRecord, Timing, step_election

TIMING = Timing()


class World:
    """One Lease and its candidates."""

    def __init__(self, seed, *, candidates, rates, trouble, late_s):
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.queue = []
        self.count = itertools.count()
        self.lease = None
        self.version = 0
        self.trouble = trouble  # the share of requests that are lost, or late, or whose answers are
        self.late_s = late_s
        self.terms = []  # (epoch, who), as they began
        self.continued = 0  # of these
        self.leading = set()
        self.led = []  # (from, who) of whoever led when
        self.down = set()
        self.woken = {}  # the wake of each that stands
        self.paused_until_s = {}
        self.clocks = {}
        self.states = {}
        self.asked = {}
        for who, rate in zip([f"c{index}" for index in range(candidates)], rates, strict=True):
            self.clocks[who] = (self.random.uniform(-1e5, 1e5), rate)
            self.states[who] = Election(identity=who, timing=TIMING, next_s=self.local_s(who))
            self.at(self.random.uniform(0.0, 3.0), self.wake, who)

    def local_s(self, who):
        offset_s, rate = self.clocks[who]
        return offset_s + rate * self.now_s

    def at(self, delay_s, what, *args):
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.count), what, args))

    def run(self, until_s):
        while self.queue and self.queue[0][0] <= until_s:
            self.now_s, _, what, args = heapq.heappop(self.queue)
            what(*args)
            self.check()
        self.now_s = until_s
        self.check()

    def leaders(self):
        return [
            who
            for who, state in self.states.items()
            if who not in self.down and state.is_leading and self.local_s(who) < state.until_s
        ]

    def check(self):
        leaders = self.leaders()
        assert len(leaders) <= 1, (self.now_s, leaders)
        if leaders and (not self.led or self.led[-1][1] != leaders[0]):
            self.led.append((self.now_s, leaders[0]))

    def wake(self, who, number=0):
        if number == self.woken.get(who, 0):
            self.take(who, election.ElectionTick())

    def take(self, who, event):
        if who in self.down:
            return
        if (until_s := self.paused_until_s.get(who, 0.0)) > self.now_s:
            self.at(until_s - self.now_s, self.take, who, event)
            return
        self.states[who], told = step_election(self.states[who], event, self.local_s(who))
        for one in told:
            match one:
                case election.StartLeading(epoch, _, is_continued):
                    if who not in self.leading:
                        assert not is_continued or self.terms[-1][1] == who, "another led in between"
                        self.continued += is_continued
                        self.terms.append((epoch, who))
                    self.leading.add(who)
                case election.StopLeading():
                    self.leading.discard(who)
                case election.ReadLease() | election.WriteLease():
                    self.ask(who, one)
        rate = self.clocks[who][1]
        wait_s = (self.states[who].wake_s - self.local_s(who)) / rate
        if wait_s < 1e6:
            self.woken[who] = next(self.count)
            self.at(max(0.001, wait_s), self.wake, who, self.woken[who])

    def ask(self, who, asked):
        number = next(self.count)
        self.asked[who] = number
        sent_s = self.local_s(who)
        self.at(TIMING.request_s / self.clocks[who][1], self.answer, who, number, election.LeaseRequestFailed())
        way_s = self.random.uniform(0.0, 0.2)
        if self.random.random() < self.trouble:
            way_s = self.random.uniform(0.0, self.late_s)
            if self.random.random() < 0.3:
                return
        self.at(way_s, self.arrive, who, number, asked, sent_s)

    def arrive(self, who, number, asked, sent_s):
        """The request is at the server, however late."""
        if isinstance(asked, election.ReadLease):
            event = election.LeaseAnswered(sent_s, self.lease, is_written=False)
        elif (self.lease.version if self.lease else "") != asked.against:
            event = (
                election.LeaseAnswered(sent_s, None, is_written=False)
                if self.lease is None
                else election.LeaseConflict()
            )
        else:
            self.version += 1
            self.lease = asked.record._replace(version=str(self.version))
            event = election.LeaseAnswered(sent_s, self.lease, is_written=True)
        back_s = self.random.uniform(0.0, 0.2)
        if self.random.random() < self.trouble:
            if self.random.random() < 0.3:
                return
            back_s = self.random.uniform(0.0, self.late_s)
        self.at(back_s, self.answer, who, number, event)

    def answer(self, who, number, event):
        if self.asked.get(who) == number:
            if (until_s := self.paused_until_s.get(who, 0.0)) > self.now_s:
                self.at(until_s - self.now_s, self.answer, who, number, event)
                return
            del self.asked[who]
            self.take(who, event)

    def pause(self, who, for_s):
        self.paused_until_s[who] = self.now_s + for_s

    def deleted(self):
        """Somebody deletes the Lease."""
        self.lease = None


RATES = st.lists(st.floats(0.9, 1.1), min_size=3, max_size=3)


@given(
    st.integers(0, 2**32),
    RATES,
    st.floats(0.0, 0.9),
    st.lists(
        st.tuples(
            st.floats(1.0, 200.0), st.sampled_from(["pause", "stop", "crash"]), st.integers(0, 2), st.floats(0.5, 40.0)
        ),
        max_size=6,
    ),
)
@settings(max_examples=60, deadline=None)
def test_there_are_never_two_leaders_and_no_epoch_twice(seed, rates, trouble, events):
    world = World(seed, candidates=3, rates=rates, trouble=trouble, late_s=30.0)
    for at_s, what, index, for_s in events:
        who = f"c{index}"
        if what == "pause":
            world.at(at_s, world.pause, who, for_s)
        elif what == "stop":
            world.at(at_s, world.take, who, election.StopElection())
        else:
            world.at(at_s, world.down.add, who)
    world.run(240.0)
    epochs = [epoch for epoch, _ in world.terms]
    assert epochs == sorted(set(epochs))


@given(st.integers(0, 2**32), RATES, st.floats(5.0, 60.0))
@settings(max_examples=40, deadline=None)
def test_a_crashed_leader_is_followed_within_two_leases(seed, rates, crash_s):
    world = World(seed, candidates=3, rates=rates, trouble=0.0, late_s=0.0)
    world.run(crash_s)
    (old,) = world.leaders()
    world.down.add(old)
    began = len(world.led)
    world.run(crash_s + 2.0 * TIMING.lease_s)
    assert len(world.led) > began
    assert world.leaders()
    assert world.led[began][1] != old


@given(st.integers(0, 2**32), RATES, st.floats(5.0, 60.0))
@settings(max_examples=40, deadline=None)
def test_a_leader_that_stops_is_followed_at_once(seed, rates, stop_s):
    world = World(seed, candidates=3, rates=rates, trouble=0.0, late_s=0.0)
    world.run(stop_s)
    (old,) = world.leaders()
    world.take(old, election.StopElection())
    began = len(world.led)
    world.run(stop_s + 2.0 * TIMING.retry_s)
    assert len(world.led) > began
    assert world.states[old].is_over


@given(st.integers(0, 2**32), RATES, st.floats(5.0, 60.0))
@settings(max_examples=40, deadline=None)
def test_a_lease_that_is_deleted_makes_no_second_leader(seed, rates, gone_s):
    world = World(seed, candidates=3, rates=rates, trouble=0.0, late_s=0.0)
    world.run(gone_s)
    world.deleted()
    world.run(gone_s + 2.0 * TIMING.lease_s)
    assert world.leaders()
    epochs = [epoch for epoch, _ in world.terms]
    assert epochs == sorted(set(epochs))


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_healthy_leader_stays(seed):
    world = World(seed, candidates=3, rates=[0.95, 1.0, 1.05], trouble=0.0, late_s=0.0)
    world.run(300.0)
    assert len(world.terms) == 1


@given(st.integers(0, 2**32), st.floats(10.0, 20.0))
@settings(max_examples=20, deadline=None)
def test_one_answer_that_is_lost_unseats_nobody(seed, lost_s):
    """The write arrived, its answer did not: the leader reads, finds its own, and goes on."""
    world = World(seed, candidates=3, rates=[0.95, 1.0, 1.05], trouble=0.0, late_s=0.0)
    world.run(lost_s)
    world.asked.clear()
    for who, state in list(world.states.items()):
        if state.asked is not None:
            world.at(TIMING.request_s, world.take, who, election.LeaseRequestFailed())
    world.run(lost_s + 60.0)
    assert len(world.terms) == 1


def test_the_floor_is_below_every_epoch():
    state = Election(identity="a", timing=TIMING, floor=41)
    state, (read,) = step_election(state, election.ElectionTick(), 0.0)
    assert read == election.ReadLease()
    state, (write,) = step_election(state, election.LeaseAnswered(0.0, None, is_written=False), 0.1)
    assert write == election.WriteLease(LeaseRecord("a", 42, ""), "", is_new_term=True)
    state, told = step_election(state, election.LeaseAnswered(0.1, LeaseRecord("a", 42, "7"), is_written=True), 0.2)
    assert told == (election.StartLeading(42, 0.1 + TIMING.renew_s),)


def test_a_term_continues_the_candidates_last_one_unless_the_lease_was_anybody_elses_since():
    alone = World(3, candidates=1, rates=[1.0], trouble=0.5, late_s=30.0)
    alone.run(2000.0)
    assert len(alone.terms) > 3
    assert alone.continued == len(alone.terms) - 1
    beside = World(3, candidates=3, rates=[0.97, 1.0, 1.03], trouble=0.5, late_s=30.0)
    beside.run(2000.0)
    changes = sum(one[1] != other[1] for one, other in itertools.pairwise(beside.terms))
    assert 0 < changes <= len(beside.terms) - 1 - beside.continued
