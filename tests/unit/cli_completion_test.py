"""What shells complete: names that the controller knows, as bash and zsh ask for them, and nothing where none answers."""

import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from tests.fakes.operators import FakeOperators, a_node, serving
from tests.unit.cli_failure_test import free_address

from eelgrid_controller.cli.__main__ import cli


def complete(address, *words, shell="bash"):
    """The values that a shell is given for the last word; asserts that nothing else is printed."""
    line = {"COMP_WORDS": " ".join(["eelctl", *words]), "COMP_CWORD": str(len(words))}
    environment = {**line, "_EELCTL_COMPLETE": f"{shell}_complete", "EELGRID_CONTROLLER": address}
    result = CliRunner().invoke(cli, [], prog_name="eelctl", env=environment)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = list(filter(None, result.stdout.splitlines()))
    if shell == "zsh":
        return [value for kind, value in zip(lines[::3], lines[1::3], strict=True) if kind == "plain"]
    return [line.partition(",")[2] for line in lines]


@pytest.fixture
def address(fake, eelctl):
    fake.nodes = [a_node("gpu-1"), a_node("gpu-2"), a_node("cpu-1", gpus=0)]
    for key, name, user, queue in (("w-1", "train", "ada", "fast"), ("w-2", "serve", "bob", "slow")):
        options = ("--name", name, "--user", user, "--queue", queue, "--namespace", f"of-{user}", "--cpu", "1")
        eelctl("submit", "--id", key, *options)
    return eelctl.address


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("topology", "gpu"), ["gpu-1", "gpu-2"]),
        (("plan", "c"), ["cpu-1"]),
        (("nodes", "--pool", "a"), ["a"]),
        (("gpus", "--gpu-model", "T"), ["T4"]),
        (("get", "w"), ["w-1", "w-2"]),
        (("get", "tr"), ["train"]),
        (("cancel", "w-1", "se"), ["serve"]),
        (("explain", "w-2"), ["w-2"]),
        (("workloads", "--user", "a"), ["ada"]),
        (("queue", "--queue", "s"), ["slow"]),
        (("submit", "--namespace", "of-b"), ["of-bob"]),
        (("submit", "--gpu-model", "A10,T"), ["A10,T4"]),
        (("describe", "node", "gpu-1"), ["gpu-1"]),
        (("describe", "gpu", "gpu-1/"), ["gpu-1/0", "gpu-1/1"]),
        (("describe", "workload", "t"), ["train"]),
        (("whatif", "--drain", "cp"), ["cpu-1"]),
        (("policy", "set", "--pool-mode", "a=e"), ["a=enforce"]),
        (("nodes", "--sort", "po"), ["pool", "power"]),
        (("workloads", "--filter", "us"), ["user="]),
        (("spending", "--sort", "sh"), ["share"]),
        (("promises", "--filter", "serv"), ["service="]),
        (("workloads", "-o", "w"), ["wide"]),
    ],
)
def test_values_are_completed(address, shell, words, values):
    assert complete(address, *words, shell=shell)[: len(values)] == values


def test_connection_options_before_the_command_count(address):
    assert complete(free_address(), "--controller", address, "topology", "gpu-2") == ["gpu-2"]


def test_policies_are_completed():
    assert "pwr200" in complete(free_address(), "policy", "set", "--policy", "pwr")


@pytest.mark.parametrize("words", [("topology", "g"), ("get", "w"), ("describe", "gpu", "g"), ("nodes", "--pool", "a")])
def test_without_a_controller_nothing_is_completed_and_nothing_said(words):
    assert complete(free_address(), *words) == []


def test_an_answer_that_is_refused_or_late_completes_nothing():
    with serving(FakeOperators(nodes=[a_node("gpu-1")], failures=[RuntimeError("a bug")])) as address:
        assert complete(address, "topology", "g") == []
        assert complete(address, "--tls-key", "/nowhere", "topology", "g") == []
        assert complete(address, "topology", "g") == ["gpu-1"]
    # An address that swallows packets (RFC 5737) costs the deadline and no more.
    start_s = time.monotonic()
    assert complete(address, "--insecure", "--controller", "192.0.2.1:7443", "topology", "g") == []
    assert time.monotonic() - start_s < 5.0


def test_a_process_prints_nothing_on_stderr():
    environment = {"_EELCTL_COMPLETE": "zsh_complete", "COMP_WORDS": "eelctl get w", "COMP_CWORD": "2"}
    environment |= {"EELGRID_CONTROLLER": free_address(), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "eelgrid_controller.cli"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)
