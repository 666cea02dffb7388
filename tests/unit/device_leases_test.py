"""Leases in force: kept over a crash, refused with the holder's name, ended with their owners; asked for by a socket."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.builders.agent import ManualClock, build_agent_node, build_devices
from tests.waiting import poll_until

from eelgrid_agent.cli.lease import run_lease_command
from eelgrid_agent.enforce.device_leases import (
    KUBELET_HOLDER,
    DeviceLeases,
    LayoutChanging,
    LeaseUnrecorded,
    UnknownDevice,
)
from eelgrid_agent.enforce.lease_table import LEASE_JOURNAL, DeviceLeased, LeaseHolder, LeaseTable
from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.kubelet.pod_resources import PodLeases
from eelgrid_agent.node.lease_owners import (
    OwnerAnswer,
    OwnerState,
    SlurmOwners,
    adopt_slurm_jobs,
    check_owners,
    read_indexes,
    read_start_ticks,
)
from eelgrid_agent.node.lease_socket import LeaseSocket, LeaseSocketError, ask_agent
from eelgrid_agent.state_files import MemoryState, StateFile, StateUnwritable
from eelgrid_protos.kubelet_api import ContainerDevices
from eelgrid_protos.messages import Assignment, ComputeInstance, Gpu, GpuInstance, ProcessSpec

JOB, OTHER = LeaseHolder("slurm", "12"), LeaseHolder("ray", "head")


def whole(number):
    return Gpu(uuid=f"GPU-{number}", index=number, product="A100", model="A100")


CUT = Gpu(
    uuid="GPU-9",
    index=9,
    product="A100",
    model="A100",
    mig_capable=True,
    mig_enabled=True,
    gpu_instances=tuple(
        GpuInstance(
            id=number,
            profile_id=19,
            profile="1g.5gb",
            start=number,
            size=1,
            compute_instances=(ComputeInstance(id=0, uuid=f"MIG-{number}"),),
        )
        for number in range(3)
    ),
)
GPUS = (whole(0), whole(1), CUT)


def open_leases(store=None, *, boot="b1", gpus=GPUS):
    found = DeviceLeases(store or MemoryState(LeaseTable()), boot_id=boot, wall_ns=lambda: 1_700_000_000_000_000_000)
    found.list_gpus = lambda: gpus
    found.finish_adoption()
    return found


def held(leases):
    return sorted((lease.device.uuid, *lease.holder) for lease in leases.table.leases)


def test_the_second_engine_is_told_who_holds_it_since_when_and_what_to_do():
    leases = open_leases()
    leases.take(JOB, ["0", "MIG-1"])
    with pytest.raises(DeviceLeased) as refused:
        leases.take(OTHER, ["GPU-1", "GPU-0"])
    assert str(refused.value) == (
        "GPU GPU-0 is leased to slurm 12 since 2023-11-14T22:13:20Z; wait until that ends, or if it has ended, run "
        "`eelgrid-agent lease release --engine slurm --owner '12'`"
    )
    assert held(leases) == [("GPU-0", "slurm", "12"), ("MIG-1", "slurm", "12")]
    with pytest.raises(DeviceLeased, match="slice MIG-1"):
        leases.take(OTHER, ["MIG-1"])
    leases.take(OTHER, ["MIG-0", "GPU-1"])
    with pytest.raises(UnknownDevice, match="GPU or slice 7"):
        leases.take(OTHER, ["7"])
    assert leases.refused_total == {"ray": 3}


def test_a_crash_after_any_answer_loses_no_lease_and_a_boot_ends_all(tmp_path):
    store = StateFile(tmp_path / "leases.json", LEASE_JOURNAL)
    leases = open_leases(store)
    leases.take(JOB, ["0"])
    assert held(open_leases(store)) == [("GPU-0", "slurm", "12")]
    assert open_leases(store).release(JOB) == 1
    assert held(open_leases(store)) == []
    leases.take(JOB, ["0"])
    assert held(open_leases(store, boot="b2")) == []


def test_a_damaged_journal_is_kept_aside_and_nothing_is_guessed(tmp_path):
    path = tmp_path / "leases.json"
    path.write_text("{")
    leases = open_leases(StateFile(path, LEASE_JOURNAL))
    assert held(leases) == []
    assert "leases.json.corrupt-1" in leases.problem


class FullDisk(MemoryState):
    is_full = False

    def store(self, value):
        if self.is_full:
            raise StateUnwritable("leases.json: no space left")
        super().store(value)


def test_without_a_disk_nothing_is_given_and_what_ends_is_written_later():
    store = FullDisk(LeaseTable())
    leases = open_leases(store)
    leases.take(JOB, ["0"])
    store.is_full = True
    with pytest.raises(LeaseUnrecorded, match="no space left"):
        leases.take(JOB, ["1"])
    assert leases.release(JOB) == 1
    assert held(leases) == []
    store.is_full = False
    leases.tidy()
    assert store.load().leases == ()


def test_while_a_layout_changes_nothing_of_the_gpu_is_given_to_anybody_new():
    leases = open_leases()
    leases.take(JOB, ["MIG-0"])
    with leases.change_layout("GPU-9"), leases.change_layout("GPU-9"):
        with pytest.raises(LayoutChanging, match="ask again in a few seconds"):
            leases.take(OTHER, ["MIG-2"])
        leases.take(JOB, ["MIG-0"])
        leases.take(OTHER, ["GPU-0"])
        assert leases.list_protected("GPU-9") == {"MIG-0"}
    leases.take(OTHER, ["MIG-2"])


def test_a_job_that_comes_second_never_begins_and_returns_to_the_queue(tmp_path):
    leases = open_leases()
    leases.take(JOB, ["0"])
    spec = ProcessSpec(argv=("true",), working_directory=str(tmp_path))
    job = Assignment(workload_id="w-1", replica=0, attempt=1, gpu_uuids=("GPU-0",), gpu_milli=1000, process=spec)
    share = replace(job, workload_id="w-2", gpu_uuids=("GPU-1",), gpu_milli=500)

    async def start():
        engine = LocalEngine(tmp_path, leases=leases)
        engine.adopt()
        ended = asyncio.Event()
        engine.on_change = lambda: ended.set() if all(one.is_over for one in engine.list_attempts().values()) else None
        engine.start(job)
        engine.start(share)
        engine.start(replace(share, workload_id="w-3"))
        running = held(leases)
        async with asyncio.timeout(30.0):
            while not all(one.is_over for one in engine.list_attempts().values()):
                ended.clear()
                await ended.wait()
        engine.fork_server.close()
        return {key.workload_id: status for key, status in engine.list_attempts().items()}, running

    found, running = asyncio.run(start())
    assert found["w-1"].gpu_held
    assert found["w-1"].started_ns == 0
    assert found["w-1"].reason.startswith("GPU GPU-0 is leased to slurm 12 since 2023")
    # Shares of one GPU are divided by the engine itself.
    assert running == [("GPU-0", "slurm", "12"), ("GPU-1", "local", "w-2/0/1"), ("GPU-1", "local", "w-3/0/1")]
    assert found["w-2"].exit_code == found["w-3"].exit_code == 0
    assert held(leases) == [("GPU-0", "slurm", "12")]


def test_the_controller_is_told_of_others_and_not_of_its_own_jobs():
    clock = ManualClock()
    node = build_agent_node(build_devices(clock), clock)
    gpu = node.inventory.gpus[0]
    leases = open_leases(gpus=(gpu,))
    node.list_leases = leases.list_external
    leases.take(LeaseHolder("local", "w-1/0/1"), ["0"], is_shared=True)
    node.on_leases_changed()
    assert node.inventory.gpus[0].leases == ()
    leases.release(LeaseHolder("local", "w-1/0/1"))
    leases.take(JOB, ["0"])
    woken = []
    node.wake = lambda: woken.append(True)
    node.on_leases_changed()
    (lease,) = node.inventory.gpus[0].leases
    assert (lease.device_uuid, lease.engine, lease.owner) == (gpu.uuid, "slurm", "12")
    assert woken
    assert node.next_message().message == node.inventory
    leases.release(JOB)
    node.on_leases_changed()
    assert node.inventory.gpus[0].leases == ()


def test_pods_of_the_kubelet_are_leased_named_and_free_again_after_long_enough():
    now_s = [100.0]
    leases = open_leases()
    pods = PodLeases(leases, gpus=lambda: GPUS, clock_s=lambda: now_s[0])
    leases.take(KUBELET_HOLDER, ["0"])

    def container(device):
        return ContainerDevices(namespace="d", pod="train", container="c", devices=(("nvidia.com/gpu", device),))

    for _ in range(5):
        # Given, and not yet listed.
        pods.on_containers([])
    assert held(leases) == [("GPU-0", *KUBELET_HOLDER)]
    pods.on_containers([container("GPU-0"), container("MIG-1")])
    assert [lease.note for lease in leases.table.leases] == ["pod d/train"] * 2
    with pytest.raises(DeviceLeased, match=r"kubernetes device-plugin \(pod d/train\)"):
        leases.take(JOB, ["GPU-9"])
    for _ in range(3):
        pods.on_containers([container("MIG-1")])
        now_s[0] += 20.0
    assert held(leases) == [("MIG-1", *KUBELET_HOLDER)]


def test_what_two_engines_use_is_named_and_given_to_neither_anew():
    leases = open_leases()
    leases.take(JOB, ["0"])
    pods = PodLeases(leases, gpus=lambda: GPUS, clock_s=lambda: 0.0)
    pod = ContainerDevices(namespace="d", pod="p", container="c", devices=(("nvidia.com/gpu", "GPU-0"),))
    pods.on_containers([pod])
    assert held(leases) == [("GPU-0", "slurm", "12")]
    assert list(leases.disputes) == [(KUBELET_HOLDER, leases.table.leases[0].device)]
    leases.release(JOB)
    leases.tidy()
    pods.on_containers([pod])
    assert held(leases) == [("GPU-0", *KUBELET_HOLDER)]
    assert not leases.disputes


def check(leases, **engines):
    return asyncio.run(check_owners(leases, engines))


def test_a_lease_ends_with_the_process_that_was_named_and_not_with_a_later_one_of_its_number():
    leases = open_leases()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    leases.take(OTHER, ["0"], process=(child.pid, read_start_ticks(child.pid)))
    leases.take(JOB, ["1"], process=(os.getpid(), read_start_ticks(os.getpid()) + 1))
    assert check(leases) == 1
    assert held(leases) == [("GPU-0", *OTHER)]
    child.send_signal(signal.SIGKILL)
    poll_until(lambda: not read_start_ticks(child.pid), "it has ended")
    assert check(leases) == 1
    assert held(leases) == []
    child.wait()
    assert leases.reclaimed_total == 2


def test_a_lease_whose_owner_is_not_known_stays_and_is_named():
    leases = open_leases()
    leases.take(JOB, ["0"])
    leases.take(OTHER, ["1"])

    async def away(_lease):
        return OwnerAnswer(OwnerState.UNKNOWN, "slurmctld is\x1b away")

    told = []
    leases.on_change = lambda: told.append([one.unknown for held in leases.list_external().values() for one in held])
    assert check(leases, slurm=away) == check(leases, slurm=away) == 0
    assert sorted(leases.unverified.values())[1] == "slurmctld is\\x1b away"
    assert "release the lease by hand" in min(leases.unverified.values())
    assert len(leases.table.leases) == 2
    # The controller hears of it once, and in a form that any terminal may show.
    assert told == [["slurmctld is\\x1b away", leases.unverified[leases.table.leases[1].serial]]]


def test_an_owner_that_asks_again_while_it_is_looked_for_keeps_its_lease():
    leases = open_leases()
    leases.take(JOB, ["0"])

    async def gone(_lease):
        leases.take(JOB, ["0"])
        return OwnerAnswer(OwnerState.GONE)

    assert check(leases, slurm=gone) == 0
    assert held(leases) == [("GPU-0", "slurm", "12")]


def test_a_table_that_is_begun_anew_takes_slurms_jobs_from_its_prologs_files(tmp_path):
    folder = tmp_path / "slurm"
    folder.mkdir(mode=0o700)
    (folder / "0").write_text("11\n")  # of a prolog of the site
    (folder / "job-12").write_text("restart=0\ndevices=1\n")  # of ours
    for path in folder.iterdir():
        path.chmod(0o600)
    leases = open_leases()
    adopt_slurm_jobs(leases, folder, GPUS)
    assert held(leases) == [("GPU-0", "slurm", "11"), ("GPU-1", "slurm", "12")]


@pytest.mark.parametrize(
    ("answer", "code", "state"),
    [
        ("JobId=12 JobState=RUNNING NodeList=n0", 0, OwnerState.HOLDS),
        ("JobId=12 JobState=COMPLETING", 0, OwnerState.HOLDS),
        ("JobId=12 JobState=COMPLETED", 0, OwnerState.GONE),
        ("JobId=12 JobState=PENDING", 0, OwnerState.GONE),
        ("slurm_load_jobs error: Invalid job id specified", 1, OwnerState.GONE),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1, OwnerState.UNKNOWN),
        ("JobId=12 JobState=DREAMING", 0, OwnerState.UNKNOWN),
        # Of the user's own words in its name and comment.
        ("JobId=12 JobName=x JobState=COMPLETED JobState=RUNNING Comment=JobState=FAILED", 0, OwnerState.HOLDS),
        ("", 0, OwnerState.UNKNOWN),
    ],
)
def test_slurm_says_whether_a_job_holds_its_devices(tmp_path, answer, code, state):
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    program.chmod(0o755)
    leases = open_leases()
    (lease,) = leases.take(JOB, ["0"])
    (tmp_path / "proc" / "77").mkdir(parents=True)
    (tmp_path / "proc" / "77" / "environ").write_bytes(b"A=1\0SLURM_JOB_ID=121\0")
    owners = SlurmOwners(program=str(program), proc=tmp_path / "proc")
    assert asyncio.run(owners.ask(lease)).state is state
    if state is OwnerState.GONE:
        # Slurm lost sight of the node, and the job goes on here.
        (tmp_path / "proc" / "77" / "environ").write_bytes(b"A=1\0SLURM_JOB_ID=12\0")
        assert asyncio.run(owners.ask(lease)) == (
            OwnerState.UNKNOWN,
            "job 12 has ended in Slurm, and process 77 of it is here",
        )
    unnumbered = replace(lease, holder=LeaseHolder("slurm", "a b"))
    assert asyncio.run(owners.ask(unnumbered)).state is OwnerState.UNKNOWN


SHOWN = (
    "JobId=30 JobState=RUNNING TRES=gres/gpu=3 Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:a100:1(IDX:1) "
    "Nodes=n[0,2] CPU_IDs=0-1 Mem=0 GRES=gpu:a100:1(IDX:0),shard:0 MinCPUsNode=1"
)


def write_job(proc, pid, *words):
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "environ").write_bytes(b"\0".join(word.encode() for word in ("A=1", *words, "")))


def open_slurm(tmp_path, shown=SHOWN):
    """What asks a slurmctld that knows one job, and notes each question."""
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n'
        f"case \"$*\" in *hostnames*) printf 'n0\\nn2\\n' ;; *'job 30') echo '{shown}' ;; *) echo 'Invalid job id specified'; exit 1 ;; esac\n"
    )
    program.chmod(0o755)
    return SlurmOwners(program=str(program), proc=tmp_path / "proc", uuids=tmp_path / "uuids")


@pytest.mark.parametrize(("node", "gpu"), [("n0", "GPU-0"), ("n1", "GPU-1"), ("n2", "GPU-0"), ("n3", None)])
def test_a_job_that_slurmd_started_without_a_prolog_gets_the_lease_of_what_slurm_gave_it(tmp_path, node, gpu):
    write_job(tmp_path / "proc", 77, "SLURM_JOB_ID=30", "SLURM_JOB_GPUS=5")
    leases = open_leases()
    owners = open_slurm(tmp_path)
    asyncio.run(owners.adopt_jobs(leases, node, GPUS))
    assert held(leases) == ([(gpu, "slurm", "30")] if gpu else [])
    asked = (tmp_path / "asked").read_text()
    asyncio.run(owners.adopt_jobs(leases, node, GPUS))
    # Who has a lease is not asked about again.
    assert ((tmp_path / "asked").read_text() == asked) is (gpu is not None)


@pytest.mark.parametrize("words", ["JobId=30 {} JobState=", "JobId=30 JobState=RUNNING Comment={} JobState="])
def test_a_job_whose_name_or_comment_lists_gpus_gets_no_lease_of_these(tmp_path, words):
    write_job(tmp_path / "proc", 77, "SLURM_JOB_ID=30", "SLURM_JOB_GPUS=0")
    claimed = "Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)"
    leases = open_leases()
    owners = open_slurm(tmp_path, SHOWN.replace("JobId=30 JobState=", words.format(claimed)))
    asyncio.run(owners.adopt_jobs(leases, "n0", GPUS))
    assert held(leases) == [("GPU-0", "slurm", "30")]


def test_what_another_engine_has_stays_with_it_and_is_named_as_used_by_two(tmp_path):
    write_job(tmp_path / "proc", 77, "SLURM_JOB_ID=30", "SLURM_JOB_GPUS=0")
    leases = open_leases()
    leases.take(OTHER, ["0"])
    asyncio.run(open_slurm(tmp_path).adopt_jobs(leases, "n0", GPUS))
    assert held(leases) == [("GPU-0", *OTHER)]
    (why,) = leases.disputes.values()
    assert "is leased to" in why


def test_a_users_word_for_a_job_takes_no_lease(tmp_path):
    """An environment is its user's: slurmctld says what a job has, and here it says that it has ended, or knows none."""
    write_job(tmp_path / "proc", 77, "SLURM_JOB_ID=30", "SLURM_JOB_GPUS=0")
    write_job(tmp_path / "proc", 78, "SLURM_JOB_ID=31", "SLURM_STEP_GPUS=0")
    write_job(tmp_path / "proc", 79, "SLURM_JOB_ID=x;y", "SLURM_STEP_GPUS=0")
    write_job(tmp_path / "proc", 80, "SLURM_JOB_ID=32")  # without GPUs
    leases = open_leases()
    asyncio.run(open_slurm(tmp_path, SHOWN.replace("RUNNING", "COMPLETING")).adopt_jobs(leases, "n0", GPUS))
    assert held(leases) == []
    assert (tmp_path / "asked").read_text().splitlines() == ["-d -o show job 30", "-d -o show job 31"]


