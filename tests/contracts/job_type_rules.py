"""Rules for every job type, in the tree or in the documentation's example."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy.orm import Session

from aijobs.ai.prompts import PromptTemplates
from aijobs.definitions.definition import JobDefinition
from aijobs.definitions.projector import Artifact, ResultProjector
from aijobs.errors import CODES, JobError
from aijobs.jobs.models import AiJob, AiJobSnapshot
from aijobs.jobs.requests import validated_input
from tests.support.rows import build_snapshot

CHINESE = re.compile(r"[\u4e00-\u9fff]")


@dataclass(frozen=True)
class JobTypeSample:
    """A definition with the samples of its module."""

    definition: JobDefinition
    module: ModuleType | SimpleNamespace = field(repr=False)

    @property
    def input(self) -> dict[str, Any]:
        return copy.deepcopy(self.module.SAMPLE_INPUT)

    @property
    def output(self) -> dict[str, Any]:
        return copy.deepcopy(self.module.SAMPLE_OUTPUT)

    @property
    def junk(self) -> list[dict[str, Any]]:
        return copy.deepcopy(list(self.module.JUNK_OUTPUTS))


def read_output(sample: JobTypeSample, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer after schema and check, as the engine reads it."""
    definition = sample.definition
    model = definition.output.schema.model_validate(dict(answer))
    output = model.model_dump(mode="json", by_alias=True)
    if definition.output.validator is not None:
        output = definition.output.validator(validated_input(definition, sample.input), output, "0" * 36)
    return output


def check_labels(sample: JobTypeSample) -> None:
    metadata = sample.definition.metadata
    assert metadata.label.strip()
    assert metadata.description.strip()
    assert CHINESE.search(metadata.labels["zh"]), "the console is also in Chinese: labels={'zh': …}"


def check_samples(sample: JobTypeSample) -> None:
    assert validated_input(sample.definition, sample.input)
    output = read_output(sample, sample.output)
    # A later attempt must be able to read and project the saved output.
    assert sample.definition.output.schema.model_validate(json.loads(json.dumps(output)))


def check_junk(sample: JobTypeSample) -> None:
    assert len(sample.junk) >= 3
    for junk in sample.junk:
        with pytest.raises((ValidationError, JobError)):
            read_output(sample, junk)


def check_prompt(sample: JobTypeSample, prompts: PromptTemplates) -> None:
    """Assert that the prompt renders with the sample, with and without faults, and fences the learner's text."""
    definition = sample.definition
    if definition.prompt is None:
        assert definition.script is not None
        return
    name, version = definition.prompt.name, definition.prompt.version
    assert prompts.exists(name, version)
    schema = json.dumps(definition.output.schema.model_json_schema())
    values = {"input": validated_input(definition, sample.input), "output_schema": schema}
    plain = prompts.render(name, version, values)
    mending = prompts.render(name, version, {**values, "faults": ["the third item repeats the first"]})
    assert plain.system
    assert plain.user
    assert "the third item repeats the first" in mending.system + mending.user
    hostile = json.loads(json.dumps(values["input"]).replace(_longest_text(values["input"]), "{{ 7 * 7 }}{% raw %}"))
    assert "{{ 7 * 7 }}{% raw %}" in prompts.render(name, version, {**values, "input": hostile}).user


def _longest_text(value: Any) -> str:
    return str(max(re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(value)), key=len))


def check_codes(source: str) -> None:
    """Assert that every code the module raises is in the table of codes or registered."""
    raised = set(re.findall(r"JobError\(\s*\"([A-Z_]+)\"", source))
    assert raised <= set(CODES), f"unknown: {raised - set(CODES)}"


def check_projector(sample: JobTypeSample, projector: ResultProjector, session: Session, job: AiJob) -> None:
    """Assert that a second projection of a job has the same artifacts as the first."""
    snapshot: AiJobSnapshot = build_snapshot(job, validated_input(sample.definition, sample.input))
    session.add(job)
    session.flush()
    session.add(snapshot)
    session.flush()
    output = read_output(sample, sample.output)
    first = projector.project(session, job, output).artifacts
    session.flush()
    session.expire_all()
    again = projector.project(session, job, output).artifacts
    assert first == again
    assert first, "the sample has artifacts"
    assert len({(a.artifact_type, a.artifact_id) for a in first}) == len(first)
    assert [a.ordinal for a in first] == list(range(len(first)))
    assert all(isinstance(a, Artifact) and len(a.artifact_type) <= 64 and len(a.artifact_id) <= 64 for a in first)
