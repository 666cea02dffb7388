"""What a person is told when a call fails: two lines on stderr and a code; what a script is told: one JSON object."""

import json
import socket
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from tests.fakes.operators import FakeOperators, serving
from tests.fakes.terminal import Terminal

from eelgrid_controller.cli.__main__ import cli
from eelgrid_protos import faults
from eelgrid_protos.errors import Violation


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run(address, *arguments, **extra):
    return Terminal(address).run(*arguments, **extra)


@pytest.mark.parametrize(
    ("fault", "code", "what", "next_"),
    [
        (faults.NotFound("no workload x"), 4, "no workload x", "eelctl workloads"),
        (faults.AlreadyExists("x is taken"), 5, "x is taken", "--id"),
        (faults.FailedPrecondition("not now"), 5, "not now", "resolve the condition"),
        (faults.Aborted("revision 3 is in force"), 5, "revision 3 is in force", "repeat"),
        (faults.ResourceExhausted("queue is full"), 5, "queue is full", "wait, or cancel"),
        (faults.PermissionDenied("not you"), 5, "not you", "certificate"),
        (faults.Internal("oh"), 1, "oh", "controller's log"),
        (faults.Unavailable("restarting"), 3, "no controller answers", "EELGRID_CONTROLLER"),
        (faults.DeadlineExceeded("late"), 3, "no answer from", "--timeout"),
        (RuntimeError("a bug of the controller"), 1, "a fault in the server", "controller's log"),
    ],
)
def test_each_fault_has_its_code_and_what_to_do_next(fault, code, what, next_):
    with serving(FakeOperators(failures=[fault])) as address:
        result = run(address, "get", "x")
    assert result.exit_code == code
    assert result.stdout == ""
    first, *between, last = result.stderr.splitlines()
    assert first.startswith("eelctl: ")
    assert what in first
    assert between == []
    assert last.startswith("  next: ")
    assert next_ in last


def test_commands_help_where_the_controller_names_its_calls():
    with serving(FakeOperators(failures=[faults.NotFound("there is no node x; list them with ListNodes")])) as address:
        said = run(address, "get", "x").stderr.splitlines()
    assert said == [
        "eelctl: there is no node x",
        "  next: list names with `eelctl workloads` or `eelctl nodes`",
    ]


def test_each_violation_has_its_line():
    violations = (Violation("spec.name", "is empty", "give one"), Violation("spec.replicas", "is 0", "give at least 1"))
    with serving(
        FakeOperators(failures=[faults.InvalidArgument("the submission breaks 2 rules", violations)])
    ) as address:
        result = run(address, "submit", "--name", "a", "--cpu", "1")
    assert result.exit_code == 5
    assert result.stderr.splitlines() == [
        "eelctl: the submission breaks 2 rules",
        "  --name: is empty; give one",
        "  --replicas: is 0; give at least 1",
        "  next: correct it and run the command again",
    ]


def test_what_the_contract_refuses_is_not_sent():
    fake = FakeOperators()
    with serving(fake) as address:
        result = run(address, "submit", "--name", "no spaces!", "--cpu", "1")
    assert result.exit_code == 5
    assert "--name is not valid" in result.stderr
    assert fake.calls == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nodes", "--pool", "a\x1b"), ["eelctl: --pool is not valid", "  --pool: is 'a\\x1b'; use printable"]),
        (("cancel", ""), ["eelctl: WORKLOAD is not valid", "  WORKLOAD: is empty; give a value"]),
        (
            ("whatif", "--drain", "a", "--drain", ""),
            ["eelctl: --drain is not valid", "  --drain: is empty; give a value"],
        ),
        (
            ("submit", "--name", "a", "--cpu", "1", "--gpu-model", "T4"),
            [
                "eelctl: --gpu-model is not valid",
                "  --gpu-model: names a model but asks for no GPU; set --gpus or drop --gpu-model",
            ],
        ),
    ],
)
def test_an_error_names_what_was_typed(arguments, said):
    with serving(FakeOperators()) as address:
        result = run(address, *arguments)
    assert result.exit_code == 5
    lines = result.stderr.splitlines()
    assert [line[: len(want)] for line, want in zip(lines, said, strict=False)] == said


