"""The tests. A package, so that `tests.support` can be imported by every test module."""
