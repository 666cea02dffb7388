"""What an API server answers when it refuses: a Status, in the words of the real one."""

from typing import NamedTuple


class Bad(NamedTuple):
    """A field at fault."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class Fault(Exception):
    """An answer that is an error."""

    def __init__(self, code, reason, message, details=None, headers=None):
        self.code = code
        self.headers = headers or {}
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details or {},
            "code": code,
        }
        super().__init__(message)


def _details(kind, name, **more):
    found = {"name": name, "kind": kind.plural, **more}
    return {**found, "group": kind.group} if kind.group else found


def not_found(kind, name):
    return Fault(404, "NotFound", f'{kind.title} "{name}" not found', _details(kind, name))


def no_such_path():
    return Fault(404, "NotFound", "the server could not find the requested resource")


def already_exists(kind, name):
    return Fault(409, "AlreadyExists", f'{kind.title} "{name}" already exists', _details(kind, name))


def conflict(kind, name, why=None):
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {kind.title} "{name}": {why}'
    return Fault(409, "Conflict", message, _details(kind, name))


def invalid(kind, name, bad):
    words = {"FieldValueForbidden": "Forbidden", "FieldValueRequired": "Required value"}
    texts = [f"{words.get(one.reason, 'Invalid value')}: {one.message}" for one in bad]
    lines = [f"{one.field}: {text}" for one, text in zip(bad, texts, strict=True)]
    told = lines[0] if len(lines) == 1 else "[" + ", ".join(lines) + "]"
    causes = [{"reason": one.reason, "message": text, "field": one.field} for one, text in zip(bad, texts, strict=True)]
    details = {"name": name, "group": kind.group, "kind": kind.kind, "causes": causes}
    return Fault(422, "Invalid", f'{kind.kind} "{name}" is invalid: {told}', details)


def forbidden(kind, name, why):
    named = f' "{name}"' if name else ""
    return Fault(403, "Forbidden", f"{kind.title}{named} is forbidden: {why}", _details(kind, name))


def unauthorized():
    return Fault(401, "Unauthorized", "Unauthorized")


def bad_request(message):
    return Fault(400, "BadRequest", message)


def expired(message):
    return Fault(410, "Expired", message)


def too_large_version(version, current):
    message = f"Too large resource version: {version}, current: {current}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return Fault(504, "Timeout", message, {"causes": causes, "retryAfterSeconds": 1}, {"Retry-After": "1"})


def too_many(retry_after_s=1):
    message = "Too many requests, please try again later."
    return Fault(
        429, "TooManyRequests", message, {"retryAfterSeconds": retry_after_s}, {"Retry-After": str(retry_after_s)}
    )


def server_error(message="Internal error occurred: told so by a test"):
    return Fault(500, "InternalError", message)


def unsupported_media(message):
    return Fault(415, "UnsupportedMediaType", message)
