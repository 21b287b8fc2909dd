"""Stage 3, EXECUTE: call the provider, check the answer, and save it before anything else happens.

No database session is open while a provider is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from aijobs.ai.billing.cost import CostCalculator
from aijobs.ai.billing.tokens import estimate_tokens
from aijobs.ai.billing.usage import UsageLog
from aijobs.ai.calling.gateway import AiGateway
from aijobs.ai.errors import ProvidersBusy
from aijobs.ai.output import read_answer, schema_faults
from aijobs.ai.provider import GenerateRequest, Moderator, Route
from aijobs.canonical import canonical_hash, find_faults
from aijobs.db.database import Database, session_on
from aijobs.definitions.definition import JobDefinition
from aijobs.engine.calls import AttemptLedger, CallBooks
from aijobs.engine.guard import Guard
from aijobs.engine.moderation import Moderation
from aijobs.engine.resolve import Resolved
from aijobs.engine.run import Run
from aijobs.jobs.lifecycle.confirm import saved
from aijobs.jobs.lifecycle.repository import LifecycleRepository
from aijobs.logs import Outage, get_logger
from aijobs.validation import find_schema_faults, plain_location, plain_path

logger = get_logger(__name__)

SAVE_AGAIN_S = 0.5
"""The wait between two tries to save an answer while the database is away."""


class Execute:
    """Turns an attempt's input into a validated output."""

    def __init__(
        self,
        database: Database,
        lifecycle: LifecycleRepository,
        gateway: AiGateway,
        usage: UsageLog,
        costs: CostCalculator,
        guard: Guard,
        moderator: Moderator | None = None,
    ) -> None:
        """`moderator`: a provider that also judges content, if the operator has one."""
        self._database, self._lifecycle, self._gateway, self._guard = database, lifecycle, gateway, guard
        self._books = CallBooks(database, lifecycle, usage, costs)
        self._moderation = Moderation(moderator, gateway, self._books)
        self._outage = Outage(logger, "answer.database")

    def execute(self, run: Run, resolved: Resolved) -> None:
        """Save the validated output on the job, or leave it in `run.output` if no provider was paid for it.

        `JobError` if it fails; the usage row of its call stays open in `run.call`, and the transaction that records the
        error closes it. `ProvidersBusy`, with no row open, if no provider is available.
        """
        run.token.raise_if_cancelled()
        self._check_input(run, resolved)
        if resolved.request is None:
            run.output = self._let_out(run, self._scripted(run, resolved.input))
            return
        text, finish_reason = self._ask(run, resolved.request, resolved.routes)
        output = _validated(run, resolved.input, read_answer(text, finish_reason))
        self._save(run, self._let_out(run, output))

    def _check_input(self, run: Run, resolved: Resolved) -> None:
        self._guard.check_input(run, resolved.input)
        if self._moderation.is_wanted(run):
            self._raise_if_busy(resolved)
            self._moderation.check_input(run, resolved.input)

    def _raise_if_busy(self, resolved: Resolved) -> None:
        """Raise `ProvidersBusy` before a moderation is bought: a postponed job would buy one at each return."""
        request = resolved.request
        wait = self._gateway.busy_for(request, resolved.routes) if request is not None else None
        if wait is not None:
            raise ProvidersBusy(wait)

    def _let_out(self, run: Run, output: dict[str, Any]) -> dict[str, Any]:
        self._guard.check_output(run, output)
        self._moderation.check_output(run, output)
        return self._guard.redact_output(run, output)

    def _scripted(self, run: Run, job_input: Mapping[str, Any]) -> dict[str, Any]:
        if run.definition.script is None:
            raise TypeError(f"{run.definition.job_type} has neither prompt nor script")
        answer = run.definition.script(job_input, run.lease.attempt_no, run.token)
        run.token.raise_if_cancelled()
        return _validated(run, job_input, answer)

    def _ask(self, run: Run, request: GenerateRequest, routes: Sequence[Route]) -> tuple[str, str]:
        prompt = estimate_tokens(request.prompt.system) + estimate_tokens(request.prompt.user)
        ledger = AttemptLedger(self._books, run, prompt)
        try:
            answer = self._gateway.generate(request, routes, run.token, ledger)
        except ProvidersBusy:
            self._books.close_now(run)  # The row of a route that failed before the busy one.
            raise
        ledger.answered(answer)
        run.token.raise_if_cancelled()
        return answer.text, answer.finish_reason

    def _save(self, run: Run, output: dict[str, Any]) -> None:
        def save(connection: Connection) -> str:
            output_hash = self._lifecycle.save_output(run.lease, output, connection)
            self._books.close(connection, run)
            return output_hash

        self._keep(run, save, saved(run.lease, canonical_hash(output)))
        run.call = None
        logger.info("job.output_saved", **run.fields())

    def _keep(self, run: Run, save: Callable[[Connection], str], read_saved: Callable[[Session], str | None]) -> None:
        """Save the answer. While the database is away, wait until the deadline: a lost answer would be bought again.

        A save that fails twice although the database answers is raised.
        """

        def save_once(connection: Connection) -> str:
            with session_on(connection) as session:
                found = read_saved(session)  # An earlier COMMIT may have taken effect.
            return found or save(connection)

        refused, work = 0, save
        while True:
            try:
                self._database.transact(work, confirm=read_saved)
            except SQLAlchemyError as error:
                refused = refused + 1 if self._database.answers() else 0
                if refused > 1:
                    raise
                if not refused:
                    self._outage.failed(error)
                    run.token.sleep(SAVE_AGAIN_S)
                work = save_once
            else:
                self._outage.worked()
                return


def _validated(run: Run, job_input: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer after the output's schema and the definition's check. `JobError` VALIDATION_… names faults."""
    definition: JobDefinition = run.definition
    if faults := [(plain_path(path), fault) for path, fault in find_faults(answer)]:
        raise schema_faults(faults)
    try:
        model = definition.output.schema.model_validate(dict(answer))
    except ValidationError as error:
        # Without the values: the model's answer belongs in no log and no message.
        named = [(plain_location(place), fault) for place, fault in find_schema_faults(error)]
        raise schema_faults(named) from None
    output: dict[str, Any] = model.model_dump(mode="json", by_alias=True)
    run.token.raise_if_cancelled()
    if definition.output.validator is not None:
        context = (run.token,) if definition.output.watches_token else ()
        output = definition.output.validator(job_input, output, run.job.id, *context)
        run.token.raise_if_cancelled()
    return output
