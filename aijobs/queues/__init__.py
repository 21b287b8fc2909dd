"""The conveyor: how a message gets to a worker. Huey and Redis live here and nowhere else.

message       what a worker is told
codec         its bytes: signed JSON, the same each time
connection    timeouts, and the rights that a Redis user needs
trouble       what an error of Redis means
state, look   whether Redis answers and takes messages
broker        send once, look for, take back
hueys         a queue as Huey sees it
consumer      the process that serves one: polite, quiet, able to give up
crew          what such a process works with
beat          passes that run with or without Redis
presence      who is at work
embedded      a broker for development
"""
