"""One cluster as the front calls it: the operators' API of its controllers, in the front's own name.

Owns the channels and the bounds of a cluster: how long a call may take and how many are under way at once. Follows whichever of
the cluster's controllers leads. A dry run has no id of its own, so that it is answered anew where a copy waits already.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc.aio

from eelgrid_controller.federation.dispatch import Dispatch, Verb
from eelgrid_controller.federation.ranking import ClusterOffer, make_offer
from eelgrid_protos import rpc, transport
from eelgrid_protos.codec import encode_message
from eelgrid_protos.controller_addresses import ControllerAddresses
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import DeadlineExceeded, Fault, Unavailable, fault_of_contract
from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    ExplainWorkloadRequest,
    Explanation,
    GetPolicyRequest,
    GetSummaryRequest,
    GetWorkloadRequest,
    HoldWorkloadRequest,
    Policy,
    QueryEnergyRequest,
    QueryEnergyResponse,
    ReleaseWorkloadRequest,
    RequeueWorkloadRequest,
    RequeueWorkloadResponse,
    SubmitWorkloadRequest,
    Summary,
    Workload,
)

_Answer = TypeVar("_Answer")
_CALLS_MOST = 32
_REPORT = b""
# Totals and prices of a cluster that offers are ranked with; a controller sums them up over all that waits.
_REPORT_FOR_S = 1.0
# A cluster that nothing is asked of is asked so often whether it answers.
_WATCH_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberReport:
    """What a cluster says of itself as a whole."""

    summary: Summary
    policy: Policy


@dataclass(frozen=True, slots=True)
class _SharedAnswer:
    """A question that is under way or was answered, and until when that may be used."""

    task: "asyncio.Future[Any]"
    until_s: float


def _has_succeeded(task: "asyncio.Future[Any]") -> bool:
    return not task.cancelled() and task.exception() is None


class MemberCluster:
    """The controllers of one cluster as one, for asyncio."""

    def __init__(
        self,
        name: str,
        addresses: tuple[str, ...],
        *,
        tls: transport.TlsFiles | None,
        insecure: bool,
        timeout_s: float,
        now_ns: Callable[[], int],
    ) -> None:
        """Opens no connection yet; raises ListenError if one would be unprotected."""
        for address in addresses:
            transport.check_target(address, tls, insecure=insecure)

        def may_follow(address: str) -> bool:
            return transport.may_connect(address, tls=tls, insecure=insecure)

        self.name = name
        self.addresses = ControllerAddresses(addresses, may_follow=may_follow)
        self._tls, self._insecure = tls, insecure
        self._timeout_s, self._now_ns = timeout_s, now_ns
        self._channels: dict[str, tuple[grpc.aio.Channel, Any]] = {}
        # By its reports: a controller that can write nothing answers Unavailable, too, and is up. None before the first.
        self.is_up: bool | None = None
        self._shared: dict[bytes, _SharedAnswer] = {}
        self._places = asyncio.Semaphore(_CALLS_MOST)

    async def close(self) -> None:
        """Ends all calls."""
        for channel, _ in self._channels.values():
            await channel.close()

    async def call(self, verb: Verb, dispatch: Dispatch) -> Workload:
        """Makes one call about the copy of a workload; raises Fault."""
        key = dispatch.workload_id
        match verb:
            case Verb.SUBMIT:
                answer = await self._ask("submit_workload", dispatch.submission)
            case Verb.WITHDRAW:
                answer = await self._ask("submit_workload", dispatch.withdrawal)
            case Verb.RELEASE:
                answer = await self._ask("release_workload", ReleaseWorkloadRequest(workload_id=key))
            case Verb.HOLD:
                answer = await self._ask("hold_workload", HoldWorkloadRequest(workload_id=key))
            case Verb.CANCEL:
                answer = await self._ask("cancel_workload", CancelWorkloadRequest(workload_id=key))
            case Verb.LOOK:
                answer = await self._ask("get_workload", GetWorkloadRequest(workload_id=key))
        workload: Workload = answer.workload
        if workload.workload_id != key:
            # What it did nobody knows; the call is repeated.
            raise Unavailable(f"{self.name} answered about {workload.workload_id} when it was asked about {key}")
        return workload

    async def ask_offer(self, request: SubmitWorkloadRequest) -> ClusterOffer:
        """Asks what the cluster offers for a workload; raises Fault."""
        trial = replace(request, workload_id="", dry_run=True, hold=False)
        # Equal work that is submitted meanwhile gets the same answer: none of it is there yet.
        preview, report = await asyncio.gather(
            self._share(encode_message(trial), lambda: self._ask("submit_workload", trial)),
            self.read_recent_report(),
        )
        return make_offer(
            self.name,
            preview.workload,
            pending=report.summary.pending,
            models={one.model: one.gpus for one in report.summary.models},
            prices=report.policy.prices,
            now_ns=self._now_ns(),
        )

    async def _share(self, key: bytes, ask: Callable[[], Awaitable[Any]], *, for_s: float = 0.0) -> Any:
        """Returns the answer to a question that is under way, or was answered less than `for_s` ago; raises Fault, which is not kept."""
        now_s = asyncio.get_running_loop().time()
        shared = self._shared.get(key)
        if shared is None or (shared.task.done() and not (now_s < shared.until_s and _has_succeeded(shared.task))):
            shared = self._shared[key] = _SharedAnswer(asyncio.ensure_future(ask()), now_s + for_s)
            if not for_s:
                shared.task.add_done_callback(lambda _: self._shared.pop(key, None))
        # Whoever goes away leaves the question to the others.
        return await asyncio.shield(shared.task)

    async def read_report(self) -> MemberReport:
        """Reads the cluster's totals and its policy; raises Fault."""
        try:
            summary, policy = await asyncio.gather(
                self._ask("get_summary", GetSummaryRequest()), self._ask("get_policy", GetPolicyRequest())
            )
        except Fault as fault:
            self.is_up = not isinstance(fault, Unavailable | DeadlineExceeded)
            raise
        self.is_up = True
        return MemberReport(summary=summary.summary, policy=policy.policy)

    async def read_recent_report(self) -> MemberReport:
        """Returns the cluster's totals and policy of up to a second ago; raises Fault."""
        report: MemberReport = await self._share(_REPORT, self.read_report, for_s=_REPORT_FOR_S)
        return report

    async def watch(self) -> None:
        """Reads the report now and then, so that `is_up` is known of a cluster that nothing else is asked of; never ends."""
        while True:
            with contextlib.suppress(Fault):
                await self.read_recent_report()
            await asyncio.sleep(_WATCH_S)

    async def explain(self, workload_id: str) -> Explanation:
        """Asks why a workload is where it is; raises Fault."""
        answer = await self._ask("explain_workload", ExplainWorkloadRequest(workload_id=workload_id))
        explanation: Explanation = answer.explanation
        return explanation

    async def requeue(self, request: RequeueWorkloadRequest) -> Workload:
        """Stops a running job, which then waits there again; raises Fault."""
        answer: RequeueWorkloadResponse = await self._ask("requeue_workload", request)
        return answer.workload

    async def query_energy(self, request: QueryEnergyRequest) -> QueryEnergyResponse:
        """Asks the cluster's energy ledger; raises Fault."""
        answer: QueryEnergyResponse = await self._ask("query_energy", request)
        return answer

    async def _ask(self, method: str, request: object) -> Any:
        """Calls the controller that leads, within the time of one call; raises Fault."""
        loop = asyncio.get_running_loop()
        deadline_s, search = loop.time() + self._timeout_s, self.addresses.begin_search()
        async with self._find_place():
            while True:
                try:
                    left_s = max(0.001, deadline_s - loop.time())
                    answer = await getattr(self._client_at(search.address), method)(request, timeout=left_s)
                    if answer is None:
                        # gRPC logs what could not be decoded, and hands over nothing.
                        raise Unavailable(f"{self.name} answers {method} with what violates the API contract")
                except ContractError as error:
                    raise fault_of_contract(error) from None
                except Fault as fault:
                    pause_s = search.after_call(fault)
                    if pause_s is None or loop.time() + pause_s >= deadline_s:
                        raise search.describe_failure(fault) from None
                    await asyncio.sleep(pause_s)
                else:
                    search.succeed()
                    return answer

    @contextlib.asynccontextmanager
    async def _find_place(self) -> Any:
        """Waits for one of the cluster's places, as long as one call may take; raises Unavailable."""
        if self._places.locked():
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._places.acquire()
            except TimeoutError:
                raise Unavailable(f"{_CALLS_MOST} calls to {self.name} are under way") from None
        else:
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    def _client_at(self, address: str) -> Any:
        if address not in self._channels:
            channel = transport.open_channel(address, tls=self._tls, insecure=self._insecure, is_choice=True)
            self._channels[address] = channel, rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        return self._channels[address][1]


async def ask_all(
    clusters: Mapping[str, MemberCluster], ask: Callable[[MemberCluster], Awaitable[_Answer]]
) -> dict[str, _Answer | Fault]:
    """Asks all clusters at once; one that does not answer costs the others nothing."""
    answers = await asyncio.gather(*(ask(one) for one in clusters.values()), return_exceptions=True)
    return dict(_sort_answers(clusters, answers))


def _sort_answers(
    clusters: Mapping[str, MemberCluster], answers: "list[_Answer | BaseException]"
) -> Iterator[tuple[str, _Answer | Fault]]:
    for name, answer in zip(clusters, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, Fault):
            raise answer
        yield name, answer


def describe_silence(fault: Fault) -> str:
    """Returns why a cluster did not answer, for people."""
    if isinstance(fault, DeadlineExceeded):
        return "no answer in time"
    return fault.message.rpartition(": ")[2] if isinstance(fault, Unavailable) else fault.message
