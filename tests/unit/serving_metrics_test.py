"""Pages of each kind of server, read into a window: the numbers are worked out by hand.

The names are those of the servers' documentation (service_metrics.py has the sources);
the values are made so that every quantile lies where one can see it.
"""

import math

import pytest

from eelgrid_controller.objectives.services.service_metrics import (
    SERVER_NAMES,
    LiveDistribution,
    ScrapePair,
    generic_names,
    parse_exposition,
    server_metric_names,
    service_window,
)
from eelgrid_controller.profiles.points import InvalidServingValue, MetricsUnreadable


def histogram(name, counts, labels="", borders=("0.1", "0.2", "0.4", "+Inf")):
    inside = f",{labels}" if labels else ""
    lines = [f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{le="{border}"{inside}}} {count}' for border, count in zip(borders, counts, strict=True)]
    tail = f"{{{labels}}}" if labels else ""
    return "\n".join([*lines, f"{name}_sum{tail} {counts[-1] * 0.15}", f"{name}_count{tail} {counts[-1]}"])


def looked(server, before, after, seconds=10.0, model=""):
    names = server_metric_names(server) if isinstance(server, str) else server
    return service_window(
        names, [ScrapePair(parse_exposition(before, 100.0), parse_exposition(after, 100.0 + seconds))], model
    )


def _vllm(scale, waiting, running):
    model = 'engine="0",model_name="m"'
    return "\n".join(
        [
            "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{{{model}}} {waiting}",
            f"vllm:num_requests_running{{{model}}} {running}",
            f'vllm:request_success_total{{{model},finished_reason="stop"}} {60 * scale}',
            f'vllm:request_success_total{{{model},finished_reason="length"}} {40 * scale}',
            f"vllm:generation_tokens_total{{{model}}} {2e4 * scale}",
            f"vllm:prompt_tokens_total{{{model}}} {5e4 * scale}",
            histogram("vllm:e2e_request_latency_seconds", [0, 50 * scale, 100 * scale, 100 * scale], model),
            histogram("vllm:time_to_first_token_seconds", [90 * scale, 100 * scale, 100 * scale, 100 * scale], model),
            histogram(
                "vllm:inter_token_latency_seconds", [9000 * scale, 10000 * scale, 10000 * scale, 10000 * scale], model
            ),
            histogram("vllm:request_queue_time_seconds", [100 * scale] * 4, model),
        ]
    )


def test_vllm():
    found = looked("vllm", _vllm(1, 2, 8), _vllm(3, 12, 10))
    assert found.response.count == 200
    assert found.response.quantile(0.5).value_s == pytest.approx(0.2)
    assert found.response.quantile(0.75).value_s == pytest.approx(0.3)
    assert found.response.quantile(0.75).resolution == pytest.approx(0.1 / 0.3)
    assert found.first_token.quantile(0.95).value_s == pytest.approx(0.15)
    assert found.inter_token.quantile(0.45).value_s == pytest.approx(0.05)
    assert found.inter_token.mean_s == pytest.approx(0.15)
    assert found.waiting_time.quantile(0.5).value_s == pytest.approx(0.05)
    assert found.finished_hz == pytest.approx(20.0)
    assert found.arrived_hz == pytest.approx((200 + 10 + 2) / 10.0)  # requests are conserved
    assert (found.waiting, found.waiting_growth, found.running) == (12, 10, 10)
    assert found.output_token_hz == pytest.approx(4000.0)
    assert found.context_token_hz == pytest.approx(10_000.0)


def test_vllm_of_before_the_names_changed():
    before = _vllm(1, 0, 0).replace("inter_token_latency_seconds", "time_per_output_token_seconds")
    after = _vllm(2, 0, 0).replace("inter_token_latency_seconds", "time_per_output_token_seconds")
    assert looked("vllm", before, after).inter_token.count == 10_000


def test_only_the_model_that_is_asked_for():
    other = _vllm(50, 9, 9).replace('model_name="m"', 'model_name="n"')
    found = looked("vllm", f"{_vllm(1, 0, 0)}\n{other}", f"{_vllm(2, 0, 0)}\n{other}", model="m")
    assert found.finished_hz == pytest.approx(10.0)
    assert found.waiting == 0


def _sglang(scale, queue):
    label = 'model_name="m"'
    return "\n".join(
        [
            f"sglang:num_queue_reqs{{{label}}} {queue}",
            f"sglang:num_running_reqs{{{label}}} 5",
            f"sglang:num_requests_total{{{label}}} {100 * scale}",
            f"sglang:generation_tokens_total{{{label}}} {7.0e03 * scale}",
            f"sglang:gen_throughput{{{label}}} 86.5",
            histogram("sglang:e2e_request_latency_seconds", [0, 100 * scale, 100 * scale, 100 * scale], label),
            histogram("sglang:time_to_first_token_seconds", [0, 0, 100 * scale, 100 * scale], label),
            histogram("sglang:time_per_output_token_seconds", [100 * scale] * 4, label),
        ]
    )


