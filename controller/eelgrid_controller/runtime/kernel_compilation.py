"""Compilation of the placement kernels before the first decision, in a process of its own.

Owns that process and what is logged of it. Must not know any kernel. A start waits for the kernels that decide; the others are
compiled while it goes on, and whoever needs one sooner compiles it in this process. A compiler that has compiled all kernels keeps
some hundred megabytes for good; a daemon that only loads their machine code never needs them. The files of the cache
are written as a whole or not at all, so whoever dies in between leaves nothing broken.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence

from eelgrid_controller.clock import Clock
from eelgrid_kernels.compilation import is_cache_complete
from eelgrid_kernels.warmup import COMPILED_DECIDING, warm_deciding_kernels

_COMPILE = (sys.executable, "-m", "eelgrid_kernels")
# As in a log: where a start takes a minute, a line now and then says how far it is.
_PROGRESS_EVERY_S = 5.0


@contextlib.asynccontextmanager
async def load_kernels(clock: Clock, log: logging.Logger) -> AsyncIterator[asyncio.Task[None]]:
    """Loads the kernels that decide, and has them compiled before if these sources never were on this machine.

    Gives what goes on compiling the others; at the end, or where the start is given up, its process is ended.
    """
    start_s = clock.perf_s()
    decides = asyncio.Event()
    compiling = asyncio.create_task(_compile_missing(clock, log, decides))
    try:
        await decides.wait()
        # What the child left undone is compiled here.
        await asyncio.to_thread(warm_deciding_kernels)
        log.info("kernels=warm seconds=%.2f", clock.perf_s() - start_s)
        yield compiling
    finally:
        compiling.cancel()
        await asyncio.wait((compiling,))


async def _compile_missing(clock: Clock, log: logging.Logger, decides: asyncio.Event) -> None:
    try:
        if not is_cache_complete():
            await compile_in_child(clock, log, on_decides=decides.set)
    finally:
        decides.set()


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
