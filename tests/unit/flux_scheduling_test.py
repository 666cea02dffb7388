"""What Flux says and what is decided about it, with jobs as messages: each rule of the pure part alone."""

import json
import time

import pytest
from click.testing import CliRunner
from tests.flux_rig import RESOURCES, build_jobspec

from eelgrid_controller.__main__ import main
from eelgrid_controller.engines.flux.allocations import split_equally
from eelgrid_controller.engines.flux.batches import StreamMessage, encode_payload, pack_messages, unpack_messages
from eelgrid_controller.engines.flux.instance import FluxReply
from eelgrid_controller.engines.flux.jobspecs import find_infeasibility, match_ranks, parse_jobspec
from eelgrid_controller.engines.flux.journal import FluxJournal
from eelgrid_controller.engines.flux.resource_sets import (
    FluxUnreadable,
    describe_resource_set,
    format_job_id,
    format_resource_set,
    parse_hostlist,
    parse_idset,
    parse_job_id,
    parse_resource_set,
)
from eelgrid_controller.engines.flux.scheduling import (
    FluxAdopt,
    FluxEligibility,
    FluxEnd,
    FluxScheduling,
    FluxSubmit,
    find_job_number,
)
from eelgrid_controller.engines.node_reports import RegisterNode, ReportUsage
from eelgrid_protos.messages import Inventory, Placement, StartPromise, Workload, WorkloadPhase
from eelgrid_protos.schema import check_message

POOL = parse_resource_set(RESOURCES)
# As in the example of RFC 20, of four nodes with 48 cores and 8 GPUs each.
EXAMPLE = {
    "version": 1,
    "execution": {
        "R_lite": [{"rank": "19-22", "children": {"gpu": "0-7", "core": "0-47"}}],
        "starttime": 1676560542.0,
        "expiration": 1676562342.0,
        "nodelist": ["node[186-189]"],
        "nslots": 32,
        "properties": {"debug": "19-20", "amd-mi50@gpu": "21-22", "+batch": "19-22"},
    },
}


def build_r(*ranks, cores="0", gpus=""):
    children = {"core": cores} | ({"gpu": gpus} if gpus else {})
    entry = {"rank": ",".join(map(str, ranks)), "children": children}
    return {"version": 1, "execution": {"R_lite": [entry], "nodelist": [f"n{rank}" for rank in ranks], "nslots": 1}}


class Instance:
    """A scheduling with a core that is a table of workloads; each look is at the jobs that have changed."""

    def __init__(self, *messages, mode="schedule", down=""):
        self.scheduling, self.workloads, self.now_s = FluxScheduling(), {}, 1000.0
        self.say("hello", resources=RESOURCES, down=down, mode=mode)
        for topic, payload in messages:
            self.say(topic, **payload)
        self.say("ready")

    def say(self, topic, **payload):
        return self.scheduling.instance.receive(topic, json.dumps(payload))

    def decide(self, inventories=None, has_agent=()):
        jobs = self.scheduling.instance.changed.take(self.now_s)
        workloads = {
            key: one
            for key, one in self.workloads.items()
            if jobs is None or find_job_number(key.partition(".")[0]) in jobs
        }
        found = self.scheduling.decide(
            workloads, inventories or {}, has_agent=frozenset(has_agent), now_s=self.now_s, jobs=jobs
        )
        return [one for one in found if not isinstance(one, RegisterNode | ReportUsage)]

    def keep(self, request, *nodes, phase=WorkloadPhase.PENDING, gpus=(), promise=None, reason=""):
        places = tuple(
            Placement(replica=at, node_name=name, gpu_uuids=tuple(map(str, gpus)), gpu_indexes=gpus)
            for at, name in enumerate(nodes)
        )
        self.workloads[request.workload_id] = Workload(
            workload_id=request.workload_id, spec=request.spec, placements=places, promise=promise, reason=reason,
            phase=WorkloadPhase.PLACED if nodes else phase,
        )  # fmt: skip
        self.scheduling.instance.changed.add(find_job_number(request.workload_id.partition(".")[0]))

    def ask(self, number=1, priority=16, **asked):
        return self.say("alloc", **build_request(number, priority, **asked))


