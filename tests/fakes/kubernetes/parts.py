"""What all opt-in parts share: they listen to the store and work when something has happened.

A part marks what has changed while it listens, and works in a task of its own, as the real
ones do over watches: there is always a moment between a write and what follows from it.
"""

import asyncio


class Part:
    """Listens, and works through what is dirty until it is stopped."""

    def __init__(self, fake, *, delay_s=0.0):
        self.api = fake.api
        self.store = fake.store
        self.delay_s = delay_s  # between something happening and the part's acting on it
        self._wake = asyncio.Event()
        self._task = None

    def kind(self, resource):
        return self.api.catalogue.find(resource.group, resource.version, resource.plural)

    async def start(self):
        self.store.heard.append(self._heard)
        self.begin()
        self._wake.set()
        self._task = asyncio.create_task(self._run())

    async def stop(self):
        if self._task is None:
            return
        self.store.heard.remove(self._heard)
        task, self._task = self._task, None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _heard(self, kind, event):
        if self.heard(kind, event):
            self._wake.set()

    async def _run(self):
        while True:
            await self._wake.wait()
            await asyncio.sleep(self.delay_s)
            self._wake.clear()
            again_s = self.work()
            if again_s is not None:
                asyncio.get_running_loop().call_later(again_s, self._wake.set)

    def begin(self):
        """Look at what is there already."""

    def heard(self, kind, event):
        """Note a change; whether there is work to do."""
        raise NotImplementedError

    def work(self):
        """Do it; after how many seconds to look again, None for not before something happens."""
        raise NotImplementedError
