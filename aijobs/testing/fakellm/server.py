"""The HTTP server: OpenAI's paths, and those for scripts and other processes."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aijobs.testing.fakellm import faults
from aijobs.testing.fakellm.answer import CREATED, JSON, Answer, Step
from aijobs.testing.fakellm.exchange import ClientLeft, ConnectionOver, Exchange
from aijobs.testing.fakellm.good import GoodWriter
from aijobs.testing.fakellm.ledger import Call, Ledger, listing
from aijobs.testing.fakellm.moderation import Moderate
from aijobs.testing.fakellm.request import CHAT, MODERATION, OTHER, BadRequest, Request, parse_body
from aijobs.testing.fakellm.script import Scripts
from aijobs.testing.fakellm.steps import Reply

MODEL = "dev-1"
_MOST_BYTES = 32_000_000
_STOP_S = 10.0


class FakeLlm:
    """An OpenAI-compatible provider on 127.0.0.1 that works, or fails as it is told.

    `with FakeLlm() as llm:` serves at `llm.url` until the end of the block, and leaves no thread. Port 0 is any free
    one; `delta_s` seconds pass before each delta of a stream; `cache_dir` keeps the Chinese dictionary (None: a
    temporary folder). `on_request` returns the step of a chat call, for scripts that depend on its content; None leaves
    the call to the other scripts. `on_end` is called with each ended call.

    Started again after a `stop`, it keeps its scripts and its log.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        delta_s: float = 0.0,
        cache_dir: Path | None = None,
        on_request: Callable[[Request], Step | None] | None = None,
        on_end: Callable[[Call], None] | None = None,
    ) -> None:
        self._port = port
        self._cache_dir = cache_dir
        self._delta_s = delta_s
        self._on_request = on_request
        self._on_end = on_end
        self._ledger = Ledger()
        self._scripts = Scripts()
        self._flags: dict[str, str] = {}
        self._ends = contextlib.ExitStack()
        self._server: _Server | None = None

    # --- life ---

    def start(self) -> FakeLlm:
        """Listen and serve. `OSError` if the port is in use."""
        with contextlib.ExitStack() as ends:
            folder = self._cache_dir or Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="fakellm-")))
            self._writer = GoodWriter(folder)
            server = ends.enter_context(_Server(("127.0.0.1", self._port), self))
            thread = threading.Thread(target=server.serve_forever, args=(_Server.look_s,), name="fakellm")
            thread.start()
            ends.callback(thread.join, _STOP_S)
            ends.callback(server.stop)
            self._server = server
            self._ends = ends.pop_all()
        return self

    def stop(self) -> None:
        """Break off running calls, and end all threads."""
        self._ends.close()

    def __enter__(self) -> FakeLlm:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The base URL; the same paths answer below its `/v1`."""
        assert self._server is not None, "start it first"
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # --- what it does ---

    def script(self, *steps: Step, key: str | None = None, model: str | None = None, kind: str = CHAT) -> None:
        """Answer the next calls by `steps`: one per call, the last one repeated.

        Only calls with this API key and this model, if given. No steps remove the script. `kind` `moderation` scripts
        the moderations. A model called `fault:<name>` keeps to its name.
        """
        self._scripts.set(steps, key, model, kind)

    def flag(self, words: str, category: str) -> None:
        """Have moderations flag texts with `words`, in one of OpenAI's categories such as `self-harm`."""
        self._flags[words.lower()] = category

    def forget(self) -> None:
        """Remove all scripts, flags and calls."""
        self._scripts.clear()
        self._flags.clear()
        self._ledger.clear()

    # --- what it saw ---

    @property
    def calls(self) -> list[Call]:
        """The chat calls, in order of receipt."""
        return self._ledger.calls(CHAT)

    @property
    def log(self) -> list[Call]:
        """All requests to the provider's paths, including moderations, lists of models and unknown ones."""
        return self._ledger.calls(None)

    def wait_for_calls(self, count: int, deadline_s: float = 10.0, *, ended: bool = False) -> list[Call]:
        """Return the chat calls once there are so many (`ended`: and all have ended). `AssertionError` after the
        deadline.
        """
        return self.wait_until(
            lambda calls: len([call for call in calls if call.ended or not ended]) >= count,
            deadline_s,
            f"{count} calls{' that ended' if ended else ''}",
        )

    def wait_until_left(self, number: int = 1, deadline_s: float = 10.0) -> Call:
        """Return the chat call of this number (from 1), once its client has left it."""

        def left(calls: Sequence[Call]) -> bool:
            return len(calls) >= number and calls[number - 1].client_left

        return self.wait_until(left, deadline_s, f"the client of call {number} leaves")[number - 1]

    def wait_until(
        self, holds: Callable[[list[Call]], bool], deadline_s: float = 10.0, what: str = "the condition"
    ) -> list[Call]:
        """Return the chat calls once `holds` is true for them. `AssertionError` with the log after the deadline."""
        return self._ledger.wait(holds, deadline_s, what)

    # --- what the handler needs ---

    def _serve_call(self, handler: BaseHTTPRequestHandler, request: Request, fault: BadRequest | None) -> None:
        call = self._ledger.open(request)
        exchange = Exchange(
            handler, request, call, self._ledger, self._running.stopping, self._writer.write, self._delta_s
        )
        try:
            step = self._step_for(request, fault)
            self._ledger.note(call, step=step.name)
            step.play(exchange)
            self._ledger.note(call, whole=True)
        except ClientLeft:
            handler.close_connection = True
            self._ledger.note(call, left_after_s=call.watch.seconds)
        except ConnectionOver:
            handler.close_connection = True
        finally:
            self._ledger.note(call, ended_after_s=call.watch.seconds)
            if self._on_end is not None:
                self._on_end(call)

    def _step_for(self, request: Request, fault: BadRequest | None) -> Step:
        if fault is not None:
            body = faults.error_body(str(fault), "invalid_request_error", "invalid_request_error")
            return Reply(400, body, name="bad-request")
        if request.kind == OTHER:
            return self._other(request)
        name = request.model.removeprefix(faults.MODEL_PREFIX)
        if request.kind == CHAT and name != request.model:
            return faults.build(name) if name in faults.FAULTS else faults.unknown_model()
        scripted = self._on_request(request) if self._on_request is not None and request.kind == CHAT else None
        scripted = scripted or self._scripts.take(request)
        if scripted is not None:
            return scripted
        return Moderate(dict(self._flags)) if request.kind == MODERATION else Answer()

    def _other(self, request: Request) -> Step:
        if request.path.endswith("/models"):
            refused = self._scripts.peek(request)
            if isinstance(refused, Reply) and refused.status in (401, 403):
                return refused  # a key that is refused for chats is refused for all
            return Reply(200, {"object": "list", "data": [_model(name) for name in _model_names()]}, name="models")
        body = faults.error_body(f"Invalid URL ({request.path})", "invalid_request_error")
        return Reply(404, body, name="stray")

    def _serve_own(self, method: str, path: str, query: str, raw: bytes) -> tuple[int, Any] | None:
        """Return the answer to a request to the fake itself; None if it is for the provider."""
        if (method, path) == ("GET", "/"):
            return 200, faults.as_text()
        if (method, path) == ("GET", "/_calls"):
            return 200, {"calls": listing(self._ledger.calls(None), bodies="bodies=1" in query.split("&"))}
        if (method, path) == ("DELETE", "/_calls"):
            self._ledger.clear()
            return 200, {}
        if (method, path) == ("DELETE", "/_script"):
            self._scripts.clear()
            self._flags.clear()
            return 200, {}
        if (method, path) == ("POST", "/_script"):
            return self._take_script(raw)
        return (
            (404, {"error": "there is GET /, GET and DELETE /_calls, POST and DELETE /_script"})
            if (path.startswith("/_"))
            else None
        )

    def _take_script(self, raw: bytes) -> tuple[int, Any]:
        try:
            asked = _script_from(raw)
        except (BadRequest, faults.UnknownFault) as error:
            return 400, {"error": str(error)}
        if asked.steps:
            self.script(*asked.steps, key=asked.key, model=asked.model, kind=asked.kind)
        for words, category in asked.flags.items():
            self.flag(words, category)
        return 200, {"steps": len(asked.steps)}

    @property
    def _running(self) -> _Server:
        assert self._server is not None, "start it first"
        return self._server


