"""A box that root shares: users of the machine submit over one socket, and jobs run as them. Needs root and `nobody`."""

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest
from tests.e2e.box_test import NODE, Box
from tests.e2e.processes import fleet_of
from tests.waiting import poll_until

from eelgrid_protos import faults, rpc
from eelgrid_protos.local_users import build_channel_credentials
from eelgrid_protos.messages import (
    AttachOpening,
    AttachRequest,
    CancelWorkloadRequest,
    GetWorkloadRequest,
    ListAuditEntriesRequest,
    Mobility,
    ProcessSpec,
    ReadLogsRequest,
    ResourceRequest,
    SubmitWorkloadRequest,
    WhoAmIRequest,
    WorkloadSpec,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root runs processes as others")
NOBODY = pwd.getpwnam("nobody")
# An account of the system, from which no job comes by its name alone.
SYSTEM = pwd.getpwnam("daemon")


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("local-users")
    with tempfile.TemporaryDirectory(prefix="box") as state, tempfile.TemporaryDirectory(prefix="shared") as shared:
        found = Box(state, tmp_path)
        # Users enter it.
        Path(shared).chmod(0o755)
        found.shared = Path(shared)
        found.environment["EELGRID_SHARED_BOX"] = shared
        found.eelctl("box", "start", "--shared", "--simulate", str(fleet_of(tmp_path / "fleet.json", [NODE])))
        try:
            yield found
        finally:
            found.eelctl("box", "stop", "--cancel")


def proof_of(user, folder):
    """The proof that a process of another user makes."""
    text = (
        "import os, sys; from pathlib import Path; from eelgrid_protos import local_users\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))\n"
        "print(local_users.read_proof(Path(sys.argv[3])))"
    )
    command = [sys.executable, "-c", text, str(user.pw_uid), str(user.pw_gid), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def connect(box):
    channels = []

    def connect(user=None, proof=None):
        folder = box.shared / "controller.sock.users"
        proof = proof or (proof_of(user, folder) if user is not None else None)
        channel = grpc.secure_channel(f"unix:{box.shared}/controller.sock", build_channel_credentials(folder, proof))
        channels.append(channel)
        return rpc.build_client(rpc.OPERATOR_SERVICE, channel)

    yield connect
    for channel in channels:
        channel.close()


def submit(calls, *argv, user=""):
    spec = WorkloadSpec(
        name="job",
        user=user,
        request=ResourceRequest(cpu_milli=1000),
        mobility=Mobility.FIXED,
        process=ProcessSpec(argv=argv, working_directory="/", environment={"PATH": "/usr/bin:/bin"}),
    )
    return calls.submit_workload(SubmitWorkloadRequest(spec=spec), timeout=10.0).workload.workload_id


def ended(calls, key):
    def find():
        return calls.get_workload(GetWorkloadRequest(workload_id=key), timeout=5.0).workload

    poll_until(lambda: find().phase.is_ended, within_s=30.0)
    return find()


def printed(calls, key):
    return "".join(part.text for part in calls.read_logs(ReadLogsRequest(workload_id=key)))


def test_a_job_runs_as_the_user_who_submitted_it_with_that_users_files_and_nothing_of_root(box, connect):
    calls = connect(NOBODY)
    found = calls.who_am_i(WhoAmIRequest(), timeout=5.0)
    assert (found.user, found.roles) == ("nobody", ("submitter",))
    script = (
        "id -u; id -g; id -G; echo $HOME $USER; umask; echo saved > $EELGRID_CHECKPOINT_DIR/state; ls -ln $EELGRID_CHECKPOINT_DIR;"
        "cat /etc/shadow 2>&1 | head -c 40; grep ^Cap /proc/self/status; ls /proc/self/fd | wc -l"
    )
    key = submit(calls, "/bin/sh", "-c", script)
    assert ended(calls, key).exit_code == 0
    text = printed(calls, key)
    lines = text.splitlines()
    assert lines[:3] == [str(NOBODY.pw_uid), str(NOBODY.pw_gid), str(NOBODY.pw_gid)]
    assert lines[3] == f"{NOBODY.pw_dir} nobody"
    assert f"{NOBODY.pw_uid} {NOBODY.pw_gid}" in next(line for line in lines if line.endswith(" state"))
    assert "Permission denied" in text
    for line in lines:
        if line.startswith(("CapPrm", "CapEff", "CapInh", "CapAmb")):
            assert int(line.split()[1], 16) == 0
    (log,) = (box.shared / "agent").glob(f"**/{key}.0.1/output.log")
    assert log.stat().st_uid == NOBODY.pw_uid
    assert log.parent.stat().st_uid == 0


def test_a_user_cancels_reads_and_attaches_to_its_own_jobs_only(box, connect):
    calls, root = connect(NOBODY), connect()
    own, other = submit(calls, "/bin/sleep", "600"), submit(root, "/bin/sleep", "600")
    for refused in (
        lambda: calls.cancel_workload(CancelWorkloadRequest(workload_id=other), timeout=5.0),
        lambda: printed(calls, other),
        lambda: list(calls.attach(iter((AttachRequest(message=AttachOpening(workload_id=other)),)))),
        lambda: calls.list_audit_entries(ListAuditEntriesRequest(), timeout=5.0),
        lambda: submit(calls, "/bin/true", user="root"),
    ):
        with pytest.raises(faults.PermissionDenied) as caught:
            refused()
        (violation,) = caught.value.violations
        assert (violation.field, violation.problem) == ("user", "is nobody")
    calls.cancel_workload(CancelWorkloadRequest(workload_id=own), timeout=5.0)
    assert ended(calls, own).attempts[0].signal == 15


def test_roots_jobs_and_those_of_accounts_of_the_system_are_refused_with_the_remedy(box, connect):
    calls = connect()
    found = ended(calls, submit(calls, "/usr/bin/id"))
    assert not found.attempts[0].is_success
    assert "user: root is root here; submit as another user" in found.reason
    system = connect(SYSTEM)
    found = ended(system, submit(system, "/usr/bin/id"))
    assert "user: daemon is an account of the system" in found.reason
    assert "--map-user daemon=daemon" in found.reason


def test_nobody_comes_in_without_a_proof_or_with_anothers(box, connect):
    channel = grpc.insecure_channel(f"unix:{box.shared}/controller.sock")
    with channel:
        calls = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        with pytest.raises(faults.PermissionDenied):
            submit(calls, "/bin/true")
    with pytest.raises(faults.PermissionDenied):
        submit(connect(proof="0:" + "0" * 64), "/bin/true")


def test_root_finds_the_shared_box_by_itself_and_sees_all_of_it(box, connect):
    key = submit(connect(NOBODY), "/bin/echo", "hello")
    ended(connect(), key)
    elsewhere = {"XDG_STATE_HOME": str(box.folder)}
    assert box.eelctl("logs", key, env=elsewhere).stdout == "hello\n"
    assert "nobody" in box.eelctl("jobs", "--all", env=elsewhere).stdout
    assert "nobody" in box.eelctl("audit", env=elsewhere).stdout
