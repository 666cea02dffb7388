"""What work had rather, in the options of commands that submit it: GPU models, and nodes that have its model data."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from eelgrid_controller.cli.completion import complete_model_lists
from eelgrid_protos.messages import GpuPreference, ModelData

_Command = TypeVar("_Command", bound=Callable[..., Any])


def split_names(text: str) -> tuple[str, ...]:
    """Splits `A,B` into names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _worth_option(option: str, what: str) -> Callable[[_Command], _Command]:
    return click.option(
        option,
        type=click.FloatRange(0.0, 1e6),
        metavar="WATTS",
        help=f"How much more {what} may cost, in modelled watts; default: it is taken wherever it has room.",
    )


def preference_options(command: _Command) -> _Command:
    """Adds --prefer-gpu-model, --prefer-gpu-worth, --model-data and --model-data-worth."""
    command = _worth_option("--model-data-worth", "a node with its model data")(command)
    command = click.option(
        "--model-data",
        default="",
        metavar="NAME,...",
        help="Model data that it loads, such as meta-llama/Llama-3.1-8B: nodes whose agents have all of it on disk are preferred.",
    )(command)
    command = _worth_option("--prefer-gpu-worth", "a preferred model")(command)
    return click.option(
        "--prefer-gpu-model",
        default="",
        help="GPU models that are preferred to others that are acceptable: A,B.",
        shell_complete=complete_model_lists,
    )(command)


def build_preference(flags: dict[str, Any]) -> GpuPreference | None:
    """Builds the preference that the flags describe; None without one. Raises UsageError."""
    models, worth_w = _read_names(flags, "prefer_gpu_model", "prefer_gpu_worth")
    return GpuPreference(models=models, worth_w=worth_w) if models else None


def build_model_data(flags: dict[str, Any]) -> ModelData | None:
    """Builds what the flags say of model data; None without any. Raises UsageError."""
    names, worth_w = _read_names(flags, "model_data", "model_data_worth")
    return ModelData(data_names=names, worth_w=worth_w) if names else None


def _read_names(flags: dict[str, Any], names: str, worth: str) -> tuple[tuple[str, ...], float | None]:
    """Returns what is preferred, and what it is worth; raises UsageError where only the second is said."""
    found, worth_w = split_names(flags[names]), flags[worth]
    if not found and worth_w is not None:
        options = (f"--{name.replace('_', '-')}" for name in (worth, names))
        raise click.UsageError(f"{' needs '.join(options)}, which says what is worth that much")
    return found, worth_w
