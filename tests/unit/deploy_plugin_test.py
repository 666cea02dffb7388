"""kubectl eelgrid: what is ours and what is eelctl's, the way through a kubectl, and that nothing is left behind."""

import base64
import json
import os
import subprocess
import sys

import click
import pytest

from eelgrid_controller.cli.kubectl import KubectlTarget, _wants_controller, split_arguments

# A kubectl that writes down what it was asked, forwards nowhere, and gives a secret.
KUBECTL = """#!{python}
import json, os, sys, time
with open(os.environ["ASKED"], "a") as asked:
    asked.write(json.dumps(sys.argv[1:]) + "\\n")
if "port-forward" in sys.argv:
    if os.environ.get("REFUSES"):
        sys.exit("Error from server (NotFound): services not found")
    print("Forwarding from 127.0.0.1:{port} -> 7443", flush=True)
    open(os.environ["ASKED"] + ".pid", "w").write(str(os.getpid()))
    time.sleep(60)
elif os.environ.get("SECRET"):
    print(os.environ["SECRET"])
"""


def test_our_options_stand_before_the_command():
    assert split_arguments(["top"]) == (KubectlTarget(), ["top"])
    way, rest = split_arguments(["-n", "grid", "--context=prod", "--service", "s", "nodes", "-n", "x"])
    assert way == KubectlTarget(namespace="grid", context="prod", service="s")
    assert rest == ["nodes", "-n", "x"]
    assert way.kubectl("k") == ["k", "--namespace", "grid", "--context", "prod"]
    with pytest.raises(click.UsageError, match="needs a value"):
        split_arguments(["--context"])


@pytest.mark.parametrize(
    ("arguments", "environment", "wanted"),
    [
        (["top"], {}, True),
        (["-o", "json", "nodes"], {}, True),
        ([], {}, False),
        (["--controller", "h:1", "top"], {}, False),
        (["--controller=h:1", "top"], {}, False),
        (["top", "--help"], {}, False),
        (["--version"], {}, False),
        (["completion", "bash"], {}, False),
        (["top"], {"EELGRID_CONTROLLER": "h:1"}, False),
    ],
)
def test_a_way_is_made_only_where_one_is_needed(arguments, environment, wanted):
    assert _wants_controller(arguments, environment) == wanted


@pytest.fixture
def run(tmp_path, unused_tcp_port):
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL.format(python=sys.executable, port=unused_tcp_port))
    program.chmod(0o755)
    asked = tmp_path / "asked"

    def run(*arguments, **environment):
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("EELGRID_", "KUBE"))}
        done = subprocess.run(
            [sys.executable, "-m", "eelgrid_controller.cli.kubectl", *arguments],
            env={
                **kept,
                "PATH": f"{program.parent}:{kept['PATH']}",
                "ASKED": str(asked),
                "TMPDIR": str(tmp_path),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        told = [json.loads(line) for line in asked.read_text().splitlines()] if asked.is_file() else []
        return done, told

    run.port, run.folder = unused_tcp_port, tmp_path
    return run


def test_it_forwards_asks_and_leaves_nothing(run):
    """Nobody listens at the forwarded port, so eelctl says that it cannot reach it: at that address."""
    data = {name: base64.b64encode(b"no certificate").decode() for name in ("tls.crt", "tls.key", "ca.crt")}
    done, told = run("-n", "grid", "--timeout", "0.5", "nodes")
    assert done.returncode == 3
    assert f"127.0.0.1:{run.port}" in done.stderr
    forward, secret = told
    assert forward == [
        "--namespace",
        "grid",
        "port-forward",
        "service/eelgrid-controller",
        ":7443",
        "--address",
        "127.0.0.1",
    ]
    assert secret[2:5] == ["get", "secret", "eelgrid-operator-tls"]
    # The forwarding ended with the command, and with it the key's file.
    pid = int((run.folder / "asked.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    done, _ = run("--timeout", "0.5", "nodes", SECRET=json.dumps({"data": data}))
    assert done.returncode != 0
    assert list(run.folder.glob("eelgrid-*")) == []


def test_what_kubectl_says_is_reported(run):
    done, _ = run("nodes", REFUSES="1")
    assert done.returncode == 1
    assert "cannot forward a port to service/eelgrid-controller" in done.stderr
    assert "services not found" in done.stderr
    done, _ = run("nodes", SECRET=json.dumps({"data": {"tls.crt": ""}}))
    assert "lacks ca.crt, tls.key" in done.stderr


def test_help_needs_no_cluster(run):
    done, told = run("--help")
    assert done.returncode == 0
    assert "kubectl eelgrid [options] COMMAND" in done.stdout
    assert "Watch the cluster live" in done.stdout
    assert told == []