def test_sglang():
    found = looked("sglang", _sglang(1, 0), _sglang(2, 30))
    assert found.arrived_hz == pytest.approx(13.0)
    assert found.response.quantile(0.5).value_s == pytest.approx(0.15)
    assert found.first_token.quantile(0.5).value_s == pytest.approx(0.3)
    assert found.inter_token.quantile(0.9).value_s == pytest.approx(0.09)
    assert found.output_token_hz == pytest.approx(700.0)


def _tgi(scale, queue):
    return "\n".join(
        [
            "# TYPE tgi_request_count counter",
            f"tgi_request_count {120 * scale}",
            f"tgi_request_success {100 * scale}",
            f"tgi_queue_size {queue}",
            "tgi_batch_current_size 16",
            histogram("tgi_request_duration", [0, 50 * scale, 100 * scale, 100 * scale]),
            histogram("tgi_request_queue_duration", [100 * scale] * 4),
            histogram("tgi_request_mean_time_per_token_duration", [100 * scale] * 4),
            histogram("tgi_request_generated_tokens", [0, 0, 0, 100 * scale], borders=("10", "100", "1000", "+Inf")),
            histogram("tgi_request_input_length", [0, 0, 0, 100 * scale], borders=("10", "100", "1000", "+Inf")),
        ]
    )


def test_tgi_counts_what_comes_and_has_no_first_token():
    found = looked("tgi", _tgi(1, 0), _tgi(2, 20))
    assert found.arrived_hz == pytest.approx(12.0)
    assert found.finished_hz == pytest.approx(10.0)
    assert found.first_token is None
    assert found.response.quantile(0.5).value_s == pytest.approx(0.2)
    assert found.output_token_hz == pytest.approx(100 * 0.15 / 10.0)
    assert "no time to first token" in SERVER_NAMES["tgi"].notes


def _triton(scale, pending, *, summaries):
    label = 'model="m",version="1"'
    lines = [
        f"nv_inference_request_success{{{label}}} {100 * scale}",
        f"nv_inference_request_duration_us{{{label}}} {2.5e7 * scale}",
        f"nv_inference_queue_duration_us{{{label}}} {1e6 * scale}",
        f"nv_inference_pending_request_count{{{label}}} {pending}",
    ]
    if summaries:
        lines += [
            f'nv_inference_request_summary_us{{{label},quantile="0.5"}} 200000',
            f'nv_inference_request_summary_us{{{label},quantile="0.95"}} 410000',
            f'nv_inference_request_summary_us{{{label},quantile="0.99"}} NaN',
            f"nv_inference_request_summary_us_count{{{label}}} {100 * scale}",
            f"nv_inference_request_summary_us_sum{{{label}}} {2.5e7 * scale}",
            histogram(
                "nv_inference_first_response_histogram_ms",
                [0, 100 * scale, 100 * scale, 100 * scale],
                label,
                borders=("100", "500", "2000", "+Inf"),
            ),
        ]
    return "\n".join(lines)


def test_triton_has_a_mean_by_itself():
    found = looked("triton", _triton(1, 0, summaries=False), _triton(3, 4, summaries=False))
    assert found.response is None
    assert found.mean_response_s == pytest.approx(0.25)
    assert found.arrived_hz == pytest.approx(20.4)
    assert found.first_token is None


def test_triton_has_quantiles_if_told_to():
    found = looked("triton", _triton(1, 0, summaries=True), _triton(3, 4, summaries=True), model="m")
    assert found.response.quantile(0.95).value_s == pytest.approx(0.41)
    assert found.response.quantile(0.95).of == math.inf
    assert found.response.quantile(0.99) is None  # no number
    assert found.response.quantile(0.9) is None  # not made
    assert found.first_token.quantile(0.5).value_s == pytest.approx(0.3)


def _ray(scale, queued, *, total):
    label = 'application="a",deployment="d",replica="d#1"'
    end = "_total" if total else ""
    borders = ("100", "200", "400", "+Inf")
    return "\n".join(
        [
            f'ray_serve_num_router_requests{end}{{application="a",deployment="d"}} {110 * scale}',
            f"ray_serve_deployment_request_counter{end}{{{label}}} {100 * scale}",
            f'ray_serve_deployment_queued_queries{{deployment="d"}} {queued}',
            f"ray_serve_replica_processing_queries{{{label}}} 3",
            histogram(
                "ray_serve_deployment_processing_latency_ms", [0, 50 * scale, 100 * scale, 100 * scale], label, borders
            ),
        ]
    )


@pytest.mark.parametrize("total", [True, False])
def test_ray_serve_with_and_without_the_newer_ending(total):
    found = looked("ray-serve", _ray(1, 0, total=total), _ray(2, 10, total=total), model="d")
    assert found.arrived_hz == pytest.approx(11.0)
    assert found.finished_hz == pytest.approx(10.0)
    assert found.response.quantile(0.5).value_s == pytest.approx(0.2)
    assert (found.waiting, found.running) == (10, 3)


