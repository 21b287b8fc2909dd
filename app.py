"""What gunicorn and `flask` import."""

from aijobs.web.wsgi import app

__all__ = ["app"]
