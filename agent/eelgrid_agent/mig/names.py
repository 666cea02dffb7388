"""How boards and MIG devices are named in files and by people: PCI ids and names such as 1c.3g.20gb+me.

A name is a claim about slices and memory, and which profile of which part it
means is for others to find; this module only takes names apart and puts them
together again.
"""

import re
from dataclasses import dataclass, replace

__all__ = ["MigName", "PciId"]

_NAME = re.compile(r"(?:([0-9]{1,2})c\.)?([0-9]{1,2})g\.([0-9]{1,4})gb(?:([+-])([A-Za-z][A-Za-z0-9.,]*))?")
_PCI_ID = re.compile(r"(0[xX][0-9A-Fa-f]{1,8}|[0-9]{1,10})")
_PACKED_MOST = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class PciId:
    """What kind of board a device is; without a subsystem it stands for every board of one chip."""

    device: int
    vendor: int
    subsystem: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> "PciId | None":
        """The id in 0x20B210DE or 0x20B210DE:0x14A910DE, None if it is none."""
        parts = text.split(":")
        if len(parts) > 2 or not all(_PCI_ID.fullmatch(part) for part in parts):
            return None
        packed = [int(part, 0) if part[:2].lower() == "0x" else int(part) for part in parts]
        if max(packed) > _PACKED_MOST:
            return None
        (chip, *board) = [(number >> 16, number & 0xFFFF) for number in packed]
        return cls(*chip, subsystem=board[0] if board else None)

    def matches(self, board: "PciId") -> bool:
        """Whether a device is of the kind that this filter lets through."""
        return (self.device, self.vendor) == (board.device, board.vendor) and self.subsystem in (None, board.subsystem)

    def __str__(self) -> str:
        text = f"0x{self.device:04X}{self.vendor:04X}"
        return text if self.subsystem is None else f"{text}:0x{self.subsystem[0]:04X}{self.subsystem[1]:04X}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigName:
    """A MIG device's name, taken apart: `compute` slices of an instance of `slices` slices and a memory size.

    `extras` are what stands after + and `lacks` what stands after -, each in order.
    """

    compute: int
    slices: int
    memory_gb: int
    extras: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "MigName | None":
        """The name in 1g.5gb, 1c.3g.20gb, 1g.5gb+me or 1g.24gb-me; None if it is none."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        compute, slices, memory, sign, listed = match.groups()
        names = tuple(sorted((listed or "").split(","))) if listed else ()
        if len(set(names)) < len(names) or any(
            not name or name[0] in ".0123456789" or name[-1] == "." for name in names
        ):
            return None
        name = cls(
            compute=int(compute or slices), slices=int(slices), memory_gb=int(memory),
            extras=names if sign == "+" else (), lacks=names if sign == "-" else (),
        )  # fmt: skip
        return name if 1 <= name.compute <= name.slices else None

    @property
    def instance(self) -> "MigName":
        """The name of the whole GPU instance that this lies in."""
        return self.part(self.slices)

    def part(self, compute: int) -> "MigName":
        """The name of a share of so many slices of the same GPU instance."""
        return replace(self, compute=compute)

    def __str__(self) -> str:
        part = "" if self.compute == self.slices else f"{self.compute}c."
        sign = "+" if self.extras else "-" if self.lacks else ""
        return f"{part}{self.slices}g.{self.memory_gb}gb{sign}{','.join(self.extras or self.lacks)}"
