"""`python -m bench.page --out DIR`: Cost of the live page for the controller, with ten viewers at 10,000 GPUs.

A synthetic fleet (bench.page_fleet) of 1,250 nodes with eight GPUs, its server and its hub run in this process. The
viewers are another process, so their cost is not counted. Agents send every 5 s by default: each second a fifth of the
nodes reports (`agents`); in the second round every node reports each second and nearly every GPU changes (`all`).

The measure is the CPU time of this process, minus the time for generating readings, while ten viewers are connected; it
is compared with the same without viewers. Target: under 5 % of one core. `whole_ms` is the time from a viewer's
connection until it has received everything.

The round `paint` opens the page in a real Chromium some times with an empty cache, where there is one: `shell_ms` until
the first contentful paint, `map_ms` until the whole map is on its canvas, and `renderer_cpu_ms`, the processor time that
the browser's own process of the page took for all of it, which other programs on the machine change less. The round
`hands` hovers, presses arrow keys, drags the map and goes back in the history, sixty times each, while a fifth of the nodes
reports each second: processor time of the page's process for each, the time between frames, and the longest task.
"""

import asyncio
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from bench.page_fleet import PageFleet
from bench.runner import Options, benchmark
from bench.tables import write_csv

_CLIENT = """
import http.client, sys, time, threading, zlib
port, viewers, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def view(out):
    begun = time.perf_counter()
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    client.request("GET", "/events", headers={"Accept-Encoding": "gzip"})
    response = client.getresponse()
    unpack = zlib.decompressobj(31).decompress
    frames = size = 0
    first = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        part = response.read1()
        size += len(part)
        found = unpack(part).count(b"data: {")
        frames += found
        if found and not first:
            first = time.perf_counter() - begun
    out.append((first, frames, size))
found = []
threads = [threading.Thread(target=view, args=(found,)) for _ in range(viewers)]
[one.start() for one in threads]
[one.join() for one in threads]
print(*(part for one in found for part in one))
"""


def _used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _feed(fleet: PageFleet, part: float, spent: list[float]) -> None:
    """Readings each second; their making is the fleet's work, not the page's."""
    while True:
        before_s = time.process_time()
        fleet.report(part=part)
        spent.append(time.process_time() - before_s)
        await asyncio.sleep(1.0)


async def _round(nodes: int, part: float, viewers: int, seconds: float) -> list[tuple[str, float]]:
    fleet = PageFleet(nodes)
    fleet.fill()
    door = await fleet.open()
    fleet.report()
    spent: list[float] = []
    feeding = asyncio.create_task(_feed(fleet, part, spent))
    await asyncio.sleep(2.5)
    spent.clear()
    before_s, begun_s = _used_s(), time.monotonic()
    command = [sys.executable, "-c", _CLIENT, str(door.port), str(viewers), str(seconds)]
    told: list[float] = []
    if viewers:
        client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await client.communicate()
        told = [float(word) for word in out.split()]
    else:
        await asyncio.sleep(seconds)
    wall_s = time.monotonic() - begun_s
    core = (_used_s() - before_s - sum(spent)) / wall_s
    feeding.cancel()
    await door.stop()
    rows = [("core_percent", 100.0 * core)]
    if told:
        rows += [
            ("whole_ms", 1e3 * statistics.median(told[0::3])),
            ("frames_per_s", statistics.median(told[1::3]) / seconds),
            ("kilobytes_per_s", statistics.median(told[2::3]) / seconds / 1e3),
        ]
    return rows


async def _paint(nodes: int, loads: int) -> list[tuple[str, float]]:
    from tests.chromium_rig import CHROMIUM, browser

    if CHROMIUM is None:
        return []
    fleet = PageFleet(nodes)
    fleet.fill()
    door = await fleet.open()
    fleet.report()
    found: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with browser(Path(folder)) as tab:
            await tab.size(1400, 860)
            await tab.call("Network.enable")
            await tab.call("Network.setCacheDisabled", cacheDisabled=True)
            await tab.call("Performance.enable")
            for _ in range(loads):
                # Of the same origin, so that the browser keeps its process.
                await tab.open(f"http://127.0.0.1:{door.port}/mark.svg")
                before_s = await _renderer_s(tab)
                await tab.open(f"http://127.0.0.1:{door.port}/")
                await tab.until("performance.getEntriesByName('map').length === 1")
                used_s = await _renderer_s(tab) - before_s
                shell_ms = await tab.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
                map_ms = await tab.run("performance.getEntriesByName('map')[0].startTime")
                found.append((shell_ms, map_ms, 1e3 * used_s))
    await door.stop()
    return [
        (measure, statistics.median(one[place] for one in found))
        for place, measure in enumerate(("shell_ms", "map_ms", "renderer_cpu_ms"))
    ]


