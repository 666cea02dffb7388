"""Recorded series and alerts: names that exist, a page for each alert, and when each fires and when it does not."""

import functools
import re
import shlex
import shutil
import subprocess

import click
import pytest
import yaml
from tests.deploy_rig import CHART, ROOT, needs_helm, objects_of, pick, render

from eelgrid_controller.cli.__main__ import cli
from eelgrid_controller.cli.connection import CliSettings

RULES = CHART / "files" / "rules.yaml"
PAGES = ROOT / "docs" / "how-to" / "runbooks"
CASES = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
BASE = "docs/how-to/runbooks"
# Labels that a scrape brings.
SCRAPED = {"job", "instance"}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: Debian's prometheus has it")


@functools.cache
def _groups():
    return yaml.load(RULES.read_text(), render.LOADER)["groups"]


def _rules(kind):
    return {rule[kind]: rule for group in _groups() for rule in group["rules"] if kind in rule}


ALERTS, RECORDED = _rules("alert"), _rules("record")


def _labels_by_metric():
    """Labels of every metric in the agents' page and in the controller's."""
    known = {}
    for name in ("agent-metrics.md", "controller-metrics.md"):
        for metric, kind, labels in re.findall(
            r"^\| `(\w+)` \| (\w+) \| (.*?) \|", (ROOT / "docs" / "reference" / name).read_text(), re.MULTILINE
        ):
            known[metric] = set(re.findall(r"`(\w+)`", labels))
            if kind == "histogram":
                known[f"{metric}_bucket"] = known[metric] | {"le"}
    return known


KNOWN = _labels_by_metric()


def _strange(query):
    """Metrics, labels of theirs and recorded series that a query asks for and that nobody makes."""
    asked = re.findall(r"(?<![:\w])(eelgrid_\w+)(?![:\w])(?:\{([^}]*)\})?", query)
    found = {name for name, _ in asked} - KNOWN.keys()
    for name, matchers in asked:
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        found |= {f"{name}{{{label}}}" for label in labels - KNOWN.get(name, labels) - SCRAPED}
    return found | (set(re.findall(r"\w+:\w+:\w+", query)) - RECORDED.keys())


