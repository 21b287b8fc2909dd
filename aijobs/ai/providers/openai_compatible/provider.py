"""The port of a provider, filled by one configured server."""

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
    """Import the client and all that its first call needs: a second, once a process."""
    from aijobs.ai.providers.openai_compatible import client  # noqa: F401


class OpenAiCompatibleProvider:
    """Safe to use from any thread; calls run on the loop's."""

    def __init__(self, config: ProviderConfig, loop: LoopThread) -> None:
        self._config, self._loop = config, loop
        self._guard = new_lock()
        self._client: ServerClient | None = None
        renew_in_child(self, OpenAiCompatibleProvider._forget)

    @property
    def name(self) -> str:
        return self._config.name

    def generate(self, request: GenerateRequest, token: CancellationToken) -> GenerateAnswer:
        """The answer; see `AiProvider`. `LessWanted` where another call would ask for less and may succeed.

        The last route has the rest of the attempt's time. Any other is given up at the provider's own limits, and if
        nothing comes within half of what the attempt has left: the next route needs time too.
        """
        client, received = self._open_client(), Received(request)
        left = token.remaining()
        limits = Limits(min(self._config.first_data_s, left / 2), self._config.idle_s, left)
        if request.last_route:
            limits = Limits.until_deadline(left)
        future = self._loop.submit(client.converse(request, received, limits))
        token.on_cancel(future.cancel)
        # Shown from this thread: what it writes must not hold up the calls of others.
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
            # What no server should send: JSON that is none, numbers for texts. Told by its class alone and not chained,
            # as an error of the client holds the request, with the key and the notes in it.
            what = f"the answer could not be read: {type(error).__name__}"
            raise CallFailed("PROVIDER_STREAM_BROKEN", what, received.facts()) from None

    @property
    def moderation_route(self) -> Route:
        """Where `moderate` asks."""
        return Route(self.name, self._config.moderation_model or "")

    def moderate(self, texts: Sequence[str], token: CancellationToken) -> frozenset[str]:
        """The categories that this server's own moderation finds in the texts, as it names them.

        Raises `CallFailed`, and whatever the token raises.
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
        """Return the failure of a call that was cut off from here: for the token's reason, or at its deadline."""
        code, why = _reason(token, "TIMEOUT", "the attempt's deadline has passed")
        silent = code == "TIMEOUT" and received.is_silent(self._config.idle_s)
        return CallFailed(code, why, received.facts(), silent=silent)

    def close(self) -> None:
        """Close the connections that are kept; the next call opens new ones."""
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
    """Return code and text of why the attempt must stop; if it need not, `code` and `why`."""
    try:
        token.raise_if_cancelled()
    except JobError as reason:
        return reason.code, reason.internal
    return code, why
