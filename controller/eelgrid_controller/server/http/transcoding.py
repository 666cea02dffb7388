"""Transcoding between HTTP and the operators' calls, by the `google.api.http` annotations of the .proto files.

Pure: finds the call of a path, makes its request from path, query and body, and JSON from its answer. Must not know
what a call means, nor connections. The rules are those of google/api/http.proto and of protobuf's JSON mapping: a field
is accepted as `page_size` and as `pageSize`, a repeated one is given several times, one of a nested message as
`outer.inner`; of a map, which they leave open, an entry is given as `filters[namespace]=research` (OpenAPI's deepObject).
"""

import base64
import binascii
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, unquote

import grpc
from google.api import annotations_pb2
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.rpc import status_pb2

from eelgrid_protos import codec
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument

_PARAMETERS_MOST = 1000
# Requests are shallow; the bound ends the search in a message that contains itself.
_DEPTH_MOST = 4
_SHOWN_MOST = 64
_INTEGERS: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_VARIABLE = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_MAP_ENTRY = re.compile(r"([^\[\]]+)\[(.+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """A field of a request that a query may set: the fields that lead to it, itself the last."""

    fields: tuple[FieldDescriptor, ...]

    @property
    def field(self) -> FieldDescriptor:
        """The field itself."""
        return self.fields[-1]

    @property
    def name(self) -> str:
        """Its name as the .proto files have it."""
        return ".".join(field.name for field in self.fields)

    @property
    def json_name(self) -> str:
        """Its name in lowerCamelCase."""
        return ".".join(str(field.json_name) for field in self.fields)

    @property
    def is_map(self) -> bool:
        """Whether each entry is given by a key in brackets."""
        return is_map(self.field)


@dataclass(frozen=True)
class HttpBinding:
    """An HTTP method and a path template that reach one call."""

    verb: str
    template: str
    has_body: bool
    method: MethodDescriptor

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """The segments of the template; a variable stands in braces."""
        return tuple(self.template.split("/"))

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """The fields of the request that are part of the path."""
        return tuple(match[1] for segment in self.segments if (match := _VARIABLE.fullmatch(segment)))

    @cached_property
    def parameters(self) -> tuple[QueryParameter, ...]:
        """The fields of the request that may be part of the query: none where the body is the request."""
        if self.has_body:
            return ()
        return tuple(one for one in _parameters(self.method.input_type) if one.name not in self.variables)

    def match(self, segments: Sequence[str]) -> Mapping[str, str] | None:
        """The variables of a path by name, still quoted; None for a path of another template."""
        if len(segments) != len(self.segments):
            return None
        found = {}
        for wanted, segment in zip(self.segments, segments, strict=True):
            variable = _VARIABLE.fullmatch(wanted)
            if variable is not None and segment:
                found[variable[1]] = segment
            elif wanted != segment:
                return None
        return found


def is_map(field: FieldDescriptor) -> bool:
    """Whether a field is a map."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _parameters(message: Descriptor, above: tuple[FieldDescriptor, ...] = ()) -> Iterator[QueryParameter]:
    for field in message.fields:
        fields = (*above, field)
        if field.message_type is None or is_map(field):
            yield QueryParameter(fields)
        elif not field.is_repeated and len(fields) < _DEPTH_MOST:
            yield from _parameters(field.message_type, fields)


def service_descriptor(name: str) -> ServiceDescriptor:
    """The descriptor of one of our services by its full name."""
    (found,) = (
        service
        for file in codec.file_descriptors()
        for service in file.services_by_name.values()
        if service.full_name == name
    )
    return found


def read_bindings(service: ServiceDescriptor) -> tuple[HttpBinding, ...]:
    """The HTTP bindings of a service, those without variables first; raises ValueError for what is not served."""
    found = []
    for method in service.methods:
        rule = method.GetOptions().Extensions[annotations_pb2.http]
        for one in (rule, *rule.additional_bindings):
            verb = one.WhichOneof("pattern")
            if verb is None:
                continue
            binding = HttpBinding(verb.upper(), getattr(one, verb), one.body == "*", method)
            is_known = all(name in method.input_type.fields_by_name for name in binding.variables)
            is_plain = len(binding.variables) == binding.template.count("{") and one.body in {"", "*"}
            if method.server_streaming or method.client_streaming or not is_known or not is_plain:
                raise ValueError(f"{method.full_name}: the annotation {binding.template} is not supported")
            found.append(binding)
    return tuple(sorted(found, key=lambda one: len(one.variables)))


def find_bindings(bindings: Iterable[HttpBinding], path: str) -> dict[str, tuple[HttpBinding, Mapping[str, str]]]:
    """By HTTP method what a path reaches, with the path's variables; `path` is as the client sent it."""
    segments = path.split("/")
    found: dict[str, tuple[HttpBinding, Mapping[str, str]]] = {}
    for binding in bindings:
        variables = binding.match(segments)
        if variables is not None:
            found.setdefault(binding.verb, (binding, variables))
    return found


# Requests


def encode_request(binding: HttpBinding, variables: Mapping[str, str], query: str, body: bytes) -> bytes:
    """Encodes the request of a call; raises InvalidArgument, which names the parameters."""
    request: Any = message_factory.GetMessageClass(binding.method.input_type)()
    violations = []
    if binding.has_body:
        _parse_body(request, body)
    for name, quoted in variables.items():
        try:
            text = unquote(quoted, errors="strict")
            setattr(request, name, _convert(binding.method.input_type.fields_by_name[name], text))
        except ValueError as error:
            violations.append(Violation(name, *_reason(error)))
    violations += _set_parameters(request, binding, query)
    if violations:
        raise InvalidArgument(f"{binding.template} has wrong parameters", tuple(violations))
    data: bytes = request.SerializeToString()
    return data


def _parse_body(request: Any, body: bytes) -> None:
    try:
        given = json.loads(body or b"{}")
        # The library takes an empty list for an empty object, and fails on other values in its own ways: an infinite enum is
        # OverflowError, half a surrogate pair in a name SystemError.
        json_format.ParseDict(given if isinstance(given, dict) else {"": given}, request)
    except (
        json_format.ParseError,
        ValueError,
        RecursionError,
        TypeError,
        AttributeError,
        OverflowError,
        SystemError,
    ) as error:
        name = request.DESCRIPTOR.name
        violation = Violation(
            "body", str(error)[:300], f"send a JSON object of the schema {name}, as openapi.json has it"
        )
        raise InvalidArgument(f"the body is no {name}", (violation,)) from error


def _set_parameters(request: Any, binding: HttpBinding, query: str) -> list[Violation]:
    try:
        given = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_PARAMETERS_MOST)
    except UnicodeDecodeError:
        return [Violation("query", "is not UTF-8", "percent-encode UTF-8")]
    except ValueError:
        return [Violation("query", f"has over {_PARAMETERS_MOST} parameters", "give fewer")]
    known = {name: one for one in binding.parameters for name in (one.name, one.json_name)}
    violations = []
    given_once = set()
    for written, text in given:
        entry = _MAP_ENTRY.fullmatch(written)
        parameter = known.get(entry[1] if entry else written)
        if parameter is None or parameter.is_map != (entry is not None):
            violations.append(_unknown(written, binding))
        elif not parameter.field.is_repeated and parameter.name in given_once:
            violations.append(Violation(written, "is given more than once", "give it once"))
        else:
            given_once.add(parameter.name)
            try:
                _set_value(request, parameter, entry[2] if entry else "", text)
            except ValueError as error:
                violations.append(Violation(written, *_reason(error)))
    return violations


