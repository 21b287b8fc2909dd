"""Chaos: the whole system as real processes, work and faults by a seed, and a verdict on the promises at the end.

plan        the sequence of actions and faults that a seed stands for
stage       servers, consumers and web as processes, and the supervisor that restarts what dies
consumer    what a consumer process runs: crash points and the ledger, then Huey's own consumer
web         the same for the web process
crashes     named points at which a process ends itself when it was told to
ledger      every provider call, written by the worker before it and after it
provider    a server to call, good and bad by each job's script, and its bill
chaos_job   a job type with a prompt, brought in as a plug-in, whose provider is in the worker's process
served_job  the same with a server for its provider
driver      performs the actions, and keeps what was promised for each
faults      performs the faults
evidence    what database, ledger and bill hold at the end
verdict     compares them with the promises
accounts    compares usage rows with the ledger and with the server's bill
report      the summary, and a job's timeline
"""
