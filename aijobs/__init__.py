"""aijobs: a durable engine for AI jobs. The rooms, in reading order:

settings      every setting with its default; the only reader of the environment
errors        every code: its HTTP status, its retry rule, its texts
answers       the base of JSON answers: one class is row, answer and OpenAPI schema
db            engines, units of work, column types, the schema, and the database's clock
jobs          the record: a job's row, its lifecycle, its snapshot, and its creation
definitions   the definitions of job types
job_types     one file per job type
outbox        events, written in the transaction of their change
engine        the work: prepare, resolve, execute, project, complete
upkeep        the passes: dispatcher, reaper, re-drive, clean-up
screening     content safety and redaction
credentials   users' own provider keys, encrypted
ai            models: calling, billing, providers, prompts, output
queues        Huey and Redis
learning      the business: notes, checks, the rule-based writer, one service per job type
monitor       the reads of API and console
operators     accounts, rights, audit, and the actions of operators
wiring        the only place that chooses real collaborators
workers       the three Huey instances
child_worker  the child process in which attempts run alone
local         everything on one machine: processes and the embedded broker
web           JSON API and console
cli           the command line
testing       helpers for authors of plug-ins
"""

__version__ = "0.1.0"
