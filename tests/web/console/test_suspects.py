"""A suspect's page and its API answer say that the job lost workers and why it runs alone."""

from __future__ import annotations

import pytest

from aijobs.jobs.lease import lease_of
from tests.web.console.stage import Stage

SAID = {
    "en": (
        "It now runs alone in its own process, so that it cannot affect other jobs.",
        "Losses of its own process: 1. The job fails at 2.",
        "Worker lost (not counted: other jobs ran in its process)",
        "Worker lost (counted)",
    ),
    "zh": (
        "现在它单独在自己的进程中运行",
        "它自己的进程已崩溃 1 次，达到 2 次时任务失败。",
        "工作进程丢失，不计入本任务：其他任务也在该进程中运行",
        "工作进程丢失，计入本任务",
    ),
}


def suspect(stage: Stage) -> str:
    """Make a job that lost a shared worker and then a child process; return its id."""
    job_id, lifecycle = stage.running(), stage.services.lifecycle
    job = stage.job(job_id)
    assert job.lock_until is not None
    lifecycle.expire(lease_of(job), job.lock_until, at_once=True)
    lifecycle.charge(lease_of(lifecycle.lock_job(job_id, str(stage.instance)).job))
    return job_id


@pytest.mark.parametrize("language", SAID)
def test_page_of_a_suspect_says_why_it_runs_alone_and_which_loss_counts(stage: Stage, language: str) -> None:
    text = stage.client("VIEWER", language).soup(f"/console/jobs/{suspect(stage)}").get_text()
    for said in SAID[language]:
        assert said in text


def test_api_says_why_a_suspect_runs_alone(stage: Stage) -> None:
    job = stage.client().get(f"/admin-api/ai/jobs/{suspect(stage)}").json
    assert (job["lostCount"], job["unchargedLosses"]) == (1, 1)
    for said in SAID["en"][:2]:
        assert said in job["lossExplanation"]
    assert "lossExplanation" not in stage.client().get(f"/admin-api/ai/jobs/{stage.running()}").json


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("en", "This job therefore runs alone from the start, with one loss already counted."),
        ("zh", "因此本任务从一开始就单独运行"),
    ],
)
def test_page_of_a_suspects_retry_says_why_it_runs_alone(stage: Stage, language: str, said: str) -> None:
    job_id, jobs = suspect(stage), stage.services.jobs
    jobs.cancel(job_id, stage.job(job_id).user_id)
    retry = jobs.retry(job_id, "operator:ann").job
    text = stage.client("VIEWER", language).soup(f"/console/jobs/{retry.id}").get_text()
    assert said in text
    assert "Losses of processes that ran other jobs too" not in text
    explained = stage.client().get(f"/admin-api/ai/jobs/{retry.id}").json["lossExplanation"]
    assert explained.startswith("An earlier job of this retry chain lost its worker.")
    assert "other jobs" not in explained