def build_request(number, priority=16, **asked):
    return {"id": number, "priority": priority, "user": "ann", "t_submit": 1.0, "jobspec": build_jobspec(**asked)}


def run(number, found):
    return "running", {"id": number, "priority": 16, "user": "ann", "t_submit": 1.0, "R": found}


def test_the_example_of_rfc_20_is_read_and_written_again():
    found = parse_resource_set(json.dumps(EXAMPLE))
    assert found.count() == (4 * 48, 4 * 8)
    assert [one.hostname for one in found.ranks.values()] == ["node186", "node187", "node188", "node189"]
    assert found.properties["amd-mi50@gpu"] == {21, 22}
    assert parse_resource_set(format_resource_set(found)) == found
    assert describe_resource_set(format_resource_set(found)) == "rank[19-22]/core[0-47],gpu[0-7]"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 2}, "R.version"),
        ({"execution": None}, "R.execution"),
        ({"execution": EXAMPLE["execution"] | {"R_lite": "0"}}, "R_lite"),
        ({"execution": EXAMPLE["execution"] | {"nodelist": ["a"]}}, "nodelist names 1 hosts, and R_lite 4 ranks"),
        ({"execution": EXAMPLE["execution"] | {"properties": {"a|b": "0"}}}, "RFC 20 forbids"),
        ({"execution": EXAMPLE["execution"] | {"expiration": -1}}, "expiration"),
        ({"execution": EXAMPLE["execution"] | {"R_lite": [{"rank": "0-9999999999", "children": {}}]}}, "R_lite.rank"),
        ({"execution": EXAMPLE["execution"] | {"R_lite": [{"rank": "3-1", "children": {}}]}}, "R_lite.rank"),
    ],
)
def test_an_r_that_is_none_is_refused_with_the_field(change, field):
    with pytest.raises(FluxUnreadable, match=field):
        parse_resource_set(EXAMPLE | change)


def test_idsets_hostlists_and_job_ids_are_those_of_their_rfcs():
    assert parse_idset("[1-3,5-6,42]") == {1, 2, 3, 5, 6, 42}
    assert parse_idset("") == frozenset()
    assert parse_hostlist(["foo[08-10]", "bar"]) == ("foo08", "foo09", "foo10", "bar")
    # 6731191091817518 of RFC 19 in base 58.
    assert format_job_id(6731191091817518) == "fuZZybuNNy"
    assert [parse_job_id(format_job_id(number)) for number in (0, 57, 58, 2**64 - 1)] == [0, 57, 58, 2**64 - 1]
    for wrong in ("", "f", "uZZ", "f0", "f" + "1" * 12):
        with pytest.raises(FluxUnreadable, match="no job id"):
            parse_job_id(wrong)
    for wrong in ("01", "1,", "a", "-1", "1-", None, "1 2"):
        with pytest.raises(FluxUnreadable):
            parse_idset(wrong)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"nodes": 4, "slots": 1, "cores": 2}, (4, (2, 0), 4)),
        ({"nodes": 4, "slots": 2}, (4, (2, 0), 8)),
        ({"slots": 10, "cores": 2}, (10, (2, 0), 10)),
        ({"slots": 10, "cores": 2, "gpus": 1}, (10, (2, 1), 10)),
        ({"nodes": 4, "slots": 4, "cores": 1, "gpus": 1}, (4, (4, 4), 16)),
    ],
)
def test_the_use_cases_of_rfc_25_are_parts_with_a_shape(asked, expected):
    found = parse_jobspec(build_jobspec(**asked))
    assert (found.replicas, found.shape, found.slot_count) == expected


def test_counts_that_are_ranges_are_taken_at_their_least():
    spec = build_jobspec(nodes=1)
    for count in ({"min": 2, "max": 8, "operator": "*", "operand": 2}, "2-8", "2+", "2-8:2:*"):
        spec["resources"][0]["count"] = count
        assert parse_jobspec(spec).nodes == 2


