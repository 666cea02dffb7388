"""The loop: answers only what is on disk, shows nothing that is not, and comes back the same."""

import asyncio
import contextlib
import itertools
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.cluster import build_node, build_request
from tests.builders.server import LOG, MemoryJournal
from tests.state_invariants import check_invariants
from tests.waiting import wait_until

from eelgrid_controller.clock import Clock, RecentLatencies
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.errors import JournalCorrupt, JournalFull, JournalTooNew, JournalUnavailable
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.kernel_compilation import INTERPRETED_NODES_MOST, KernelReadiness
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, digest_of
from eelgrid_protos import catalogue
from eelgrid_protos.faults import Aborted, AlreadyExists, Internal, NotFound, NotLeader, ResourceExhausted, Unavailable
from eelgrid_protos.messages import NodeState, Policy, WorkloadPhase

FULL = JournalFull(Path("j"), "the disk is full", "free space in there")


@contextlib.asynccontextmanager
async def looping(
    journal, *, clock: Clock | None = None, kernels: KernelReadiness | None = None, stop: bool = True, **options
) -> AsyncIterator[ControllerLoop]:
    loop = ControllerLoop(
        journal=journal,
        fresh_state=ClusterState,
        make_core=lambda state: Core(state, catalogue.load_catalogue()),
        config=ControllerConfig(data=Path(), **options),
        clock=clock or Clock(),
        log=LOG,
        kernels=kernels,
    )
    await loop.start()
    try:
        yield loop
    finally:
        if stop:
            await loop.stop()
        else:
            for task in loop._tasks:
                task.cancel()


async def test_a_caller_is_answered_after_the_commit_and_readers_see_nothing_before() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        journal.gate = threading.Event()
        submission = asyncio.create_task(loop.submit(build_request("w1")))
        await wait_until(lambda: "w1" in loop.core.state.workloads)
        reading = asyncio.create_task(loop.read(lambda core: sorted(core.state.workloads)))
        await asyncio.sleep(0.05)
        assert not submission.done()
        assert not reading.done()
        journal.gate.set()
        assert (await submission).phase is WorkloadPhase.PLACED
        assert await reading == ["w1"]


async def test_commands_that_gather_during_a_commit_share_the_next() -> None:
    journal = MemoryJournal()
    async with looping(journal, batch_budget_s=10.0) as loop:
        await loop.register_node(build_node(gpus=8))
        journal.gate = threading.Event()
        submissions = [asyncio.create_task(loop.submit(build_request(f"w{i}", milli=100))) for i in range(20)]
        await asyncio.sleep(0.05)
        journal.gate.set()
        await asyncio.gather(*submissions)
        assert len(journal.commits) <= 3
        assert sum(journal.commits) == len(journal.entries)
        assert loop.decisions.count == 20


async def test_a_failed_commit_leaves_nothing_behind() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        await loop.submit(build_request("kept"))
        before = loop.core.state.digest()
        told = []
        loop.listeners.append(told.append)
        journal.fault = FULL
        with pytest.raises(ResourceExhausted, match="free space in there"):
            await loop.submit(build_request("lost"))
        assert await loop.read(lambda core: core.state.digest()) == before
        assert told == []
        # While the disk is full nothing more is tried; the core does not run ahead again.
        with pytest.raises(ResourceExhausted):
            await loop.cancel("kept")
        journal.fault = None
        loop._probe_at_s = 0.0
        assert (await loop.submit(build_request("lost"))).phase is WorkloadPhase.PLACED
        assert loop.journal_fault is None
        assert recover_state(journal, ClusterState).state.digest() == loop.core.state.digest()


async def test_a_full_disk_is_probed_once_a_second_at_most() -> None:
    now_s = 100.0
    journal = MemoryJournal()
    async with looping(journal, clock=Clock(monotonic_s=lambda: now_s)) as loop:
        journal.fault = FULL
        for _ in range(5):
            with pytest.raises(ResourceExhausted):
                await loop.register_node(build_node())
        assert journal.probes == 0
        now_s = 101.5
        for _ in range(5):
            with pytest.raises(ResourceExhausted):
                await loop.register_node(build_node())
        assert journal.probes == 1
        journal.fault = None
        now_s = 103.0
        await loop.register_node(build_node())