# Frames as they come, in ms, and tasks that kept one waiting.
_WATCH = """(() => {
  window.frames = []; window.long = [];
  new PerformanceObserver((list) => long.push(...list.getEntries().map((one) => one.duration))).observe({type: 'longtask'});
  let last = performance.now();
  const next = (now) => { frames.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
})()"""
_BACK = "[...document.querySelectorAll('#panel button')].find((one) => one.textContent === 'Back')"


async def _hands(nodes: int) -> list[tuple[str, float]]:
    from tests.chromium_rig import CHROMIUM, browser

    if CHROMIUM is None:
        return []
    fleet = PageFleet(nodes)
    door = await fleet.open()
    await asyncio.sleep(0)
    fleet.fill()
    fleet.report()
    feeding = asyncio.create_task(_feed(fleet, 0.2, []))
    rows: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with browser(Path(folder)) as tab:
            await tab.size(1920, 1080)
            await tab.call("Performance.enable")
            await tab.open(f"http://127.0.0.1:{door.port}/")
            await tab.until("window.eelgrid?.map.drawn.all > 0")
            await tab.run(_WATCH)

            async def hover(step: int) -> None:
                await _mouse(tab, "mouseMoved", 60 + 15 * step, 200 + 37 * step % 600)

            async def key(step: int) -> None:
                await tab.press(("ArrowRight", "ArrowDown")[step % 2])

            async def drag(step: int) -> None:
                await _mouse(tab, "mouseMoved", 300 + 4 * step, 300 + 2 * step, buttons=1)

            async def back(_step: int) -> None:
                await tab.run(f"{_BACK}.click()")

            for name, does, before in (
                ("hover", hover, ""),
                ("key", key, "document.querySelector('#map').focus()"),
                ("drag", drag, "press"),
                ("slider", back, "location.hash = '#/history'"),
            ):
                if before == "press":
                    await _mouse(tab, "mousePressed", 300, 300)
                elif before:
                    await tab.run(before)
                await asyncio.sleep(1.0)
                await tab.run("frames.length = long.length = 0")
                begun_s = await _renderer_s(tab)
                for step in range(60):
                    await does(step)
                    await asyncio.sleep(0.02)
                used_s = await _renderer_s(tab) - begun_s
                frames, long = sorted(await tab.run("frames")), await tab.run("long")
                if before == "press":
                    await _mouse(tab, "mouseReleased", 536, 418)
                rows += [
                    (f"{name}_cpu_ms", 1e3 * used_s / 60),
                    (f"{name}_frame_p50_ms", statistics.median(frames)),
                    (f"{name}_frame_p95_ms", frames[int(0.95 * len(frames))]),
                    (f"{name}_longest_task_ms", max(long, default=0.0)),
                ]
    feeding.cancel()
    await door.stop()
    return rows


async def _mouse(tab: Any, kind: str, x: float, y: float, **more: int) -> None:
    await tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1, **more)


async def _renderer_s(tab: Any) -> float:
    """Processor seconds of the page's process until now."""
    told = (await tab.call("Performance.getMetrics"))["metrics"]
    return float(next(one["value"] for one in told if one["name"] == "ProcessTime"))


@benchmark(out="bench-out/page")
@click.option("--nodes", default=1250)
@click.option("--viewers", default=10)
@click.option("--seconds", default=20.0)
@click.option("--loads", default=7)
def main(options: Options) -> None:
    """Runs the rounds, and writes DIR/summary.csv (round, measure, value, bound)."""
    rounds = {"nobody": (0.2, 0), "agents": (0.2, options.viewers), "all": (1.0, options.viewers)}
    bounds = {"core_percent": "5", "whole_ms": "1000", "shell_ms": "1000", "map_ms": "1000"}
    rows = []
    for name in ("paint", "hands", *rounds):
        if name == "paint":
            found = asyncio.run(_paint(options.nodes, options.loads))
        elif name == "hands":
            found = asyncio.run(_hands(options.nodes))
        else:
            found = asyncio.run(_round(options.nodes, *rounds[name], options.seconds))
        for measure, value in found:
            bound = bounds.get(measure, "-")
            rows.append((name, measure, f"{value:.4g}", bound))
            print(f"{name:8} {measure:16} {value:10.4g} {bound:>6}", flush=True)
        write_csv(options.out / "summary.csv", ("round", "measure", "value", "bound"), rows)


if __name__ == "__main__":
    sys.exit(main())