def test_a_jobspec_that_cannot_be_placed_is_denied_with_the_reason():
    odd = build_jobspec(slots=2)
    odd["resources"][0]["with"].append({"type": "ssd", "count": 1})
    cases = [
        (odd, "'ssd'"), ({"version": 1}, "resources"), (build_jobspec(slots=0), "count of slot"),
        (build_jobspec(constraints={"gpu-type": ["x"]}), "'gpu-type'"), (build_jobspec(nodes=5), "needs 5 nodes"),
        (build_jobspec(constraints={"properties": ["nowhere"]}), "no rank matches"), (build_jobspec(slots=33), "32 fit"),
    ]  # fmt: skip
    one = Instance()
    for number, (jobspec, reason) in enumerate(cases):
        (reply,) = one.say("alloc", id=number, jobspec=jobspec)
        assert reply.payload["type"] == 2
        assert reason in reply.payload["note"]
    assert one.decide() == []
    assert one.scheduling.instance.counts.denied == len(cases)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"properties": ["ssd"]}, {0, 1}),
        ({"properties": ["^ssd"]}, {2, 3}),
        ({"properties": ["ssd", "h100@gpu"]}, set()),
        ({"not": [{"properties": ["ssd"]}]}, {2, 3}),
        ({"or": [{"properties": ["ssd"]}, {"ranks": ["3"]}]}, {0, 1, 3}),
        ({"and": [{"hostlist": ["n[0-2]"]}, {"not": [{"hostlist": ["n1"]}]}]}, {0, 2}),
        ({"or": []}, {0, 1, 2, 3}),
        ({"and": []}, {0, 1, 2, 3}),
        ({"not": []}, set()),
        ({"ranks": ["0-1", "3"]}, {0, 1, 3}),
        ({"ranks": ["[0-1048575]"]}, {0, 1, 2, 3}),
        ({"not": [{"ranks": ["2-4000", "7"]}]}, {0, 1}),
    ],
)
def test_constraints_match_as_rfc_31_says(constraint, expected):
    assert match_ranks(constraint, POOL) == expected


def test_a_constraint_costs_no_more_for_long_or_repeated_ranges():
    begun_s = time.process_time()
    for ranks in (["0-1000000"] * 1000, [",".join(["0-500000"] * 1000)]):
        assert match_ranks({"ranks": ranks}, POOL) == {0, 1, 2, 3}
    assert time.process_time() - begun_s < 5.0
    with pytest.raises(FluxUnreadable, match="more than"):
        parse_idset(",".join(["0-500000"] * 1000))


def test_a_constraint_may_be_given_as_text():
    one = Instance()
    assert one.ask(constraints='{"properties": ["ssd"]}') == []
    (found,) = one.decide()
    assert "flux/property/ssd" in found.request.spec.required_traits
    (reply,) = one.ask(2, constraints="ssd")
    assert "constraints" in reply.payload["note"]


def test_feasibility_is_answered_by_what_there_is_not_by_what_is_free():
    one = Instance(run(1, build_r(0, 1, 2, 3, cores="0-7", gpus="0-3")), down="3")
    for asked, errnum in (({"nodes": 4, "cores": 8}, 0), ({"nodes": 4, "cores": 9}, 75), ({"slots": 0}, 22)):
        (reply,) = one.say("feasibility", call=7, jobspec=build_jobspec(**asked))
        assert (reply.topic, reply.payload["call"], reply.payload["errnum"]) == ("feasibility", 7, errnum)
    assert find_infeasibility(parse_jobspec(build_jobspec(nodes=4, exclusive=True)), POOL) == ""


def test_a_waiting_job_is_submitted_with_its_properties_as_traits_and_answered_when_it_is_placed():
    one = Instance()
    assert one.ask(nodes=1, slots=2, cores=2, gpus=1, duration=60, constraints={"properties": ["ssd"]}) == []
    (submit,) = one.decide()
    spec = submit.request.spec
    assert (spec.user, spec.priority, spec.replicas, spec.expected_runtime_s) == ("ann", 16, 1, 60.0)
    assert (spec.request.cpu_milli, spec.request.gpu_count) == (4000, 2)
    assert spec.required_traits == ("flux/instance", "flux/property/ssd")
    one.keep(submit.request)
    assert one.decide() == []
    one.keep(submit.request, "n1", gpus=(1, 3))
    (reply,) = one.decide()
    made = parse_resource_set(reply.payload["R"])
    assert (made.ranks[1].cores, made.ranks[1].gpus) == ({0, 1, 2, 3}, {1, 3})
    assert (made.starttime, made.expiration, made.nslots) == (1000.0, 1060.0, 2)
    assert one.decide() == []


