"""An agent of simulated nodes as a process of its own, for tests on an event loop."""

import asyncio
import contextlib
import sys

from tests.waiting import wait_until


@contextlib.asynccontextmanager
async def agent_process(address, fleet, log, *flags):
    """Started when it serves, ended with the block; what its line says: `listen`, `metrics` and more."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "eelgrid_agent",
            "--controller",
            address,
            "--listen",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
            "--simulate",
            str(fleet),
            *flags,
            stdout=out,
            stderr=out,
        )
    try:
        await wait_until(lambda: "event=serving" in log.read_text(), within_s=60.0)
        (line,) = [line for line in log.read_text().splitlines() if "event=serving" in line]
        yield dict(part.split("=", 1) for part in line.split() if "=" in part)
    finally:
        process.terminate()
        await process.wait()
