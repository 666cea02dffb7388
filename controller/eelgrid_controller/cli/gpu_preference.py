"""GPU models in the options of commands that submit work: lists of names, and which are preferred."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from eelgrid_controller.cli.completion import complete_model_lists
from eelgrid_protos.messages import GpuPreference

_Command = TypeVar("_Command", bound=Callable[..., Any])


def split_models(text: str) -> tuple[str, ...]:
    """Splits `A,B` into names."""
    return tuple(model.strip() for model in text.split(",") if model.strip())


def preference_options(command: _Command) -> _Command:
    """Adds --prefer-gpu-model and --prefer-gpu-worth."""
    command = click.option(
        "--prefer-gpu-worth",
        type=click.FloatRange(0.0, 1e6),
        metavar="WATTS",
        help="How much more a preferred model may cost, in modelled watts; default: it is taken wherever it has room.",
    )(command)
    return click.option(
        "--prefer-gpu-model",
        default="",
        help="GPU models that are preferred to others that are acceptable: A,B.",
        shell_complete=complete_model_lists,
    )(command)


def build_preference(flags: dict[str, Any]) -> GpuPreference | None:
    """Builds the preference that the flags describe; None without one. Raises UsageError."""
    models, worth_w = split_models(flags["prefer_gpu_model"]), flags["prefer_gpu_worth"]
    if not models and worth_w is not None:
        raise click.UsageError("--prefer-gpu-worth needs --prefer-gpu-model, which says what is worth that much")
    return GpuPreference(models=models, worth_w=worth_w) if models else None
