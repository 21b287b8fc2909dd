"""One module writes `lifecycle_status`, one reads the environment, and nothing reads the legacy status."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.contracts.sources import Module, imports, modules, sample

WRITER = "aijobs.jobs.lifecycle."
CARRIERS = frozenset({"aijobs.jobs.lifecycle.changes", "aijobs.jobs.lifecycle.fairness"})
"""Modules of the package that decide no state, so the rule holds for them too."""
COLUMN = "lifecycle_status"
ROW_MAKERS = frozenset({"AiJob", "insert_row", "insert_if_absent"})
"""Calls whose keyword arguments are a row's columns."""
CHANGES = frozenset({"values", "change_by", "_set", "_change", "_change_held", "update", "setattr"})
"""Methods whose keyword arguments, mappings or names become columns of an UPDATE."""


def called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_column(node: ast.AST | None) -> bool:
    """Return whether the node is `lifecycle_status` as a key: its name as text, or the mapped attribute."""
    return (isinstance(node, ast.Constant) and node.value == COLUMN) or (
        isinstance(node, ast.Attribute) and node.attr == COLUMN
    )


def targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ast.walk(target)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        yield from ast.walk(node.target)


def writes(module: Module) -> list[int]:
    """Return the lines that write the column or prepare to: an assignment, a row, an UPDATE's values, SQL as text."""
    return [node.lineno for node in ast.walk(module.tree) if _writes(node)]  # type: ignore[attr-defined]


def _writes(node: ast.AST) -> bool:
    return any(
        (
            any(isinstance(t, ast.Attribute) and t.attr == COLUMN for t in targets(node)),
            any(isinstance(t, ast.Subscript) and _is_column(t.slice) for t in targets(node)),
            isinstance(node, ast.Call) and _call_writes(node),
            isinstance(node, ast.Dict) and any(_is_column(key) for key in node.keys),
            isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(_SQL.search(node.value)),
        )
    )


_SQL = re.compile(rf"(?is)\bupdate\s+ai_jobs\b.*\bset\b.*\b{COLUMN}\b|\binsert\s+into\s+ai_jobs\b.*\b{COLUMN}\b")


def _call_writes(node: ast.Call) -> bool:
    name = called(node)
    if name == "setattr":
        return len(node.args) > 1 and _is_column(node.args[1])
    if any(keyword.arg == COLUMN for keyword in node.keywords):
        return name in ROW_MAKERS | CHANGES or name == "dict"
    return False


COMPUTED = {
    "aijobs.jobs.lifecycle.changes": (3, "hands on what the repository chose"),
    "aijobs.db.statements": (7, "writes what its caller names"),
    "aijobs.jobs.creation": (1, "a new job's columns, for the key of its event"),
    "aijobs.ai.billing.usage": (1, "usage rows"),
    "aijobs.outbox.repository": (5, "outbox events"),
    "aijobs.upkeep.pass_log": (1, "passes"),
    "aijobs.testing.fakellm.ledger": (1, "the ledger of a server that tests ask"),
}
"""Places where names of columns or attributes are computed: the maximum number, and the purpose.

A person reviews each new place and adds it here. `tests/support/single_writer.py` checks what these places write
while tests run.
"""


def computed_names(module: Module) -> list[int]:
    """Return lines that set attributes or columns with computed names, or that spell the column's name in pieces."""
    return [node.lineno for node in ast.walk(module.tree) if _computes(node)]  # type: ignore[attr-defined]


