"""Two controllers over one store, and agents whose streams end at ingest processes that follow whichever leads.

Owns how the two simulations are put together, and the faults that need both: a leader that is stopped while frames are
under way to it, together with an ingest process or alone, and a machine that is suspended with its clock. Every invariant
of both holds; that no agent obeys an earlier leader (11) is asked of who sent a plan, whoever handed it on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tests.sim.agent import Agent
from tests.sim.clock import seconds
from tests.sim.ingest import IngestAgent, IngestFaults, IngestProcess, serve_links
from tests.sim.pair_world import PairFaults, PairParts, PairWorld, play

__all__ = ["PairIngestFaults", "PairIngestParts", "PairIngestWorld", "run_pair_ingest"]

# Of agents that call the controllers themselves.
_DIRECT_P = 0.2


class PairIngestFaults(IngestFaults, PairFaults):
    """What goes wrong between leaders and ingest processes, besides what does with either."""

    # Of worlds where little happens but that agents' streams lose their leader, so that most go over to the next one.
    changing_p = 0.5
    # Of leaders that die, where links to them could break.
    kill_p = 0.4

    def begin(self) -> None:
        """See `Faults`."""
        if self.suspend.__name__ not in {kind.__name__ for _, kind in self._kinds}:
            self._kinds += (
                (6, self.suspend),
                (8, self.pause_at_frame),
                (6, self.pause_both),
                (4, self.promote_unseen),
                (10, self.lose_at_stream),
            )
            if self._rng.random() < self.changing_p:
                self._kinds = (
                    (20, self.lose_at_stream),
                    (4, self.pause),
                    (2, self.suspend),
                    (2, self.crash_ingest),
                    (1, self.promote_unseen),
                )
        super().begin()

    def pause_at_frame(self) -> None:
        """The leader is stopped while an ingest process holds frames that it has not acknowledged."""
        self._timeline.note("fault: pause_at_frame")
        self._watch_for_frame(400)

    def _watch_for_frame(self, looks: int) -> None:
        seat = self._pair.leader
        if self._is_over:
            return
        if seat is not None and any(ingest.holds_frames for ingest in self.ingests):
            self._pause(seat)
        elif looks:
            self._timeline.after(seconds(0.01), lambda: self._watch_for_frame(looks - 1))

    def lose_at_stream(self) -> None:
        """Agents' streams lose their leader, often with frames under way to it: it dies, or the links to it break."""
        self._timeline.note("fault: lose_at_stream")
        self._watch_for_stream(1000, with_frames=self._rng.random() < 0.7)

    def _watch_for_stream(self, looks: int, *, with_frames: bool) -> None:
        if self._is_over:
            return
        if any(ingest.holds_streams and (ingest.holds_frames or not with_frames) for ingest in self.ingests):
            if self._rng.random() < self.kill_p:
                self.kill_leader()
            else:
                for ingest in self.ingests:
                    self._network.snap(ingest.name, "connection reset")
        elif looks:
            again = partial(self._watch_for_stream, looks - 1, with_frames=with_frames)
            self._timeline.after(seconds(0.01), again)

    def pause_both(self) -> None:
        """The leader and an ingest process are stopped at once; each goes on by itself."""
        self.pause_ingest()
        if (seat := self._pair.leader) is not None:
            self._pause(seat)

    def promote_unseen(self) -> None:
        """A standby is promoted while a stopped leader and links to it know nothing of that."""
        if (seat := self._pair.leader) is not None:
            self._pause(seat, suspends_machine=self._rng.random() < 0.5)
        self.promote()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairIngestParts(PairParts):
    """See `PairParts`."""

    faults: type[PairFaults] = PairIngestFaults
    ingest: type[IngestProcess] = IngestProcess


class PairIngestWorld(PairWorld):
    """See the module."""

    faults: PairIngestFaults

    def __init__(self, seed: int, *, ingests: int, parts: PairIngestParts = PairIngestParts()) -> None:
        self._names: Sequence[str] = [f"ingest-{number}" for number in range(ingests)]
        super().__init__(seed, parts=parts)
        controllers = tuple(seat.address for seat in self.pair.seats)
        self.ingests = [
            parts.ingest(self.timeline, self.network, number, controllers=controllers) for number in range(ingests)
        ]
        for seat in self.pair.seats:
            serve_links(seat)
        self.faults.ingests = self.ingests

    def _agent_type(self, parts: PairParts) -> type[Agent]:
        if self.timeline.chance(_DIRECT_P):
            return parts.agent
        return type("_Agent", (IngestAgent, parts.agent), {"ingests": self._names})

    def begin(self) -> None:
        """See `PairWorld`."""
        for ingest in self.ingests:
            self.timeline.after(self.timeline.draw_ns(seconds(3)), ingest.start)
        super().begin()

    def heal(self) -> None:
        """See `PairWorld`."""
        super().heal()
        if self.is_harsh:
            # What was lost without a broken stream cannot be known to be lost.
            for ingest in self.ingests:
                self.network.snap(ingest.name, "connection reset")


def run_pair_ingest(
    seed: int, steps: int, *, ingests: int = 2, parts: PairIngestParts = PairIngestParts(), heals: bool = True
) -> PairIngestWorld:
    """A whole run, or without `heals` the first part alone; raises Failure."""
    world = PairIngestWorld(seed, ingests=ingests, parts=parts)
    play(world, seed, steps, heals=heals, flags=f" --ingest {ingests}")
    return world
