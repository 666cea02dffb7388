"""A real controller, attackers, and an honest agent and operator who must not notice them.

Owns who says what to whom, and what the honest ones check. Must not know how messages are drawn.
The controller is the real one on real sockets with a real journal; attackers use their own connections.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eelgrid_protos import rpc, transport
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault, Internal, Unavailable
from eelgrid_protos.messages import (
    Acknowledgement,
    AttributionConfidence,
    AttributionMethod,
    ConnectRequest,
    DrainNodeRequest,
    EnergyAcknowledgement,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    GetSummaryRequest,
    GetWorkloadRequest,
    Hello,
    Inventory,
    ListEnergyExportersRequest,
    ListGpusRequest,
    ListInterferenceRequest,
    ListNodesRequest,
    ListPartitionsRequest,
    ListPlansRequest,
    ListPointsRequest,
    ListPromisesRequest,
    ListSpendingRequest,
    ListWorkloadsRequest,
    OwnerKind,
    QueryEnergyRequest,
    RemoveNodeRequest,
    WatchWorkloadsRequest,
    WindowDevice,
    WindowShare,
    WorkloadPhase,
    resolve_pool,
)
from tests.builders.cluster import build_batch, build_node, build_request
from tests.builders.server import AgentStream, RunningController, run_controller
from tests.fuzz.grammar import Grammar
from tests.waiting import wait_for

__all__ = ["Finding", "Scene", "open_scene"]

HONEST_NODE, HONEST_WORK = "honest-node", "honest-work"
# An attacker's call that takes longer holds up everybody: the loop is one.
CALL_WITHIN_S = 60.0
SERVED_WITHIN_S = 30.0
# Searches on copies, in a thread of their own, which end when whoever asked has gone: they may take long, and others
# must be served meanwhile.
_IMAGINED = ("WhatIf", "PlanCapacity", "ExportDecision", "RecommendMoves", "RecommendPartitions", "ImagineBudgets")
_IMAGINED_WITHIN_S = 3.0
_HEARD_MOST = 20
# How long an attacker listens to a stream before it goes on; nothing is concluded from silence.
_LISTENS_S = 0.05
_NOTED_MOST = 12
_NOTED_LETTERS = 1200
# What its role grants is to end or to change others' work, so what it does to them is no finding.
_GRANTED = ("ApplyMoves", "ApplyPartitions")


async def _send_once(request: Any) -> AsyncIterator[Any]:
    yield request


class Finding(AssertionError):
    """The property is broken; says by which messages."""


class FaultLog(logging.Handler):
    """What the controller says of its own faults: at the level of errors, with the traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one; what an attacker's node claims, or that its message was refused, is no fault."""
        message = record.getMessage()
        if any(words in message for words in ("ledger=refused", "ahead_of_journal=yes", "event=term_refused")):
            return
        trace = "".join(traceback.format_exception(*record.exc_info)[-6:]) if record.exc_info else ""
        self.lines.append(f"{record.name}: {message}\n{trace}")


