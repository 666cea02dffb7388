"""What Eelgrid relies on in watches. Through the port, one rule a test."""

import asyncio
from contextlib import aclosing

import pytest
from tests.builders.kubernetes import build_config_map
from tests.fakes.kubernetes.resources import CONFIG_MAPS
from tests.kubernetes_api_rig import WAYS, open_rig

from eelgrid_controller.engines.kubernetes.api import errors
from eelgrid_controller.engines.kubernetes.api.port import WatchEventType, version_of


@pytest.fixture(params=WAYS)
async def rig(request):
    async with open_rig(request.param) as made:
        yield made


async def watched(cluster, space, count, **how):
    """The first so many changes, bookmarks apart."""
    found = []
    async with asyncio.timeout(20.0), aclosing(cluster.watch_changes(CONFIG_MAPS, namespace=space, **how)) as changes:
        async for change in changes:
            if change.told is not WatchEventType.BOOKMARK:
                found.append(change)
                if len(found) == count:
                    return found
    raise AssertionError(found)


def said(changes):
    return [(change.told, change.object["metadata"]["name"]) for change in changes]


async def test_a_watch_reports_what_happened_after_a_version(rig):
    await rig.add(CONFIG_MAPS, build_config_map("a", {"of": "watch"}))
    version = (await rig.cluster.list(CONFIG_MAPS, namespace=rig.space)).resource_version
    await rig.add(CONFIG_MAPS, build_config_map("b", {"of": "watch"}, x="1"))
    changed = await rig.cluster.patch(CONFIG_MAPS, "a", {"data": {"x": "2"}}, namespace=rig.space)
    await rig.cluster.delete(CONFIG_MAPS, "b", namespace=rig.space)
    found = await watched(rig.cluster, rig.space, 3, resource_version=version, labels="of=watch")
    assert said(found) == [(WatchEventType.ADDED, "b"), (WatchEventType.MODIFIED, "a"), (WatchEventType.DELETED, "b")]
    assert found[1].object["data"] == changed["data"]
    assert found[1].object["kind"] == "ConfigMap"
    assert found[2].object["data"] == {"x": "1"}
    assert int(version_of(found[2].object)) > int(version_of(found[1].object))


async def test_a_watch_with_a_selector_reports_who_enters_and_leaves(rig):
    version = (await rig.cluster.list(CONFIG_MAPS, namespace=rig.space)).resource_version
    await rig.add(CONFIG_MAPS, build_config_map("a"))
    await rig.cluster.patch(CONFIG_MAPS, "a", {"metadata": {"labels": {"x": "1"}}}, namespace=rig.space)
    await rig.cluster.patch(CONFIG_MAPS, "a", {"metadata": {"labels": {"x": "2"}}}, namespace=rig.space)
    found = await watched(rig.cluster, rig.space, 2, resource_version=version, labels="x=1")
    assert said(found) == [(WatchEventType.ADDED, "a"), (WatchEventType.DELETED, "a")]
    assert found[1].object["metadata"]["labels"] == {"x": "1"}
    assert int(version_of(found[1].object)) > int(version_of(found[0].object))


async def test_a_watch_ends_in_its_time_and_bookmarks_how_far_it_is(rig):
    version = (await rig.cluster.list(CONFIG_MAPS, namespace=rig.space)).resource_version
    last = await rig.add(CONFIG_MAPS, build_config_map("a"))
    marks = [
        change
        async for change in rig.cluster.watch_changes(
            CONFIG_MAPS, resource_version=version, namespace=rig.space, fields="metadata.name=b", timeout_s=3.0
        )
    ]
    assert all(change.told is WatchEventType.BOOKMARK for change in marks)
    if marks:  # a real server sends the last one in the seconds before the end, if it comes to it
        assert int(version_of(marks[-1].object)) >= int(version_of(last))


async def test_a_version_that_is_too_old_is_expired(rig):
    if rig.fake is not None:
        rig.fake.store.compact()
    watch = rig.cluster.watch_changes(CONFIG_MAPS, resource_version="1", timeout_s=2.0)
    try:
        told = [change async for change in watch]
    except errors.Expired:
        return
    assert rig.fake is None
    assert told, "a server that still knows all since it began tells it"


async def test_a_version_of_the_future_is_told_nothing_by_a_watch_and_expired_in_a_list(rig):
    version = str(10**12)
    watch = rig.cluster.watch_changes(CONFIG_MAPS, resource_version=version, namespace=rig.space, timeout_s=2.0)
    assert [change async for change in watch] == []
    with pytest.raises(errors.Expired):
        await rig.cluster.list(CONFIG_MAPS, resource_version=version)
