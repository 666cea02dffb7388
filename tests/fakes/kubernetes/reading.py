"""Lists in pages and watches: how the state of the store, and its log, go out.

A page after the first shows the list as it was at the first. A watch tells the changes after
a version in their order; an object that leaves a selector is told as deleted, one that
enters it as added. A version that was compacted away is an ERROR event with 410.
"""

import asyncio
import contextlib
import secrets

from aiohttp import web

from tests.fakes.kubernetes.faults import bad_request, expired, too_large_version
from tests.fakes.kubernetes.selectors import selector
from tests.fakes.kubernetes.store import encode


def _asked_version(query, store, *, is_watch=False):
    text = query.get("resourceVersion", "")
    if not text:
        return None
    if not text.isdigit():
        raise bad_request(f'invalid resource version: "{text}"')
    version = int(text)
    if version > store.version and not is_watch:
        raise too_large_version(version, store.version)
    return version


def listed(api, target, query):
    """One page."""
    store, kind = api.store, target.kind
    limit, token = int(query.get("limit") or 0), query.get("continue", "")
    if token:
        found = store.pages.get(token)
        if found is None:
            why = "The provided continue parameter is too old to display a consistent list result."
            raise expired(why)
        version, records = found
    else:
        _asked_version(query, store)
        version = store.version
        meant = selector(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        spaces = store.of(kind)
        if target.namespace:
            spaces = {key: record for key, record in spaces.items() if key[0] == target.namespace}
        records = [spaces[key] for key in sorted(spaces)]
        if meant is not None:
            records = [record for record in records if meant(record.object)]
    metadata = {"resourceVersion": str(version)}
    if limit and len(records) > limit:
        following = secrets.token_hex(8)
        store.pages[following] = (version, records[limit:])
        metadata |= {"continue": following, "remainingItemCount": len(records) - limit}
        records = records[:limit]
    head = encode({"kind": f"{kind.kind}List", "apiVersion": kind.api_version(target.version), "metadata": metadata})
    body = head[:-1] + b',"items":[' + b",".join(record.text for record in records) + b"]}"
    return web.Response(body=body, content_type="application/json")


class Watch:
    """One watch, from its request to its end."""

    def __init__(self, server, request, target):
        self.server = server
        self.request = request
        self.target = target
        self.store = server.api.store
        self.knobs = server.knobs
        query = request.query
        self.meant = selector(target.kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        self.has_bookmarks = query.get("allowWatchBookmarks") in {"1", "true"}
        self.until_s = float(query.get("timeoutSeconds") or self.knobs.timeout_most_s)
        self.version = _asked_version(query, self.store, is_watch=True)
        self.is_ahead = self.version is not None and self.version > self.store.version  # such a watch is told nothing
        self.compacted = self.store.compacted
        self.objects = {name: self._head(name) for name in ("ADDED", "MODIFIED", "DELETED")}

    def _head(self, name):
        return f'{{"type":"{name}","object":'.encode() + self.target.head

    async def run(self):
        """Tell until the time is up, or the other end goes."""
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        answer.enable_chunked_encoding()
        await answer.prepare(self.request)
        if self.version is not None and 0 < self.version < self.compacted:
            status = expired(f"too old resource version: {self.version} ({self.compacted})").status
            await answer.write(encode({"type": "ERROR", "object": status}) + b"\n")
            await answer.write_eof()
            return answer
        transport = self.request.transport
        self.server.watches.add(transport)
        waiter = self.store.subscribe(self.target.kind)
        try:
            with contextlib.suppress(ConnectionResetError):
                await self._tell(answer, waiter)
                await answer.write_eof()
        finally:
            self.store.unsubscribe(self.target.kind, waiter)
            self.server.watches.discard(transport)
        return answer

    async def _tell(self, answer, waiter):
        clock = asyncio.get_running_loop()
        end_s = clock.time() + min(self.until_s, self.knobs.timeout_most_s)
        bookmark_s = clock.time() + self.knobs.bookmark_every_s
        if not self.version:  # none or 0: what there is, first
            self.version = self.store.version
            records = [record for (at, _), record in self.store.of(self.target.kind).items() if self._is_here(at)]
            lines = [self._line("ADDED", one) for one in records if self._is_meant(one)]
            if lines:
                await answer.write(b"".join(lines))
        while (now_s := clock.time()) < end_s:
            waiter.clear()
            if not self.is_silent:
                log = self.store.log(self.target.kind)
                news, self.version = log.events[log.after(self.version) :], self.store.version
                lines = [line for event in news if (line := self._told(event))]
                if self.has_bookmarks and now_s >= bookmark_s:
                    lines.append(self._bookmark())
                    bookmark_s = now_s + self.knobs.bookmark_every_s
                if lines:
                    await answer.write(b"".join(lines))
                    continue
            with contextlib.suppress(TimeoutError):
                wait_s = min(end_s, bookmark_s if self.has_bookmarks and not self.is_silent else end_s) - now_s
                async with asyncio.timeout(max(0.0, wait_s)):
                    await waiter.wait()
        if self.has_bookmarks and not self.is_silent:
            await answer.write(self._bookmark())

    @property
    def is_silent(self):
        return self.knobs.is_mute or self.is_ahead

    def _is_here(self, namespace):
        return not self.target.namespace or namespace == self.target.namespace

    def _is_meant(self, record):
        return record is not None and (self.meant is None or self.meant(record.object))

    def _line(self, name, record):
        return self.objects[name] + record.text[1:] + b"}\n"

    def _told(self, event):
        """The line of a change, None where it is none of this watch's."""
        some = event.after or event.before
        if not self._is_here(some.object["metadata"].get("namespace", "")):
            return None
        was, now = self._is_meant(event.before), self._is_meant(event.after)
        if now:
            return self._line("MODIFIED" if was else "ADDED", event.after)
        if not was:
            return None
        if event.gone is not None:
            return self._line("DELETED", event.gone)
        # Out of the selector: the state that was in it, at the version of the change.
        its = {**event.before.object["metadata"], "resourceVersion": str(event.version)}
        return self.objects["DELETED"] + encode({**event.before.object, "metadata": its})[1:] + b"}\n"

    def _bookmark(self):
        kind = self.target.kind
        told = {
            "kind": kind.kind,
            "apiVersion": kind.api_version(self.target.version),
            "metadata": {"resourceVersion": str(self.version), "creationTimestamp": None},
        }
        return encode({"type": "BOOKMARK", "object": told}) + b"\n"