async def test_room_on_the_disk_is_noticed_though_nobody_asks_for_anything() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        journal.fault = FULL
        with pytest.raises(ResourceExhausted):
            await loop.register_node(build_node())
        assert loop.journal_fault is not None
        journal.fault = None
        async with asyncio.timeout(60.0):
            while loop.journal_fault is not None:  # noqa: ASYNC110  # the loop looks by itself, once a second
                await asyncio.sleep(0.02)


async def test_another_fault_of_the_disk_is_unavailable_and_passes() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        journal.fault = JournalUnavailable(Path("j"), "the disk refused", "check it")
        with pytest.raises(Unavailable):
            await loop.register_node(build_node())
        journal.fault = None
        loop._probe_at_s = 0.0
        await loop.register_node(build_node())


async def test_a_journal_that_cannot_be_read_back_ends_the_loop_with_its_error() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        journal.entries[0] = JournalEntry("node_joined", {"time_ns": 1})
        journal.fault = FULL
        waiting = asyncio.create_task(loop.submit(build_request("w")))
        error = await asyncio.wait_for(asyncio.shield(loop.failed), 5.0)
        assert isinstance(error, JournalCorrupt)
        assert error.seq == 1
        with pytest.raises(Unavailable):
            await loop.submit(build_request("w"))
        waiting.cancel()


async def test_callers_are_answered_when_a_commit_breaks_in_a_way_that_nobody_foresaw() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        journal.fault = RuntimeError("of a library")
        asked = [asyncio.create_task(loop.submit(build_request(f"w{number}"))) for number in range(3)]
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 5.0)
        # The first batch cannot know whether it is on disk; what came later was not tried.
        assert all(isinstance(one, Internal | Unavailable) for one in answers)
        assert isinstance(answers[0], Internal)
        assert isinstance(await asyncio.wait_for(asyncio.shield(loop.failed), 5.0), RuntimeError)
        with pytest.raises(Unavailable):
            await loop.submit(build_request("w"))


async def test_callers_are_answered_with_the_fault_when_the_journal_cannot_be_read_back_after_it() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        journal.entries[0] = JournalEntry("node_joined", {"time_ns": 1})
        journal.fault = FULL
        with pytest.raises(ResourceExhausted, match="the disk is full"):
            await asyncio.wait_for(loop.submit(build_request("w")), 5.0)
        assert isinstance(await asyncio.wait_for(asyncio.shield(loop.failed), 5.0), JournalCorrupt)


async def test_a_loop_that_broke_says_so_and_refuses(caplog) -> None:
    async with looping(MemoryJournal()) as loop:

        def fail(_) -> None:
            raise ZeroDivisionError

        loop.listeners.append(fail)
        await loop.register_node(build_node())
        assert isinstance(await asyncio.wait_for(asyncio.shield(loop.failed), 5.0), ZeroDivisionError)
        with pytest.raises(Unavailable):
            await loop.submit(build_request("w"))
    assert "loop=ended" in caplog.text


async def test_a_leader_whose_lease_has_lapsed_does_not_answer_that_there_is_none() -> None:
    """A refusal writes nothing, so no fence tells that another leads, which may have accepted the workload."""
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        journal.is_remote = True
        with pytest.raises(NotFound):
            await loop.cancel("w1")
        fault = JournalUnavailable(journal.path, "the lease could not be renewed", "wait")

        def check_files() -> None:
            raise fault

        journal.check_files = check_files  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="the lease could not be renewed"):
            await loop.cancel("w1")


