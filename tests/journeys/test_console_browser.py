"""The console in a real browser: with JavaScript, without it, and its polling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from sqlalchemy import select, update
from werkzeug.serving import make_server
from werkzeug.wsgi import ClosingIterator

from aijobs.clock import utc_now
from aijobs.operators.models import OperatorSession
from aijobs.web.factory import create_app
from aijobs.wiring.services import build_services
from tests.support.rows import add, build_call
from tests.web.console.stage import PASSWORD, Stage, build_settings, prepare

pytestmark = pytest.mark.browser


@pytest.fixture
def stage(create_sqlite_database: Callable[..., str], redis_url: str, tmp_path: Path) -> Iterator[Stage]:
    services = build_services(build_settings(create_sqlite_database(prepare), redis_url, tmp_path))
    yield Stage(services, create_app(services=services))
    services.database.engine.dispose()


@pytest.fixture
def address(stage: Stage) -> Iterator[str]:
    """The console, served on its own port."""
    server = make_server("127.0.0.1", 0, _in_one_piece(stage.app), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def _in_one_piece(app: WSGIApplication) -> WSGIApplication:
    """Read and close each answer before it is sent, because the server leaves a file open if its client has gone."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with closing(ClosingIterator(app(environ, start_response))) as parts:
            return [b"".join(parts)]

    return answer


@pytest.fixture
def trouble(page: Page) -> Iterator[list[str]]:
    """Collect script errors and violations of the content policy; assert at the end that there are none."""
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    yield said
    assert not said


def _sign_in(page: Page, address: str, path: str = "/console/jobs", username: str = "operator") -> None:
    page.goto(address + path)
    page.get_by_label("User name").fill(username)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"**{path}*")


def test_operator_signs_in_filters_opens_a_job_and_retries_it_in_a_dialog(
    stage: Stage, address: str, page: Page, trouble: list[str]
) -> None:
    failed = stage.failed(user="ana")
    stage.succeeded(user="bo")
    _sign_in(page, address)
    expect(page.locator("#chips")).to_contain_text("Failed 1")
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("User id").fill("ana")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_url("**userId=ana**")
    expect(page.locator("tr[data-row]")).to_have_count(1)
    page.go_back()
    expect(page.locator("tr[data-row]")).to_have_count(2)
    page.locator(f"#link-{failed}").click()
    page.wait_for_url(f"**/jobs/{failed}")
    page.get_by_role("link", name="Retry", exact=True).click()
    dialog = page.get_by_role("dialog", name="Retry this job?")
    expect(dialog).to_be_visible()
    dialog.get_by_role("link", name="Not now").click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#act-retry")).to_be_focused()
    page.keyboard.press("r")
    dialog.get_by_label("Reason (optional)").fill("provider is back")
    dialog.get_by_role("button", name="Retry the job").dblclick()
    page.wait_for_url(lambda url: "/console/jobs/" in url and failed not in url)
    child = page.url.rpartition("/")[2]
    assert stage.job(child).parent_job_id == failed
    expect(page.locator("#job-chain li")).to_have_count(2)
    expect(page.get_by_text("Retry created.")).to_be_visible()


def test_console_works_without_javascript(stage: Stage, address: str, new_page: Callable[..., Page]) -> None:
    page = new_page(java_script_enabled=False)
    failed, queued = stage.failed(user="ana"), stage.queued(user="bo")
    _sign_in(page, address)
    page.get_by_text("Filter", exact=True).click()
    page.get_by_label("User id").fill("ana")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("tr[data-row]")).to_have_count(1)
    page.locator(f"#link-{failed}").click()
    page.get_by_role("link", name="Retry", exact=True).click()
    page.wait_for_url(f"**/jobs/{failed}/retry")
    page.get_by_role("button", name="Retry the job").click()
    child = page.url.rpartition("/")[2]
    assert stage.job(child).parent_job_id == failed
    page.goto(f"{address}/console/jobs/{queued}")
    page.get_by_role("link", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("#job-head [data-state]")).to_have_text("Cancelled")
    page.locator("summary", has_text="operator").click()
    page.get_by_role("button", name="中文").click()
    expect(page.locator("#job-head [data-state]")).to_have_text("已取消")
    page.locator("summary", has_text="operator").click()
    page.get_by_role("button", name="深色").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.locator("summary", has_text="operator").click()
    page.get_by_role("button", name="退出登录").click()
    page.wait_for_url("**/console/login")
    assert not page.locator(".needs-js:visible").count()