@dataclass(frozen=True)
class _Script:
    steps: Sequence[Step]
    key: str | None
    model: str | None
    kind: str
    flags: Mapping[str, str]


def _script_from(raw: bytes) -> _Script:
    """Return the script of a request's body. `BadRequest` or `UnknownFault`, before anything is changed."""
    asked = parse_body(raw)
    steps, flags, kind = asked.get("steps", []), asked.get("flags", {}), asked.get("kind", CHAT)
    if not isinstance(steps, list):
        raise BadRequest("steps is a list")
    if not isinstance(flags, dict) or not all(isinstance(category, str) for category in flags.values()):
        raise BadRequest("flags is an object of words and their categories")
    if kind not in (CHAT, MODERATION):
        raise BadRequest(f"kind is {CHAT} or {MODERATION}")
    for name in ("key", "model"):
        if not isinstance(asked.get(name), str | None):
            raise BadRequest(f"{name} is a text or null")
    if unknown := set(asked) - {"steps", "key", "model", "kind", "flags"}:
        raise BadRequest(f"a script has no {min(unknown)}")
    return _Script([_step_from(spec) for spec in steps], asked.get("key"), asked.get("model"), kind, flags)


def _step_from(spec: Any) -> Step:
    if isinstance(spec, str):
        return faults.build(spec)
    if isinstance(spec, Mapping) and isinstance(spec.get("name"), str) and set(spec) <= {"name", "params"}:
        params = spec.get("params")
        if isinstance(params, Mapping | None):
            return faults.build(spec["name"], params)
    raise faults.UnknownFault("a step is the name of a fault, or {name, params}")