def test_many_pretended_jobs_do_not_keep_a_real_one_from_its_turn(tmp_path):
    for number in range(70):
        write_job(tmp_path / "proc", number, f"SLURM_JOB_ID={1000 + number}", "SLURM_JOB_GPUS=0")
    write_job(tmp_path / "proc", 99, "SLURM_JOB_ID=30", "SLURM_JOB_GPUS=0")
    leases, owners = open_leases(), open_slurm(tmp_path)
    owners._asked_last = 1000  # the others first
    for _ in range(3):
        asyncio.run(owners.adopt_jobs(leases, "n0", GPUS))
    assert held(leases) == [("GPU-0", "slurm", "30")]


def test_indexes_are_those_of_the_nodes_own_list_where_eelgrid_changes_its_layout(tmp_path):
    (tmp_path / "uuids").write_text("0 GPU-1\n1 MIG-1\nx\n")
    write_job(tmp_path / "proc", 77, "SLURM_JOB_ID=30", "SLURM_JOB_GPUS=0")
    leases = open_leases()
    asyncio.run(open_slurm(tmp_path).adopt_jobs(leases, "n0", GPUS))
    assert held(leases) == [("GPU-1", "slurm", "30")]
    assert read_indexes("0-2,7,x,3-,9999999") == [0, 1, 2, 7]


