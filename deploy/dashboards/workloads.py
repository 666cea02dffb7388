"""The dashboard of workloads: whose the joules are, what a unit of work costs, and why some wait.

Owns the questions of somebody who runs something. Must not know boards. What a workload did
is on its own page (vLLM, SGLang, a training job), which the same Prometheus has to scrape with
the labels by which joules are divided; three text variables name the counters.
"""

from deploy.dashboards.panels import PHASES, Page, Query, Row, Variable, bars, figure, lines, listing
from deploy.dashboards.queries import ENERGY_TODAY, RATE, increase, of, owned, rate, some

__all__ = ["PAGE"]

_OWNED = "eelgrid_workload_gpu_energy_joules_total"
_CHOSEN = 'namespace=~"$namespace", workload=~"$workload"'
_SERVED = 'workload=~"$workload"'
_DAY = "24h"
_NOBODY = ENERGY_TODAY.replace("}", ', namespace=~"[(]una.*"}')
_WATTS, _JOULES = f"rate({owned(_CHOSEN)})", f"increase({owned(_CHOSEN, _DAY)})"


# Of the labels that may be chosen only those of a series are there.
_OWNER = "{{namespace}} {{pod}}{{workload}}{{slurm_job}}{{ray_job}}"


def _divided(expression: str) -> str:
    """By the labels chosen; owners that have none of them are one series, which is called so."""
    whole = f"sum by ($by) ({expression})"
    nameless = f"{whole} and on ($by) vector(0)"
    return f'({whole} unless on ($by) vector(0)) or label_replace({nameless}, "workload", "(no such label)", "", "")'


def _per(counter: str) -> str:
    """Joules of each unit that a counter of the workload's own page counts; nothing where it stands still."""
    work = f'sum by ($by) (rate({{__name__="{counter}", workload=~"$workload"}}[{RATE}]))'
    return f"sum by ($by) ({_WATTS}) / ({work} > 0)"