def _set_value(request: Any, parameter: QueryParameter, key: str, text: str) -> None:
    owner = request
    for field in parameter.fields[:-1]:
        owner = getattr(owner, field.name)
    field = parameter.field
    if parameter.is_map:
        entry: Any = field.message_type
        key_field, value_field = entry.fields_by_name["key"], entry.fields_by_name["value"]
        getattr(owner, field.name)[_convert(key_field, key)] = _convert(value_field, text)
    elif field.is_repeated:
        getattr(owner, field.name).append(_convert(field, text))
    else:
        setattr(owner, field.name, _convert(field, text))


def _unknown(written: str, binding: HttpBinding) -> Violation:
    written = written[:_SHOWN_MOST]
    names = [f"{one.name}[KEY]" if one.is_map else one.name for one in binding.parameters]
    near = difflib.get_close_matches(written, names, n=3, cutoff=0.5)
    if near:
        remedy = f"did you mean {' or '.join(near)}?"
    elif names:
        remedy = f"use one of {', '.join(names)}"
    else:
        remedy = "send the request as the body" if binding.has_body else "give none"
    return Violation(written, f"is no parameter of {binding.template}", remedy)


class _BadValue(ValueError):
    def __init__(self, text: str, what: str, remedy: str) -> None:
        super().__init__(f"{text[:_SHOWN_MOST]!r} is {what}", remedy)


def _reason(error: ValueError) -> tuple[str, str]:
    """Problem and remedy of a value that could not be read."""
    if isinstance(error, _BadValue):
        problem, remedy = error.args
        return problem, remedy
    return "is not UTF-8", "percent-encode UTF-8"


def _convert(field: FieldDescriptor, text: str) -> Any:
    """The value that a text stands for; raises ValueError."""
    kind = field.cpp_type
    if kind in _INTEGERS:
        least, most = _INTEGERS[kind]
        if _INTEGER.fullmatch(text) is None or not least <= int(text) <= most:
            raise _BadValue(text, "no integer in range", f"give an integer from {least} to {most}")
        return int(text)
    if kind in {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}:
        if _NUMBER.fullmatch(text) is None or not math.isfinite(float(text)):
            raise _BadValue(text, "no number", "give a decimal number")
        return float(text)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if text not in {"true", "false"}:
            raise _BadValue(text, "neither true nor false", "give true or false")
        return text == "true"
    if field.enum_type is not None:
        values = field.enum_type.values
        number = next((one.number for one in values if text in {one.name, str(one.number)}), None)
        if number is None:
            raise _BadValue(text, f"no {field.enum_type.name}", f"give one of {', '.join(one.name for one in values)}")
        return number
    if field.type == FieldDescriptor.TYPE_BYTES:
        try:
            return base64.b64decode(text, altchars=b"-_" if {"-", "_"} & set(text) else None, validate=True)
        except binascii.Error:
            raise _BadValue(text, "no base64", "give base64") from None
    return text


# Answers


def answer_json(method: MethodDescriptor, data: bytes) -> bytes:
    """The answer of a call in protobuf's JSON mapping: lowerCamelCase, and fields without presence also if empty."""
    answer = message_factory.GetMessageClass(method.output_type).FromString(data)
    return _json(answer, always_print_fields_with_no_presence=True)


def encode_status(code: grpc.StatusCode, message: str) -> bytes:
    """A google.rpc.Status without details."""
    data: bytes = status_pb2.Status(code=code.value[0], message=message).SerializeToString()
    return data


def status_json(status: bytes) -> bytes:
    """A google.rpc.Status in protobuf's JSON mapping, without empty fields."""
    return _json(status_pb2.Status.FromString(status))


def _json(message: Any, **options: Any) -> bytes:
    text: str = json_format.MessageToJson(message, indent=None, ensure_ascii=False, **options)
    return text.encode() + b"\n"
