"""Messages that the contract allows and nobody sends: every number at its bounds, every text as long as may be.

Owns how such values are drawn, from the contract's own rules, so that a bound that is tightened is drawn from at once;
and a rogue agent that says them in the name of a node of its own. What it says may cost that node, and nobody else.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import (
    Assignment,
    ConnectRequest,
    ConnectResponse,
    Gpu,
    HeldAssignments,
    HeldDevices,
    Hello,
    Inventory,
    NodeEvent,
    PlanApplied,
    SampleBatch,
    Welcome,
    WorkloadSpec,
)
from eelgrid_protos.quantities import Range, Text
from eelgrid_protos.schema import ValueShape, fields_of
from tests.sim.clock import seconds
from tests.sim.network import AGENT, Network
from tests.sim.timeline import Timeline

__all__ = ["ROGUE", "Rogue", "extreme_spec"]

# How the names of rogue nodes begin.
ROGUE = "rogue"
_TRIES = 40
_ELEMENTS_MOST = 6
# A name as long as may be, and letters that are not ASCII where a rule lets them in.
_LETTERS = ("a", "é", "\u202e", "=", "0")


def _text(rng: random.Random, rule: Text | None) -> str:
    if rule is None:
        return rng.choice(_LETTERS)
    letter = "a" if rule.pattern is not None and rng.random() < 0.8 else rng.choice(_LETTERS)
    return letter * rng.choice((int(rule.required), 1, rule.longest))


def _value(rng: random.Random, shape: ValueShape, depth: int) -> Any:
    match shape.kind:
        case "int" | "float":
            low, high = (shape.rule.low, shape.rule.high) if isinstance(shape.rule, Range) else (0, 1)
            drawn = rng.choice((low, high, low + (high - low) / 2, min(high, max(low, 1))))
            return int(drawn) if shape.kind == "int" else float(drawn)
        case "str":
            return _text(rng, shape.rule if isinstance(shape.rule, Text) else None)
        case "bool":
            return rng.random() < 0.5
        case "enum":
            return rng.choice(list(shape.type))
        case "message":
            return _message(rng, shape.type, depth + 1)
        case "choice":
            return _message(rng, rng.choice(shape.choices), depth + 1)
        case "many":
            assert shape.item is not None
            count = 0 if depth > 2 else rng.choice((0, 1, _ELEMENTS_MOST))
            return tuple(_value(rng, shape.item, depth + 1) for _ in range(count))
        case _:
            return {}


def _message(rng: random.Random, cls: Any, depth: int = 0) -> Any:
    """One of its class; a field in three is left as it would be."""
    drawn = {}
    for field in fields_of(cls):
        if field.required or (rng.random() < 0.66 and not (field.optional and depth > 3)):
            drawn[field.name] = _value(rng, field.shape, depth)
    return cls(**drawn)


def _legal(rng: random.Random, make: Callable[[], Any], wrap: Callable[[Any], Any]) -> Any | None:
    """The first that the contract takes; None where luck was out."""
    for _ in range(_TRIES):
        try:
            made = make()
            encode_message(wrap(made))
        except (ContractError, ValueError, TypeError):
            continue
        return made
    return None


def extreme_spec(rng: random.Random, plain: WorkloadSpec, wrap: Callable[[WorkloadSpec], Any]) -> WorkloadSpec:
    """A workload's spec with some fields at their bounds; it asks for few replicas, since many only take time."""

    def make() -> WorkloadSpec:
        drawn = _message(rng, WorkloadSpec)
        names = [field.name for field in fields_of(WorkloadSpec)]
        chosen = rng.sample(names, rng.randint(1, 4))
        spec = replace(plain, **{name: getattr(drawn, name) for name in chosen})
        return replace(spec, replicas=rng.choice((1, 2, 40)) if rng.random() < 0.95 else 5000)

    return _legal(rng, make, wrap) or plain


class Rogue:
    """One stream of an agent that says what is allowed and senseless; ends by itself."""

    def __init__(self, timeline: Timeline, network: Network, number: int) -> None:
        self._timeline = timeline
        self._rng = timeline.rng
        self.name = f"{ROGUE}-{number % 2}"
        self._left = self._rng.randint(0, 12)
        self._is_over = False
        self._connection = network.connect(self.name, self)
        self._inventory = self._an_inventory()
        epoch = self._rng.choice((0, 1, 2**31, 2**48, 2**53 - 1))
        self._send(
            Hello(
                incarnation=self._rng.choice((0, 1, 2**63, 2**64 - 1)),
                inventory=self._inventory,
                plan_epoch=epoch,
                held=self._rng.choice((None, HeldAssignments(), self._claim())),
            )
        )

    def received(self, data: bytes) -> None:
        """Whatever comes, it goes on once it is welcome."""
        if isinstance(decode_message(ConnectResponse, data).message, Welcome):
            self._go_on()

    def closed(self, reason: str) -> None:
        """The controller has had enough."""
        self._is_over = True
        self._timeline.note(f"rogue {self.name} was put out: {reason}")

    def _go_on(self) -> None:
        if self._is_over:
            return
        if self._left <= 0:
            self._is_over = True
            self._connection.close(AGENT, "the rogue left")
            return
        self._left -= 1
        kind = self._rng.choice((SampleBatch, NodeEvent, PlanApplied, HeldDevices, Inventory))
        message = (
            self._an_inventory()
            if kind is Inventory
            else _legal(self._rng, lambda: _message(self._rng, kind), lambda made: ConnectRequest(message=made))
        )
        if message is not None:
            self._send(message)
        self._timeline.after(self._timeline.draw_ns(seconds(0.5)), self._go_on)

    def _send(self, message: Any) -> None:
        try:
            data = encode_message(ConnectRequest(message=message))
        except ContractError:
            return
        self._connection.send(AGENT, data)

    def _claim(self) -> HeldAssignments:
        """That it holds everybody's work."""
        return HeldAssignments(
            assignments=tuple(
                Assignment(workload_id=f"mine-{number}", replica=0, gpu_uuids=(f"GPU-{number}",), gpu_milli=1000)
                for number in range(self._rng.choice((1, 40)))
            )
        )

    def _an_inventory(self) -> Inventory:
        def make() -> Inventory:
            drawn = _message(self._rng, Inventory)
            count = self._rng.choice((0, 1, 64))
            gpu = _legal(
                self._rng, lambda: _message(self._rng, Gpu), lambda made: ConnectRequest(message=with_gpu(made))
            )
            gpus = tuple(
                replace(gpu, uuid=f"GPU-{self.name}-{index}", index=index) for index in range(count if gpu else 0)
            )
            return replace(drawn, node_name=self.name, gpus=gpus, links=())

        def with_gpu(gpu: Gpu) -> Inventory:
            return replace(plain, gpus=(gpu,))

        plain = Inventory(node_name=self.name, cpu_milli=1, memory_bytes=0)
        return _legal(self._rng, make, lambda made: ConnectRequest(message=made)) or plain
