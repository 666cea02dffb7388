"""The dashboard of budgets: what may be drawn, what is claimed, drawn and left, at what price, and what may be spent.

Owns the questions of whoever answers for the feed. Must not know how watts are divided.
"""

from deploy.dashboards.panels import Page, Query, Row, Variable, bars, figure, lines, listing, states
from deploy.dashboards.queries import by_node, of, or_none, rate

__all__ = ["PAGE"]

_CHOSEN = 'budget=~"$budget"'
_PRICE = f"max by (currency) ({of('eelgrid_energy_price_per_joule')})"


def _budget(part: str) -> str:
    return f"max by (budget) ({of(f'eelgrid_power_budget_{part}', _CHOSEN)})"


def _spending(part: str) -> str:
    return f"max by (limit) ({of(f'eelgrid_spending_{part}')})"


_LIMIT, _DRAWN, _CLAIMED = _budget("limit_watts"), _budget("drawn_watts"), _budget("claimed_watts")
_OVER = _budget("over_watts")
_NOW = Row(
    "Now",
    (
        figure(
            "Fullest budget",
            "Measured power over limit, for the budget with the highest ratio.",
            "percentunit",
            Query(f"max({_DRAWN} / {_LIMIT})"),
            bad_above=1,
        ),
        figure(
            "Most claimed",
            "Claimed power over the budget's limit; the highest ratio.",
            "percentunit",
            Query(f"max({_CLAIMED} / {_LIMIT})"),
            bad_above=1.0001,
        ),
        figure(
            "Shortfall",
            "Power that objectives and lost nodes need beyond their budgets.",
            "watt",
            Query(f"max({_budget('shortfall_watts')})"),
            bad_above=1,
        ),
        figure(
            "GPUs without a reading",
            "The measured power does not include them.",
            "short",
            Query(f"max({_budget('unread_gpus')})"),
            bad_above=1,
        ),
        figure(
            "Price against the day",
            "Current price of energy over its mean of the coming day; 1 without prices.",
            "percentunit",
            Query(f"max({of('eelgrid_energy_price_ratio')})"),
        ),
        figure(
            "Nodes that enforce",
            "Nodes whose plan may change devices; the others only observe.",
            "short",
            Query(f"sum({of('eelgrid_guard_enforcing')})"),
        ),
    ),
    height=4,
)
_BUDGETS = Row(
    "Budgets",
    (
        lines(
            "Measured and limit",
            "Measured power of the GPUs under each budget, and the budget.",
            "watt",
            Query(_DRAWN, "{{budget}} measured"),
            Query(_LIMIT, "{{budget}} limit"),
        ),
        lines(
            "Claimed",
            "Power that may be drawn: by managed jobs with the limits that they have or are about to get, and by other GPUs, which have no power control; and the part of the others.",
            "watt",
            Query(_CLAIMED, "{{budget}} claimed"),
            Query(_budget("others_watts"), "{{budget}} others"),
        ),
        lines(
            "Room",
            "Power that is not claimed; below 0 while limits are being lowered.",
            "watt",
            Query(_budget("room_watts"), "{{budget}}"),
            width=8,
        ),
        lines(
            "Measured over limit",
            "Above 1 the budget is exceeded. A GPU holds its limit as a mean over its own window, so short peaks above it are possible.",
            "percentunit",
            Query(f"{_DRAWN} / {_LIMIT}", "{{budget}}"),
            width=8,
            top=1.0,
        ),
        states(
            "Over the limit",
            "When more power was measured than a budget allows.",
            "short",
            Query(or_none(f"{_OVER} > bool 0", "budget"), "{{budget}}"),
            width=8,
        ),
        listing(
            "All budgets",
            "Current values.",
            "watt",
            Query(_LIMIT, "limit"),
            Query(_DRAWN, "measured"),
            Query(_CLAIMED, "claimed"),
            Query(_OVER, "over"),
            Query(_budget("room_watts"), "room"),
            Query(_budget("shortfall_watts"), "shortfall"),
            width=16,
        ),
        lines(
            "Share of a day's energy that is used",
            "Energy drawn in the last 24 h over the energy that the limit allows in 24 h.",
            "percentunit",
            Query(
                f"max by (budget) (avg_over_time({of('eelgrid_power_budget_drawn_watts', _CHOSEN)}[24h])) / {_LIMIT}",
                "{{budget}}",
            ),
            width=8,
            top=1.0,
        ),
    ),
)
_PRICES = Row(
    "Price and cost",
    (
        lines(
            "Price of energy",
            "Current price of a kilowatt-hour, carbon and PUE included, in the policy's currency.",
            "short",
            Query(f"{_PRICE} * 3.6e6", "{{currency}} per kWh"),
            width=8,
        ),
        lines(
            "Price against the mean of the coming day",
            "Above 1 waiting saves money.",
            "percentunit",
            Query(f"max({of('eelgrid_energy_price_ratio')})", "ratio"),
            width=8,
        ),
        lines(
            "Cost per hour of each budget",
            "Measured power at the price of each moment.",
            "short",
            Query(f"{_DRAWN} * on () group_left (currency) {_PRICE} * 3600", "{{budget}} {{currency}} per hour"),
            width=8,
        ),
    ),
)
_SPENDING = Row(
    "Spending limits",
    (
        # Names of limits are long, so panels are wide and tables have few columns.
        bars(
            "Spent of each limit",
            "GPU-hours, joules, money or carbon that a namespace, user, queue or label has spent in the current period, over its limit.",
            "percentunit",
            Query(_spending("ratio"), "{{limit}}"),
            width=12,
        ),
        lines(
            "Share that is spent",
            "At 1 work that has not started waits, if the limit is enforced.",
            "percentunit",
            Query(_spending("ratio"), "{{limit}}"),
            top=1.0,
        ),
        listing(
            "Pace of each limit",
            "Growth of the spent share in a day, at the rate of the last six hours.",
            "percentunit",
            Query(f"max by (limit) (deriv({of('eelgrid_spending_ratio')}[6h])) * 86400", "a day"),
        ),
        lines(
            "Work that waits",
            "Workloads that wait because a limit is spent.",
            "short",
            Query(_spending("waiting_workloads"), "{{limit}}"),
            top=1.0,
        ),
    ),
)
_LIMITS = Row(
    "Limits of jobs and nodes",
    (
        lines(
            "Limit of each GPU of a job",
            "Limit as read back, and wanted limit; if they differ for long, a node cannot set it.",
            "watt",
            Query(f"max by (workload) ({of('eelgrid_job_power_limit_watts')})", "{{workload}}"),
            Query(f"max by (workload) ({of('eelgrid_job_power_limit_wanted_watts')})", "{{workload}} wanted"),
            width=8,
        ),
        lines(
            "What limits cost and save",
            "Slowdown of jobs, and energy that their limits save for the same work compared with the largest measured limit.",
            "percentunit",
            Query(f"max by (workload) ({of('eelgrid_job_slowdown_ratio')})", "{{workload}} slowdown"),
            Query(f"max by (workload) ({of('eelgrid_job_energy_saved_ratio')})", "{{workload}} saved"),
            width=8,
        ),
        lines(
            "Limits answered by nodes",
            "Limits confirmed, and limits that could not be set, per second.",
            "ops",
            Query(f"sum by (result) ({rate('eelgrid_objectives_limits_answered_total')})", "{{result}}"),
            width=8,
        ),
        lines(
            "Lease left",
            "Time until a node's plan expires and the node restores its original settings, unless the controller renews it.",
            "s",
            Query(by_node(of("eelgrid_guard_lease_left_seconds")), "{{node}}"),
            width=8,
        ),
        lines(
            "Budget of each node",
            "Power that all devices of a node may draw together, as its guard enforces it.",
            "watt",
            Query(by_node(of("eelgrid_guard_power_budget_watts")), "{{node}}"),
            width=8,
        ),
        lines(
            "Put back, refused",
            "Settings that something else changed and the guard restored, and items of plans that it refused, per second.",
            "ops",
            Query(f"sum by (setting) ({rate('eelgrid_guard_drift_repairs_total')})", "put back {{setting}}"),
            Query(f"sum by (rule) ({rate('eelgrid_guard_refusals_total')})", "refused {{rule}}"),
            width=8,
            top=1.0,
        ),
    ),
)
_INFO = '{job=~"$job", instance=~"$instance"'

PAGE = Page(
    "budget",
    "Eelgrid / Energy budget",
    "Power budgets: allowed, claimed, drawn and free watts; the price of energy; spending limits; and the power limits that enforce the budgets.",
    (_NOW, _BUDGETS, _PRICES, _SPENDING, _LIMITS),
    (
        Variable("budget", "Budget", f"label_values(eelgrid_power_budget_limit_watts{_INFO}}}, budget)"),
        Variable("node", "Node", f"label_values(eelgrid_node_info{_INFO}}}, node)"),
    ),
)
