"""How each server spells what a scaler wants to know.

Owns the table. Must not know how a page is read or what is done with a number.

A name is as the page spells it; several are alternatives, the newest first, of
which the first that the page has is taken. A counter may end in _total or not: the
reader tries both. `factor` makes it base units. What a server does not tell is
empty, and `notes` says what its nearest word would be and why it is not taken.

Sources, read in 2026: docs.vllm.ai design/metrics (V1) and v0.8.5 serving/metrics
(older names); huggingface.co docs/text-generation-inference reference/metrics;
docs.nvidia.com triton-inference-server user_guide/metrics; docs.sglang.io
references/production_metrics; docs.ray.io serve/monitoring.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from eelgrid_controller.serving.errors import Unusable

__all__ = ["SERVERS", "Distribution", "ServerNames", "Sum", "generic", "names_of"]

_MILLI, _MICRO = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram or a summary by its name without _bucket, _sum and _count."""

    names: tuple[str, ...] = ()
    factor: float = 1.0  # to seconds
    summaries: tuple[str, ...] = ()  # quantiles of a sliding window that the server made itself
    summary_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Sum:
    """Counters or gauges; of a quotient of two counters `over` is the lower one."""

    names: tuple[str, ...] = ()
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNames:
    """What one kind of server tells."""

    response: Distribution = Distribution()  # a whole request, waiting included
    first_token: Distribution = Distribution()
    inter_token: Distribution = Distribution()
    waiting_time: Distribution = Distribution()
    response_time_sum: Sum = Sum()  # seconds of all requests, where there is no distribution
    arrived: Sum = Sum()  # requests that came; empty: finished and the growth of what is inside
    finished: Sum = Sum()
    waiting: Sum = Sum()  # gauge
    running: Sum = Sum()  # gauge
    output_tokens: Sum = Sum()
    context_tokens: Sum = Sum()
    model_label: str = "model_name"
    notes: str = ""


SERVERS: Mapping[str, ServerNames] = {
    "vllm": ServerNames(
        response=Distribution(("vllm:e2e_request_latency_seconds",)),
        first_token=Distribution(("vllm:time_to_first_token_seconds",)),
        inter_token=Distribution(("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")),
        waiting_time=Distribution(("vllm:request_queue_time_seconds",)),
        finished=Sum(("vllm:request_success_total",)),
        waiting=Sum(("vllm:num_requests_waiting",)),
        running=Sum(("vllm:num_requests_running",)),
        output_tokens=Sum(("vllm:generation_tokens_total",)),
        context_tokens=Sum(("vllm:prompt_tokens_total",)),
        notes="counts what finished, not what came: arrivals are finished plus growth of waiting and running",
    ),
    "sglang": ServerNames(
        response=Distribution(("sglang:e2e_request_latency_seconds",)),
        first_token=Distribution(("sglang:time_to_first_token_seconds",)),
        inter_token=Distribution(("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds")),
        waiting_time=Distribution(("sglang:queue_time_seconds",)),
        finished=Sum(("sglang:num_requests_total", "sglang:e2e_request_latency_seconds_count")),
        waiting=Sum(("sglang:num_queue_reqs",)),
        running=Sum(("sglang:num_running_reqs",)),
        output_tokens=Sum(("sglang:generation_tokens_total",)),
        context_tokens=Sum(("sglang:prompt_tokens_total",)),
        notes="gen_throughput is a gauge of output alone and is not read: it falls in overload as in idleness",
    ),
    "tgi": ServerNames(
        response=Distribution(("tgi_request_duration",)),
        waiting_time=Distribution(("tgi_request_queue_duration",)),
        inter_token=Distribution(("tgi_request_mean_time_per_token_duration",)),
        arrived=Sum(("tgi_request_count",)),
        finished=Sum(("tgi_request_success",)),
        waiting=Sum(("tgi_queue_size",)),
        running=Sum(("tgi_batch_current_size",)),
        output_tokens=Sum(("tgi_request_generated_tokens_sum",)),
        context_tokens=Sum(("tgi_request_input_length_sum",)),
        model_label="",
        notes="no time to first token; the inter-token latency is a mean of each request with its prompt in it",
    ),
    "triton": ServerNames(
        response=Distribution((), summaries=("nv_inference_request_summary_us",), summary_factor=_MICRO),
        first_token=Distribution(("nv_inference_first_response_histogram_ms",), _MILLI),
        waiting_time=Distribution((), summaries=("nv_inference_queue_summary_us",), summary_factor=_MICRO),
        response_time_sum=Sum(("nv_inference_request_duration_us",), _MICRO),
        finished=Sum(("nv_inference_request_success",)),
        waiting=Sum(("nv_inference_pending_request_count",)),
        model_label="model",
        notes="quantiles only with --metrics-config summary_latencies=true, else a mean; the first response is the"
        " first token only of a backend that streams; pending requests are those that wait",
    ),
    "ray-serve": ServerNames(
        response=Distribution(
            ("ray_serve_http_request_latency_ms", "ray_serve_deployment_processing_latency_ms"), _MILLI
        ),
        arrived=Sum(("ray_serve_num_router_requests_total", "ray_serve_num_router_requests")),
        finished=Sum(("ray_serve_deployment_request_counter_total", "ray_serve_deployment_request_counter")),
        waiting=Sum(("ray_serve_deployment_queued_queries",)),
        running=Sum(("ray_serve_replica_processing_queries",)),
        model_label="deployment",
        notes="the processing latency leaves the queue out; it stands in where the HTTP latency is missing",
    ),
}


def generic(name: str, *, factor: float = 1.0, waiting: str = "", running: str = "", label: str = "") -> ServerNames:
    """Any server with a histogram of response times; its _count tells what finished."""
    return ServerNames(
        response=Distribution((name,), factor),
        finished=Sum((f"{name}_count",)),
        waiting=Sum((waiting,) if waiting else ()),
        running=Sum((running,) if running else ()),
        model_label=label,
        notes="without gauges of what waits and runs, arrivals are what finished: overload shows late",
    )


def names_of(server: str) -> ServerNames:
    """The names of a kind of server; Unusable names those that there are."""
    if server not in SERVERS:
        raise Unusable("server", f"{server!r} is unknown", f"take one of {', '.join(SERVERS)}, or name a histogram")
    return SERVERS[server]
