"""What a front answers: the operators' calls that make sense over several clusters, and where each workload is.

The caller is judged here as a controller judges it, by its certificate: its role, the user that it is, and the namespaces,
queues and labels that it may name. What is sent on carries the caller as the workload's user. A cluster judges the front by the
front's certificate, so a caller gets what both allow. All other calls are refused with the command that asks one cluster.
"""

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.job_control import UNNAMED_USER
from eelgrid_controller.federation.affinity import list_anchors
from eelgrid_controller.federation.cluster_clients import MemberCluster, MemberReport, ask_all, describe_silence
from eelgrid_controller.federation.dispatch import CopyPhase, Dispatch, StoredRecord
from eelgrid_controller.federation.dispatcher import Dispatcher
from eelgrid_controller.federation.ranking import price_now
from eelgrid_controller.federation.totals import add_energy, add_summaries
from eelgrid_controller.runtime.access_control import bind_spec, check_owner, owner_of, show_workload
from eelgrid_controller.server.grpc.pagination import build_page
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import FailedPrecondition, Fault, InvalidArgument, NotFound, Unavailable
from eelgrid_protos.messages import (
    SUMMARY_PAGE_SIZE_MOST,
    BudgetScope,
    CancelWorkloadRequest,
    CancelWorkloadResponse,
    ClusterStatus,
    DispatchedCopy,
    ExplainWorkloadRequest,
    ExplainWorkloadResponse,
    Explanation,
    GetDispatchRequest,
    GetDispatchResponse,
    GetSummaryRequest,
    GetSummaryResponse,
    GetWorkloadRequest,
    GetWorkloadResponse,
    HoldWorkloadRequest,
    HoldWorkloadResponse,
    ListClustersRequest,
    ListClustersResponse,
    ListWorkloadsRequest,
    ListWorkloadsResponse,
    Policy,
    QueryEnergyRequest,
    QueryEnergyResponse,
    ReleaseWorkloadRequest,
    ReleaseWorkloadResponse,
    RequeueWorkloadRequest,
    RequeueWorkloadResponse,
    SubmitWorkloadRequest,
    SubmitWorkloadResponse,
    Workload,
    WorkloadPhase,
    WorkloadView,
    summarize_workload,
)
from eelgrid_protos.quantities import SENTENCE_LETTERS_MOST
from eelgrid_protos.roles import Caller, RoleRules
from eelgrid_protos.rpc import OPERATOR_SERVICE, Encoded

