"""Every page, for every role, in both languages; and content that no page may contain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aijobs.jobs.models import PASSES
from aijobs.settings import resource
from aijobs.upkeep.pass_log import PassLog
from aijobs.web.console.pages import PAGES
from tests.web.console.stage import Stage, parse

ROLES = ("VIEWER", "OPERATOR", "SUPER_ADMIN")
LISTS = (
    "/console/jobs",
    "/console/jobs?lifecycleStatus=failed&q=zzz",
    "/console/jobs?unresolved=true",
    "/console/outbox",
    "/console/outbox?status=dead",
    "/console/queues",
    "/console/workers",
    "/console/providers",
)
_CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("role", ROLES)
def test_every_page_renders_for_every_role_in_both_languages(stage: Stage, role: str, language: str) -> None:
    jobs = stage.each_phase()
    console = stage.client(role, language)
    for address in (*LISTS, *(("/console/usage",) if role != "VIEWER" else ())):
        text = console.soup(address).find("main").get_text()
        assert bool(_CHINESE.search(text)) == (language == "zh"), address
    for phase, job_id in jobs.items():
        soup = console.soup(f"/console/jobs/{job_id}")
        assert soup.find(id="job-head").find(attrs={"data-state": phase}), phase
        assert soup.html["lang"] == {"en": "en", "zh": "zh-CN"}[language]
        assert len(soup.find(id="job-strip").find_all("li")) == 6


def test_workers_page_shows_threads_beside_the_queue_policy(stage: Stage) -> None:
    stage.presence.beat()
    for language, text in (("en", "0 of 3 policy: 2"), ("zh", "共 3 个，0 个在用 策略：2")):
        cell = stage.client("VIEWER", language=language).soup("/console/workers").find("tr", attrs={"data-row": True})
        assert text in cell.get_text(" ", strip=True)


def test_workers_page_shows_failing_and_overdue_passes(stage: Stage) -> None:
    log = PassLog(stage.services.database, stage.services.clock)
    for name in ("reaper", "redrive"):
        log.run(name, 30, lambda: 0)
    with pytest.raises(TypeError):
        log.run("redrive", 10, lambda: int([]))  # type: ignore[call-overload]
    table = stage.client("VIEWER").soup("/console/workers").find("section", attrs={"aria-labelledby": "duties-title"})
    rows = {row.find("th").find(class_="mono").get_text(): row for row in table.find("tbody").find_all("tr")}
    assert list(rows) == list(PASSES)
    states = {name: row.find(class_="state")["data-state"] for name, row in rows.items()}
    assert (states.pop("reaper"), states.pop("redrive")) == ("on_time", "failing")
    assert set(states.values()) == {"overdue"}
    assert "TypeError" in rows["redrive"].get_text()
    assert "TypeError" not in rows["reaper"].get_text()


def test_pages_comply_with_the_content_security_policy(stage: Stage) -> None:
    jobs = stage.each_phase()
    console = stage.client("SUPER_ADMIN")
    pages = [*LISTS, "/console/usage", *(f"/console/jobs/{job_id}" for job_id in jobs.values())]
    pages += [f"/console/jobs/{jobs['failed']}/retry", f"/console/jobs/{jobs['running']}/cancel", "/console/jobs/nope"]
    for address in pages:
        answer = console.get(address)
        policy = answer.headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "script-src 'self'" in policy
        for element in parse(answer).find_all(True):
            assert not any(name.startswith(("on", "hx-on")) or name == "style" for name in element.attrs), element
            assert element.name != "style"
            if element.name == "script":
                assert element["src"].startswith("/static/"), element
                assert not element.get_text(strip=True)
            for name in ("href", "src", "action", "hx-get", "hx-post"):
                assert element.get(name, "/").startswith(("/", "#")), (address, element)


def test_sign_in_may_lead_back_to_whole_pages_only(stage: Stage) -> None:
    """If a sign-in led to a fragment, the operator would see a page without its frame."""
    stage.failed()
    event_id = next(iter(stage.services.monitor.list_outbox().items)).id
    console, whole = stage.client("SUPER_ADMIN"), set()
    for rule in stage.app.url_map.iter_rules():
        if rule.endpoint.startswith("console.") and "GET" in (rule.methods or ()) and rule.endpoint != "console.login":
            known = {"event_id": event_id, "provider": "deepseek"}
            ids = {name: known.get(name) or stage.failed() for name in rule.arguments}
            answer = console.get(rule.build(ids)[1])  # type: ignore[index]
            if answer.text.lower().startswith("<!doctype html") and answer.status_code == 200:
                whole.add(rule.endpoint)
    assert whole | {"console.start"} == PAGES


def test_pages_are_not_cached_and_vary_by_cookie(stage: Stage) -> None:
    console = stage.client()
    answer = console.get("/console/jobs")
    assert answer.headers["Cache-Control"] == "no-store"
    assert {"HX-Request", "Cookie"} <= set(answer.vary)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_fragment_equals_its_part_of_the_page(stage: Stage) -> None:
    stage.each_phase()
    console = stage.client()
    page = console.get("/console/jobs")
    fragment = console.get("/console/jobs", **{"HX-Request": "true", "HX-Target": "jobs-list"})
    assert "<html" in page.text
    assert "<html" not in fragment.text
    assert "HX-Request" in fragment.vary
    rows = [row["id"] for row in parse(fragment).find_all("tr", attrs={"data-row": True})]
    assert rows
    assert rows == [row["id"] for row in parse(page).find_all("tr", attrs={"data-row": True})]


def test_poll_of_the_outbox_returns_the_tiles_of_the_page(stage: Stage) -> None:
    stage.queued()
    console = stage.client()
    tiles = [parse(console.get(f"/console/outbox{end}")).find(id="outbox-health") for end in ("", "/changes")]
    assert tiles[0].get_text() == tiles[1].get_text()
    assert len(tiles[0].find_all("dt")) == 6


@pytest.mark.parametrize("header", ["HX-Boosted", "HX-History-Restore-Request"])
def test_boosted_and_restored_requests_get_the_page(stage: Stage, header: str) -> None:
    console = stage.client()
    assert "<html" in console.get("/console/jobs", **{"HX-Request": "true", header: "true"}).text


def test_missing_job_leads_back_to_the_list(stage: Stage) -> None:
    console = stage.client()
    for address in ("/console/jobs/nope", "/console/jobs/01900000-0000-7000-8000-000000000000"):
        answer = console.get(address)
        assert answer.status_code == 404
        assert parse(answer).find("main").find("a")["href"] == "/console/jobs"


def test_broker_outage_is_shown_and_no_page_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    queued, running = stage.queued(), stage.running()
    from aijobs.errors import BrokerUnavailable
    from aijobs.queues.state import BrokerState

    def away(*_: object) -> None:
        raise BrokerUnavailable("refused")

    monkeypatch.setattr(type(stage.services.broker), "probe", lambda _: BrokerState("away", "It is gone"))
    monkeypatch.setattr(type(stage.services.presence), "read", away)
    console = stage.client()
    assert console.soup("/console/queues").find(role="alert")
    assert console.soup("/console/workers").find(role="alert")
    assert "broker can't be reached" in console.soup(f"/console/jobs/{queued}").find(id="job-why").get_text()
    console.soup(f"/console/jobs/{running}")


def test_internal_message_is_shown_to_super_admins_only(stage: Stage) -> None:
    failed = stage.failed()
    secret = "Traceback: secret-place-in-our-code"
    stage.set_job(failed, internal_error_message=secret)
    for role in ROLES:
        shown = secret in stage.client(role).get(f"/console/jobs/{failed}").text
        assert shown == (role == "SUPER_ADMIN"), role


def test_content_of_a_job_is_shown_on_no_page(stage: Stage) -> None:
    job_id = stage.create({"output": {"said": "canary-in-the-output"}}, {"output": {"said": "canary-in-the-input"}})
    stage.run(job_id)
    console = stage.client("SUPER_ADMIN")
    for address in (*LISTS, f"/console/jobs/{job_id}", f"/console/jobs/{job_id}/changes"):
        assert "canary" not in console.get(address).text, address


def test_templates_never_disable_escaping() -> None:
    templates = list(resource("templates").rglob("*.html"))
    assert templates
    for path in templates:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe\b|autoescape|Markup|style=|\son\w+=", text), path


def test_console_code_never_uses_markup() -> None:
    import aijobs.web.console as package

    for path in Path(str(package.__file__)).parent.glob("*.py"):
        assert "Markup" not in path.read_text(encoding="utf-8"), path


def test_forbidden_action_is_shown_disabled_with_the_reason(stage: Stage) -> None:
    failed = stage.failed()
    soup = stage.client("VIEWER").soup(f"/console/jobs/{failed}")
    button = soup.find(id="act-retry")
    assert button["aria-disabled"] == "true"
    assert soup.find(id=button["aria-describedby"]).get_text() == "Your role does not allow this."
    assert not soup.find(attrs={"data-action": "retry"})


def test_fragments_take_at_most_eight_statements(stage: Stage) -> None:
    """A fragment takes at most eight statements, including the session's, and a list reads no payload column."""
    from sqlalchemy import event

    jobs = stage.each_phase()
    console = stage.client("SUPER_ADMIN")
    statements: list[str] = []
    engine = stage.services.database.engine
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    still = ",".join(jobs.values())
    for address in (
        "/console/jobs",
        "/console/jobs/chips",
        f"/console/jobs/changes?ids={still}&since=2026-01-01T00:00:00Z",
    ):
        statements.clear()
        assert console.get(address, **{"HX-Request": "true"}).status_code == 200
        reads = [text for text in statements if text.startswith("SELECT")]
        assert len(reads) <= 8, (address, reads)
        for column in ("validated_output", "internal_error_message", "content "):
            assert not any(column in text for text in reads), address


def test_audit_log_is_shown_to_super_admins_only(stage: Stage) -> None:
    failed = stage.failed()
    operator = stage.client("OPERATOR")
    assert operator.get("/console/audit").status_code == 403
    assert not operator.soup("/console/jobs").find("a", href="/console/audit")
    address = f"/console/jobs/{failed}/retry"
    operator.post(address, {**operator.fields(address, address), "reason": "the provider is back"})
    admin = stage.client("SUPER_ADMIN")
    assert admin.soup("/console/jobs").find("a", href="/console/audit")
    row = admin.soup(f"/console/audit?target={failed}").find("tr", attrs={"data-row": True}).get_text()
    for text in ("Job retried", "operator:operator", "the provider is back", "lifecycleStatus", "created"):
        assert text in row
    assert admin.get("/console/audit?cursor=made-up").status_code == 422
    assert "No actions" in admin.soup("/console/audit?target=nothing").find("main").get_text()
