"""The configuration file of NVIDIA's mig-parted: parsed, checked and written.

    version: v1
    mig-configs:
      all-balanced:
        - device-filter: ["0x20B210DE"]      # PCI device and vendor, and perhaps those of the board after a colon
          devices: [0, 1]                    # or all
          mig-enabled: true
          mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}

What mig-parted takes is taken and means the same, with these differences:
whatever it would read and silently never match or misread (a filter that is no
PCI id, a negative device, a key twice, a count of 0) is refused or dropped
here, and a name may say the whole of an instance in both ways ("1c.1g.5gb" is
"1g.5gb"). It owns the format; it knows no device and no geometry.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from eelgrid_agent.enforce.mig.layout import MigName, PciId
from eelgrid_protos.errors import Violation
from eelgrid_protos.values import dataclass

MAX_FILE_BYTES = 256 * 1024
_CONFIGS_MOST = 1024
_ENTRIES_MOST = 256
_DEVICES_MOST = 256
_COUNT_MOST = 64
# Aliases and merges make a small file large.
_ITEMS_MOST = 100_000
_MERGES_DEEP = 4
_FIELDS = ("device-filter", "devices", "mig-enabled", "mig-devices")


class PartedFileError(ValueError):
    """The file breaks a rule; the violation names the line, the field and the remedy."""

    def __init__(self, source: str, line: int | None, field: str, problem: str, remedy: str) -> None:
        self.line = line
        self.violation = Violation(field, problem, remedy)
        super().__init__(f"{source}{f':{line}' if line else ''}: {self.violation}")


class PartedFileUnreadable(PartedFileError):
    """It is not valid YAML, or too large."""


class InvalidPartedField(PartedFileError):
    """A field is missing, unknown, there twice or of the wrong kind."""


class NoSuchConfig(PartedFileError):
    """The configuration that was asked for is not in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedEntry:
    """The layout of some devices: `devices` None means all, and no filter accepts every board."""

    devices: tuple[int, ...] | None
    mig_enabled: bool
    mig_devices: tuple[tuple[MigName, int], ...] = ()
    filters: tuple[PciId, ...] = ()
    # Where it stands in its file, to speak of it; no part of its value.
    place: str = field(default="", compare=False)

    def matches_index(self, index: int) -> bool:
        """Whether the device at this index is among `devices`; the board filter is separate."""
        return self.devices is None or index in self.devices

    def matches_board(self, board: PciId) -> bool:
        """Whether the filter accepts such a board."""
        return not self.filters or any(wanted.matches(board) for wanted in self.filters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedFile:
    """All configurations of a file, in its order."""

    configs: Mapping[str, tuple[PartedEntry, ...]]
    source: str = ""

    def get_config(self, name: str | None) -> tuple[str, tuple[PartedEntry, ...]]:
        """The configuration with this name, or the only one; raises NoSuchConfig."""
        names = ", ".join(list(self.configs)[:12]) + (", …" if len(self.configs) > 12 else "")
        if name is None:
            if len(self.configs) == 1:
                return next(iter(self.configs.items()))
            problem = f"holds {len(self.configs)} configurations" if self.configs else "holds no configuration"
            remedy = f"say which with --config: {names}" if self.configs else "add one under mig-configs"
            raise NoSuchConfig(self.source, None, "mig-configs", problem, remedy)
        if name not in self.configs:
            raise NoSuchConfig(self.source, None, "mig-configs", f"has no {name!r}", f"choose one of: {names}")
        return name, self.configs[name]


def parse_parted_file(text: str, source: str) -> PartedFile:
    """The configurations in the text of a file; raises PartedFileError. `source` is its name, for messages."""
    import yaml

    if len(text.encode("utf-8", "replace")) > MAX_FILE_BYTES:
        raise PartedFileUnreadable(
            source, None, "", f"is larger than {MAX_FILE_BYTES} bytes", "give a mig-parted configuration file"
        )
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise PartedFileUnreadable(
            source, line, "", f"is not valid YAML ({error.problem})", "correct it there"
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PartedFileUnreadable(source, None, "", f"is not valid YAML ({reason})", "correct it there") from None
    return _Reader(source).file(node)


class _Reader:
    """Takes YAML's nodes apart: unlike loaded values, they know their lines and show a key that is there twice."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._items_left = _ITEMS_MOST

    def bad(self, node: Any, field: str, problem: str, remedy: str) -> InvalidPartedField:
        line = None if node is None else node.start_mark.line + 1
        return InvalidPartedField(self._source, line, field, problem, remedy)

    def file(self, node: Any) -> PartedFile:
        top = self.mapping(node, "the file")
        if "version" not in top:
            raise self.bad(node, "version", "is missing", "write version: v1 at the top")
        version = self.text(top["version"], "version")
        if version != "v1":
            raise self.bad(top["version"], "version", f"is {version!r}", "write v1, the only version")
        self.only(top, "", ("version", "mig-configs"), node)
        configs: dict[str, tuple[PartedEntry, ...]] = {}
        if "mig-configs" in top:
            rows = self.mapping(top["mig-configs"], "mig-configs")
            if not 1 <= len(rows) <= _CONFIGS_MOST:
                remedy = f"name between 1 and {_CONFIGS_MOST} of them"
                raise self.bad(top["mig-configs"], "mig-configs", f"has {len(rows)} configurations", remedy)
            for name, row in rows.items():
                configs[name] = tuple(self.entries(row, f"mig-configs.{name}"))
        return PartedFile(configs=configs, source=self._source)

    def entries(self, node: Any, field: str) -> Iterator[PartedEntry]:
        rows = self.sequence(node, field)
        if not 1 <= len(rows) <= _ENTRIES_MOST:
            raise self.bad(node, field, f"has {len(rows)} entries", f"write between 1 and {_ENTRIES_MOST}")
        for number, row in enumerate(rows):
            yield self.entry(row, f"{field}[{number}]")

    def entry(self, node: Any, field: str) -> PartedEntry:
        rows = self.mapping(node, field)
        for name in ("devices", "mig-enabled"):
            if name not in rows:
                raise self.bad(node, f"{field}.{name}", "is missing", "add it: every entry needs it")
        self.only(rows, field, _FIELDS, node)
        enabled = self.truth(rows["mig-enabled"], f"{field}.mig-enabled")
        devices = self.mig_devices(rows["mig-devices"], f"{field}.mig-devices") if "mig-devices" in rows else None
        if enabled and devices is None:
            remedy = "add it; mig-devices: {} requests MIG without instances"
            raise self.bad(node, f"{field}.mig-devices", "is missing and mig-enabled is true", remedy)
        if not enabled and devices:
            remedy = "remove it, or set mig-enabled: true"
            raise self.bad(rows["mig-devices"], f"{field}.mig-devices", "is there and mig-enabled is false", remedy)
        return PartedEntry(
            filters=self.filters(rows["device-filter"], f"{field}.device-filter") if "device-filter" in rows else (),
            devices=self.devices(rows["devices"], f"{field}.devices"),
            mig_enabled=enabled,
            mig_devices=devices or (),
            place=f"{self._source}:{node.start_mark.line + 1}: {field}",
        )

    def filters(self, node: Any, field: str) -> tuple[PciId, ...]:
        if self.is_null(node):
            return ()
        several = node.id == "sequence"
        texts = [(item, self.text(item, field)) for item in (self.sequence(node, field) if several else [node])]
        if len(texts) > _DEVICES_MOST:
            raise self.bad(node, field, f"lists {len(texts)} boards", f"list at most {_DEVICES_MOST}")
        found = []
        for item, text in texts:
            if not text and not several:
                return ()
            board = PciId.parse(text)
            if board is None:
                remedy = 'write PCI device and vendor as in "0x20B210DE"; lspci -nn shows them as 10de:20b2'
                raise self.bad(item, field, f"{text!r} is not a PCI id", remedy)
            found.append(board)
        return tuple(found)

    def devices(self, node: Any, field: str) -> tuple[int, ...] | None:
        if node.id == "scalar":
            text = self.text(node, field, remedy="write all, or a list of indices such as [0, 1]")
            if text != "all":
                raise self.bad(node, field, f"is {text!r}", "write all, or a list of indices such as [0, 1]")
            return None
        rows = self.sequence(node, field, remedy="write all, or a list of indices such as [0, 1]")
        return tuple(self.whole(item, field, _DEVICES_MOST - 1) for item in rows)

    def mig_devices(self, node: Any, field: str) -> tuple[tuple[MigName, int], ...]:
        if self.is_null(node):
            return ()
        found: dict[MigName, int] = {}
        rows = self.mapping(node, field)
        for text, row in rows.items():
            name = MigName.parse(text)
            if name is None:
                remedy = "write it as nvidia-smi mig -lgip does, such as 1g.5gb, 1g.5gb+me or 1c.3g.20gb"
                raise self.bad(row, field, f"{text!r} is not a MIG device", remedy)
            if name in found:
                raise self.bad(row, field, f"{text!r} appears twice under two names", "add the counts up")
            found[name] = self.whole(row, f"{field}.{text}", _COUNT_MOST)
        wanted = tuple((name, count) for name, count in found.items() if count)
        if found and not wanted:
            remedy = "write {} for MIG without instances, or a count above 0"
            raise self.bad(node, field, "has only counts of 0", remedy)
        return wanted

    # What YAML has

    def only(self, rows: Mapping[str, Any], field: str, known: Iterable[str], node: Any) -> None:
        for name in rows:
            if name not in known:
                path = f"{field}.{name}" if field else name
                raise self.bad(node, path, "is no field", f"correct the spelling; there are: {', '.join(known)}")

    def count_items(self, node: Any) -> None:
        self._items_left -= 1 + len(node.value)
        if self._items_left < 0:
            problem = f"has more than {_ITEMS_MOST} items with its aliases written out"
            raise PartedFileUnreadable(self._source, node.start_mark.line + 1, "", problem, "write a smaller file")

    def mapping(self, node: Any, field: str, depth: int = 0) -> dict[str, Any]:
        if node is None or node.id != "mapping":
            raise self.bad(node, field, f"is {_kind(node)}", "write a mapping, name: value")
        self.count_items(node)
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                if depth == _MERGES_DEEP:
                    raise self.bad(key, field, f"merges more than {_MERGES_DEEP} deep", "write it out")
                for other in value.value if value.id == "sequence" else [value]:
                    merged = {**self.mapping(other, field, depth + 1), **merged}
                continue
            if key.id != "scalar":
                raise self.bad(key, field, f"has {_kind(key)} for a name", "write a text")
            if key.value in own:
                raise self.bad(key, f"{field}.{key.value}", "appears twice", "keep one of the two")
            own[key.value] = value
        return {**merged, **own}

    def sequence(self, node: Any, field: str, remedy: str = "write a list, [a, b]") -> list[Any]:
        if node.id != "sequence":
            raise self.bad(node, field, f"is {_kind(node)}", remedy)
        self.count_items(node)
        return list(node.value)

    def text(self, node: Any, field: str, remedy: str = "write a text, in quotes") -> str:
        if node.id != "scalar" or node.tag != "tag:yaml.org,2002:str":
            raise self.bad(node, field, f"is {_kind(node)}", remedy)
        return str(node.value)

    def truth(self, node: Any, field: str) -> bool:
        if node.id != "scalar" or node.tag != "tag:yaml.org,2002:bool":
            raise self.bad(node, field, f"is {_kind(node)}", "write true or false")
        return str(node.value).lower() in {"true", "yes", "on"}

    def whole(self, node: Any, field: str, most: int) -> int:
        text = node.value if node.id == "scalar" and node.tag == "tag:yaml.org,2002:int" else ""
        if not (text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")) or int(text[:9]) > most:
            shown = text or _kind(node)
            raise self.bad(node, field, f"is {shown}", f"write a whole number from 0 to {most}")
        return int(text)

    @staticmethod
    def is_null(node: Any) -> bool:
        return bool(node.id == "scalar" and node.tag == "tag:yaml.org,2002:null")


def _kind(node: Any) -> str:
    if node is None:
        return "empty"
    if node.id != "scalar":
        return {"mapping": "a mapping", "sequence": "a list"}[node.id]
    kinds = {"null": "empty", "bool": "true or false", "int": "a number", "float": "a number", "str": "a text"}
    return kinds.get(node.tag.rpartition(":")[2], "something else")


def to_parted_document(file: PartedFile) -> dict[str, Any]:
    """The file as plain values, in mig-parted's own order of fields."""
    return {
        "version": "v1",
        "mig-configs": {name: [_entry(entry) for entry in entries] for name, entries in file.configs.items()},
    }


def _entry(entry: PartedEntry) -> dict[str, Any]:
    filters = [str(board) for board in entry.filters]
    shown: dict[str, Any] = {"device-filter": filters[0] if len(filters) == 1 else filters} if filters else {}
    shown["devices"] = "all" if entry.devices is None else list(entry.devices)
    shown["mig-enabled"] = entry.mig_enabled
    shown["mig-devices"] = {str(name): count for name, count in entry.mig_devices}
    return shown


def format_parted_file(file: PartedFile) -> str:
    """The text of a file with these configurations; `read` gives them back."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Lists of scalars on one line, as people write them."""

    def one_line(dumper: Any, value: list[Any]) -> Any:
        flat = not any(isinstance(item, dict) for item in value)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=flat)

    Dumper.add_representer(list, one_line)
    return str(
        yaml.dump(to_parted_document(file), Dumper=Dumper, sort_keys=False, default_flow_style=False, width=10_000)
    )