@pytest.mark.parametrize("duration", [0, 0.5, 600, 3e9, 1e19])
def test_a_job_of_any_duration_is_submitted_as_the_core_takes_it(duration):
    one = Instance()
    one.ask(duration=duration)
    (found,) = one.decide()
    check_message(found.request)
    assert found.request.spec.expected_runtime_s == (min(duration, 3e8) if duration >= 1 else None)


def test_a_forecast_and_a_reason_are_told_once_and_cleared():
    one = Instance()
    one.ask()
    (submit,) = one.decide()
    one.keep(submit.request, promise=StartPromise(start_ns=2_000_000_000_000), reason="no room")
    # A job that starts at once needs no word.
    assert one.decide() == []
    one.now_s += 1.0
    (reply,) = one.decide()
    assert reply.payload["annotations"] == {"sched": {"t_estimate": 2000.0, "reason_pending": "no room"}}
    one.keep(submit.request, promise=StartPromise(start_ns=3_000_000_000_000), reason="no room")
    assert one.decide() == []
    one.now_s += 1.0
    (reply,) = one.decide()
    assert reply.payload["annotations"]["sched"]["t_estimate"] == 3000.0
    one.now_s += 1.0
    assert one.decide() == []
    one.keep(submit.request, "n0")
    (reply,) = one.decide()
    sched = reply.payload["annotations"]["sched"]
    assert (sched["t_estimate"], sched["reason_pending"], sched["resource_summary"]) == (None, None, "rank0/core0")


def test_a_place_that_is_not_free_is_decided_anew_with_a_pause():
    one = Instance(run(1, build_r(0, gpus="0")))
    one.keep(one.decide()[0].request, "n0", gpus=(0,))
    one.ask(2, nodes=1, gpus=1)
    (submit,) = one.decide()
    one.keep(submit.request, "n0", gpus=(0,))
    (end,) = one.decide()
    assert isinstance(end, FluxEnd)
    one.keep(submit.request, phase=WorkloadPhase.CANCELLED)
    assert one.decide() == []
    one.now_s += 1.0
    (again,) = one.decide()
    assert again.request.workload_id == submit.request.workload_id + ".1"


def test_a_rank_that_went_down_is_not_given():
    one = Instance()
    one.ask(nodes=1)
    (submit,) = one.decide()
    one.say("resources", resources=RESOURCES, down="0")
    one.keep(submit.request, "n0")
    assert [type(found) for found in one.decide()] == [FluxEnd]


def test_housekeeping_that_frees_ranks_one_by_one_frees_them_in_the_core():
    one = Instance(run(1, build_r(0, 1, 2, cores="0-1", gpus="0")))
    (adopt,) = one.decide()
    one.keep(adopt.request, "n0", "n1", "n2", gpus=(0,))
    one.say("free", id=1, R=build_r(1, cores="0-1", gpus="0"), final=False)
    (less,) = one.decide()
    assert (less.adoption.released, less.adoption.first, less.adoption.standing) == ((1,), 3, ())
    one.say("free", id=1, R=build_r(0, 2, cores="0-1", gpus="0"), final=True)
    assert [type(found) for found in one.decide()] == [FluxEnd]


def test_the_last_free_frees_all_also_what_it_does_not_name():
    one = Instance(run(1, build_r(0, 1, cores="0-1")))
    one.say("free", id=1, R=build_r(0, cores="0"), final=True)
    allocations = one.scheduling.instance.view.allocations
    assert [allocations.get_free(rank) for rank in (0, 1)] == [POOL.ranks[0], POOL.ranks[1]]
    assert one.scheduling.instance.view.running == {}


def test_rules_name_the_ranks_that_match_are_up_and_are_not_the_same_twice():
    one = Instance(down="3")
    one.ask(nodes=2, constraints={"not": [{"ranks": ["0"]}]})
    (submit,) = one.decide()
    key, rules = submit.request.workload_id, FluxEligibility(one.scheduling)
    assert rules.has_rules_for(key)
    assert rules.list_eligible_nodes(key, {}, {}) == {"n1", "n2"}
    assert rules.list_eligible_nodes(key, {0: "n1"}, {}) == {"n2"}
    assert rules.list_equivalent_nodes(key, "n1") == {"n1"}
    assert not rules.has_rules_for("w-1")