def _fences(page, language):
    text = page.read_text()
    return [
        line
        for block in re.findall(rf"^```{language}[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]


def _sections(page):
    return re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("rule", [*ALERTS.values(), *RECORDED.values()], ids=lambda rule: next(iter(rule.values())))
def test_a_rule_asks_for_what_exists(rule):
    assert re.search(r"eelgrid_\w+", rule["expr"])
    assert _strange(rule["expr"]) == set()


def test_strange_names_are_noticed():
    assert _strange("sum(eelgrid_gpu_power_watt) + a:b:c") == {"eelgrid_gpu_power_watt", "a:b:c"}
    assert _strange('eelgrid_gpu_up{gpu="x", pod="y", job="z"}') == {"eelgrid_gpu_up{pod}"}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_it_is_and_where_to_read_on(name):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"{BASE}/{name}.md"
    # Labels that a text names are those that the query leaves.
    for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
        assert any(label in labels for labels in KNOWN.values()) or label in SCRAPED, label


def test_each_alert_has_a_page_and_each_page_an_alert():
    assert {path.stem for path in PAGES.glob("*.md")} == {*ALERTS, "README"}
    index = (PAGES / "README.md").read_text()
    rows = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \| (.+?) \|$", index, re.MULTILINE)
    listed = {name: (page, severity, after) for name, page, severity, after in rows}
    assert listed == {
        name: (name, rule["labels"]["severity"], rule.get("for", "at once")) for name, rule in ALERTS.items()
    }


@pytest.mark.parametrize("name", ALERTS)
def test_a_page_begins_with_diagnosis_and_ends_with_mitigation(name):
    page = PAGES / f"{name}.md"
    assert page.read_text().startswith(f"# {name}\n")
    meaning = page.read_text().partition("## Diagnosis\n")[0].partition("\n")[2]
    assert len(meaning.split()) >= 10, "what the alert means comes before the diagnosis"
    sections = _sections(page)
    assert (sections[0], sections[-1]) == ("Diagnosis", "Mitigation")
    assert _fences(page, "promql")
    assert _fences(page, "bash")
    done = page.read_text().partition("## Mitigation\n")[2]
    assert len(re.findall(r"^- ", done, re.MULTILINE)) >= 3


@pytest.mark.parametrize("name", ALERTS)
def test_a_page_asks_for_what_exists(name):
    page = PAGES / f"{name}.md"
    for query in _fences(page, "promql"):
        assert _strange(query) == set(), query
    for span in re.findall(r"`(eelgrid_[^`]+)`", page.read_text()):
        assert _strange(span) == set(), span


def test_headings_that_pages_name_are_there():
    headings = set(
        re.findall(r"^#+ (.+)$", (ROOT / "docs" / "how-to" / "kubernetes-troubleshooting.md").read_text(), re.MULTILINE)
    )
    named = {
        heading
        for page in PAGES.glob("*.md")
        for heading in re.findall(r'"([A-Z][^"]+)" in \[kubernetes-troubleshooting.md\]', page.read_text())
    }
    assert named
    assert named <= headings


def _parse(words):
    """Reads a command as eelctl would, without a call to anybody."""
    command, context = cli, click.Context(cli, info_name="eelctl", obj=CliSettings())
    while isinstance(command, click.Group):
        if not words:
            assert command.invoke_without_command, f"{context.command_path} needs a command"
            return
        if words[0] == "--cluster":
            words = words[2:]
        if words[0].startswith("-"):
            break
        name, following, rest = command.resolve_command(context, words)
        assert following is not None, name
        command, words, context = following, rest, click.Context(following, parent=context, info_name=name)
    if not isinstance(command, click.Group):
        command.parse_args(context, list(words))
    elif command.make_parser(context).parse_args(list(words))[1]:
        raise click.UsageError(f"{context.command_path} does not take {words}")


@pytest.mark.parametrize("name", [*ALERTS, "README"])
def test_commands_of_eelctl_on_a_page_exist(name):
    page = PAGES / f"{name}.md"
    told = [line for line in _fences(page, "bash") if line.startswith("eelctl")]
    told += re.findall(r"`(eelctl [^`]+)`", page.read_text())
    for line in told:
        words = [re.sub(r"^(SECONDS|REPLICAS)$", "3", word) for word in shlex.split(line)[1:]]
        words = [
            word.replace("points.csv", str(RULES)).replace("POOL=", "a=").replace("PLACE=WATTS", "cluster=1kW")
            for word in words
        ]
        _parse(words)


def test_a_command_that_does_not_exist_is_noticed():
    for line in ("nodes --sate lost", "nodez", "policy show"):
        with pytest.raises(click.UsageError):
            _parse(line.split())


def test_a_day_is_counted_in_minutes():
    """Sums over a day stand for energy only if each value is of the interval of its group."""
    for group in _groups():
        for rule in group["rules"]:
            for span, factor in re.findall(r"sum_over_time\([\w:]+\[(\w+)\]\) \* (\d+)", rule["expr"]):
                assert (group["interval"], span, factor) == ("1m", "23h59m59s", "60")
            assert ("sum_over_time" in rule["expr"]) == bool(re.search(r"\]\) \* 60\b", rule["expr"])), rule


@needs_promtool
def test_promtool_takes_the_rules():
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_queries_of_the_pages(tmp_path):
    queries = [query for name in ALERTS for query in _fences(PAGES / f"{name}.md", "promql")]
    path = tmp_path / "queries.yaml"
    rules = [{"record": f"page:query:{number}", "expr": query} for number, query in enumerate(queries)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_rules_do_as_their_cases_say(path):
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def _cases():
    return [case for path in CASES for case in yaml.load(path.read_text(), render.LOADER)["tests"]]


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name):
    asked = [
        (bool(check["exp_alerts"]), case["name"])
        for case in _cases()
        for check in case.get("alert_rule_test", ())
        if check["alertname"] == name and (case.get("input_series") or check["exp_alerts"])
    ]
    assert {True, False} == {fires for fires, _ in asked}
    for fires, title in asked:
        assert title == f"{name} fires" if fires else title.startswith(f"{name} is quiet: ")


def test_each_recorded_series_has_a_case():
    asked = {
        found
        for case in _cases()
        for check in case.get("promql_expr_test", ())
        for found in re.findall(r"\w+:\w+:\w+", check["expr"])
    }
    assert asked == RECORDED.keys()


def test_no_program_s_own_fault_is_an_alert():
    """XIDs of programs, and those that the part mends by itself, wake nobody."""
    matched = " ".join(rule["expr"] for rule in ALERTS.values())
    listed = {code for codes in re.findall(r'xid=~?"([\d|]+)"', matched) for code in codes.split("|")}
    assert listed == {"48", "62", "64", "74", "79", "94", "95", "119", "120"}


@needs_helm
def test_the_chart_carries_the_same_rules_with_its_own_way_to_the_pages():
    plain = pick(objects_of("enforce"), "PrometheusRule")["spec"]
    assert plain == {"groups": _groups()}
    options = ("--set", "monitoring.prometheusRule.runbookBase=https://example.org/pages/")
    moved = pick(objects_of("enforce", options=options), "PrometheusRule")["spec"]
    urls = [
        rule["annotations"].pop("runbook_url")
        for group in moved["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert urls == [f"https://example.org/pages/{name}.md" for name in ALERTS]
    kept = [
        rule["annotations"].pop("runbook_url")
        for group in plain["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(kept) == len(urls)
    assert moved == plain
