"""The OpenAPI 3.1 document of the HTTP API, generated from the descriptors of the .proto files.

Pure. Schemas are those of protobuf's JSON mapping, as `transcoding` writes and reads it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.rpc import status_pb2

from eelgrid_controller.server.http.transcoding import HttpBinding, is_map

OPENAPI_PATH = "/v1/openapi.json"
_ANY = "google.protobuf.Any"
_NUMBERS: Mapping[int, Mapping[str, Any]] = {
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    # JSON's numbers are exact up to 2^53 in many programs: protobuf's JSON mapping writes longer ones as strings.
    FieldDescriptor.CPPTYPE_INT64: {"type": "string", "format": "int64"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "string", "format": "uint64"},
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": "number", "format": "double"},
    FieldDescriptor.CPPTYPE_FLOAT: {"type": "number", "format": "float"},
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
}


def build_openapi(bindings: Sequence[HttpBinding], *, version: str) -> dict[str, Any]:
    """Builds the document of these bindings; `version` is that of the controller."""
    messages: dict[str, Descriptor] = {}
    paths: dict[str, dict[str, Any]] = {}
    for binding in sorted(bindings, key=lambda one: one.template):
        paths.setdefault(binding.template, {})[binding.verb.lower()] = _operation(binding, messages)
    status = _reference(status_pb2.Status.DESCRIPTOR, messages)
    schemas: dict[str, Any] = {}
    while left := messages.keys() - schemas.keys():
        for name in left:
            schemas[name] = _schema(messages[name], messages)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Eelgrid controller", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {"Error": {"description": "The call failed.", "content": _content(status)}},
        },
    }


def _operation(binding: HttpBinding, messages: dict[str, Descriptor]) -> dict[str, Any]:
    method, fields = binding.method, binding.method.input_type.fields_by_name
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": _value_schema(fields[name], messages)}
        for name in binding.variables
    ]
    for one in binding.parameters:
        style = {"style": "deepObject", "explode": True} if one.is_map else {}
        parameters.append({"name": one.json_name, "in": "query", **style, "schema": _field_schema(one.field, messages)})
    by = "".join(f"_by_{name}" for name in binding.variables if len(binding.parameters) > 0)
    operation: dict[str, Any] = {
        "operationId": f"{method.name}{by}",
        "summary": f"{method.containing_service.full_name}/{method.name}",
        "parameters": parameters,
        "responses": {
            "200": {"description": "The answer.", "content": _content(_reference(method.output_type, messages))},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    if binding.has_body:
        operation["requestBody"] = {"required": True, "content": _content(_reference(method.input_type, messages))}
    return operation


def _content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(message: Descriptor, messages: dict[str, Descriptor]) -> dict[str, Any]:
    name = message.full_name
    messages[name] = message
    return {"$ref": f"#/components/schemas/{name}"}


def _schema(message: Descriptor, messages: dict[str, Descriptor]) -> dict[str, Any]:
    if message.full_name == _ANY:
        return {"type": "object", "properties": {"@type": {"type": "string"}}, "additionalProperties": True}
    return {
        "type": "object",
        "properties": {str(field.json_name): _field_schema(field, messages) for field in message.fields},
    }


def _field_schema(field: FieldDescriptor, messages: dict[str, Descriptor]) -> dict[str, Any]:
    if is_map(field):
        entry: Any = field.message_type
        value = _value_schema(entry.fields_by_name["value"], messages)
        return {"type": "object", "additionalProperties": value}
    one = _value_schema(field, messages)
    return {"type": "array", "items": one} if field.is_repeated else one


def _value_schema(field: FieldDescriptor, messages: dict[str, Descriptor]) -> dict[str, Any]:
    if field.message_type is not None:
        return _reference(field.message_type, messages)
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    if field.cpp_type in _NUMBERS:
        return dict(_NUMBERS[field.cpp_type])
    is_bytes = field.type == FieldDescriptor.TYPE_BYTES
    return {"type": "string", "contentEncoding": "base64"} if is_bytes else {"type": "string"}