def test_job_page_polls_until_the_job_has_ended(stage: Stage, address: str, page: Page, trouble: list[str]) -> None:
    job_id = stage.queued()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/changes" in request.url else None)
    _sign_in(page, address, f"/console/jobs/{job_id}")
    expect(page.locator("#job-head [data-state]")).to_have_text("Queued")
    stage.run(job_id)
    expect(page.locator("#job-head [data-state]")).to_have_text("Succeeded", timeout=10_000)
    expect(page.locator("#job-timeline li")).to_have_count(len(stage.services.monitor.get_detail(job_id).history))
    assert page.locator("#poller").get_attribute("data-poll") is None
    page.wait_for_load_state("networkidle")
    before = len(asked)
    assert before
    page.wait_for_timeout(3000)
    assert len(asked) == before


@pytest.mark.long
def test_polling_stops_while_a_dialog_is_open_or_it_is_paused(stage: Stage, address: str, page: Page) -> None:
    job_id = stage.queued()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/changes" in request.url else None)
    _sign_in(page, address, f"/console/jobs/{job_id}")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    count = len(asked)
    page.wait_for_timeout(3000)
    assert len(asked) == count
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_hidden()
    page.keyboard.press("p")
    expect(page.locator("#live")).to_have_text("Paused")
    count = len(asked)
    page.wait_for_timeout(3000)
    assert len(asked) == count
    page.keyboard.press("p")
    with page.expect_response(lambda answer: "/changes" in answer.url):
        expect(page.locator("#live")).to_have_text("Live")


@pytest.mark.long
def test_list_updates_its_rows_and_offers_newer_ones_without_moving(
    stage: Stage, address: str, page: Page, trouble: list[str]
) -> None:
    job_id = stage.queued()
    _sign_in(page, address)
    page.keyboard.press("j")
    expect(page.locator(f"#link-{job_id}")).to_be_focused()
    stage.run(job_id)
    newer = stage.queued()
    expect(page.locator(f"#row-{job_id} [data-state]")).to_have_text("Succeeded", timeout=10_000)
    expect(page.locator("#newer")).to_have_text("1 new")
    expect(page.locator(f"#row-{newer}")).to_have_count(0)
    expect(page.locator(f"#link-{job_id}")).to_be_focused()
    page.get_by_text("1 new").click()
    expect(page.locator(f"#row-{newer}")).to_have_count(1)


@pytest.mark.long
def test_polling_stops_for_a_deleted_job(stage: Stage, address: str, page: Page) -> None:
    job_id = stage.queued()
    _sign_in(page, address, f"/console/jobs/{job_id}")
    gone = f"{address}/console/jobs/01900000-0000-7000-8000-000000000000/changes"
    page.route("**/changes?*", lambda route: route.fulfill(response=page.request.get(gone)))
    with page.expect_response(lambda answer: "/changes" in answer.url and answer.status == 404):
        pass
    expect(page.locator("#live")).to_have_text("Settled")
    assert page.locator("#poller").get_attribute("data-poll") is None


def test_keyboard_shortcuts_work_outside_of_text_fields(stage: Stage, address: str, page: Page) -> None:
    older, newer = stage.queued(), stage.queued()
    _sign_in(page, address)
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("jk?")
    expect(page.locator("#search")).to_have_value("jk?")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    expect(page.locator(f"#link-{newer}")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/jobs/{older}")
    page.keyboard.press("g")
    page.keyboard.press("q")
    page.wait_for_url("**/console/queues")


def test_ended_session_leads_to_the_sign_in_and_back(stage: Stage, address: str, page: Page) -> None:
    job_id = stage.queued()
    _sign_in(page, address, f"/console/jobs/{job_id}")
    # End the session on the server: an answer on its way would set a deleted cookie again.
    with stage.services.database.transaction() as session:
        session.execute(update(OperatorSession).values(revoked_at=utc_now()))
    page.wait_for_url("**/console/login?next=**", timeout=15_000)
    expect(page.get_by_role("status")).to_contain_text("Your session ended")
    page.get_by_label("User name").fill("operator")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"**/console/jobs/{job_id}")


