"""What gunicorn and `flask` import."""

from aijobs.web.factory import create_app

app = create_app()
