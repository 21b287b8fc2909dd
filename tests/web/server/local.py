"""`python -m tests.web.server.local PORT [option=number …]` runs only the server of `aijobs up`."""

from __future__ import annotations

import sys

from aijobs.local.station import listen
from aijobs.web.local_server import serve
from aijobs.web.wsgi import app

options = {name: int(value) for name, value in (argument.split("=") for argument in sys.argv[2:])}
serve(app, listen("127.0.0.1", int(sys.argv[1]), may_differ=False), **options)
