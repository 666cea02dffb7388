"""The units of the installation without containers under a real systemd, with the example options that they come with."""

import json
import re

import pytest
from tests.certificates_rig import Authority
from tests.entry_points import ROOT
from tests.systemd_rig import Machine, find_obstacle
from tests.waiting import poll_until

FOLDER = ROOT / "deploy" / "systemd"
UNITS = ("controller", "ingest", "agent", "front")
PROGRAMS = ("eelgrid-controller", "eelgrid-front", "eelgrid-agent", "eelctl")
# The names in the examples; one controller stands for two clusters, and the second of a pair is away.
HERE = ("localhost", "controller.example", "controller-a.example", "north.example", "south.example", "front.example")
AWAY = "127.0.0.2 controller-b.example\n"
ROLES = {"controller": None, "ingest": "ingest", "agent": "agent", "front": "admin", "operator": "admin"}
# The agent's GPUs are simulated; its own API gives way to the ingest process, which is on the same machine here.
AGENT_OPTIONS = " --simulate /etc/eelgrid/fleet.json --listen 127.0.0.1:7446 --state /var/lib/eelgrid --run-processes --run-as agent"
NODE = {"name": "n1", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}
STARTS_S = 900.0
CONTROLLER, FRONT = "controller.example:7443", "front.example:7445"


@pytest.fixture
def machine(tmp_path):
    """The machine as the guide leaves it before the first start."""
    if why := find_obstacle():
        pytest.skip(why)
    authority = Authority()
    with Machine(tmp_path) as machine:
        for name in PROGRAMS:
            machine.install_program(name)
        machine.write("/etc/hosts", "".join(f"127.0.0.1 {name}\n" for name in HERE) + AWAY)
        machine.write("/etc/sysusers.d/eelgrid.conf", (FOLDER / "eelgrid.sysusers").read_text())
        machine.write("/etc/sysusers.d/jobs.conf", 'u eelgrid-jobs - "Jobs"\n')
        machine.run("systemd-sysusers")
        for party, role in ROLES.items():
            subject = [("CN", party), *([("O", f"eelgrid:{role}")] if role else [])]
            files = authority.write(tmp_path / party, *subject, names=HERE)
            for name, path in (("tls.crt", files.certificate), ("tls.key", files.key), ("ca.crt", files.authority)):
                group = "root" if party in {"agent", "operator"} else "eelgrid"
                machine.write(f"/etc/eelgrid/{party}/{name}", path.read_text(), mode="0640", group=group)
        machine.write("/etc/eelgrid/fleet.json", json.dumps({"nodes": [NODE]}))
        for name in UNITS:
            machine.write(
                f"/etc/systemd/system/eelgrid-{name}.service", (FOLDER / f"eelgrid-{name}.service").read_text()
            )
            options = (FOLDER / f"{name}.env").read_text().rstrip("\n")
            if name == "agent":
                options = re.sub(r" --(pool|topology) \S+", "", options) + AGENT_OPTIONS
            machine.write(f"/etc/eelgrid/{name}.env", options + "\n", mode="0640")
        machine.run("chgrp", "-R", "eelgrid-jobs", "/etc/eelgrid/agent")
        jobs = (FOLDER / "eelgrid-agent-jobs.conf").read_text()
        machine.write("/etc/systemd/system/eelgrid-agent.service.d/jobs.conf", jobs)
        machine.install_kernels("/var/cache/eelgrid-controller")
        machine.run("systemctl", "daemon-reload")
        yield machine


def show(machine, unit, *names):
    """Properties of a unit."""
    lines = machine.run("systemctl", "show", f"eelgrid-{unit}", *(f"--property={name}" for name in names)).splitlines()
    return dict(line.split("=", 1) for line in lines)


def call(machine, address, *words, check=True):
    """eelctl at an address, with the operator's certificate."""
    files = ("--tls-certificate", "tls.crt", "--tls-key", "tls.key", "--tls-authority", "ca.crt")
    paths = [word if word.startswith("--") else f"/etc/eelgrid/operator/{word}" for word in files]
    return machine.run("/opt/eelgrid/bin/eelctl", "--controller", address, *paths, *words, check=check)


def read_log(machine, unit):
    """What a unit has said."""
    return machine.run("journalctl", "--unit", f"eelgrid-{unit}", "--no-pager", "--output=cat")


def until_says(machine, unit, mark, times=1):
    """Waits until a unit has said so, and fails with its log if it has ended."""

    def look():
        found = read_log(machine, unit)
        assert show(machine, unit, "ActiveState")["ActiveState"] in {"active", "activating"}, found
        return found.count(mark) >= times

    poll_until(look, f"eelgrid-{unit} says {mark}", within_s=STARTS_S)


def read_json(machine, *words):
    """What eelctl prints as JSON; None where the controller does not answer yet."""
    found = call(machine, CONTROLLER, "-o", "json", *words, check=False)
    return json.loads(found) if found else None


def test_the_units_start_run_a_job_come_back_and_stop(machine):
    machine.run("systemd-analyze", "verify", *(f"/etc/systemd/system/eelgrid-{name}.service" for name in UNITS))
    for name in UNITS:
        machine.run("systemctl", "enable", "--now", f"eelgrid-{name}")
        until_says(machine, name, "event=serving")
    poll_until(lambda: read_json(machine, "nodes"), "the node is there")
    job = call(machine, CONTROLLER, "run", "-d", "--gpus", "1", "--", "sleep", "4711").strip()

    def find_job():
        return machine.run("pgrep", "--full", "--exact", "sleep 4711", check=False).split()

    poll_until(find_job, "the job runs")
    (pid,) = find_job()
    assert machine.run("stat", "--format=%U", f"/proc/{pid}").strip() == "eelgrid-jobs"
    # Jobs go on while their agent starts again, and it finds them.
    machine.run("systemctl", "restart", "eelgrid-agent")
    until_says(machine, "agent", "event=serving", times=2)
    machine.run("systemctl", "kill", "--signal=KILL", "eelgrid-controller")
    until_says(machine, "controller", "event=serving", times=2)
    assert show(machine, "controller", "NRestarts")["NRestarts"] == "1"
    poll_until(lambda: (read_json(machine, "get", job) or {}).get("phase") == "placed", "the job is known again")
    assert find_job() == [pid]
    clusters = call(machine, FRONT, "clusters").splitlines()
    assert [line.split()[:2] for line in clusters[1:]] == [["north", "ready"], ["south", "ready"]]
    call(machine, CONTROLLER, "cancel", "--yes", job)
    poll_until(lambda: not find_job(), "the job has ended")
    for name in UNITS:
        machine.run("systemctl", "stop", f"eelgrid-{name}")
        found = show(machine, name, "Result", "ExecMainStatus")
        assert found == {"Result": "success", "ExecMainStatus": "0"}, (found, read_log(machine, name))
