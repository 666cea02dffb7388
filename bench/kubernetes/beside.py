"""Runs a command with the available control plane, which EELGRID_KUBECONFIG names for it.

`python -m bench.kubernetes.beside COMMAND...`: a control plane that K8S_HOME can start is started before the
command and stopped after it; if there is none, the command runs nevertheless and reports what it skipped. The
exit code is that of the command.
"""

import os
import subprocess
import sys

from bench.kubernetes.control_plane import NoControlPlane, at_hand


def main(command: list[str]) -> int:
    """The command's exit code."""
    if not command:
        print("usage: python -m bench.kubernetes.beside COMMAND...", file=sys.stderr)
        return 2
    try:
        with at_hand() as plane:
            found = os.environ | {"EELGRID_KUBECONFIG": plane.kubeconfig}
            return subprocess.run(command, env=found, check=False).returncode
    except NoControlPlane as error:
        print(f"no control plane: {error}", file=sys.stderr, flush=True)
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
