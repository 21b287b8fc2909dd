"""Measurements of the whole engine, with real processes. Run from the repository's folder; nothing is left behind."""
