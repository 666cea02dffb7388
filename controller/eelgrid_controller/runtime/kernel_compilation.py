"""Compilation of the placement kernels at a start, in a process of its own, and what decides until they are there.

Owns that process, the change to machine code, and what is logged of both. Must not know any kernel. A controller of few nodes
decides by interpreted kernels in the meantime, some ten milliseconds each; with more nodes, or once decisions have held up
the event loop, it waits for the kernels that decide. The others are compiled while it goes on, and whoever needs one sooner compiles
it in this process. A compiler that has compiled all kernels keeps some hundred megabytes for good; a daemon that only
loads their machine code never needs them. The files of the cache are written as a whole or not at all, so whoever dies
in between leaves nothing broken.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence

from eelgrid_controller.clock import Clock
from eelgrid_controller.runtime.kernel_interpreter import KernelInterpreter
from eelgrid_kernels.compilation import is_cache_complete
from eelgrid_kernels.warmup import COMPILED_DECIDING, list_deciding_kernels, warm_deciding_kernels

_COMPILE = (sys.executable, "-m", "eelgrid_kernels")
# As in a log: where a start takes a minute, a line now and then says how far it is.
_PROGRESS_EVERY_S = 5.0
# Interpreted, a decision among so many nodes takes some 12 ms, up to 45 (measured), and one among more takes longer.
INTERPRETED_NODES_MOST = 128
# A round over pending work may try hundreds of decisions; probes find a loop that is silent for ten seconds dead.
_INTERPRETED_S_MOST = 1.0


class KernelReadiness:
    """Whether decisions may be made: by machine code, or interpreted while that is quick enough."""

    def __init__(self) -> None:
        self.is_interpreted = False
        self._is_slow = False
        self._compiled = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    def may_decide(self, nodes: int) -> bool:
        """Whether decisions among so many nodes may be made now."""
        return not self.is_interpreted or (nodes <= INTERPRETED_NODES_MOST and not self._is_slow)

    def observe_batch(self, duration_s: float) -> None:
        """Takes note of how long decisions have held up everything else."""
        self._is_slow |= self.is_interpreted and duration_s > _INTERPRETED_S_MOST

    def begin_interpreting(self) -> None:
        """Decisions are interpreted from now on."""
        self.is_interpreted = True

    def end_interpreting(self) -> None:
        """Machine code decides from now on."""
        self.is_interpreted = False
        self._compiled.set()
        for listener in self._listeners:
            listener()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Calls `listener` once machine code decides."""
        self._listeners.append(listener)

    async def wait_to_decide(self, nodes: int) -> None:
        """Returns as soon as decisions among so many nodes may be made."""
        if not self.may_decide(nodes):
            await self.wait_for_machine_code()

    async def wait_for_machine_code(self) -> None:
        """Returns once machine code decides."""
        if self.is_interpreted:
            await self._compiled.wait()


@contextlib.asynccontextmanager
async def load_kernels(clock: Clock, log: logging.Logger) -> AsyncIterator[KernelReadiness]:
    """Loads the kernels that decide; if these sources never were on this machine, has them compiled, and interprets them until then.

    What goes on compiling the others at the end, or where the start is given up, is ended.
    """
    readiness, start_s = KernelReadiness(), clock.perf_s()
    if is_cache_complete():
        await asyncio.to_thread(warm_deciding_kernels)
        log.info("kernels=warm seconds=%.2f", clock.perf_s() - start_s)
        yield readiness
        return
    log.info(
        "kernels=interpreted until=compiled note='decisions take some 12 ms; beyond %d nodes they wait'",
        INTERPRETED_NODES_MOST,
    )
    interpreter = KernelInterpreter(list_deciding_kernels())
    interpreter.start()
    readiness.begin_interpreting()
    decides = asyncio.Event()

    async def change_to_machine_code() -> None:
        await decides.wait()
        try:
            # What the child left undone is compiled here.
            await asyncio.to_thread(interpreter.replace_by_machine_code, warm_deciding_kernels)
        finally:
            readiness.end_interpreting()
        log.info("kernels=warm seconds=%.2f", clock.perf_s() - start_s)

    async def compile_missing() -> None:
        try:
            await compile_in_child(clock, log, on_decides=decides.set)
        finally:
            decides.set()

    tasks = [asyncio.create_task(each()) for each in (change_to_machine_code, compile_missing)]
    try:
        yield readiness
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        interpreter.stop()


async def compile_in_child(
    clock: Clock,
    log: logging.Logger,
    command: Sequence[str] = _COMPILE,
    on_decides: Callable[[], None] = lambda: None,
) -> None:
    """Runs the compiler and logs its progress, and tells when what decides is there.

    An end with an error is logged and left to the caller.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        log.warning("kernels=compiling process=none error=%s action=compile_here", error)
        return
    assert child.stdout is not None
    assert child.stderr is not None
    errors = asyncio.create_task(child.stderr.read())
    start_s, logged_s = clock.perf_s(), -_PROGRESS_EVERY_S
    try:
        async for line in child.stdout:
            passed_s, said = clock.perf_s() - start_s, line.decode("utf-8", "replace").strip()
            if said == COMPILED_DECIDING:
                on_decides()
            progress = said.rpartition(" ")[2]
            if "/" in progress and passed_s - logged_s >= _PROGRESS_EVERY_S:
                logged_s = passed_s
                log.info("kernels=compiling done=%s seconds=%.0f note='once for this version'", progress, passed_s)
        code, said = await child.wait(), (await errors).decode("utf-8", "replace").strip()
        if code:
            log.warning("kernels=compiling exit=%d error=%r action=compile_here", code, said[-500:])
    finally:
        errors.cancel()
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
