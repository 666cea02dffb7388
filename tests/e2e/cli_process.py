"""eelctl in a process of its own that need not begin from nothing.

Owns a fork server that has imported eelctl, and one fork of it for each run, with its own arguments, environment,
folder and streams. A fresh interpreter spends most of a second of processor on imports, and a test file makes a
hundred runs. How eelctl starts is the matter of bench.start and of tests that start it themselves.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
# What commands import when they are run; nothing of gRPC is started, which a fork would not survive.
_CONTEXT.set_forkserver_preload(
    [
        "eelgrid_controller.cli.__main__",
        "eelgrid_controller.cli.connection",
        "eelgrid_controller.cli.replay",
        "eelgrid_protos.rpc",
        "grpc.aio",
        "rich.live",
        "yaml",
    ]
)


def run_cli(arguments, *, env, cwd, timeout_s, stdin=None):
    """One run of eelctl, as subprocess.run would make it; raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin or "")
        child = _CONTEXT.Process(target=_become_cli, args=(arguments, env, str(cwd), [str(one) for one in streams]))
        child.start()
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(["eelctl", *arguments], timeout_s)
        printed, said = (one.read_text() if one.exists() else "" for one in streams[1:])
        code = child.exitcode
        child.close()
        return subprocess.CompletedProcess(["eelctl", *arguments], code, printed, said)


def _become_cli(arguments, env, cwd, streams):
    for number, path in enumerate(streams):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["eelctl", *arguments]
    from eelgrid_controller.cli.__main__ import main

    main()
