"""The live page of a made-up fleet, open in a real Chromium.

Owns the fleet, its door and the tab of a test. Readings are bench.page_fleet's; door, hub, frames and page are the real ones.
"""

import asyncio
import contextlib

from bench.page_fleet import PageFleet

from tests.chromium_rig import browser

LIVE = "document.querySelector('#connection')?.dataset.state === 'live'"
# The panel's heading.
HEADING = "document.querySelector('#panel h2')?.innerText"


@contextlib.asynccontextmanager
async def shown(tmp_path, nodes, *, fragment="", share=0.7, waiting=3, prepare=None):
    """A fleet, its door, and a tab that shows it live; `prepare` adds to the fleet before anybody looks."""
    fleet = PageFleet(nodes)
    door = await fleet.open(every_s=0.3)
    await asyncio.sleep(0)
    fleet.fill(share, waiting=waiting)
    if prepare is not None:
        prepare(fleet)
    fleet.report()
    try:
        async with browser(tmp_path) as tab:
            await tab.size(1400, 860)
            await tab.open(f"http://127.0.0.1:{door.port}/{fragment}")
            await tab.until(LIVE)
            yield fleet, door, tab
            assert tab.complaints == []
    finally:
        await door.stop()


async def newer(fleet, tab):
    """Wait until the page has drawn a frame with other readings."""
    before = await tab.run("eelgrid.model.atMs")
    fleet.report()
    await tab.until(f"eelgrid.model.atMs > {before}")
