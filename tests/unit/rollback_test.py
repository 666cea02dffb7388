"""A journal that lost entries: what agents hold shows it, nothing is given twice, and an operator decides."""

import contextlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.cluster import build_batch, build_core, build_node, build_request, drop_quotes
from tests.builders.server import AgentStream, MemoryJournal, run_controller
from tests.waiting import wait_until

from eelgrid_controller.cli import doctor_cluster
from eelgrid_controller.core.nodes import PlanClaim, WithdrawnPlans
from eelgrid_controller.core.recovery import recover_state
from eelgrid_controller.errors import JournalLost, LostEntries
from eelgrid_controller.runtime.sqlite_journal import FILE_NAME, open_journal
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    NodeJoined,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.journal import Checkpoint, digest_of
from eelgrid_controller.state.node_allocations import AheadOfJournal
from eelgrid_controller.state.takeover_events import (
    ControllerStarted,
    JournalRolledBack,
    NodeAhead,
    NodeHeard,
    NodeReconciled,
    PlansWithdrawn,
)
from eelgrid_protos.faults import FailedPrecondition, NotFound, Unavailable
from eelgrid_protos.messages import (
    Assignment,
    HeldAssignments,
    Hello,
    ListNodesRequest,
    NodePlan,
    Policy,
    ReconcileNodeRequest,
    UpdatePolicyRequest,
    Welcome,
    WorkloadPhase,
)


def held(key="lost", replica=0, gpu="GPU-n-0"):
    return Assignment(workload_id=key, replica=replica, gpu_uuids=(gpu,), gpu_milli=1000)


def claim(*assignments, epoch=9):
    return PlanClaim(epoch=epoch, held=assignments)


# The core


def test_a_node_that_holds_more_than_the_journal_knows_takes_nothing_new_and_gets_no_plan():
    core = build_core(build_node("n"))
    core.register_node(build_node("n"), now_ns=2, plan_epoch=9, claim=claim(held()))
    assert core.state.nodes["n"].ahead == AheadOfJournal(plan_epoch=9, assignments=1, workload_ids=("lost",))
    assert core.plan_to_send("n") is None
    waiting = core.submit(build_request(gpus=1, key="new"), now_ns=3).result
    assert waiting.phase is WorkloadPhase.PENDING
    assert "ahead of the journal" in waiting.reason


def test_an_operator_gives_up_what_is_not_known_and_plans_go_on_above_the_agents_epoch():
    core = build_core(build_node("n"))
    core.register_node(build_node("n"), now_ns=2, plan_epoch=9, claim=claim(held()))
    core.submit(build_request(gpus=1, key="new"), now_ns=3)
    core.reconcile_node("n", now_ns=4)
    assert core.state.nodes["n"].ahead is None
    assert core.state.workloads["new"].phase is WorkloadPhase.PLACED
    plan = core.plan_to_send("n")
    assert plan.epoch > 9
    assert [item.workload_id for item in plan.assignments] == ["new"]
    assert core.reconcile_node("n", now_ns=5).events == (), "again is harmless"
    with pytest.raises(NotFound):
        core.reconcile_node("nobody", now_ns=6)


def test_an_agent_that_holds_only_what_the_journal_knows_needs_no_operator():
    core = build_core(build_node("n"))
    placed = core.submit(build_request(gpus=1, key="known"), now_ns=2).result
    known = held("known", gpu=placed.placements[0].gpu_uuids[0])
    core.register_node(build_node("n"), now_ns=3, plan_epoch=9, claim=claim(known))
    assert core.state.nodes["n"].ahead is None
    assert core.plan_to_send("n").epoch > 9


def started_anew(core, lost=None):
    """The core of another controller over the same journal."""
    again = build_core(state=ClusterState.load(json.loads(json.dumps(core.state.dump()))))
    again.record_controller_start(now_ns=90, lost=lost)
    return again


def told(name, **changes):
    """A node that an agent describes."""
    return build_node(name, agent_version="1.0", **changes)


