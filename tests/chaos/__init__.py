"""Chaos: the whole system as real processes, actions and faults from a seed, and a verdict on the promises at the end.

plan        the sequence of actions and faults of a seed
stage       servers, consumers and web as processes, and the supervisor that restarts them
consumer    the program of a consumer process: crash points and ledger around Huey's consumer
web         the program of the web process
crashes     named points at which an armed process ends itself
ledger      the workers' file with a line before and after each provider call
provider    the provider's server, which answers by each job's script and keeps a bill
chaos_job   a job type from a plug-in, whose provider runs in the worker's process
served_job  the same with a server as its provider
driver      performs the actions and records the answers
faults      performs the faults
evidence    the contents of database, ledger and bill at the end
verdict     compares the evidence with the promises
accounts    compares usage rows with ledger and bill
report      the summary of a run and the timeline of a job
"""
