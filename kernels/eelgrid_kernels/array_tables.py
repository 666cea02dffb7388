"""Array tables: named tuples of many arrays that kernels hand to each other as one pointer.

Owns the table and how numba sees it. Must not know any array.

numba hands a tuple over by value: each array is eight numbers or so, each number an argument of its own. Forty arrays
are some three hundred arguments of every function and call, which are typed, lowered, stored and loaded: a third of all
compile time. A table holds the address and the shape of each array, one after the other; kernels get its address and
read what they use. A tuple within the tuple is a part of the table.

Theory: a table is written before a kernel begins and by nobody after. So its loads are marked as invariant, which
lets LLVM keep what they read in registers across stores to the arrays.

From Python, a kernel is handed `table`, a scalar of a dtype of its own: numba finds the type of such a one in some ten
nanoseconds, that of a tuple of forty arrays in four microseconds. Arrays must be contiguous (C); whether a kernel may
write to them is between the kernel and its caller.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, imputils, types
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.core.typing.typeof import typeof_impl
from numba.extending import NativeValue, models, register_model, unbox
from numba.np import arrayobj, numpy_support

_WORD = ir.IntType(64)
_WORD_BYTES = 8


class TableType(types.Type):
    """The type of a table: its fields by name."""

    def __init__(self, label: str, fields: tuple[tuple[str, types.Type], ...]) -> None:
        self.label, self.fields = label, fields
        super().__init__(label)  # part of the name of each function that takes one

    @property
    def key(self) -> tuple[object, ...]:
        """What tables of one type have in common."""
        return self.label, self.fields

    @property
    def words(self) -> int:
        """How long it is."""
        return sum(_count_words(field) for _, field in self.fields)

    def find_field(self, name: str) -> tuple[int, types.Type]:
        """The first word of a field, and its type; LookupError where there is none of that name."""
        word = 0
        for own, field in self.fields:
            if own == name:
                return word, field
            word += _count_words(field)
        raise LookupError(name)


def _count_words(field: types.Type) -> int:
    if isinstance(field, TableType):
        return field.words
    return 1 + field.ndim if isinstance(field, types.Array) else 1


# numpy makes a scalar of this class where a dtype says so.
class _TableScalar(np.void):  # type: ignore[misc]
    """The scalar that a table is to Python."""


class _Layout(NamedTuple):
    """What all instances of a class have in common."""

    parts: tuple[object, ...]  # of each field: dtype and rank of an array, the layout of a tuple, the type of a number
    numba_type: TableType
    dtype: np.dtype[np.void]


_layouts: dict[type, _Layout] = {}


def _describe(owner: str, name: str, part: Any) -> object:
    if isinstance(part, np.ndarray):
        if not part.flags.c_contiguous:
            raise TypeError(f"{owner}.{name} is not contiguous")
        return part.dtype, part.ndim
    if isinstance(part, ArrayTable):
        return _find_layout(part)
    for kind in (int, float):
        if isinstance(part, (kind, np.integer if kind is int else np.floating)):
            return kind
    raise TypeError(f"{owner}.{name} is {type(part).__name__}, which no table can hold")


def _find_type(part: object) -> types.Type:
    if isinstance(part, _Layout):
        return part.numba_type
    if isinstance(part, tuple):
        return types.Array(numpy_support.from_dtype(part[0]), part[1], "C")
    return types.float64 if part is float else types.int64


def _find_layout(value: Any) -> _Layout:
    """The layout of a class, that of the first instance; TypeError where this instance has another."""
    owner, names = type(value), type(value)._fields
    label = owner.__name__
    parts = tuple(_describe(label, name, part) for name, part in zip(names, value, strict=True))
    layout = _layouts.get(owner)
    if layout is None:
        fields = zip(names, map(_find_type, parts), strict=True)
        numba_type = TableType(label, tuple(fields))
        # The name of the field makes the dtype one of its own, whatever its length.
        dtype = np.dtype((_TableScalar, [(label, np.int64, (numba_type.words,))]))
        layout = _layouts.setdefault(owner, _Layout(parts, numba_type, dtype))
    for name, part, usual in zip(names, parts, layout.parts, strict=True):
        if part != usual:
            raise TypeError(f"{label}.{name} is {part}, and {usual} in other instances")
    return layout


def _refuse_tuple(value: object, _: object) -> types.Type:
    raise TypeError(f"called past eelgrid_kernels.compilation, a kernel takes {type(value).__name__}.table")


class ArrayTable:
    """Mixed into a named tuple of arrays, numbers and such tuples; each field has one dtype and rank in all instances."""

    def __init_subclass__(cls) -> None:
        """Has numba refuse the tuple itself, for which it would compile everything once more, by value."""
        typeof_impl.register(cls)(_refuse_tuple)

    @cached_property
    def table(self) -> np.void:
        """What kernels are handed, good as long as the tuple is; TypeError where an array is not as in other instances."""
        table = np.zeros(1, _find_layout(self).dtype)
        table.view(np.int64)[:] = self.list_words()
        found: np.void = table[0]
        return found

    def list_words(self) -> list[int]:
        """The address and shape of each array and each number, in order."""
        words: list[int] = []
        for part in self:  # type: ignore[attr-defined]
            if isinstance(part, np.ndarray):
                words += (part.__array_interface__["data"][0], *part.shape)
            elif isinstance(part, ArrayTable):
                words += part.list_words()
            else:
                words.append(int(np.float64(part).view(np.int64) if isinstance(part, (float, np.floating)) else part))
        return words

    def __getstate__(self) -> None:
        """Copies have arrays of their own, and so a table of their own."""


@typeof_impl.register(_TableScalar)
def _typeof_table(value: Any, _: object) -> TableType:
    return next(layout.numba_type for layout in _layouts.values() if layout.dtype == value.dtype)


@register_model(TableType)
class _TableModel(models.OpaqueModel):  # type: ignore[misc]
    """A pointer."""


@unbox(TableType)
def _unbox_table(_: TableType, value: Any, c: Any) -> NativeValue:
    buffer = c.pyapi.alloca_buffer()
    pointer = c.pyapi.extract_record_data(value, buffer)
    # The caller holds the scalar, and it the memory.
    c.pyapi.release_buffer(buffer)
    return NativeValue(pointer, is_error=cgutils.is_null(c.builder, pointer))


@infer_getattr
class _TableFields(AttributeTemplate):  # type: ignore[misc]
    key = TableType

    def generic_resolve(self, table: TableType, name: str) -> types.Type | None:
        return dict(table.fields).get(name)


def _load(builder: ir.IRBuilder, table: ir.Value, word: int, kind: ir.Type) -> ir.Value:
    place = builder.gep(table, [ir.IntType(32)(_WORD_BYTES * word)], inbounds=True)
    value = builder.load(builder.bitcast(place, kind.as_pointer()), align=_WORD_BYTES)
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


@imputils.lower_getattr_generic(TableType)
def _lower_field(context: Any, builder: ir.IRBuilder, table_type: TableType, table: ir.Value, name: str) -> ir.Value:
    word, field = table_type.find_field(name)
    if isinstance(field, TableType):
        return builder.gep(table, [ir.IntType(32)(_WORD_BYTES * word)], inbounds=True)
    if not isinstance(field, types.Array):
        return _load(builder, table, word, context.get_value_type(field))
    array = arrayobj.make_array(field)(context, builder)
    item_bytes = context.get_abi_sizeof(context.get_data_type(field.dtype))
    shape = [_load(builder, table, word + 1 + axis, _WORD) for axis in range(field.ndim)]
    strides = [_WORD(item_bytes)]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size, flags=["nsw"]))
    data = _load(builder, table, word, array.data.type)
    arrayobj.populate_array(array, data, shape, strides, _WORD(item_bytes), meminfo=None)
    return array._getvalue()  # noqa: SLF001 (numba has no other way)
