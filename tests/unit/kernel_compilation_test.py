"""The process that compiles kernels for a daemon: what is logged of it, and that it never outlives its caller."""

import asyncio
import contextlib
import logging
import sys

import psutil
import pytest
from tests.waiting import wait_until

from eelgrid_controller.clock import Clock
from eelgrid_controller.runtime import kernel_compilation
from eelgrid_controller.runtime.kernel_compilation import (
    INTERPRETED_NODES_MOST,
    KernelReadiness,
    compile_in_child,
    load_kernels,
)
from eelgrid_kernels import compilation

LOG = logging.getLogger("eelgrid.test.kernels")


def is_routed():
    return compilation._route is not None


def compile_by(text):
    return compile_in_child(Clock(), LOG, (sys.executable, "-c", text))


def test_progress_is_logged_once_and_then_now_and_then(caplog):
    caplog.set_level(logging.INFO)
    asyncio.run(compile_by("for i in range(1, 19): print(f'compiling kernels, once: {i}/18', flush=True)"))
    (line,) = caplog.messages
    assert line == "kernels=compiling done=1/18 seconds=0 note='once for this version'"


def test_what_decides_is_told_before_the_rest_is_compiled():
    told = []
    text = (
        "import sys; from eelgrid_kernels.warmup import COMPILED_DECIDING;"
        "print(COMPILED_DECIDING, flush=True); print('compiling kernels, once: 18/22', flush=True)"
    )
    command = (sys.executable, "-c", text)
    asyncio.run(compile_in_child(Clock(), LOG, command, lambda: told.append(True)))
    assert told == [True]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """As if nothing was compiled; the compiler writes its number, says that what decides is there once told to, and goes on."""
    text = (
        f"import os, pathlib, time; folder = pathlib.Path({str(tmp_path)!r});"
        "(folder / 'part').write_text(str(os.getpid())); (folder / 'part').rename(folder / 'number');"
        "from eelgrid_kernels.warmup import COMPILED_DECIDING\n"
        "while not (folder / 'go').exists(): time.sleep(0.01)\n"
        "print(COMPILED_DECIDING, flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(kernel_compilation, "is_cache_complete", lambda: False)
    monkeypatch.setattr(compile_in_child, "__defaults__", ((sys.executable, "-c", text), lambda: None))
    return tmp_path


def test_a_start_decides_at_once_and_by_machine_code_when_that_is_there(empty_cache, caplog):
    caplog.set_level(logging.INFO)

    async def start():
        async with load_kernels(Clock(), LOG) as readiness:
            changed = []
            readiness.add_listener(lambda: changed.append(readiness.is_interpreted))
            assert readiness.is_interpreted
            assert is_routed()
            assert readiness.may_decide(1)
            await readiness.wait_to_decide(1)
            assert not readiness.may_decide(INTERPRETED_NODES_MOST + 1)
            waiting = asyncio.create_task(readiness.wait_to_decide(INTERPRETED_NODES_MOST + 1))
            await wait_until((empty_cache / "number").exists)
            assert not waiting.done()
            (empty_cache / "go").touch()
            await waiting
            assert changed == [False]
            assert readiness.may_decide(INTERPRETED_NODES_MOST + 1)
            assert not is_routed()
            number = int((empty_cache / "number").read_text())
            assert psutil.pid_exists(number), "it compiles the others"
        return number

    assert not psutil.pid_exists(asyncio.run(start()))
    assert "kernels=interpreted" in caplog.messages[0]
    assert "kernels=warm" in caplog.messages[-1]


def test_a_stop_while_kernels_are_compiled_ends_the_compiler_and_the_interpreting(empty_cache):
    async def start():
        async with load_kernels(Clock(), LOG):
            await wait_until((empty_cache / "number").exists)
            return int((empty_cache / "number").read_text())

    assert not psutil.pid_exists(asyncio.run(start()))
    assert not is_routed()


def test_decisions_that_hold_up_everything_else_wait_for_machine_code():
    readiness = KernelReadiness()
    readiness.observe_batch(5.0)
    readiness.begin_interpreting()
    assert readiness.may_decide(1), "what was not interpreted says nothing"
    readiness.observe_batch(0.1)
    assert readiness.may_decide(1)
    readiness.observe_batch(5.0)
    assert not readiness.may_decide(1)
    readiness.end_interpreting()
    assert readiness.may_decide(1)


def test_a_failed_compiler_is_logged_and_left_to_the_caller(caplog):
    asyncio.run(compile_by("raise SystemExit('no space left on device')"))
    (line,) = caplog.messages
    assert "exit=1" in line
    assert "no space left on device" in line
    assert "compile_here" in line


def test_a_missing_interpreter_is_logged_and_left_to_the_caller(caplog):
    asyncio.run(compile_in_child(Clock(), LOG, ("/no/such/program",)))
    (line,) = caplog.messages
    assert "process=none" in line


def test_the_compiler_ends_with_a_start_that_is_given_up(tmp_path):
    path = tmp_path / "number"

    async def give_up():
        path.touch()
        task = asyncio.create_task(
            compile_by(f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
        )
        while not (number := path.read_text()):  # noqa: ASYNC110 (it is another process that writes)
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        return int(number)

    assert not psutil.pid_exists(asyncio.run(give_up()))


def test_a_cache_is_complete_once_all_kernels_were_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "_FOLDER", tmp_path)
    assert not compilation.is_cache_complete()
    compilation.mark_cache_complete()
    assert compilation.is_cache_complete()
    monkeypatch.setattr(compilation, "_FOLDER", None)
    assert compilation.is_cache_complete(), "no other process could help"
    compilation.mark_cache_complete()


def test_a_cache_that_cannot_be_marked_is_used_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a file in the way")
    monkeypatch.setattr(compilation, "_FOLDER", tmp_path / "file")
    compilation.mark_cache_complete()
    assert not compilation.is_cache_complete()
