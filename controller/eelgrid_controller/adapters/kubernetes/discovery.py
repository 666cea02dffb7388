"""What an API server serves: its version, and every kind in every version.

Owns the two forms in which a server tells it. Must not know connections.

Theory. From 1.30 on two requests tell everything (aggregated discovery, v2); an older
server, and one that knows nothing of it, answers with a list of groups, each of whose
versions is asked for in turn. A version whose own server is away is left out: what cannot
be asked is not served.

Source: KEP-3352, aggregated discovery.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from eelgrid_controller.adapters.kubernetes.errors import AnswerUnreadable, NotFound, ServerFault
from eelgrid_controller.adapters.kubernetes.port import Served

__all__ = ["served"]

_JSON = "application/json"
_AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_GROUPS_MOST = 500


async def served(get: Callable[[str, str], Awaitable[dict[str, Any]]]) -> Served:
    """What a server offers; `get` takes a path and what is accepted."""
    accept = f"{_AGGREGATED},{_JSON}"
    version, core, groups = await asyncio.gather(get("/version", _JSON), get("/api", accept), get("/apis", accept))
    found: set[tuple[str, str, str]] = set()
    asked: list[tuple[str, str, str]] = []
    for told in (core, groups):
        if told.get("kind") == "APIGroupDiscoveryList":
            found.update(_aggregated(told))
        elif told.get("kind") == "APIVersions":
            asked += [("", one, f"/api/{one}") for one in told.get("versions") or ()]
        else:
            for group in (told.get("groups") or ())[:_GROUPS_MOST]:
                name = group["name"]
                asked += [(name, one["version"], f"/apis/{name}/{one['version']}") for one in group["versions"]]
    for group, one, path in asked:
        try:
            listed = await get(path, _JSON)
        except (NotFound, ServerFault):
            continue
        found.update((group, one, kind["name"]) for kind in listed.get("resources") or ())
    return Served(_number(version, "major"), _number(version, "minor"), frozenset(found))


def _aggregated(told: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for group in (told.get("items") or ())[:_GROUPS_MOST]:
        name = group["metadata"].get("name", "")
        for version in group.get("versions") or ():
            for resource in version.get("resources") or ():
                plural = resource["resource"]
                yield name, version["version"], plural
                for part in resource.get("subresources") or ():
                    yield name, version["version"], f"{plural}/{part['subresource']}"


def _number(version: Mapping[str, Any], part: str) -> int:
    """A part of the version; some vendors write the minor as `29+`."""
    digits = re.match(r"\d+", str(version.get(part, "")))
    if digits is None:
        raise AnswerUnreadable(f"/version has no {part}", "see whether the address is an API server's")
    return int(digits[0])
