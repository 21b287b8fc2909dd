"""Lists: filters, paging, searches and polling."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import pytest

from aijobs.clock import utc_now
from aijobs.web.console import jobs as view
from tests.web.console.stage import Console, Stage, parse


def _ids(soup: object) -> list[str]:
    return [row["id"].removeprefix("row-") for row in soup.find_all("tr", attrs={"data-row": True})]  # type: ignore[attr-defined]


def _walk(console: Console, address: str | None) -> list[str]:
    seen: list[str] = []
    while address:
        soup = console.soup(address)
        seen += _ids(soup)
        older = soup.find("a", rel="next")
        address = older["href"] if older else None
    return seen


def test_paging_reaches_every_job_once_if_all_have_the_same_creation_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "PER_PAGE", 3)
    jobs = [stage.create() for _ in range(10)]
    same = utc_now()
    for job_id in jobs:
        stage.set_job(job_id, created_at=same)
    console = stage.client()
    assert sorted(_walk(console, "/console/jobs")) == sorted(jobs)
    assert sorted(_walk(console, "/console/jobs?lifecycleStatus=queued&userId=learner-1")) == sorted(jobs)


def test_paging_keeps_the_filter_and_leads_back_to_the_newest(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PER_PAGE", 2)
    for _ in range(3):
        stage.create(user="one")
        stage.create(user="other")
    console = stage.client()
    first = console.soup("/console/jobs?userId=one")
    second = console.soup(first.find("a", rel="next")["href"])
    assert len(_ids(second)) == 1
    back = second.find("nav", attrs={"aria-label": "Pages"}).find("a")["href"]
    assert parse_qs(urlsplit(back).query) == {"userId": ["one"]}


@pytest.mark.parametrize("cursor", ["made-up", "AAAA", "", "'; DROP TABLE ai_jobs", "é"])
def test_invalid_cursor_is_refused_with_a_page(stage: Stage, cursor: str) -> None:
    stage.create()
    answer = stage.client().http.get("/console/jobs", query_string={"cursor": cursor})
    assert answer.status_code == 422
    assert parse(answer).find("main")


@pytest.mark.parametrize("value", ["", "nothing-like-it"])
@pytest.mark.parametrize(
    ("page", "name"),
    [("outbox", "status"), ("outbox", "eventType"), ("outbox", "cursor"), ("audit", "target"), ("audit", "cursor")],
)
def test_invalid_filter_value_lists_nothing(stage: Stage, page: str, name: str, value: str) -> None:
    """The filters of these pages are links, so no browser sends an empty value."""
    stage.queued()
    answer = stage.client("SUPER_ADMIN").http.get(f"/console/{page}", query_string={name: value})
    assert answer.status_code == (200 if name == "target" and value else 422)
    assert not parse(answer).find("main").find("tr", attrs={"data-row": True})  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("createdFrom", "yesterday"),
        ("createdTo", "2026-13-01"),
        ("lifecycleStatus", "sleeping"),
        ("queueName", "ai-nothing"),
        ("errorCode", "lower case"),
        ("jobType", "Bad Type"),
        ("q", "a\x00b"),
        ("userId", "x" * 300),
    ],
)
def test_invalid_filter_is_named_and_lists_no_job(stage: Stage, name: str, value: str) -> None:
    stage.create()
    answer = stage.client().http.get("/console/jobs", query_string={name: value})
    assert answer.status_code == 422
    soup = parse(answer)
    assert not _ids(soup)
    field = soup.find(attrs={"name": name, "aria-invalid": "true"})
    assert field or name == "lifecycleStatus"


def test_empty_list_says_whether_no_job_exists_or_none_matches(stage: Stage) -> None:
    console = stage.client()
    assert "No jobs yet" in console.soup("/console/jobs").find("main").get_text()
    stage.create()
    assert "Nothing matches" in console.soup("/console/jobs?userId=nobody").find("main").get_text()


def test_filter_lists_matching_jobs_only(stage: Stage) -> None:
    failed, queued = stage.failed("TIMEOUT", user="ana"), stage.queued(user="bo", target="note-99")
    console = stage.client()
    assert _ids(console.soup("/console/jobs?lifecycleStatus=queued")) == [queued]
    assert failed in _ids(console.soup("/console/jobs?userId=ana"))
    assert _ids(console.soup("/console/jobs?q=note-99")) == [queued]
    assert len(_ids(console.soup("/console/jobs?queueName=ai-interactive"))) == 2


def test_unresolved_jobs_are_failed_jobs_without_a_retry(stage: Stage) -> None:
    recovered, _child = stage.recovered()
    failed = stage.failed()
    rows = _ids(stage.client().soup("/console/jobs?unresolved=true"))
    assert failed in rows
    assert recovered not in rows


def test_search_opens_a_job_or_filters_by_code_or_prefix(stage: Stage) -> None:
    job_id = stage.queued(user="learner-77")
    console = stage.client()
    for text, expected in (
        (job_id, f"/console/jobs/{job_id}"),
        (f"  {job_id.upper()} ", f"/console/jobs/{job_id}"),
        ("PROVIDER_UNAVAILABLE", "/console/jobs?errorCode=PROVIDER_UNAVAILABLE"),
        ("learner-77", "/console/jobs?q=learner-77"),
        ("01900000-0000-7000-8000-000000000000", "/console/jobs?q=01900000-0000-7000-8000-000000000000"),
        ("", "/console/jobs"),
    ):
        answer = console.http.get("/console/search", query_string={"q": text})
        assert answer.headers["Location"] == expected


def test_poll_returns_only_rows_counts_and_the_number_of_newer_jobs(stage: Stage) -> None:
    job_id = stage.queued()
    console = stage.client()
    page = console.soup("/console/jobs")
    poller = page.find(id="poller")
    assert int(poller["data-poll"]) > 0
    stage.run(job_id)
    stage.create()
    changes = console.soup(poller["hx-get"], **{"HX-Request": "true"})
    assert [row["id"] for row in changes.find_all("tr")] == [f"row-{job_id}"]
    assert changes.find("tr").find(attrs={"data-state": "succeeded"})
    swapped = {each["id"] for each in changes.find_all(attrs={"hx-swap-oob": True})}
    assert swapped == {f"row-{job_id}", "chips", "newer", "poller"}
    assert changes.find(id="newer").get_text(strip=True) == "1 new"
    assert not changes.find(["input", "form", "dialog"])


def test_poll_updates_a_row_that_no_longer_matches_the_filter(stage: Stage) -> None:
    job_id = stage.queued()
    console = stage.client()
    poller = console.soup("/console/jobs?lifecycleStatus=queued").find(id="poller")
    stage.run(job_id)
    changes = console.soup(poller["hx-get"], **{"HX-Request": "true"})
    assert changes.find(id=f"row-{job_id}").find(attrs={"data-state": "succeeded"})


def test_page_that_cannot_change_is_not_polled(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PER_PAGE", 1)
    old, final = stage.succeeded(), stage.succeeded()
    stage.set_job(old, created_at=utc_now() - timedelta(hours=1))
    console = stage.client()
    first = console.soup("/console/jobs")
    assert _ids(first) == [final]
    assert first.find(id="poller").get("data-poll")
    second = console.soup(first.find("a", rel="next")["href"])
    assert _ids(second) == [old]
    assert not second.find(id="poller").get("data-poll")


def test_job_page_is_polled_until_the_job_has_ended(stage: Stage) -> None:
    job_id = stage.queued()
    console = stage.client()
    poller = console.soup(f"/console/jobs/{job_id}").find(id="poller")
    assert poller["data-poll"]
    still = console.soup(poller["hx-get"])
    assert {each["id"] for each in still.find_all(attrs={"hx-swap-oob": True})} == {"job-why", "job-strip"}
    stage.run(job_id)
    ended = console.soup(poller["hx-get"])
    assert ended.find(id="job-head").find(attrs={"data-state": "succeeded"})
    assert not ended.find(id="poller").get("data-poll")
    assert not console.soup(f"/console/jobs/{job_id}").find(id="poller").get("data-poll")


def test_poll_of_a_deleted_job_is_not_found(stage: Stage) -> None:
    answer = stage.client().get("/console/jobs/01900000-0000-7000-8000-000000000000/changes", **{"HX-Request": "true"})
    assert answer.status_code == 404


@pytest.mark.parametrize("since", ["", "yesterday", "2999-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_poll_with_an_invalid_time_causes_no_server_error(stage: Stage, since: str) -> None:
    stage.create()
    answer = stage.client().http.get("/console/jobs/changes", query_string={"since": since, "ids": "x,,y"})
    assert answer.status_code in (200, 422)


def test_times_are_relative_with_the_exact_time_attached(stage: Stage) -> None:
    job_id = stage.queued()
    stage.set_job(job_id, created_at=utc_now() - timedelta(minutes=3, seconds=10))
    for language, words in (("en", "3m ago"), ("zh", "3分钟前")):
        time = stage.client("OPERATOR", language).soup("/console/jobs").find("time")
        assert time.get_text() == words
        assert time["data-exact"].endswith(" UTC")
        assert time["datetime"].endswith("Z")
        assert time["tabindex"] == "0"


def test_full_job_id_can_be_copied(stage: Stage) -> None:
    job_id = stage.queued()
    soup = stage.client().soup("/console/jobs")
    assert soup.find("button", attrs={"data-copy": job_id})
