"""What a placement's trace holds, and its bounds: a real controller, and the spans that ended."""

import itertools
from dataclasses import replace

import pytest
from opentelemetry.trace import SpanKind
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller
from tests.waiting import wait_until

from eelgrid_controller.core.core import CommitResult
from eelgrid_controller.runtime.loop import CommandOrigin
from eelgrid_controller.server.placement_traces import PlacementTraces, TraceLimits, TraceRoot
from eelgrid_controller.state.events import PartitionsPlanned, SlicedService
from eelgrid_protos.messages import ApplyResult, ApplyStatus, Assignment, CancelWorkloadRequest, NodePlan, PlanApplied


class Ended:
    """Implements `Spans`: keeps what ended; the header `traceparent` is a trace's id, and none is wanted for "no"."""

    def __init__(self):
        self.spans = []
        self.ids = itertools.count(1)

    def start_trace(self, name, headers, trace_id):
        assert name == "placement"
        caller = headers.get("traceparent", "")
        return None if caller == "no" else TraceRoot(int(caller), 7) if caller else TraceRoot(trace_id)

    def new_span_id(self):
        return next(self.ids)

    def export_span(self, span):
        assert span not in self.spans
        self.spans.append(span)


class Traced:
    """A controller whose placements are followed, and the spans that ended."""

    def __init__(self, rig, **bounds):
        self.rig = rig
        self.loop = rig.controller.loop
        self.ended = Ended()
        self.now_ns = 0
        self.traces = PlacementTraces(
            self.ended,
            cluster="c",
            now_ns=lambda: self.loop.clock.now_ns() + self.now_ns,
            has_agent=rig.controller.agents.is_node_reported,
            bounds=TraceLimits(**bounds),
        )
        self.ids = {}
        self.loop._observe_decision = self._decided
        self.loop._observe_commit = self.traces.on_write
        self.loop.listeners.append(self.traces.on_commit)
        rig.controller.agents.listeners.append(self.traces.on_plan_message)

    def _decided(self, duration_s, workload_id, origin):
        self.ids[workload_id] = self.traces.on_decision(duration_s, workload_id, origin)

    async def submit(self, name, origin=None, **asked):
        return await self.loop.submit(build_request(name, **asked), origin)

    def spans(self, workload):
        """Ended spans of a workload's trace, as (name, name of its parent), in their order."""
        every = [one for one in self.ended.spans if f"{one.root.trace_id:032x}" == self.ids[workload]]
        return sorted(every, key=lambda one: (one.start_ns, -one.end_ns))

    def tree(self, workload):
        spans = self.spans(workload)
        names = {one.span_id: one.name for one in spans}
        return [(one.name, names.get(one.parent_id)) for one in spans]

    def root(self, workload):
        (found,) = [one for one in self.spans(workload) if one.name == "placement"]
        return found


def kept(traced):
    """Everything that it holds on to."""
    return len(traced.traces._followed), len(traced.traces._waiting), len(traced.traces._decided)


async def applied(agent, status=ApplyStatus.APPLIED, results=()):
    """The agent takes the next plan and answers it."""
    plan = await agent.hear(NodePlan, within_s=60.0)
    await agent.say(PlanApplied(epoch=plan.epoch, status=status, results=results))
    return plan


async def ended(traced, workload):
    await wait_until(lambda: any(one.name == "placement" for one in traced.spans(workload)), within_s=60.0)


async def test_a_placement_is_followed_from_its_submission_until_its_node_holds_it(tmp_path):
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node("n1"))
        traced = Traced(rig)
        await traced.submit("w")
        assert kept(traced) == (1, 1, 0), "the agent has not answered"
        plan = await applied(agent)
        await ended(traced, "w")
        assert traced.tree("w") == [
            ("placement", None),
            ("submit", "placement"),
            ("decide", "submit"),
            ("journal", "submit"),
            ("plan", "placement"),
            ("apply", "placement"),
        ]
        root, submit, decide, journal, out, confirmed = traced.spans("w")
        assert decide.end_ns <= journal.start_ns <= journal.end_ns == submit.end_ns <= out.start_ns
        assert out.end_ns == confirmed.start_ns <= confirmed.end_ns == root.end_ns
        said = root.attributes
        assert said["eelgrid.result"] == "finished"
        assert (said["eelgrid.workload.id"], said["eelgrid.workload.gpus"], said["eelgrid.node"]) == ("w", 1.0, "n1")
        explained = traced.loop.core.explain_workload("w").replicas[0].candidates[0]
        assert said["eelgrid.cost_watts"] == pytest.approx(explained.cost_w)
        for term in explained.terms:
            assert said[f"eelgrid.cost_watts.{term.name}"] == pytest.approx(term.cost_w)
        assert said["eelgrid.decision.revision"] == traced.loop.core.state.workloads["w"].revision
        assert confirmed.attributes["eelgrid.plan.epoch"] == plan.epoch
        assert confirmed.attributes["eelgrid.apply.status"] == "applied"
        assert kept(traced) == (0, 0, 0)
        assert traced.traces.results == {"finished": 1, "cancelled": 0, "given_up": 0}