def come_back(core, inventory, claimed, *, now_ns):
    """An agent opens its stream and answers Welcome; the events of the answer."""
    core.register_node(inventory, now_ns=now_ns, plan_epoch=claimed.epoch, claim=claimed)
    return core.confirm_claim(inventory.node_name, claimed, now_ns=now_ns).events


def test_an_epoch_that_was_used_twice_is_never_sent_with_other_content():
    """The journal went back, and its epochs have risen again to the very one that the agent holds."""
    core = started_anew(build_core(told("n")))
    core.update_policy(replace(core.state.policy, lease_s=30.0), now_ns=91)
    epoch = core.node_plan("n").epoch
    come_back(core, told("n"), claim(epoch=epoch), now_ns=92)
    assert core.plan_to_send("n").epoch == epoch + 1


def test_the_same_replica_on_other_gpus_is_not_known():
    core = build_core(build_node("n"))
    placed = core.submit(build_request(gpus=1, key="known"), now_ns=2).result
    (mine,) = placed.placements[0].gpu_uuids
    other = next(gpu.uuid for gpu in build_node("n").gpus if gpu.uuid != mine)
    core.register_node(build_node("n"), now_ns=3, plan_epoch=9, claim=claim(held("known", gpu=other)))
    assert core.state.nodes["n"].ahead is not None


def test_what_is_known_by_now_reconciles_a_node_at_its_next_hello_and_a_forgetful_agent_does_not():
    core = build_core(build_node("n"))
    core.register_node(build_node("n"), now_ns=2, plan_epoch=9, claim=claim(held()))
    core.register_node(build_node("n"), now_ns=3, claim=claim(epoch=0))
    assert core.state.nodes["n"].ahead is not None, "started anew: it does not know what runs there"
    assert core.register_node(build_node("n"), now_ns=4, plan_epoch=9, claim=claim(held())).events == ()
    core.register_node(build_node("n"), now_ns=5, plan_epoch=9, claim=claim())
    assert core.state.nodes["n"].ahead is None


def test_an_agent_that_cannot_say_what_it_holds_is_closed_until_an_operator_has_looked():
    core = build_core(build_node("n"))
    core.register_node(build_node("n"), now_ns=2, plan_epoch=9, claim=PlanClaim(epoch=9, held=None))
    assert core.state.nodes["n"].ahead == AheadOfJournal(plan_epoch=9)
    core.reconcile_node("n", now_ns=3)
    assert core.submit(build_request(gpus=1), now_ns=4).result.phase is WorkloadPhase.PLACED


def test_a_node_that_the_journal_does_not_know_at_all_is_compared_too():
    core = build_core()
    core.register_node(build_node("n"), now_ns=1, plan_epoch=9, claim=claim(held()))
    assert core.submit(build_request(gpus=1), now_ns=2).result.phase is WorkloadPhase.PENDING
    core.register_node(build_node("m"), now_ns=3, plan_epoch=9, claim=claim())
    assert core.state.nodes["m"].ahead is None, "it holds nothing"
    assert core.node_plan("m").epoch > 9


def test_no_move_and_no_more_replicas_go_to_a_node_that_is_ahead():
    core = build_core(build_node("n", gpus=4), build_node("m", gpus=1))
    core.submit(build_request(gpus=1, key="w"), now_ns=2)
    on = core.state.workloads["w"].placements[0].node_name
    core.register_node(core.state.nodes["n"].inventory, now_ns=3, plan_epoch=9, claim=claim(held(gpu="GPU-n-3")))
    core.scale("w", 4, now_ns=4)
    names = [one.node_name for one in core.state.workloads["w"].placements]
    assert names.count("n") == (1 if on == "n" else 0)


def test_the_state_comes_back_with_what_is_ahead_from_events_and_from_a_dump():
    core = build_core(build_node("n"))
    core.register_node(build_node("n"), now_ns=2, plan_epoch=9, claim=claim(held()))
    core.record_controller_start(now_ns=3, lost=LostEntries(5, None))
    plain = core.state.dump()
    journal = MemoryJournal()
    journal.write_checkpoint(Checkpoint(core.state.revision, json.loads(json.dumps(plain)), digest_of(plain)))
    again = recover_state(journal, ClusterState).state
    assert again.digest() == core.state.digest()
    assert again.nodes["n"].ahead == core.state.nodes["n"].ahead
    assert again.losses.rollbacks == 1


