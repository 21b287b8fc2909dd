"""Flashcards: create jobs for them, and read the cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from aijobs.ai.catalogue import LOCAL
from aijobs.ai.models import AiUsageLog, CallState
from aijobs.answers import Answer, Maybe, Natural, Time, one_of
from aijobs.db.database import Database
from aijobs.definitions.definition import USER_DEEPSEEK_KEY
from aijobs.errors import ApiError, InputInvalid
from aijobs.jobs.chains import newest_of_chain
from aijobs.jobs.models import AiJob
from aijobs.jobs.requests import CreatedJob, CreateJobInput, Overrides
from aijobs.jobs.service import AiJobService
from aijobs.learning.models import FLASHCARD_GENERATION, Flashcard

TARGET_TYPE = "note"
RULES, MODEL = "rules", "model"


@dataclass(frozen=True)
class Evidence(Answer):
    """A quote in segment `sid` of the notes, from character `start` to `end`."""

    sid: str
    quote: str
    start: Maybe[Natural] = None
    end: Maybe[Natural] = None


@dataclass(frozen=True)
class CardSource(Answer):
    """The note that a card was made from."""

    id: str
    title: str


@dataclass(frozen=True)
class Card(Answer):
    """A flashcard. Fields that its type doesn't use are left out of the answer."""

    schema_name = "Flashcard"

    id: Annotated[str, Field(serialization_alias="flashcardId")]
    card_type: Annotated[str, one_of(("basic", "cloze"))]
    front: Maybe[str]
    back: Maybe[str]
    text: Maybe[str]
    hint: Maybe[str]
    tags: list[str]
    difficulty: str | None
    evidence: list[Evidence]
    lang: str
    source: CardSource
    created_at: Time


@dataclass(frozen=True)
class FlashcardSet:
    """The newest job of a chain, and its cards."""

    job: AiJob
    cards: list[Card]
    made_by: str | None
    """`rules` (from the learner's own text, without a model) or `model`; None if there is no answer yet."""


class FlashcardService:
    """Flashcards for the learning app."""

    def __init__(self, database: Database, jobs: AiJobService) -> None:
        self._database, self._jobs = database, jobs

    def create(
        self,
        user_id: str,
        body: Mapping[str, Any],
        idempotency_key: str | None = None,
        job_type: str = FLASHCARD_GENERATION,
    ) -> CreatedJob:
        """Create a job for cards from the notes in `body` (`lang`, `source`, `segments`, `options`), on the user's own
        key if it names one (`credentialId`). `job_type`: another type that makes flashcards from notes.

        Raises the errors of `AiJobService.create_job`.
        """
        notes, overrides = take_credential(body)
        source = notes.get("source")
        note = source.get("id") if isinstance(source, Mapping) else None
        request = CreateJobInput(
            user_id=user_id,
            job_type=job_type,
            target_type=TARGET_TYPE,
            # The input's schema names a wrong type, as `source.id`.
            target_id=note if isinstance(note, str) else "-",
            input=notes,
            idempotency_key=idempotency_key,
            overrides=overrides,
        )
        try:
            return self._jobs.create_job(request)
        except InputInvalid as refused:
            raise refused.renamed({"targetId": "source.id"}) from None

    def find(self, user_id: str, job_id: str, job_type: str = FLASHCARD_GENERATION) -> FlashcardSet:
        """Return the newest job of the chain of `job_id`, its cards, and what made them.

        JOB_NOT_FOUND for no job, another user's, and one of another type.
        """
        with self._database.read() as session:
            job = session.get(AiJob, job_id)
            if job is None or job.user_id != user_id or job.job_type != job_type:
                raise ApiError("JOB_NOT_FOUND")
            newest = newest_of_chain(session, job.root_id)
            if newest is None:  # Retention has just deleted it.
                raise ApiError("JOB_NOT_FOUND")
            cards = session.execute(
                select(Flashcard).where(Flashcard.job_id == newest.id).order_by(Flashcard.ordinal)
            ).scalars()
            return FlashcardSet(newest, [_card(card) for card in cards], _made_by(session, newest.root_id))


def _made_by(session: Session, root_id: str) -> str | None:
    """Return what made the chain's last answer: a retry may have inherited it."""
    provider = session.execute(
        select(AiUsageLog.provider)
        .join(AiJob, AiJob.id == AiUsageLog.job_id)
        .where(AiJob.root_id == root_id, AiUsageLog.state == CallState.DONE, AiUsageLog.finish_reason.is_not(None))
        .order_by(AiUsageLog.started_at.desc(), AiUsageLog.id.desc())
        .limit(1)
    ).scalar()
    if provider is None:
        return None
    return RULES if provider == LOCAL.provider else MODEL


def take_credential(body: Mapping[str, Any]) -> tuple[dict[str, Any], Overrides]:
    """Return the body without `credentialId`, and the override for the key.

    `AiJobService.create_job` checks the id and its owner, after the idempotency key.
    """
    rest = dict(body)
    if "credentialId" not in rest:
        return rest, Overrides()
    return rest, Overrides(credential_mode=USER_DEEPSEEK_KEY, credential_id=rest.pop("credentialId"))


def _card(card: Flashcard) -> Card:
    return Card(
        id=card.id,
        card_type=card.card_type,
        front=card.front,
        back=card.back,
        text=card.text,
        hint=card.hint,
        tags=card.tags,
        difficulty=card.difficulty,
        evidence=[Evidence(**quote) for quote in card.evidence],
        lang=card.lang,
        source=CardSource(card.source_id, card.source_title),
        created_at=card.created_at,
    )
