"""The spool as a state machine against a controller that keeps what arrives.

Nothing that arrived is missing and nothing is lost without being counted: at
the end, the ticks that the controller holds and the ticks reported as dropped
are all the ticks there were.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.builders.agent import build_tick

from eelgrid_agent.node.spool import Acknowledged, Spool


class Controller(RuleBasedStateMachine):
    """Sends over a link that may break, duplicate acknowledgements or lose the newest batches."""

    @initialize(window=st.integers(1, 4), ticks_most=st.integers(1, 8))
    def begin(self, window, ticks_most):
        self.window, self.ticks_most = window, ticks_most
        self.spool = Spool(window=window, ticks_most=ticks_most)
        self.clock = 0
        self.generation = 1
        self.in_transit = []
        self.held = {}
        self.highest = 0

    @rule(count=st.integers(1, 5), step_back=st.booleans())
    def sample(self, count, step_back):
        for index in range(count):
            self.clock += 1
            self.spool.add(
                build_tick(self.clock, generation=self.generation, gpus=0, opens_batch=step_back and index == 0)
            )

    @rule()
    def change_inventory(self):
        self.generation += 1

    @rule()
    def send(self):
        while (batch := self.spool.next_batch()) is not None:
            self.in_transit.append(batch)

    @rule(count=st.integers(1, 6))
    def arrive(self, count):
        for batch in self.in_transit[:count]:
            before = self.held.setdefault(batch.sequence, batch)
            assert before == batch, "a resent batch is the same batch"
            assert batch.sequence <= self.highest + 1, "no batch is skipped"
            self.highest = max(self.highest, batch.sequence)
        del self.in_transit[:count]

    @rule(back=st.integers(0, 3))
    def acknowledge(self, back):
        assert self.spool.acknowledge(max(0, self.highest - back)) is not Acknowledged.FUTURE

    @rule(beyond=st.integers(1, 100))
    def claim_the_future(self, beyond):
        before = self.spool.unacknowledged_ticks
        newest = max([self.highest, *(batch.sequence for batch in self.in_transit)])
        if self.spool.acknowledge(newest + self.window + beyond) is not Acknowledged.FUTURE:
            raise AssertionError("what was never sent cannot be acknowledged")
        assert self.spool.unacknowledged_ticks == before

    @rule()
    def reconnect(self):
        self.in_transit.clear()
        assert self.spool.resume(self.highest) is not Acknowledged.FUTURE

    @rule(window=st.integers(1, 4))
    def change_window(self, window):
        self.window = max(self.window, window)
        self.spool.set_window(window)

    @invariant()
    def bounded(self):
        if hasattr(self, "spool"):
            assert self.spool.waiting_ticks <= self.ticks_most
            assert self.spool.in_flight <= self.window

    @invariant()
    def sequences_are_contiguous_and_order_is_kept(self):
        if hasattr(self, "held"):
            assert sorted(self.held) == list(range(1, self.highest + 1))
            times = [time for sequence in sorted(self.held) for time in self.held[sequence].time_ns]
            assert times == sorted(set(times))
            assert all(not list(batch.violations()) for batch in self.held.values())

    def teardown(self):
        if not hasattr(self, "spool"):
            return
        self.reconnect()
        while self.spool.unacknowledged_ticks:
            self.send()
            self.arrive(len(self.in_transit))
            self.acknowledge(0)
        arrived = sum(len(batch.time_ns) for batch in self.held.values())
        reported = sum(batch.dropped_ticks for batch in self.held.values())
        assert arrived + reported == self.clock
        assert reported == self.spool.dropped_total


SpoolTest = Controller.TestCase
SpoolTest.settings = settings(max_examples=60, stateful_step_count=40)