def test_what_an_agent_can_know_is_kept_over_starts_until_it_has_spoken():
    """Epochs rise past the agent's, and the controller starts again and again before it is back."""
    core = build_core(told("n"), told("m"))
    on = core.submit(build_request(gpus=1, key="a"), now_ns=2).result.placements[0].node_name
    (other,) = {"n", "m"} - {on}
    for start in range(3):
        core = started_anew(core, LostEntries(9, 12) if start == 0 else None)
        for number in range(3):
            core.set_limit("a", 100.0 + 10 * start + number, now_ns=100 + number)
    assert core.state.nodes[on].plan_epoch > 5
    assert core.submit(build_request(gpus=1, key="b"), now_ns=110).result.phase is WorkloadPhase.PENDING
    come_back(core, told(on), claim(held(), epoch=5), now_ns=120)
    assert core.state.nodes[on].ahead is not None
    come_back(core, told(other), claim(epoch=0), now_ns=121)
    core.resume_starts(now_ns=122)
    assert core.state.nodes[other].is_schedulable
    core.retry(now_ns=122)
    assert core.state.workloads["b"].phase is WorkloadPhase.PLACED
    plan = core.node_plan(other)
    again = claim(*plan.assignments, epoch=plan.epoch)
    assert core.register_node(told(other), now_ns=122, plan_epoch=again.epoch, claim=again).events == ()


def test_another_plan_under_the_epoch_of_the_journals_is_found_and_an_older_one_is_not():
    core = build_core(told("n", gpus=4))
    core.submit(build_request(gpus=1, key="a"), now_ns=2)
    epoch = core.node_plan("n").epoch
    # What an older plan has may have ended.
    older = claim(held(), epoch=epoch - 1)
    assert core.register_node(told("n", gpus=4), now_ns=3, plan_epoch=older.epoch, claim=older).events == ()
    (event,) = core.register_node(
        told("n", gpus=4), now_ns=4, plan_epoch=epoch, claim=claim(held(), epoch=epoch)
    ).events
    assert (event.assignments, event.workload_ids) == (1, ("lost",))
    assert core.node_plan("n").epoch > epoch


def test_work_that_waits_is_told_nothing_new_while_agents_come_back():
    core = build_core(told("n", gpus=1), told("m", gpus=1))
    for number in range(6):
        core.submit(build_request(gpus=1, key=f"w{number}"), now_ns=2)
    reasons = {key: one.reason for key, one in core.state.workloads.items()}
    core = started_anew(core)
    assert drop_quotes(core.retry(now_ns=91).events) == []
    for number, name in enumerate("nm"):
        (event,) = come_back(core, told(name, gpus=1), claim(epoch=1), now_ns=92 + number)
        assert event == NodeHeard(time_ns=92 + number, node_name=name)
        assert drop_quotes(core.retry(now_ns=94 + number).events) == []
    assert {key: one.reason for key, one in core.state.workloads.items()} == reasons


def test_where_an_engine_lists_what_runs_nothing_waits_for_agents():
    core = build_core(told("n"))
    core = build_core(state=ClusterState.load(json.loads(json.dumps(core.state.dump()))))
    assert core.record_controller_start(now_ns=2, asks_agents=False).events == ()
    assert core.submit(build_request(gpus=1), now_ns=3).result.phase is WorkloadPhase.PLACED
    # A journal of a controller that did ask goes on under one that does not.
    core.record_controller_start(now_ns=4)
    assert core.submit(build_request(gpus=1, key="b"), now_ns=5).result.phase is WorkloadPhase.PENDING
    core.register_node(told("n"), now_ns=6)
    core.retry(now_ns=7)
    assert core.state.workloads["b"].phase is WorkloadPhase.PLACED