@dataclass
class Scene:
    """One controller under attack."""

    rig: RunningController
    rng: random.Random
    grammar: Grammar
    honest: AgentStream
    inventory: Inventory
    faults: FaultLog
    sequence: int = 0
    window: int = 0
    calls: int = 0
    refused: int = 0
    noted: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTED_MOST))
    revision: int = 0

    # The attack

    async def attack(self, messages: int) -> None:
        """So many messages, of operators and of agents; raises Finding for an answer that is a fault of ours."""
        done = 0
        while done < messages:
            if self.rng.random() < 0.3:
                done += await self._agent_stream()
            else:
                await self._call(self.rng.choice(rpc.OPERATOR_SERVICE.methods))
                done += 1
            if self.faults.lines:
                raise self._finding(f"the controller logged a fault of its own: {self.faults.lines[0]}")

    async def _call(self, method: rpc.RpcMethod) -> None:
        if method.name in _GRANTED:
            return
        request = self.grammar.message(method.request)
        if request is None:
            return
        request = self._of_now(request)
        self._note(method.name, request)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(_IMAGINED_WITHIN_S if method.name in _IMAGINED else CALL_WITHIN_S):
                await self._ask(method, request)
        except (Internal, Unavailable) as error:
            raise self._finding(f"{method.name} was answered {type(error).__name__}: {error}") from None
        except (Fault, ContractError):
            self.refused += 1
        except TimeoutError:
            if method.name not in _IMAGINED:
                raise self._finding(f"{method.name} took {time.monotonic() - began_s:.0f} s") from None

    def _of_now(self, request: Any) -> Any:
        """With the revision that is in force, where a request must name it; else it never gets further.

        The honest node is not drained or removed: an admin may do that, and its work would leave, which is no finding.
        """
        if isinstance(request, DrainNodeRequest | RemoveNodeRequest) and request.node_name == HONEST_NODE:
            return replace(request, node_name="evil-1")
        policy = getattr(request, "policy", None)
        if policy is not None and self.rng.random() < 0.8:
            return replace(
                request, policy=replace(policy, revision=self.rig.controller.loop.core.state.policy.revision)
            )
        return request

    async def _ask(self, method: rpc.RpcMethod, request: Any) -> None:
        self.calls += 1
        sent = _send_once(request) if method.request_streaming else request
        answer = getattr(self.rig.operators, method.attribute)(sent)
        if not method.response_streaming:
            self._learn(await answer)
            return
        heard = 0
        try:
            async with asyncio.timeout(_LISTENS_S):
                async for _ in answer:
                    heard += 1
                    if heard >= _HEARD_MOST:
                        break
        except TimeoutError:
            pass
        finally:
            await answer.aclose()

    def _learn(self, answer: Any) -> None:
        """Names of what there is now, for later calls to hit."""
        workload = getattr(answer, "workload", None)
        if workload is not None and workload.workload_id != HONEST_WORK:
            self._know("workload_id", workload.workload_id)
            self._know("workload_ids", workload.workload_id)
        token = getattr(answer, "next_page_token", "")
        if token:
            self._know("page_token", token)
        recommendation = getattr(answer, "recommendation", None)
        if recommendation is not None:
            self._know("recommendation_id", recommendation.recommendation_id)

    def _know(self, name: str, value: str) -> None:
        names = self.grammar.known.setdefault(name, [])
        if value not in names:
            names.append(value)
            del names[:-50]

    async def _agent_stream(self) -> int:
        """One stream of an attacker: a Hello of a node of its own, and whatever follows."""
        first = self.grammar.message(Hello)
        if first is None:
            return 0
        name = self.rng.choice(("evil-1", "evil-2", "evil-3", "x" * 253))
        hello = replace(first, inventory=replace(first.inventory, node_name=name))
        if self.rng.random() < 0.5:
            hello = replace(hello, inventory=replace(build_node(name, gpus=2), pool=hello.inventory.pool), plan_epoch=0)
        messages: list[Any] = [hello]
        for _ in range(self.rng.randint(0, 6)):
            drawn = self.grammar.message(ConnectRequest)
            if drawn is None or drawn.message is None or isinstance(drawn.message, Hello):
                continue
            message = drawn.message
            messages.append(replace(message, node_name=name) if isinstance(message, Inventory) else message)
        for message in messages:
            self._note("Connect", message)
        agent = AgentStream(self.rig.address)
        try:
            await agent.say(*messages)
            async with asyncio.timeout(CALL_WITHIN_S):
                await agent.hear()
            async with asyncio.timeout(_LISTENS_S):
                await agent.hear_to_the_end()
        except (Fault, ContractError):
            # A client whose write is under way when its stream ends hears of an internal error of its own library; what
            # the server did wrong stands in its log.
            self.refused += 1
        except (TimeoutError, StopAsyncIteration):
            pass
        finally:
            self.calls += len(messages)
            await agent.leave()
        return len(messages)

    def _note(self, call: str, message: Any) -> None:
        self.noted.append(f"{call} {_short(str(message))}")

    def _finding(self, problem: str) -> Finding:
        said = "\n  ".join(self.noted)
        return Finding(f"{problem}\nafter {self.calls} calls; the last messages, newest last:\n  {said}")

    # The honest ones

    async def check(self, *, with_energy: bool = False) -> None:
        """The operator is served and sees what is theirs as it was left; the agent's stream takes what it took."""
        try:
            async with asyncio.timeout(SERVED_WITHIN_S):
                await self._operator()
                await self._agent(with_energy=with_energy)
        except (Fault, ContractError, StopAsyncIteration) as error:
            raise self._finding(f"an honest client was refused: {type(error).__name__}: {error}") from error
        except TimeoutError:
            raise self._finding(f"an honest client was not served within {SERVED_WITHIN_S:g} s") from None

    async def _pages(self, call: Any, request: Any, name: str) -> list[Any]:
        items, token = [], ""
        while True:
            answer = await call(replace(request, page_size=1000, page_token=token))
            self._expect(answer.omitted == 0, f"{type(answer).__name__} leaves {answer.omitted} elements out")
            items.extend(getattr(answer, name))
            token = answer.next_page_token
            if not token:
                return items

    def _expect(self, holds: object, problem: str) -> None:
        if not holds:
            raise self._finding(problem)

    async def _operator(self) -> None:
        async with transport.open_channel(self.rig.address, tls=None) as channel:
            api = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
            nodes = await self._pages(api.list_nodes, ListNodesRequest(), "nodes")
            mine = [node for node in nodes if node.inventory.node_name == HONEST_NODE]
            self._expect(
                [node.inventory for node in mine] == [replace(self.inventory, pool=resolve_pool(self.inventory.pool))],
                "the honest node's inventory is another",
            )
            self._expect(mine[0].allocated_gpu_milli >= 1000, "what the honest node holds is gone")
            workloads = await self._pages(api.list_workloads, ListWorkloadsRequest(), "workloads")
            work = [one for one in workloads if one.workload_id == HONEST_WORK]
            self._expect(len(work) == 1 and work[0].phase is WorkloadPhase.PLACED, "the honest workload is not placed")
            gpus = await self._pages(api.list_gpus, ListGpusRequest(), "gpus")
            held = [gpu for gpu in gpus if HONEST_WORK in gpu.workload_ids]
            self._expect([gpu.node_name for gpu in held] == [HONEST_NODE], "the honest workload's GPU is another")
            plans = await self._pages(api.list_plans, ListPlansRequest(), "plans")
            (plan,) = (one.plan for one in plans if one.plan.node_name == HONEST_NODE)
            self._expect(HONEST_WORK in {one.workload_id for one in plan.assignments}, "the honest plan lacks its work")
            await self._others(api)

    async def _others(self, api: Any) -> None:
        await api.get_summary(GetSummaryRequest())
        await api.get_workload(GetWorkloadRequest(workload_id=HONEST_WORK))
        for request, call in (
            (ListPromisesRequest(), api.list_promises),
            (ListPartitionsRequest(), api.list_partitions),
            (ListPointsRequest(), api.list_points),
            (ListInterferenceRequest(), api.list_interference),
        ):
            answer = await call(request)
            self._expect(answer.omitted == 0, f"{type(answer).__name__} leaves {answer.omitted} elements out")
        await api.list_spending(ListSpendingRequest())
        now_ns = time.time_ns()
        for begin_ns in (now_ns - 48 * 3600 * 10**9, now_ns - 3600 * 10**9):
            await api.query_energy(QueryEnergyRequest(begin_ns=begin_ns, end_ns=now_ns, group_by=("namespace",)))
        watch = api.watch_workloads(WatchWorkloadsRequest())
        await anext(watch)
        await watch.aclose()

    async def _agent(self, *, with_energy: bool) -> None:
        self.sequence += 1
        await self.honest.say(build_batch(self.sequence, time_ns=time.time_ns()))
        heard = await self.honest.hear(Acknowledgement, within_s=SERVED_WITHIN_S)
        self._expect(heard.sequence == self.sequence, f"batch {self.sequence} was acknowledged as {heard.sequence}")
        if with_energy:
            self.window += 1
            await self.honest.say(energy_window(self.window))
            told = await self.honest.hear(EnergyAcknowledgement, within_s=SERVED_WITHIN_S)
            self._expect(told.number >= self.window, f"window {self.window} was acknowledged as {told.number}")