def _computes(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and called(node) in ("setattr", "__setattr__"):
        return not isinstance(node.args[-2] if len(node.args) > 1 else None, ast.Constant)
    if isinstance(node, ast.Call) and called(node) in ROW_MAKERS | CHANGES:
        return any(map(_hidden, [k.value for k in node.keywords if k.arg is None] + _mappings(node)))
    return isinstance(node, ast.expr) and _spells_the_column(node)


def _mappings(call: ast.Call) -> list[ast.expr]:
    """Return arguments that are columns themselves: those of `values(…)`."""
    return call.args if called(call) == "values" else []


def _hidden(value: ast.expr) -> bool:
    """Return whether not all keys of this mapping are literals."""
    if not isinstance(value, ast.Dict):
        return True
    return any(not isinstance(key, ast.Constant | ast.Attribute) for key in value.keys)


def _spells_the_column(node: ast.expr) -> bool:
    """Return whether an expression of literals evaluates to the column's name, or a text is its beginning."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(re.fullmatch(r"lifecycle_s?t?a?t?u?", node.value))
    if not isinstance(node, ast.BinOp | ast.JoinedStr | ast.Call):
        return False
    parts = list(ast.walk(node))
    if any(isinstance(part, ast.Name) for part in parts) or not any(map(_is_text, parts)):
        return False
    try:
        return bool(eval(ast.unparse(node), {"__builtins__": {}}) == COLUMN)
    except Exception:
        return False  # It has no value by itself.


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def others() -> Iterator[Module]:
    """Yield the modules that may not write the column."""
    return (module for module in modules() if not module.name.startswith(WRITER) or module.name in CARRIERS)


def test_columns_with_computed_names_are_written_only_in_known_places() -> None:
    found = {module: lines for module in others() if (lines := computed_names(module))}
    beyond = {module: lines for module, lines in found.items() if len(lines) > COMPUTED.get(module.name, (0, ""))[0]}
    assert not [module.at(line) for module, lines in beyond.items() for line in lines]


@pytest.mark.parametrize(
    "line",
    [
        "session.execute(update(AiJob).values(**{'lifecycle_' + 'status': 'failed'}))",
        "session.execute(update(AiJob).values(**changes))",
        "session.execute(update(AiJob).values(changes))",
        "session.execute(update(AiJob).values({name: 'failed'}))",
        "lifecycle._change(session, job_id, **{name: 'failed'})",
        "lifecycle._change_held(session, lease, note, **values)",
        "lifecycle._set(session, job_id, **values)",
        "change_by(session, AiJob, THE_JOB, of=of(job_id), **values)",
        "insert_row(session, AiJob, **row)",
        "row = AiJob(**{f'{prefix}_status': 'failed'})",
        "setattr(job, name, 'failed')",
        "job.__setattr__(name, 'failed')",
        "object.__setattr__(job, name, 'failed')",
        "name = 'lifecycle_' + 'status'",
        "name = '_'.join(('lifecycle', 'status'))",
        "name = f'lifecycle_{suffix}'",
        "name = '%s_status' % 'lifecycle'",
        "name = 'LIFECYCLE_STATUS'.lower()",
    ],
)
def test_computed_name_is_found(line: str) -> None:
    assert computed_names(sample(line))


@pytest.mark.parametrize(
    "line",
    ["setattr(job, 'progress', 5)", "update(AiJob).values(progress=5)", "values({'progress': 5})", "a = 'x' + 'y'"],
)
def test_literal_name_is_not_computed(line: str) -> None:
    assert not computed_names(sample(line))


def test_only_the_lifecycle_repository_writes_the_lifecycle_status() -> None:
    found = [module.at(line) for module in others() for line in writes(module)]
    assert not found


def test_change_methods_of_the_lifecycle_are_listed() -> None:
    (source,) = (module for module in modules() if module.name == f"{WRITER}changes")
    takes_columns = {
        node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None
    }
    assert takes_columns
    assert takes_columns <= CHANGES


def test_writes_of_the_lifecycle_are_found() -> None:
    writers = {module.name for module in modules() if module.name.startswith(WRITER) and writes(module)}
    assert writers == {"aijobs.jobs.lifecycle.lock", "aijobs.jobs.lifecycle.end"}, "where it is locked and ended"


@pytest.mark.parametrize(
    "line",
    [
        "job.lifecycle_status = 'failed'",
        "job.lifecycle_status: str = 'failed'",
        "parent.job.lifecycle_status = FAILED",
        "a, job.lifecycle_status = 1, 'failed'",
        "session.execute(update(AiJob).values(lifecycle_status='failed'))",
        "session.execute(update(AiJob).values({'lifecycle_status': 'failed'}))",
        "session.execute(update(AiJob).values({AiJob.lifecycle_status: 'failed'}))",
        "query.update({'lifecycle_status': 'failed'})",
        "values['lifecycle_status'] = 'failed'",
        "changes = dict(lifecycle_status='failed')",
        "row = AiJob(id='1', lifecycle_status='succeeded')",
        "setattr(job, 'lifecycle_status', 'failed')",
        "lifecycle._change(session, job_id, lifecycle_status='failed')",
        "lifecycle._change_held(session, lease, note, lifecycle_status='failed')",
        "lifecycle._set(session, job_id, lifecycle_status='failed')",
        "change_by(session, AiJob, THE_JOB, of=of(job_id), lifecycle_status='failed')",
        "insert_row(session, AiJob, id='1', lifecycle_status='succeeded')",
        "connection.execute(text(\"UPDATE ai_jobs SET lifecycle_status = 'failed'\"))",
    ],
)
def test_second_writer_is_found(line: str) -> None:
    assert writes(sample(line))


@pytest.mark.parametrize(
    "line",
    [
        "if job.lifecycle_status == 'failed': pass",
        "answer = {'lifecycleStatus': job.lifecycle_status}",
        "query.where(AiJob.lifecycle_status.in_(OPEN))",
        "JobFilter(lifecycle_status='failed')",
    ],
)
def test_reader_is_no_writer(line: str) -> None:
    assert not writes(sample(line))


# --- the environment ------------------------------------------------------------------------------------------

READER = "aijobs.settings"


def environment_reads(module: Module) -> list[int]:
    found = []
    for node in ast.walk(module.tree):
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
        reads = reads and ast.unparse(node.value) != "request"  # A WSGI request has an `environ` of its own.
        named = isinstance(node, ast.ImportFrom) and node.module == "os"
        if reads or (named and any(a.name in ("environ", "environb", "getenv", "putenv") for a in node.names)):  # type: ignore[attr-defined]
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


def test_only_the_settings_read_the_environment() -> None:
    found = [module.at(line) for module in modules() if module.name != READER for line in environment_reads(module)]
    assert not found


@pytest.mark.parametrize("line", ["os.environ['X']", "os.getenv('X')", "from os import environ", "os.environ.get('X')"])
def test_second_reader_of_the_environment_is_found(line: str) -> None:
    assert environment_reads(sample(line))


# --- the legacy status, creation of jobs, and branches on job types ------------------------------------------

JOB_NAMES = re.compile(r"(AiJob|.*\bjob|parent|child|live|winner|newest|existing|fresh)$")


def legacy_reads(module: Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr == "status" and JOB_NAMES.match(ast.unparse(node.value))
    ]


def test_nothing_reads_the_legacy_status() -> None:
    found = [module.at(line) for module in modules() for line in legacy_reads(module)]
    assert not found


@pytest.mark.parametrize("line", ["job.status", "AiJob.status == 'pending'", "run.job.status", "select(AiJob.status)"])
def test_reader_of_the_legacy_status_is_found(line: str) -> None:
    assert legacy_reads(sample(line))


def test_status_of_an_event_is_no_legacy_status() -> None:
    assert not legacy_reads(sample("event.status, OutboxEvent.status, answer.status"))


CREATORS = {
    "aijobs.learning.flashcards": "a business service",
    "aijobs.jobs.creation": "inserts through the repository, for a new job and for a retry",
    "aijobs.cli.demo_data": "scripted jobs for looking at the console; refused in production",
}
"""Modules that may call `create_job`, and their role."""


def creators(module: Module) -> list[int]:
    return [n.lineno for n in ast.walk(module.tree) if isinstance(n, ast.Call) and called(n) == "create_job"]


def test_jobs_are_created_only_by_business_services_and_retries() -> None:
    assert {module.name for module in modules() if creators(module)} == set(CREATORS)


def test_only_the_service_and_its_retries_use_the_job_creation() -> None:
    users = {m.name for m in modules() if any(one.target == "aijobs.jobs.creation" for one in imports(m))}
    assert users == {"aijobs.jobs.service", "aijobs.jobs.retries", "aijobs.wiring.services"}


def switches(module: Module) -> list[int]:
    """Return lines that compare a job type with a literal or `match` over one."""
    return [node.lineno for node in ast.walk(module.tree) if _switches(node)]  # type: ignore[attr-defined]


def _switches(node: ast.AST) -> bool:
    if isinstance(node, ast.Match):
        return _names_a_type(node.subject)
    return isinstance(node, ast.Compare) and _names_a_type(node.left) and any(map(_is_literal, node.comparators))


def _names_a_type(node: ast.AST) -> bool:
    return ast.unparse(node).endswith(("job_type", "jobType"))


def _is_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_is_literal(one) for one in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_code_branches_on_job_types() -> None:
    found = [
        module.at(line)
        for module in modules()
        if not module.name.startswith("aijobs.job_types.")
        for line in switches(module)
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "if job.job_type == 'flashcard_generation': pass",
        "if job_type in ('a', 'b'): pass",
        "match job.job_type:\n    case 'a': pass",
    ],
)
def test_branch_on_a_job_type_is_found(source: str) -> None:
    assert switches(sample(source))


# --- names ------------------------------------------------------------------------------------------------------

NOUNS = (
    *("AiJob", "AiJobSnapshot", "AiJobArtifact", "AiJobEvent", "OutboxEvent", "AiUsageLog", "UserModelCredential"),
    *("LifecycleRepository", "JobDefinition", "JobDefinitionRegistry", "AiJobService", "OutboxRepository"),
    *("OutboxDispatcher", "ExecutionEngine", "ResultProjector", "AiGateway", "ModelRouter", "PromptTemplates"),
    *("CostCalculator", "UsageLog", "SnapshotBuilder", "SnapshotCleanup", "EventBus"),
)


def test_each_part_of_the_design_is_one_class_of_that_name() -> None:
    classes = [node.name for module in modules() for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    assert {noun: classes.count(noun) for noun in NOUNS} == dict.fromkeys(NOUNS, 1)