@contextlib.asynccontextmanager
async def serving(path, leases):
    task = asyncio.ensure_future(LeaseSocket(path, leases).run())
    while not path.exists():
        await asyncio.sleep(0.01)
        if task.done():
            task.result()
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def run_command(*words):
    return await asyncio.to_thread(run_lease_command, words)


def test_the_command_takes_lists_and_releases(tmp_path, capfd):
    path, leases = tmp_path / "lease.sock", open_leases()

    async def talk():
        async with serving(path, leases):
            assert path.stat().st_mode & 0o777 == 0o600
            take = ("take", "--socket", str(path), "--engine")
            codes = [
                await run_command(*take, "slurm", "--owner", "12", "--gpu", "0,MIG-1"),
                await run_command(*take, "ray", "--owner", "head", "--gpu", "GPU-0"),
                await run_command(*take, "local", "--owner", "me", "--gpu", "1"),
                await run_command(*take, "ray", "--owner", "head", "--gpu", "1", "--pid", str(os.getpid())),
            ]
            answer = await asyncio.to_thread(ask_agent, path, {"op": "list"}, timeout_s=5.0)
            assert await run_command("list", "--socket", str(path)) == 0
            codes.append(await run_command("release", "--socket", str(path), "--engine", "slurm", "--owner", "12"))
            for bad in (b"{}\n", b"[]\n", b"x\n", b'{"op": "take", "engine": "", "owner": "x", "gpus": []}\n'):
                assert LeaseSocket(path, leases).answer(bad)["ok"] is False
            return codes, answer

    codes, answer = asyncio.run(talk())
    assert codes == [0, 3, 2, 0, 0]
    assert [(one["device_uuid"], one["owner"]) for one in answer["leases"]] == [
        ("GPU-0", "12"), ("MIG-1", "12"), ("GPU-1", "head"),
    ]  # fmt: skip
    printed = capfd.readouterr()
    assert "GPU-0   slurm   12     2023-11-14T22:13:20Z  held" in printed.out
    assert "released 2" in printed.out
    assert "GPU GPU-0 is leased to slurm 12 since" in printed.err
    assert held(leases) == [("GPU-1", "ray", "head")]
    assert not path.exists()


