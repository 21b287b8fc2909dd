"""aijobs: a durable engine for AI jobs. The rooms, in reading order:

settings      every setting with its default; the only reader of the environment
errors        every code: how it is answered, whether it is retried, what a person reads
answers       what JSON answers are made of: a class is row, answer and OpenAPI schema at once
db            engines, units of work, column types, the schema, and the one clock that judges leases
jobs          the record: a job's row, its lifecycle, its snapshot, the door through which it is created
definitions   the rule book: what the engine must know of a job type
job_types     one file a job type
outbox        the promise: events written in the transaction of what they describe
engine        the work: prepare, resolve, execute, project, complete
upkeep        the keepers: dispatcher, reaper, re-drive, clean-up
screening     the filter: content safety and redaction
credentials   users' own provider keys, encrypted
ai            the models: calling, billing, providers, prompts, output
queues        the conveyor: Huey and Redis
learning      the business: notes, checks, the rule-based writer, one service a job type
monitor       the window: reads for API and console
operators     the staff: accounts, rights, audit, what an operator may do
wiring        the only place that chooses real collaborators
workers       the three Huey instances
child_worker  the child process in which attempts run alone
local         everything on one machine: processes and the embedded broker
web           the front door: JSON API and console
cli           the command line
testing       what authors of plug-ins may use
"""

__version__ = "0.1.0"