def test_open_page_polls_without_prolonging_the_session(stage: Stage, address: str, page: Page) -> None:
    job_id = stage.running()
    _sign_in(page, address, f"/console/jobs/{job_id}")
    # Without microseconds, because SQLite stores milliseconds.
    long_ago = (utc_now() - timedelta(hours=11)).replace(microsecond=0)
    with stage.services.database.transaction() as session:
        session.execute(update(OperatorSession).values(seen_at=long_ago))
    for _ in range(2):
        with page.expect_response(lambda answer: "/changes" in answer.url and answer.status == 200):
            pass
    with stage.services.database.transaction() as session:
        assert session.execute(select(OperatorSession.seen_at)).scalar_one() == long_ago
        session.execute(update(OperatorSession).values(seen_at=long_ago - timedelta(hours=1)))
    page.wait_for_url("**/console/login?next=**", timeout=15_000)
    expect(page.get_by_role("status")).to_have_text("Your session ended: signed out after 12 hours without use.")


def test_operator_signs_out_another_browser_without_javascript(
    stage: Stage, address: str, new_page: Callable[..., Page]
) -> None:
    other, page = new_page(), new_page(java_script_enabled=False)
    for browser in (other, page):
        _sign_in(browser, address)
    page.locator("details.menu summary").click()
    page.get_by_role("link", name="Sessions").click()
    page.get_by_role("button", name="Sign out everywhere else").click()
    expect(page.get_by_text("1 session was signed out.")).to_be_visible()
    other.goto(f"{address}/console/queues")
    expect(other.get_by_role("status")).to_contain_text("Your session ended")


@pytest.mark.parametrize("language", ["en-US", pytest.param("zh-CN", marks=pytest.mark.long)])
def test_no_page_is_wider_than_a_small_screen(
    stage: Stage, address: str, new_page: Callable[..., Page], language: str
) -> None:
    jobs = stage.each_phase()
    page = new_page(locale=language, viewport={"width": 380, "height": 800})
    page.goto(f"{address}/console/login")
    page.locator("#username").fill("super_admin")
    page.locator("#password").fill(PASSWORD)
    page.locator("button.primary").click()
    page.wait_for_url("**/console/jobs*")
    paths = ["jobs", "jobs?q=x", "outbox", "queues", "workers", "providers", "sessions"]
    paths.append(f"jobs/{jobs['failed']}/retry")
    for path in (*paths, *(f"jobs/{job_id}" for job_id in jobs.values())):
        page.goto(f"{address}/console/{path}")
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, path


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_figures_of_a_job_do_not_overlap_on_a_small_screen(
    stage: Stage, address: str, new_page: Callable[..., Page], language: str
) -> None:
    job_id = stage.create({"raise": "PROVIDER_CONNECTION_LOST"})
    stage.run(job_id)
    values = {"call_no": 7, "state": "failed", "error_code": "PROVIDER_CONNECTION_LOST", "prompt_tokens": 1296}
    add(stage.services.database, build_call(stage.job(job_id), **NOBODY_KNOWS, **values, completion_tokens=140))
    page = new_page(locale=language, viewport={"width": 380, "height": 800})
    page.goto(f"{address}/console/login?next=/console/jobs/{job_id}")
    page.locator("#username").fill("super_admin")
    page.locator("#password").fill(PASSWORD)
    page.locator("button.primary").click()
    page.wait_for_url(f"**/jobs/{job_id}")
    for card in ("#job-calls", "#job-attempts"):
        assert page.locator(f"{card} td").count() >= 5
        too_wide = page.locator(f"{card} :is(.scroll, tbody th, tbody td, tfoot th, tfoot td)").evaluate_all(
            "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.innerText)"
        )
        assert not too_wide, card


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_facts_of_a_job_stay_within_their_card(
    stage: Stage, address: str, new_page: Callable[..., Page], language: str
) -> None:
    job_id = stage.failed()
    page = new_page(locale=language, viewport={"width": 1280, "height": 900})
    page.goto(f"{address}/console/login?next=/console/jobs/{job_id}")
    page.locator("#username").fill("operator")
    page.locator("#password").fill(PASSWORD)
    page.locator("button.primary").click()
    page.wait_for_url(f"**/jobs/{job_id}")
    assert page.locator("#job-facts time").count() == 3
    too_wide = page.locator("#job-facts dd").evaluate_all(
        "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.innerText)"
    )
    assert not too_wide