def test_an_agent_that_is_away_is_tried_for_so_long_and_then_named(tmp_path, capfd):
    path = tmp_path / "none.sock"
    words = ("take", "--socket", str(path), "--engine", "slurm", "--owner", "1", "--gpu", "0", "--timeout", "0.3")
    assert run_lease_command(words) == 1
    assert f"{path}: no agent answers there" in capfd.readouterr().err
    with pytest.raises(LeaseSocketError, match="more than 107 bytes"):
        LeaseSocket(tmp_path / ("x" * 120), open_leases())


def test_a_socket_is_served_once_and_a_default_that_cannot_be_served_ends_nothing(tmp_path, caplog):
    path = tmp_path / "lease.sock"

    async def serve():
        async with serving(path, open_leases()):
            with pytest.raises(LeaseSocketError, match="another agent serves it"):
                await LeaseSocket(path, open_leases()).run()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await LeaseSocket(path, open_leases()).run(is_required=False)
            assert (await asyncio.to_thread(ask_agent, path, {"op": "list"}, timeout_s=5.0))["ok"]

    asyncio.run(serve())
    assert "no_lease_socket" in caplog.text


def test_a_refusal_that_passes_is_told_apart_from_a_fault(tmp_path):
    """A prolog sends its job away for the one and has its node drained for the other."""
    leases = open_leases()
    leases.take(OTHER, ["0"])
    socket = LeaseSocket(tmp_path / "s", leases)

    def take(gpu):
        answer = socket.answer(json.dumps({"op": "take", "engine": "slurm", "owner": "12", "gpus": [gpu]}).encode())
        return answer.keys() & {"ok", "refused", "failed"}, answer["ok"]

    assert take("0") == ({"ok", "refused"}, False)
    assert take("7") == ({"ok", "failed"}, False)
    with leases.change_layout("GPU-1"):
        assert take("1") == ({"ok", "refused"}, False)


def test_an_answer_that_was_lost_is_asked_for_again(tmp_path):
    leases = open_leases()
    socket = LeaseSocket(tmp_path / "s", leases)
    request = json.dumps({"op": "take", "engine": "slurm", "owner": "12", "gpus": ["0"]}).encode()
    first, second = socket.answer(request), socket.answer(request)
    assert first == second
    assert first["ok"] is True
    assert held(leases) == [("GPU-0", "slurm", "12")]