# As long as a reason may be (`RequeueWorkloadRequest`).
_REASON_LETTERS_MOST = 253
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class FrontService:
    """Serves a part of the operators' API, and FederationService; `caller_of` is None where there is no TLS."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        clusters: Mapping[str, MemberCluster],
        *,
        caller_of: Callable[[Context], Caller] | None,
        rules: RoleRules,
        clock: Clock,
        page_urls: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._page_urls = page_urls
        self._dispatcher = dispatcher
        self._clusters = clusters
        self._caller_of = caller_of
        self._rules = rules
        self._clock = clock

    # Workloads

    async def submit_workload(self, request: SubmitWorkloadRequest, context: Context) -> SubmitWorkloadResponse:
        """Places a workload into one of the clusters; raises Fault."""
        _check_supported(request)
        caller = self._find_caller(context)
        spec = bind_spec(caller, request.spec, Policy(), self._rules)
        if caller is not None and not spec.user:
            spec = replace(spec, user=caller.user)
        key = request.workload_id or f"f-{secrets.token_hex(8)}"
        asked = SubmitWorkloadRequest(spec=spec, workload_id=key, array=request.array)
        if request.dry_run:
            return SubmitWorkloadResponse(workload=await self._preview(asked))
        owner = owner_of(caller, spec.user)
        held_by = (owner or spec.user or UNNAMED_USER) if request.hold else ""
        record = await self._dispatcher.submit(key, asked, owner=owner, held_by=held_by)
        if record.dispatch.has_failed:
            raise FailedPrecondition(f"no cluster took {key}: {_join_problems(record.dispatch)}")
        return SubmitWorkloadResponse(workload=self._show(record))

    async def _preview(self, request: SubmitWorkloadRequest) -> Workload:
        ranked, lines = await self._dispatcher.preview(request)
        reason = f"cluster {ranked[0].offer.cluster}: {'; '.join(lines)}"[:SENTENCE_LETTERS_MOST]
        return Workload(
            workload_id=request.workload_id,
            spec=request.spec,
            phase=WorkloadPhase.PENDING,
            reason=reason,
            submitted_ns=self._clock.now_ns(),
        )

    async def get_workload(self, request: GetWorkloadRequest, context: Context) -> GetWorkloadResponse:
        """One workload, as its cluster shows it now, or as it last did."""
        record = await self._dispatcher.look(request.workload_id)
        return GetWorkloadResponse(workload=self._show_to(context, self._show(record)))

    async def list_workloads(self, request: ListWorkloadsRequest, context: Context) -> Encoded:
        """A page of the workloads that were submitted here, in the order of their submission."""
        is_summary = request.view is WorkloadView.SUMMARY
        shown = (self._show(record) for record in self._dispatcher.list_records())
        found = sorted((one for one in shown if _matches(request, one)), key=_find_position)

        def element(workload: Workload) -> tuple[str, Any]:
            if is_summary:
                return "summaries", summarize_workload(workload, progress=workload.progress, queue_position=0)
            return "workloads", self._show_to(context, workload)

        most = {"most": SUMMARY_PAGE_SIZE_MOST} if is_summary else {}
        return build_page(request, ListWorkloadsResponse, found, place_of=_find_position, element_of=element, **most)

    async def cancel_workload(self, request: CancelWorkloadRequest, context: Context) -> CancelWorkloadResponse:
        """Ends a workload wherever it is; a cluster that does not answer is told once it does."""
        record = self._find(request.workload_id)
        check_owner(self._find_caller(context), self._show(record), "CancelWorkload", self._rules)
        return CancelWorkloadResponse(workload=self._show(await self._dispatcher.cancel(request.workload_id)))

    async def hold_workload(self, request: HoldWorkloadRequest, context: Context) -> HoldWorkloadResponse:
        """Keeps a workload of the caller's own at the front; one that a cluster has is held there."""
        caller, record = self._find_caller(context), self._find(request.workload_id)
        check_owner(caller, self._show(record), "HoldWorkload", self._rules)
        user = (None if caller is None else caller.user) or UNNAMED_USER
        return HoldWorkloadResponse(workload=self._show(await self._dispatcher.hold(request.workload_id, user)))

    async def release_workload(self, request: ReleaseWorkloadRequest, context: Context) -> ReleaseWorkloadResponse:
        """Lets a workload of the caller's own go to a cluster that was held at the front."""
        record = self._find(request.workload_id)
        check_owner(self._find_caller(context), self._show(record), "ReleaseWorkload", self._rules)
        return ReleaseWorkloadResponse(workload=self._show(await self._dispatcher.release(request.workload_id)))

    async def requeue_workload(self, request: RequeueWorkloadRequest, context: Context) -> RequeueWorkloadResponse:
        """Stops a running job of the caller's own, or each of an array, in its cluster; it then waits there again."""
        caller, record = self._find_caller(context), self._find(request.workload_id)
        check_owner(caller, self._show(record), "RequeueWorkload", self._rules)
        if request.hold:
            remedy = "leave it out, and hold the job in its cluster: eelctl --cluster NAME requeue --hold"
            raise InvalidArgument("a front holds only what no cluster has", (Violation("hold", "is set", remedy),))
        copy = record.dispatch.find_copy(record.dispatch.chosen)
        if copy is None or copy.phase is not CopyPhase.RELEASED:
            raise FailedPrecondition(f"no cluster runs {request.workload_id}: eelctl clusters {request.workload_id}")
        if copy.cluster not in self._clusters:
            raise Unavailable(f"the front was started without the cluster {copy.cluster}; name it with --cluster")
        # The cluster names the front; for whom it asks stands beside the reason.
        user = "" if caller is None else caller.user
        reason = ": ".join(filter(None, (user, request.reason)))
        await self._clusters[copy.cluster].requeue(replace(request, reason=reason[:_REASON_LETTERS_MOST]))
        return RequeueWorkloadResponse(workload=self._show(await self._dispatcher.look(request.workload_id)))

    async def explain_workload(self, request: ExplainWorkloadRequest, context: Context) -> ExplainWorkloadResponse:
        """Why a workload is in its cluster, and what that cluster says of its places."""
        record = await self._dispatcher.look(request.workload_id)
        dispatch = record.dispatch
        copy = dispatch.find_copy(dispatch.chosen)
        explanation = Explanation(workload=self._show(record))
        if copy is not None and copy.phase in {CopyPhase.RELEASED, CopyPhase.ENDED}:
            # If it does not answer, or the front no longer knows it, what the record says remains.
            with contextlib.suppress(Fault, KeyError):
                explanation = await self._clusters[copy.cluster].explain(dispatch.workload_id)
        where = f"In cluster {dispatch.chosen}. " if dispatch.chosen else "In no cluster yet. "
        remedy = f"{explanation.remedy} {where}{'; '.join(dispatch.decision)}".strip()
        shown = self._show_to(context, explanation.workload)
        explanation = replace(explanation, workload=shown, remedy=remedy[:SENTENCE_LETTERS_MOST])
        return ExplainWorkloadResponse(explanation=explanation)

    # Clusters

    async def get_summary(self, _request: GetSummaryRequest, _context: Context) -> GetSummaryResponse:
        """The totals of all clusters that answer."""
        answers = await ask_all(self._clusters, MemberCluster.read_report)
        found = [one.summary for one in answers.values() if isinstance(one, MemberReport)]
        return GetSummaryResponse(summary=add_summaries(found, now_ns=self._clock.now_ns()))

    async def query_energy(self, request: QueryEnergyRequest, _context: Context) -> QueryEnergyResponse:
        """The energy of all clusters that answer; `damaged` names the others. Raises FailedPrecondition for two currencies."""
        answers = await ask_all(self._clusters, lambda one: one.query_energy(request))
        found = {name: one for name, one in answers.items() if isinstance(one, QueryEnergyResponse)}
        silent = {name: describe_silence(one) for name, one in answers.items() if isinstance(one, Fault)}
        if not found:
            raise next(one for one in answers.values() if isinstance(one, Fault))
        currencies = {one.currency for one in found.values()}
        if len(currencies) > 1:
            raise FailedPrecondition(
                f"the clusters' prices are in {' and '.join(sorted(currencies))}, which do not add up; ask one of them: "
                "eelctl --cluster NAME"
            )
        return add_energy(request, found, silent)

    async def list_clusters(self, _request: ListClustersRequest, _context: Context) -> ListClustersResponse:
        """All clusters, those that do not answer among them."""
        return ListClustersResponse(clusters=tuple(await self.read_clusters()))

    def list_shown(self) -> list[Workload]:
        """Lists the workloads of the front as it shows them, and none of the others' parts."""
        return [self._show(record) for record in self._dispatcher.list_records()]

    async def read_clusters(self) -> list[ClusterStatus]:
        """Reads the state of all clusters, by name."""
        answers = await ask_all(self._clusters, MemberCluster.read_recent_report)
        live = [one.dispatch for one in self._dispatcher.list_records() if not one.dispatch.is_settled]
        found = []
        for name, answer in sorted(answers.items()):
            status = ClusterStatus(
                name=name,
                addresses=self._clusters[name].addresses.all,
                workloads=sum(dispatch.chosen == name for dispatch in live),
                left_out=self._dispatcher.left_out[name],
                page_url=self._page_urls.get(name, ""),
            )
            if isinstance(answer, Fault):
                status = replace(status, problem=describe_silence(answer)[:SENTENCE_LETTERS_MOST] or "no answer")
            else:
                limits = [one.limit_w for one in answer.policy.budgets if one.scope is BudgetScope.CLUSTER]
                budget_w = min(limits, default=None)
                prices = self._price(answer.policy)
                status = replace(status, summary=answer.summary, power_budget_w=budget_w, **prices)
            found.append(status)
        return found

    def _price(self, policy: Policy) -> dict[str, Any]:
        if policy.prices is None:
            return {}
        price, carbon = price_now(policy.prices, self._clock.now_ns())
        return {"currency": policy.prices.currency, "price_per_kwh": price, "carbon_kg_per_kwh": carbon}

    async def get_dispatch(self, request: GetDispatchRequest, _context: Context) -> GetDispatchResponse:
        """Where a workload is, and why."""
        dispatch = self._find(request.workload_id).dispatch
        copies = tuple(
            DispatchedCopy(cluster=one.cluster, phase=one.phase.value, started=one.started, problem=one.problem)
            for one in dispatch.copies
        )
        return GetDispatchResponse(
            workload_id=dispatch.workload_id,
            chosen=dispatch.chosen,
            copies=copies,
            decision=tuple(line[:SENTENCE_LETTERS_MOST] for line in dispatch.decision),
            moving_to=dispatch.moving_to,
            cancelled=dispatch.is_cancelled,
            failed=dispatch.has_failed,
        )

    # Records

    def _find_caller(self, context: Context) -> Caller | None:
        return None if self._caller_of is None else self._caller_of(context)

    def _show_to(self, context: Context, workload: Workload) -> Workload:
        return show_workload(self._find_caller(context), workload, demanded=self._rules.demanded)

    def _find(self, workload_id: str) -> StoredRecord:
        record = self._dispatcher.find(workload_id)
        if record is None:
            raise NotFound(f"no workload has the id {workload_id!r}; list workloads to see the ids")
        return record

    def _show(self, record: StoredRecord) -> Workload:
        """A workload as its cluster last showed it, or as it waits for one."""
        dispatch, latest = record.dispatch, record.latest
        workload = latest or Workload(
            workload_id=dispatch.workload_id,
            spec=dispatch.request.spec,
            phase=WorkloadPhase.PENDING,
            submitted_ns=dispatch.submitted_ns,
            owner=dispatch.owner,
            held_by=dispatch.held_by,
        )
        if workload.phase.is_ended:
            return workload
        if dispatch.is_settled:
            reason = f"no cluster took it: {_join_problems(dispatch)}" if dispatch.has_failed else workload.reason
            return replace(
                workload, phase=WorkloadPhase.CANCELLED, reason=reason[:SENTENCE_LETTERS_MOST], placements=()
            )
        return replace(workload, reason=_describe_wait(dispatch, workload.reason)[:SENTENCE_LETTERS_MOST])


