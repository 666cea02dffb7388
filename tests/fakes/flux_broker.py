"""A Flux broker in memory: the parts of Flux's Python API that a scheduler module uses, with a job manager behind them.

Written after flux.scheduler of flux-core 0.88 and RFC 27, which both say what a scheduler is told and may answer; the suite in
tests/contracts/flux_contract_test.py drives this one and a real broker alike. The module runs in a thread of its own with a
reactor, as in Flux; `FluxBroker` is called from the test's thread, and jobs change in the module's thread alone.
"""

import errno
import heapq
import json
import os
import queue
import select
import sys
import threading
import time
import types
from dataclasses import replace

from eelgrid_controller.engines.flux.allocations import AllocationConflict, FluxAllocations, RankPlace
from eelgrid_controller.engines.flux.jobspecs import match_ranks, parse_jobspec
from eelgrid_controller.engines.flux.resource_sets import (
    FluxUnreadable,
    ResourceSet,
    format_job_id,
    format_resource_set,
    parse_idset,
    parse_resource_set,
)

VERSION = "0.88.0"
POLLIN, STREAMING, NORESPONSE = 1, 2, 4


class InsufficientResources(Exception):
    pass


class InfeasibleRequest(Exception):
    pass


class JobID(int):
    @property
    def f58(self):
        return format_job_id(self)


class Pool:
    """Flux's own pool: what there is, what is down, and what jobs hold; a set that was allocated is a pool, too."""

    def __init__(self, found, log=None):
        self.whole = found if isinstance(found, ResourceSet) else parse_resource_set(found)
        self.held = FluxAllocations(self.whole)
        self.down = frozenset()

    def to_dict(self):
        return format_resource_set(self.whole)

    def copy_down(self):
        return Pool(self.whole.select_ranks(self.down))

    def mark_up(self, ids):
        self.down = frozenset() if ids == "all" else self.down - parse_idset(ids)

    def mark_down(self, ids):
        self.down = frozenset(self.whole.ranks) if ids == "all" else self.down | parse_idset(ids)

    def register_alloc(self, jobid, pool):
        self.held.hold(jobid, pool.whole)

    def free(self, jobid, pool, final):
        self.held.free(jobid, pool.whole, is_final=final)

    def update_expiration(self, jobid, expiration):
        pass

    def alloc(self, jobid, request):
        wanted = request.found
        try:
            ranks = self.whole.ranks if wanted.constraint is None else match_ranks(wanted.constraint, self.whole)
        except FluxUnreadable as error:
            raise InfeasibleRequest(str(error)) from None
        if not ranks:
            raise InfeasibleRequest("nothing matches")
        places = []
        for rank in sorted(frozenset(ranks) - self.down):
            gpus = sorted(self.held.get_free(rank).gpus)[: wanted.shape[1]]
            places.append(RankPlace(rank, tuple(gpus)))
            try:
                made = self.held.assign(wanted, places, down=self.down, now_s=time.time())
            except AllocationConflict:
                places.pop()
                continue
            if len(places) == wanted.replicas:
                self.held.hold(jobid, made)
                return Pool(made)
        raise InsufficientResources

    def set_starttime(self, time_s):
        self.whole = replace(self.whole, starttime=time_s)

    def set_expiration(self, time_s):
        self.whole = replace(self.whole, expiration=time_s)


class PendingJob:
    def __init__(self, jobid, priority, t_submit, request, jobspec):
        self.jobid, self.priority, self.t_submit, self.request = jobid, priority, t_submit, request
        found = parse_jobspec(jobspec)
        self.resource_request = types.SimpleNamespace(jobspec=jobspec, found=found, duration=found.duration_s)

    def __lt__(self, other):
        return (-self.priority, self.jobid) < (-other.priority, other.jobid)


class AllocRequest:
    """What a module answers a request by; a request is answered once for good."""

    def __init__(self, broker, jobid):
        self._broker, self.jobid, self._is_final = broker, jobid, False

    def _finish(self):
        assert not self._is_final, "answered twice"
        self._is_final = True

    def success(self, R, annotations=None):
        self._finish()
        self._broker.on_alloc(self.jobid, R if isinstance(R, dict) else R.to_dict(), annotations)

    def deny(self, note=None):
        self._finish()
        self._broker.on_deny(self.jobid, note)

    def cancel(self):
        self._finish()

    def annotate(self, annotations):
        if not self._is_final:
            self._broker.on_annotate(self.jobid, annotations)