@pytest.mark.parametrize(("lost", "number"), [(LostEntries(4, 6), 5), (LostEntries(4, None), 1_000_002)])
def test_ids_that_were_drawn_in_what_is_lost_are_not_drawn_again(lost, number):
    core = build_core()
    core.submit(build_request(gpus=0), now_ns=1)
    core.record_controller_start(now_ns=2, lost=lost)
    assert core.submit(build_request(gpus=0), now_ns=3).result.workload_id == f"w-{number}"


# A write that failed for its caller, and that a promoted standby may still have


def withdrawn_and_restored():
    """The core after a write was withdrawn and another followed, and that of a standby that has the withdrawn one."""
    before = build_core(told("n"))
    plain = json.loads(json.dumps(before.state.dump()))
    restored = build_core(state=ClusterState.load(plain))
    restored.submit(build_request(gpus=1, key="refused"), now_ns=2)
    withdrawn = WithdrawnPlans()
    withdrawn.record_failure(restored.state, before.state)
    before.withdraw_plans(withdrawn.plan_epoch, now_ns=3)
    withdrawn.record_commit(withdrawn.plan_epoch)
    assert withdrawn.plan_epoch == 0
    before.submit(build_request(gpus=1, key="accepted"), now_ns=4)
    return before, restored


def test_an_agent_that_holds_another_plan_than_a_restored_write_gave_it_is_ahead():
    followed, restored = withdrawn_and_restored()
    plan = followed.plan_to_send("n")
    assert restored.node_plan("n").epoch < plan.epoch, "no epoch has two contents"
    restored.record_controller_start(now_ns=90)
    come_back(restored, told("n"), claim(*plan.assignments, epoch=plan.epoch), now_ns=91)
    assert restored.state.nodes["n"].ahead.workload_ids == ("accepted",)
    assert restored.plan_to_send("n") is None


def test_work_that_ended_while_its_agent_was_away_closes_no_node():
    core, _ = withdrawn_and_restored()
    plan = core.plan_to_send("n")
    core.cancel("accepted", now_ns=5)
    core = started_anew(core)
    come_back(core, told("n"), claim(*plan.assignments, epoch=plan.epoch), now_ns=91)
    assert core.state.nodes["n"].is_schedulable


# An opening that comes late


def test_an_opening_that_waited_in_a_stopped_process_opens_no_node_until_its_agent_answers():
    """It is of before the work that a promotion lost; what would be placed by it raises the epoch past the lost plan's."""
    leader = build_core(told("n", gpus=8))
    leader.submit(build_request(gpus=1, key="kept"), now_ns=2)
    old = claim(*leader.node_plan("n").assignments, epoch=leader.node_plan("n").epoch)
    promoted = started_anew(leader)
    leader.submit(build_request(gpus=1, key="lost"), now_ns=3)
    lost = leader.plan_to_send("n")
    step = promoted.register_node(told("n", gpus=8), now_ns=91, plan_epoch=old.epoch, claim=old)
    assert step.events == ()
    for number in range(3):
        early = promoted.submit(build_request(gpus=1, key=f"early-{number}"), now_ns=92).result
        assert early.phase is WorkloadPhase.PENDING
        # Whatever else changes the plan.
        promoted.set_limit("kept", 100.0 + number, now_ns=92)
    assert promoted.node_plan("n").epoch > lost.epoch
    assert promoted.plan_to_send("n") is None, "it would end the lost work"
    come_back(promoted, told("n", gpus=8), claim(*lost.assignments, epoch=lost.epoch), now_ns=93)
    assert promoted.state.nodes["n"].ahead.workload_ids == ("lost",)


def test_what_a_node_held_before_the_controller_started_is_not_given_up_before_its_agent_has_spoken():
    """Since then it may have got more, by a plan that was lost, too (seed 2020 of late openings)."""
    core = build_core(told("n"))
    core.register_node(told("n"), now_ns=2, plan_epoch=6, claim=claim(held(), epoch=6))
    core = started_anew(core)
    with pytest.raises(FailedPrecondition, match="has not reported since the controller started"):
        core.reconcile_node("n", now_ns=91)
    come_back(core, told("n"), claim(held(), held("later", gpu="GPU-n-1"), epoch=12), now_ns=92)
    assert core.state.nodes["n"].ahead.workload_ids == ("lost", "later")
    core.reconcile_node("n", now_ns=93)
    assert core.plan_to_send("n").epoch > 12