def test_any_server_with_a_histogram():
    names = generic_names("http_request_duration_seconds", waiting="in_queue")
    before = histogram("http_request_duration_seconds", [0, 0, 0, 0]) + "\nin_queue 1"
    after = histogram("http_request_duration_seconds", [0, 100, 100, 100]) + "\nin_queue 21"
    found = looked(names, before, after)
    assert found.response.quantile(0.5).value_s == pytest.approx(0.15)
    assert found.arrived_hz == pytest.approx(12.0)


def test_a_restart_counts_what_came_since():
    found = looked("vllm", _vllm(5, 0, 0), _vllm(1, 0, 0))
    assert found.finished_hz == pytest.approx(10.0)
    assert found.response.count == 100


def test_a_histogram_of_which_one_bucket_fell_was_reset_as_a_whole():
    names = generic_names("h")
    found = looked(names, histogram("h", [40, 50, 60, 70]), histogram("h", [10, 90, 95, 100]))
    assert found.response.counts == (10, 90, 95, 100)


def test_a_process_that_started_again_was_reset_even_if_nothing_fell():
    names, started = generic_names("h"), "process_start_time_seconds"
    before = f"{histogram('h', [1, 1, 1, 1])}\n{started} 1000.5"
    after = f"{histogram('h', [5, 30, 30, 30])}\n{started} 1090.25"
    assert looked(names, before, after).response.counts == (5, 30, 30, 30)
    assert looked(names, before, after.replace("1090.25", "1000.5")).response.counts == (4, 29, 29, 29)


def test_replicas_are_added_up():
    pairs = [ScrapePair(parse_exposition(_vllm(1, 1, 1), 0.0), parse_exposition(_vllm(2, 1, 1), 10.0))] * 3
    found = service_window(server_metric_names("vllm"), pairs)
    assert found.finished_hz == pytest.approx(30.0)
    assert found.waiting == 3
    assert found.response.count == 300


def test_no_time_no_window():
    page = parse_exposition(_vllm(1, 0, 0), 5.0)
    assert service_window(server_metric_names("vllm"), [ScrapePair(page, page)]) is None
    assert service_window(server_metric_names("vllm"), []) is None


def test_a_page_without_the_names_reports_nothing():
    found = looked("vllm", "up 1", "up 1")
    assert found.response is None
    assert found.arrived_hz is None
    assert found.waiting is None


def test_too_few_or_past_the_last_border():
    few = LiveDistribution((0.1, math.inf), (5.0, 10.0))
    assert few.quantile(0.5) is None
    many = LiveDistribution((0.1, math.inf), (500.0, 1000.0))
    assert many.quantile(0.95).is_least
    assert many.quantile(0.95).value_s == 0.1
    assert LiveDistribution((0.1, math.inf), (0.0, 60.0)).quantile(0.99) is None  # 60 say nothing of the last hundredth


def test_a_histogram_without_a_sum_has_no_mean():
    names = generic_names("h")
    pages = [histogram("h", counts) for counts in ([1, 2, 3, 3], [50, 60, 70, 70])]
    assert looked(names, *pages).response.mean_s == pytest.approx(0.15)
    bare = ["\n".join(line for line in page.splitlines() if "_sum" not in line) for page in pages]
    assert looked(names, *bare).response.mean_s is None
    assert looked(names, pages[0], pages[0].replace(" 3", " 4")).response.mean_s is None  # too few


def test_the_grammar():
    page = parse_exposition(
        '# HELP a b\n\na_total{x="1, \\"2\\" \\\\ \\n}",y="#"} 3 1395066363000\nb +Inf\nc 1e3\nd_bucket{le="0.5"} 7 # {trace_id="q"} 0.3 1.5\n# EOF',
        1.0,
    )
    (sample,) = page.samples_of("a_total")
    assert sample.label("x") == '1, "2" \\ \n}'
    assert sample.label("y") == "#"
    assert sample.label("z") is None
    assert sample.value == 3.0
    assert page.samples_of("b")[0].value == math.inf
    assert page.samples_of("d_bucket")[0].value == 7.0
    assert page.samples_of("none") == ()


@pytest.mark.parametrize(
    ("text", "line"),
    [("a{x=1} 2", "line 1"), ("ok 1\na b c d", "line 2"), ("a", "line 1"), ('a{x="1"', "line 1"), ("a x", "line 1")],
)
def test_half_a_page_is_refused(text, line):
    with pytest.raises(MetricsUnreadable, match=line):
        parse_exposition(text, 0.0)


def test_bounds(monkeypatch):
    from eelgrid_controller.objectives.services import service_metrics

    monkeypatch.setattr(service_metrics, "SAMPLES_MOST", 2)
    with pytest.raises(MetricsUnreadable, match="more than 2 samples"):
        parse_exposition("a 1\nb 2\nc 3", 0.0)
    monkeypatch.setattr(service_metrics, "BYTES_MOST", 3)
    with pytest.raises(MetricsUnreadable, match="bytes"):
        parse_exposition("a 1\nb 2", 0.0)


def test_an_unknown_server_is_refused_with_those_that_there_are():
    with pytest.raises(InvalidServingValue, match="vllm, sglang, tgi, triton, ray-serve"):
        server_metric_names("llama.cpp")
    assert all(names.notes for names in SERVER_NAMES.values())
