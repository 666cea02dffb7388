"""Client: every call of the operators' API as a typed method that blocks.

Generated from async_client.py by client/generate.py; do not edit.
"""

import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from copy import copy
from dataclasses import replace
from time import monotonic
from typing import Self, TypeVar

from eelgrid.connection import (
    CALL_NAMES,
    DEFAULT_RETRIES,
    STALE_CALLS,
    BlockingConnection,
    CallAttempts,
    ConnectionSettings,
    Retries,
    WatchAttempts,
    WatchPosition,
)
from eelgrid.errors import (
    DeadlineExceededError,
    InvalidSettingsError,
    UnavailableError,
    WaitTimeoutError,
    WorkloadEndedError,
)
from eelgrid_protos import faults, messages
from eelgrid_protos.errors import ContractError
from eelgrid_protos.operator_calls import Page, PageCursor, join_pages
from eelgrid_protos.stale_reads import Staleness
from eelgrid_protos.transport import TlsFiles

_A = TypeVar("_A")
_P = TypeVar("_P", bound=Page)
_T = TypeVar("_T")
_LOG = logging.getLogger("eelgrid")
_POLL_FIRST_S, _POLL_LONGEST_S = 0.05, 1.0


class Client:
    """A connection to a controller, for any thread; errors are those of `eelgrid.errors`.

    Settings that are not given come from EELGRID_CONTROLLER and EELGRID_TLS_CERTIFICATE, _KEY and _AUTHORITY, as for
    eelctl; without any the controller is 127.0.0.1:7443. Of several addresses, in one text with commas or as a list, the
    controller that leads is called. Another machine needs TLS files, or `insecure`.
    """

    def __init__(
        self,
        address: str | Iterable[str] | None = None,
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
        timeout_s: float = 10.0,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        """Raises InvalidSettingsError; connects at the first call."""
        self._settings = ConnectionSettings.resolve(
            address=address, tls=tls, insecure=insecure, timeout_s=timeout_s, retries=retries
        )
        self._timeout_s = timeout_s
        self._allows_stale = False
        self._staleness: Staleness | None = None
        self._connection = BlockingConnection(self._settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls and closes the connection."""
        self._connection.close()

    @property
    def address(self) -> str:
        """Address of the controller that led last."""
        return self._settings.controllers.preferred

    def with_timeout(self, timeout_s: float) -> Self:
        """Returns a client over the same connection whose calls have another time limit."""
        if not timeout_s > 0.0:
            raise InvalidSettingsError(f"timeout_s is {timeout_s}", "give a number of seconds above 0")
        other = copy(self)
        other._timeout_s = timeout_s  # noqa: SLF001  # of its own class
        return other

    def allow_stale(self) -> Self:
        """Returns a client over the same connection whose reads any of the controllers may answer, also while none leads.

        What a follower answers may lack the last changes, and has no readings of agents; see `staleness`. Calls that change
        something, and watches, still go to the one that leads.
        """
        other = copy(self)
        # With a preference of its own: whoever answered the last read need not lead.
        other._settings = replace(self._settings)  # noqa: SLF001  # of its own class
        other._allows_stale, other._staleness = True, None  # noqa: SLF001
        return other

    @property
    def staleness(self) -> Staleness | None:
        """How stale the newest answer to a read of this client was; None if the controller that leads gave it."""
        return self._staleness

    def _note_staleness(self, found: Staleness | None) -> None:
        self._staleness = found

    # How calls are made

    def _call(
        self, request: object, answer: type[_A], *, is_repeatable: bool = False, timeout_s: float | None = None
    ) -> _A:
        attempts = CallAttempts(self._settings, timeout_s or self._timeout_s, is_repeatable=is_repeatable)
        name = CALL_NAMES[type(request)]
        options = {"on_staleness": self._note_staleness} if self._allows_stale and name in STALE_CALLS else {}
        while True:
            try:
                calls = self._connection.calls_at(attempts.search.address)
                found = getattr(calls, name)(request, timeout=attempts.left_s(), **options)
            except (faults.Fault, ContractError) as error:
                pause_s = attempts.pause_after(error)
            else:
                attempts.search.succeed()
                assert isinstance(found, answer)
                return found
            time.sleep(pause_s)

    def _read(self, request: object, answer: type[_A], *, timeout_s: float | None = None) -> _A:
        return self._call(request, answer, is_repeatable=True, timeout_s=timeout_s)

    def _iterate(
        self,
        request: object,
        answer: type[_P],
        items: Callable[[_P], tuple[_T, ...]],
        *,
        page_size_most: int | None = None,
    ) -> Iterator[_T]:
        cursor = PageCursor(request, page_size_most=page_size_most)
        while not cursor.is_done:
            page = self._read(cursor.next_request(), answer)
            _log_omitted(page, answer)
            for item in cursor.take_items(page, items(page)):
                yield item

    def _join(self, request: object, answer: type[_P]) -> _P:
        cursor, pages = PageCursor(request, is_sized=False), list[_P]()
        while not cursor.is_done:
            pages.append(self._read(cursor.next_request(), answer))
            _log_omitted(pages[-1], answer)
            cursor.take_items(pages[-1], ())
        return join_pages(pages)

    def _watch(self, next_request: Callable[[], object], answer: type[_A]) -> Generator[_A, None]:
        attempts = WatchAttempts(self._settings)
        while True:
            attempts.begin()
            request = next_request()
            try:
                calls = self._connection.calls_at(attempts.search.address)
                with closing(getattr(calls, CALL_NAMES[type(request)])(request)) as stream:
                    for found in stream:
                        attempts.mark_connected()
                        assert isinstance(found, answer)
                        yield found
                pause_s = attempts.pause_after(faults.Unavailable("the controller ended the watch; watch again"))
            except (faults.Fault, ContractError) as error:
                pause_s = attempts.pause_after(error)
            time.sleep(pause_s)

    # The cluster

    def who_am_i(self) -> messages.WhoAmIResponse:
        """The identity, roles and rights of the client's certificate."""
        return self._read(messages.WhoAmIRequest(), messages.WhoAmIResponse)

    def get_summary(self) -> messages.Summary:
        """The totals of the cluster."""
        answer = self._read(messages.GetSummaryRequest(), messages.GetSummaryResponse)
        return answer.summary

    def get_overview(self) -> messages.Overview:
        """What is going on and what needs attention: power, energy, waiting work, consumers; computed once per second."""
        answer = self._read(messages.GetOverviewRequest(), messages.GetOverviewResponse)
        return answer.overview

    def watch_summary(self, *, interval_s: float = 1.0) -> Generator[messages.Summary, None]:
        """The totals now and after each interval; resumes after a lost connection."""
        request = messages.WatchSummaryRequest(interval_s=interval_s)
        with closing(self._watch(lambda: request, messages.WatchSummaryResponse)) as answers:
            for answer in answers:
                yield answer.summary

    def list_nodes(
        self,
        *,
        states: Iterable[messages.NodeState] = (),
        pool: str = "",
        gpu_model: str = "",
        name_contains: str = "",
    ) -> Iterator[messages.Node]:
        """Nodes by name."""
        request = messages.ListNodesRequest(
            states=tuple(states), pool=pool, gpu_model=gpu_model, name_contains=name_contains
        )
        return self._iterate(request, messages.ListNodesResponse, lambda page: page.nodes)

    def list_gpus(
        self, *, node_name: str = "", gpu_model: str = "", min_free_milli: int = 0
    ) -> Iterator[messages.GpuStatus]:
        """GPUs by node and index, with their latest readings; only those with so many thousandths free."""
        request = messages.ListGpusRequest(node_name=node_name, gpu_model=gpu_model, min_free_milli=min_free_milli)
        return self._iterate(request, messages.ListGpusResponse, lambda page: page.gpus)

    def list_plans(self, *, node_name: str = "") -> Iterator[messages.PlanStatus]:
        """The plans that the controller sends to its nodes, by node name."""
        request = messages.ListPlansRequest(node_name=node_name)
        return self._iterate(request, messages.ListPlansResponse, lambda page: page.plans)

    def reconcile_node(self, node_name: str) -> messages.Node:
        """Releases what a node holds beyond the journal; harmless if there is nothing."""
        answer = self._call(messages.ReconcileNodeRequest(node_name=node_name), messages.ReconcileNodeResponse)
        return answer.node

    def remove_node(self, node_name: str, *, force: bool = False, dry_run: bool = False) -> messages.RemoveNodeResponse:
        """Removes a node that is gone for good; `force` also where it holds work or its agent is connected."""
        request = messages.RemoveNodeRequest(node_name=node_name, force=force, dry_run=dry_run)
        return self._call(request, messages.RemoveNodeResponse)

    def cordon_node(self, node_name: str, *, gpus: Iterable[str] = (), reason: str = "") -> messages.CordonNodeResponse:
        """Closes a node to new work, or only GPUs of it by index or UUID; what runs there goes on."""
        request = messages.CordonNodeRequest(node_name=node_name, gpus=tuple(gpus), reason=reason)
        return self._call(request, messages.CordonNodeResponse)

    def uncordon_node(self, node_name: str, *, gpus: Iterable[str] = ()) -> messages.UncordonNodeResponse:
        """Opens a node to new work again, or GPUs of it by index or UUID; harmless where nobody cordoned them."""
        request = messages.UncordonNodeRequest(node_name=node_name, gpus=tuple(gpus))
        return self._call(request, messages.UncordonNodeResponse)

    def drain_node(
        self,
        node_name: str,
        *,
        gpus: Iterable[str] = (),
        reason: str = "",
        grace_s: float | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> messages.DrainNodeResponse:
        """Cordons a node or GPUs of it and empties them; returns what becomes of the work there, and does not wait.

        Work that may move does so as soon as it fits elsewhere. After `grace_s` seconds what is left returns to the
        queue, except work declared fixed, which does so only with `force`; without a grace the drain waits for it.
        """
        request = messages.DrainNodeRequest(
            node_name=node_name, gpus=tuple(gpus), reason=reason, grace_s=grace_s, force=force, dry_run=dry_run
        )
        return self._call(request, messages.DrainNodeResponse)

    def list_audit_entries(
        self, *, since_ns: int = 0, user: str = "", call: str = "", denied: bool = False
    ) -> Iterator[messages.AuditEntry]:
        """Who requested which change and with what result, the newest first."""
        request = messages.ListAuditEntriesRequest(since_ns=since_ns, user=user, call=call, denied=denied)
        return self._iterate(request, messages.ListAuditEntriesResponse, lambda page: page.entries)

    # Workloads

    def submit_workload(
        self,
        spec: messages.WorkloadSpec,
        *,
        workload_id: str = "",
        dry_run: bool = False,
        hold: bool = False,
        array: messages.JobArrayRequest | None = None,
        cancelled: bool = False,
    ) -> messages.Workload:
        """Submits a workload, or an array of them; returns once it is stored and either placed or known to wait.

        The id makes the call idempotent: without one the client draws it, so that a lost answer is asked for again and
        nothing is submitted twice. To repeat a submission across restarts of your program, give an id of your own.

        A workload that is submitted as cancelled never starts, and its id is used from then on: so a program that gave up an
        earlier submission makes sure that it starts nothing if it arrives late.
        """
        key = workload_id or ("" if dry_run else f"c-{secrets.token_hex(8)}")
        request = messages.SubmitWorkloadRequest(
            spec=spec, workload_id=key, dry_run=dry_run, hold=hold, array=array, cancelled=cancelled
        )
        answer = self._call(request, messages.SubmitWorkloadResponse, is_repeatable=True)
        return answer.workload

    def get_workload(self, workload_id: str) -> messages.Workload:
        """One workload."""
        answer = self._read(messages.GetWorkloadRequest(workload_id=workload_id), messages.GetWorkloadResponse)
        return answer.workload

    def list_workloads(
        self,
        *,
        phases: Iterable[messages.WorkloadPhase] = (),
        namespace: str = "",
        user: str = "",
        queue: str = "",
        node_name: str = "",
        name_contains: str = "",
        queue_positions: bool = False,
        array_id: str = "",
        whole_arrays: bool = False,
    ) -> Iterator[messages.Workload]:
        """Workloads in order of submission; `queue_positions` sets the places of pending ones where queues are declared.

        `whole_arrays` lists each array once, in place of its elements; these are the workloads of its `array_id`.
        """
        request = messages.ListWorkloadsRequest(
            phases=tuple(phases),
            namespace=namespace,
            user=user,
            queue=queue,
            node_name=node_name,
            name_contains=name_contains,
            queue_positions=queue_positions,
            array_id=array_id,
            whole_arrays=whole_arrays,
        )
        return self._iterate(request, messages.ListWorkloadsResponse, lambda page: page.workloads)

    def list_workload_summaries(
        self,
        *,
        phases: Iterable[messages.WorkloadPhase] = (),
        namespace: str = "",
        user: str = "",
        queue: str = "",
        node_name: str = "",
        name_contains: str = "",
        queue_positions: bool = False,
        array_id: str = "",
        whole_arrays: bool = False,
    ) -> Iterator[messages.WorkloadSummary]:
        """One row of a table for each workload, in order of submission; filters are those of `list_workloads`.

        A summary has who submitted it, what it requests, where it waits, how long it ran and how it ended, but neither
        command nor placements. Ten thousand take a sixth of the time that whole workloads take.
        """
        request = messages.ListWorkloadsRequest(
            phases=tuple(phases),
            namespace=namespace,
            user=user,
            queue=queue,
            node_name=node_name,
            name_contains=name_contains,
            queue_positions=queue_positions,
            array_id=array_id,
            whole_arrays=whole_arrays,
            view=messages.WorkloadView.SUMMARY,
        )
        return self._iterate(
            request,
            messages.ListWorkloadsResponse,
            lambda page: page.rows,
            page_size_most=messages.SUMMARY_PAGE_SIZE_MOST,
        )

    def watch_workloads(self, *, after_revision: int = 0) -> Generator[messages.Workload, None]:
        """Every workload that changed after a revision, then each change; resumes after a lost connection.

        Revision 0 begins with all workloads, `get_summary().revision` with the changes from now on. After a
        lost connection each workload that changed meanwhile is delivered once, in its present state.
        """
        position = WatchPosition(after_revision)

        def next_request() -> messages.WatchWorkloadsRequest:
            return messages.WatchWorkloadsRequest(after_revision=position.resume_revision)

        with closing(self._watch(next_request, messages.WatchWorkloadsResponse)) as changes:
            for change in changes:
                if position.accept(change.workload):
                    yield change.workload

    def wait(
        self,
        workload_id: str,
        *,
        until: messages.WorkloadPhase | Callable[[messages.Workload], bool] = messages.WorkloadPhase.PLACED,
        timeout_s: float = 600.0,
    ) -> messages.Workload:
        """Waits until the workload is in a phase, or fulfils a condition; a controller that restarts is waited for.

        Raises WaitTimeoutError, and WorkloadEndedError if it ended before. It asks at growing intervals of up to a second, which
        costs the controller less than a watch of the whole cluster for each waiting program.
        """
        is_reached = until if callable(until) else lambda workload: workload.phase is until
        deadline_s, pause_s, workload = monotonic() + timeout_s, _POLL_FIRST_S, None
        while True:
            left_s = deadline_s - monotonic()
            try:
                request = messages.GetWorkloadRequest(workload_id=workload_id)
                answer = self._read(
                    request, messages.GetWorkloadResponse, timeout_s=max(min(left_s, self._timeout_s), _POLL_FIRST_S)
                )
            except (UnavailableError, DeadlineExceededError):
                if left_s <= pause_s:
                    raise
            else:
                workload = answer.workload
                if is_reached(workload):
                    return workload
                if workload.phase.is_ended:
                    raise WorkloadEndedError(
                        f"{workload_id} ended ({workload.reason or 'cancelled'})", workload=workload
                    )
                if left_s <= pause_s:
                    why = f"{workload.phase.name.lower()}: {workload.reason}".removesuffix(": ")
                    raise WaitTimeoutError(
                        f"{workload_id} did not get there in {timeout_s:g} s ({why})",
                        "explain_workload() returns what keeps it waiting",
                        workload,
                    )
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _POLL_LONGEST_S)

    def cancel_workload(self, workload_id: str) -> messages.Workload:
        """Ends a workload; its resources are free at once."""
        answer = self._call(messages.CancelWorkloadRequest(workload_id=workload_id), messages.CancelWorkloadResponse)
        return answer.workload

    def scale_workload(self, workload_id: str, replicas: int) -> messages.Workload:
        """Scales a workload to so many replicas, or as close as capacity allows."""
        request = messages.ScaleWorkloadRequest(workload_id=workload_id, replicas=replicas)
        answer = self._call(request, messages.ScaleWorkloadResponse)
        return answer.workload

    def explain_workload(self, workload_id: str) -> messages.Explanation:
        """Why a workload is placed where it is, or why it waits and what would help."""
        answer = self._read(messages.ExplainWorkloadRequest(workload_id=workload_id), messages.ExplainWorkloadResponse)
        return answer.explanation

    def export_decision(self, workload_id: str) -> str:
        """The last decision on a workload with all its inputs, as JSON."""
        attempts = CallAttempts(self._settings, self._timeout_s, is_repeatable=True)
        request, parts = messages.ExportDecisionRequest(workload_id=workload_id), list[str]()
        while True:
            parts.clear()
            try:
                calls = self._connection.calls_at(attempts.search.address)
                with closing(calls.export_decision(request, timeout=attempts.left_s())) as stream:
                    for part in stream:
                        parts.append(part.text)
                attempts.search.succeed()
                return "".join(parts)
            except (faults.Fault, ContractError) as error:
                pause_s = attempts.pause_after(error)
            time.sleep(pause_s)

    def read_logs(
        self,
        workload_id: str,
        *,
        replica: int = 0,
        tail_lines: int | None = None,
        offset: int = 0,
        follow: bool = False,
        attempt: int = 0,
    ) -> Generator[str, None]:
        """The output of one replica's process in parts; with `follow` from its start until the process ends.

        Of one `attempt`, counted from 1, or of the newest.

        Continues where it was after a lost connection.
        """
        attempts = WatchAttempts(self._settings)
        while True:
            attempts.begin()
            request = messages.ReadLogsRequest(
                workload_id=workload_id,
                replica=replica,
                tail_lines=tail_lines,
                offset=offset,
                follow=follow,
                attempt=attempt,
            )
            try:
                calls = self._connection.calls_at(attempts.search.address)
                with closing(calls.read_logs(request)) as stream:
                    for part in stream:
                        attempts.mark_connected()
                        offset, tail_lines = part.next_offset, None
                        yield part.text
            except (faults.Fault, ContractError) as error:
                pause_s = attempts.pause_after(error)
            else:
                return
            time.sleep(pause_s)

    def attach(
        self,
        workload_id: str,
        *,
        replica: int = 0,
        tail_lines: int | None = None,
        offset: int = 0,
        attempt: int = 0,
        sends_input: bool = False,
        inputs: Iterator[messages.AttachInput] | None = None,
    ) -> Generator[messages.AttachResponse, None]:
        """The output of one replica's process as it comes, in bytes, while `inputs` is passed on to it.

        Ends with the process, also if the inputs have not ended. After a lost connection nothing is repeated, since input
        that was not taken is lost: the caller knows from `inputs_taken` whether that is so.
        """
        opening = messages.AttachOpening(
            workload_id=workload_id,
            replica=replica,
            tail_lines=tail_lines,
            offset=offset,
            attempt=attempt,
            sends_input=sends_input or inputs is not None,
        )

        def requests() -> Iterator[messages.AttachRequest]:
            yield messages.AttachRequest(message=opening)
            if inputs is not None:
                for one in inputs:
                    yield messages.AttachRequest(message=one)

        if len(self._settings.controllers.all) > 1:
            # What a stream has taken of its inputs cannot be taken again, so the leader is found first.
            self.who_am_i()
        calls = self._connection.calls_at(self._settings.controllers.preferred)
        with closing(calls.attach(requests())) as stream:
            for response in stream:
                yield response

    def report_progress(self, workload_id: str, work_done: float) -> None:
        """Reports how many units of work a job has done since it started."""
        request = messages.ReportProgressRequest(workload_id=workload_id, work_done=work_done)
        self._call(request, messages.ReportProgressResponse)

    # Objectives, budgets and measurements

    def list_promises(self) -> messages.ListPromisesResponse:
        """Whether services and jobs meet their objectives, and the claims on power budgets; all pages joined."""
        return self._join(messages.ListPromisesRequest(), messages.ListPromisesResponse)

    def imagine_budgets(self, budgets: Iterable[messages.PowerBudget]) -> messages.ImagineBudgetsResponse:
        """What jobs would lose under these budgets in place of those in force; changes nothing."""
        request = messages.ImagineBudgetsRequest(budgets=tuple(budgets))
        return self._read(request, messages.ImagineBudgetsResponse)

    def record_points(self, points: Iterable[messages.MeasuredPoint]) -> int:
        """Stores measured points, at most 1,000; returns how many are new or changed."""
        request = messages.RecordPointsRequest(points=tuple(points))
        answer = self._call(request, messages.RecordPointsResponse)
        return answer.recorded

    def list_points(self, *, profile: str = "") -> Iterator[messages.MeasuredPoint]:
        """Measured points by profile and configuration."""
        request = messages.ListPointsRequest(profile=profile)
        return self._iterate(request, messages.ListPointsResponse, lambda page: page.points)

    # Policy

    def get_policy(self) -> messages.Policy:
        """The policy in force."""
        answer = self._read(messages.GetPolicyRequest(), messages.GetPolicyResponse)
        return answer.policy

    def update_policy(self, policy: messages.Policy) -> messages.Policy:
        """Puts a policy in force: the one of `get_policy()` with changes (`dataclasses.replace`).

        Raises AbortedError if somebody else changed it in between: its revision must be the one in force.
        """
        answer = self._call(messages.UpdatePolicyRequest(policy=policy), messages.UpdatePolicyResponse)
        return answer.policy

    def list_interference(self) -> Iterator[messages.MeasuredInterference]:
        """By how much running jobs slow each other down on shared GPUs, as measured since the controller started."""
        request = messages.ListInterferenceRequest()
        return self._iterate(request, messages.ListInterferenceResponse, lambda page: page.pairs)

    # Queues

    def list_queues(self) -> Iterator[messages.QueueStatus]:
        """Queues with what uses them and what waits in them, each after its parent."""
        return self._iterate(messages.ListQueuesRequest(), messages.ListQueuesResponse, lambda page: page.queues)

    def move_to_queue(self, workload_id: str, queue: str) -> messages.Workload:
        """Moves a pending workload to another queue; it keeps its time of submission."""
        request = messages.MoveToQueueRequest(workload_id=workload_id, queue=queue)
        answer = self._call(request, messages.MoveToQueueResponse)
        return answer.workload

    # What keeps work from starting

    def hold_workload(self, workload_id: str) -> messages.Workload:
        """Keeps a pending workload from starting until it is released."""
        request = messages.HoldWorkloadRequest(workload_id=workload_id)
        answer = self._call(request, messages.HoldWorkloadResponse)
        return answer.workload

    def release_workload(self, workload_id: str) -> messages.Workload:
        """Lets a held workload start again."""
        request = messages.ReleaseWorkloadRequest(workload_id=workload_id)
        answer = self._call(request, messages.ReleaseWorkloadResponse)
        return answer.workload

    def requeue_workload(self, workload_id: str, reason: str = "", *, hold: bool = False) -> messages.Workload:
        """Stops a running job, which then waits in the queue again, held or not; it is not counted as failed."""
        request = messages.RequeueWorkloadRequest(workload_id=workload_id, reason=reason, hold=hold)
        answer = self._call(request, messages.RequeueWorkloadResponse)
        return answer.workload

    # What would happen

    def what_if(
        self, changes: Iterable[messages.WhatIfChange], *, differences_most: int = 0
    ) -> messages.WhatIfResponse:
        """Tries changes, in order, on a copy of the cluster."""
        request = messages.WhatIfRequest(changes=tuple(changes), differences_most=differences_most)
        return self._read(request, messages.WhatIfResponse)

    def plan_capacity(
        self, shape: messages.NodeShape, *, changes: Iterable[messages.WhatIfChange] = (), nodes_most: int = 0
    ) -> messages.PlanCapacityResponse:
        """How many nodes of a shape are needed for what the changes submit, or for all pending work."""
        request = messages.PlanCapacityRequest(shape=shape, changes=tuple(changes), nodes_most=nodes_most)
        return self._read(request, messages.PlanCapacityResponse)

    def start_shadow(self, weights: messages.SetWeights) -> messages.ShadowReport:
        """Starts a second policy on a copy of the cluster that follows the same events."""
        answer = self._call(messages.StartShadowRequest(weights=weights), messages.StartShadowResponse)
        return answer.report

    def get_shadow(self) -> messages.ShadowReport:
        """The comparison of the cluster with the shadow."""
        answer = self._read(messages.GetShadowRequest(), messages.GetShadowResponse)
        return answer.report

    def stop_shadow(self) -> messages.ShadowReport:
        """Ends the shadow; returns the final comparison."""
        answer = self._call(messages.StopShadowRequest(), messages.StopShadowResponse)
        return answer.report

    # Moves and partitions

    def recommend_moves(
        self,
        *,
        goal: messages.MoveGoal = messages.MoveGoal.UNSPECIFIED,
        moves_most: int = 0,
        moves_ratio: float = 0.0,
        gpu_ratio: float = 0.0,
        restart_s: float | None = None,
        horizon_s: float | None = None,
    ) -> messages.Recommendation:
        """Moves of running work that pay off within a budget; changes nothing."""
        request = messages.RecommendMovesRequest(
            goal=goal,
            moves_most=moves_most,
            moves_ratio=moves_ratio,
            gpu_ratio=gpu_ratio,
            restart_s=restart_s,
            horizon_s=horizon_s,
        )
        answer = self._read(request, messages.RecommendMovesResponse)
        return answer.recommendation

    def apply_moves(self, recommendation_id: str) -> messages.ApplyMovesResponse:
        """Executes a recommendation, all of it or nothing."""
        request = messages.ApplyMovesRequest(recommendation_id=recommendation_id)
        return self._call(request, messages.ApplyMovesResponse)

    def list_partitions(self) -> messages.ListPartitionsResponse:
        """Every partitioned GPU and the change in progress; all pages joined."""
        return self._join(messages.ListPartitionsRequest(), messages.ListPartitionsResponse)

    def recommend_partitions(self, *, horizon_s: float | None = None) -> messages.PartitionRecommendation:
        """The best change of MIG layouts; changes nothing."""
        request = messages.RecommendPartitionsRequest(horizon_s=horizon_s)
        answer = self._read(request, messages.RecommendPartitionsResponse)
        return answer.recommendation

    def apply_partitions(self, recommendation_id: str) -> messages.ApplyPartitionsResponse:
        """Executes the first stage of a recommendation or nothing; the other stages follow."""
        request = messages.ApplyPartitionsRequest(recommendation_id=recommendation_id)
        return self._call(request, messages.ApplyPartitionsResponse)

    # Energy and money

    def query_energy(
        self,
        *,
        begin_ns: int,
        end_ns: int,
        group_by: Iterable[str] = (),
        filters: Mapping[str, str] | None = None,
        rows_most: int = 0,
        with_nobody: bool = False,
    ) -> messages.QueryEnergyResponse:
        """Who spent how much energy in the whole hours around an interval (Unix time in nanoseconds)."""
        request = messages.QueryEnergyRequest(
            begin_ns=begin_ns,
            end_ns=end_ns,
            group_by=tuple(group_by),
            filters=dict(filters or {}),
            rows_most=rows_most,
            with_nobody=with_nobody,
        )
        return self._read(request, messages.QueryEnergyResponse)

    def query_energy_report(
        self,
        *,
        begin_ns: int,
        end_ns: int,
        filters: Mapping[str, str] | None = None,
        groupings: Iterable[messages.EnergyGrouping] = (),
    ) -> tuple[messages.QueryEnergyResponse, ...]:
        """Several energy queries over one interval, all answered as of the same moment."""
        request = messages.QueryEnergyReportRequest(
            begin_ns=begin_ns, end_ns=end_ns, filters=dict(filters or {}), groupings=tuple(groupings)
        )
        answer = self._read(request, messages.QueryEnergyReportResponse)
        return answer.answers

    def list_spending(self) -> messages.ListSpendingResponse:
        """The spending limits and how much of each is spent."""
        return self._read(messages.ListSpendingRequest(), messages.ListSpendingResponse)

    def list_energy_exporters(self) -> messages.ListEnergyExportersResponse:
        """Who exports energy rows, and up to when."""
        return self._read(messages.ListEnergyExportersRequest(), messages.ListEnergyExportersResponse)

    def confirm_energy_export(
        self, name: str, *, begin_ns: int, end_ns: int, revision: int = 0
    ) -> messages.EnergyExporter:
        """Confirms which whole hours an exporter has stored elsewhere; they may then expire."""
        request = messages.ConfirmEnergyExportRequest(name=name, begin_ns=begin_ns, end_ns=end_ns, revision=revision)
        answer = self._call(request, messages.ConfirmEnergyExportResponse)
        return answer.exporter

    def remove_energy_exporter(self, name: str) -> None:
        """Removes an exporter's mark: its rows expire by age again."""
        self._call(messages.RemoveEnergyExporterRequest(name=name), messages.RemoveEnergyExporterResponse)


def _log_omitted(page: Page, answer: type) -> None:
    if page.omitted:
        _LOG.warning("%d elements omitted from %s; see the controller's log", page.omitted, answer.__name__)
