"""Owners out of cgroup texts, as kubelets, Slurm, container engines and systemd write them."""

import pytest

from eelgrid_agent.energy.accounts import UsageOwner, UsageOwnerKind
from eelgrid_agent.energy.process_owners import CGROUP_TEXT_MOST, is_sluid, owner_from_cgroup

UID = "2c48913c-b29f-11e7-9350-020968147796"
UID_ = UID.replace("-", "_")
STATIC = "6666458b54b1a49bb1c1d9e3d8e8b9f4"
ID = "e86dd8ad7a2ee1d8a1b5ae3ba1bb2c1b0fa4d3d38e2a5d0b1c8e7f60a1b2c3d4"
OTHER = "d2f1c9a7" * 8


def pod(container_id=ID, uid=UID):
    return UsageOwner(kind=UsageOwnerKind.POD, pod_uid=uid, container_id=container_id)


def slurm(job, step=""):
    return UsageOwner(kind=UsageOwnerKind.SLURM, job=job, step=step)


def engine(container_id=ID):
    return UsageOwner(kind=UsageOwnerKind.CONTAINER, container_id=container_id)


def v1(path):
    """The same path in every hierarchy, as most v1 machines have it."""
    controllers = ("name=systemd", "pids", "memory", "devices", "cpu,cpuacct", "freezer")
    return "\n".join(f"{index}:{name}:{path}" for index, name in enumerate(controllers, 1)) + "\n"


CASES = {
    # Kubernetes, cgroupfs driver.
    f"0::/kubepods/burstable/pod{UID}/{ID}": pod(),
    f"0::/kubepods/pod{UID}/{ID}": pod(),
    v1(f"/kubepods/besteffort/pod{UID}/{ID}"): pod(),
    v1(f"/kubepods/besteffort/pod{UID}/crio-{ID}"): pod(),
    f"0::/kubepods/burstable/pod{STATIC}/{ID}": pod(uid=STATIC),
    f"0::/kubepods/burstable/pod{UID}": pod(""),
    # Kubernetes, systemd driver, three engines.
    f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/cri-containerd-{ID}.scope": pod(),
    f"0::/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{ID}.scope": pod(),
    f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice/crio-{ID}.scope": pod(),
    f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice/crio-{ID}.scope/container": pod(),
    f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/docker-{ID}.scope": pod(),
    v1(f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/docker-{ID}.scope"): pod(),
    f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope": pod(
        uid=STATIC
    ),
    # The kubelet's driver and containerd's differ.
    f"0::/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{ID}": pod(),
    f"12:devices:/system.slice/containerd.service/kubepods-besteffort-pod{UID_}.slice:cri-containerd:{ID}": pod(),
    # Seen from another cgroup namespace; a node that is a container itself; a daemon of containers in a pod.
    f"0::/../../kubepods-besteffort-pod{UID_}.slice/cri-containerd-{ID}.scope": pod(),
    f"0::/../../../kubepods/burstable/pod{UID}/{ID}": pod(),
    f"0::/docker/{OTHER}/kubelet/kubepods/burstable/pod{UID}/{ID}": pod(),
    f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
    f"kubelet-kubepods-besteffort-pod{UID_}.slice/cri-containerd-{ID}.scope": pod(),
    f"0::/kubepods/burstable/pod{UID}/{ID}/docker/{OTHER}": pod(),
    f"0::/kubepods/burstable/pod{UID}/{ID}/system.slice/sshd.service": pod(),
    # Slurm, cgroup v1 and v2, several slurmd on one machine.
    v1("/slurm/uid_1000/job_123/step_0/task_0"): slurm("123", "0"),
    v1("/slurm_n1/uid_1000/job_123/step_batch/task_0"): slurm("123", "batch"),
    "10:devices:/slurm/uid_2101171/job_280678/step_interactive/task_0": slurm("280678", "interactive"),
    v1("/slurm/uid_1000/job_123/step_extern"): slurm("123", "extern"),
    "0::/system.slice/slurmstepd.scope/job_1392969/step_0/user/task_0": slurm("1392969", "0"),
    "0::/system.slice/gpu-node-01_slurmstepd.scope/job_7/step_batch/user/task_special": slurm("7", "batch"),
    "0::/system.slice/slurmstepd.scope/job_7/step_extern/user": slurm("7", "extern"),
    "0::/system.slice/slurmstepd.scope/job_42": slurm("42"),
    # 26.05 names a job by its SLUID.
    "0::/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0": slurm("s5K1KKYAYG5D00", "0"),
    "0::/system.slice/n1_slurmstepd.scope/s5K1KKYAYG5D00/step_batch/user": slurm("s5K1KKYAYG5D00", "batch"),
    # The step daemon itself is no job.
    "0::/system.slice/slurmstepd.scope/system": UsageOwner(kind=UsageOwnerKind.UNIT, unit="slurmstepd.scope"),
    "0::/system.slice/slurmd.service": UsageOwner(kind=UsageOwnerKind.UNIT, unit="slurmd.service"),
    # Slurm in a pod, and a hybrid machine where one hierarchy knows more.
    f"0::/kubepods/burstable/pod{UID}/{ID}/system.slice/slurmstepd.scope/job_9/step_1/user/task_0": slurm("9", "1"),
    "5:devices:/slurm/uid_0/job_5/step_0/task_1\n1:name=systemd:/system.slice/slurmd.service\n0::/": slurm("5", "0"),
    # Engines alone.
    f"0::/system.slice/docker-{ID}.scope": engine(),
    v1(f"/docker/{ID}"): engine(),
    f"0::/machine.slice/libpod-{ID}.scope/container": engine(),
    f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope": engine(),
    # systemd.
    "0::/system.slice/ollama.service": UsageOwner(kind=UsageOwnerKind.UNIT, unit="ollama.service"),
    "0::/system.slice/system-getty.slice/getty@tty1.service": UsageOwner(
        kind=UsageOwnerKind.UNIT, unit="getty@tty1.service"
    ),
    "0::/user.slice/user-1000.slice/session-3.scope": UsageOwner(
        kind=UsageOwnerKind.USER, user="1000", unit="session-3.scope"
    ),
    "0::/user.slice/user-1001.slice/user@1001.service/app.slice/jupyter.service": UsageOwner(
        kind=UsageOwnerKind.USER, user="1001", unit="jupyter.service"
    ),
    "1:name=systemd:/user.slice/user-0.slice/session-1.scope\n4:memory:/": UsageOwner(
        kind=UsageOwnerKind.USER, user="0", unit="session-1.scope"
    ),
    # Nobody.
    "0::/": None,
    "0::/init.scope": None,
    "": None,
    "garbage": None,
    f"0::/{ID}": None,
    f"0::/pod{UID[:-1]}/x": None,
    "0::/kubepods/burstable": None,
}


@pytest.mark.parametrize("text", list(CASES), ids=range(len(CASES)))
def test_the_owner_of_a_cgroup(text):
    assert owner_from_cgroup(text) == CASES[text]


def test_what_is_too_long_is_not_read():
    path = f"0::/kubepods/burstable/pod{UID}/{ID}"
    assert owner_from_cgroup("x" * CGROUP_TEXT_MOST + "\n" + path) is None
    assert owner_from_cgroup("\n" * 100 + path) is None
    assert owner_from_cgroup(f"0::/{'a/' * 3000}job_1") is None


def test_a_sluid_is_distinguished_from_a_number():
    assert is_sluid("s5K1KKYAYG5D00")
    assert not is_sluid("123")
    # Crockford's alphabet has no I, L, O and U.
    assert not is_sluid("s5K1KKYAYG5DIL")
