"""Decisions as files: every one replays to the last bit, and a changed input shows."""

import contextlib
import json
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request
from tests.builders.server import run_controller
from tests.fakes.operators import FakeOperators
from tests.fakes.terminal import terminal

from eelgrid_controller.cli.__main__ import cli
from eelgrid_controller.core.recovery import encode_entries
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory, digest_of
from eelgrid_controller.whatif.decision_record import DecisionUnreadable, record_decision, replay_decision
from eelgrid_protos import catalogue
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    DeviceLease,
    ExportDecisionRequest,
    GpuSharing,
    Interference,
    Mobility,
    Policy,
    PreemptionWithin,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
    TrainingPromise,
    Weights,
    WorkloadKind,
    WorkloadPhase,
)


class Recorder:
    """A core and the journal that its events would make."""

    def __init__(self, *inventories):
        self.core = build_core()
        self.entries: list[tuple[int, JournalEntry]] = []
        self.checkpoint: Checkpoint | None = None
        for item in inventories:
            self.do(self.core.register_node, item)

    def do(self, call, *arguments):
        step = call(*arguments, now_ns=len(self.entries) + 1)
        first = len(self.entries) + (self.checkpoint.seq if self.checkpoint else 0) + 1
        self.entries.extend(enumerate(encode_entries(step.events), first))
        return step.result

    def compact(self):
        plain = json.loads(json.dumps(self.core.state.dump()))
        self.checkpoint = Checkpoint(self.core.state.revision, plain, digest_of(plain))
        self.entries.clear()

    def exported(self, key):
        spec = self.core.workload(key).spec
        document = record_decision(
            JournalHistory(self.checkpoint, tuple(self.entries)), spec, key, catalogue.load_catalogue()
        )
        return json.loads(json.dumps(document))


def busy():
    rig = Recorder(build_node("a", model="G3"), build_node("b", model="T4"), build_node("c", gpus=4))
    for key, gpus, milli in (("one", 1, 500), ("two", 2, 1000), ("three", 1, 700), ("four", 1, 300)):
        rig.do(
            rig.core.submit,
            build_request(gpus=gpus, milli=milli, cpu=4, key=key, name="secret", user="ann", labels={"who": "ann"}),
        )
    return rig


def test_every_decision_replays_to_the_last_bit():
    rig = busy()
    for key in ("one", "two", "three", "four"):
        document = rig.exported(key)
        found = replay_decision(document)
        assert found.differences == ()
        assert found.now == document["outcome"]
        placed = rig.core.workload(key).placements
        assert [plain["node_name"] for plain in found.now["placements"]] == [at.node_name for at in placed]


def test_the_file_names_nobody():
    """Who asks others about a decision sends it to them: no names, commands, tokens, loads and reasons of cordons."""
    told = build_node("d", gpus=2, labels={"room": "ann-1"}, model_data=("secret-model",))
    first, second = told.gpus
    lease = DeviceLease(device_uuid=second.uuid, engine="slurm", owner="job of ann", unknown="secret cause")
    rig = busy()
    rig.do(
        rig.core.register_node,
        replace(told, gpus=(replace(first, cordon="held by ann"), replace(second, leases=(lease,)))),
    )
    rig.do(rig.core.update_external_usage, "d", ExternalUsage(traits=("secret-trait",), closed="ann closed it"))
    rig.do(partial(rig.core.cordon_node, reason="secret fan", user="ann"), "c")
    process = ProcessSpec(argv=("secret-command",), working_directory="/home/ann", environment={"TOKEN": "secret"})
    job = {"process": process, "kind": WorkloadKind.TRAINING_JOB, "mobility": Mobility.FIXED}
    training = TrainingPromise(profile="secret-model", slowdown_most=1.2)
    rig.do(rig.core.submit, build_request(key="ann-5", queue="", training=training, **job))
    sharing = GpuSharing(load="secret-load", slowdown_most=0.3)
    rig.do(rig.core.submit, build_request(milli=200, key="six", user="ann", gpu_sharing=sharing, **job))
    rig.do(rig.core.submit, build_request(milli=200, key="seven", user="ann", gpu_sharing=sharing))
    for key in ("four", "six", "seven"):
        document = rig.exported(key)
        text = json.dumps(document)
        assert [word for word in ("ann", "secret", "TOKEN", '"one"', "room") if word in text] == []
        assert replay_decision(document).differences == ()


