"""Progress of a job: `eelctl jobs` and `eelctl get` show the newest report, and with `total` when it will end by that.

    from eelgrid import progress

    for step, batch in enumerate(batches):
        loss = train(batch)
        progress.report(step=step + 1, total=len(batches), metric=loss)

Needs the standard library only, and no daemon: a report is a small file beside the checkpoints, which the agent reads every
two seconds, so it may be called in each step. Only the newest is kept. Outside of a job of Eelgrid it does nothing, and no
failure of it ever reaches the job. Work that waits for the job's GPUs is planned by it; for promises of the job itself use
`Client.report_progress`.
"""

import contextlib
import json
import math
import os
import time
from pathlib import Path

_NOTE = ".eelgrid-progress"
_PAUSE_S = 0.5
_written_at_s = -math.inf


def report(*, step: int, total: int = 0, metric: float | None = None) -> None:
    """Says how far the job is: its step, of how many (0 if not known), and a figure of its own, such as the loss.

    A report within half a second of the one before is dropped, unless it is the last step.
    """
    global _written_at_s  # noqa: PLW0603  # one job is one process
    folder, now_s = os.environ.get("EELGRID_CHECKPOINT_DIR"), time.monotonic()
    if not folder or (now_s - _written_at_s < _PAUSE_S and not 0 < total <= step):
        return
    _written_at_s = now_s
    figure = None if metric is None or not math.isfinite(metric) else float(metric)
    noted = {"step": int(step), "total": int(total), "metric": figure, "time_ns": time.time_ns()}
    with contextlib.suppress(OSError):
        fresh = Path(folder) / f"{_NOTE}.new"
        fresh.write_text(json.dumps(noted), encoding="utf-8")
        fresh.rename(Path(folder) / _NOTE)
