"""As much of CEL as admission policies are written in: text in, value out, over JSON.

Owns the grammar and CEL's way with errors: `&&` and `||` are decided by whichever side can
decide. Must not know admission (`admission.py`).

    evaluate("has(object.spec.x) && object.spec.x == 'a'", object={...})

Source: https://github.com/google/cel-spec/blob/master/doc/langdef.md . Whatever is not used
here is refused: an expression that passes in tests and not in a cluster would be worse than none.
"""

import re

_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(?P<number>\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark>&&|\|\||==|!=|<=|>=|[-+!?:.,()\[\]{}<>]))"
)


class CelError(Exception):
    """What CEL calls an error: no such field, no such overload."""


def evaluate(text, **variables):
    """The value of an expression; raises CelError as a cluster would count an error, ValueError for no CEL."""
    return _Parser(text).whole()(variables)


def _tokens(text):
    found, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"no CEL at {text[at : at + 20]!r}")
        found.append((match.lastgroup, match.group(match.lastgroup)))
        at = match.end()
    return [*found, ("end", "")]


class _Parser:
    """Makes functions of variables out of text."""

    def __init__(self, text):
        self.tokens = _tokens(text)
        self.at = 0

    def whole(self):
        found = self.choice()
        self.take("")
        return found

    def peek(self, *marks):
        kind, text = self.tokens[self.at]
        return kind in {"mark", "name", "end"} and text in marks

    def take(self, mark):
        if not self.peek(mark):
            raise ValueError(f"{mark!r} expected, {self.tokens[self.at][1]!r} found")
        self.at += 1

    def takes(self, mark):
        if self.peek(mark):
            self.at += 1
            return True
        return False

    def name(self):
        kind, text = self.tokens[self.at]
        if kind != "name":
            raise ValueError(f"a name expected, {text!r} found")
        self.at += 1
        return text

    def choice(self):
        test = self.either()
        if not self.takes("?"):
            return test
        yes = self.choice()
        self.take(":")
        no = self.choice()
        return lambda given: yes(given) if _truth(test(given)) else no(given)

    def either(self):
        parts = [self.both()]
        while self.takes("||"):
            parts.append(self.both())
        return parts[0] if len(parts) == 1 else lambda given: _decided(parts, given, True)

    def both(self):
        parts = [self.relation()]
        while self.takes("&&"):
            parts.append(self.relation())
        return parts[0] if len(parts) == 1 else lambda given: _decided(parts, given, False)

    def relation(self):
        left = self.unary()
        for mark, meant in _RELATIONS.items():
            if self.takes(mark):
                right = self.unary()
                return lambda given: meant(left(given), right(given))
        return left

    def unary(self):
        if self.takes("!"):
            inner = self.unary()
            return lambda given: not _truth(inner(given))
        return self.selected()

    def selected(self):
        found = self.primary()
        while True:
            if self.takes("."):
                name = self.name()
                found = self.method(found, name) if self.peek("(") else _member(found, name)
            elif self.takes("["):
                key = self.choice()
                self.take("]")
                found = _indexed(found, key)
            elif self.peek("{"):
                found = self.made()
            else:
                return found

    def primary(self):
        kind, text = self.tokens[self.at]
        if kind in {"text", "number"}:
            self.at += 1
            value = re.sub(r"\\(.)", r"\1", text[1:-1]) if kind == "text" else int(text)
            return lambda given: value
        if self.takes("("):
            found = self.choice()
            self.take(")")
            return found
        if self.takes("["):
            parts = self.parts("]")
            return lambda given: [part(given) for part in parts]
        name = self.name()
        if name in {"true", "false", "null"}:
            return lambda given: {"true": True, "false": False, "null": None}[name]
        if name == "has":
            self.take("(")
            inner = self.selected()
            self.take(")")
            return lambda given: inner.name in inner.operand(given)
        return lambda given: given[name] if name in given else _Type()

    def parts(self, end):
        parts = []
        while not self.takes(end):
            parts.append(self.choice())
            if not self.peek(end):
                self.take(",")
        return parts

    def made(self):
        """`Type{field: value}`; the type's name says nothing that the fields do not."""
        self.take("{")
        fields = {}
        while not self.takes("}"):
            name = self.name()
            self.take(":")
            fields[name] = self.choice()
            if not self.peek("}"):
                self.take(",")
        return lambda given: {name: value(given) for name, value in fields.items()}

    def method(self, found, name):
        self.take("(")
        if name in {"exists", "all"}:
            variable = self.name()
            self.take(",")
            test = self.choice()
            self.take(")")
            return lambda given: _decided(
                [lambda given, one=one: test(given | {variable: one}) for one in found(given)], given, name == "exists"
            )
        parts = self.parts(")")
        match name:
            case "startsWith":
                return lambda given: found(given).startswith(parts[0](given))
            case "size":
                return lambda given: len(found(given))
        raise ValueError(f"{name}() is not known here")


class _Type:
    """A name of a type: its members are types, too."""


def _truth(value):
    if not isinstance(value, bool):
        raise CelError(f"{value!r} is no bool")
    return value


def _decided(parts, given, decisive):
    """`||` and `exists` are true as soon as one is, `&&` and `all` false; an error counts where none decides."""
    error = None
    for part in parts:
        try:
            if _truth(part(given)) is decisive:
                return decisive
        except CelError as found:
            error = found
    if error is not None:
        raise error
    return not decisive


def _member(found, name):
    def get(given):
        inner = found(given)
        if isinstance(inner, _Type):
            return inner
        if not isinstance(inner, dict) or name not in inner:
            raise CelError(f"no such key: {name}")
        return inner[name]

    get.operand, get.name = found, name  # has() asks for the last member only
    return get


def _indexed(found, key):
    def get(given):
        try:
            return found(given)[key(given)]
        except (KeyError, IndexError) as error:
            raise CelError(f"no such key: {error}") from error

    return get


_RELATIONS = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "in": lambda left, right: left in right,
    ">": lambda left, right: left > right,
    "<": lambda left, right: left < right,
}
