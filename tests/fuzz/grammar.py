"""Messages from the rules of the contract: sound shapes, with the values at the edges of what is allowed.

Owns what is drawn. Must not know who sends it. One seed draws the same messages each time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from eelgrid_protos.messages import (
    READING_RANGES,
    AttributionConfidence,
    AttributionMethod,
    Column,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    OwnerKind,
    Policy,
    SampleBatch,
    WindowDevice,
    WindowShare,
)
from eelgrid_protos.quantities import Many, Range, Text
from eelgrid_protos.schema import ValueShape, fields_of, is_valid_message

__all__ = ["Grammar"]

_TRIES = 60
# Boundaries that arithmetic is wrong at.
_EDGES = (0, 1, 2, 7, 8, 63, 64, 65, 127, 255, 256, 999, 1000, 1001, 4095, 4096, 4097, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
_WORDS = (
    "",
    "a",
    "0",
    "-",
    ".",
    "../../etc/passwd",
    "=1+1",
    "@x",
    "+x",
    "-x",
    "'; DROP TABLE events; --",
    "{node}",
    "{{",
    "%s",
    "null",
    "None",
    "é",
    "ﬀ",
    "𝒳" * 8,
    "名前",
    "\u202egnp.exe",
    "\u200b",
    "a\u0301" * 4,
    "<script>alert(1)</script>",
    "*",
    "default",
    "_",
    "a/b",
    "a.b",
    "A" * 64,
)
_NAMES = (
    "a",
    "0",
    "A-b",
    "a.b",
    "a/b",
    "x" * 63,
    "x" * 64,
    "x" * 128,
    "x" * 253,
    "w-0",
    "w-1",
    "w-999999999999999999",
    "w-9223372036854775807",
    "job/a",
    "kube-system",
)
# Nothing listens there, and nothing outside of this machine is ever asked.
_URLS = ("http://127.0.0.1:9/metrics", "http://127.0.0.1:9/" + "p" * 1900, "https://127.0.0.1:9/{replica}")
_NS = 10**9


@dataclass
class Grammar:
    """Draws messages; `known` are names of things that are there, so that calls hit something."""

    rng: random.Random
    known: dict[str, list[str]] = field(default_factory=dict)
    now_ns: int = 1_700_000_000 * _NS

    def message(self, cls: Any) -> Any:
        """A message of a class that obeys every rule; None where none was found."""
        made = {SampleBatch: self._batch, EnergyWindow: self._window, Policy: self._policy}.get(cls)
        for attempt in range(_TRIES):
            drawn = (
                made() if made is not None and (cls is Policy or self.rng.random() < 0.8) else self._draw(cls, attempt)
            )
            if drawn is not None and is_valid_message(drawn):
                return drawn
        return None

    def _draw(self, cls: Any, attempt: int) -> Any:
        values: dict[str, Any] = {}
        for entry in fields_of(cls):
            # The more tries fail, the plainer the message: what is optional is left at its default.
            plain = not entry.required and self.rng.random() < 0.25 + attempt / _TRIES
            if plain:
                continue
            if entry.optional and self.rng.random() < 0.3:
                values[entry.name] = None
                continue
            values[entry.name] = self._value(entry.name, entry.shape)
            if values[entry.name] is None and not entry.optional:
                return None
        return cls(**values)

    def _value(self, name: str, shape: ValueShape) -> Any:
        match shape.kind:
            case "bool":
                return self.rng.random() < 0.5
            case "int":
                return self._int(name, shape.rule)
            case "float":
                return self._float(shape.rule)
            case "str":
                return self._text(name, shape.rule)
            case "enum":
                return self.rng.choice(list(shape.type))
            case "message":
                return self.message(shape.type)
            case "choice":
                return self.message(self.rng.choice(shape.choices))
            case "many":
                assert shape.item is not None
                values = [self._value(name, shape.item) for _ in range(self._count(shape.rule))]
                return tuple(value for value in values if value is not None)
            case "bytes":
                most = shape.rule.most if isinstance(shape.rule, Many) else 3
                return self.rng.randbytes(self.rng.choice((0, 1, most, most + 1)))
            case _:
                assert shape.item is not None
                assert shape.key is not None
                return {
                    self._value("key", shape.key): self._value("value", shape.item)
                    for _ in range(self._count(shape.rule))
                }

    def _count(self, rule: Any) -> int:
        most = rule.most if isinstance(rule, Many) else 3
        # Long lists of long lists take seconds to draw and say nothing more.
        return min(
            most, self.rng.choice((8, 64, 65)) if self.rng.random() < 0.04 else self.rng.choice((0, 1, 1, 1, 2, 2, 3))
        )

    def _int(self, name: str, rule: Any) -> int:
        low, high = (int(rule.low), int(rule.high)) if isinstance(rule, Range) else (0, 2**31)
        if name.endswith("_ns") and self.rng.random() < 0.5:
            return min(high, max(low, self.now_ns + self.rng.choice((0, -1, 1, -3600, 3600, 10**7, -(10**7))) * _NS))
        edges = [low, low + 1, high - 1, high, *(edge for edge in _EDGES if low <= edge <= high)]
        drawn = self.rng.choice(edges) if self.rng.random() < 0.6 else self.rng.randint(low, min(high, low + 1000))
        return min(high, max(low, drawn))

    def _float(self, rule: Any) -> float:
        low, high = (rule.low, rule.high) if isinstance(rule, Range) else (0.0, 1.0)
        edges = (
            low,
            high,
            0.0,
            -0.0,
            1.0,
            5e-324,
            1e-9,
            0.1,
            60.0,
            1000.0,
            high / 2,
            high * (1 - 1e-12),
            (low + high) / 2,
        )
        drawn = self.rng.choice(edges) if self.rng.random() < 0.7 else self.rng.uniform(low, min(high, low + 1000.0))
        return min(high, max(low, drawn))

    def _text(self, name: str, rule: Any) -> str:
        if name == "url":
            return self.rng.choice(_URLS)
        assert isinstance(rule, Text)
        known = self.known.get(name, ())
        if known and self.rng.random() < 0.6:
            drawn = self.rng.choice(list(known))
        else:
            drawn = self.rng.choice(self._words(rule))
        return drawn[: rule.longest]

    def _words(self, rule: Text) -> Sequence[str]:
        longest = min(rule.longest, 2000)
        drawn = (*_WORDS, *_NAMES, "m" * longest, "é" * longest, "𝒳" * longest, "a b" * (longest // 3))
        sound = [
            word
            for word in drawn
            if len(word) <= rule.longest
            and (word or not rule.required)
            and (not word or rule.pattern is None or rule.pattern.fullmatch(word))
        ]
        return sound or ["a"]

    # Messages whose parts must agree

    def _batch(self) -> SampleBatch:
        ticks, gpus = self.rng.choice((1, 2, 5, 60)), self.rng.choice((0, 1, 2, 2, 2, 64))
        readings = self.rng.sample(list(READING_RANGES), self.rng.randint(0, 6))
        columns = tuple(Column(reading=one, values=self._cells(READING_RANGES[one], ticks * gpus)) for one in readings)
        return SampleBatch(
            sequence=self._int("sequence", Range(1, 2**64 - 1)),
            inventory_generation=self.rng.choice((0, 1, 1, 1, 2, 2**32 - 1)),
            time_ns=tuple(sorted(self._int("time_ns", Range(0, 2**63 - 1)) for _ in range(ticks))),
            gpu_columns=columns,
            dropped_ticks=self._int("dropped_ticks", Range(0, 2**64 - 1)),
        )

    def _cells(self, bounds: Range, count: int) -> tuple[float, ...]:
        return tuple(
            self.rng.choice((bounds.low, bounds.high, bounds.high / 2, max(0.0, bounds.low))) for _ in range(count)
        )

    def _window(self) -> EnergyWindow:
        begin = self._int("begin_ns", Range(0, 2**63 - 1))
        last = self.rng.choice((0, 1, 60 * _NS, 3600 * _NS, 2**62))
        owners = tuple(
            replace(self._draw(EnergyOwner, 0), kind=self.rng.choice(list(OwnerKind)))
            for _ in range(self._count(Many(8)) or 1)
        )
        devices, shares = [], []
        for number in range(self.rng.choice((0, 1, 2, 2, 8))):
            parts = [
                self._int("energy_mj", Range(0, self.rng.choice((1000, 10**6, 10**12, 2**60))))
                for _ in range(self.rng.randint(0, 3))
            ]
            shares += [
                WindowShare(
                    device=number,
                    owner=self.rng.randrange(len(owners)),
                    part=self.rng.choice(list(EnergyPart)),
                    energy_mj=part,
                    method=self.rng.choice(list(AttributionMethod)),
                    confidence=self.rng.choice(list(AttributionConfidence)),
                )
                for part in parts
            ]
            uuid = self._text(
                "gpu_uuid", next(entry.shape.rule for entry in fields_of(WindowDevice) if entry.name == "gpu_uuid")
            )
            devices.append(
                WindowDevice(
                    gpu_uuid=uuid,
                    total_mj=sum(parts),
                    uncertainty_mj=self._int("uncertainty_mj", Range(0, 2**64 - 1)),
                    uncounted_s=self._float(Range(0.0, 1e9)),
                )
            )
        return EnergyWindow(
            incarnation=self.rng.choice((1, 2, 2**64 - 1)),
            number=self._int("number", Range(0, 2**64 - 1)),
            begin_ns=begin,
            end_ns=min(2**63 - 1, begin + last),
            devices=tuple(devices),
            owners=owners,
            shares=tuple(shares),
        )

    def _policy(self) -> Policy:
        """One that keeps the honest part of the cluster as it is: an admin may turn everything, which is no finding."""
        drawn = self._draw(Policy, _TRIES // 2)
        calm = Policy()
        kept = {
            entry.name: getattr(calm, entry.name)
            for entry in fields(Policy)
            if entry.name in ("objective", "weights", "placement", "lease_s")
        }
        return replace(
            drawn,
            **kept,
            send_interval_s=5.0,
            sample_interval_s=1.0,
            budgets=(),
            revision=self.rng.choice((0, 1, 2, 3)),
        )