def test_a_new_node_is_doubted_where_its_joining_may_have_been_lost():
    core = build_core(joins_doubted=True)
    old, lost = claim(epoch=0), claim(held(), epoch=1)
    core.register_node(told("n"), now_ns=2, claim=old)
    assert core.submit(build_request(gpus=1), now_ns=3).result.phase is WorkloadPhase.PENDING
    core = build_core(state=ClusterState.load(json.loads(json.dumps(core.state.dump()))), joins_doubted=True)
    assert core.state.doubted == {"n"}
    core.update_policy(replace(core.state.policy, lease_s=30.0), now_ns=4)
    core.update_policy(replace(core.state.policy, lease_s=40.0), now_ns=4)
    assert core.node_plan("n").epoch > lost.epoch
    come_back(core, told("n"), lost, now_ns=5)
    assert core.state.nodes["n"].ahead.workload_ids == ("lost",)


def test_a_new_node_is_placed_on_once_its_agent_has_answered():
    core = build_core(joins_doubted=True)
    core.submit(build_request(gpus=1, key="a"), now_ns=1)
    event, *_ = come_back(core, told("n"), claim(epoch=9), now_ns=2)
    assert event == NodeReconciled(time_ns=2, node_name="n", plan_epoch=9)
    assert core.state.workloads["a"].phase is WorkloadPhase.PLACED
    assert core.plan_to_send("n").epoch > 9
    assert core.confirm_claim("n", claim(held(), epoch=99), now_ns=4).events == (), "once for each opening"
    assert core.confirm_claim("gone", claim(epoch=0), now_ns=4).events == ()


def test_a_doubted_node_that_changed_is_described_anew_and_stays_doubted():
    core = started_anew(build_core(told("n", gpus=1)))
    step = core.register_node(told("n", gpus=4), now_ns=91, plan_epoch=7, claim=claim(held(), epoch=7))
    assert [type(event) for event in step.events] == [NodeJoined]
    assert (len(core.state.nodes["n"].inventory.gpus), core.state.nodes["n"].is_reported) == (4, False)
    core.confirm_claim("n", claim(held(), epoch=7), now_ns=92)
    assert core.state.nodes["n"].ahead.workload_ids == ("lost",)
    assert core.node_plan("n").epoch > 7


def test_epochs_stay_above_those_that_were_withdrawn_whatever_changes_a_plan():
    """Also those of a node that joined with the withdrawn write alone, and after a checkpoint."""
    core = build_core(told("n"))
    core.withdraw_plans(20, now_ns=2)
    core = build_core(state=ClusterState.load(json.loads(json.dumps(core.state.dump()))))
    assert core.node_plan("n").epoch <= 20, "a plan that did not change is not sent again"
    core.register_node(told("new"), now_ns=3)
    core.update_policy(replace(core.state.policy, lease_s=30.0), now_ns=4)
    assert {core.node_plan(name).epoch for name in ("n", "new")} == {21}
    core.withdraw_plans(30, now_ns=5)
    core.register_node(told("late"), now_ns=6, plan_epoch=9)
    assert core.node_plan("late").epoch == 31


def test_the_highest_of_several_failed_writes_counts_until_the_journal_has_it():
    before, withdrawn = build_core(told("n")), WithdrawnPlans()
    plain = json.loads(json.dumps(before.state.dump()))
    withdrawn.record_failure(before.state, before.state)
    assert withdrawn.plan_epoch == 0, "a write that changed no plan"
    for count in (2, 1):
        failed = build_core(state=ClusterState.load(plain))
        for number in range(count):
            failed.submit(build_request(gpus=1, key=f"w{number}"), now_ns=2)
        withdrawn.record_failure(failed.state, before.state)
        assert withdrawn.plan_epoch == 2
    withdrawn.record_commit(1)
    assert withdrawn.plan_epoch == 2


