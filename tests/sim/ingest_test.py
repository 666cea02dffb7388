"""Agents behind two ingest processes in the simulation: the same invariants, and proof that they can fail."""

import os

import pytest

from eelgrid_controller.server.ingest.frames import FrameBuilder, _BlockBuilder
from eelgrid_protos.messages import SampleBatch
from tests.sim.ingest import IngestProcess, _AgentEnd
from tests.sim.world import Failure, Parts, World, run

SEEDS = int(os.environ.get("EELGRID_SIM_SEEDS", "10"))
STEPS = 600
PLANT_SEEDS = range(1000, 1040)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_invariant_holds_behind_ingest_processes(seed):
    run(seed, STEPS, ingests=2)


def test_the_world_is_busy():
    """Seeds that pass because nothing goes through an ingest process would pass for ever."""
    worlds = [run(seed, STEPS, ingests=2) for seed in range(206, 212)]
    faults = {name for world in worlds for name, count in world.faults.counts.items() if count}
    assert {"crash_ingest", "break_link", "partition_link"} <= faults
    assert sum(ingest.links for world in worlds for ingest in world.ingests) > 2 * len(worlds)
    # All agents but rogues are behind one.
    assert sum(world.ledger.ticks.received for world in worlds) >= 100
    assert sum(len(world.ledger.placed) for world in worlds) >= 5


def test_the_same_seed_gives_the_same_trace():
    def trace():
        world = World(7, ingests=2)
        world.begin()
        for _ in range(STEPS):
            world.step()
        return world.timeline.trace

    assert trace() == trace()


class _UnorderedBuilder(FrameBuilder):
    """Keeps one block for each kind of batch, whatever came between: how ticks were lost once."""

    def _choose_block(self, stream: int, key: object) -> _BlockBuilder:
        self._last.pop(stream, None)
        return super()._choose_block(stream, key)  # type: ignore[arg-type]


class UnorderedIngest(IngestProcess):
    """Lets a batch overtake another of its agent."""

    builder_type = _UnorderedBuilder


class HastyIngest(IngestProcess):
    """Acknowledges what it has itself."""

    def add_batch(self, stream: _AgentEnd, batch: SampleBatch) -> None:
        super().add_batch(stream, batch)
        stream.on_batch(batch.sequence, 1)


class ForgetfulIngest(IngestProcess):
    """Loses a frame now and then, and says that the controller has it."""

    def cut_frame(self) -> None:
        if self._frames % 5 == 4:
            self._frames += 1
            self._builder, builder = self.builder_type(has_every_tick=True), self._builder
            for number, sequences in builder.sequences.items():
                for sequence in sequences:
                    if (stream := self._streams.get(number)) is not None:
                        stream.on_batch(sequence, 1)
        else:
            super().cut_frame()


@pytest.mark.parametrize(("ingest", "first"), [(UnorderedIngest, 1000), (HastyIngest, 1000), (ForgetfulIngest, 1000)])
def test_a_planted_fault_is_found(ingest, first):
    found = []
    for seed in sorted(PLANT_SEEDS, key=lambda seed: seed != first):
        try:
            run(seed, STEPS, parts=Parts(ingest=ingest), ingests=2)
        except Failure as failure:
            found.append((failure.invariant, str(failure)))
            if failure.invariant == 5:
                break
    else:
        pytest.fail(f"no seed found it; what broke: {found}")
    assert f"again: python -m tests.sim --seeds {seed}:{seed + 1} --steps {STEPS} --ingest 2" in found[-1][1]
