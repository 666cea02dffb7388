"""The interpreter of a process that answers calls: its collector of garbage, its switching of threads, and its end."""

import asyncio
import faulthandler
import gc
import logging
import os
import sys
import threading

# Less than a supervisor waits before it kills (systemd's units: 60 s), so that the log says what hung.
STOP_S_MOST = 50.0
_TASKS_SHOWN = 20


def settle_interpreter(*, collects: bool = True) -> None:
    """Tunes garbage collection and thread switching for a process that has everything loaded.

    Without `collects` what became garbage until now stays: a standby that takes over has collected before.
    """
    # Objects loaded so far stay, so the collector need not scan them again, and a full collection of later objects is
    # rare: it takes some 40 ms at a thousand nodes (measured), which is eight times an objective of 5 ms. Nothing
    # long-lived here is in a cycle; reference counting frees it.
    if collects:
        gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 20, 50)
    # The journal's thread returns from the disk to a busy loop: Python's switch interval of 5 ms would be its latency
    # (measured over 3,000 submissions: median 2.3 ms from arrival to answer, 1.7 ms with this).
    sys.setswitchinterval(0.0005)


def bound_stop(log: logging.Logger, *, within_s: float = STOP_S_MOST) -> None:
    """Ends this process with exit code 1 if it has not ended within so many seconds, and logs what hung.

    Called in the event loop, as the process begins to stop. What was acknowledged is on disk by then.
    """
    loop = asyncio.get_running_loop()

    def end() -> None:
        waiting = sorted({getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks(loop)})
        log.critical(
            "event=stop_overdue seconds=%g tasks=%s action=exit code=1 threads='see below'",
            within_s,
            ",".join(waiting[:_TASKS_SHOWN]) or "-",
        )
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    timer = threading.Timer(within_s, end)
    timer.daemon = True
    timer.start()
