"""The provider port for one configured server."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, wait
from typing import TYPE_CHECKING

from aijobs.ai.catalogue import ProviderConfig
from aijobs.ai.provider import CallFacts, CallFailed, CancellationToken, GenerateAnswer, GenerateRequest, Route
from aijobs.ai.providers.openai_compatible.call import Limits, Received, Wire
from aijobs.ai.providers.openai_compatible.loop import LoopThread
from aijobs.errors import JobError
from aijobs.forks import leave_behind, new_lock, renew_in_child

if TYPE_CHECKING:
    from aijobs.ai.providers.openai_compatible.client import ServerClient

SHOWN_EVERY_S = 0.25


def load_client() -> None:
    """Import the client and everything that its first call needs. It takes a second, once per process."""
    from aijobs.ai.providers.openai_compatible import client  # noqa: F401


class OpenAiCompatibleProvider:
    """A provider with an OpenAI-compatible server. Thread-safe; calls run on the loop's thread."""

    def __init__(self, config: ProviderConfig, loop: LoopThread) -> None:
        self._config, self._loop = config, loop
        self._guard = new_lock()
        self._client: ServerClient | None = None
        renew_in_child(self, OpenAiCompatibleProvider._forget)

    @property
    def name(self) -> str:
        return self._config.name

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        """Return the answer; see `AiProvider`. `LessWanted` if another call that asks for less may succeed.

        The last route gets the rest of the attempt's time. Any other is given up at the provider's own limits, and if
        nothing arrives within half of the remaining time, because the next route needs time too.
        """
        client, received = self._open_client(), Received(request)
        left = token.remaining()
        limits = Limits(min(self._config.first_data_s, left / 2), self._config.idle_s, left)
        if request.last_route:
            limits = Limits.until_deadline(left)
        future = self._loop.submit(client.converse(request, received, limits))
        token.on_cancel(future.cancel)
        # From this thread, because its write must not delay the calls of others.
        while not wait([future], timeout=SHOWN_EVERY_S).done:
            token.progress(received.share)
        try:
            return future.result()
        except (CancelledError, TimeoutError):
            raise self._stopped(token, received) from None
        except CallFailed:
            raise
        except JobError as error:
            raise CallFailed(error.code, error.internal, CallFacts(billed="no")) from None
        except Exception as error:
            # Invalid data: no JSON, numbers for texts. Only its class and no chain, because a client error holds the
            # request with key and notes.
            what = f"the answer could not be read: {type(error).__name__}"
            raise CallFailed("PROVIDER_STREAM_BROKEN", what, received.facts()) from None

    @property
    def moderation_route(self) -> Route:
        """The route of `moderate`."""
        return Route(self.name, self._config.moderation_model or "")

    def moderate(self, texts: Sequence[str], token: CancellationToken) -> frozenset[str]:
        """Return the categories that this server's moderation finds in the texts, in its own names.

        Raises `CallFailed`, and the token's errors.
        """
        client, wire = self._open_client(), Wire()
        future = self._loop.submit(client.moderate(texts, wire, token.remaining()))
        token.on_cancel(future.cancel)
        try:
            return future.result()
        except (CancelledError, TimeoutError):
            raise CallFailed(*_reason(token, "PROVIDER_TIMEOUT", "the moderation said nothing"), wire.facts) from None
        except CallFailed:
            raise
        except Exception as error:
            why = f"the moderation's answer could not be read: {type(error).__name__}"
            raise CallFailed("PROVIDER_UNAVAILABLE", why, wire.facts) from None

    def _stopped(self, token: CancellationToken, received: Received) -> CallFailed:
        """Return the failure of a call that was ended from here: for the token's reason, or at its deadline."""
        code, why = _reason(token, "TIMEOUT", "the attempt's deadline has passed")
        silent = code == "TIMEOUT" and received.is_silent(self._config.idle_s)
        return CallFailed(code, why, received.facts(), silent=silent)

    def close(self) -> None:
        """Close the open connections. The next call opens new ones."""
        if self._client is not None:
            self._loop.submit(self._client.close()).result(timeout=5)

    def _forget(self) -> None:
        leave_behind(self._client)
        self._client = None

    def _open_client(self) -> ServerClient:
        from aijobs.ai.providers.openai_compatible.client import ServerClient

        with self._guard:
            if self._client is None:
                self._client = ServerClient(self._config)
            return self._client


def _reason(token: CancellationToken, code: str, why: str) -> tuple[str, str]:
    """Return code and text for the token's reason to stop; without one, `code` and `why`."""
    try:
        token.raise_if_cancelled()
    except JobError as reason:
        return reason.code, reason.internal
    return code, why