async def test_a_wait_is_a_span_with_its_reasons_and_ends_where_the_decision_begins(tmp_path):
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node("n1", gpus=1))
        traced = Traced(rig)
        await traced.submit("first")
        await applied(agent)
        await traced.submit("second")
        assert kept(traced)[0] == 1, "it waits"
        await traced.loop.cancel("first")
        await applied(agent)
        await ended(traced, "second")
        assert traced.tree("second") == [
            ("placement", None),
            ("submit", "placement"),
            ("decide", "submit"),
            ("journal", "submit"),
            ("queue", "placement"),
            ("decide", "placement"),
            ("journal", "placement"),
            ("plan", "placement"),
            ("apply", "placement"),
        ]
        queue, decide = traced.spans("second")[4:6]
        assert queue.attributes["eelgrid.reason"].startswith("gpu_count: ")
        assert [name for _, name, _ in queue.events] == ["waits"]
        assert queue.end_ns == decide.start_ns
        assert decide.attributes["eelgrid.node"] == "n1"


async def test_a_callers_trace_is_gone_on_with_and_one_that_nobody_wants_is_not_followed(tmp_path):
    async with run_controller(tmp_path) as rig:
        traced = Traced(rig)
        arrived_ns = traced.loop.clock.now_ns()
        await traced.submit("no", CommandOrigin(arrived_ns, {"traceparent": "no"}))
        assert (kept(traced), traced.ids["no"]) == ((0, 0, 0), "")
        await traced.submit("w", CommandOrigin(arrived_ns, {"traceparent": "77"}))
        assert traced.ids["w"] == f"{77:032x}"
        await traced.loop.cancel("w")
        root = traced.root("w")
        assert (root.parent_id, root.start_ns) == (7, arrived_ns)
        submit = next(one for one in traced.spans("w") if one.name == "submit")
        assert (submit.kind, submit.attributes["rpc.method"]) == (SpanKind.SERVER, "SubmitWorkload")


async def test_what_is_imagined_repeated_refused_or_undone_has_no_trace(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        traced = Traced(rig)
        await traced.loop.submit(replace(build_request("imagined"), dry_run=True))
        with pytest.raises(Exception, match="contradict"):
            await traced.loop.submit(build_request("nonsense", gpus=1, milli=0))
        assert traced.ended.spans == []
        # Decided on, and then the disk refused: the next commit forgets it.
        traced.traces.on_decision(0.001, "undone", None)
        assert kept(traced) == (0, 0, 1)
        await traced.submit("w")
        await traced.submit("w")
        assert kept(traced) == (1, 1, 0)
        traced.traces.close()
        assert [one.name for one in traced.ended.spans].count("placement") == 1


async def test_what_waits_goes_on_after_a_restart_in_the_same_trace(tmp_path):
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node("n1", gpus=1))
        before = Traced(rig)
        await before.submit("first")
        await applied(agent)
        await before.submit("second")
        await before.submit("called", CommandOrigin(1, {"traceparent": "77"}))
        before.traces.close()
        assert before.tree("second") == [
            (name, None if name == "submit" else "submit") for name in ("submit", "decide", "journal")
        ], "its first span is the next process' to end"
        assert before.root("called").attributes["eelgrid.result"] == "given_up", "nobody keeps a caller's ids"
        assert kept(before) == (0, 0, 0)

        after = Traced(rig, placements_most=1)
        state = after.loop.core.state
        after.traces.resume_traces(state.workloads[key] for key in state.pending)
        after.ids["second"] = before.ids["second"]
        assert kept(after) == (1, 0, 0)
        await after.loop.cancel("called")
        await after.loop.cancel("first")
        await applied(agent)
        await ended(after, "second")
        after.ended.spans += before.ended.spans
        root = after.root("second")
        assert [parent for name, parent in after.tree("second") if name in {"submit", "queue", "apply"}] == [
            "placement"
        ] * 3
        assert root.attributes["eelgrid.result"] == "finished"
        assert root.start_ns == state.workloads["second"].submitted_ns
        queue = next(one for one in after.spans("second") if one.name == "queue")
        assert next(name for _, name, _ in queue.events) == "another process goes on"


