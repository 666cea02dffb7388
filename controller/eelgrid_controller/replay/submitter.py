"""Submits a list of workloads in order, each exactly once, across restarts of the controller.

Theory: calls start in order and may be answered in any; `in_flight` bounds how many are open. When one fails because
nobody answered, no new call starts, the open ones are awaited, and everything from the first unanswered request on is
sent again, in order, as in go-back-n. The workload id makes repetition idempotent. An invalid request is recorded as
refused and skipped. Repetition is bounded by the time without any answer.

SubmitError                 the list could not be submitted
└── ControllerSilent        no answer for too long; names the first unanswered workload
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eelgrid_controller.latency import RecentLatencies
from eelgrid_controller.replay.openb import TASKS_MOST
from eelgrid_protos import faults
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import GetWorkloadRequest, SubmitWorkloadRequest, Workload, WorkloadPhase

_REPEATABLE = (faults.Unavailable, faults.DeadlineExceeded, faults.ResourceExhausted, faults.Aborted)
_REFUSALS_KEPT = 1000


class SubmitError(Exception):
    """The list could not be submitted."""


class ControllerSilent(SubmitError):
    """No answer for too long."""


class WorkloadOperators(Protocol):
    """The two calls of the operators' API that submitting needs."""

    async def submit_workload(self, request: SubmitWorkloadRequest, timeout: float | None = None) -> Any:
        """Submits."""

    async def get_workload(self, request: GetWorkloadRequest, timeout: float | None = None) -> Any:
        """Looks up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitLimits:
    """The limits of submitting."""

    in_flight: int = 8
    call_timeout_s: float = 10.0
    pause_first_s: float = 0.05
    pause_longest_s: float = 1.0
    silence_longest_s: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.in_flight <= 1024:
            raise ValueError(f"in_flight is {self.in_flight}; use 1 to 1024")


@dataclass(frozen=True, slots=True)
class SubmitRefusal:
    """A request that the controller will never take, and why."""

    workload_id: str
    reason: str


@dataclass(slots=True, kw_only=True)
class SubmitReport:
    """What became of the list so far; `done` counts answered requests."""

    total: int
    done: int = 0
    placed: int = 0
    pending: int = 0
    refused: int = 0
    repeats: int = 0
    elapsed_s: float = 0.0
    latency: RecentLatencies = field(default_factory=lambda: RecentLatencies(TASKS_MOST))
    refusals: list[SubmitRefusal] = field(default_factory=list)

    @property
    def rate_hz(self) -> float:
        """Answers per second over the whole time."""
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0


SubmitProgress = Callable[[SubmitReport, Workload | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """Sends requests through `operators`; `jitter` gives numbers in [0, 1)."""

    operators: WorkloadOperators
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    jitter: Callable[[], float]
    rules: SubmitLimits = field(default_factory=SubmitLimits)

    async def run(self, requests: Sequence[SubmitWorkloadRequest], progress: SubmitProgress) -> SubmitReport:
        """All requests answered, or ControllerSilent; `progress` is called after each answer."""
        if any(not request.workload_id for request in requests):
            raise ValueError("a request without workload_id cannot be repeated safely; give each an id")
        run = _Run(self, requests, progress)
        first, tries, heard_s = 0, 0, run.begun_s
        while first < len(requests):
            fault = await run.pass_from(first)
            reached = run.first_unanswered(first)
            if reached > first:
                first, tries, heard_s = reached, 0, self.clock()
            if fault is None:
                continue
            silence_s = self.clock() - heard_s
            if silence_s > self.rules.silence_longest_s:
                raise ControllerSilent(
                    f"no answer to {requests[first].workload_id} for {silence_s:.0f} s ({fault.message}); "
                    "start the controller and run the same command again: nothing is placed twice"
                )
            tries += 1
            run.report.repeats += 1
            pause_s = min(self.rules.pause_longest_s, self.rules.pause_first_s * 2 ** min(tries, 10))
            await self.sleep(pause_s * (0.5 + 0.5 * self.jitter()))
        run.report.elapsed_s = self.clock() - run.begun_s
        return run.report


class _Run:
    """One list on its way: which requests are answered, and the report so far."""

    def __init__(
        self, submitter: Submitter, requests: Sequence[SubmitWorkloadRequest], progress: SubmitProgress
    ) -> None:
        self._by = submitter
        self._requests = requests
        self._progress = progress
        self._answered = [False] * len(requests)
        self.begun_s = submitter.clock()
        self.report = SubmitReport(total=len(requests))

    def first_unanswered(self, start: int) -> int:
        return next(
            (index for index in range(start, len(self._requests)) if not self._answered[index]), len(self._requests)
        )

    async def pass_from(self, first: int) -> faults.Fault | None:
        """One pass from `first` on; the fault that stopped it, or None at the end of the list.

        Workers take indexes from one counter before they await, so calls begin in order. The window opens
        by one call with each answer: calls that begin together may overtake each other on the way.
        """
        upcoming = iter(range(first, len(self._requests)))
        stopped: list[faults.Fault] = []
        fatal: list[faults.Fault] = []
        workers = 0

        async def worker() -> None:
            nonlocal workers
            for index in upcoming:
                if not self._answered[index]:
                    try:
                        await self._one(self._requests[index])
                        self._answered[index] = True
                    except _REPEATABLE as fault:
                        stopped.append(fault)
                    except faults.Fault as fault:
                        fatal.append(fault)
                if stopped or fatal:
                    return
                if workers < self._by.rules.in_flight:
                    workers += 1
                    group.create_task(worker())

        async with asyncio.TaskGroup() as group:
            workers = 1
            group.create_task(worker())
        if fatal:
            raise fatal[0]
        return stopped[0] if stopped else None

    async def _one(self, request: SubmitWorkloadRequest) -> None:
        """One request to its answer; raises the fault where it should be repeated."""
        workload, timeout_s, sent_s = None, self._by.rules.call_timeout_s, self._by.clock()
        try:
            answer = await self._by.operators.submit_workload(request, timeout=timeout_s)
            workload = answer.workload
            self.report.latency.add(self._by.clock() - sent_s)
        except faults.AlreadyExists as fault:
            lookup = GetWorkloadRequest(workload_id=request.workload_id)
            known = await self._by.operators.get_workload(lookup, timeout=timeout_s)
            if known.workload.spec == request.spec:
                workload = known.workload
            else:
                self._refuse(request, fault)
        except (faults.InvalidArgument, faults.FailedPrecondition, faults.NotFound, ContractError) as fault:
            self._refuse(request, fault)
        self._record_answer(workload)

    def _record_answer(self, workload: Workload | None) -> None:
        self.report.done += 1
        if workload is not None:
            self.report.placed += workload.phase is WorkloadPhase.PLACED
            self.report.pending += workload.phase is WorkloadPhase.PENDING
        self.report.elapsed_s = self._by.clock() - self.begun_s
        self._progress(self.report, workload)

    def _refuse(self, request: SubmitWorkloadRequest, fault: Exception) -> None:
        self.report.refused += 1
        if len(self.report.refusals) < _REFUSALS_KEPT:
            self.report.refusals.append(SubmitRefusal(request.workload_id, str(fault)))
