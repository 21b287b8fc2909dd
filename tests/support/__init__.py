"""Helpers of the tests: real servers, processes that never outlive the run, polling with a deadline.

`processes` starts and ends programs, `guardian` ends them if pytest itself is killed, `servers` has
Valkey, `databases` has SQLite, PostgreSQL and MariaDB, `chromium` finds the browser. Their fixtures
are in `tests/conftest.py`.
"""