def _describe_wait(dispatch: Dispatch, reason: str) -> str:
    """Returns why a workload is not where it is to be, as the front knows it, before what its cluster says."""
    copy = dispatch.find_copy(dispatch.chosen)
    if dispatch.is_cancelled:
        open_ = [one.cluster for one in dispatch.copies if one.phase is not CopyPhase.ENDED]
        return f"cluster: is being cancelled in {', '.join(open_)}"
    if dispatch.held_by:
        return "; ".join(dispatch.decision)
    if copy is None:
        return f"cluster: none has it yet ({_join_problems(dispatch) or 'no answer yet'})"
    if copy.problem:
        return f"cluster: {copy.cluster} does not answer ({copy.problem}); what it has keeps its state there. {reason}"
    return reason


def _join_problems(dispatch: Dispatch) -> str:
    return "; ".join(f"{one.cluster}: {one.problem}" for one in dispatch.copies if one.problem) or "; ".join(
        dispatch.decision if not dispatch.copies else ()
    )


def _check_supported(request: SubmitWorkloadRequest) -> None:
    """Refuses what belongs to one cluster; raises InvalidArgument."""
    remedy = "submit it to one cluster: eelctl --cluster NAME"
    spec = request.spec
    found = [
        # Which cluster it belongs to, its gang and its dependencies would say twice.
        ("spec.gang", spec.gang is not None and (request.array is not None or bool(list_anchors(request)))),
    ]
    if request.hold and spec.has_promised_deadline:
        problem, without = "is set, so that nobody knows when it may start", "submit it without --hold"
        raise InvalidArgument("no deadline can be promised", (Violation("hold", problem, without),))
    violations = tuple(
        Violation(name, "is of one cluster, and a front has several", remedy) for name, is_set in found if is_set
    )
    if violations:
        raise InvalidArgument("a front does not place this", violations)


