"""When a node tells what became of its attempts: ends at once, starts with others."""

from dataclasses import replace
from types import SimpleNamespace

from tests.builders.agent import ManualClock, build_agent_node, build_devices

from eelgrid_agent.engine.contact import LeaderContact
from eelgrid_agent.engine.port import AttemptKey
from eelgrid_protos.messages import (
    Assignment,
    AttemptReport,
    AttemptState,
    AttemptStatus,
    Cadence,
    ConnectResponse,
    NodePlan,
    PlanApplied,
    Welcome,
)

WELCOME = Welcome(acknowledged_sequence=0, cadence=Cadence())


def running(name):
    return AttemptStatus(workload_id=name, replica=0, attempt=1, state=AttemptState.RUNNING, started_ns=5)


class ReportedAttempts:
    """A node whose attempts change as a test says, and the reports that it would send."""

    def __init__(self):
        self._attempts, self.wakes = {}, 0
        self._processes = SimpleNamespace(
            list_attempts=lambda: self._attempts,
            on_change=None,
            start=lambda *_: None,
            drop_waiting=lambda _: None,
            contact=LeaderContact(),
        )
        clock = ManualClock()
        self.node = build_agent_node(build_devices(clock), clock, processes=self._processes)
        self.node.on_welcome(WELCOME)
        self.read()
        self.node.wake = self._count

    def _count(self):
        self.wakes += 1

    def change(self, *statuses):
        for one in statuses:
            self._attempts[AttemptKey(one.workload_id, one.replica, one.attempt)] = one
        self._processes.on_change()

    def order(self, epoch, *gpu_uuids):
        """Sends a plan with an assignment of each GPU, and returns the epochs of the plans that are answered by then."""
        items = tuple(
            Assignment(workload_id=f"w-{uuid}", replica=0, gpu_uuids=(uuid,), gpu_milli=1000) for uuid in gpu_uuids
        )
        plan = NodePlan(node_name=self.node.name, epoch=epoch, lease_s=60.0, assignments=items)
        self.node.on_message(ConnectResponse(message=plan))
        return self.read_answers()

    def read_answers(self):
        found = []
        while (message := self.node.next_message()) is not None:
            if isinstance(message.message, PlanApplied):
                found.append(message.message.epoch)
        return found

    def read(self):
        """The ids in the reports that are due."""
        found = []
        while (message := self.node.next_message()) is not None:
            if isinstance(message.message, AttemptReport):
                found.append([one.workload_id for one in message.message.attempts])
        return found


def test_starts_are_told_together_at_intervals():
    told = ReportedAttempts()
    told.change(running("a"))
    assert told.read() == []
    told.change(running("b"))
    assert told.read() == []
    told.node.report_starts()
    assert told.read() == [["a", "b"]]
    wakes = told.wakes
    told.node.report_starts()
    assert (told.read(), told.wakes) == ([], wakes)


def test_an_end_is_told_at_once_and_takes_starts_along():
    told = ReportedAttempts()
    told.change(running("a"))
    told.read()
    told.node.report_starts()
    assert told.read() == [["a"]]
    told.change(running("b"))
    told.read()
    told.change(replace(running("a"), state=AttemptState.ENDED, ended_ns=9, exit_code=0))
    assert told.read() == [["a", "b"]]


def test_a_checkpoint_of_a_known_attempt_is_told_at_once():
    told = ReportedAttempts()
    told.change(running("a"))
    told.read()
    told.node.report_starts()
    assert told.read() == [["a"]]
    told.change(replace(running("a"), checkpointed_ns=7))
    assert told.read() == [["a"]]


def test_a_new_stream_is_told_everything_at_once():
    told = ReportedAttempts()
    told.change(running("a"))
    assert told.read() == []
    told.node.on_welcome(WELCOME)
    assert told.read() == [["a"]]


def test_that_plans_are_in_force_is_told_once_for_all_at_intervals():
    told = ReportedAttempts()
    assert told.order(1) == told.order(2) == []
    told.node.report_starts()
    assert told.read_answers() == [2]
    told.node.report_starts()
    assert told.read_answers() == []


def test_what_a_plan_may_not_do_is_told_at_once_and_nothing_older_after_it():
    told = ReportedAttempts()
    assert told.order(1) == []
    assert told.order(2, "GPU-that-is-not-here") == [2]
    told.node.report_starts()
    assert told.read_answers() == []


def test_a_new_stream_is_told_of_the_newest_plan():
    told = ReportedAttempts()
    assert told.order(1) == []
    told.node.on_disconnected()
    told.node.on_welcome(WELCOME)
    assert told.read_answers() == [1]
    told.node.report_starts()
    assert told.read_answers() == []


def test_ended_attempts_are_told_before_all_others_and_once_where_the_controller_asks_for_them():
    told = ReportedAttempts()
    asked = []
    ends = tuple(
        replace(running(name), state=AttemptState.ENDED, exit_code=0, ended_ns=9, process_digest="x") for name in "ab"
    )

    def list_ended():
        asked.append(True)
        return ends

    told._processes.list_ended = list_ended
    told.change(running("c"))
    told.node.on_welcome(WELCOME)
    assert (told.read(), asked) == ([["c"]], [])
    told.node.on_welcome(replace(WELCOME, wants_ended_attempts=True))
    assert (told.read(), asked) == ([["a", "b"], ["c"]], [True])
    assert told.read() == []
    told.node.on_welcome(replace(WELCOME, wants_ended_attempts=True))
    told.node.on_welcome(WELCOME)
    assert told.read() == [["c"]]
