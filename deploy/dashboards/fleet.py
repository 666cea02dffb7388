"""The dashboard of the fleet: what it draws and costs, whether promises are kept, what changed.

Owns the questions of somebody who looks once in the morning. Must not know single devices.
"""

from deploy.dashboards.panels import PHASES, STATES, VERDICTS, Page, Query, Row, bars, figure, lines
from deploy.dashboards.queries import ENERGY_TODAY, increase, of, rate

__all__ = ["PAGE"]

_POWER = f"sum({of('eelgrid_measured_power_watts')})"
_PRICE = f"max by (currency) ({of('eelgrid_energy_price_per_joule')})"
_KEPT = 'verdict="kept"'
_JUDGED = 'verdict=~"kept|missed"'
_HOUR = "1h"
_PLACEMENT, _LIMITS = 'part="placement"', 'part="limits"'


def _attainment(by: str, over: str) -> str:
    metric, head = (
        ("eelgrid_service_windows_total", f"sum by ({by})") if by else ("eelgrid_promise_windows_total", "sum")
    )
    return f"{head} ({increase(metric, _KEPT, over=over)}) / ({head} ({increase(metric, _JUDGED, over=over)}) > 0)"


_NOW = Row(
    "Now",
    (
        figure("Power of GPUs", "Sum of fresh power readings of all GPUs, as agents sent them.", "watt", Query(_POWER)),
        figure(
            "Energy today",
            "Energy of all GPUs since midnight (by the prices' offset from UTC), idle power included, from the energy ledger: what eelctl energy --since today shows. The ledger has a window of energy when it is over, so this lags by up to two minutes.",
            "kwatth",
            Query(f"sum({ENERGY_TODAY}) / 3.6e6"),
        ),
        figure(
            "Cost per hour",
            "Measured power at the current price, PUE and carbon price included, in the policy's currency. Empty without prices.",
            "short",
            Query(f"{_POWER} * on () group_right () {_PRICE} * 3600", "{{currency}}"),
        ),
        figure(
            "Cost today",
            "Cost of the energy of today at the prices of its hours, from the energy ledger. Empty without prices.",
            "short",
            Query(f"max by (currency) ({of('eelgrid_energy_today_cost')})", "{{currency}}"),
        ),
        figure(
            "Saved against best fit",
            "Additional watts that the same work on the same nodes would draw now if plain best fit had placed it, both sides modelled; below 0 best fit would draw less. The placement engine dashboard shows what is compared.",
            "watt",
            Query(f"sum({of('eelgrid_saved_power_watts', _PLACEMENT)})"),
            bad_below=0.0,
            bad="orange",
        ),
        figure(
            "Saved today",
            "The same as energy since midnight (by the prices' offset from UTC), or since the controller's start if that is later. Savings by power limits are not included.",
            "kwatth",
            Query(f"max({of('eelgrid_saved_energy_today_joules')}) / 3.6e6"),
            bad_below=0.0,
            bad="orange",
        ),
        figure(
            "Promises kept, 1 h",
            "Share of all services' windows of the last hour in which the objective was met; windows with too few responses to judge are left out.",
            "percentunit",
            Query(_attainment("", _HOUR)),
            bad_below=0.95,
            width=6,
        ),
        figure(
            "GPUs allocated",
            "Allocated share of all GPUs.",
            "percentunit",
            Query(f"max({of('eelgrid_gpus_allocated_ratio')})"),
            width=6,
        ),
        figure(
            "Pending workloads",
            "Workloads waiting for placement; the workloads dashboard shows the reasons.",
            "short",
            Query("sum(" + of("eelgrid_workloads", 'phase="pending"') + ")"),
            bad_above=1,
            bad="orange",
            width=6,
        ),
        figure(
            "Nodes lost",
            "Nodes whose agents have been disconnected for longer than the grace period.",
            "short",
            Query("sum(" + of("eelgrid_nodes", 'state="lost"') + ")"),
            bad_above=1,
            width=6,
        ),
    ),
    height=4,
)
_ENERGY = Row(
    "Power and energy",
    (
        lines(
            "Power by GPU model",
            "Fresh power readings, summed by model.",
            "watt",
            Query(f"sum by (model) ({of('eelgrid_measured_power_watts')})", "{{model}}"),
            stacked=True,
        ),
        lines(
            "Power by pool",
            "Fresh power readings, summed by pool.",
            "watt",
            Query(f"max by (pool) ({of('eelgrid_pool_power_watts')})", "{{pool}}"),
            stacked=True,
        ),
        lines(
            "Measured and modelled power",
            "Measured power of the GPUs with a fresh reading, and modelled power of the current placements.",
            "watt",
            Query(_POWER, "measured"),
            Query(f"sum({of('eelgrid_modelled_power_watts')})", "modelled"),
        ),
        bars(
            "Energy today by namespace",
            "The parts of Energy today: (unallocated) and (unattributed) have no owner; namespaces beyond the hundred largest are summed up as other.",
            "kwatth",
            Query(f"topk(15, sum by (namespace) ({ENERGY_TODAY})) / 3.6e6", "{{namespace}}"),
        ),
        lines(
            "Cost per hour",
            "Measured power at the price of each moment, in the policy's currency.",
            "short",
            Query(f"{_POWER} * on () group_right () {_PRICE} * 3600", "{{currency}} per hour"),
            width=8,
        ),
        lines(
            "Price of energy",
            "Current price of a kilowatt-hour, carbon and PUE included.",
            "short",
            Query(f"{_PRICE} * 3.6e6", "{{currency}} per kWh"),
            width=8,
        ),
        lines(
            "Saved against plain best fit",
            "By placement: additional watts that the same work would draw if plain best fit had placed it. By limits: the most that lowered power limits save; limited work runs longer.",
            "watt",
            Query(f"sum({of('eelgrid_saved_power_watts', _PLACEMENT)})", "by placement"),
            Query(f"sum({of('eelgrid_saved_power_watts', _LIMITS)})", "by limits"),
            width=8,
        ),
    ),
)
_PROMISES = Row(
    "Promises",
    (
        lines(
            "Attainment of the last hour",
            "Share of judged windows in which a service met its objective. The worst 20.",
            "percentunit",
            Query(f"bottomk(20, {_attainment('workload', _HOUR)})", "{{workload}}"),
            top=1.0,
        ),
        lines(
            "Latency over objective",
            "Measured latency quantile over its objective; above 1 the objective is missed. The worst 20.",
            "percentunit",
            Query(
                f"topk(20, max by (workload) ({of('eelgrid_service_latency_seconds')}) / max by (workload) ({of('eelgrid_service_latency_objective_seconds')}))",
                "{{workload}}",
            ),
            top=1.0,
        ),
        lines(
            "Windows by verdict",
            "Windows of all services per second: kept, missed, or too few responses to judge.",
            "short",
            Query(f"sum by (verdict) ({rate('eelgrid_promise_windows_total')})", "{{verdict}}"),
            width=8,
            stacked=True,
            colours=VERDICTS,
        ),
        lines(
            "Slowdown of jobs, less what is promised",
            "Above 0 a training job is slower than its objective allows. The worst 20.",
            "percentunit",
            Query(
                f"topk(20, max by (workload) ({of('eelgrid_job_slowdown_ratio')}) - max by (workload) ({of('eelgrid_job_slowdown_promised_ratio')}))",
                "{{workload}}",
            ),
            width=8,
            top=0.0,
        ),
        lines(
            "Share of GPUs and CPUs allocated",
            "Allocated share of all GPUs and of all CPUs.",
            "percentunit",
            Query(f"max({of('eelgrid_gpus_allocated_ratio')})", "GPUs"),
            Query(f"max({of('eelgrid_cpus_allocated_ratio')})", "CPUs"),
            width=8,
            top=1.0,
        ),
    ),
)
_CHANGED = Row(
    "What changed",
    (
        lines(
            "Workloads by phase",
            "As counted by the controller.",
            "short",
            Query(f"max by (phase) ({of('eelgrid_workloads')})", "{{phase}}"),
            width=8,
            colours=PHASES,
        ),
        lines(
            "Changes of the plan",
            "Placements, moves, scalings, limits and the rest, per second.",
            "ops",
            Query(f"sum by (change) ({rate('eelgrid_plan_changes_total')})", "{{change}}"),
            width=8,
        ),
        lines(
            "Commands of the objectives loop",
            "Commands that the objectives loop carried out for objectives and budgets, per second.",
            "ops",
            Query(f"sum by (command) ({rate('eelgrid_objectives_commands_total')})", "{{command}}"),
            width=8,
        ),
        lines(
            "Nodes by state",
            "As counted by the controller.",
            "short",
            Query(f"max by (state) ({of('eelgrid_nodes')})", "{{state}}"),
            width=8,
            colours=STATES,
        ),
        lines(
            "Events of agents",
            "Events reported by agents, per second: lost devices, XIDs, refused settings.",
            "ops",
            Query(f"sum by (kind) ({rate('eelgrid_agent_events_total')})", "{{kind}}"),
            width=8,
            top=1.0,
        ),
        lines(
            "GPUs by model",
            "GPUs known to the controller.",
            "short",
            Query(f"max by (model) ({of('eelgrid_gpus')})", "{{model}}"),
            width=8,
        ),
    ),
)

PAGE = Page(
    "fleet",
    "Eelgrid / Fleet",
    "Power, cost, objectives and changes of the whole fleet. Devices, workloads, the engine and budgets have dashboards of their own.",
    (_NOW, _ENERGY, _PROMISES, _CHANGED),
)
