"""kubectl eelgrid: eelctl against the controller that the present kube context has.

Owns the way there: `kubectl port-forward` to the controller's Service on a free loopback port, the
client's certificate out of a Secret where the account may read it, and both gone at the end. Must not
know eelctl's commands; what is not one of the options here is handed on.

Theory. A kubectl plugin is a program named kubectl-NAME, which gets every argument after the name. It
speaks to the cluster through kubectl alone, so that contexts, credentials and proxies are kubectl's.
With --controller in the arguments or EELGRID_CONTROLLER set nothing is forwarded.
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
_HELP = f"""kubectl eelgrid [options] COMMAND ...: eelctl against this cluster's controller.

  -n, --namespace NAME   of the controller (default eelgrid)
  --context NAME         of the kubeconfig
  --kubeconfig FILE
  --service NAME         of the controller (default {_SERVICE})
  --secret NAME          with our certificate (default {_SECRET}; empty: none)

"""


class KubectlTarget(NamedTuple):
    """Where the controller is, as kubectl finds it."""

    namespace: str = "eelgrid"
    context: str = ""
    kubeconfig: str = ""
    service: str = _SERVICE
    secret: str = _SECRET

    def kubectl(self, program: str) -> list[str]:
        """The command's beginning."""
        chosen = [program, "--namespace", self.namespace]
        chosen += ["--context", self.context] if self.context else []
        return [*chosen, *(["--kubeconfig", self.kubeconfig] if self.kubeconfig else [])]


def split_arguments(arguments: Sequence[str]) -> tuple[KubectlTarget, list[str]]:
    """Our options, which stand before the command, and eelctl's arguments; raises click.UsageError."""
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
    from eelgrid_controller.cli.__main__ import cli

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
    """Whether a controller is to be found: not for help, nor where the user names one."""
    if not rest or "EELGRID_CONTROLLER" in environment or rest[0] in {"completion", "--version"}:
        return False
    return not any(one in {"-h", "--help"} or one.split("=")[0] == "--controller" for one in rest)


@contextmanager
def _open_target(way: KubectlTarget) -> Iterator[list[str]]:
    """Eelctl's options for the way, open as long as the `with`."""
    program = shutil.which(os.environ.get("KUBECTL", "kubectl"))
    if program is None:
        raise click.ClickException("no kubectl on the PATH; install it, or name the controller with --controller")
    command = way.kubectl(program)
    with tempfile.TemporaryDirectory(prefix="eelgrid-") as folder, _forward_port(command, way.service) as address:
        yield ["--controller", address, *_certificate(command, way.secret, Path(folder))]


def _certificate(command: Sequence[str], secret: str, folder: Path) -> list[str]:
    """Options that name the Secret's files, which are ours alone; none where there is no such Secret."""
    if not secret or "EELGRID_TLS_KEY" in os.environ:
        return []
    asked = [*command, "get", "secret", secret, "--output", "json", "--ignore-not-found"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_ANSWER_WITHIN_S)  # noqa: S603
    if done.returncode != 0:
        raise click.ClickException(
            f"secret {secret} cannot be read: {done.stderr.strip()}; ask for it, "
            "or give --tls-certificate, --tls-key and --tls-authority after --secret ''"
        )
    if not done.stdout.strip():
        return []
    held = json.loads(done.stdout).get("data", {})
    if missing := sorted(_FILES.keys() - held.keys()):
        raise click.ClickException(f"secret {secret} lacks {', '.join(missing)}; write tls.crt, tls.key and ca.crt")
    options = []
    for name, option in _FILES.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(base64.b64decode(held[name]))
        options += [option, str(path)]
    return options


@contextmanager
def _forward_port(command: Sequence[str], service: str) -> Iterator[str]:
    """A loopback address that leads to the Service; raises ClickException as kubectl says."""
    asked = [*command, "port-forward", f"service/{service}", f":{_PORT}", "--address", "127.0.0.1"]
    with tempfile.TemporaryFile("w+") as complaints:
        running = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=complaints, text=True)  # noqa: S603
        # A cluster that says nothing must not hold the user for ever: ending kubectl ends the reading below.
        limit = threading.Timer(_FORWARD_WITHIN_S, running.terminate)
        limit.start()
        try:
            assert running.stdout is not None
            found = next((match for line in running.stdout if (match := _FORWARDED.search(line))), None)
            limit.cancel()
            if found is None:
                running.wait()
                complaints.seek(0)
                said = complaints.read().strip() or f"nothing within {_FORWARD_WITHIN_S:g} s"
                raise click.ClickException(f"no way to service/{service}: {said}; see --namespace and --service")
            yield found[1]
        finally:
            limit.cancel()
            running.terminate()
            running.wait()
            if running.stdout is not None:
                running.stdout.close()


if __name__ == "__main__":
    main()