async def test_a_broken_core_is_replaced_by_one_from_the_journal() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        before, digest = loop.core, loop.core.state.digest()
        with pytest.raises(Exception, match="the controller"):
            await loop.command(lambda core, now_ns: 1 // 0)
        assert loop.core is not before
        assert loop.core.state.digest() == digest
        await loop.submit(build_request("w1"))


async def test_faults_of_the_caller_change_nothing_and_stop_nobody() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        await loop.submit(build_request("w1"))
        entries = len(journal.entries)
        outcomes = await asyncio.gather(
            loop.submit(build_request("w1", name="other")),
            loop.cancel("nobody"),
            loop.update_policy(Policy(revision=77)),
            loop.submit(build_request("w2")),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes[:3]] == [AlreadyExists, NotFound, Aborted]
        assert outcomes[3].workload_id == "w2"
        assert len(journal.entries) == entries + 3  # prices quoted, submitted, placed


async def test_the_queue_is_bounded() -> None:
    journal = MemoryJournal()
    async with looping(journal, queue_most=3) as loop:
        journal.gate = threading.Event()
        first = asyncio.create_task(loop.register_node(build_node()))
        await wait_until(lambda: "n1" in loop.core.state.nodes)
        waiting = [asyncio.create_task(loop.submit(build_request(f"w{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match="3 commands wait"):
            await loop.submit(build_request("w9"))
        journal.gate.set()
        await asyncio.gather(first, *waiting)


async def test_a_caller_who_gave_up_before_the_decision_causes_none() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        journal.gate = threading.Event()
        first = asyncio.create_task(loop.register_node(build_node()))
        await wait_until(lambda: "n1" in loop.core.state.nodes)
        gone = asyncio.create_task(loop.submit(build_request("gone")))
        await asyncio.sleep(0.01)
        gone.cancel()
        journal.gate.set()
        await first
        await loop.submit(build_request("w1"))
        assert sorted(loop.core.state.workloads) == ["w1"]


async def test_replay_gives_the_same_state_with_and_without_checkpoints(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, new_cluster_id="c")
    async with looping(journal, checkpoint_events=1, checkpoint_events_most=7) as loop:
        for name in ("a", "b"):
            await loop.register_node(build_node(name, gpus=2))
        for number in range(8):
            await loop.submit(build_request(f"w{number}"))
        await loop.cancel("w0")
        await loop.mark_gpu_lost("a", "GPU-a-0")
        await loop.update_policy(Policy(lease_s=30.0))
        digest, revision = loop.core.state.digest(), loop.core.state.revision
    assert journal.counters.checkpoints >= 2
    journal.close()
    journal = open_journal(tmp_path, new_cluster_id="c")
    with_checkpoint = recover_state(journal, ClusterState)
    assert (with_checkpoint.checkpoint_seq, with_checkpoint.replayed) == (revision, 0)
    assert with_checkpoint.state.digest() == digest
    check_invariants(with_checkpoint.state)
    journal._connection.execute("DELETE FROM checkpoints")
    without = recover_state(journal, ClusterState)
    assert (without.checkpoint_seq, without.replayed, without.state.digest()) == (0, revision, digest)
    journal.close()


async def test_a_checkpoint_waits_for_a_quiet_moment() -> None:
    journal = MemoryJournal()
    now_s = 0.0
    clock = Clock(monotonic_s=lambda: now_s)
    async with looping(journal, clock=clock, checkpoint_events=1, checkpoint_idle_s=2.0, stop=False) as loop:
        await loop.register_node(build_node())
        await asyncio.sleep(0.4)
        assert journal.checkpoints == []
        now_s = 2.5
        await wait_until(lambda: len(journal.checkpoints) == 1)
        assert journal.checkpoints[0].state == loop.core.state.dump()


async def test_calls_are_answered_while_a_checkpoint_is_made_and_a_crash_leaves_the_one_before(tmp_path: Path) -> None:
    folder, ticks = tmp_path / "journal", itertools.count()
    journal = open_journal(folder, new_cluster_id="c")
    # By this clock each part of a checkpoint takes longer than a step may.
    clock = Clock(perf_s=lambda: float(next(ticks)))
    crashes = list[tuple[Path, int, str]]()
    async with looping(journal, clock=clock, checkpoint_events=60, checkpoint_events_most=60, stop=False) as loop:

        async def submit_until(is_over) -> None:
            while not is_over():
                number = len(loop.core.state.workloads)
                await loop.submit(build_request(f"w{number}", milli=10))
                if number % 3 == 0:
                    await loop.cancel(f"w{number}")

        for number in range(40):
            await loop.register_node(build_node(f"n{number}", gpus=2))
        await submit_until(lambda: journal.counters.checkpoints == 1)
        first = journal.newest_checkpoint()
        await submit_until(lambda: loop._checkpoints.is_under_way)
        began, steps = loop.core.state.revision, 0
        while loop._checkpoints.is_under_way:
            crash = tmp_path / f"crash-{steps}"
            shutil.copytree(folder, crash)
            crashes.append((crash, loop.core.state.revision, loop.core.state.digest()))
            await loop.submit(build_request(f"during-{steps}", milli=10))
            steps += 1
        second = journal.newest_checkpoint()
        assert first.seq < second.seq <= began + 2 < loop.core.state.revision - steps
        assert digest_of(second.state) == second.digest
        crashes.append((folder, loop.core.state.revision, loop.core.state.digest()))
    assert steps >= 5
    journal.close()
    for crash, revision, digest in crashes:
        after = open_journal(crash, new_cluster_id="c")
        recovered = recover_state(after, ClusterState)
        assert recovered.checkpoint_seq == (second.seq if crash == folder else first.seq)
        assert (recovered.state.revision, recovered.state.digest()) == (revision, digest)
        after.close()


async def test_a_checkpoint_that_fails_is_no_failure_of_the_controller() -> None:
    journal = MemoryJournal()
    async with looping(journal, checkpoint_events=1, checkpoint_events_most=1) as loop:
        journal.checkpoint_fault = FULL
        await loop.register_node(build_node())
        await loop.submit(build_request("w1"))
        assert journal.checkpoints == []
    assert len(journal.entries) == 4  # joined, prices quoted, submitted, placed


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (JournalEntry("from_the_future", {}), JournalTooNew),
        (JournalEntry("node_lost", {"time_ns": 1, "node_name": "nobody"}), JournalCorrupt),
        (JournalEntry("node_lost", {"time_ns": "noon"}), JournalCorrupt),
    ],
)
def test_entries_that_cannot_be_are_named(entry: JournalEntry, error: type[Exception]) -> None:
    journal = MemoryJournal()
    journal.entries.append(entry)
    with pytest.raises(error, match="entry 1"):
        recover_state(journal, ClusterState)


def test_a_checkpoint_that_gives_back_another_state_is_refused() -> None:
    journal = MemoryJournal()
    journal.checkpoints.append(Checkpoint(0, ClusterState().dump(), "another digest"))
    with pytest.raises(JournalCorrupt, match="does not give back the state"):
        recover_state(journal, ClusterState)


async def test_nodes_are_lost_when_no_agent_comes_after_a_restart() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node("a"))
        await loop.register_node(build_node("b"))
    async with looping(journal, restart_grace_s=0.3) as loop:
        assert [node.state for node in loop.core.state.nodes.values()] == [NodeState.READY] * 2
        loop.presence.mark_connected("a")
        await wait_until(lambda: loop.core.state.nodes["b"].state is NodeState.LOST)
        assert loop.core.state.nodes["a"].state is NodeState.READY
        assert (await loop.submit(build_request("w1"))).placements[0].node_name == "a"


async def test_a_loss_that_cannot_be_written_is_tried_again() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        journal.fault = FULL
        loop.presence.mark_disconnected("n1", deadline_s=0.0)
        await wait_until(lambda: loop.journal_fault is not None)
        # What was applied is thrown away a moment after the fault is known; readers wait for that.
        assert await loop.read(lambda core: core.state.nodes["n1"].state) is NodeState.READY
        journal.fault = None
        await wait_until(lambda: loop.core.state.nodes["n1"].state is NodeState.LOST)


async def test_a_stop_finishes_what_was_queued_and_refuses_the_rest() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        submissions = [asyncio.create_task(loop.submit(build_request(f"w{i}"))) for i in range(5)]
        await asyncio.sleep(0)
        await loop.stop()
        assert all(workload.workload_id for workload in await asyncio.gather(*submissions))
        with pytest.raises(Unavailable):
            await loop.submit(build_request("late"))
        assert journal.checkpoints[-1].seq == len(journal.entries)


async def test_a_clock_that_was_ahead_for_a_moment_leaves_no_later_time_there() -> None:
    decade = 3_650 * 86_400 * 10**9
    times = iter([5_000, 3_000, 3_000 + decade, 3_001, 9_000, 1])
    journal = MemoryJournal()
    async with looping(journal, clock=Clock(now_ns=lambda: next(times))) as loop:
        await loop.register_node(build_node())
        submitted = [(await loop.submit(build_request(f"w{i}"))).submitted_ns for i in range(4)]
        assert submitted == [3_000, 3_000 + decade, 3_001, 9_000]
        # What came first is told by revisions.
        revisions = [loop.core.state.workloads[f"w{i}"].revision for i in range(4)]
        assert revisions == sorted(revisions)
    async with looping(journal, clock=Clock(now_ns=lambda: 10_000)) as again:
        assert (await again.submit(build_request("later"))).submitted_ns == 10_000


def test_quantiles_are_of_the_last_durations() -> None:
    latencies = RecentLatencies(100)
    assert latencies.quantile(0.99) == 0.0
    for value in [1000.0] * 50 + [float(i) for i in range(1, 101)]:
        latencies.add(value)
    assert (latencies.quantile(0.5), latencies.quantile(0.99), latencies.quantile(1.0)) == (50.0, 99.0, 100.0)
    assert latencies.count == 150


async def test_work_of_an_engine_is_one_commit_and_what_is_refused_stands_in_its_place() -> None:
    journal = MemoryJournal()
    async with looping(journal) as loop:
        await loop.register_node(build_node())
        commits = list[int]()
        loop.listeners.append(lambda committed: commits.append(len(committed.events)))
        await loop.submit(build_request("w1"))
        one, refused, two = await loop.submit_all(
            [
                build_request("w2"),
                replace(build_request("w1"), spec=build_request("w1", gpus=2).spec),
                build_request("w3"),
            ]
        )
        assert isinstance(refused, AlreadyExists)
        assert [found.workload_id for found in (one, two)] == ["w2", "w3"]
        assert len(commits) == 2


async def grow_beyond_interpretation(loop, kernels):
    """A cluster with one node more than interpreted kernels decide for, and a submission that waits."""
    kernels.begin_interpreting()
    for number in range(INTERPRETED_NODES_MOST + 1):
        await loop.register_node(build_node(f"n{number}"))
    waiting = asyncio.create_task(loop.submit(build_request("w1")))
    await wait_until(lambda: loop.queued == 1)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    return waiting


async def test_commands_wait_for_machine_code_in_a_cluster_too_large_for_interpreted_kernels() -> None:
    kernels = KernelReadiness()
    async with looping(MemoryJournal(), kernels=kernels) as loop:
        waiting = await grow_beyond_interpretation(loop, kernels)
        assert await loop.read(lambda core: len(core.state.nodes)) == INTERPRETED_NODES_MOST + 1, "reads are answered"
        kernels.end_interpreting()
        assert (await waiting).phase is WorkloadPhase.PLACED


async def test_a_stop_refuses_commands_that_wait_for_machine_code() -> None:
    journal, kernels = MemoryJournal(), KernelReadiness()
    async with looping(journal, kernels=kernels) as loop:
        waiting = await grow_beyond_interpretation(loop, kernels)
        await loop.stop()
        with pytest.raises(NotLeader, match="stopping"):
            await waiting
        assert "w1" not in loop.core.state.workloads
