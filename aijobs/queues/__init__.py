"""The broker: how a message reaches a worker. Huey and Redis live here and in `local/`.

message       the message: which job, of which type
codec         its bytes: signed JSON, the same each time
connection    timeouts, and the rights that a Redis user needs
trouble       what a Redis error means
state, probe  whether Redis answers and takes messages
broker        send once, find, remove
hueys         a queue as a Huey instance
consumer      the process that serves a queue: SIGTERM, outages, abandon
crew          what such a process is built from
beat          passes that run with or without Redis
presence      the workers that are running
embedded      a broker for development
"""
