"""Values: `dataclass` for the messages of the contract, which every program of ours makes when it starts.

`dataclasses` compiles six functions for each class and makes each class twice, and there are some 250, of which a
command uses ten: that took half of the time in which `eelctl` starts. Here a class gets its slots at once, and the rest
when somebody asks: `dataclasses` looks at its fields when they are first read, and `__init__` is compiled when the class
is first called. What freezes a value, comparison, hash and text are functions that all classes share. `__init__` writes
through the descriptors of the slots, which takes half as long as `object.__setattr__`. Classes are dataclasses in every
other respect, and to a type checker nothing else.
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

    def _refuse_assignment(_self: object, name: str, _value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_deletion(_self: object, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def _read_state(self: object) -> list[Any]:
        return [getattr(self, entry.name) for entry in dataclasses.fields(self)]

    def _write_state(self: object, state: list[Any]) -> None:
        for entry, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, entry.name, value)

    def _compile_init(made: type) -> Callable[..., None]:
        """Generates `__init__` of a class, with the parameters that `dataclasses` gives it."""
        scope: dict[str, Any] = {"absent": dataclasses.MISSING}
        parameters: dict[bool, list[str]] = {False: [], True: []}
        lines = []
        for entry in dataclasses.fields(made):
            name = entry.name
            scope[f"set_{name}"] = vars(made)[name].__set__
            value, default = name, ""
            if entry.default is not dataclasses.MISSING:
                scope[f"default_{name}"], default = entry.default, f"=default_{name}"
            elif entry.default_factory is not dataclasses.MISSING:
                scope[f"make_{name}"], default = entry.default_factory, "=absent"
                value = f"make_{name}() if {name} is absent else {name}"
            parameters[entry.kw_only].append(name + default)
            lines.append(f" set_{name}(self, {value})\n")
        keywords = ["*", *parameters[True]] if parameters[True] else []
        signature = ", ".join(["self", *parameters[False], *keywords])
        exec(f"def __init__({signature}):\n{''.join(lines) or ' pass'}", scope)  # noqa: S102  # names of our own fields
        init: Callable[..., None] = scope["__init__"]
        init.__qualname__ = f"{made.__qualname__}.__init__"
        return init

    def _compile_when_called(made: type) -> Callable[..., None]:
        """Returns an `__init__` that puts the compiled one in its place when it is first called."""

        def __init__(self: object, *values: Any, **named: Any) -> None:  # noqa: N807  # what it stands for
            made.__init__ = _compile_init(made)
            made.__init__(self, *values, **named)

        return __init__

    class _FieldsWhenRead:
        """Stands for what `dataclasses` knows of a class until it is read: `__dataclass_fields__` and its parameters."""

        def __init__(self, name: str, written: type, *, kw_only: bool) -> None:
            self._name, self._written, self._kw_only = name, written, kw_only

        def __get__(self, _value: object, made: type) -> Any:
            stock = dataclasses.dataclass(kw_only=self._kw_only, init=False, eq=False, repr=False)(self._written)
            stock.__dataclass_params__.frozen = True
            made.__dataclass_params__, made.__match_args__ = stock.__dataclass_params__, stock.__match_args__
            made.__dataclass_fields__ = stock.__dataclass_fields__
            return vars(made)[self._name]

    @dataclass_transform(frozen_default=True)
    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type], type]:
        """Makes a class a frozen dataclass with slots, with the options of `dataclasses.dataclass`."""
        assert frozen
        assert slots

        def make(cls: type) -> type:
            names = tuple(vars(cls).get("__annotations__", ()))
            defaults = {name: vars(cls).get(name) for name in names}
            compared = [
                name for name, value in defaults.items() if not isinstance(value, dataclasses.Field) or value.compare
            ]
            read = attrgetter(*compared) if compared else type

            def is_equal(self: object, other: object) -> bool:
                return read(self) == read(other) if other.__class__ is self.__class__ else NotImplemented

            def hash_value(self: object) -> int:
                return hash(read(self))

            written = {
                name: value
                for name, value in vars(cls).items()
                if name not in defaults and name not in {"__dict__", "__weakref__"}
            }
            made = type(cls)(
                cls.__name__,
                cls.__bases__,
                written
                | {
                    "__slots__": names,
                    "__setattr__": _refuse_assignment,
                    "__delattr__": _refuse_deletion,
                    "__getstate__": _read_state,
                    "__setstate__": _write_state,
                    "__eq__": is_equal,
                    "__hash__": hash_value,
                    "__repr__": _describe_value,
                }
                | {
                    name: _FieldsWhenRead(name, cls, kw_only=kw_only)
                    for name in ("__dataclass_fields__", "__dataclass_params__", "__match_args__")
                },
            )
            made.__init__ = _compile_when_called(made)
            return made

        return make
