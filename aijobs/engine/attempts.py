"""The road of one attempt, on a thread of its own. The same in a worker process and in its child processes."""

from __future__ import annotations

from aijobs.engine.ending import Ending
from aijobs.engine.execute import Execute
from aijobs.engine.outcome import Succeeded, end_of
from aijobs.engine.project import Project
from aijobs.engine.resolve import Resolve
from aijobs.engine.run import Run


class Attempts:
    """Runs attempts in the thread that asks for it."""

    def __init__(self, resolve: Resolve, execute: Execute, project: Project, ending: Ending) -> None:
        self._resolve, self._execute, self._project = resolve, execute, project
        self._ending = ending

    def run(self, run: Run) -> None:
        """Walk through the stages and end the attempt. Never raises."""
        try:
            resolved = self._resolve.resolve(run)
            if resolved is not None:
                self._execute.execute(run, resolved)
            run.token.raise_if_cancelled()
            with run.end_lock:
                self._ending.end(run, Succeeded(self._project.project(run)))
        except BaseException as error:
            end = end_of(error, run.token.reason)
            try:
                self._ending.end(run, end)
            except Exception as why:
                self._ending.leave_to_reaper(run, end.code, why)
