"""GPU names: the one table by which every name that people write for a GPU model becomes the name of the catalogue.

A model has one canonical name (Product.model, what nodes report and what the wire and the journal keep). People write
what NVML prints ("NVIDIA H100 80GB HBM3"), what GPU feature discovery labels a node with ("NVIDIA-H100-80GB-HBM3"), the
catalogue's key ("H100-SXM5-80GB"), an alias that products.json lists ("h100"), or a beginning or part of these that
fits one model alone; case, brand, spaces and dashes do not matter.

Order: a name that a registered node reports, then an exact name of the catalogue, then what fits in part. Of several
models that fit in part, those that registered nodes report come first, then the one whose alias it is. What fits
several still is refused, as is what fits none, with the candidates and the nearest names.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache

from eelgrid_protos.catalogue.loader import Catalogue, load_catalogue
from eelgrid_protos.catalogue.products import Product

_BRANDS = frozenset({"nvidia", "tesla", "grid", "amd", "instinct"})
_SEPARATORS = re.compile(r"[^a-z0-9.]+")
# Products of a published trace, known by their exact names alone.
_TRACE = "openb-"
_NAMED_MOST = 32
_NEAR = 0.5


class GpuNameError(ValueError):
    """A name of a GPU model that fits none or several; says the field, what is wrong with it, and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field} {problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy


def resolve_gpu_model(
    name: str,
    field: str,
    *,
    reported: Iterable[str] = (),
    catalogue: Catalogue | None = None,
    keeps_unknown: bool = False,
) -> str:
    """Returns the canonical name of a GPU model; raises GpuNameError, which names the field.

    reported: models that registered nodes report, or that the same file describes; they may be unknown to the
    catalogue. keeps_unknown: a name that fits nothing stays as it is written, where nobody here knows all nodes.
    """
    return _names_of(catalogue).resolve(name, field, tuple(dict.fromkeys(reported)), keeps_unknown=keeps_unknown)


def resolve_gpu_models(
    names: Iterable[str],
    field: str,
    *,
    reported: Iterable[str] = (),
    catalogue: Catalogue | None = None,
    keeps_unknown: bool = False,
) -> tuple[str, ...]:
    """Returns the canonical names of several GPU models, each once; raises GpuNameError, which names the field."""
    table, known = _names_of(catalogue), tuple(dict.fromkeys(reported))
    return tuple(dict.fromkeys(table.resolve(name, field, known, keeps_unknown=keeps_unknown) for name in names))


def resolve_product(name: str, field: str, *, catalogue: Catalogue | None = None) -> Product:
    """Returns the catalogue's product that goes by this name; raises GpuNameError, which names the field."""
    return _names_of(catalogue).product(name, field)


def find_exact_model(name: str) -> str | None:
    """Returns the canonical name of a model by one of its whole names in the packaged catalogue; None without one."""
    return _packaged_names().find_exact(name)


def is_canonical_model(name: str) -> bool:
    """Whether the packaged catalogue calls a model exactly so."""
    return name in _packaged_names().canonical


class _GpuNames:
    """The table of one catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._products = catalogue.products
        self.canonical = frozenset(product.model for product in catalogue.products.values())
        # Keys, then other exact names: the first product has a name that two share (T4 and the trace's T4).
        self._exact: dict[str, Product] = {_fold(key): product for key, product in catalogue.products.items()}
        self._aliases: dict[str, str] = {}
        self._parts: dict[str, set[tuple[str, ...]]] = {}
        for key, product in catalogue.products.items():
            names = (product.model, *product.nvml_names)
            for name in names:
                self._exact.setdefault(_fold(name), product)
            self._aliases |= {_fold(alias): product.model for alias in product.aliases}
            if not key.startswith(_TRACE):
                spellings = (key, *names, *product.aliases)
                self._parts.setdefault(product.model, set()).update(_tokens(_fold(one)) for one in spellings)

    def find_exact(self, name: str) -> str | None:
        product = self._exact.get(_fold(name))
        return None if product is None else product.model

    def resolve(self, name: str, field: str, reported: Sequence[str], *, keeps_unknown: bool) -> str:
        if name in reported:
            return name
        folded = _fold(name)
        own = [model for model in reported if _fold(model) == folded]
        if len(own) == 1:
            return own[0]
        if (exact := self.find_exact(name)) is not None:
            return exact
        found = own or self._match_parts(folded, reported)
        if len(found) > 1 and folded in self._aliases and not set(found) & set(reported):
            return self._aliases[folded]
        if len(found) == 1:
            return found[0]
        if found:
            raise GpuNameError(
                field,
                f"is {name!r}, which fits several GPU models",
                f"did you mean {_one_of(found)}? Write one in full",
            )
        if keeps_unknown:
            return name
        raise GpuNameError(field, f"is {name!r}, which is no known GPU model", self._suggest(folded, reported))

    def product(self, name: str, field: str) -> Product:
        product = self._products.get(name) or self._exact.get(_fold(name))
        if product is not None:
            return product
        model = self.resolve(name, field, (), keeps_unknown=False)
        return next(product for product in self._products.values() if product.model == model)

    def _match_parts(self, folded: str, reported: Sequence[str]) -> list[str]:
        """The models that fit in part; only reported ones where there are any."""
        wanted = _tokens(folded)
        if not wanted:
            return []
        spellings = dict(self._parts)
        for model in reported:
            spellings[model] = {*spellings.get(model, ()), _tokens(_fold(model))}
        found = [model for model, forms in spellings.items() if _fits(wanted, forms)]
        there = set(reported)
        return [model for model in found if model in there] or found

    def _suggest(self, folded: str, reported: Sequence[str]) -> str:
        """What may have been meant, and what there is."""
        spelled = {_fold(model): model for model in reported}
        for name, product in self._exact.items():
            if not product.key.startswith(_TRACE):
                spelled.setdefault(name, product.model)
        spelled |= self._aliases
        # Only a refusal needs it.
        from difflib import get_close_matches

        near = dict.fromkeys(spelled[one] for one in get_close_matches(folded, list(spelled), n=6, cutoff=_NEAR))
        if reported:
            known = f"in use are {_listed(sorted(reported))}"
        else:
            models = {product.model for product in self._products.values() if not product.key.startswith(_TRACE)}
            known = f"the catalogue has {_listed(sorted(models))}"
        return f"did you mean {_one_of(list(near)[:3])}? {known[0].upper()}{known[1:]}" if near else known


@cache
def _packaged_names() -> _GpuNames:
    return _GpuNames(load_catalogue())


def _names_of(catalogue: Catalogue | None) -> _GpuNames:
    return _packaged_names() if catalogue is None or catalogue is load_catalogue() else _GpuNames(catalogue)


def _fold(name: str) -> str:
    """A name without case, brand and separators: words joined by dashes."""
    words = [word for word in _SEPARATORS.split(name.lower()) if word]
    while len(words) > 1 and words[0] in _BRANDS:
        words = words[1:]
    return "-".join(words)


def _tokens(folded: str) -> tuple[str, ...]:
    return tuple(folded.split("-")) if folded else ()


def _fits(wanted: tuple[str, ...], forms: Iterable[tuple[str, ...]]) -> bool:
    """Whether the first word begins a spelling, and each further word a word of any of its spellings."""
    first, *others = wanted
    # Only the last word may be cut short.
    forms = [form for form in forms if form and (form[0] == first if others else form[0].startswith(first))]
    words = {word for form in forms for word in form[1:]}
    return bool(forms) and words.issuperset(others[:-1]) and all(_begins(last, words) for last in others[-1:])


def _begins(part: str, words: Iterable[str]) -> bool:
    return any(word.startswith(part) for word in words)


def _one_of(names: Sequence[str]) -> str:
    shown = list(names[:_NAMED_MOST])
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MOST} more" if len(names) > _NAMED_MOST else ""
    return ", ".join(names[:_NAMED_MOST]) + more
