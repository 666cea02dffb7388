"""Ledger writer: takes energy windows from agents' streams into the ledger, and answers queries."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.energy.ledger import (
    AHEAD_S_MOST,
    BOARD_W_MOST,
    NUMBER_MOST,
    PAST_S_MOST,
    RAY_JOB_LABEL,
    ClaimAllowance,
    EnergyHolder,
    ExportClaim,
    Exporter,
    LedgerAnswer,
    LedgerPlace,
    LedgerQuery,
    count_pieces,
    judge_window,
    label_ray_job,
    resolve_holder,
    spread_window,
)
from eelgrid_controller.energy.store.database import LedgerInDoubt
from eelgrid_controller.energy.store.ledger_store import LastWindow, LedgerStore, NodeEntries, WriteOutcome
from eelgrid_controller.energy.store.schema import NO_DAMAGE
from eelgrid_controller.errors import LedgerError, LedgerRefused
from eelgrid_controller.objectives.power.tariffs import EnergyTariff, policy_tariff
from eelgrid_controller.state.measurements import WorkEntry, WorkInterval, spread_work
from eelgrid_protos import catalogue
from eelgrid_protos.catalogue.products import Product
from eelgrid_protos.faults import Unavailable
from eelgrid_protos.messages import EnergyAcknowledgement, EnergyOwner, EnergyPrices, EnergyWindow, Inventory

_BATCH_S = 1.0
_AGAIN_S = 5.0
_FORGET_S = 600.0
_WAITING_MOST = 20_000  # windows: a quarter of an hour of 1,213 nodes, some 100 MB
_WORK_MOST = 100_000
_SPECS_MOST = 20_000
# Windows of one node that are not on disk: an agent has eight under way, and sends no more before it hears of one.
_NODE_WAITING_MOST = 64
# Pieces of all windows that are not on disk, some 300 bytes each.
_PIECES_WAITING_MOST = 600_000
# Of one node's refused windows, one line of the log in so long.
_REFUSAL_LOGGED_S = 60.0
# Longest reason that an agent is told.
_REASON_LONGEST = 500

# Hours or days that the bound on the file's size lets go of at once; more than come in between.
_SHRUNK_ONCE = 24

Acknowledge = Callable[[EnergyAcknowledgement], None]
_T = TypeVar("_T")


@dataclass(slots=True)
class _Batch:
    parts: dict[str, NodeEntries] = field(default_factory=dict)  # by node
    told: dict[str, Acknowledge] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)  # windows and the last reason, by node
    many: Counter[str] = field(default_factory=Counter)  # windows by node
    # Windows for the listeners, by node.
    kept: dict[str, list[tuple[Inventory, EnergyWindow]]] = field(default_factory=dict)
    worked: list[WorkEntry] = field(default_factory=list)
    windows: int = 0  # of all nodes
    pieces: int = 0
    end_ns: int = 0  # the latest

    def count_window(self, node: str) -> None:
        """Counts one more window of a node."""
        self.many[node] += 1
        self.windows += 1

    def refuse(self, node: str, reason: str, many: int = 1) -> None:
        """Windows of a node are in no sum."""
        self.refused[node] = (self.refused.get(node, (0, ""))[0] + many, reason[:_REASON_LONGEST])

    def then(self, later: "_Batch") -> "_Batch":
        """Both, of which the other came later."""
        parts = dict(self.parts)
        for node, part in later.parts.items():
            mine = parts.get(node, NodeEntries())
            parts[node] = NodeEntries(
                mine.entries + part.entries, mine.measured + part.measured, part.newest or mine.newest
            )
        both = _Batch(
            parts,
            self.told | later.told,
            dict(self.refused),
            self.many + later.many,
            {node: self.kept.get(node, []) + later.kept.get(node, []) for node in self.kept | later.kept},
            self.worked + later.worked,
            self.windows + later.windows,
            self.pieces + later.pieces,
            max(self.end_ns, later.end_ns),
        )
        for node, (many, reason) in later.refused.items():
            both.refuse(node, reason, many)
        return both

    def only(self, nodes: Collection[str]) -> "_Batch":
        """What is of these nodes; "" is work."""
        return _Batch(
            parts={node: part for node, part in self.parts.items() if node in nodes},
            told={node: told for node, told in self.told.items() if node in nodes},
            refused={node: one for node, one in self.refused.items() if node in nodes},
            many=(many := Counter({node: many for node, many in self.many.items() if node in nodes})),
            windows=many.total(),
            kept={node: windows for node, windows in self.kept.items() if node in nodes},
            worked=self.worked if "" in nodes else [],
            pieces=sum(len(self.parts[node].entries) for node in nodes if node in self.parts),
        )


class _NodeBoards(NamedTuple):
    """A node's boards by UUID."""

    inventory: Inventory
    watts: dict[str, float]  # the greatest power, where the catalogue knows it
    places: dict[str, LedgerPlace]


