"""Two controllers over one store as a test: many seeds, determinism, and faulty parts that an invariant has to notice."""

import os

import pytest

from tests.sim.pair import LeaderLife
from tests.sim.pair_world import PairParts, PairWorld, run_pair
from tests.sim.store import Store, TermJournal
from tests.sim.world import Failure

SEEDS = int(os.environ.get("EELGRID_SIM_SEEDS", "8"))
STEPS = 1500
# A faulty part is given this many seeds to show itself.
PLANT_SEEDS = range(1000, 1080)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_invariant_holds_with_two_controllers(seed):
    run_pair(seed, STEPS)


# A leader that a promoted standby has taken entries from welcomed an agent in the two seconds before it noticed.
# A standby was promoted that has another last entry, and as many: the leader went on for two seconds.
# A leader that another followed took the news that a lease had run out, and nobody sent the plan again.
# A leader that was stopped within a write took an entry of the same epoch, counted again after a promotion, for its own.
# A promoted standby showed a lease that nobody had had yet: another led at once, while the former still answered.
@pytest.mark.parametrize(
    ("seed", "steps"), [(4, 2500), (1054, 1500), (1015, 1500), (2020, 1500), (42816, 600), (44229, 600)]
)
def test_what_once_failed_holds(seed, steps):
    run_pair(seed, steps)


def test_the_world_is_busy():
    worlds = [run_pair(seed, 2000) for seed in (50, 106, 108, 111)]
    faults = {name for world in worlds for name, count in world.faults.counts.items() if count}
    assert len(faults) >= 12
    assert sum(seat.terms for world in worlds for seat in world.pair.seats) >= 16
    assert sum(world.store.content.timeline - 1 for world in worlds) >= 4
    assert sum(len(world.ledger.accepted) for world in worlds) >= 60
    # Writes whose answer was lost, and which their leader removed again.
    assert sum(world.ledger.undone for world in worlds) >= 1
    assert sum(world.ledger.rollbacks for world in worlds) >= 1


def _trace(seed):
    world = PairWorld(seed)
    world.begin()
    for _ in range(600):
        world.step()
    return world.timeline.trace


def test_the_same_seed_gives_the_same_trace():
    assert _trace(7) == _trace(7)
    assert _trace(7) != _trace(8)


class UnfencedStore(Store):
    """Lets anybody write, whoever leads."""

    def is_fenced(self, term):
        return False

    def renew(self, term):
        return True


class _HopefulJournal(TermJournal):
    def _was_committed(self, rows):
        """Takes a write whose answer was lost for one that was done."""
        return True


class HopefulLife(LeaderLife):
    """Acknowledges what it does not know to be on disk."""

    def __init__(self, seat, journal):
        journal.__class__ = _HopefulJournal
        super().__init__(seat, journal)


class _TidyJournal(TermJournal):
    def begin(self):
        """Leaves there what failed for its caller."""
        self._is_unsettled = False
        return super().begin()


class UntidyLife(LeaderLife):
    """Does not remove what it refused and the store has."""

    def __init__(self, seat, journal):
        journal.__class__ = _TidyJournal
        super().__init__(seat, journal)


class HastyLife(LeaderLife):
    """Answers before the write is done."""

    def _begun(self, batch):
        for command in batch:
            if command.fault is None:
                command.answer(command.outcome.result, None)


PLANTS = {
    "a store that fences nobody": PairParts(store=UnfencedStore),
    "a leader that takes what it does not know for done": PairParts(life=HopefulLife),
    "a leader that leaves what it has refused": PairParts(life=UntidyLife),
    "a leader that answers before it has written": PairParts(life=HastyLife),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name):
    for seed in PLANT_SEEDS:
        try:
            run_pair(seed, STEPS, parts=PLANTS[name])
        except Failure as failure:
            print(f"{name}: seed {seed}, {str(failure).splitlines()[-2][:160]}")
            return
    pytest.fail("no seed found it")
