"""One line in a training loop: how far the job is.

    from eelgrid_protos.progress import report
    for step, batch in enumerate(batches):
        ...
        report(step + 1)

Owns the call and its bounds: at most one call in `every_s` seconds, each in the
background and for at most two seconds, and no failure ever reaches the training. The
controller's address and the job's id are in EELGRID_CONTROLLER and EELGRID_WORKLOAD;
without them nothing is done. Must not know what progress is used for.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_LOG = logging.getLogger("eelgrid.progress")
_CALL_S = 2.0


class Reporter:
    """Tells the controller how far one job is, from any thread."""

    def __init__(self, environment: Mapping[str, str], *, every_s: float = 5.0) -> None:
        self._controller = environment.get("EELGRID_CONTROLLER", "")
        self._workload = environment.get("EELGRID_WORKLOAD", "")
        files = [environment.get(f"EELGRID_TLS_{name}", "") for name in ("CERTIFICATE", "KEY", "AUTHORITY")]
        self._tls = [Path(name) for name in files] if all(files) else None
        self._every_s = every_s
        self._next_s = 0.0
        self._busy = threading.Lock()
        self.told = 0
        self.failed = 0

    def report(self, work_done: float) -> None:
        """Units of work since the job began; costs under a microsecond when no call is due."""
        now_s = time.monotonic()
        if now_s < self._next_s or not (self._controller and self._workload) or not self._busy.acquire(blocking=False):
            return
        self._next_s = now_s + self._every_s
        threading.Thread(
            target=self._report_progress, args=(float(work_done),), name="eelgrid-progress", daemon=True
        ).start()

    def _report_progress(self, work_done: float) -> None:
        # grpc takes a fifth of a second to load, which a job without a controller need not pay.
        try:
            from eelgrid_protos import rpc, transport
            from eelgrid_protos.messages import ReportProgressRequest

            tls = transport.TlsFiles(*self._tls) if self._tls else None
            channel = transport.open_blocking_channel(self._controller, tls=tls, insecure=tls is None)
            try:
                client = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
                client.report_progress(
                    ReportProgressRequest(workload_id=self._workload, work_done=work_done), timeout=_CALL_S
                )
                self.told += 1
            finally:
                channel.close()
        except Exception as error:  # noqa: BLE001  # a job must not end because its progress was not heard
            self.failed += 1
            if self.failed == 1:
                _LOG.warning("progress=unheard controller=%s error=%s", self._controller, error)
        finally:
            self._busy.release()


_REPORTER = Reporter(os.environ)


def report(work_done: float) -> None:
    """Units of work since the job began, told to the controller that the environment names."""
    _REPORTER.report(work_done)
