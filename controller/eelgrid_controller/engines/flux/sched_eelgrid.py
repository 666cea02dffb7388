"""Scheduler module for a Flux broker: passes what Flux asks on to Eelgrid's controller, and its answers back.

Loaded by `flux module load .../sched_eelgrid.py controller=HOST:PORT`. Owns the module's arguments, and what is said to the
controller after each connection. Must not decide where a job goes while the controller is there.

Theory. The broker is a bad place for a planner: it has one thread, one copy for each instance, and no power readings. So the
module only relays. But it never takes an answer on trust: it keeps Flux's own pool of resources and a ledger of what jobs
hold, and an R that is not free in both is not given to Flux; then everything is said anew. When the controller is away for
longer than `patience`, jobs are started first come, first served by Flux's own pool, as sched-fifo does, and those that run
are adopted when the controller is back. So Flux never waits for us.

The broker's thread is what all jobs of an instance share, and Flux's pool takes a millisecond of it for a job. It is asked by
nobody but `flux resource list` while the controller is there: so it learns what is held once a second, and never of jobs that
are shorter than that.

Source: `flux.scheduler` of flux-core 0.84 and later, which speaks RFC 27 with the job manager.
"""

import heapq
import time
from typing import Any

try:
    from flux.job import JobID, job_raise_async
    from flux.resource import InfeasibleRequest, InsufficientResources
    from flux.scheduler import Scheduler
except ImportError as missing:
    raise ImportError(
        f"sched_eelgrid needs flux.scheduler, which comes with flux-core 0.84 ({missing}); "
        "use a newer flux-core, or keep sched-simple"
    ) from missing

from eelgrid_controller.engines.flux.allocations import AllocationConflict, FluxAllocations
from eelgrid_controller.engines.flux.batches import READS_BATCHES
from eelgrid_controller.engines.flux.broker_link import BrokerLink, name_user, read_ranks, reduce_jobspec
from eelgrid_controller.engines.flux.controller_stream import StreamAnswer
from eelgrid_controller.engines.flux.resource_sets import (
    FluxUnreadable,
    format_idset,
    format_resource_set,
    parse_resource_set,
)

_CHECK_S = 1.0


