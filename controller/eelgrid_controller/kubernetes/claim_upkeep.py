"""What is put in order beside placing: allocations that nobody needs, devices that two claims hold, GPUs that are sliced.

Owns these three questions. Must not know what is done about the answers.
"""

from collections.abc import Callable, Iterable, Iterator

from eelgrid_controller.kubernetes.claim_events import Body, Key
from eelgrid_controller.kubernetes.claim_units import Book
from eelgrid_controller.kubernetes.device_pools import DRIVER, Pool, Pools, Result, results_of

__all__ = ["gpus_sliced", "orphaned", "to_give_way"]


def gpus_sliced(pools: Pools, node_name: str) -> int | None:
    """How many GPUs of a node are given by claims; None while its slices are being written anew."""
    pool = pools.at(DRIVER, node_name)
    if pool is None:
        return None if node_name in pools.nodes(DRIVER) else 0
    return len({one.seen.attributes.get((DRIVER, "parentUUID"), one.counter_set) for one in pool.offers.values()})


def to_give_way(pools: Pools, book: Book, node_name: str, is_running: Callable[[str], bool]) -> Body | None:
    """Of claims that hold more of a node than there is, the newest that no pod may be running on."""
    pool = pools.at(DRIVER, node_name)
    if pool is None or not pool.is_overdrawn:
        return None
    holders = pools.holders(DRIVER, node_name)
    found: list[Body] = [one for one in book.allocated() if one["metadata"]["uid"] in holders]
    found.sort(key=lambda one: (one["status"]["allocation"].get("allocationTimestamp", ""), one["metadata"]["uid"]))
    for claim in reversed(found):
        if _is_contended(pool, results_of(claim)) and not any(map(is_running, book.users.get(_key(claim), ()))):
            return claim
    return None


def orphaned(book: Book, since: dict[str, float], at_s: float, orphan_s: float) -> Iterator[Body]:
    """Allocations that nobody has needed for so long; `since` keeps from when on."""
    for found in list(book.allocated()):
        uid = found["metadata"]["uid"]
        if book.users.get(_key(found)) or book.is_reserved(found):
            since.pop(uid, None)
        elif since.setdefault(uid, at_s) + orphan_s <= at_s:
            yield found


def _key(found: Body) -> Key:
    return Key(found["metadata"]["namespace"], found["metadata"]["name"])


def _is_contended(pool: Pool, results: Iterable[Result]) -> bool:
    """Whether somebody else holds something of this, too."""
    for one in results:
        offer = pool.offers.get(one.device)
        if pool.taken.get(one.device, 0) > 1:
            return True
        if offer is not None and any(pool.free.get(key, 0) < 0 for key, _ in offer.takes):
            return True
    return False