async def test_a_node_that_refuses_is_an_error_that_says_why(tmp_path):
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node("n1"))
        traced = Traced(rig)
        await traced.submit("w")
        why = ApplyResult(subject="w", status=ApplyStatus.REFUSED, detail="no such device", rule="known_devices")
        await applied(agent, ApplyStatus.REFUSED, (why,))
        await ended(traced, "w")
        span = traced.spans("w")[-1]
        assert (span.name, span.attributes["eelgrid.apply.status"]) == ("apply", "refused")
        assert span.error == "no such device"


async def test_what_never_ends_is_given_up_and_counted(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1", gpus=4))
        traced = Traced(rig, placements_most=2, answer_s=60.0)
        for name in ("a", "b", "c"):
            await traced.submit(name)
        assert kept(traced)[0] == 2
        assert traced.root("a").attributes["eelgrid.result"] == "given_up"
        traced.traces.expire_traces()
        assert kept(traced)[0] == 2, "nobody waits for long yet"
        traced.now_ns = 61 * 10**9
        traced.traces.expire_traces()
        assert kept(traced) == (0, 0, 0)
        assert traced.traces.results["given_up"] == 3
        (counted,) = [one for one in traced.traces.families() if one.name == "eelgrid_traces"]
        assert {one.labels["result"]: one.value for one in counted.samples}["given_up"] == 3


async def test_a_gang_has_spans_for_its_first_nodes_and_work_without_an_agent_waits_for_nobody(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(*(build_node(f"n{number}", gpus=1) for number in range(4)))
        traced = Traced(rig, places_most=2)
        await traced.submit("gang", replicas=4)
        assert len(traced.traces._followed["gang"].awaited) == 2
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="gang"))
        assert traced.root("gang").attributes["eelgrid.nodes"] == 4
        assert traced.root("gang").attributes["eelgrid.result"] == "cancelled"
        traced.traces._has_agent = lambda _: False
        await traced.submit("alone")
        assert traced.root("alone").attributes["eelgrid.result"] == "finished"


async def test_pods_are_waited_for_until_they_are_patched(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        traced = Traced(rig)
        traced.traces._has_agent = lambda _: False
        traced.traces.has_pod = lambda name: name.startswith("pod-")
        await traced.submit("pod-1")
        traced.traces.on_pod_patched("pod-1", 7, "n1", 0)
        traced.traces.on_pod_patched("stranger", 0, "n1", 0)
        assert kept(traced)[0] == 1
        start_ns = traced.loop.clock.now_ns()
        traced.traces.on_pod_patched("pod-1", 0, "n1", start_ns)
        patch = traced.spans("pod-1")[-1]
        assert (patch.name, patch.start_ns, patch.attributes["eelgrid.node"]) == ("patch", start_ns, "n1")
        assert traced.root("pod-1").end_ns == patch.end_ns


async def test_a_service_whose_slices_are_planned_again_awaits_the_new_place_alone(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"), build_node("n2"))
        traced = Traced(rig)
        await traced.submit("w")
        state = traced.loop.core.state
        (at,) = state.workloads["w"].placements
        (other,) = {"n1", "n2"} - {at.node_name}
        held = NodePlan(
            node_name=at.node_name, epoch=1, lease_s=60.0, assignments=(Assignment(workload_id="w", replica=0),)
        )
        traced.traces.on_plan_message(at.node_name, held)
        service = SlicedService(workload_id="w", placements=(replace(at, node_name=other),))
        event = PartitionsPlanned(time_ns=traced.loop.clock.now_ns(), services=(service,))
        traced.traces.on_commit(CommitResult((event,), frozenset(), state.revision + 1))
        traced.traces.on_plan_message(at.node_name, PlanApplied(epoch=1, status=ApplyStatus.APPLIED))
        assert kept(traced) == (1, 1, 0), "that node is no place of it any more"
        traced.traces.on_plan_message(other, replace(held, node_name=other))
        traced.traces.on_plan_message(other, PlanApplied(epoch=1, status=ApplyStatus.APPLIED))
        assert kept(traced) == (0, 0, 0)
        assert [one.attributes["eelgrid.node"] for one in traced.spans("w") if one.name == "apply"] == [
            at.node_name,
            other,
        ]
        assert traced.root("w").attributes["eelgrid.node"] == other