def _short(text: str) -> str:
    """Long runs of one letter cut, so that a finding can be read."""
    return re.sub(r"(.{1,3}?)\1{20,}", r"\1…", text)[:_NOTED_LETTERS]


def energy_window(number: int) -> EnergyWindow:
    """A minute of the honest node: 60 kJ of its first GPU."""
    end_ns = time.time_ns() - 3600 * 10**9 + number * 60 * 10**9
    return EnergyWindow(
        incarnation=1,
        number=number,
        begin_ns=end_ns - 60 * 10**9,
        end_ns=end_ns,
        devices=(WindowDevice(gpu_uuid=f"GPU-{HONEST_NODE}-0", total_mj=6_000_000),),
        owners=(EnergyOwner(kind=OwnerKind.WORKLOAD, workload=HONEST_WORK),),
        shares=(
            WindowShare(
                device=0,
                owner=0,
                part=EnergyPart.ACTIVE,
                method=AttributionMethod.EXCLUSIVE,
                confidence=AttributionConfidence.HIGH,
                energy_mj=6_000_000,
            ),
        ),
    )


@asynccontextmanager
async def open_scene(data: Path, seed: int) -> AsyncIterator[Scene]:
    """A controller with an honest node that runs honest work."""
    rng = random.Random(seed)
    faults = FaultLog()
    loggers = [logging.getLogger(name) for name in ("test.controller", "eelgrid")]
    for logger in loggers:
        logger.addHandler(faults)
    try:
        async with _running(data, rng, faults) as scene:
            yield scene
    finally:
        for logger in loggers:
            logger.removeHandler(faults)


