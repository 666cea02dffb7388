"""One search at a time, whoever asks: one whose caller goes away counts until its thread has ended."""

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.server.grpc import operator_service, planner_services, whatif_runner
from eelgrid_protos.messages import ExportDecisionRequest, RecommendMovesRequest, RecommendPartitionsRequest


async def read_all(answers):
    return [one async for one in answers]


def build_calls(core):
    """The calls that search, by the name of what they search with, and the module that has it."""

    async def read(view):
        return view(core)

    config = SimpleNamespace(changes_most=1)
    loop = SimpleNamespace(
        read=read, core=core, config=config, listeners=[], journal=SimpleNamespace(read_history=list)
    )
    known = {"loop": loop, "log": logging.getLogger("searches"), "call_of": None}
    operators = operator_service.OperatorService(views=None, agents=None, view_for=None, **known)
    planner = planner_services.PartitionService(telemetry=None, monotonic_s=time.monotonic, **known)
    runner = whatif_runner.WhatIfRunner(loop=loop, catalogue=None, clock=Clock())
    return {
        "recommend_moves": (operator_service, lambda: operators.recommend_moves(RecommendMovesRequest(), None)),
        "recommend_partitions": (
            planner_services,
            lambda: planner.recommend_partitions(RecommendPartitionsRequest(), None),
        ),
        "record_decision": (
            whatif_runner,
            lambda: read_all(runner.export_decision(ExportDecisionRequest(workload_id="w"), None)),
        ),
    }


@pytest.mark.parametrize("name", ["recommend_moves", "recommend_partitions", "record_decision"])
async def test_no_second_search_begins_while_one_runs_whose_caller_has_gone(monkeypatch, name):
    core = build_core(build_node("a"))
    core.submit(build_request("w"), now_ns=3)
    module, call = build_calls(core)[name]
    may_end, running, most = threading.Event(), [], []

    def search(*_):
        running.append(1)
        most.append(len(running))
        may_end.wait(10.0)
        running.pop()
        raise ControllerConfigError("nothing", "found")

    monkeypatch.setattr(module, name, search)
    calls = []
    for _ in range(4):
        calls.append(asyncio.create_task(call()))
        await asyncio.sleep(0.1)
        calls[-1].cancel()
    may_end.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert most == [1]
