"""The systemd units of both daemons: options that exist, files where the guide has them, rights that the work needs."""

import re
import shlex
import shutil
import subprocess

import click
import pytest
from click.core import ParameterSource
from tests.docs_rig import DOCS, ROOT

from eelgrid_agent.node.config import parse_flags
from eelgrid_controller.__main__ import _OF_INGEST
from eelgrid_controller.__main__ import main as controller

FOLDER = ROOT / "deploy" / "systemd"
GUIDE = (DOCS / "how-to" / "install-bare-metal.md").read_text()
DAEMONS = ("agent", "controller", "front", "ingest")
# An ingest process is the controller's program.
PROGRAMS = {"ingest": "controller"}
# Each of these keeps NVML from its devices; ProtectClock allows the clock's device and with that no other.
WITHOUT_DEVICES = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
# Each of these hides processes, and with them whose they are.
WITHOUT_PROCESSES = {"ProtectProc", "ProcSubset", "PrivateUsers", "PrivatePIDs"}


def _settings(name):
    """All settings of a unit by section and name; a name may stand twice."""
    found, section = {}, ""
    for line in (FOLDER / f"eelgrid-{name}.service").read_text().splitlines():
        if re.fullmatch(r"\[\w+\]", line):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            assert re.match(r"[A-Z][A-Za-z]+=", line), line
            key, _, value = line.partition("=")
            found.setdefault(section, {}).setdefault(key, []).append(value)
    return found


def _service(name):
    return {key: values[-1] for key, values in _settings(name)["Service"].items()}


def _options(name):
    """The words of the example of an environment file, and those of ExecStart."""
    (line,) = [one for one in (FOLDER / f"{name}.env").read_text().splitlines() if not one.startswith("#")]
    key, _, value = line.partition("=")
    assert key == "OPTIONS"
    started = shlex.split(_service(name)["ExecStart"].replace("%S", "/var/lib"))
    assert started[0] == f"/opt/eelgrid/bin/eelgrid-{PROGRAMS.get(name, name)}"
    assert started[-1] == "$OPTIONS"
    return [*started[1:-1], *shlex.split(value)]


def test_the_daemons_take_the_options_of_units_and_examples():
    config = parse_flags(_options("agent"))
    assert config.pool == "a"
    assert config.tls is not None
    with click.Context(controller) as context:
        controller.parse_args(context, _options("controller"))
        assert str(context.params["data"]) == "/var/lib/eelgrid-controller"
        assert context.params["listen"] == "0.0.0.0:7443"
    with click.Context(controller) as context:
        controller.parse_args(context, _options("ingest"))
        assert context.params["ingest"].startswith("controller-a.example:7443,")
        stated = {one for one in context.params if context.get_parameter_source(one) is ParameterSource.COMMANDLINE}
        assert stated <= _OF_INGEST


@pytest.mark.parametrize("name", DAEMONS)
def test_an_option_of_the_environment_file_that_is_none_is_noticed(name):
    with pytest.raises((SystemExit, click.UsageError)):
        _parse(name, [*_options(name), "--no-such-option"])


def _parse(name, words):
    if name == "agent":
        return parse_flags(words)
    with click.Context(controller) as context:
        return controller.parse_args(context, words)


@pytest.mark.parametrize("name", DAEMONS)
def test_a_unit_comes_back_and_stops_only_its_daemon(name):
    unit, service = _settings(name)["Unit"], _service(name)
    assert unit["StartLimitIntervalSec"] == ["0"]
    assert service["Restart"] == "always"
    # The agent's driver process must outlive SIGTERM, or nothing could be restored.
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) >= 40
    # Without options an ingest process would be a controller.
    mark = "" if name == "ingest" else "-"
    assert service["EnvironmentFile"] == f"{mark}/etc/eelgrid/{name}.env"
    assert "multi-user.target" in _settings(name)["Install"]["WantedBy"]


def test_jobs_of_an_agent_go_on_while_its_unit_restarts_and_are_limited():
    text = (FOLDER / "eelgrid-agent-jobs.conf").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["KillMode"] == "process"
    assert set(settings["Delegate"].split()) == {"cpu", "memory", "pids"}
    assert settings["DelegateSubgroup"] == "agent"
    assert "eelgrid-agent-jobs.conf" in GUIDE


@pytest.mark.parametrize("name", DAEMONS)
def test_a_unit_is_hardened(name):
    service = _service(name)
    assert service["ProtectSystem"] == "strict"
    wanted = {"NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelModules", "RestrictNamespaces"}
    assert {service.get(key) for key in wanted} == {"yes"}


def test_the_agent_sees_its_devices_and_whose_processes_are():
    service = _service("agent")
    assert set(service) & (WITHOUT_DEVICES | WITHOUT_PROCESSES) == set()
    assert "User" not in service
    assert set(service["CapabilityBoundingSet"].split()) == {"CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_SYS_PTRACE"}
    assert all(f"`{one}`" in GUIDE for one in service["CapabilityBoundingSet"].split())
    # Where `eelgrid-agent mig` looks by itself as root: one lock for both.
    assert service["StateDirectory"] == "eelgrid"


def test_the_controller_has_no_right_and_may_compile():
    service = _service("controller")
    assert service["User"] == service["Group"] == "eelgrid"
    assert service["CapabilityBoundingSet"] == ""
    assert "MemoryDenyWriteExecute" not in service
    assert (FOLDER / "eelgrid.sysusers").read_text().splitlines()[-1].split()[:2] == ["u", "eelgrid"]
    assert service["StateDirectory"] != _service("agent")["StateDirectory"]


def test_an_ingest_process_has_no_right_and_no_folder():
    service = _service("ingest")
    assert service["User"] == service["Group"] == "eelgrid"
    assert service["CapabilityBoundingSet"] == ""
    assert not {"StateDirectory", "CacheDirectory"} & set(service)


def test_the_guide_installs_every_file_and_names_every_folder():
    for path in FOLDER.iterdir():
        assert f"deploy/systemd/{path.name}" in GUIDE, path.name
    for name in DAEMONS:
        if "StateDirectory" in _service(name):
            assert f"`/var/lib/{_service(name)['StateDirectory']}`" in GUIDE
        for path in set(re.findall(r"/etc/eelgrid/(\w+)/", (FOLDER / f"{name}.env").read_text())):
            assert f"`/etc/eelgrid/{path}`" in GUIDE
    assert f"`/var/cache/{_service('controller')['CacheDirectory']}`" in GUIDE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_finds_no_fault_in_the_units(tmp_path):
    paths = []
    for name in DAEMONS:
        text = (FOLDER / f"eelgrid-{name}.service").read_text()
        # It also looks for the program, which is not installed here.
        path = tmp_path / f"eelgrid-{name}.service"
        path.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={shutil.which('true')}", text))
        paths.append(str(path))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
