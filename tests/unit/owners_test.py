"""Owners of processes, read from a tree like /proc: the living, the dead, and ids that are used again."""

import shutil

from tests.builders.agent import build_slurm_owner

from eelgrid_agent.energy.accounts import UsageOwner, UsageOwnerKind
from eelgrid_agent.energy.process_owners import (
    DEAD_KEPT_S,
    PROCESSES_MOST,
    REFRESH_S,
    ContainerName,
    ContainerNameIndex,
    ProcessOwnerResolver,
    parse_log_name,
)

SECOND = 1_000_000_000
UID = "2c48913c-b29f-11e7-9350-020968147796"
ID = "ab" * 32
POD_CGROUP = f"0::/kubepods/burstable/pod{UID}/{ID}\n"


def process(root, pid, cgroup, *, title="python train.py", environ=None, start=1000, command="py) thon"):
    folder = root / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "cmdline").write_bytes(title.replace(" ", "\0").encode() + b"\0")
    (folder / "comm").write_text(command + "\n")
    # Field 22 counts from the pid; the command may hold parentheses and spaces.
    fields = " ".join(["S", "1", *["0"] * 17, str(start), "0", "0"])
    (folder / "stat").write_text(f"{pid} ({command}) {fields}\n")
    entries = [f"{name}={value}" for name, value in (environ or {}).items()]
    (folder / "environ").write_bytes("\0".join(entries).encode())


def owner_of(root, pid, **book):
    return ProcessOwnerResolver(root, **book).resolve([pid], now_ns=0)[pid].owner


def test_a_process_of_a_pod_is_named_by_its_container(tmp_path):
    process(tmp_path, 7, POD_CGROUP)
    links = tmp_path / "containers"
    links.mkdir()
    (links / f"train-0_research_main-{ID}.log").touch()
    (links / "not-a-container.log").touch()
    assert owner_of(tmp_path, 7) == UsageOwner(kind=UsageOwnerKind.POD, pod_uid=UID, container_id=ID, pid=7)
    named = owner_of(tmp_path, 7, names=ContainerNameIndex(links).find_container)
    assert (named.namespace, named.pod, named.container, named.pod_uid) == ("research", "train-0", "main", UID)
    # The account outlives processes and restarts of the container.
    assert named.account() == UsageOwner(kind=UsageOwnerKind.POD, namespace="research", pod="train-0", container="main")