def _model_names() -> list[str]:
    return [MODEL, *(faults.MODEL_PREFIX + name for name in faults.FAULTS)]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "fakellm"}


class _Server(ThreadingHTTPServer):
    # The threads are joined at the end, so that a test leaves none; `stop` wakes them.
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128
    look_s = 0.05

    def __init__(self, address: tuple[str, int], llm: FakeLlm) -> None:
        self.llm = llm
        self.stopping = threading.Event()
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        with self._guard:
            self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def stop(self) -> None:
        """End the loop and wake all handlers."""
        self.stopping.set()
        self.shutdown()
        with self._guard:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that leaves while we read. Any other error is ours, and is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        raw = self._read_body()
        if raw is None:
            return
        url = urlsplit(self.path)
        own = self.server.llm._serve_own(self.command, url.path, url.query, raw)
        if own is not None:
            self._reply(*own)
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        kind, body, fault = OTHER, {}, None
        if self.command == "POST":
            kind = _KINDS.get("/" + url.path.strip("/").removeprefix("v1/"), OTHER)
        if kind != OTHER:
            try:
                body = parse_body(raw)
                Request(kind, url.path, headers, body).check()
            except BadRequest as error:
                fault = error
        self.server.llm._serve_call(self, Request(kind, url.path, headers, body), fault)

    def _read_body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > _MOST_BYTES or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self._reply(413, {"error": f"send a Content-Length of at most {_MOST_BYTES}"})
            return None
        return self.rfile.read(int(length))

    def _reply(self, status: int, value: Any) -> None:
        text = isinstance(value, str)
        content = value.encode() if text else json.dumps(value, ensure_ascii=False).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8" if text else JSON)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: the log of calls has more, without content."""


_KINDS = {"/chat/completions": CHAT, "/moderations": MODERATION}