def test_hello_after_a_restart_adopts_what_runs_exactly_and_keeps_what_is_known():
    one = Instance(run(1, build_r(0, 1, cores="0-3", gpus="1-2")))
    (adopt,) = one.decide()
    assert isinstance(adopt, FluxAdopt)
    assert [(place.node_name, place.gpu_indexes, place.is_exact) for place in adopt.adoption.standing] == [
        ("n0", (1, 2), True),
        ("n1", (1, 2), True),
    ]
    again = Instance(run(1, build_r(0, 1, cores="0-3", gpus="1-2")))
    again.keep(adopt.request, "n0", "n1", gpus=(1, 2))
    assert again.decide() == []
    again.keep(adopt.request, "n2", "n3", gpus=(1, 2))
    assert [type(found) for found in again.decide()] == [FluxEnd]


def test_a_place_against_the_constraints_is_decided_anew():
    for asked, nodes in (
        ({"nodes": 2}, ("n1", "n1")),
        ({"nodes": 1, "constraints": {"not": [{"ranks": ["0"]}]}}, ("n0",)),
    ):
        one = Instance()
        one.ask(**asked)
        (submit,) = one.decide()
        assert one.scheduling.has_rules() == FluxEligibility(one.scheduling).has_rules_for(submit.request.workload_id)
        # As a core decides that has begun before the module has said what waits.
        one.keep(submit.request, *nodes)
        assert [type(found) for found in one.decide()] == [FluxEnd]


def test_rules_are_there_while_a_job_that_has_some_waits():
    one = Instance()
    assert not one.scheduling.has_rules()
    one.ask(1)
    one.decide()
    assert not one.scheduling.has_rules()
    one.ask(2, nodes=2)
    one.decide()
    assert one.scheduling.has_rules()
    one.say("cancel", id=2)
    assert not one.scheduling.has_rules()


def test_a_look_at_what_has_changed_finds_it_and_too_many_changes_are_a_look_at_all():
    one = Instance()
    one.decide()
    changed = one.scheduling.instance.changed
    assert changed.take(one.now_s) == frozenset()
    one.ask(7)
    assert changed.take(one.now_s) == {7}
    changed.add_later(8, 1001.0)
    changed.add_later(8, 1002.0)
    assert [changed.take(now_s) for now_s in (1000.5, 1001.0, 1003.0)] == [frozenset(), {8}, frozenset()]
    for number in range(10_001):
        changed.add(number)
    assert changed.take(one.now_s) is None
    one.say("ready")
    assert changed.take(one.now_s) == frozenset()
    one.say("resources", resources=RESOURCES, down="3")
    assert changed.take(one.now_s) is None


def test_several_messages_come_as_one_and_one_bad_one_is_left_out():
    one = Instance(run(1, build_r(0)))
    messages = [StreamMessage("free", encode_payload({"id": 1, "R": build_r(0), "final": True}))]
    messages += [StreamMessage("alloc", encode_payload(build_request(number))) for number in (2, 3)]
    (batch,) = pack_messages(messages)
    assert one.scheduling.instance.receive(*batch) == []
    assert (list(one.scheduling.instance.view.waiting), one.scheduling.instance.view.running) == ([2, 3], {})
    one.scheduling.instance.receive("batch", '[["cancel",{"id":2}],["cancel"],7,["cancel",{"id":3}]]')
    for wrong in ("{}", "[", "7"):
        one.scheduling.instance.receive("batch", wrong)
    assert (one.scheduling.instance.view.waiting, one.scheduling.instance.counts.unreadable) == ({}, 2 + 3)


def test_a_batch_is_not_longer_than_a_message_may_be_and_one_message_is_none():
    messages = [StreamMessage("alloc", encode_payload({"id": number, "note": "x" * 40})) for number in range(10)]
    packed = list(pack_messages(messages, most=200))
    assert all(topic == "batch" and len(text) <= 200 for topic, text in packed)
    assert [one for _, text in packed for one in unpack_messages(text)] == [
        (topic, json.loads(text)) for topic, text in messages
    ]
    assert list(pack_messages(messages[:1], most=10)) == messages[:1]


