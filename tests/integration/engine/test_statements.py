"""Compilation of the engine's SQL statements."""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.engine.interfaces import CacheStats

from tests.integration.engine.stage import open_stage
from tests.support.jobs import Kit


def test_second_job_of_a_type_compiles_no_statement(live_kit: Kit) -> None:
    """Compiling costs more than running. With the database's clock, offsets of times must be parameters."""
    compiled: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if context.compiled is not None and context.cache_hit is not CacheStats.CACHE_HIT:
            compiled.append(statement)

    with open_stage(live_kit, watch_s=30.0) as stage:
        jobs = [stage.kit.new_job({"output": {"said": "hello"}, "artifacts": 1}) for _ in range(4)]
        live_kit.database.engine.clear_compiled_cache()
        event.listen(live_kit.database.engine, "before_cursor_execute", note)
        for job in jobs:
            warm = len(compiled)
            assert stage.run(job.id) == "succeeded"
    assert warm > 0, "the statements of the first jobs were compiled"
    assert compiled[warm:] == []
