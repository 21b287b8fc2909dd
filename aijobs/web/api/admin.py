"""The operators' API: any job, its retry and cancel, and the engine's state."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from flask import Blueprint, Flask, Response, current_app, g, request, url_for
from flask_login import current_user

from aijobs.clock import utc_now
from aijobs.errors import ApiError
from aijobs.monitor.filters import PARAMETERS, JobFilter
from aijobs.monitor.usage_filter import PARAMETERS as USAGE_PARAMETERS
from aijobs.monitor.usage_filter import UsageFilter
from aijobs.operators import rights
from aijobs.operators.actions import Operating
from aijobs.web.api import answers
from aijobs.web.api.answers import AdminJobPage, QueueStatusList, UsageReport, answer, localized
from aijobs.web.api.openapi import Operation, add_document, add_operations, build_document
from aijobs.web.auth import acting, bearer_token, find_token_operator, get_operator
from aijobs.web.context import services
from aijobs.web.csrf import SAFE_METHODS, check_csrf_header
from aijobs.web.requests import (
    PAGE_PARAMETERS,
    page_of,
    read_no_parameters,
    read_object,
    read_optional_object,
    read_optional_reason,
    read_parameters,
    read_reason,
    read_text,
)
from aijobs.web.user_tokens import is_user_request


def admin_list_jobs() -> Response:
    parameters = read_parameters({**dict.fromkeys(PARAMETERS, read_text), **PAGE_PARAMETERS})
    page = services().monitor.list_jobs(JobFilter.parse(parameters), *page_of(parameters))
    return answer(AdminJobPage([localized(job) for job in page.items], page.next_cursor))


def admin_show_job(job_id: str) -> Response:
    read_no_parameters()
    operator, monitor = get_operator(), services().monitor
    detail = monitor.get_detail(job_id, internal=operator.may(rights.INTERNAL_ERRORS))
    wait = monitor.find_wait(detail)
    return answer(answers.admin_detail(detail, wait, usage=operator.may(rights.VIEW_USAGE)))


def admin_reveal_job(job_id: str) -> Response:
    read_no_parameters()
    reason = read_reason(read_object(("reason",)))
    revealed = _operating().reveal(job_id, reason)
    shown: dict[str, Any] = {"jobId": job_id}
    if revealed.snapshot is not None:
        shown["snapshot"] = revealed.snapshot
    if revealed.validated_output is not None:
        shown["validatedOutput"] = revealed.validated_output
    return answer(shown)


def admin_retry_job(job_id: str) -> Response:
    read_no_parameters()
    reason = read_optional_reason(read_optional_object(("reason",)))
    created = _operating().retry(job_id, reason)
    child = services().monitor.get_job(created.job.id).job
    return answer(
        localized(child),
        201 if created.created else 200,
        location=url_for("admin_api.admin_show_job", job_id=child.id),
    )


def admin_cancel_job(job_id: str) -> Response:
    read_no_parameters()
    reason = read_optional_reason(read_optional_object(("reason",)))
    cancelled = _operating().cancel(job_id, reason)
    return answer(localized(cancelled.after))


def admin_queues_status() -> Response:
    read_no_parameters()
    return answer(QueueStatusList(services().monitor.queue_statuses()))


def admin_outbox_status() -> Response:
    read_no_parameters()
    return answer(services().monitor.outbox_status())


def admin_requeue_event(event_id: str) -> Response:
    read_no_parameters()
    reason = read_optional_reason(read_optional_object(("reason",)))
    return answer(_operating().requeue(event_id, reason))


def admin_list_workers() -> Response:
    read_no_parameters()
    return answer(services().monitor.workers())


def admin_list_providers() -> Response:
    read_no_parameters()
    usage = get_operator().may(rights.VIEW_USAGE)
    return answer(answers.providers(services().monitor.providers(), usage=usage))


def admin_close_breaker(provider: str) -> Response:
    read_no_parameters()
    reason = read_optional_reason(read_optional_object(("reason",)))
    return answer(_operating().close_breaker(provider, reason))


def admin_show_usage() -> Response:
    given = read_parameters({name: read for name, (_, read) in USAGE_PARAMETERS.items()})
    wanted = UsageFilter.within({USAGE_PARAMETERS[name][0]: value for name, value in given.items()}, utc_now())
    found = services().monitor.usage(wanted)
    return answer(UsageReport(wanted.since, wanted.until, wanted.group_by, found))


def _operating() -> Operating:
    return Operating(services(), acting())


_READ = ("UNAUTHORIZED", "FORBIDDEN", "INPUT_INVALID")
_WRITE = (*_READ, "BAD_REQUEST", "PAYLOAD_TOO_LARGE", "UNSUPPORTED_MEDIA_TYPE")

OPERATIONS = (
    Operation(
        "GET",
        "/admin-api/ai/jobs",
        admin_list_jobs,
        "Jobs, newest first",
        {200: "AdminJobPage"},
        errors=_READ,
        parameters=(*PARAMETERS, "cursor", "limit"),
        right=rights.VIEW,
    ),
    Operation(
        "GET",
        "/admin-api/ai/jobs/{jobId}",
        admin_show_job,
        "A job with the reason why it waits, its history, outbox events, provider calls, artifacts and retry chain; "
        "tokens and cost with the right `view_usage`",
        {200: "AdminJobDetail"},
        errors=(*_READ, "JOB_NOT_FOUND"),
        right=rights.VIEW,
    ),
    Operation(
        "POST",
        "/admin-api/ai/jobs/{jobId}/reveal",
        admin_reveal_job,
        "Reveal a job's input and output; the reason is recorded in the audit log",
        {200: "Revealed"},
        errors=(*_WRITE, "JOB_NOT_FOUND"),
        body="RevealRequest",
        right=rights.REVEAL,
    ),
    Operation(
        "POST",
        "/admin-api/ai/jobs/{jobId}/retry",
        admin_retry_job,
        "Retry a failed or cancelled job as a new job; 200 with the earlier retry if it has not ended yet",
        {201: "AdminJob", 200: "AdminJob"},
        errors=(*_WRITE, "JOB_NOT_FOUND", "JOB_NOT_RETRYABLE", "PLATFORM_UNAVAILABLE"),
        body="ReasonRequest",
        body_required=False,
        location=True,
        right=rights.RETRY,
    ),
    Operation(
        "POST",
        "/admin-api/ai/jobs/{jobId}/cancel",
        admin_cancel_job,
        "Request the cancel of a job",
        {200: "AdminJob"},
        errors=(*_WRITE, "JOB_NOT_FOUND", "JOB_NOT_CANCELLABLE"),
        body="ReasonRequest",
        body_required=False,
        right=rights.CANCEL,
    ),
    Operation(
        "GET",
        "/admin-api/ai/jobs/queues/status",
        admin_queues_status,
        "Waiting and running jobs of each queue",
        {200: "QueueStatusList"},
        errors=_READ,
        right=rights.VIEW,
    ),
    Operation(
        "GET",
        "/admin-api/ai/jobs/outbox/status",
        admin_outbox_status,
        "The outbox: counts, lag, dead events, unknown types",
        {200: "OutboxStatus"},
        errors=_READ,
        right=rights.VIEW,
    ),
    Operation(
        "POST",
        "/admin-api/ai/outbox/{eventId}/requeue",
        admin_requeue_event,
        "Send a dead end event again",
        {200: "OutboxEvent"},
        errors=(*_WRITE, "NOT_FOUND", "JOB_NOT_RETRYABLE"),
        body="ReasonRequest",
        body_required=False,
        right=rights.OUTBOX_FIX,
    ),
    Operation(
        "GET",
        "/admin-api/ai/workers",
        admin_list_workers,
        "Worker processes and the jobs that they run",
        {200: "WorkerList"},
        errors=_READ,
        right=rights.VIEW,
    ),
    Operation(
        "GET",
        "/admin-api/ai/providers",
        admin_list_providers,
        "AI providers: breakers, running calls, and today's calls; tokens and cost with the right `view_usage`",
        {200: "ProviderList"},
        errors=_READ,
        right=rights.VIEW,
    ),
    Operation(
        "POST",
        "/admin-api/ai/providers/{provider}/breaker/close",
        admin_close_breaker,
        "Close the breaker of a provider for the platform's key, so that calls go through again",
        {200: "Breaker"},
        errors=(*_WRITE, "NOT_FOUND"),
        body="ReasonRequest",
        body_required=False,
        right=rights.PROVIDER_FIX,
    ),
    Operation(
        "GET",
        "/admin-api/ai/usage",
        admin_show_usage,
        "Usage and cost of provider calls by UTC day, job type, provider, model or user, with the total",
        {200: "Usage"},
        errors=_READ,
        parameters=(*USAGE_PARAMETERS,),
        right=rights.VIEW_USAGE,
    ),
)

DOCUMENT = build_document(
    "aijobs for operators",
    "List, retry and cancel all jobs; watch queues, outbox and workers. With a session's cookie, "
    "writes need its CSRF token in `X-CSRF-Token`.",
    OPERATIONS,
    {
        "operatorToken": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": "aijobs_session"},
    },
)


def init_app(app: Flask) -> None:
    """Add the operators' API to `app`."""
    blueprint = Blueprint("admin_api", __name__)
    blueprint.before_request(_authenticate)
    add_operations(blueprint, OPERATIONS)
    app.register_blueprint(blueprint)
    add_document(app, "/admin-api/openapi.json", _document, "admin_openapi")


def _document() -> dict[str, Any]:
    """Return the document with the cookie's name, which depends on the installation and on the request's prefix."""
    document = deepcopy(DOCUMENT)
    document["components"]["securitySchemes"]["session"]["name"] = current_app.session_interface.get_cookie_name(
        current_app
    )
    return document


def _authenticate() -> None:
    """Authenticate the operator. If there is an `Authorization` header, a session is ignored."""
    if "Authorization" in request.headers:
        token = bearer_token()
        g.operator = find_token_operator(token) if token else None
        if g.operator is None and is_user_request():
            raise ApiError("FORBIDDEN")  # A user of the learning app, not an operator.
    elif current_user.is_authenticated and request.method not in SAFE_METHODS:
        check_csrf_header()
    get_operator()