class Scheduler:
    """The base class, as far as the module relies on it."""

    queue_depth = "unlimited"

    def __init__(self, h, *args):
        self.handle, self._queue, self._is_due, self._resources = h, [], False, None
        self.log = types.SimpleNamespace(**dict.fromkeys(("debug", "info", "warning", "error"), h.broker.log.append))
        for arg in args:
            if not arg.startswith(("queue-depth=", "log-level=")):
                raise ValueError(f"unknown argument {arg!r}")
        h.broker.module = self

    @property
    def resources(self):
        return self._resources

    def _make_pool(self, found):
        return Pool(found)

    def _request_schedule(self):
        self._is_due = bool(self._queue)

    def run(self):
        self.handle.broker.begin(self)
        self.handle.run(self)

    def hello(self, jobid, priority, userid, t_submit, R):
        self.resources.register_alloc(jobid, R)

    def alloc(self, request, jobid, priority, userid, t_submit, jobspec):
        try:
            heapq.heappush(self._queue, PendingJob(jobid, priority, t_submit, request, jobspec))
        except FluxUnreadable as error:
            request.deny(f"cannot parse jobspec: {error}")

    def free(self, jobid, R, final=False):
        self.resources.free(jobid, R, final)

    def cancel(self, jobid):
        for job in self._queue:
            if job.jobid == jobid:
                self._queue.remove(job)
                heapq.heapify(self._queue)
                job.request.cancel()
                return

    def prioritize(self, jobs):
        found = dict(map(tuple, jobs))
        for job in self._queue:
            job.priority = found.get(job.jobid, job.priority)
        heapq.heapify(self._queue)

    def expiration(self, msg, jobid, expiration):
        self.handle.respond(msg, None)

    def resource_update(self):
        pass

    def feasibility_check(self, msg, jobspec):
        self.handle.respond(msg, None)

    def stats_get(self):
        return {"pending_jobs": len(self._queue)}


class Watcher:
    def __init__(self, watchers):
        self._watchers = watchers

    def start(self):
        self._watchers.append(self)


class Future:
    """A streaming answer with the events of jobs that are asked for: `then` is called for each."""

    def __init__(self, allowed):
        self.callback, self.value, self.allowed = None, None, allowed
        self.pimpl = types.SimpleNamespace(get_matchtag=lambda: id(self))

    def then(self, callback):
        self.callback = callback

    def put(self, value):
        self.value = value
        self.callback(self)

    def tell(self, message):
        events = [one for one in message["events"] if one["name"] in self.allowed]
        if events or message["id"] == -1:
            self.put(message | {"events": events})

    def get_str(self):
        if isinstance(self.value, Exception):
            raise self.value
        return json.dumps(self.value)

    def reset(self):
        pass


class Handle:
    """A broker's handle and its reactor."""

    def __init__(self, broker):
        self.broker, self.calls = broker, queue.SimpleQueue()
        self._fds, self._timers, self._wake = [], [], os.pipe()
        self.is_over = False

    def attr_get(self, name):
        return {"version": self.broker.version}[name]

    def fd_watcher_create(self, fd, callback, events):
        assert events == POLLIN
        made = Watcher(self._fds)
        made.fd, made.callback = fd, callback
        return made

    def timer_watcher_create(self, after, callback, repeat=0.0):
        made = Watcher(self._timers)
        made.due, made.repeat, made.callback = time.monotonic() + after, repeat, callback
        return made

    def rpc(self, topic, payload=None, flags=0):
        if topic == "job-manager.events-journal":
            made = Future(payload["allow"])
            self.broker.journals.append(made)
            self.calls.put(lambda: [made.tell(one) for one in self.broker.tell_history()])
            return made
        assert topic == "job-manager.events-journal-cancel"
        (found,) = [one for one in self.broker.journals if id(one) == payload["matchtag"]]
        self.broker.journals.remove(found)
        self.calls.put(lambda: found.put(OSError(errno.ENODATA, "over")))
        return None

    def respond(self, msg, payload):
        msg.put((0, payload))

    def respond_error(self, msg, errnum, text):
        msg.put((errnum, text))

    def call(self, function):
        """Has the reactor's thread run something."""
        self.calls.put(function)
        os.write(self._wake[1], b"\0")

    def run(self, module):
        while not self.is_over:
            readable, _, _ = select.select([self._wake[0], *(one.fd for one in self._fds)], [], [], 0.02)
            if self._wake[0] in readable:
                os.read(self._wake[0], 4096)
            while not self.calls.empty():
                self.calls.get()()
            for one in self._fds:
                if one.fd in readable:
                    one.callback()
            for one in self._timers:
                if time.monotonic() >= one.due:
                    one.due = time.monotonic() + one.repeat
                    one.callback()
            if module._is_due:
                module._is_due = False
                module.schedule()


