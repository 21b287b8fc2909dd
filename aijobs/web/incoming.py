"""One request as it arrives, byte by byte: whether all of it is here."""

from __future__ import annotations

import re
from enum import Enum, auto

_LENGTHS = re.compile(rb"^content-length:(.*)\r$", re.IGNORECASE | re.MULTILINE)
_CODINGS = re.compile(rb"^transfer-encoding:(.*)\r$", re.IGNORECASE | re.MULTILINE)
_EXPECT = re.compile(rb"^expect:[ \t]*100-continue[ \t]*\r\n", re.IGNORECASE | re.MULTILINE)
_BARE_LF = re.compile(rb"(?<!\r)\n")
_LONGEST_LINE = 8190
"""Of a chunk's size with its extensions, as gunicorn reads it."""


class State(Enum):
    ARRIVING = auto()
    WHOLE = auto()
    TOO_LARGE = auto()
    """It says itself that its body is longer than the limit: it is refused without reading on."""
    REFUSED = auto()
    """It is misframed: the server refuses it, whatever follows."""


class Incoming:
    """The bytes of one request so far, and of what was sent behind it.

    Framing is decided by the server's parser, which gets the same bytes. A mistake here makes a request late or cuts
    it short; it makes no other request of it.
    """

    def __init__(self, head_limit: int, body_limit: int) -> None:
        self.data = bytearray()
        self.state = State.ARRIVING
        self.wants_continue = False
        """The client waits for `100 Continue`. The header is taken out, so that the server doesn't send it again."""
        self._head_limit, self._body_limit = head_limit, body_limit
        self._body_at: int | None = None
        self._end: int | None = None  # Where a body of a known length ends.
        self._chunk_at = 0  # Where the line of the next chunk begins.

    @property
    def has_head(self) -> bool:
        return self._body_at is not None

    def add(self, data: bytes) -> None:
        """Take what has arrived."""
        searched = max(0, len(self.data) - 3)
        self.data += data
        if self._body_at is None:
            end = self.data.find(b"\r\n\r\n", searched)
            if end < 0:
                if len(self.data) > self._head_limit or _has_bare_lf(self.data, searched):
                    self.state = State.REFUSED
                return
            self._body_at = self._read_head(end + 4)
        if self.state is State.ARRIVING:
            self.state = self._read_chunks() if self._end is None else self._state_of(len(self.data) >= self._end)

    def _read_head(self, at: int) -> int:
        """Find how the body is framed; where it begins."""
        head = bytes(self.data[:at])
        lengths, codings = _LENGTHS.findall(head), _CODINGS.findall(head)
        if codings:
            if lengths or len(codings) > 1 or not codings[0].strip().lower().endswith(b"chunked"):
                self.state = State.REFUSED
        elif lengths:
            length = lengths[0].strip()
            if len(lengths) > 1 or not length.isdigit():
                self.state = State.REFUSED
            elif len(length) > 18 or int(length) > self._body_limit:
                self.state = State.TOO_LARGE
            else:
                self._end = at + int(length)
        else:
            self._end = at
        if self.state is State.ARRIVING and self._end != at and b" HTTP/1.1\r\n" in head:
            kept, self.wants_continue = _EXPECT.subn(b"", head)[0], bool(_EXPECT.search(head))
            self.data[:at] = kept
            self._end = self._end and self._end - at + len(kept)
            at = len(kept)
        self._chunk_at = at
        return at

    def _read_chunks(self) -> State:
        assert self._body_at is not None
        while True:
            end = self.data.find(b"\r\n", self._chunk_at)
            if end < 0:
                refused = len(self.data) - self._chunk_at > _LONGEST_LINE or b"\n" in self.data[self._chunk_at :]
                return self._state_of(False, refused=refused)
            size = self.data[self._chunk_at : end].partition(b";")[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", size):
                return State.REFUSED
            if int(size, 16) == 0:
                return self._state_of(self.data.find(b"\r\n\r\n", end) >= 0, refused=_has_bare_lf(self.data, end))
            behind = end + 2 + int(size, 16)
            if len(self.data) < behind + 2:
                return self._state_of(False)
            if self.data[behind : behind + 2] != b"\r\n":
                return State.REFUSED
            self._chunk_at = behind + 2

    def _state_of(self, whole: bool, *, refused: bool = False) -> State:
        """The state of a body that is framed as it should be so far."""
        if whole:
            return State.WHOLE
        # The lines of chunks take room too. Of a body that is cut off here more than the limit is there to be read.
        refused = refused or len(self.data) - (self._body_at or 0) > 2 * self._body_limit
        return State.REFUSED if refused else State.ARRIVING


def _has_bare_lf(data: bytearray, since: int) -> bool:
    return _BARE_LF.search(data, since) is not None
