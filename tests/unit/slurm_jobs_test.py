"""What Slurm's prolog hands to the agent: files in, holds and allocations out; nobody but root is believed."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest
from bench.fault_world import Crash
from tests.power_rig import Rig, fake, plan_of, setting, settled, simulated
from tests.waiting import poll_until

from eelgrid_agent.devices.sampler import ExtendedReadings
from eelgrid_agent.energy.allocations import DeviceReference
from eelgrid_agent.energy.node_energy import AttributionSources
from eelgrid_agent.enforce.guard.events import JobHold
from eelgrid_agent.enforce.guard.plan import Guard
from eelgrid_agent.engine.slurm_jobs import (
    JOBS_MOST,
    HandedJob,
    HandoverError,
    HandoverFolder,
    describe_planned_limits,
    parse_job,
)
from eelgrid_agent.node.inventory import map_job_holds
from eelgrid_protos.messages import ApplyStatus, Assignment, ComputeInstance, Gpu, GpuInstance, NodeEventKind

SCRIPTS = Path(__file__).parent.parent.parent / "deploy" / "slurm"
GPUS = (
    Gpu(uuid="GPU-a", index=0, product="A", model="A100"),
    Gpu(
        uuid="GPU-b",
        index=1,
        product="A",
        model="A100",
        mig_capable=True,
        mig_enabled=True,
        gpu_instances=(
            GpuInstance(
                id=3, profile_id=9, profile="3g.20gb", start=0, size=4,
                compute_instances=(ComputeInstance(id=0, uuid="MIG-x"),),
            ),
        ),
    ),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def write(folder, name, text, mode=0o600):
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path


def script(name, folder, **environment):
    """Runs a script as slurmd does; its exit code and how long it took matter to Slurm."""
    given = {"PATH": os.environ["PATH"], "EELGRID_SLURM_FOLDER": str(folder), "SLURM_JOB_ID": "12", **environment}
    return subprocess.run([SCRIPTS / name], check=False, env=given, timeout=30).returncode


def test_the_prolog_hands_over_what_slurm_says_and_the_epilog_takes_it_back(folder):
    comment = "mine; eelgrid,eelgrid-power=300"
    assert script("prolog", folder, SLURM_JOB_GPUS="0,1", SLURM_JOB_RESTART_COUNT="2", SLURM_JOB_COMMENT=comment) == 0
    assert HandoverFolder(folder).read_jobs() == (
        HandedJob(job="12", restart=2, devices=("0", "1"), power_limit_w=300.0),
    )
    assert (folder / "job-12").stat().st_mode & 0o077 == 0
    assert script("epilog", folder) == 0
    assert list(folder.iterdir()) == []


def fake_scontrol(folder, text):
    """A folder for the PATH with a scontrol that says this."""
    (folder / "bin").mkdir()
    write(folder / "bin", "scontrol", f"#!/bin/sh\nprintf '%s\\n' '{text}'\n", mode=0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def test_a_task_of_an_array_is_handed_over_by_the_name_that_the_plan_has_for_it(folder, tmp_path_factory):
    said = "JobId=12 ArrayJobId=9 ArrayTaskId=3 JobName=x TresFreq=gpu:high MailUser=(null)"
    path = fake_scontrol(tmp_path_factory.mktemp("commands"), said)
    write(folder, "plan-9_3", "power limit 300 W\n")
    write(folder, "answer-12", "of an earlier run")
    assert script("prolog", folder, SLURM_JOB_GPUS="0", PATH=path) == 0
    (job,) = HandoverFolder(folder).read_jobs()
    assert (job.task, job.workload_id, job.gpu_freq) == ("9_3", "slurm-9_3", "high")
    assert map_job_holds([job], GPUS)["GPU-a"].workload == "slurm-9_3"


@pytest.mark.parametrize(
    "words",
    [
        "a\nb TresFreq=gpu:high\nc TresFreq=gpu:devices=0,1,2,3\nd TresFreq=gpu:power_limit_w=100",
        r"a TresFreq=gpu:high\ndevices=0,1,2,3\npower_limit_w=100",  # some shells' echo makes lines of these
        "a\nJobId=12 ArrayJobId=77 ArrayTaskId=3 JobName=b",
    ],
)
def test_a_user_s_words_name_no_devices_limit_or_task_of_others(folder, tmp_path_factory, words):
    """Slurm takes any name and comment, and shows them as they are."""
    said = f"JobId=12 JobName=x{words} UserId=a(1) Comment=y{words}"
    path = fake_scontrol(tmp_path_factory.mktemp("commands"), said)
    assert script("prolog", folder, SLURM_JOB_GPUS="0", PATH=path) == 0
    (job,) = HandoverFolder(folder).read_jobs()
    assert (job.devices, job.power_limit_w, job.task) == (("0",), None, "")


@pytest.mark.parametrize(("planned", "waits"), [("plan-12", True), ("plan-13", False)])
def test_the_prolog_waits_for_the_agent_only_if_a_limit_is_planned_for_the_job(folder, planned, waits):
    write(folder, planned, "power limit 300 W\n")
    begun_s = time.monotonic()
    assert script("prolog", folder, SLURM_JOB_GPUS="0") == 0
    # Nobody answers; it looks twenty times, a tenth of a second apart.
    assert (time.monotonic() - begun_s >= 2.0) == waits


def test_planned_limits_of_jobs_and_tasks_are_written_and_others_are_not(folder):
    limits_w = {"slurm-12": 300.0, "slurm-9_3": 250.5, "w-1": 100.0, "slurm-x": 1.0, "slurm-": 1.0}
    plans = describe_planned_limits(limits_w)
    assert plans == {"12": "power limit 300 W\n", "9_3": "power limit 250.5 W\n"}
    write(folder, "plan-8", "of an agent before\n")
    found = HandoverFolder(folder)
    found.read_jobs()
    found.write_plans(plans)
    assert sorted(path.name for path in folder.iterdir()) == ["plan-12", "plan-9_3"]
    absent = HandoverFolder(folder / "absent")
    absent.read_jobs()
    absent.write_plans(plans)
    assert not (folder / "absent").exists()


def test_an_answer_to_an_earlier_run_is_none_to_this_one(folder):
    write(folder, "answer-12", "GPU-a: known\n")
    assert script("prolog", folder, SLURM_JOB_GPUS="0") == 0
    assert [path.name for path in folder.iterdir()] == ["job-12"]


def test_slices_are_named_by_uuid_since_the_index_of_a_mig_gres_is_no_gpu_s(folder):
    assert script("prolog", folder, SLURM_JOB_GPUS="5", CUDA_VISIBLE_DEVICES="MIG-x") == 0
    (job,) = HandoverFolder(folder).read_jobs()
    assert job.devices == ("MIG-x",)
    assert map_job_holds([job], GPUS) == {"GPU-b": JobHold(job="12")}


@pytest.mark.parametrize("comment", ["power=300", "eelgrid-power=", "eelgrid-power=3x", "eelgrid-power=-1", "$(rm x)"])
def test_a_comment_that_asks_for_no_limit_asks_for_none(folder, comment):
    assert script("prolog", folder, SLURM_JOB_GPUS="0", SLURM_JOB_COMMENT=comment) == 0
    assert HandoverFolder(folder).read_jobs()[0].power_limit_w is None


def test_neither_script_fails_a_job_whatever_the_folder_is(folder):
    absent, file = folder / "absent", write(folder, "file", "")
    for place in (absent, file, Path("/proc/1")):
        assert script("prolog", place, SLURM_JOB_GPUS="0") == 0
        assert script("epilog", place) == 0
    assert not absent.exists()
    assert script("prolog", folder) == 0  # a job without GPUs
    assert HandoverFolder(folder).read_jobs() == ()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("restart=0", "devices"),
        ("devices=0;rm", "devices"),
        ("devices=" + ",".join(map(str, range(300))), "devices"),
        ("devices=0\nrestart=x", "restart"),
        ("devices=0\ntask=1_2_3", "task"),
        ("devices=0\npower_limit_w=nan", "power_limit_w"),
        ("devices=0\npower_limit_w=0", "power_limit_w"),
        ("devices=0\npower_limit_w=999999", "power_limit_w"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_field(text, field):
    with pytest.raises(HandoverError, match=f"^{field}: "):
        parse_job("1", text)


def test_one_bad_file_is_left_out_and_named_and_the_others_count(folder):
    write(folder, "job-1", "devices=0\n")
    write(folder, "job-2", "nothing\n")
    write(folder, "job-3", "devices=0\n", mode=0o666)
    (folder / "job-4").symlink_to(folder / "job-1")
    os.mkfifo(folder / "job-5", 0o600)
    write(folder, "job-6", "devices=0\n" + "x" * 20_000)
    write(folder, "job-x", "devices=0\n")
    write(folder, "0", "77\n")
    found = HandoverFolder(folder)
    assert [job.job for job in found.read_jobs()] == ["1"]
    assert [text.split(":")[0] for text in found.refused] == ["job-2", "job-3", "job-4", "job-5", "job-6"]


def test_a_folder_that_others_may_write_to_is_not_believed(folder):
    write(folder, "job-1", "devices=0\n")
    folder.chmod(0o777)
    with pytest.raises(HandoverError, match="others may write"):
        HandoverFolder(folder).read_jobs()
    folder.chmod(0o700)
    assert HandoverFolder(folder / "absent").read_jobs() == ()


def test_more_jobs_than_a_node_can_have_are_counted(folder):
    for number in range(JOBS_MOST + 3):
        write(folder, f"job-{number}", "devices=0\n")
    found = HandoverFolder(folder)
    assert (len(found.read_jobs()), len(found.refused)) == (JOBS_MOST, 3)


def test_a_change_is_noticed_and_an_answer_goes_with_its_job(folder):
    found = HandoverFolder(folder)
    assert found.read_jobs() == ()
    write(folder, "job-7", "devices=0\n")
    assert found.has_changed()
    found.read_jobs()
    found.write_answers({"7": "GPU-a: known\n"})
    assert (folder / "answer-7").read_text() == "GPU-a: known\n"
    poll_until(lambda: (found.read_jobs(), not found.has_changed())[1], "a folder at rest is read once")
    (folder / "job-7").unlink()
    assert found.has_changed()
    # Another run of the agent finds the answer, and that its job is gone.
    other = HandoverFolder(folder)
    assert other.read_jobs() == ()
    other.write_answers({})
    assert not (folder / "answer-7").exists()


def test_a_job_s_devices_are_its_allocations(folder):
    write(folder, "job-7", "devices=0\n")
    write(folder, "job-8", "devices=MIG-x,9\n")
    write(folder, "0", "7\n")  # another prolog's file says the same
    look = ExtendedReadings(monotonic_ns=0, wall_ns=0)
    found = AttributionSources(slurm_folder=folder).read_files(GPUS, look, now_ns=0).jobs
    assert [(one.place, one.owner.job) for one in found] == [
        (DeviceReference("GPU-a"), "7"),
        (DeviceReference("GPU-b", 3), "8"),
    ]


def test_a_limit_is_of_a_job_that_alone_holds_the_whole_gpu():
    one = HandedJob(job="1", devices=("0",), power_limit_w=300.0)
    slice_ = HandedJob(job="2", devices=("MIG-x",), power_limit_w=200.0)
    clocks = HandedJob(job="3", devices=("0", "7"), gpu_freq="high")
    assert map_job_holds([one, slice_], GPUS) == {
        "GPU-a": JobHold(job="1", workload="slurm-1", limit_w=300.0),
        "GPU-b": JobHold(job="2"),
    }
    assert map_job_holds([one, clocks], GPUS) == {"GPU-a": JobHold(job="3", owns_clocks=True)}


# What the guard makes of it


@pytest.fixture(params=[fake, simulated], ids=["fake", "simulated"])
def rig(request):
    return Rig(request.param())


def hold(rig, holds):
    rig.guard.update_job_holds(holds, wall_ns=rig.machine.now_ns)
    rig.events += rig.guard.drain_events()


def test_a_job_s_limit_is_set_without_a_plan_answered_and_put_back(rig):
    one = rig.machine.uuids[0]
    hold(rig, {one: JobHold(job="7", limit_w=350.0)})
    assert rig.guard.has_work
    assert rig.guard.answer_jobs() == {}
    rig.cycle(6)
    assert rig.limit_w(one) == 350.0
    assert rig.guard.answer_jobs() == {"7": f"{one}: power limit 350 W\n"}
    assert rig.journal.records[0].found_w == 700.0
    hold(rig, {})
    rig.cycle(2)
    assert rig.machine.shown(one) == rig.found[one]
    assert rig.journal.records == ()
    assert not rig.guard.has_work


def test_the_lower_of_plan_and_job_counts_and_the_plan_s_comes_back(rig):
    one = settled(rig, setting(rig.machine.uuids[0], 500.0))[0]
    hold(rig, {one: JobHold(job="7", limit_w=400.0)})
    rig.cycle(3)
    assert rig.limit_w(one) == 400.0
    hold(rig, {one: JobHold(job="8", limit_w=600.0)})
    rig.cycle(3)
    assert rig.limit_w(one) == 500.0
    hold(rig, {})
    rig.cycle(2)
    assert rig.limit_w(one) == 500.0


def plan_for(*jobs):
    """A plan with a whole GPU and a limit for each job."""
    return {
        "assignments": tuple(
            Assignment(workload_id=workload, replica=0, gpu_uuids=(uuid,), gpu_milli=1000) for workload, uuid, _ in jobs
        ),
        "gpu_settings": tuple(setting(uuid, limit_w) for _, uuid, limit_w in jobs),
    }


def test_a_planned_limit_goes_to_the_gpu_that_slurm_gave_the_job(rig):
    one, other = rig.machine.uuids[:2]
    settled(rig, **plan_for(("slurm-7", one, 400.0), ("slurm-8.2", other, 600.0)))
    assert rig.guard.planned_job_limits_w == {"slurm-7": 400.0, "slurm-8": 600.0}
    hold(rig, {other: JobHold(job="7", workload="slurm-7")})
    assert rig.guard.answer_jobs() == {}
    rig.cycle(4)
    # What was planned for the other stays on its GPU until it begins elsewhere.
    assert (rig.limit_w(one), rig.limit_w(other)) == (400.0, 400.0)
    assert rig.guard.answer_jobs() == {"7": f"{other}: power limit 400 W\n"}
    hold(rig, {other: JobHold(job="7", workload="slurm-7"), one: JobHold(job="8", workload="slurm-8", limit_w=500.0)})
    rig.cycle(4)
    assert (rig.limit_w(one), rig.limit_w(other)) == (500.0, 400.0)
    # The epilog of the one: then its GPU has what the plan says of the GPU.
    hold(rig, {one: JobHold(job="8", workload="slurm-8")})
    rig.cycle(4)
    assert (rig.limit_w(one), rig.limit_w(other)) == (600.0, 600.0)
    hold(rig, {})
    rig.cycle(4)
    assert (rig.limit_w(one), rig.limit_w(other)) == (400.0, 600.0)


def test_a_limit_that_was_planned_for_another_job_is_not_this_one_s(rig):
    one, other = rig.machine.uuids[:2]
    settled(rig, **plan_for(("slurm-7", one, 400.0)))
    unplanned = JobHold(job="9", workload="slurm-9")
    hold(rig, {one: unplanned, other: JobHold(job="7", workload="slurm-7")})
    rig.cycle(4)
    assert (rig.limit_w(one), rig.limit_w(other)) == (700.0, 400.0)
    # As long as the one for whom it was planned has not begun, the limit stays: it may be a budget's.
    hold(rig, {one: unplanned})
    rig.cycle(4)
    assert (rig.limit_w(one), rig.limit_w(other)) == (400.0, 700.0)


def test_a_planned_limit_ends_with_the_lease_and_clocks_of_a_job_come_first(rig):
    one, other = rig.machine.uuids[:2]
    settled(rig, **plan_for(("slurm-7", one, 400.0)))
    hold(rig, {other: JobHold(job="7", workload="slurm-7", owns_clocks=True)})
    rig.cycle(4)
    assert rig.limit_w(other) == 700.0
    hold(rig, {other: JobHold(job="7", workload="slurm-7")})
    rig.cycle(4)
    assert rig.limit_w(other) == 400.0
    rig.cycle(70)
    assert (rig.limit_w(one), rig.limit_w(other)) == (700.0, 700.0)
    assert rig.guard.planned_job_limits_w == {}
    assert rig.guard.answer_jobs() == {"7": f"{other}: known\n"}


def test_a_plan_that_is_only_observed_plans_no_limit_of_a_job(rig):
    one, other = rig.machine.uuids[:2]
    settled(rig, enforce=False, **plan_for(("slurm-7", one, 400.0)))
    hold(rig, {other: JobHold(job="7", workload="slurm-7")})
    rig.cycle(4)
    assert (rig.limit_w(other), rig.guard.planned_job_limits_w) == (700.0, {})


def test_a_job_s_limit_outlives_the_lease(rig):
    one, other = settled(rig, setting(rig.machine.uuids[0], 500.0), setting(rig.machine.uuids[1], 500.0))[:2]
    hold(rig, {one: JobHold(job="7", limit_w=400.0)})
    rig.cycle(70)
    assert (rig.limit_w(one), rig.limit_w(other)) == (400.0, 700.0)


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("moment", range(1, 24))
def test_an_agent_that_dies_at_any_moment_leaves_no_limit_behind(rig, moment, has_ended):
    one = rig.machine.uuids[0]
    rig.machine.crashes.arm(moment)
    with contextlib.suppress(Crash):
        hold(rig, {one: JobHold(job="7", limit_w=350.0)})
        rig.cycle(8)
        hold(rig, {})
        rig.cycle(2)
    rig.crash()
    if not has_ended:  # the folder still has the job
        hold(rig, {one: JobHold(job="7", limit_w=350.0)})
        rig.cycle(8)
        assert rig.limit_w(one) == 350.0
        hold(rig, {})
    rig.cycle(3)
    assert rig.machine.shown(one) == rig.found[one]
    assert rig.journal.records == ()


def test_clocks_have_one_owner_and_the_plan_is_told_so(rig):
    one, other = rig.machine.uuids[:2]
    ours = {"sm_clock_min_mhz": 600, "sm_clock_max_mhz": 1400}
    settled(rig, setting(one, 400.0, **ours), setting(other, 400.0))
    hold(rig, {one: JobHold(job="7", owns_clocks=True)})
    assert rig.guard.answer_jobs() == {}  # the job waits until nothing of ours is left
    rig.cycle(2)
    assert rig.machine.shown(one) == rig.found[one]
    assert rig.guard.answer_jobs() == {"7": f"{one}: clocks-owned: left to the job, which sets clocks itself\n"}
    assert rig.status(one) == (ApplyStatus.REFUSED, "clocks-owned")
    assert rig.status(other)[0] is ApplyStatus.APPLIED
    told = [event for event in rig.events if "clocks-owned" in event.detail]
    assert [(event.kind, event.gpu_uuid) for event in told] == [(NodeEventKind.SETTING_RESTORED, one)]
    commands = len(rig.commands)
    rig.offer(plan_of(setting(one, 300.0, **ours), setting(other, 400.0)))
    rig.cycle(5)
    assert len(rig.commands) == commands
    hold(rig, {})
    rig.cycle(8)
    assert rig.limit_w(one) == 300.0
    assert rig.status(one)[0] is ApplyStatus.APPLIED


def test_an_agent_that_observes_sets_nothing_and_says_so():
    guard = Guard("n", has_control=False)
    guard.update_job_holds({"GPU-0": JobHold(job="7", limit_w=300.0)}, wall_ns=0)
    assert not guard.has_work
    assert guard.answer_jobs() == {"7": "GPU-0: this agent observes only: nothing is set\n"}
