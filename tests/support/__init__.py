"""What tests lean on: real servers, processes that never outlive the run, waiting with a deadline.

`processes` starts and ends programs, `guardian` ends them should pytest itself be killed, `servers` has
Valkey, `databases` has SQLite, PostgreSQL and MariaDB, `chromium` finds the browser. The fixtures over
them are in `tests/conftest.py`.
"""
