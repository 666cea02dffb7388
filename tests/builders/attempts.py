"""Attempts for the engine of processes: assignments of commands, their ends and their output."""

import sys
from pathlib import Path

from eelgrid_agent.engine.port import attempt_key
from eelgrid_protos.messages import Assignment, LogRequest, ProcessSpec
from tests.waiting import wait_until

GRACE_S = 1.0


def assignment(*argv, key="w-1", attempt=1, replica=0, gpus=(), folder=Path("/"), **process):
    spec = ProcessSpec(argv=argv, working_directory=str(folder), **({"grace_s": GRACE_S} | process))
    return Assignment(workload_id=key, replica=replica, gpu_uuids=gpus, process=spec, attempt=attempt, replicas=1)


def shell(text, **known):
    return assignment("/bin/sh", "-c", text, **known)


def python(text, **known):
    return assignment(sys.executable, "-I", "-S", "-c", text, **known)


def status(engine, item):
    return engine.list_attempts()[attempt_key(item)]


def output(engine, item, offset=0, tail_lines=None):
    return engine.read_output(
        LogRequest(
            request_id=7,
            workload_id=item.workload_id,
            replica=item.replica,
            attempt=item.attempt,
            offset=offset,
            tail_lines=tail_lines,
        )
    )


async def ended(engine, item, within_s=30.0):
    await wait_until(lambda: status(engine, item).is_over, within_s=within_s)
    return status(engine, item)


async def run_one(engine, item):
    engine.start(item)
    return await ended(engine, item)


async def until_said(engine, item, mark):
    await wait_until(lambda: mark in output(engine, item).text)