@pytest.mark.parametrize("arguments", [("exporters", "remove", "x" * 5000), ("nodes", "--sort", "x" * 5000)])
def test_a_long_value_is_shortened(arguments):
    with serving(FakeOperators()) as address:
        result = run(address, *arguments)
    assert result.exit_code
    assert "xxx... (5,000 characters)" in result.stderr
    assert len(result.stderr) < 1000


def test_nobody_listens():
    address = free_address()
    result = run(address, "nodes")
    assert result.exit_code == 3
    assert result.stderr.splitlines()[0].startswith(f"eelctl: no controller answers at {address} (")
    assert "eelgrid-controller" in result.stderr


def test_the_address_may_come_from_the_environment():
    with serving(FakeOperators()) as address:
        result = CliRunner().invoke(cli, ["nodes"], prog_name="eelctl", env={"EELGRID_CONTROLLER": address})
    assert result.exit_code == 0


def test_a_slow_controller():
    with serving(FakeOperators(delay_s=30.0)) as address:
        result = run(address, "--timeout", "0.2", "submit", "--name", "a", "--cpu", "1")
    assert result.exit_code == 3
    assert "in 0.2 s" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--controller", "192.0.2.1:7443", "nodes"), "--insecure"),
        (("--tls-certificate", "c.pem", "nodes"), "together"),
        (("nodes", "-o", "xml"), "is not one of"),
        (("--timeout", "0", "nodes"), "not in the range"),
        (("nodess",), "No such command"),
        (("policy", "set"), "name a setting to change"),
        (("policy", "set", "--weight", "speed=1"), "fragmentation_w"),
        (("policy", "set", "--weight", "power"), "NAME=VALUE"),
        (("nodes", "--limit", "0"), "not in the range"),
        (("nodez",), "No such command 'nodez'. Did you mean node"),
        (("xyzzy",), "No such command 'xyzzy'.\n"),
        (("completion", "tcsh"), "is not one of"),
    ],
)
def test_usage_errors_are_code_2(arguments, complaint):
    result = CliRunner().invoke(cli, list(arguments), prog_name="eelctl")
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_values_for_weights_and_modes_are_code_2():
    with serving(FakeOperators()) as address:
        assert run(address, "policy", "set", "--weight", "power=much").exit_code == 2
        assert run(address, "policy", "set", "--pool-mode", "a=on").exit_code == 2


def test_a_certificate_that_is_not_there():
    files = [f"--tls-{name}=/nowhere/{name}.pem" for name in ("certificate", "key", "authority")]
    result = CliRunner().invoke(cli, [*files, "nodes"], prog_name="eelctl")
    assert result.exit_code == 2
    assert "/nowhere/key.pem" in result.stderr


def test_a_fault_of_ours_keeps_its_traceback():
    """Only a user's mistake is told without one."""
    fake = FakeOperators()
    with serving(fake) as address:
        fake.nodes = []
        result = run(address, "get", "x")
        assert result.exit_code == 4
    from eelgrid_controller.cli.connection import CliSettings, cli_error_for

    assert cli_error_for(ZeroDivisionError(), CliSettings()) is None


def test_help_and_version_import_nothing_heavy():
    program = (
        "import sys; import eelgrid_controller.cli.__main__ as m; "
        "print(sorted({'grpc', 'rich', 'numpy', 'numba', 'yaml', 'google', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("module", ["jobs", "workloads", "nodes", "queue", "box", "top"])
def test_commands_of_every_day_import_no_planner(module):
    program = (
        f"import sys; import eelgrid_controller.cli.{module}; "
        "print(sorted({'grpc', 'rich', 'numpy', 'numba', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nope"]])