def test_names_are_looked_for_again_for_new_containers_only(tmp_path):
    names = ContainerNameIndex(tmp_path)
    assert names.find_container(ID, 0) is None
    (tmp_path / f"a_b_c-{ID}.log").touch()
    assert names.find_container(ID, int(REFRESH_S * SECOND) // 2) is None
    assert names.find_container(ID, int(REFRESH_S * SECOND) + 1) == ContainerName("b", "a", "c")
    shutil.rmtree(tmp_path)
    assert names.find_container(ID, int(3 * REFRESH_S * SECOND)) == ContainerName("b", "a", "c")
    assert ContainerNameIndex(tmp_path).find_container(ID, 0) is None


def test_a_job_of_the_agent_states_its_workload_and_a_pod_does_not(tmp_path):
    environ = {"EELGRID_WORKLOAD_ID": "team/w-7_0", "SECRET": "x"}
    process(tmp_path, 1, "0::/system.slice/eelgrid-agent.service/jobs/w-7_0.0.1\n", environ=environ)
    process(tmp_path, 2, "0::/\n", environ=environ)
    process(tmp_path, 3, POD_CGROUP, environ=environ)
    process(tmp_path, 4, "0::/\n", environ={"EELGRID_WORKLOAD_ID": "w" * 1000})
    found = ProcessOwnerResolver(tmp_path).resolve([1, 2, 3, 4], now_ns=0)
    assert [found[pid].workload for pid in (1, 2, 3, 4)] == ["team/w-7_0", "team/w-7_0", "", ""]


def test_a_log_name_with_dots_and_dashes():
    assert parse_log_name(f"llm.v2-7d9f-abc_kube-system_side-car-{ID}.log") == (
        ID,
        ContainerName("kube-system", "llm.v2-7d9f-abc", "side-car"),
    )
    assert parse_log_name("0.log") is None


def test_a_sluid_is_resolved_by_the_environment_alone(tmp_path):
    cgroup = "0::/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_2/user/task_0\n"
    process(tmp_path, 1, cgroup, environ={"SECRET": "x", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "9"})
    process(tmp_path, 2, cgroup)
    process(tmp_path, 3, "0::/system.slice/slurmstepd.scope/job_5/step_0/user/task_0\n", environ={"SLURM_JOB_ID": "6"})
    process(tmp_path, 4, cgroup, environ={"SLURM_JOB_ID": "../../x"})
    assert owner_of(tmp_path, 1) == build_slurm_owner("4711", step="2", pid=1)
    # Without its environment the SLUID stands in for the number.
    assert owner_of(tmp_path, 2).job == "s5K1KKYAYG5D00"
    # What a user exports does not change whose job the kernel says it is.
    assert owner_of(tmp_path, 3).job == "5"
    assert owner_of(tmp_path, 4).job == "s5K1KKYAYG5D00"


def test_a_ray_worker(tmp_path):
    environ = {"RAY_JOB_ID": "03000000"}
    process(tmp_path, 1, "0::/user.slice/user-1000.slice/session-3.scope", title="ray::Actor.step", environ=environ)
    process(tmp_path, 2, POD_CGROUP, title="ray::Actor.step", environ=environ)
    process(tmp_path, 3, "0::/user.slice/user-1000.slice/session-3.scope", environ=environ)
    assert owner_of(tmp_path, 1) == UsageOwner(kind=UsageOwnerKind.RAY, ray_job="03000000", pid=1)
    # In a pod the pod owns it, and Ray is its second name.
    assert (owner_of(tmp_path, 2).kind, owner_of(tmp_path, 2).ray_job) == (UsageOwnerKind.POD, "03000000")
    assert owner_of(tmp_path, 3).kind is UsageOwnerKind.USER


def test_a_ray_worker_of_the_client_library_states_its_workload_and_one_in_a_pod_does_not(tmp_path):
    environ = {"RAY_JOB_ID": "03000000", "EELGRID_WORKLOAD_ID": "w-7"}
    session = "0::/user.slice/user-1000.slice/session-3.scope"
    for pid, cgroup in ((1, session), (2, "0::/system.slice/ray.service"), (3, POD_CGROUP)):
        process(tmp_path, pid, cgroup, title="ray::Actor.step", environ=environ)
    found = ProcessOwnerResolver(tmp_path).resolve([1, 2, 3], now_ns=0)
    assert [found[pid].workload for pid in (1, 2, 3)] == ["w-7", "w-7", ""]
    assert [found[pid].owner.ray_job for pid in (1, 2, 3)] == ["03000000"] * 3


def test_the_mps_server_is_reported(tmp_path):
    process(tmp_path, 1, "0::/system.slice/mps.service", title="nvidia-cuda-mps-server -f")
    process(tmp_path, 2, "0::/system.slice/x.service", title="grep nvidia-cuda-mps-server")
    found = ProcessOwnerResolver(tmp_path).resolve([1, 2], now_ns=0)
    assert found[1].mps_server
    assert not found[2].mps_server


def test_the_dead_are_remembered_for_a_while(tmp_path):
    process(tmp_path, 7, POD_CGROUP)
    book = ProcessOwnerResolver(tmp_path)
    alive = book.resolve([7], now_ns=0)[7]
    shutil.rmtree(tmp_path / "7")
    assert book.resolve([7], now_ns=5 * SECOND)[7] == alive
    book.resolve([], now_ns=int((DEAD_KEPT_S + 1) * SECOND))
    assert book.resolve([7], now_ns=int((DEAD_KEPT_S + 2) * SECOND))[7].owner == UsageOwner(
        kind=UsageOwnerKind.PROCESS, pid=7
    )


def test_an_ending_process_keeps_its_owner_and_a_new_one_does_not_inherit_it(tmp_path):
    process(tmp_path, 7, POD_CGROUP)
    book = ProcessOwnerResolver(tmp_path)
    book.resolve([7], now_ns=0)
    # A zombie is in the root cgroup, and its files are empty.
    process(tmp_path, 7, "0::/\n", title="")
    assert book.resolve([7], now_ns=SECOND)[7].owner.pod_uid == UID
    process(tmp_path, 7, "0::/\n", start=2000)
    assert book.resolve([7], now_ns=2 * SECOND)[7].owner == UsageOwner(kind=UsageOwnerKind.PROCESS, pid=7)


def test_a_process_that_moves_is_found_where_it_went(tmp_path):
    process(tmp_path, 7, "0::/system.slice/slurmd.service")
    book = ProcessOwnerResolver(tmp_path)
    assert book.resolve([7], now_ns=0)[7].owner.kind is UsageOwnerKind.UNIT
    process(tmp_path, 7, "0::/system.slice/slurmstepd.scope/job_5/step_0/user/task_0")
    assert book.resolve([7], now_ns=SECOND)[7].owner.job == "5"


def test_the_book_is_bounded(tmp_path):
    process(tmp_path, 1, POD_CGROUP)
    book = ProcessOwnerResolver(tmp_path)
    book.resolve([1], now_ns=0)
    (known,) = book._known.values()
    book._known.update((10 + index, type(known)(1, known.found, index)) for index in range(PROCESSES_MOST + 10))
    book.resolve([1], now_ns=SECOND)
    assert len(book._known) == PROCESSES_MOST
    assert 1 in book._known


def test_this_very_process_has_an_owner():
    import os

    found = ProcessOwnerResolver().resolve([os.getpid()], now_ns=0)[os.getpid()]
    assert found.owner.pid == os.getpid()
    assert not found.mps_server