@pytest.mark.long
def test_server_and_script_format_ages_alike(stage: Stage, address: str, new_page: Callable[..., Page]) -> None:
    ages = (
        timedelta(seconds=40),
        timedelta(minutes=3.5),
        timedelta(hours=5.5),
        timedelta(days=2.5),
        timedelta(days=45),
    )
    for old in ages:
        stage.set_job(stage.succeeded(), created_at=utc_now() - old)
    for locale in ("en-US", "zh-CN"):
        texts = []
        for scripted in (False, True):
            page = new_page(locale=locale, java_script_enabled=scripted)
            page.goto(f"{address}/console/login")
            page.locator("#username").fill("viewer")
            page.locator("#password").fill(PASSWORD)
            page.locator("button.primary").click()
            page.wait_for_url("**/console/jobs*")
            texts.append(page.locator("td.newest time").all_inner_texts()[1:])
        assert texts[0] == texts[1]
        assert len(texts[0]) == 4


NOBODY_KNOWS = {"cost_micros": None, "currency": None, "estimated": True, "billed": "unknown", "started_at": utc_now()}
"""Values of a provider call that make the page show every mark."""


def _grave_faults(page: Page) -> list[str]:
    """Return axe's serious and critical violations, each with its rule and element."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{page.url} {fault['id']} ({fault['impact']}): {node['target']} {node.get('failureSummary', '')}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


@pytest.mark.long
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 380)])
def test_axe_finds_nothing_serious_on_any_page(
    stage: Stage, address: str, new_page: Callable[..., Page], theme: str, width: int
) -> None:
    jobs = stage.each_phase()
    parent, child = stage.recovered()
    stage.pause("ai-background", "maintenance of the provider")
    page = new_page(color_scheme=theme, viewport={"width": width, "height": 900})
    page.goto(f"{address}/console/login")
    found = _grave_faults(page)
    _sign_in(page, address, username="super_admin")
    expect(page.locator("#chips")).to_contain_text("Failed 2")
    paths = ["/console/jobs", "/console/jobs?q=zzz", "/console/jobs?createdFrom=never", "/console/outbox"]
    paths += ["/console/queues", "/console/workers", "/console/audit", "/console/jobs/nope", "/console/sessions"]
    stage.services.breaker.failed("deepseek.platform", exhausted=True)
    paths += ["/console/providers", "/console/providers/deepseek/close"]
    add(stage.services.database, build_call(stage.job(jobs["failed"]), **NOBODY_KNOWS))
    paths += ["/console/usage", "/console/usage?from=never", "/console/usage?userId=nobody"]
    paths += [f"/console/jobs/{job_id}" for job_id in (*jobs.values(), parent, child)]
    paths += [f"/console/jobs/{jobs['failed']}/retry", f"/console/jobs/{jobs['running']}/cancel"]
    for path in paths:
        page.goto(address + path)
        found += _grave_faults(page)
    page.goto(f"{address}/console/jobs/{jobs['failed']}")
    page.get_by_role("link", name="Retry", exact=True).click()
    expect(page.get_by_role("dialog", name="Retry this job?")).to_be_visible()
    found += _grave_faults(page)
    assert not found, "\n".join(found)
