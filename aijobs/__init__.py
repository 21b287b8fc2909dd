"""aijobs: a durable engine for AI jobs. The rooms, in reading order:

settings      every knob with its default; the only reader of the environment
errors        every code: how it is answered, whether it is tried again, what a person reads
db            engines, units of work, column types, and the one clock that judges leases
jobs          the record: a job's row, its lifecycle, its snapshot, the door through which it is created
definitions   the rule book: what the engine must know of a job type
job_types     one file a job type
outbox        the promise: events written with what they speak of
engine        the work: prepare, resolve, execute, project, complete
upkeep        the keepers: dispatcher, reaper, re-drive, clean-up
ai            the models: gateway, router, providers, prompts, output, usage, cost
queues        the conveyor: Huey and Redis
learning      the business: services, tables and projectors of the job types
monitor       the window: reads for API and console
wiring        where real collaborators are chosen
workers       the three Huey instances
suspect_worker  the child process in which suspects run
web           the front door: JSON API, console, commands
testing       what authors of plug-ins may use
"""

__version__ = "0.1.0"
