"""Implementations of the port in `ai.provider`, one module or folder for each kind of provider."""