@pytest.mark.parametrize(
    "event",
    [
        NodeAhead(time_ns=1, node_name="n", plan_epoch=9, assignments=1, workload_ids=("w",)),
        NodeAhead(time_ns=1, node_name="n", plan_epoch=9),
        NodeReconciled(time_ns=1, node_name="n", plan_epoch=9),
        NodeHeard(time_ns=1, node_name="n"),
        NodeJoined(time_ns=1, inventory=told("n"), is_doubted=True),
        ControllerStarted(time_ns=1),
        JournalRolledBack(time_ns=1, first=3, last=5),
        JournalRolledBack(time_ns=1, first=3),
        PlansWithdrawn(time_ns=1, plan_epoch=7),
    ],
)
def test_the_events_come_back_as_they_were(event):
    assert event_from_plain(*event_to_plain(event)) == event


def test_a_node_that_joins_without_doubt_is_written_as_older_versions_read_it():
    assert "is_doubted" not in event_to_plain(NodeJoined(time_ns=1, inventory=told("n")))[1]


# The controller


async def hello(rig, *assignments, epoch, name="n1", version="1.0", says=True):
    agent = AgentStream(rig.address)
    rig.agents.append(agent)
    await agent.say(
        Hello(
            incarnation=1,
            inventory=build_node(name, agent_version=version),
            plan_epoch=epoch,
            held=HeldAssignments(assignments=assignments) if says else None,
        )
    )
    await agent.hear()
    await rig.answer(agent, name)
    return agent


async def nodes(rig):
    return {one.inventory.node_name: one for one in (await rig.operators.list_nodes(ListNodesRequest())).nodes}


async def accepted(folder: Path) -> tuple[int, tuple[Assignment, ...]]:
    """A controller that placed `kept`, whose data is copied, and then `lost`, as the agent holds them."""
    async with run_controller(folder / "data") as rig:
        agent = await hello(rig, epoch=0)
        await rig.operators.submit_workload(build_request("kept"))
        await agent.hear(NodePlan)
        shutil.copytree(folder / "data", folder / "copy")
        await rig.operators.submit_workload(build_request("lost"))
        plan = await agent.hear(NodePlan)
        return plan.epoch, plan.assignments


async def test_after_a_rollback_of_everything_no_gpu_is_given_twice_and_it_is_reported(tmp_path, caplog) -> None:
    """The whole directory is an older copy, so only the agent's epoch tells."""
    epoch, assignments = await accepted(tmp_path)
    with caplog.at_level(logging.ERROR):
        async with run_controller(tmp_path / "copy") as rig:
            # Before the agent has spoken nobody knows what it holds.
            early = (await rig.operators.submit_workload(build_request("early"))).workload
            assert early.phase is WorkloadPhase.PENDING
            agent = await hello(rig, *assignments, epoch=epoch)
            late = (await rig.operators.submit_workload(build_request("late"))).workload
            assert late.phase is WorkloadPhase.PENDING
            node = (await nodes(rig))["n1"]
            assert (node.ahead_epoch, node.unknown_workload_ids) == (epoch, ("lost",))
            assert "ahead_of_journal=yes" in caplog.text
            finding = doctor_cluster.check_journal_loss([node])
            assert (finding.status.name.lower(), "lost" in finding.what) == ("fail", True)
            assert rig.controller.agents.plans_sent == 0
            answer = await rig.operators.reconcile_node(ReconcileNodeRequest(node_name="n1"))
            assert answer.node.ahead_epoch is None
            plan = await agent.hear(NodePlan)
            assert plan.epoch > epoch
            assert rig.controller.agents.plans_sent == 1
            assert {item.workload_id for item in plan.assignments} <= {"kept", "early", "late"}
            assert len(plan.assignments) == 2


