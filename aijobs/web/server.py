"""Settings for gunicorn: `gunicorn --config python:aijobs.web.server aijobs.web.wsgi:app`.

The command line overrides them. Where to listen and how many processes to run is for the command line to say.
"""

from __future__ import annotations

worker_class = "gthread"
threads = 8
graceful_timeout = 20
control_socket_disable = True  # One socket of one name for all instances of a user.

# Believe no header. What a proxy says is read by `aijobs.web.forwarded` alone, if AIJOBS_TRUSTED_PROXIES says so.
# By default gunicorn lets 127.0.0.1 and every Unix socket set SCRIPT_NAME, PATH_INFO and the scheme.
forwarded_allow_ips = ""
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}
header_map = "drop"