def test_the_light_commands_stay_light(arguments):
    program = (
        "import sys; from eelgrid_controller.cli.__main__ import cli\n"
        f"try: cli({arguments!r}, prog_name='eelctl')\n"
        "except SystemExit: pass\n"
        "print(sorted({'grpc', 'rich', 'numpy', 'numba', 'yaml', 'eelgrid_protos.messages'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        (faults.NotFound("no workload x"), 4, "not_found"),
        (faults.PermissionDenied("not you"), 5, "refused"),
        (faults.Unavailable("restarting"), 3, "unreachable"),
        (faults.Internal("oh"), 1, "failed"),
    ],
)
@pytest.mark.parametrize("form", [("get", "x", "-o", "json"), ("-ojson", "get", "x"), ("--output=json", "get", "x")])
def test_a_script_gets_a_fault_as_one_object(fault, code, reason, form):
    with serving(FakeOperators(failures=[fault])) as address:
        result = run(address, *form)
    assert (result.exit_code, result.stdout) == (code, "")
    said = json.loads(result.stderr)
    assert list(said) == ["reason", "message", "remedy", "violations"]
    assert said["reason"] == reason
    assert said["remedy"]


def test_a_script_gets_violations_field_by_field():
    violations = (Violation("spec.name", "is empty", "give one"), Violation("spec.replicas", "is 0", "give at least 1"))
    fault = faults.InvalidArgument("the submission breaks 2 rules", violations)
    with serving(FakeOperators(failures=[fault])) as address:
        said = json.loads(run(address, "submit", "--name", "a", "--cpu", "1", "-o", "json").stderr)
    assert said == {
        "reason": "refused",
        "message": "the submission breaks 2 rules",
        "remedy": "correct it and run the command again",
        "violations": [
            {"field": "--name", "problem": "is empty", "remedy": "give one"},
            {"field": "--replicas", "problem": "is 0", "remedy": "give at least 1"},
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("nodes", "-o", "json", "--limit", "0"), "eelctl nodes"),
        (("-o", "json", "nodez"), "eelctl"),
        (("get", "-o", "json"), "eelctl get"),
        (("-o", "json", "policy", "set"), "eelctl policy set"),
    ],
)
def test_a_script_gets_a_usage_error_as_one_object(arguments, command):
    result = CliRunner().invoke(cli, list(arguments), prog_name="eelctl")
    assert (result.exit_code, result.stdout) == (2, "")
    said = json.loads(result.stderr)
    assert (said["reason"], said["remedy"]) == ("usage", f"see {command} --help")


def test_the_last_format_that_is_given_holds_and_success_is_as_before():
    with serving(FakeOperators()) as address:
        assert run(address, "-o", "json", "get", "x", "-o", "yaml").stderr.startswith("eelctl: ")
        assert run(address, "get", "x", "-o", "json", "--", "-o", "yaml").exit_code == 2
        result = run(address, "nodes", "-o", "json")
    assert (result.exit_code, result.stderr, len(json.loads(result.stdout))) == (0, "", 1)


def _commands(group=cli, path=()):
    """Every command with its path, without those that become or start other programs, or wait for work to end."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if name in {"box", "demo", "doctor", "frontier", "run", "wait"}:
            continue
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("arguments", [(), ("é!",), ("x", "y"), ("-1", "2"), ("--nonsense",), ("-f", "/")])
def test_no_input_ends_in_a_traceback(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(FakeOperators()) as address:
        for path in _commands():
            result = run(address, *path, *arguments, input="")
            assert result.exit_code in range(6), path
            if result.exit_code in {3, 4, 5}:
                assert "\n  next: " in result.stderr, path
            elif result.exit_code == 2:
                assert "Error: " in result.stderr or "  next: " in result.stderr or "Usage: " in result.stderr, path