def test_nothing_is_decided_before_all_is_said_and_while_the_module_is_away():
    one = Instance()
    one.ask()
    one.scheduling.instance.end_session()
    assert one.decide() == []
    one.say("hello", resources=RESOURCES, down="")
    one.say("alloc", id=1, jobspec=build_jobspec())
    assert one.decide() == []
    one.say("ready")
    assert [type(found) for found in one.decide()] == [FluxSubmit]


def test_ranks_that_hold_different_amounts_are_split_into_equal_parts_or_left_as_external_usage():
    found = parse_resource_set(
        {"version": 1, "execution": {"nodelist": ["n0", "n1"], "R_lite": [
            {"rank": "0", "children": {"core": "0-3", "gpu": "0-1"}}, {"rank": "1", "children": {"core": "0-5", "gpu": "0-2"}},
        ]}}
    )  # fmt: skip
    assert split_equally(found) == ((2, 1), {0: 2, 1: 3})
    odd = build_r(0, cores="0-3", gpus="0")
    odd["execution"]["R_lite"].append({"rank": "1", "children": {"core": "0", "gpu": "0-1"}})
    odd["execution"]["nodelist"].append("n1")
    one = Instance(run(1, odd))
    found = one.scheduling.decide({}, {}, has_agent=frozenset(), now_s=1.0)
    assert not [one for one in found if isinstance(one, FluxAdopt)]
    usage = {one.node_name: one.others for one in found if isinstance(one, ReportUsage)}
    assert (usage["n0"].cpu_milli, usage["n0"].gpu_indexes, usage["n1"].gpu_indexes) == (4000, (0,), (0, 1))


def test_what_an_agent_finds_beyond_flux_is_not_given_and_what_it_knows_is_a_property():
    inventory = Inventory(node_name="n2", cpu_milli=64_000, memory_bytes=0, topology=("hall", "r7"), pool="big")
    one = Instance()
    found = one.scheduling.decide({}, {"n2": inventory}, has_agent=frozenset(["n2"]), now_s=1.0)
    (report,) = [one for one in found if isinstance(one, ReportUsage) and one.node_name == "n2"]
    assert report.others.cpu_milli == 64_000 - 8_000
    assert {"flux/property/eelgrid.rack=r7", "flux/property/eelgrid.pool=big"} <= set(report.others.traits)
    assert one.ask(constraints={"properties": ["eelgrid.rack=r7"]}) == []


def test_what_an_operator_ends_is_denied_or_cancelled_once():
    one = Instance(run(1, build_r(0)))
    (adopt,) = one.decide()
    one.keep(adopt.request, "n0")
    one.ask(2)
    (submit,) = one.decide()
    one.keep(submit.request)
    one.decide()
    one.keep(adopt.request, phase=WorkloadPhase.CANCELLED)
    one.keep(submit.request, phase=WorkloadPhase.CANCELLED)
    raised, denied = one.decide()
    assert raised == FluxReply("raise", {"id": 1, "note": "cancelled in Eelgrid"})
    assert (denied.payload["id"], denied.payload["type"]) == (2, 2)
    assert one.decide() == []


def test_messages_that_cannot_be_read_are_left_out_and_counted():
    one = Instance(run(1, build_r(0)), run(2, build_r(0)), run(3, {"version": 9}), run(4, build_r(9)))
    instance = one.scheduling.instance
    for text in ("", "[]", "{", '{"id": -1}', '{"id": 1, "R": 3}'):
        assert instance.receive("free", text) == []
    assert instance.receive("what", "{}") == []
    assert instance.counts.unreadable == 3 + 6
    assert list(instance.view.running) == [1]


def test_one_engine_only_says_what_runs_on_the_nodes():
    done = CliRunner().invoke(main, ["--slurm", "--flux"])
    assert (done.exit_code, "--slurm and --flux exclude each other" in done.output) == (2, True)


def event(name, time_s, **context):
    return {"timestamp": time_s, "name": name, "context": context}


