"""A process that hangs while it stops ends all the same, and says what hung."""

import subprocess
import sys

import pytest

# How a stop can hang: a step of it, asyncio.run's own wait for worker threads, a thread that Python waits for at its end.
_HANGS = {
    "step": "await asyncio.Event().wait()",
    "worker": "asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)",
    "thread": "threading.Thread(target=threading.Event().wait, name='stuck').start()",
}
_PROGRAM = """
import asyncio, logging, threading
from eelgrid_controller.runtime.interpreter import bound_stop

async def stop_process():
    bound_stop(logging.getLogger("stop"), within_s={within_s})
    {hang}

logging.basicConfig()
asyncio.run(stop_process())
"""


def _run(hang, *, within_s):
    program = _PROGRAM.format(hang=hang, within_s=within_s)
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120.0)


@pytest.mark.parametrize("kind", list(_HANGS))
def test_a_stop_that_hangs_ends_with_exit_code_1_and_the_stacks_of_all_threads(kind):
    done = _run(_HANGS[kind], within_s=0.5)
    assert done.returncode == 1, done
    assert "event=stop_overdue seconds=0.5" in done.stderr
    assert "most recent call first" in done.stderr
    if kind == "step":
        assert "tasks=stop_process" in done.stderr


def test_a_stop_in_time_is_left_alone():
    done = _run("pass", within_s=60.0)
    assert (done.returncode, done.stderr) == (0, "")