def test_one_weight_changed_in_the_file_shows():
    document = busy().exported("four")
    document["weights"]["fragmentation_w"] += 1.0
    found = replay_decision(document)
    assert any("fragmentation" in line for line in found.differences)
    document = busy().exported("one")
    document["weights"] = {"power": 0.0, "fragmentation_w": 0.0, "stranding_w": 0.0}
    assert any(line.startswith("replica 0: b GPU 0 -> a GPU 0") for line in replay_decision(document).differences)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda document: [row.__setitem__(6, 500.0) for row in document["watts"]], "power 165.0 -> "),
        (
            lambda document: document["cluster"]["nodes"][1].__setitem__("state", "lost"),
            "replica 0: b GPU 0 -> c GPU 0",
        ),
        (lambda document: document["spec"]["request"].__setitem__("cpu_milli", 97_000), "outcome: placed -> cpu"),
    ],
)
def test_every_other_input_counts_too(change, said):
    document = busy().exported("one")
    assert document["outcome"]["placements"][0]["node_name"] == "b"
    change(document)
    differences = replay_decision(document).differences
    assert any(said in line for line in differences), differences


def test_the_mix_counts_too():
    rig = busy()
    weights = Weights(power=1.0, fragmentation_w=80.0, stranding_w=200.0)
    rig.do(rig.core.update_policy, Policy(objective="custom", weights=weights))
    rig.do(rig.core.submit, build_request(gpus=1, milli=300, cpu=4, key="five"))
    document = rig.exported("five")
    document["cluster"]["demand"]["mix"].clear()
    assert any("fragmentation" in line for line in replay_decision(document).differences)


def test_what_waits_has_a_decision_too():
    rig = busy()
    rig.do(rig.core.submit, build_request(gpus=4, key="large"))
    assert rig.core.workload("large").reason.startswith("gpu_count")
    document = rig.exported("large")
    assert (replay_decision(document).differences, document["outcome"]["placements"]) == ((), [])
    rig.do(rig.core.cancel, "two")
    rig.do(rig.core.cancel, "three")
    assert rig.core.workload("large").placements
    document = rig.exported("large")
    assert replay_decision(document).differences == ()
    assert document["outcome"]["placements"][0]["node_name"] == "c"


def test_a_decision_older_than_the_journal_is_refused():
    rig = busy()
    rig.compact()
    with pytest.raises(FailedPrecondition, match="reaches back to entry 16"):
        rig.exported("four")
    rig.do(rig.core.submit, build_request(gpus=1, key="new"))
    assert replay_decision(rig.exported("new")).differences == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("submit"), st.integers(1, 40), st.sampled_from((0, 250, 500, 1000, 2000)), st.integers(1, 3)
            ),
            st.tuples(st.just("cancel"), st.integers(0, 30)),
            st.tuples(st.just("lose"), st.sampled_from("abc")),
            st.tuples(st.just("join"), st.sampled_from("abcd")),
            st.tuples(st.just("compact")),
        ),
        max_size=30,
    )
)
def test_decisions_of_random_histories_replay(history):
    rig = Recorder(build_node("a"), build_node("b", model="T4"))
    recent: dict[str, None] = {}
    for step in history:
        match step:
            case ("submit", cpu, milli, replicas):
                key = f"k{len(rig.core.state.workloads)}"
                gpus = 2 if milli == 2000 else int(milli > 0)
                found = build_request(cpu=cpu, gpus=gpus, milli=min(milli, 1000), key=key, replicas=replicas)
                with contextlib.suppress(InvalidArgument):
                    rig.do(rig.core.submit, found)
                    recent[key] = None
            case ("cancel", number) if number < len(rig.core.state.workloads):
                rig.do(rig.core.cancel, list(rig.core.state.workloads)[number])
            case ("lose", name) if name in rig.core.state.nodes:
                rig.do(rig.core.mark_node_lost, name)
            case ("join", name):
                rig.do(rig.core.register_node, build_node(name, model="G3" if name == "d" else "G2"))
            case ("compact",):
                rig.compact()
                recent.clear()
    for key in recent:
        document = rig.exported(key)
        if document["outcome"]["placements"]:
            assert replay_decision(document).differences == ()


PROCESS = {"process": ProcessSpec(argv=("train",), working_directory="/"), "mobility": Mobility.FIXED}


