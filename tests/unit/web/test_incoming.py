"""When all of a request has arrived, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from aijobs.web.incoming import Incoming, State

HEAD = b"POST /x HTTP/1.1\r\nHost: h\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LIMIT = 100

REQUESTS = {
    "no body": (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", State.WHOLE),
    "head unfinished": (HEAD, State.ARRIVING),
    "body": (HEAD + b"Content-Length: 3\r\n\r\nabc", State.WHOLE),
    "body of none": (HEAD + b"CONTENT-LENGTH:0\r\n\r\n", State.WHOLE),
    "body unfinished": (HEAD + b"Content-Length: 4\r\n\r\nabc", State.ARRIVING),
    "body at the limit": (HEAD + b"Content-Length: 100\r\n\r\n" + b"x" * 100, State.WHOLE),
    "body beyond the limit": (HEAD + b"Content-Length: 101\r\n\r\n", State.TOO_LARGE),
    "body beyond all": (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", State.TOO_LARGE),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", State.REFUSED),
    "a length that is none": (HEAD + b"Content-Length: +3\r\n\r\nabc", State.REFUSED),
    "length and chunks": (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", State.REFUSED),
    "another coding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", State.REFUSED),
    "chunks": (CHUNKED + b"3\r\nabc\r\nA;x=1\r\n0123456789\r\n0\r\n\r\n", State.WHOLE),
    "chunks with trailers": (CHUNKED + b"0;x\r\nA: b\r\nC: d\r\n\r\n", State.WHOLE),
    "chunks without their end": (CHUNKED + b"3\r\nabc\r\n0\r\n", State.ARRIVING),
    "a chunk unfinished": (CHUNKED + b"ff\r\nabc", State.ARRIVING),
    "a bad size": (CHUNKED + b"zz\r\n", State.REFUSED),
    "a negative size": (CHUNKED + b"-1\r\n", State.REFUSED),
    "no size": (CHUNKED + b"\r\n", State.REFUSED),
    "no end of a chunk": (CHUNKED + b"3\r\nabcXX", State.REFUSED),
    "a long line": (CHUNKED + b"3;" + b"x" * 9000, State.REFUSED),
    "chunks beyond twice the limit": (CHUNKED + b"64\r\n" + b"x" * 100 + b"\r\n64\r\n" + b"x" * 95, State.REFUSED),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: h\n\n", State.REFUSED),
    "a chunk's bare line feed": (CHUNKED + b"3\nabc\n0\n\n", State.REFUSED),
    "a trailer's bare line feed": (CHUNKED + b"0\r\nA: b\n\n", State.REFUSED),
    "an endless head": (HEAD + b"X: " + b"x" * 20_000, State.REFUSED),
}


def state_of(raw: bytes, piece: int) -> State:
    incoming = Incoming(20_000, LIMIT)
    for at in range(0, len(raw), piece):
        if incoming.state is State.ARRIVING:
            incoming.add(raw[at : at + piece])
    return incoming.state


@pytest.mark.parametrize(("raw", "state"), REQUESTS.values(), ids=REQUESTS.keys())
def test_state_of_a_request_does_not_depend_on_its_pieces(raw: bytes, state: State) -> None:
    pieces = (len(raw), 4096, 7, 3, 2, 1)
    assert {piece: state_of(raw, piece) for piece in pieces} == dict.fromkeys(pieces, state)


def test_what_follows_a_request_is_kept_with_it() -> None:
    incoming = Incoming(1000, LIMIT)
    incoming.add(HEAD + b"Content-Length: 1\r\n\r\naGET / HTTP/1.1\r\n")
    assert incoming.state is State.WHOLE
    assert incoming.data.endswith(b"\r\n\r\naGET / HTTP/1.1\r\n")


@pytest.mark.parametrize("framing", [b"Content-Length: 3", b"Transfer-Encoding: chunked"])
def test_client_that_waits_for_continue_is_told_once_and_the_header_goes(framing: bytes) -> None:
    incoming = Incoming(1000, LIMIT)
    incoming.add(HEAD + framing + b"\r\nExpect: 100-Continue\r\nX: y\r\n\r\n")
    assert (incoming.state, incoming.wants_continue) == (State.ARRIVING, True)
    assert incoming.data == HEAD + framing + b"\r\nX: y\r\n\r\n"
    incoming.add(b"abc" if b"Length" in framing else b"3\r\nabc\r\n0\r\n\r\n")
    assert incoming.state is State.WHOLE


def test_client_of_an_old_protocol_is_not_told_to_continue() -> None:
    incoming = Incoming(1000, LIMIT)
    incoming.add(b"POST / HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert (incoming.state, incoming.wants_continue) == (State.ARRIVING, False)
