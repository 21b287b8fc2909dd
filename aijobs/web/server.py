"""Settings for gunicorn: `gunicorn --config python:aijobs.web.server aijobs.web.wsgi:app`.

The command line overrides them, and says where to listen and how many processes to run.
"""

from __future__ import annotations

worker_class = "gthread"
threads = 8
graceful_timeout = 20
control_socket_disable = True  # One socket name for all instances of a user.

# Trust no header. `aijobs.web.forwarded` reads a proxy's headers, if AIJOBS_TRUSTED_PROXIES says so.
forwarded_allow_ips = ""
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
header_map = "drop"