@asynccontextmanager
async def _running(data: Path, rng: random.Random, faults: FaultLog) -> AsyncIterator[Scene]:
    async with run_controller(data, plan_interval_s=0.0, steer_s=0.2) as rig:
        mine = build_node(HONEST_NODE)
        honest = await rig.join(mine)
        await rig.operators.submit_workload(build_request(HONEST_WORK))

        async def is_ledger_open() -> bool:
            with contextlib.suppress(Unavailable):  # a controller that just started opens it beside its first calls
                await rig.operators.list_energy_exporters(ListEnergyExportersRequest())
                return True
            return False

        await wait_for(is_ledger_open)
        grammar = Grammar(rng, now_ns=time.time_ns())
        names = ["evil-1", "evil-2", HONEST_NODE]
        uuids = [gpu.uuid for gpu in mine.gpus] + [f"GPU-evil-1-{number}" for number in range(2)]
        grammar.known = {
            "node_name": names,
            "node_names": names,
            "like_node": names,
            "gpu_uuid": uuids,
            "uuid": uuids,
            "device_uuids": uuids,
            "subject": uuids,
            "gpu_models": ["G2", "T4", "A100"],
            "model": ["G2", "T4"],
            "gpu_model": ["G2"],
            "gpu": ["openb-g2", "a100-sxm4-40gb"],
            "catalogue_key": ["openb-g2", "a100-sxm4-40gb"],
            "group_by": ["namespace", "user", "node", "label:team"],
        }
        yield Scene(rig, rng, grammar, honest, mine, faults)