def _matches(request: ListWorkloadsRequest, workload: Workload) -> bool:
    spec = workload.spec
    return (
        (not request.phases or workload.phase in request.phases)
        and (not request.namespace or spec.namespace == request.namespace)
        and (not request.user or spec.user == request.user)
        and (not request.queue or spec.queue == request.queue)
        and request.name_contains in spec.name
        and not request.array_id
        and (not request.node_name or any(at.node_name == request.node_name for at in workload.placements))
    )


def _find_position(workload: Workload) -> tuple[int | str, ...]:
    return workload.submitted_ns, workload.workload_id


class OtherCalls:
    """Refuses the operators' calls that a front does not answer, with the command that asks one cluster."""

    def __init__(self, *served: object) -> None:
        for method in OPERATOR_SERVICE.methods:
            if not any(hasattr(one, method.attribute) for one in served):
                setattr(self, method.attribute, _refuse_stream if method.response_streaming else _refuse)


_REFUSAL = "a front of several clusters does not answer this; ask one of them: eelctl --cluster NAME (eelctl clusters)"


async def _refuse(_request: object, _context: Context) -> Any:
    raise FailedPrecondition(_REFUSAL)


async def _refuse_stream(_request: object, _context: Context) -> AsyncIterator[Any]:
    raise FailedPrecondition(_REFUSAL)
    yield
