"""A launcher's process that takes no signals of its user."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from eelgrid_agent.engine.launcher import Launcher

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user is needed")
def test_a_launcher_outlives_a_stop_of_a_process_that_it_may_not_signal():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as rootly:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setuid(NOBODY)
                Launcher._signal_group(SimpleNamespace(_pid=rootly.pid), "TERM")
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert rootly.poll() is None
        os.kill(rootly.pid, signal.SIGKILL)
    assert status == 0