def install_modules(broker):
    """Puts Flux's modules into sys.modules; returns their names."""
    constants = {"FLUX_POLLIN": POLLIN, "FLUX_RPC_NORESPONSE": NORESPONSE, "FLUX_RPC_STREAMING": STREAMING}
    job = {"JobID": JobID, "job_raise_async": lambda h, jobid, kind, severity, note: broker.on_raise(jobid, note)}
    resource = {"InfeasibleRequest": InfeasibleRequest, "InsufficientResources": InsufficientResources}
    made = {
        "flux": {},
        "flux.constants": constants,
        "flux.job": job,
        "flux.resource": resource,
        "flux.scheduler": {"Scheduler": Scheduler},
    }
    for name, attributes in made.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    return tuple(made)


class FluxBroker:
    """One instance; jobs run until they are ended."""

    def __init__(self, found, version=VERSION):
        self.whole, self.version = parse_resource_set(found), version
        self.jobs, self.journals, self.log = {}, [], []
        self.drained, self.module, self._thread, self._handle = frozenset(), None, None, None
        self._number = 1000
        self.failed = None

    # Called by the test

    def load(self, mod_main, *args):
        """Loads a module; raises what it raises before it runs."""
        self._handle, begun = Handle(self), threading.Event()
        self._begun, self.failed = begun, None

        def main():
            try:
                mod_main(self._handle, *args)
            except Exception as error:  # noqa: BLE001  # told below
                self.failed = error
                begun.set()

        self._thread = threading.Thread(target=main, daemon=True)
        self._thread.start()
        assert begun.wait(30.0)
        if self.failed is not None:
            raise self.failed

    def unload(self):
        self._handle.call(lambda: setattr(self._handle, "is_over", True))
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        self.journals.clear()

    def submit(self, jobspec, priority=16):
        self._number += 1
        number, job = self._number, types.SimpleNamespace(events=[], R=None, left=None, notes={}, jobspec=jobspec)
        job.priority, job.submit_s, is_known = priority, time.time(), threading.Event()

        def apply():
            self.jobs[number] = job
            self._event(number, "submit", userid=os.getuid(), urgency=16, flags=0, version=1)
            is_known.set()
            self._ask(number)

        self._handle.call(apply)
        while not is_known.wait(0.1):
            self._check()
        return number

    def cancel(self, number):
        def apply():
            self._event(number, "exception", type="cancel", severity=0, note="")
            if self.jobs[number].R is None:
                self.module.cancel(number)
                self._event(number, "clean")
            else:
                self._release(number, frozenset(self.jobs[number].left.ranks))
            self.module._request_schedule()

        self._handle.call(apply)

    def finish(self, number, status):
        """All processes of a job have ended, with a status as wait(2) has it."""

        def apply():
            self._event(number, "start")
            self._event(number, "finish", status=status)
            self._release(number, frozenset(self.jobs[number].left.ranks))
            self.module._request_schedule()

        self._handle.call(apply)

    def release(self, number, ranks):
        """Housekeeping has ended on some ranks of a job."""
        self._handle.call(lambda: self._release(number, frozenset(ranks)))

    def set_priority(self, number, priority):
        def apply():
            self.jobs[number].priority = priority
            self.module.prioritize([[number, priority]])
            self.module._request_schedule()

        self._handle.call(apply)

    def drain(self, ranks, *, is_down=True):
        def apply():
            given = parse_idset(ranks)
            self.drained = self.drained | given if is_down else self.drained - given
            (self.module.resources.mark_down if is_down else self.module.resources.mark_up)(ranks)
            self.module.resource_update()
            self.module._request_schedule()

        self._handle.call(apply)

    def find_infeasibility(self, jobspec):
        answer = queue.SimpleQueue()
        self._handle.call(lambda: self.module.feasibility_check(answer, jobspec))
        errnum, text = answer.get(timeout=30.0)
        return text if errnum else ""

    def _check(self):
        """Raises what has ended the module: nothing that is waited for would come."""
        if self.failed is not None:
            raise self.failed
        assert self._thread.is_alive(), "no module is loaded"

    def list_events(self, number):
        self._check()
        return [one["name"] for one in self.jobs[number].events]

    def get_resources(self, number):
        return self.jobs[number].R

    def get_annotations(self, number):
        return self.jobs[number].notes

    def get_exception(self, number):
        found = [one for one in self.jobs[number].events if one["name"] == "exception"]
        return found[0]["context"]["note"] if found else ""

    # In the module's thread

    def begin(self, module):
        module._resources = Pool(self.whole)
        module._resources.down = self.drained
        module.resource_update()
        for number, job in self.jobs.items():
            if job.left is not None:
                module.hello(number, job.priority, os.getuid(), job.submit_s, Pool(job.left))
        self._begun.set()
        for number, job in self.jobs.items():
            if job.R is None and "exception" not in self.list_events(number):
                self._ask(number)

    def _ask(self, number):
        job, module = self.jobs[number], self.module
        module.alloc(AllocRequest(self, number), number, job.priority, os.getuid(), job.submit_s, job.jobspec)
        module._request_schedule()

    def _event(self, number, name, **context):
        job = self.jobs[number]
        job.events.append({"timestamp": time.time(), "name": name, "context": context})
        self._tell(self._describe(number, job.events[-1:]))

    def _describe(self, number, events):
        found = {"id": number, "events": events}
        return found | {"R": self.jobs[number].R} if any(one["name"] == "alloc" for one in events) else found

    def _tell(self, message):
        for one in self.journals:
            self._handle.calls.put(lambda one=one: one.tell(message))

    def tell_history(self):
        return [self._describe(number, list(job.events)) for number, job in self.jobs.items()] + [
            {"id": -1, "events": []}
        ]

    def on_alloc(self, number, found, annotations):
        job = self.jobs[number]
        job.R, job.left = found, parse_resource_set(found)
        self.on_annotate(number, annotations or {})
        others = [one.left for key, one in self.jobs.items() if key != number and one.left is not None]
        assert not any(one.overlaps(job.left) for one in others), "held twice"
        self._event(number, "alloc", annotations=annotations or {})
        self._event(number, "start")

    def on_annotate(self, number, annotations):
        notes = self.jobs[number].notes
        notes.update(annotations.get("sched", {}))
        for key in [key for key, value in notes.items() if value is None]:
            del notes[key]

    def on_deny(self, number, note):
        self._event(number, "exception", type="alloc", severity=0, note=note or "")
        self._event(number, "clean")

    def on_raise(self, number, note):
        self._event(number, "exception", type="cancel", severity=0, note=note)
        self._release(number, frozenset(self.jobs[number].left.ranks))

    def _release(self, number, ranks):
        job = self.jobs[number]
        part, job.left = job.left.select_ranks(ranks), job.left.select_ranks(frozenset(job.left.ranks) - ranks)
        is_final = not job.left.ranks
        self._event(number, "release", ranks=",".join(map(str, sorted(ranks))), final=is_final)
        self.module.free(number, Pool(part), final=is_final)
        if is_final:
            job.left = None
            self._event(number, "free")
            self._event(number, "clean")
        self.module._request_schedule()
