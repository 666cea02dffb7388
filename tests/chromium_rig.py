"""A real Chromium without a window, spoken to by its DevTools protocol over one websocket.

Owns the process, the few commands that tests need, and their limits in time.
"""

import asyncio
import base64
import contextlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WITHIN_S = 30.0
# What the page is to satisfy of WCAG 2.0 to 2.2, levels A and AA, and axe-core's own advice.
AXE_TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


def axe_script():
    """The source of axe-core, of the package that carries it; nothing of that package is imported."""
    found = importlib.util.find_spec("axe_playwright_python")
    assert found is not None, "axe-core is missing; pip install -r requirements-dev.lock"
    (folder,) = found.submodule_search_locations
    return (Path(folder) / "axe.min.js").read_text()


class Tab:
    """One page in the browser."""

    def __init__(self, socket):
        self._socket = socket
        self._number = 0
        self._answers = {}
        self.complaints = []  # errors of scripts and of the content security policy
        self._reading = asyncio.create_task(self._read())

    async def _read(self):
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(said["params"]["exceptionDetails"]["exception"].get("description", ""))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])

    async def close(self):
        self._reading.cancel()
        await self._socket.close()

    async def call(self, method, **params):
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(WITHIN_S):
            said = await answer
        assert "error" not in said, said["error"]
        return said["result"]

    async def run(self, script):
        """What an expression comes to."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]["exception"].get("description")
        return result["result"].get("value")

    async def until(self, script, *, within_s=WITHIN_S):
        """Wait until an expression is true."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not await self._is(script):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                return
        raise AssertionError(f"not within {within_s:g} s: {script}; the page says {await self.text('body')!r}")

    async def _is(self, script):
        try:
            return await self.run(script)
        except AssertionError as error:
            if "navigated or closed" in str(error):  # between two pages
                return False
            raise

    async def text(self, selector):
        return await self.run(f"document.querySelector({json.dumps(selector)})?.innerText")

    async def click(self, x, y):
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key, text=""):
        codes = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40, "ArrowLeft": 37}
        given = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        if text:
            given["text"] = text
        await self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    async def violations(self):
        """What axe-core finds wrong with the page as it is: (rule, why, element)."""
        if not await self.run("typeof axe === 'object'"):
            await self.run(f"{axe_script()};0")
        only = json.dumps({"runOnly": {"type": "tag", "values": AXE_TAGS}, "resultTypes": ["violations"]})
        passed, found = await self.run(
            f"axe.run(document, {only}).then(({{passes, violations}}) => [passes.length, violations.flatMap(({{id, nodes}}) => "
            "nodes.map((node) => [id, node.failureSummary, node.html]))])"
        )
        assert passed > 20, "axe-core looked at nothing"
        return found

    async def theme(self, name):
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def size(self, width, height):
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def open(self, address):
        await self.call("Page.navigate", url=address)

    async def picture(self, path: Path):
        """A screenshot as PNG."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))  # noqa: ASYNC240
        return path


@contextlib.asynccontextmanager
async def browser(folder, *flags):
    """A tab of a browser of its own, which ends with the block."""
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        "--no-proxy-server",
        "--window-size=1400,860",
        f"--user-data-dir={folder / 'chromium'}",
        "--remote-debugging-port=0",
        *flags,
        "about:blank",
    ]
    with (folder / "chromium.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)}
        )
    try:
        port = await _port(folder / "chromium" / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                (target, *_) = [one for one in await response.json(content_type=None) if one["type"] == "page"]
            socket = await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=64 * 2**20)
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            try:
                yield tab
            finally:
                await tab.close()
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(10.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _port(path, process):
    async with asyncio.timeout(WITHIN_S):
        while not path.exists() or not path.read_text().strip():
            assert process.returncode is None, "Chromium ended; see its log"
            await asyncio.sleep(0.05)
    return int(path.read_text().splitlines()[0])
