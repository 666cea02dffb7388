"""Request fields as the options and arguments of a command: `changes[0].change.node_names[1]` is `--drain`.

The contract names its fields; an operator knows the parameters that were typed. A field that no parameter of the command
stands for, such as one of a workload file, keeps its path.
"""

import re
from collections.abc import Mapping

import click
from click.core import ParameterSource

from eelgrid_protos.errors import Violation

# Parameters that fill a field, besides the one of the field's own name.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "best_effort": ("deadline_best_effort",),
    "begin_ns": ("since", "month", "begin"),
    "cpu_milli": ("cpu",),
    "data_names": ("model_data",),
    "end_ns": ("duration",),
    "expected_runtime_s": ("expect",),
    "filters": ("where",),
    "gpu_count": ("gpus",),
    "gpu_milli": ("gpu_share",),
    "gpu_models": ("gpu_model", "model"),
    "gpu_sharing": ("gpu_load", "gpu_slowdown"),
    "group_by": ("by",),
    "labels": ("label",),
    "limit_w": ("budget",),
    "memory_bytes": ("memory",),
    "models": ("prefer_gpu_model",),
    "name_contains": ("name", "name_contains"),
    "gpus": ("gpus", "targets"),
    "node_name": ("node", "name", "targets"),
    "node_names": ("drain", "remove", "nodes"),
    "placement": ("policy",),
    "pool": ("pool", "pool_mode"),
    "profile": ("name",),
    "retries_most": ("retries",),
    "recommendation_id": ("recommendation",),
    "weights": ("weight",),
    "worth_w": ("prefer_gpu_worth",),
    "workload_id": ("workload", "id", "cancel", "array"),
}
# Files whose fields are those of the request: their names are kept.
_FILES = frozenset({"file", "changes"})
_WORDS = re.compile(rf"\b({'|'.join(_PARAMETERS)})\b")


def name_parameters(violations: tuple[Violation, ...], context: click.Context | None) -> tuple[Violation, ...]:
    """Returns violations with the command's parameters in place of request fields."""
    if context is None or _is_from_file(context):
        return tuple(Violation(one.field.removeprefix("spec."), one.problem, one.remedy) for one in violations)
    return tuple(
        Violation(
            _parameter_of(one.field, context), _rename_words(one.problem, context), _rename_words(one.remedy, context)
        )
        for one in violations
    )


def _is_from_file(context: click.Context) -> bool:
    return any(context.params.get(name) for name in _FILES)


def _parameter_of(field: str, context: click.Context) -> str:
    """Returns the parameters that fill a field: given ones, the innermost name first; else one of its name, if any."""
    names = re.sub(r"\[[^]]*\]", "", field).split(".")[::-1]
    for name in names:
        found = [one for one in _parameters_for(name, context) if _is_given(one, context)]
        if found:
            return " or ".join(map(_describe, found))
    return next((_describe(one) for one in _parameters_for(names[0], context)), field)


def _parameters_for(name: str, context: click.Context) -> list[click.Parameter]:
    wanted = (name, name.removesuffix("_s"), *_PARAMETERS.get(name, ()))
    return [one for one in context.command.params if one.name in wanted]


def _is_given(parameter: click.Parameter, context: click.Context) -> bool:
    return context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE


def _rename_words(text: str, context: click.Context) -> str:
    """Replaces the names of fields by the command's parameters, given or not."""

    def rename(match: re.Match[str]) -> str:
        names = _PARAMETERS[match[0]]
        found = next((one for name in names for one in context.command.params if one.name == name), None)
        return match[0] if found is None or match[0] in {"pool", "profile"} else _describe(found)

    return _WORDS.sub(rename, text)


def _describe(parameter: click.Parameter) -> str:
    """Formats a parameter as people type it: --node, or NODE for an argument."""
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return (parameter.metavar or parameter.name or "").upper()
