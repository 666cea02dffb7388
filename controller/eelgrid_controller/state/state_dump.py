"""A dump of the cluster state at one revision, whose parts become plain values one after another while the state goes on.

Owns which values are taken over at once and which are made later. Must not know how a dump is encoded or stored.

Theory: most of a state is immutable values, workloads and inventories, in dicts that change. Copies of these dicts are the
state at that revision, whatever is applied afterwards. They cost some microseconds for each node; turning what is in them
into plain values, encoding it and hashing it costs some hundred.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from eelgrid_protos.plain_messages import to_plain

# Elements of a long section that are turned into plain values at a time: about a millisecond's work.
_CHUNK = 16
_to_brief = partial(to_plain, brief=True)


class DumpPart(NamedTuple):
    """A section of the dump, or some elements of one that is a list or a dict."""

    key: str
    value: Any
    # Whether these elements follow those of the part before.
    is_continued: bool


class StateDump:
    """What `ClusterState.load` needs, as of one revision."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self._sections: dict[str, Callable[[], Iterator[Any]]] = {}

    def add_values(self, **values: Any) -> None:
        """Adds sections that are plain values already, and that nobody changes."""
        for key, value in values.items():
            self._sections[key] = partial(iter, (value,))

    def add_later(self, key: str, dump: Callable[[], Any], *, is_kept_empty: bool = True) -> None:
        """Adds a section that `dump` makes of what nobody changes; left out if it is empty and may be."""

        def make() -> Iterator[Any]:
            value = dump()
            if value or is_kept_empty:
                yield value

        self._sections[key] = make

    def add_list(self, key: str, elements: Iterable[Any], make_plain: Callable[[Any], Any] = _to_brief) -> None:
        """Adds a list of elements that nobody changes, messages unless `make_plain` says what is made of them."""

        def make() -> Iterator[Any]:
            left = iter(elements)
            yield [make_plain(element) for element in islice(left, _CHUNK)]
            while chunk := [make_plain(element) for element in islice(left, _CHUNK)]:
                yield chunk

        self._sections[key] = make

    def add_mapping(self, key: str, mapping: Mapping[str, Any]) -> None:
        """Adds a dict of plain values that nobody changes."""

        def make() -> Iterator[Any]:
            ordered = sorted(mapping)
            for first in range(0, max(1, len(ordered)), _CHUNK):
                yield {name: mapping[name] for name in ordered[first : first + _CHUNK]}

        self._sections[key] = make

    def parts(self) -> Iterator[DumpPart]:
        """Yields the dump in the order of its keys, and a dict's elements in the order of theirs; each is little work."""
        for key, make in sorted(self._sections.items()):
            for number, value in enumerate(make()):
                yield DumpPart(key, value, is_continued=number > 0)

    def collect(self) -> dict[str, Any]:
        """Returns the whole as plain JSON values."""
        found: dict[str, Any] = {}
        for key, value, is_continued in self.parts():
            if not is_continued:
                found[key] = value
            elif isinstance(value, dict):
                found[key].update(value)
            else:
                found[key].extend(value)
        return found