class EelgridScheduler(BrokerLink, Scheduler):
    """Relays the scheduler protocol."""

    # So many jobs wait in the controller; those behind them come as these start.
    queue_depth = 10_000

    def __init__(self, h: Any, *args: str) -> None:
        """Raises ValueError for arguments or a version that cannot be used; Flux shows it to who loads the module."""
        super().__init__(h, *args)
        self._ledger: FluxAllocations | None = None
        self._known: dict[int, dict[str, Any]] = {}
        # By job its R, of those of which Flux's own pool does not know yet that they hold it.
        self._unregistered: dict[int, Any] = {}
        self._checks: dict[int, Any] = {}
        self._check_number = 0
        # An answer could not be given: the controller knows something else than this module.
        self._must_say_all = False
        self._since_s = time.monotonic()
        self._timer = h.timer_watcher_create(_CHECK_S, self._on_second, repeat=_CHECK_S)

    def run(self) -> None:
        """Connects, and runs until the module is removed."""
        self._timer.start()
        super().run()

    # What Flux says

    @property
    def ledger(self) -> FluxAllocations:
        """What jobs hold, as this module has seen it."""
        if self._ledger is None:
            self._ledger = FluxAllocations(parse_resource_set(self.resources.to_dict()))
        return self._ledger

    def hello(self, jobid: int, priority: int, userid: int, t_submit: float, R: Any) -> None:
        """Takes over a job that runs, as Flux says at the start."""
        super().hello(jobid, priority, userid, t_submit, R)
        self.ledger.hold(jobid, parse_resource_set(R.to_dict()))
        self._know(jobid, priority, userid, t_submit)

    def _know(self, jobid: int, priority: int, userid: int, t_submit: float) -> None:
        self._known[jobid] = {
            "id": int(jobid),
            "priority": priority,
            "userid": userid,
            "user": name_user(userid),
            "t_submit": t_submit,
        }

    def alloc(  # noqa: PLR0917  # as Flux calls it
        self, request: Any, jobid: int, priority: int, userid: int, t_submit: float, jobspec: dict[str, Any]
    ) -> None:
        """Takes a request; Flux's own parser denies what it cannot read."""
        queued = len(self._queue)
        super().alloc(request, jobid, priority, userid, t_submit, jobspec)
        if len(self._queue) > queued:
            self._know(jobid, priority, userid, t_submit)
            self._send_alloc(jobid, jobspec)

    def _send_alloc(self, jobid: int, jobspec: dict[str, Any]) -> None:
        self.send("alloc", self._known[jobid] | {"jobspec": reduce_jobspec(jobspec)})

    def free(self, jobid: int, R: Any, final: bool = False) -> None:
        """Frees a part of what a job holds, or the rest."""
        held = self.ledger.get(jobid)
        if final and self._unregistered.pop(jobid, None) is not None and held is not None:
            self.ledger.free(jobid, held, is_final=True)
            self._known.pop(jobid, None)
            self.send("free", {"id": int(jobid), "R": format_resource_set(held), "final": True})
            return
        self._register(jobid)
        super().free(jobid, R, final=final)
        freed = R.to_dict()
        if self.ledger.free(jobid, parse_resource_set(freed), is_final=final) is None:
            self._known.pop(jobid, None)
        self.send("free", {"id": int(jobid), "R": freed, "final": final})

    def _register(self, jobid: int) -> None:
        """Tells Flux's own pool what a job holds, if it does not know yet."""
        if (answer := self._unregistered.pop(jobid, None)) is not None:
            self.resources.register_alloc(jobid, self._make_pool(answer))

    def _register_all(self) -> None:
        for jobid in tuple(self._unregistered):
            try:
                self._register(jobid)
            except ValueError as error:
                # Its ranks have gone meanwhile.
                self.log.warning(f"{JobID(jobid).f58}: Flux's pool does not hold its R: {error}")

    def cancel(self, jobid: int) -> None:
        """Takes a request back."""
        super().cancel(jobid)
        if jobid not in self.ledger:
            self._known.pop(jobid, None)
            self.send("cancel", {"id": int(jobid)})

    def prioritize(self, jobs: list[list[int]]) -> None:
        """Follows changes of priority."""
        super().prioritize(jobs)
        for jobid, priority in jobs:
            if jobid in self._known:
                self._known[jobid]["priority"] = priority
        self.send("prioritize", {"jobs": jobs})

    def expiration(self, msg: Any, jobid: int, expiration: float) -> None:
        """Follows a change of a job's time limit."""
        self._register(jobid)
        self.resources.update_expiration(jobid, expiration)
        super().expiration(msg, jobid, expiration)

    def resource_update(self) -> None:
        """Follows ranks that go up, down, or away."""
        whole = parse_resource_set(self.resources.to_dict())
        if self._ledger is not None and self._ledger.pool.ranks.keys() != whole.ranks.keys():
            before, self._ledger = self._ledger, FluxAllocations(whole)
            for jobid in before:
                if (held := before.get(jobid)) is not None and (left := held.select_ranks(whole.ranks)).ranks:
                    self._ledger.hold(jobid, left)
        if self.is_connected:
            self.send("resources", self._describe_resources())

    def _describe_resources(self) -> dict[str, Any]:
        down = format_idset(read_ranks(self.resources.copy_down().to_dict()))
        return {"resources": self.resources.to_dict(), "down": down, "mode": "schedule"}

    def feasibility_check(self, msg: Any, jobspec: dict[str, Any]) -> None:
        """Asks the controller whether a job could ever run; Flux's own pool while it is away."""
        self._check_number += 1
        if self.send("feasibility", {"call": self._check_number, "jobspec": reduce_jobspec(jobspec)}):
            self._checks[self._check_number] = (msg, jobspec)
        else:
            super().feasibility_check(msg, jobspec)

    def schedule(self) -> None:
        """Starts jobs first come, first served while the controller is away for long; else its answers start them."""
        if self.is_connected or time.monotonic() - self._since_s < self.arguments.patience_s:
            return
        self._register_all()
        kept = []
        while self._queue:
            job = heapq.heappop(self._queue)
            try:
                found = self.resources.alloc(job.jobid, job.resource_request)
            except InsufficientResources:
                kept.append(job)
                break
            except (InfeasibleRequest, ValueError):
                # It may name what only the controller knows: it waits for it, and holds nobody up.
                kept.append(job)
                continue
            found.set_starttime(time.time())
            if job.resource_request.duration > 0.0:
                found.set_expiration(time.time() + job.resource_request.duration)
            self.ledger.hold(job.jobid, parse_resource_set(found.to_dict()))
            self.log.info(f"{JobID(job.jobid).f58}: started without Eelgrid's controller")
            job.request.success(found)
        for job in kept:
            heapq.heappush(self._queue, job)

    def _on_second(self, *_: Any) -> None:
        self._register_all()
        if not self.is_connected and self._queue:
            self._request_schedule()

    # What the controller says

    def on_answers(self, answers: list[StreamAnswer]) -> None:
        """Follows answers of the controller; the queue is brought up to date once for all of them."""
        waiting = {job.jobid: job for job in self._queue}
        queued = len(waiting)
        for topic, payload in answers:
            match topic:
                case "alloc" if (job := waiting.get(payload.get("id"))) is not None:
                    if self._answer(job, payload):
                        del waiting[job.jobid]
                case "feasibility":
                    self._answer_check(payload)
                case "raise":
                    job_raise_async(self.handle, int(payload["id"]), "cancel", 0, str(payload.get("note")))
        if len(waiting) < queued:
            self._queue[:] = waiting.values()
            heapq.heapify(self._queue)
        if self._must_say_all:
            self.say_all()

    def on_lost(self) -> None:
        """Answers what was asked of the controller by Flux's own pool, and counts the time from now on."""
        self._since_s = time.monotonic()
        for msg, jobspec in self._checks.values():
            super().feasibility_check(msg, jobspec)
        self._checks.clear()

    def say_all(self) -> None:
        """Says all that stands: resources, jobs that run, jobs that wait; and follows the journal from its beginning."""
        self._must_say_all = False
        self.send("hello", self._describe_resources() | READS_BATCHES)
        for jobid in self.ledger:
            held = self.ledger.get(jobid)
            if held is not None and jobid in self._known:
                self.send("running", self._known[jobid] | {"R": format_resource_set(held)})
        for job in sorted(self._queue):
            self._send_alloc(job.jobid, job.resource_request.jobspec)
        self.send("ready", {})
        self.follow_journal()

    def _answer(self, job: Any, payload: Any) -> bool:
        """Answers a request that still waits; returns whether it waits no more."""
        match payload.get("type"):
            case 0:
                return self._start(job, payload.get("R"), payload.get("annotations"))
            case 1:
                job.request.annotate(payload.get("annotations"))
            case 2:
                self._known.pop(job.jobid, None)
                job.request.deny(payload.get("note"))
                return True
        return False

    def _start(self, job: Any, answer: Any, annotations: Any) -> bool:
        """Gives a job its R, if that is free here; else everything is said anew."""
        try:
            self.ledger.hold(job.jobid, parse_resource_set(answer))
        except (AllocationConflict, FluxUnreadable) as error:
            self.log.warning(f"{JobID(job.jobid).f58}: the controller's R is not given: {error}")
            self._must_say_all = True
            return False
        self._unregistered[job.jobid] = answer
        job.request.success(answer, annotations)
        return True

    def _answer_check(self, payload: Any) -> None:
        msg, _ = self._checks.pop(payload.get("call"), (None, None))
        if msg is None:
            return
        if payload.get("errnum"):
            self.handle.respond_error(msg, int(payload["errnum"]), str(payload.get("errstr")))
        else:
            self.handle.respond(msg, None)

    def stats_get(self) -> dict[str, Any]:
        """Returns Flux's statistics and whether the controller is there."""
        stats: dict[str, Any] = super().stats_get()
        return stats | {"eelgrid_connected": self.is_connected}


def mod_main(h: Any, *args: str) -> None:
    """Flux's entry point."""
    EelgridScheduler(h, *args).run()