class _Found(NamedTuple):
    """What stands in a ledger that is opened."""

    newest: dict[str, tuple[int, int]]
    until_s: dict[str, float]
    holders: list[EnergyHolder]
    worked_s: dict[tuple[str, str], float]
    used_bytes: int


class LedgerWriter:
    """One ledger; made by `open`."""

    def __init__(
        self,
        open_store: Callable[[], LedgerStore],
        *,
        core: Callable[[], Core],
        clock: Clock,
        log: logging.Logger,
        bytes_most: int,
        products: Mapping[str, Product] | None = None,
    ) -> None:
        """`open_store` opens the ledger, in a thread, and is called again after a LedgerError.

        `products` are those of the catalogue by their key; by default the packaged ones.
        """
        self.windows = 0
        self.again = 0  # windows that were here before
        self.dropped = 0  # windows that found no room; they come again
        self.failures = 0
        self.refused = 0  # windows that no devices can have spent; they are in no sum
        self.unplaced = 0  # windows far from now, which are counted in the hour in which they came
        self.fault = ""  # what is wrong with the ledger now
        self.newest_ns: int | None = None  # the latest end of a window that this process wrote
        self.forgotten: Mapping[str, int] = {"age": 0, "size": 0}  # rows, by why they had to go
        self.used_bytes: int | None = None
        self.bytes_most = bytes_most
        self._open = open_store
        self._products = catalogue.load_catalogue().products if products is None else products
        self._boards: dict[str, _NodeBoards] = {}  # by node
        self._allowances: dict[str, ClaimAllowance] = {}
        self._until_s: Mapping[str, float] = {}  # of the newest window of each node when the ledger was opened
        self._refusals: dict[str, tuple[float, int]] = {}  # by node: when one was logged, and how many were not since
        self._core = core
        self._clock = clock
        self._log = log
        self._store: LedgerStore | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="energy")
        self._readers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="energy-read")
        self._newest: dict[str, tuple[int, int]] = {}  # on disk
        self._taken: dict[str, tuple[int, int]] = {}  # on disk or on the way there
        self._turned_away: dict[str, tuple[int, int]] = {}  # the highest since one found no room
        self._worked_s: dict[tuple[str, str], float] = {}
        self._prices: tuple[EnergyPrices | None, EnergyTariff | None] = (None, None)
        self._batch = _Batch()
        self._writing = _Batch()
        # What was written when the connection broke, so that nobody knows yet whether it is on disk.
        self._doubtful: _Batch | None = None
        self._damage = NO_DAMAGE  # as it was logged
        self._wake = asyncio.Event()
        # Called with a window, and its node's inventory, once it is on disk; not with one that came at no time near ours.
        self.window_listeners: list[Callable[[Inventory, EnergyWindow], None]] = []
        self._holders: OrderedDict[str, EnergyHolder] = OrderedDict()
        # By namespace and name; a cluster's, where there is one, says more.
        self.user_of_pod: Callable[[str, str], str] = lambda _namespace, _pod: ""

    async def run(self) -> None:
        """Open the ledger and write what comes, until cancelled; what waits then is written, too."""
        forget_s = self._clock.monotonic_s() + _FORGET_S
        try:
            while True:
                if self._store is None and not await self._open_store():
                    await asyncio.sleep(_AGAIN_S)
                    continue
                await self._wake.wait()
                await asyncio.sleep(_BATCH_S)
                await self._flush()
                if self._clock.monotonic_s() >= forget_s:
                    forget_s = self._clock.monotonic_s() + _FORGET_S
                    await self._prune_store()
        finally:
            if self._store is not None:
                await self._write()
                await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
            self._thread.shutdown(wait=False)
            self._readers.shutdown(wait=False)

    async def _open_store(self) -> bool:
        def begin() -> tuple[LedgerStore, _Found]:
            store = self._open()
            try:
                return store, _Found(
                    store.last_windows(),
                    store.last_window_ends(),
                    store.recent_holders(_SPECS_MOST),
                    store.last_work_ends(),
                    store.used_bytes(),
                )
            except BaseException:
                store.close()
                raise

        opening = asyncio.get_running_loop().run_in_executor(self._thread, begin)
        try:
            store, found = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The stop came while it was being opened.
            with suppress(LedgerError):
                store, _ = await opening
                await asyncio.get_running_loop().run_in_executor(self._thread, store.close)
            raise
        except LedgerError as error:
            self._on_failure(error)
            return False
        self._store, self._newest, self._taken = store, found.newest, dict(found.newest)
        self._until_s = found.until_s
        if store.healed:
            self._log.warning("ledger=healed %s", store.healed)
        if store.losses:
            self.failures += 1
            self._log.error("ledger=damaged lost=%s", store.losses[0])
        if store.dropped:
            self.failures += 1
            self._log.error("ledger=damaged records=%d action=dropped", store.dropped)
        self._worked_s = found.worked_s
        self.used_bytes = found.used_bytes
        # Which Ray job an owner is of is told with each owner, and the newest of a workload need not be of the next.
        self._holders.update(
            (one.workload, one._replace(labels=tuple(pair for pair in one.labels if pair[0] != RAY_JOB_LABEL)))
            for one in found.holders
        )
        self.fault = ""
        return True

    def _on_failure(self, error: LedgerError) -> None:
        self.failures += 1
        if self.fault != str(error):
            self._log.error("ledger=failed error=%s", error)
        self.fault = str(error)

    def add_window(self, inventory: Inventory, window: EnergyWindow, acknowledge: Acknowledge) -> None:
        """A window of a node; `acknowledge` is called when it is on disk. One that finds no room comes again."""
        node = inventory.node_name
        self.windows += 1
        incarnation, number = self._taken.get(node, (0, 0))
        if incarnation == window.incarnation and window.number <= number:
            self.again += 1
            self._was_repeated(node, window, acknowledge)
            return
        allowance = self._allowance(node)
        if not self._has_room(node, window, allowance):
            self.dropped += 1
            return
        now_s = self._clock.now_ns() / 1e9
        boards = self._find_boards(inventory)
        verdict = judge_window(window, boards.watts, allowance, now_s=now_s)
        if verdict.reason:
            self._log_refusal(node, window.number, verdict.reason)
        if window.number > NUMBER_MOST:
            # No record of it could be kept, and it says nothing of those that come.
            reason = verdict.reason[:_REASON_LONGEST]
            acknowledge(
                EnergyAcknowledgement(
                    incarnation=window.incarnation, number=window.number, refused=1, refused_reason=reason
                )
            )
            return
        batch = self._batch
        part = batch.parts.setdefault(node, NodeEntries())
        self._taken[node] = (window.incarnation, window.number)
        until_s = min(window.end_ns / 1e9, now_s + AHEAD_S_MOST)
        part.newest = LastWindow(node, window.incarnation, window.number, until_s)
        batch.told[node] = acknowledge
        batch.count_window(node)
        self._wake.set()
        if verdict.reason:
            batch.refuse(node, verdict.reason)
            return
        allowance.board_s -= verdict.board_s
        allowance.pieces -= count_pieces(window)
        self.unplaced += not verdict.is_placed
        batch.end_ns = max(batch.end_ns, window.end_ns if verdict.is_placed else int(now_s * 1e9))
        unknown = LedgerPlace(node, inventory.pool, "")
        places = {device.gpu_uuid: boards.places.get(device.gpu_uuid, unknown) for device in window.devices}
        made = spread_window(window, places, self._holder, self._tariff(), came_s=None if verdict.is_placed else now_s)
        part.entries += made.entries
        part.measured += made.measured
        batch.pieces += len(made.entries)
        if self.window_listeners and verdict.is_placed:
            batch.kept.setdefault(node, []).append((inventory, window))

    def _allowance(self, node: str) -> ClaimAllowance:
        """What a node may still claim, as of now."""
        now_s, known = self._clock.monotonic_s(), self._allowances.get(node)
        if known is None:
            until_s = self._until_s.get(node)
            passed_s = PAST_S_MOST if until_s is None else self._clock.now_ns() / 1e9 - until_s
            known = self._allowances[node] = ClaimAllowance(now_s, board_s=min(max(0.0, passed_s), PAST_S_MOST))
        known.advance(now_s)
        return known

    def _find_boards(self, inventory: Inventory) -> "_NodeBoards":
        """What follows from a node's inventory; kept as long as it has that one."""
        node, known = inventory.node_name, self._boards.get(inventory.node_name)
        if known is None or known.inventory is not inventory:
            watts, places = dict[str, float](), dict[str, LedgerPlace]()
            for gpu in inventory.gpus:
                places[gpu.uuid] = LedgerPlace(node, inventory.pool, gpu.catalogue_key)
                product = self._products.get(gpu.catalogue_key)
                if product is not None:
                    watts[gpu.uuid] = min(BOARD_W_MOST, product.power_max_w or product.power_default_w)
            known = self._boards[node] = _NodeBoards(inventory, watts, places)
        return known

    def _log_refusal(self, node: str, number: int, reason: str) -> None:
        """One line of a node in a while: it may refuse as many windows as it likes."""
        self.refused += 1
        now_s = self._clock.monotonic_s()
        logged_s, more = self._refusals.get(node, (-_REFUSAL_LOGGED_S, 0))
        if now_s - logged_s < _REFUSAL_LOGGED_S:
            self._refusals[node] = (logged_s, more + 1)
            return
        self._refusals[node] = (now_s, 0)
        self._log.error("node=%s window=%d ledger=refused more=%d reason=%s", node, number, more, reason)

    def _has_room(self, node: str, window: EnergyWindow, allowance: ClaimAllowance) -> bool:
        """Whether a window is taken now; see the module for those that come after one that was not."""
        away = self._turned_away.get(node)
        is_later = away is not None and away[0] == window.incarnation and window.number > away[1]
        of_node = self._batch.many[node] + self._writing.many[node]
        is_full = (
            self.waiting >= _WAITING_MOST
            or of_node >= _NODE_WAITING_MOST
            or self._batch.pieces + self._writing.pieces >= _PIECES_WAITING_MOST
            or allowance.pieces < count_pieces(window)
        )
        if is_later or self._store is None or is_full:
            self._turned_away[node] = (window.incarnation, window.number)
            return False
        self._turned_away.pop(node, None)
        return True

    @property
    def waiting(self) -> int:
        """Windows that are not on disk yet."""
        return self._batch.windows + self._writing.windows

    def _tariff(self) -> EnergyTariff | None:
        """The policy's prices, made into a tariff once."""
        prices = self._core().state.policy.prices
        if self._prices[0] is not prices:
            self._prices = (prices, policy_tariff(prices))
        return self._prices[1]

    def add_work(self, increments: Iterable[WorkInterval]) -> None:
        """What workloads have done in stretches of time; what finds no room is lost."""
        now_s = self._clock.now_ns() / 1e9
        for one in increments:
            if self._store is None or len(self._batch.worked) >= _WORK_MOST:
                return
            if not now_s - PAST_S_MOST <= one.end_s <= now_s + AHEAD_S_MOST:
                # Counted by a clock that is not ours any more.
                one = one._replace(begin_s=now_s, end_s=now_s)  # noqa: PLW2901
            key = (one.workload, one.unit)
            made = spread_work(one, self._worked_s.get(key))
            if made:
                self._worked_s[key] = made[-1].until_s
                self._batch.worked += made
        if self._batch.worked:
            self._wake.set()

    def _was_repeated(self, node: str, window: EnergyWindow, acknowledge: Acknowledge) -> None:
        """A window that is here already: told now if it is on disk, else when it is."""
        for batch in (self._batch, self._writing):
            if node in batch.told:
                batch.told[node] = acknowledge
        incarnation, number = self._newest.get(node, (0, 0))
        if incarnation == window.incarnation and window.number <= number:
            acknowledge(EnergyAcknowledgement(incarnation=incarnation, number=number))

    def _holder(self, owner: EnergyOwner) -> EnergyHolder:
        """The holder, and where nothing else says its user, what its pod says."""
        found = self._held(owner)
        return (
            found._replace(user=self.user_of_pod(owner.namespace, owner.pod)) if owner.pod and not found.user else found
        )

    def _held(self, owner: EnergyOwner) -> EnergyHolder:
        """With what is known of its workload, also when that has ended and left since."""
        if not owner.workload:
            return resolve_holder(owner, None)
        workload = self._core().state.workloads.get(owner.workload)
        if workload is not None:
            found = resolve_holder(owner, workload.spec)
            # Without the Ray job, which is of this owner alone.
            plain = resolve_holder(replace(owner, ray_job=""), workload.spec) if owner.ray_job else found
            self._holders[owner.workload] = plain
            self._holders.move_to_end(owner.workload)
            if len(self._holders) > _SPECS_MOST:
                self._holders.popitem(last=False)
            return found
        plain, known = resolve_holder(owner, None), self._holders.get(owner.workload)
        if known is None:
            return plain
        return plain._replace(
            namespace=plain.namespace or known.namespace,
            title=known.title,
            user=plain.user or known.user,
            queue=known.queue,
            labels=label_ray_job(known.labels, owner),
        )

    async def _flush(self) -> None:
        """What has come goes to the disk in one transaction; where that fails it waits for the next."""
        self._wake.clear()
        writing = asyncio.ensure_future(self._write())
        try:
            is_written = await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The stop came while the disk was at work: what came later must not be written without this.
            await writing
            raise
        if not is_written:
            await asyncio.sleep(_AGAIN_S)
            self._wake.set()

    async def _write(self) -> bool:
        """Writes what waits; False where that failed, and it waits on."""
        if self._doubtful is not None and not await self._settle(self._doubtful):
            return False
        batch, self._batch = self._batch, _Batch()
        if not batch.parts and not batch.worked:
            return True
        store, self._writing = self._store, batch
        assert store is not None
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(
                self._thread, _written, store, batch, self._now_s()
            )
        except LedgerInDoubt as error:
            self._on_failure(error)
            self._doubtful = batch
            return False
        except LedgerError as error:
            self._on_failure(error)
            self._put_back(batch)
            return False
        return self._on_written(batch, outcome)

    async def _settle(self, batch: _Batch) -> bool:
        """Finds out whether a batch is on disk; False where nobody can tell yet."""
        assert self._store is not None
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(self._thread, self._store.settle)
        except LedgerError as error:
            self._on_failure(error)
            return False
        self._doubtful = None
        if outcome is None:
            self._put_back(batch)
        else:
            self._on_written(batch, outcome)
        return True

    def _put_back(self, batch: _Batch) -> None:
        """A batch that is not on disk waits for the next transaction."""
        self._batch, self._writing = batch.then(self._batch), _Batch()

    def _on_written(self, batch: _Batch, outcome: WriteOutcome) -> bool:
        """A batch is on disk, but for some nodes; whether it is for all."""
        self.fault, self._writing = "", _Batch()
        for node, reason in outcome.refused.items():
            self._log_refusal(node or "-", batch.parts[node].newest.number if node else 0, reason)  # type: ignore[union-attr]
            batch.refuse(node, reason, batch.many[node])
        if outcome.failed:
            # Rows that these nodes add to are damaged: others are on disk, and these are tried again.
            reason = next(iter(outcome.failed.values()))
            assert self._store is not None
            self._on_failure(LedgerError(self._store.path, reason, "see docs/how-to/runbooks/EelgridLedgerFailing.md"))
            self._batch = batch.only(outcome.failed).then(self._batch)
        self._confirm(batch, outcome)
        return not outcome.failed

    def _confirm(self, batch: _Batch, outcome: WriteOutcome) -> None:
        """Tells agents what is on disk, and what is in no sum."""
        now_ns = self._clock.now_ns()
        if batch.end_ns:
            # A clock of ours that was ahead must not hide that nothing comes any more.
            before_ns = self.newest_ns if self.newest_ns is not None and self.newest_ns <= now_ns else 0
            self.newest_ns = max(before_ns, min(batch.end_ns, now_ns + int(AHEAD_S_MOST * 1e9)))
        for node, part in batch.parts.items():
            if part.newest is None or node in outcome.failed:
                continue
            self._newest[node] = (part.newest.incarnation, part.newest.number)
            for inventory, window in () if node in outcome.refused else batch.kept.get(node, ()):
                for listener in self.window_listeners:
                    listener(inventory, window)
            refused, reason = batch.refused.get(node, (0, ""))
            batch.told[node](
                EnergyAcknowledgement(
                    incarnation=part.newest.incarnation,
                    number=part.newest.number,
                    refused=refused,
                    refused_reason=reason,
                )
            )

    def joules_by_namespace(self) -> Mapping[str, float]:
        """Joules since the ledger began, by the names of their counters: what no namespace has is in parentheses.

        Of what is on disk, so that it goes on after a restart. Cheap; empty until the ledger is open.
        """
        store = self._store
        counters_mj = {} if store is None else store.namespaces.counters_mj()
        return {name: energy_mj / 1000.0 for name, energy_mj in counters_mj.items()}

    async def _prune_store(self) -> None:
        store, now_s, bytes_most = self._store, self._now_s(), self.bytes_most
        if store is None:
            return

        def forget() -> tuple[int, int, int]:
            store.scrub()
            by_age, by_size = store.prune_rows(now_s=store.witnessed_s(now_s)), 0
            for _ in range(_SHRUNK_ONCE):
                gone = store.shrink(now_s=now_s, bytes_most=bytes_most)
                by_size += gone
                if not gone:
                    break
            return by_age, by_size, store.used_bytes()

        try:
            by_age, by_size, self.used_bytes = await asyncio.get_running_loop().run_in_executor(self._thread, forget)
        except LedgerError as error:
            self._on_failure(error)
            return
        self.forgotten = {"age": self.forgotten["age"] + by_age, "size": self.forgotten["size"] + by_size}
        if store.damage != self._damage:
            self._damage = store.damage
            self._log.error("ledger=damaged parts=%d action=left_out_of_answers", self.damaged_parts)
        if by_size:
            self._log.error("ledger=full bytes_most=%d rows_forgotten=%d", bytes_most, by_size)

    @property
    def damaged_parts(self) -> int:
        """Hours and days of nodes, and names, that are not as they were written, as far as anybody looked."""
        if self._store is None:
            return 0
        return sum(map(len, self._store.damage)) + len(self._store.losses)

    def _now_s(self) -> int:
        return int(self._clock.now_ns() / 1e9)

    async def _done(self, thread: ThreadPoolExecutor, call: Callable[[LedgerStore], _T]) -> _T:
        """What the store answers; raises Unavailable, and faults of the call."""
        store = self._store
        if store is None:
            raise Unavailable(f"the energy ledger cannot be read: {self.fault or 'it is being opened'}; ask again")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, call, store)
        except LedgerError as error:
            raise Unavailable(str(error)) from error

    async def query(self, asked: Sequence[LedgerQuery]) -> list[LedgerAnswer]:
        """Answers of what is on disk to questions of one stretch with the same filters. Raises Unavailable."""
        try:
            return await self._done(self._readers, lambda store: store.query_all(asked))
        except Unavailable:
            if self._store is None or not self._store.index_is_damaged:
                raise
            self._log.error("ledger=damaged what=index action=made_anew")
            self.failures += 1
            await self._done(self._thread, lambda store: store.mend_indexes())
            return await self._done(self._readers, lambda store: store.query_all(asked))

    async def settled_s(self) -> int:
        """Until when hours are settled. Raises Unavailable."""
        return await self._done(self._readers, lambda store: store.settled_s(self._now_s()))

    async def begun_s(self) -> int | None:
        """The oldest hour, None without any. Raises Unavailable."""
        return await self._done(self._readers, lambda store: store.begun_s())

    async def confirm(self, export: ExportClaim) -> Exporter:
        """The mark as it is then. Raises FailedPrecondition, ResourceExhausted and Unavailable."""
        await self._done(self._thread, lambda store: store.confirm(export, now_s=self._now_s()))
        return self.exporters[export.name]

    async def remove_exporter(self, name: str) -> None:
        """Rows that he does not have go by their age again. Raises NotFound and Unavailable."""
        await self._done(self._thread, lambda store: store.remove_exporter(name))

    @property
    def exporters(self) -> Mapping[str, Exporter]:
        """Marks by name, of what is on disk; empty until the ledger is open."""
        store = self._store
        return {} if store is None else store.marks.exporters


def _written(store: LedgerStore, batch: _Batch, now_s: int) -> WriteOutcome:
    """Writes a batch in one transaction, or each node's part by itself where that cannot be. Raises LedgerError."""
    parts = batch.parts.values()
    try:
        store.add(
            [one for part in parts for one in part.entries],
            [one for part in parts for one in part.measured],
            [part.newest for part in parts if part.newest is not None],
            batch.worked,
            now_s=now_s,
        )
    except LedgerRefused:
        return store.add_each(batch.parts, batch.worked, now_s=now_s)
    return WriteOutcome({}, {})