def preempting(chance):
    """A small cluster whose queue stops work for work of higher priority."""
    shapes = [(chance.choice((1, 2, 4)), chance.choice(("T4", "G2"))) for _ in range(chance.randint(2, 4))]
    nodes = [
        build_node(f"n{number}", gpus=gpus, model=model, runs_processes=True)
        for number, (gpus, model) in enumerate(shapes)
    ]
    rig = Recorder(*nodes)
    within = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY)
    quota = QueueQuota(resource="gpu", nominal=chance.randint(2, 12) * 1000)
    queue = Queue(name="default", quotas=(quota,), preemption=within)
    rig.do(rig.core.update_policy, replace(rig.core.state.policy, queues=(queue,)))
    return rig


def replayed(rig, key):
    """What a decision differs in when it is replayed, or None and why it has no file."""
    try:
        document = rig.exported(key)
    except FailedPrecondition as refused:
        return None, refused.message
    return replay_decision(document).differences, ""


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_decisions_beside_work_that_makes_room_replay_or_say_why_not(chance):
    rig = preempting(chance)
    for number in range(20):
        key, gpus = f"k{number}", chance.choice((0, 1, 1, 2, 4))
        milli = chance.choice((300, 500, 1000)) if gpus == 1 else 1000 * (gpus > 0)
        request = build_request(
            key, gpus=gpus, milli=milli, cpu=chance.choice((1, 40)), priority=chance.choice((0, 0, 5, 9)),
            replicas=chance.choice((1, 1, 2)), expected_runtime_s=chance.choice((None, 60.0)), **PROCESS,
        )  # fmt: skip
        with contextlib.suppress(InvalidArgument):
            rig.do(rig.core.submit, request)
        if number % 4 == 3:
            with contextlib.suppress(NotFound):
                rig.do(rig.core.cancel, f"k{chance.randrange(number)}")
        if key in rig.core.state.workloads and rig.core.workload(key).phase is WorkloadPhase.PLACED:
            differences, refused = replayed(rig, key)
            assert differences == () or "make room" in refused or "beside work that waits" in refused


def begin_making_room():
    """A node with work that is stopped for other work, which needs most of its CPU, too; and one that is like it."""
    rig = Recorder(build_node("a", gpus=2, runs_processes=True), build_node("b", gpus=2, runs_processes=True))
    within = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY)
    queue = Queue(name="default", quotas=(QueueQuota(resource="gpu", nominal=4000),), preemption=within)
    rig.do(rig.core.update_policy, replace(rig.core.state.policy, queues=(queue,)))
    rig.do(rig.core.submit, build_request("low", gpus=2, **PROCESS))
    rig.do(rig.core.submit, build_request("other", gpus=2, priority=9, **PROCESS))
    rig.do(rig.core.submit, build_request("high", gpus=2, cpu=90, priority=5, **PROCESS))
    (place,) = rig.core.state.nominations.get("high").placements
    assert place.node_name == "a"
    return rig


def test_what_is_kept_for_work_for_which_others_make_room_is_kept_in_the_file():
    rig = begin_making_room()
    rig.do(rig.core.submit, build_request("small", gpus=0, cpu=50, priority=9))
    document = rig.exported("small")
    assert replay_decision(document).differences == ()
    kept = next(one for one in document["cluster"]["workloads"] if one["spec"]["request"]["cpu_milli"] == 89_000)
    document["cluster"]["workloads"].remove(kept)
    assert replay_decision(document).differences[0] == "replica 0: b -> a"


def test_a_start_for_which_others_made_room_has_no_file():
    rig = begin_making_room()
    status = AttemptStatus(
        workload_id="low", attempt=1, replica=0, state=AttemptState.ENDED, started_ns=1, ended_ns=5, signal=15
    )
    rig.do(rig.core.record_attempts, "a", (status,))
    assert rig.core.workload("high").phase is WorkloadPhase.PLACED
    with pytest.raises(FailedPrecondition, match=r"began to make room for it.*eelctl explain"):
        rig.exported("high")


