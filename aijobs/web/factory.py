"""The web application: gunicorn and `flask` import `create_app()`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flask import Flask
from flask_babel import Babel
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from htmx_flask import Htmx
from sqlalchemy import Engine

from aijobs import logs
from aijobs.db.database import Base
from aijobs.settings import PACKAGE, Settings, resource
from aijobs.web import auth, console, csrf, errors, headers, plugins
from aijobs.web.api import admin, internal, user
from aijobs.web.bodies import CheckedBodies
from aijobs.web.context import LANGUAGES, language
from aijobs.web.forwarded import Forwarded
from aijobs.web.health import health
from aijobs.web.session_cookie import SessionCookie, cookie_name

if TYPE_CHECKING:
    from aijobs.wiring.services import Services


class WebDatabase(SQLAlchemy):
    """Flask-SQLAlchemy on our own engine, so that web and workers share events, pool and isolation."""

    def __init__(self, engine: Engine) -> None:
        self._ours = engine
        super().__init__(metadata=Base.metadata)

    def _apply_driver_defaults(self, options: dict[str, Any], app: Flask) -> None:
        """Do nothing: the engine exists already."""

    def _make_engine(self, bind_key: str | None, options: dict[str, Any], app: Flask) -> Engine:
        return self._ours


def create_app(settings: Settings | None = None, services: Services | None = None) -> Flask:
    """Return the application on `services`; without them, on those of `settings` (default: the environment)."""
    if services is None:
        from aijobs.wiring.services import build_services

        settings = settings or Settings.load()
        logs.configure(settings.log_level)  # This process is ours.
        services = build_services(settings)
    settings = services.settings
    app = Flask(
        "aijobs",
        template_folder=str(resource("templates")),
        static_folder=str(resource("static")),
        instance_path=str(settings.instance_path),
    )
    app.url_map.merge_slashes = False  # The router would redirect to the host that the request names.
    _configure(app, settings)
    app.extensions["aijobs"] = services
    database = WebDatabase(services.database.engine)
    database.init_app(app)
    Migrate(app, database, directory=str(resource("migrations")))
    Babel(app, locale_selector=language)
    Htmx(app)
    headers.init_app(app, production=settings.production)
    auth.init_app(app)
    csrf.init_app(app)
    errors.init_app(app)
    app.register_blueprint(health)
    user.init_app(app)
    admin.init_app(app)
    internal.init_app(app)
    console.init_app(app)
    plugins.init_app(app)
    app.wsgi_app = Forwarded(CheckedBodies(app.wsgi_app), settings.trusted_proxies)  # type: ignore[method-assign]
    return app


def _configure(app: Flask, settings: Settings) -> None:
    app.session_interface = SessionCookie()
    app.config.update(
        SECRET_KEY=settings.secret_key,
        MAX_CONTENT_LENGTH=settings.body_limit_bytes,
        MAX_FORM_MEMORY_SIZE=settings.body_limit_bytes,
        SESSION_COOKIE_NAME=cookie_name(settings.secret_key),
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=settings.production,
        # The row on the server ends a session. A longer cookie lets the sign-in page say why it ended.
        PERMANENT_SESSION_LIFETIME=timedelta(days=settings.session_max_days + 1),
        SESSION_REFRESH_EACH_REQUEST=False,  # The answer to a late poll would replace a newer cookie by an old one.
        SQLALCHEMY_DATABASE_URI="sqlite://",  # Flask-SQLAlchemy requires one; the engine is ours.
        BABEL_DEFAULT_LOCALE=LANGUAGES[0],
        BABEL_TRANSLATION_DIRECTORIES=str(PACKAGE / "translations"),
        AIJOBS_LANGUAGES=LANGUAGES,
        TRAP_HTTP_EXCEPTIONS=False,
    )
    app.json.ensure_ascii = True  # type: ignore[attr-defined]
    app.json.sort_keys = False  # type: ignore[attr-defined]