async def test_a_node_is_placed_on_once_its_agent_has_spoken_after_a_start(tmp_path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await hello(rig, epoch=0)
        await rig.operators.submit_workload(build_request("one"))
        plan = await agent.hear(NodePlan)
    async with run_controller(tmp_path) as rig:
        await rig.operators.submit_workload(build_request("two"))
        assert rig.controller.loop.core.state.workloads["two"].phase is WorkloadPhase.PENDING
        await hello(rig, *plan.assignments, epoch=plan.epoch)
        await wait_until(lambda: rig.controller.loop.core.state.workloads["two"].phase is WorkloadPhase.PLACED)
        assert (await nodes(rig))["n1"].ahead_epoch is None


async def test_an_opening_alone_opens_no_node_and_what_follows_welcome_does(tmp_path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1", agent_version="1.0"), build_node("n2", agent_version="1.0"))
    async with run_controller(tmp_path) as rig:
        agent = AgentStream(rig.address)
        rig.agents.append(agent)
        await agent.say(Hello(incarnation=1, inventory=build_node("n1", agent_version="1.0"), held=HeldAssignments()))
        assert isinstance(await agent.hear(), Welcome)
        # Another stream's turn comes after this one's.
        await rig.join(build_node("n2", agent_version="1.0"))
        records = rig.controller.loop.core.state.nodes
        assert [records[name].is_reported for name in ("n1", "n2")] == [False, True]
        assert rig.controller.agents.plans_sent == 0
        await agent.say(build_batch(1))
        await wait_until(lambda: records["n1"].is_reported)


async def test_epochs_that_rose_again_before_the_agent_came_back_hide_no_rollback(tmp_path) -> None:
    epoch, assignments = await accepted(tmp_path)
    async with run_controller(tmp_path / "copy") as rig:
        for lease_s in (20.0, 30.0, 40.0, 50.0):
            revision = rig.controller.loop.core.state.policy.revision
            policy = Policy(revision=revision, lease_s=lease_s)
            await rig.operators.update_policy(UpdatePolicyRequest(policy=policy))
        assert rig.controller.loop.core.state.nodes["n1"].plan_epoch > epoch
        await hello(rig, *assignments, epoch=epoch)
        assert (await nodes(rig))["n1"].unknown_workload_ids == ("lost",)


async def test_an_agent_of_before_that_says_nothing_of_what_it_holds(tmp_path) -> None:
    epoch, _ = await accepted(tmp_path)
    async with run_controller(tmp_path / "copy") as rig:
        await hello(rig, epoch=epoch, says=False)
        node = (await nodes(rig))["n1"]
        assert (node.ahead_epoch, node.unknown_workload_ids) == (epoch, ())


async def test_a_lost_log_is_refused_and_an_accepted_loss_stands_in_the_journal(tmp_path) -> None:
    await accepted(tmp_path)
    for name in (FILE_NAME, f"{FILE_NAME}-wal"):
        (tmp_path / "data" / name).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(tmp_path / "copy" / name, tmp_path / "data" / name)
    with pytest.raises(JournalLost, match="were acknowledged and are gone"):
        async with run_controller(tmp_path / "data"):
            pass
    async with run_controller(tmp_path / "data", accepts_journal_loss=True) as rig:
        assert rig.controller.loop.core.state.losses.rollbacks == 1
    async with run_controller(tmp_path / "data") as rig:
        assert rig.controller.loop.core.state.losses.rollbacks == 1
    with contextlib.closing(open_journal(tmp_path / "data", new_cluster_id="c")) as journal:
        assert any(entry.kind == "journal_rolled_back" for _, entry in journal.entries_after(0))


async def test_a_deleted_data_directory_is_noticed_before_anybody_asks_and_nothing_is_accepted(tmp_path) -> None:
    async with run_controller(tmp_path / "data") as rig:
        shutil.move(tmp_path / "data", tmp_path / "away")
        await wait_until(lambda: rig.controller.loop.journal_fault is not None)
        with pytest.raises(Unavailable, match="was removed or replaced"):
            await rig.operators.submit_workload(build_request("w"))
        shutil.move(tmp_path / "away", tmp_path / "data")
        await wait_until(lambda: rig.controller.loop.journal_fault is None)
        await rig.operators.submit_workload(build_request("w"))
