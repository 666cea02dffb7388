"""What a front does for its callers, without clusters: with what it cannot write, and for those who name no user."""

import asyncio
import contextlib
import logging
from dataclasses import replace

import pytest
from tests.builders.cluster import build_request

from eelgrid_controller.clock import Clock
from eelgrid_controller.federation.dispatch import Copy, CopyPhase, Dispatch
from eelgrid_controller.federation.dispatcher import Dispatcher, DispatchSettings
from eelgrid_controller.federation.front_service import FrontService
from eelgrid_controller.federation.record_store import RecordStore
from eelgrid_protos.certificate import Certificate
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    GangPart,
    HoldWorkloadRequest,
    RequeueWorkloadRequest,
    WorkloadPhase,
)
from eelgrid_protos.roles import RoleRules, build_caller

PART = GangPart(name="g", parts=2)
ALICE = (("O", "eelgrid:submitter"), ("CN", "alice"), ("O", "eelgrid:label:team=vision"))


@contextlib.asynccontextmanager
async def front(folder, *subject):
    """A front without clusters, and its dispatcher, for the caller of this certificate."""
    store = RecordStore(folder)
    settings = DispatchSettings(answer_s=0.2)
    log = logging.getLogger("front")
    dispatcher = Dispatcher({}, store, rank=lambda *_: (), clock=Clock(), settings=settings, log=log)
    await dispatcher.start()
    caller = build_caller(Certificate(0.0, 1e12, subject=subject), {})
    try:
        yield (
            FrontService(dispatcher, {}, caller_of=lambda _: caller, rules=RoleRules(demanded=True), clock=Clock()),
            dispatcher,
        )
    finally:
        await dispatcher.stop()
        await store.close()


async def test_a_submission_that_the_certificate_makes_too_long_is_refused_and_leaves_its_id_free(tmp_path):
    async with front(tmp_path, *ALICE) as (service, dispatcher):
        full = replace(build_request("f-1", labels={f"l{number}": "x" for number in range(64)}), hold=True)
        for _ in range(2):
            with pytest.raises(ContractError, match="labels: holds 65 items"):
                await service.submit_workload(full, None)
        assert dispatcher.live == 0
        held = await service.submit_workload(replace(build_request("f-1"), hold=True), None)
        assert held.workload.held_by == "alice"


async def test_a_submission_whose_caller_goes_away_while_it_is_written_is_driven_all_the_same(tmp_path):
    async with front(tmp_path, *ALICE) as (service, dispatcher):
        for key in ("f-1", "f-2"):
            calling = asyncio.create_task(service.submit_workload(build_request(key, gang=PART), None))
            await asyncio.sleep(0)
            assert dispatcher.live == 1
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            # Whoever drives it ends it, too.
            cancelled = await service.cancel_workload(CancelWorkloadRequest(workload_id=key), None)
            assert cancelled.workload.phase is WorkloadPhase.CANCELLED
            assert dispatcher.live == 0


async def test_an_administrator_whose_certificate_names_no_user_holds_work(tmp_path):
    async with front(tmp_path, ("O", "eelgrid:admin")) as (service, _):
        await service.submit_workload(build_request("f-1", gang=PART), None)
        held = await service.hold_workload(HoldWorkloadRequest(workload_id="f-1"), None)
        assert held.workload.held_by == "an operator"


async def test_work_of_a_cluster_that_the_front_was_started_without_is_not_requeued_and_says_so(tmp_path):
    copy = Copy(cluster="north", phase=CopyPhase.RELEASED, started=True)
    ran = Dispatch(workload_id="f-1", request=build_request("f-1"), owner="alice", copies=(copy,), chosen="north")
    store = RecordStore(tmp_path)
    await store.open()
    await store.write(ran, None)
    await store.close()
    async with front(tmp_path, *ALICE) as (service, _):
        with pytest.raises(Unavailable, match="without the cluster north"):
            await service.requeue_workload(RequeueWorkloadRequest(workload_id="f-1"), None)
