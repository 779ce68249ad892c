"""Answers as ASGI messages: to an HTTP request, and on a websocket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from modelguard.frameworks._answers import CLIENT_GONE, TOO_LARGE, Answer
from modelguard.frameworks._asgi_client import Client, Message, Receive

__all__ = ["HeldResponse", "Response", "Scope", "Send", "WebsocketEnd"]

Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

#: Close codes of a websocket, by the status that a request would get: "message too big", and for all others
#: "try again later" (RFC 6455 and IANA's registry).
_CLOSE_CODES = {TOO_LARGE: 1009}
_TRY_AGAIN_LATER = 1013
#: The longest reason for closing a websocket, in bytes (RFC 6455).
_LONGEST_REASON = 123
#: The extension with which a websocket that was not accepted can be answered like a request.
_DENIAL = "websocket.http.response"


class Response:
    """An answer as an ASGI application."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as ASGI calls it
        """Send it."""
        body = b"" if scope.get("method") == "HEAD" else self._answer.body
        await _respond(send, "http.response", self._answer, body)


class HeldResponse:
    """The response of an application. An error page is held back until it is known what it stands for.

    A mounted Starlette or FastAPI application answers 500 to every error before it raises it again. If that is an error
    of modelguard, its own answer is sent instead.
    """

    def __init__(self, client: Client, send: Send) -> None:
        self._client = client
        self._send = send
        self._held: list[Message] = []
        self.begun = False

    async def send(self, message: Message) -> None:
        """Send a message, or hold it back."""
        kind = message["type"]
        if kind == "http.response.body" and not message.get("more_body"):
            self._client.answered()  # background tasks do not belong to the request
        error_page = kind == "http.response.start" and message["status"] == HTTPStatus.INTERNAL_SERVER_ERROR
        if error_page or (len(self._held) == 1 and kind == "http.response.body" and not message.get("more_body")):
            self._held.append(message)
            return
        await self.release()
        self.begun = self.begun or kind == "http.response.start"
        await self._send(message)

    async def release(self) -> None:
        """Send what was held back."""
        held, self._held = self._held, []
        self.begun = self.begun or bool(held)
        for message in held:
            await self._send(message)


class WebsocketEnd:
    """Ends a websocket with an answer: as a response if it was not accepted yet, else by closing it.

    Args:
        scope: The connection's.
        send: The server's.
        accepted: Whether it was accepted already.
        answered: Called when the application ends the connection.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        *,
        accepted: bool = False,
        answered: Callable[[], object] = lambda: None,
    ) -> None:
        self._can_deny = _DENIAL in (scope.get("extensions") or {})
        self._send = send
        self._answered = answered
        self._accepted = accepted
        self.ended = False

    async def send(self, message: Message) -> None:
        """Send a message of the application, and note what it does."""
        kind = message["type"]
        self._accepted = self._accepted or kind == "websocket.accept"
        if kind == "websocket.close" or kind.startswith(_DENIAL):
            self.ended = True
            self._answered()
        await self._send(message)

    async def refuse(self, answer: Answer) -> None:
        """End the connection with this answer. Nothing is sent to a client that has disconnected."""
        self.ended = True
        if answer.status == CLIENT_GONE:
            return
        if not self._accepted and self._can_deny:
            await _respond(self._send, _DENIAL, answer, answer.body)
            return
        code = _CLOSE_CODES.get(answer.status, _TRY_AGAIN_LATER)
        reason = answer.detail.encode()[:_LONGEST_REASON].decode(errors="ignore")
        await self._send({"type": "websocket.close", "code": code, "reason": reason})


async def _respond(send: Send, kind: str, answer: Answer, body: bytes) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    await send({"type": f"{kind}.start", "status": answer.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