def test_the_journal_gives_spans_of_each_rank_until_its_release():
    journal = FluxJournal()
    found = build_r(0, 1, cores="0-3", gpus="0-1")
    events = [event("submit", 10.0, userid=1001, urgency=16, flags=0, version=1), event("validate", 10.1)]
    journal.apply({"id": 5, "events": events, "user": "ann"})
    (change,) = journal.apply({"id": 5, "events": [event("alloc", 14.0), event("start", 15.0)], "R": found})
    assert change.resources == parse_resource_set(found)
    journal.apply({"id": 5, "events": [event("finish", 60.0, status=256)]})
    (part,) = journal.apply({"id": 5, "events": [event("release", 70.0, ranks="1", final=False)]})
    assert set(part.resources.ranks) == {0}
    (last,) = journal.apply({"id": 5, "events": [event("free", 80.0), event("clean", 80.1)]})
    assert last.resources is None
    assert [(one.hostname, one.begin_s, one.end_s, one.user) for one in journal.list_spans()] == [
        ("n0", 14.0, 80.0, "ann"),
        ("n1", 14.0, 70.0, "ann"),
    ]
    assert [one.hostname for one in journal.list_spans(75.0, 90.0)] == ["n0"]
    assert journal.list_spans(80.0) == journal.list_spans(0.0, 14.0) == []
    assert journal.jobs[5].wait_s == 4.0


def test_a_journal_that_is_told_again_changes_nothing_and_bad_events_are_counted():
    journal = FluxJournal()
    past = {
        "id": 5,
        "events": [event("submit", 1.0, userid=1), event("alloc", 2.0), event("free", 3.0)],
        "R": build_r(0),
    }
    journal.apply(past)
    before = journal.list_spans()
    assert journal.apply(past) == []
    assert journal.list_spans() == before
    for wrong in ({}, {"id": "x", "events": []}, {"id": 6, "events": [7, event("alloc", 1.0), {"timestamp": "x"}]}):
        journal.apply(wrong)
    assert journal.unreadable == 2 + 3


@pytest.mark.parametrize(
    ("status", "exceptions", "end"),
    [
        (0, (), (0, 0, "")),
        (3 << 8, (), (3, 0, "")),
        (9, (), (None, 9, "")),
        (15, ({"type": "timeout", "severity": 0},), (None, 15, "timeout in Flux")),
        (0, ({"type": "note", "severity": 7},), (0, 0, "")),
    ],
)
def test_a_job_ends_in_the_core_as_its_events_say_and_the_last_of_them_is_waited_for(status, exceptions, end):
    one = Instance(run(5, build_r(0)))
    one.say(
        "event", id=5, events=[event("submit", 1.0, userid=1), event("alloc", 2.0), event("start", 3.0)], R=build_r(0)
    )
    one.keep(one.decide()[0].request, "n0")
    one.say("free", id=5, R=build_r(0), final=True)
    assert one.decide() == []
    more = [event("exception", 8.0, **context) for context in exceptions]
    one.say("event", id=5, events=[*more, event("finish", 9.0, status=status)])
    (found,) = one.decide()
    assert (found.status.exit_code, found.status.signal, found.status.reason) == end
    assert (found.status.started_ns, found.status.ended_ns) == (3 * 10**9, 9 * 10**9)


def test_a_job_that_was_cancelled_or_whose_end_nobody_tells_is_just_over():
    for events in ([event("exception", 8.0, type="cancel", severity=0), event("finish", 9.0, status=15)], []):
        one = Instance(run(5, build_r(0)))
        one.say("event", id=5, events=[event("submit", 1.0, userid=1), event("alloc", 2.0)], R=build_r(0))
        one.keep(one.decide()[0].request, "n0")
        one.say("free", id=5, R=build_r(0), final=True)
        one.say("event", id=5, events=events)
        if not events:
            assert one.decide() == []
            one.now_s += 1.0
        assert [type(found) for found in one.decide()] == [FluxEnd]


def test_an_observed_instance_is_followed_by_its_journal_alone():
    one = Instance(mode="observe")
    one.say(
        "event", id=5, user="ann", events=[event("submit", 1.0, userid=1), event("alloc", 2.0)], R=build_r(3, gpus="2")
    )
    (adopt,) = one.decide()
    assert [(place.node_name, place.gpu_indexes) for place in adopt.adoption.standing] == [("n3", (2,))]
    assert adopt.request.spec.user == "ann"
    one.keep(adopt.request, "n3", gpus=(2,))
    one.say("event", id=5, events=[event("free", 9.0)])
    assert [type(found) for found in one.decide()] == [FluxEnd]
