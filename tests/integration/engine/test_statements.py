"""What a job asks of the database beside its own work."""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.engine.interfaces import CacheStats

from tests.integration.engine.stage import open_stage
from tests.support.jobs import Kit


def test_a_job_like_the_one_before_it_compiles_no_statement_anew(live_kit: Kit) -> None:
    """With the database's own clock, whose offsets differ from lease to due time: compiling costs more than asking."""
    anew: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if context.compiled is not None and context.cache_hit is not CacheStats.CACHE_HIT:
            anew.append(statement)

    with open_stage(live_kit, watch_s=30.0) as stage:
        jobs = [stage.kit.new_job({"output": {"said": "hello"}, "artifacts": 1}) for _ in range(4)]
        live_kit.database.engine.clear_compiled_cache()
        event.listen(live_kit.database.engine, "before_cursor_execute", note)
        for job in jobs:
            warm = len(anew)
            assert stage.run(job.id) == "succeeded"
    assert warm > 0, "the first jobs' statements were seen"
    assert anew[warm:] == []