LOADS = ("train", "serve", "eval", "")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from((*LOADS[:2], "*")), st.sampled_from((*LOADS[:2], "*"))),
        st.sampled_from((0.0, 0.1, 0.15, 0.7)),
        max_size=6,
    ),
    st.none() | st.sampled_from((0.1, 0.3)),
    st.lists(
        st.tuples(
            st.sampled_from(LOADS),
            st.none() | st.sampled_from((0.0, 0.1, 0.3, 1.0)),
            st.sampled_from((90, 100, 200, 340, 1000)),
            st.integers(1, 3),
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_decisions_within_limits_on_interference_replay(pairs, default_most, works):
    rig = Recorder(build_node("a", gpus=2), build_node("b", model="T4"), build_node("c", gpus=1, model="G3"))
    told = tuple(
        Interference(load=load, beside=beside, slowdown=slowdown) for (load, beside), slowdown in pairs.items()
    )
    policy = replace(rig.core.state.policy, interference=told, shared_slowdown_most=default_most)
    rig.do(rig.core.update_policy, policy)
    for number, (load, most, milli, replicas) in enumerate(works):
        sharing = GpuSharing(load=load, slowdown_most=most) if milli < 1000 else None
        key = f"k{number}"
        rig.do(rig.core.submit, build_request(milli=milli, key=key, replicas=replicas, gpu_sharing=sharing))
        document = rig.exported(key)
        assert replay_decision(document).differences == ()
        assert not any(name in json.dumps(document) for name in LOADS if name)


def test_a_limit_changed_in_the_file_shows():
    rig = Recorder(build_node("a", gpus=1), build_node("b", gpus=1, model="G3"))
    pairs = tuple(Interference(load=load, beside=beside, slowdown=0.2) for load in "xy" for beside in "xy")
    rig.do(rig.core.update_policy, replace(rig.core.state.policy, interference=pairs))
    rig.do(rig.core.submit, build_request("first", milli=300, gpu_sharing=GpuSharing(load="x", slowdown_most=0.3)))
    rig.do(rig.core.submit, build_request("second", milli=300, gpu_sharing=GpuSharing(load="y", slowdown_most=0.1)))
    document = rig.exported("second")
    (there,) = replay_decision(document).now["placements"]
    document["spec"]["gpu_sharing"]["slowdown_most"] = 0.3
    (found, *_) = replay_decision(document).differences
    assert found.startswith(f"replica 0: {there['node_name']} GPU 0 -> ")


@pytest.mark.parametrize(
    "document",
    [[], {}, {"format": "eelgrid decision", "version": 3}, {"format": "eelgrid decision", "version": 1, "spec": 4}],
)
def test_what_is_no_decision_is_refused(document):
    with pytest.raises(DecisionUnreadable):
        replay_decision(document)


async def test_export_from_a_running_controller(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"), build_node("n2"))
        for number in range(3):
            await rig.operators.submit_workload(build_request(f"k{number}", milli=400))
        parts = [part.text async for part in rig.operators.export_decision(ExportDecisionRequest(workload_id="k1"))]
        document = json.loads("".join(parts))
        assert replay_decision(document).differences == ()
        assert document["revision"] == 8  # two nodes, then quotes, submission and place of each
        with pytest.raises(NotFound):
            async for _ in rig.operators.export_decision(ExportDecisionRequest(workload_id="k9")):
                pass


def test_the_command_says_equal_or_shows_the_difference(tmp_path):
    file = tmp_path / "one.json"
    document = busy().exported("one")
    file.write_text(json.dumps(document))
    done = CliRunner().invoke(cli, ["decision", "replay", str(file)])
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "identical to the last bit")
    document["weights"]["power"] = 0.0
    file.write_text(json.dumps(document))
    done = CliRunner().invoke(cli, ["decision", "replay", str(file), "-o", "json"])
    assert done.exit_code == 1
    plain = json.loads(done.output)
    assert plain["equal"] is False
    assert plain["differences"]
    file.write_text("[")
    done = CliRunner().invoke(cli, ["decision", "replay", str(file)])
    assert done.exit_code == 5
    assert "is not JSON" in done.stderr


def test_the_command_writes_a_file(tmp_path):
    fake = FakeOperators()
    with terminal(fake) as eelctl:
        run = eelctl.run
        assert run("submit", "--id", "job", "--name", "job", "--cpu", 1).exit_code == 0
        file = tmp_path / "job.json"
        done = run("decision", "export", "job", "--file", file)
        assert (done.exit_code, json.loads(file.read_text())) == (0, {"workload": "job"})
        assert f"eelctl decision replay {file}" in done.output
        assert json.loads(run("decision", "export", "job", "--file", "-").output) == {"workload": "job"}
        assert run("decision", "export", "nothing", "--file", file).exit_code == 4
        assert run("decision", "export", "job", "--file", tmp_path / "no" / "way").exit_code == 5
