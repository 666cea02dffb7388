"""A slow twin of EASY backfill on a number of equal GPUs: everything is computed anew at each moment."""


class NaiveEasy:
    """First come, first served; of those behind the first that waits, what does not delay it. `backfills` or not."""

    def __init__(self, gpus, *, backfills=True):
        self.gpus, self.backfills = gpus, backfills
        self.running = {}  # name -> (gpus, end)
        self.waiting = []  # (name, gpus, run time)

    def free(self, at=None):
        """The GPUs that are free at a time, if nothing starts."""
        return self.gpus - sum(gpus for gpus, end in self.running.values() if at is None or end > at)

    def shadow(self, gpus):
        """When so many GPUs are free."""
        return next(end for end in sorted(end for _, end in self.running.values()) if self.free(end) >= gpus)

    def decide(self, now):
        """Starts what may start; returns the names, in order."""
        started, head = [], None
        for name, gpus, run_time in list(self.waiting):
            if head is None:
                may = self.free() >= gpus
                if not may:
                    head = gpus
                    start = self.shadow(gpus)
                    if not self.backfills:
                        return started
            else:
                beside = self.free(start) - head >= gpus
                may = self.free() >= gpus and (now + run_time <= start or beside)
            if may:
                self.running[name] = (gpus, now + run_time)
                self.waiting.remove((name, gpus, run_time))
                started.append(name)
        return started


class NaiveDeadlines:
    """A slow twin of deadlines with admission: a job starts at the first moment from which on it fits beside all promises."""

    def __init__(self, gpus):
        self.gpus = gpus
        self.held = []  # (start, end, gpus)

    def free(self, begin, end):
        """The GPUs that are free in a whole span."""
        moments = [begin, *(start for start, _, _ in self.held if begin < start < end)]
        return self.gpus - max(sum(n for start, stop, n in self.held if start <= at < stop) for at in moments)

    def find_start(self, now, gpus, run_time):
        """The earliest start, tried at every moment from now on."""
        return next(at for at in range(now, 10**6) if self.free(at, at + run_time) >= gpus)