_NOW = Row(
    "Now",
    (
        figure(
            "Power with an owner",
            "Power charged to the selected workloads by the agents that have series: the dashboard of nodes shows of how many GPUs.",
            "watt",
            Query(f"sum({_WATTS})"),
        ),
        figure(
            "Energy without an owner",
            "Share of the energy of today without an owner: the capacity is not allocated, or its user is unknown. From the energy ledger.",
            "percentunit",
            Query(f"sum({_NOBODY}) / (sum({ENERGY_TODAY}) > 0)"),
            width=8,
        ),
        figure(
            "Services and jobs",
            "Services and jobs with objectives.",
            "short",
            Query(f"sum({of('eelgrid_services')}) + sum({of('eelgrid_jobs')})"),
        ),
        figure(
            "Waiting",
            "Workloads that are not placed yet.",
            "short",
            Query("sum(" + of("eelgrid_workloads", 'phase="pending"') + ")"),
            bad_above=1,
            bad="orange",
        ),
        figure(
            "Refused in 24 h",
            "Submissions that fit on no node, or that are contradictory.",
            "short",
            Query(f"round(sum({increase('eelgrid_workloads_refused_total', over=_DAY)}))"),
            bad_above=1,
            bad="orange",
            instant=True,
        ),
    ),
    height=4,
)
_ENERGY = Row(
    "Energy",
    (
        lines(
            "Power by owner",
            "Power charged by the agents, by the selected labels. The largest 20.",
            "watt",
            Query(f"topk(20, {_divided(_WATTS)})", _OWNER),
            stacked=True,
        ),
        lines(
            "Power by part",
            "Bare idle power is charged to the owner of the allocation, context idle power to owners of open contexts, active power to those that work: docs/explanation/energy-attribution.md.",
            "watt",
            Query(f"sum by (part) ({_WATTS})", "{{part}}"),
            stacked=True,
            width=6,
        ),
        lines(
            "Power by method",
            "How owners and their shares were determined, and with which confidence.",
            "watt",
            Query(f"sum by (method, confidence) ({_WATTS})", "{{method}}, {{confidence}}"),
            stacked=True,
            width=6,
        ),
        lines(
            "Joules per token",
            "Power over the token rate of the workload's own metrics; empty if they are not scraped or do not change.",
            "joule",
            Query(_per("$token_counter"), _OWNER),
            width=8,
        ),
        lines(
            "Joules per request",
            "Power over the request rate of the workload's own metrics.",
            "joule",
            Query(_per("$request_counter"), _OWNER),
            width=8,
        ),
        lines(
            "Joules per step",
            "Power over the step rate of a training job's own metrics.",
            "joule",
            Query(_per("$step_counter"), _OWNER),
            width=8,
        ),
        listing(
            "Energy of 24 h by owner",
            "By the selected labels. The largest 50.",
            "kwatth",
            Query(f"topk(50, {_divided(_JOULES)}) / 3.6e6", "energy"),
        ),
        bars(
            "Energy today without an owner",
            "(unallocated): capacity without an owner. (unattributed): unknown user. From the energy ledger.",
            "kwatth",
            Query(f"sum by (namespace) ({_NOBODY}) / 3.6e6", "{{namespace}}"),
            width=12,
        ),
    ),
)
_SERVICES = Row(
    "Services",
    (
        lines(
            "Latency against objective",
            "Latency quantile measured in the last window, and its objective.",
            "s",
            Query(f"max by (workload) ({of('eelgrid_service_latency_seconds', _SERVED)})", "{{workload}}"),
            Query(
                f"max by (workload) ({of('eelgrid_service_latency_objective_seconds', _SERVED)})",
                "{{workload}} objective",
            ),
        ),
        lines(
            "Replicas",
            "Replicas of each service: wanted, and serving.",
            "short",
            Query(f"max by (workload, state) ({of('eelgrid_service_replicas', _SERVED)})", "{{workload}} {{state}}"),
        ),
        lines(
            "Windows of each service",
            "Kept, missed, or too few responses to judge; per second.",
            "ops",
            Query(
                f"sum by (workload, verdict) ({rate('eelgrid_service_windows_total', _SERVED)})",
                "{{workload}} {{verdict}}",
            ),
            width=8,
        ),
        lines(
            "Age of the last window",
            "Above a minute the service is no longer observed.",
            "s",
            Query(f"max by (workload) ({of('eelgrid_service_window_age_seconds', _SERVED)})", "{{workload}}"),
            width=8,
        ),
        lines(
            "Slower than its profile",
            "Estimated latency relative to the profile; 1 is as measured.",
            "short",
            Query(f"max by (workload) ({of('eelgrid_service_slowness_ratio', _SERVED)})", "{{workload}}"),
            width=8,
        ),
    ),
)
_JOBS = Row(
    "Training jobs",
    (
        lines(
            "Slowdown against promise",
            "Time so far relative to the largest measured limit, minus one; and the objective at the end.",
            "percentunit",
            Query(f"max by (workload) ({of('eelgrid_job_slowdown_ratio', _SERVED)})", "{{workload}}"),
            Query(f"max by (workload) ({of('eelgrid_job_slowdown_promised_ratio', _SERVED)})", "{{workload}} promised"),
            width=8,
        ),
        lines(
            "Energy saved",
            "Compared with the same work at the largest measured limit, by the job's own curve of power and speed by limit.",
            "percentunit",
            Query(f"max by (workload) ({of('eelgrid_job_energy_saved_ratio', _SERVED)})", "{{workload}}"),
            width=8,
        ),
        lines(
            "Power limit of each GPU",
            "Limit as read back, and wanted limit.",
            "watt",
            Query(f"max by (workload) ({of('eelgrid_job_power_limit_watts', _SERVED)})", "{{workload}}"),
            Query(f"max by (workload) ({of('eelgrid_job_power_limit_wanted_watts', _SERVED)})", "{{workload}} wanted"),
            width=8,
        ),
    ),
)
_WAITING = Row(
    "Why some wait",
    (
        lines(
            "Waiting workloads by reason",
            "By the constraint that they wait for; `eelctl explain` gives it for one workload, with what would help.",
            "short",
            Query(some(f"max by (reason) ({of('eelgrid_pending_workloads')})", "reason"), "{{reason}}"),
            width=8,
            stacked=True,
        ),
        lines(
            "Workloads by phase",
            "As counted by the controller.",
            "short",
            Query(f"max by (phase) ({of('eelgrid_workloads')})", "{{phase}}"),
            width=8,
            colours=PHASES,
        ),
        lines(
            "Gated pods by reason",
            "Pods that wait behind Eelgrid's gate, as reported by the leader. Empty without Kubernetes.",
            "short",
            Query(f"max by (reason) ({of('eelgrid_kubernetes_pods_waiting')})", "{{reason}}"),
            width=8,
            stacked=True,
        ),
    ),
)

PAGE = Page(
    "workloads",
    "Eelgrid / Workloads",
    "Energy by owner; joules per token, request and step; whether objectives are met; and why workloads wait.",
    (_NOW, _ENERGY, _SERVICES, _JOBS, _WAITING),
    (
        Variable("namespace", "Namespace", f"label_values({of(_OWNED)}, namespace)"),
        Variable("workload", "Workload", f"label_values({of(_OWNED)}, workload)"),
    ),
    texts=(
        ("token_counter", "Counter of tokens", "vllm:generation_tokens_total"),
        ("request_counter", "Counter of requests", "vllm:request_success_total"),
        ("step_counter", "Counter of steps", "steps_total"),
    ),
    choices=(("by", "Divide by", ("workload", "namespace, pod", "slurm_job", "ray_job")),),
)
