"""What eelctl doctor reads on the controller's metrics page, which its API does not tell.

Owns a small reader of the page and the checks that need it: the journal, drift,
the steward, the ledger's age, the clock, who leads in Kubernetes. Must not fetch anything.
A series that is not there is None: an older controller has fewer of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eelgrid_controller.cli.doctor_finding import Finding, failed, good, skipped, spread, warned

__all__ = ["Page", "journal", "kubernetes", "ledger_age", "page_findings", "read_page", "settings", "steward"]

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: [0-9]+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_LAG_S = 5.0
_LEDGER_S = 900.0
_SILENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Page:
    """Values by name and labels."""

    series: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float | None:
        """One series; None where it is not on the page."""
        return self.series.get((name, frozenset(labels.items())))

    def all_of(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Every series of a name, by labels."""
        return {labels: value for (found, labels), value in self.series.items() if found == name}

    @property
    def version(self) -> str:
        """The controller's; empty where the page does not tell."""
        for labels in self.all_of("eelgrid_controller_info"):
            return dict(labels).get("version", "")
        return ""

    @property
    def is_ours(self) -> bool:
        """Whether this is a controller's page at all."""
        return self.value("eelgrid_state_revision") is not None


def read_page(text: str) -> Page:
    """Prometheus' text format; a line that is none of it is passed over."""
    series = {}
    for line in text.splitlines():
        match = _SERIES.fullmatch(line) if line and line[0] != "#" else None
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        series[match[1], frozenset(_LABEL.findall(match[2] or ""))] = value
    return Page(series)


def page_findings(page: Page) -> tuple[Finding, ...]:
    """All that the page tells."""
    return (journal(page), *settings(page), steward(page), *ledger_age(page), *clock(page), *kubernetes(page))


def journal(page: Page) -> Finding:
    """Whether the controller can put on disk what it accepts."""
    writable, lag_s = page.value("eelgrid_journal_writable"), page.value("eelgrid_journal_lag_seconds")
    if writable is None:
        return skipped("journal", "the page tells nothing of it", "name the controller's page, not another's")
    if not writable:
        remedy = "look at the disk of its --data (df, dmesg): it accepts nothing until it can write again"
        return failed("journal", "cannot be written", remedy)
    if lag_s is not None and lag_s > _LAG_S:
        return warned("journal", f"commands wait {lag_s:.0f} s for the disk", "look at the disk of its --data (iostat)")
    return good("journal", "can be written")


def settings(page: Page) -> tuple[Finding, ...]:
    """Limits and clocks that somebody else changed, counted since the controller began."""
    drifts = page.value("eelgrid_agent_events_total", kind="setting_drift") or 0.0
    given_up = page.value("eelgrid_agent_events_total", kind="enforcement_suspended") or 0.0
    findings = []
    if given_up:
        what = f"agents gave up {spread(int(given_up), 'time')} on a setting that somebody else keeps changing"
        remedy = "find who else sets limits there (nvidia-smi in a cron job, DCGM, a tuning daemon) and end it"
        findings.append(failed("caps suspended", what, remedy))
    if drifts:
        what = f"somebody else changed what an agent had set, {spread(int(drifts), 'time')} since the controller began"
        remedy = "the agent set it anew; the node's log names the GPU (event=setting_drift): find who else sets it"
        findings.append(warned("caps drifted", what, remedy))
    return tuple(findings) or (good("caps", "no setting drifted since the controller began"),)


def steward(page: Page) -> Finding:
    """Whether promises are looked after."""
    cycles, failures = page.value("eelgrid_steward_cycles_total"), page.value("eelgrid_steward_failures_total")
    faults = page.value("eelgrid_steward_faults_total") or 0.0
    if cycles is None:
        return skipped("steward", "the page tells nothing of it", "bring the controller to this release")
    if failures:
        what = f"{spread(int(failures), 'cycle')} of {int(cycles):,} failed as a whole"
        return failed("steward", what, "its log has the reason (steward); tell us, with the log")
    if faults:
        what = f"{spread(int(faults), 'workload')} were passed over for an error"
        return warned("steward", what, "its log names them (steward)")
    return good("steward", f"{spread(int(cycles), 'cycle')}, none failed")


def ledger_age(page: Page) -> tuple[Finding, ...]:
    """Whether the ledger keeps up; nothing where this controller does not tell."""
    age_s = page.value("eelgrid_ledger_newest_window_age_seconds")
    failures = page.value("eelgrid_ledger_failures_total") or 0.0
    damaged = page.value("eelgrid_ledger_damaged_parts") or 0.0
    if damaged:
        what = f"{spread(int(damaged), 'part')} of it do not agree with their checksums and are left out of answers"
        remedy = "its log and `eelctl energy` name them; check the disk, and put a backup back (EelgridLedgerFailing)"
        return (failed("ledger, damage", what, remedy),)
    refused = page.value("eelgrid_ledger_windows_total", result="refused") or 0.0
    if refused and not failures:
        what = f"{spread(int(refused), 'window')} of agents were refused, as no boards can have drawn that"
        return (warned("ledger, refused", what, "the controller's log names the nodes (ledger=refused)"),)
    if failures:
        what = f"could not write {spread(int(failures), 'time')}"
        remedy = "look at the disk of its --data; agents keep their windows until they are taken"
        return (warned("ledger, writing", what, remedy),)
    if age_s is None:
        return ()
    if age_s > _LEDGER_S:
        what = f"the newest window ended {age_s / 60.0:.0f} minutes ago"
        remedy = "see that agents are connected and their clocks right; they send what they kept when they come back"
        return (warned("ledger, age", what, remedy),)
    return (good("ledger, age", f"the newest window ended {age_s:.0f} s ago"),)


def clock(page: Page) -> tuple[Finding, ...]:
    """Whether the controller's clock was set while it ran; nothing where this controller does not tell."""
    jumps = page.value("eelgrid_clock_jumps_total")
    if jumps is None:
        return ()
    if not jumps:
        return (good("clock, jumps", "none since the controller began"),)
    last_s = page.value("eelgrid_clock_jump_seconds") or 0.0
    what = f"{spread(int(jumps), 'jump')} since the controller began, the last by {last_s:+,.1f} s"
    return (warned("clock, jumps", what, "synchronise its machine by NTP (timedatectl set-ntp true)"),)


def kubernetes(page: Page) -> tuple[Finding, ...]:
    """Who leads, and whether the API server talks; nothing without a Kubernetes part."""
    leading = page.value("eelgrid_kubernetes_leading")
    if leading is None:
        return ()
    findings = [good("kubernetes", "leads" if leading else "stands by: another holds the Lease")]
    silence = {
        dict(labels).get("kind", "?"): value
        for labels, value in page.all_of("eelgrid_kubernetes_silence_seconds").items()
    }
    mute = sorted(kind for kind, age_s in silence.items() if age_s > _SILENCE_S)
    if mute:
        what = f"the API server has said nothing of {', '.join(mute)} for {max(silence.values()):.0f} s"
        findings.append(
            failed("kubernetes, watches", what, "see that it answers and that our account may list and watch them")
        )
    stuck = page.value("eelgrid_kubernetes_pods_unschedulable") or 0.0
    if stuck:
        what = f"kube-scheduler cannot put {spread(int(stuck), 'pinned pod')} where they are to be"
        remedy = "`kubectl describe pod` names the taint, quota or volume; free it, or let the pod go elsewhere"
        findings.append(warned("kubernetes, pods", what, remedy))
    return tuple(findings)
