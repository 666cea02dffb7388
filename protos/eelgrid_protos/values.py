"""Values: `dataclass` for the messages of the contract, which every program of ours makes when it starts.

`dataclasses` compiles six functions for each class, and there are some 250: a quarter of the time in which `eelctl`
starts. Here only `__init__` and what freezes a value are compiled; comparison, hash and text read the fields. Classes are
dataclasses in every other respect, and to a type checker nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414  # re-exported
else:
    import dataclasses
    from collections.abc import Callable
    from operator import attrgetter
    from typing import dataclass_transform

    def _describe_value(self: object) -> str:
        shown = (f"{entry.name}={getattr(self, entry.name)!r}" for entry in dataclasses.fields(self) if entry.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    @dataclass_transform(frozen_default=True)
    def dataclass(**options: Any) -> Callable[[type], type]:
        """Makes a class a frozen dataclass, with the options of `dataclasses.dataclass`."""

        def make(cls: type) -> type:
            made = dataclasses.dataclass(**options, eq=False, repr=False)(cls)
            names = [entry.name for entry in dataclasses.fields(made) if entry.compare]
            read = attrgetter(*names) if names else type

            def is_equal(self: object, other: object) -> bool:
                return read(self) == read(other) if other.__class__ is self.__class__ else NotImplemented

            def hash_value(self: object) -> int:
                return hash(read(self))

            made.__eq__, made.__hash__, made.__repr__ = is_equal, hash_value, _describe_value
            return made

        return make
