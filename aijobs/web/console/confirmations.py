"""Confirm actions on a page (or in a dialog with it), with a token, and never by GET."""

from __future__ import annotations

from typing import Any

from flask import current_app, flash, make_response, redirect, url_for
from flask.typing import ResponseReturnValue
from flask_babel import gettext
from flask_babel import lazy_gettext as _l
from flask_wtf import FlaskForm
from itsdangerous import BadSignature, URLSafeTimedSerializer
from wtforms import HiddenField, TextAreaField
from wtforms.validators import Length, Optional

from aijobs.errors import ApiError, describe
from aijobs.jobs.status import JobState
from aijobs.monitor.views import JobRow
from aijobs.operators import rights
from aijobs.operators.actions import Cancelled, Operating
from aijobs.operators.audit import LONGEST_REASON
from aijobs.texts import clean_text
from aijobs.web.auth import acting, get_operator, require_right
from aijobs.web.console import blueprint
from aijobs.web.console.actions import CANCEL, RETRY, Action, offer, refusal_text
from aijobs.web.console.jobs import get_job
from aijobs.web.console.pages import render, whole_page
from aijobs.web.context import language, services

CONFIRMATION_S = 3600
"""How long a confirmation page is valid."""


class ConfirmationForm(FlaskForm):
    """The reason for the audit log, and proof that the confirmation was shown."""

    confirmation = HiddenField()
    reason = TextAreaField(
        _l("Reason (optional)"),
        [Optional(), Length(max=LONGEST_REASON, message=_l("At most %(max)d characters."))],
        filters=[lambda text: clean_text(text or "")],
    )

    def given_reason(self) -> str | None:
        """Return the reason, or None."""
        return self.reason.data or None


class Confirmation:
    """A signed token: this operator saw the confirmation of this action on this target."""

    def __init__(self, action: str, target_id: str) -> None:
        self._content = [get_operator().id, action, target_id]
        self._signer = URLSafeTimedSerializer(current_app.secret_key or "", salt="aijobs confirmation")

    def write(self) -> str:
        return str(self._signer.dumps(self._content))

    def is_valid(self, text: str | None) -> bool:
        """Return whether `text` is this token, signed at most `CONFIRMATION_S` ago."""
        try:
            return bool(self._signer.loads(text or "", max_age=CONFIRMATION_S) == self._content)
        except BadSignature:
            return False


# --- retry and cancel --------------------------------------------------------------------------------------


@whole_page("/jobs/<job_id>/retry", rights.VIEW)
def retry(job_id: str) -> ResponseReturnValue:
    """Show the confirmation of a retry."""
    return _ask(RETRY, get_job(job_id), ConfirmationForm())


@blueprint.post("/jobs/<job_id>/retry")
@require_right(rights.RETRY)
def retry_job(job_id: str) -> ResponseReturnValue:
    """Retry a job as a new one and show that one. A second click shows the same child."""
    job, form = get_job(job_id), ConfirmationForm()
    if not is_confirmed("retry", job.id, form):
        return _ask(RETRY, job, form, 422)
    try:
        result = Operating(services(), acting()).retry(job.id, form.given_reason())
    except ApiError as refused:
        return _refused(RETRY, job, refused)
    if result.created:
        flash(gettext("Retry created. This page shows the new job."), "done")
    else:
        flash(gettext("This job was already retried a moment ago. This page shows the new job."), "done")
    return redirect(url_for("console.job", job_id=result.job.id), 303)


@whole_page("/jobs/<job_id>/cancel", rights.VIEW)
def cancel(job_id: str) -> ResponseReturnValue:
    """Show the confirmation of a cancel."""
    return _ask(CANCEL, get_job(job_id), ConfirmationForm())


@blueprint.post("/jobs/<job_id>/cancel")
@require_right(rights.CANCEL)
def cancel_job(job_id: str) -> ResponseReturnValue:
    """Request the cancel of a job and show it."""
    job, form = get_job(job_id), ConfirmationForm()
    if not is_confirmed("cancel", job.id, form):
        return _ask(CANCEL, job, form, 422)
    try:
        result = Operating(services(), acting()).cancel(job.id, form.given_reason())
    except ApiError as refused:
        return _refused(CANCEL, job, refused)
    flash(_cancelled(result), "done")
    return redirect(url_for("console.job", job_id=job.id), 303)


def _cancelled(result: Cancelled) -> str:
    if result.before.final:
        return gettext("The job had already ended. Nothing was changed.")
    if result.after.lifecycle_status == JobState.CANCELLED:
        return gettext("Job cancelled.")
    return gettext("Cancel requested. The worker stops within a second or two.")


def is_confirmed(action: str, target_id: str, form: ConfirmationForm) -> bool:
    """Return whether the form is valid and its token is for this action, target and operator."""
    return bool(form.validate_on_submit()) and Confirmation(action, target_id).is_valid(form.confirmation.data)


def _ask(action: Action, job: JobRow, form: ConfirmationForm, status: int = 200) -> ResponseReturnValue:
    form.confirmation.data = Confirmation(action.name, job.id).write()
    page = render(
        "console/jobs/confirm.html",
        "console/jobs/_confirm.html",
        job=job,
        form=form,
        offer=offer(action, job, get_operator().may),
        **_texts(action, job),
    )
    return make_response(page, status)


def _texts(action: Action, job: JobRow) -> dict[str, Any]:
    if action is RETRY:
        return {
            "title": gettext("Retry this job?"),
            "lead": gettext("A new job runs with the same input. This job stays unchanged and links to the new one."),
            "button": gettext("Retry the job"),
        }
    running = job.locked_by is not None
    return {
        "title": gettext("Cancel this job?"),
        "lead": gettext("The worker stops the attempt. The provider may still bill the work done so far.")
        if running
        else gettext("No worker is running this job, so it is cancelled immediately."),
        "button": gettext("Cancel the job"),
    }


def _refused(action: Action, job: JobRow, refused: ApiError) -> ResponseReturnValue:
    """Show the reason on the page of the job that matters now."""
    details = refused.details or {}
    text = refusal_text(action, details.get("reason")) or describe(refused.code).message(language())
    flash(text, "problem")
    return redirect(url_for("console.job", job_id=details.get("newestJobId", job.id)), 303)
