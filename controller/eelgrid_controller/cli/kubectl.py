"""kubectl eelgrid: eelctl against the controller of the current kube context.

Forwards a free loopback port to the controller's Service with `kubectl port-forward`, reads the client
certificate from a Secret if the account may read it, and removes both at the end. Must not know eelctl's
commands; arguments that are not options of its own are passed on.

A kubectl plugin is a program named kubectl-NAME, which gets every argument after the name. It talks to
the cluster through kubectl only, so that contexts, credentials and proxies are kubectl's. With
--controller in the arguments or EELGRID_CONTROLLER set, nothing is forwarded.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import click

_SERVICE, _SECRET, _PORT = "eelgrid-controller", "eelgrid-operator-tls", 7443
_FORWARDED = re.compile(r"Forwarding from (127\.0\.0\.1:\d+) ->")
_FORWARD_WITHIN_S = 20.0
_ANSWER_WITHIN_S = 30.0
_OPTIONS = {
    "--namespace": "namespace",
    "-n": "namespace",
    "--context": "context",
    "--kubeconfig": "kubeconfig",
    "--service": "service",
    "--secret": "secret",
}
_FILES = {"tls.crt": "--tls-certificate", "tls.key": "--tls-key", "ca.crt": "--tls-authority"}
_HELP = f"""kubectl eelgrid [options] COMMAND ...: run eelctl against the controller of this cluster.

  -n, --namespace NAME   namespace of the controller (default eelgrid)
  --context NAME         context of the kubeconfig
  --kubeconfig FILE      kubeconfig to use
  --service NAME         Service of the controller (default {_SERVICE})
  --secret NAME          Secret with the client certificate (default {_SECRET}; empty for none)

"""


class KubectlTarget(NamedTuple):
    """Names by which kubectl finds the controller."""

    namespace: str = "eelgrid"
    context: str = ""
    kubeconfig: str = ""
    service: str = _SERVICE
    secret: str = _SECRET

    def kubectl(self, program: str) -> list[str]:
        """Returns the start of a kubectl command line."""
        chosen = [program, "--namespace", self.namespace]
        chosen += ["--context", self.context] if self.context else []
        return [*chosen, *(["--kubeconfig", self.kubeconfig] if self.kubeconfig else [])]


def split_arguments(arguments: Sequence[str]) -> tuple[KubectlTarget, list[str]]:
    """Splits the plugin's own options, which precede the command, from eelctl's arguments; raises UsageError."""
    told: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name, equals, value = rest[0].partition("=")
        if name not in _OPTIONS:
            break
        rest.pop(0)
        if not equals:
            if not rest:
                raise click.UsageError(f"{name} needs a value")
            value = rest.pop(0)
        told[_OPTIONS[name]] = value
    return KubectlTarget(**told), rest


def main() -> None:
    """Runs eelctl through a forwarded port and exits."""
    from eelgrid_controller.cli.__main__ import cli, report_stream_errors

    with report_stream_errors():
        _run_plugin(cli)


def _run_plugin(cli: click.Group) -> None:
    try:
        way, rest = split_arguments(sys.argv[1:])
        if not rest or rest[0] in {"-h", "--help"}:
            click.echo(_HELP, nl=False)
        with ExitStack() as stack:
            if _wants_controller(rest, os.environ):
                rest = [*stack.enter_context(_open_target(way)), *rest]
            cli(rest, prog_name="kubectl eelgrid")
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


def _wants_controller(rest: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether to find a controller: not for help, nor if the user names one."""
    if not rest or "EELGRID_CONTROLLER" in environment or rest[0] in {"completion", "--version"}:
        return False
    return not any(one in {"-h", "--help"} or one.split("=")[0] == "--controller" for one in rest)


@contextmanager
def _open_target(way: KubectlTarget) -> Iterator[list[str]]:
    """Yields eelctl's options for the forwarded port, which stays open until exit."""
    program = shutil.which(os.environ.get("KUBECTL", "kubectl"))
    if program is None:
        raise click.ClickException("kubectl is not on the PATH; install it, or name the controller with --controller")
    command = way.kubectl(program)
    with tempfile.TemporaryDirectory(prefix="eelgrid-") as folder, _forward_port(command, way.service) as address:
        yield ["--controller", address, *_certificate(command, way.secret, Path(folder))]


def _certificate(command: Sequence[str], secret: str, folder: Path) -> list[str]:
    """Writes the Secret to private files and returns the options that name them; none without such a Secret."""
    if not secret or "EELGRID_TLS_KEY" in os.environ:
        return []
    asked = [*command, "get", "secret", secret, "--output", "json", "--ignore-not-found"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_ANSWER_WITHIN_S)  # noqa: S603
    if done.returncode != 0:
        raise click.ClickException(
            f"secret {secret} cannot be read: {done.stderr.strip()}; have access to it granted, "
            "or give --tls-certificate, --tls-key and --tls-authority after --secret ''"
        )
    if not done.stdout.strip():
        return []
    held = json.loads(done.stdout).get("data", {})
    if missing := sorted(_FILES.keys() - held.keys()):
        raise click.ClickException(f"secret {secret} lacks {', '.join(missing)}; it needs tls.crt, tls.key and ca.crt")
    options = []
    for name, option in _FILES.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(base64.b64decode(held[name]))
        options += [option, str(path)]
    return options


@contextmanager
def _forward_port(command: Sequence[str], service: str) -> Iterator[str]:
    """Yields a loopback address that leads to the Service; raises ClickException with kubectl's reason."""
    asked = [*command, "port-forward", f"service/{service}", f":{_PORT}", "--address", "127.0.0.1"]
    with tempfile.TemporaryFile("w+") as complaints:
        running = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=complaints, text=True)  # noqa: S603
        # A cluster that does not answer must not block the user for ever: ending kubectl ends the loop below.
        limit = threading.Timer(_FORWARD_WITHIN_S, running.terminate)
        limit.start()
        try:
            assert running.stdout is not None
            found = next((match for line in running.stdout if (match := _FORWARDED.search(line))), None)
            limit.cancel()
            if found is None:
                running.wait()
                complaints.seek(0)
                said = complaints.read().strip() or f"no answer within {_FORWARD_WITHIN_S:g} s"
                raise click.ClickException(
                    f"cannot forward a port to service/{service}: {said}; check --namespace and --service"
                )
            yield found[1]
        finally:
            limit.cancel()
            running.terminate()
            running.wait()
            if running.stdout is not None:
                running.stdout.close()


if __name__ == "__main__":
    main()
