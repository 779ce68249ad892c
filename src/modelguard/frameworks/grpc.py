"""gRPC servers: status codes for modelguard's errors, deadlines and cancellations, by an interceptor.

::

    from modelguard.frameworks import grpc as modelguard_grpc

    server = grpc.server(pool, interceptors=[modelguard_grpc.interceptor(deadline="2s")])
    server = grpc.aio.server(interceptors=[modelguard_grpc.aio_interceptor(deadline="2s")])

========================================  =======================  ==================================
error                                     status code              trailing metadata
========================================  =======================  ==================================
``Overloaded``, ``LoadFailed``,           ``UNAVAILABLE``          ``grpc-retry-pushback-ms``
``GuardClosed``
``QuotaExceeded``                         ``RESOURCE_EXHAUSTED``   ``grpc-retry-pushback-ms``
``DeadlineExceeded``                      ``DEADLINE_EXCEEDED``
``ItemTooHeavy``                          ``INVALID_ARGUMENT``
``CallerGone``                            ``CANCELLED``
========================================  =======================  ==================================

A client whose service config has a retry policy waits as long as ``grpc-retry-pushback-ms`` says (gRFC A6).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Unpack

from modelguard import _extras
from modelguard.errors import ModelGuardError
from modelguard.frameworks._web import CallOptions, Header, Web
from modelguard.serving.deadlines import OnBehalf, WebRequest

__all__ = ["aio_interceptor", "interceptor"]

#: Status codes, by the status that a web service answers.
_CODES = {
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
#: gRPC gives a call without a deadline one in the far future. More seconds than these are none: a year.
_NO_DEADLINE = 365 * 86_400.0


def interceptor(**options: Unpack[CallOptions]) -> Any:
    """Make an interceptor for ``grpc.server``.

    The batched calls of an RPC have the client's deadline, and are cancelled when it cancels: waiting items are not
    computed. Errors after the first part of a stream end it with the same status codes. Other errors propagate.

    Args:
        deadline: Bound on the batched calls of every RPC, from its arrival. A client's own deadline can only shorten
            it. Default: no bound.
        detail: Whether the details of a status are the error's own text, with names of functions and figures. For
            development.
        fair_by: Whose an RPC is, so that callers share every batched function fairly: the name of a key of the
            metadata, or a function of the ``ServicerContext`` that gives a key, anything hashable. Whoever can set the
            metadata can choose any key, so name one that your proxy sets. Default: nobody's.
        priority: How urgent an RPC is, compared with others under the same key: a function of the
            ``ServicerContext`` that gives a whole number from 0 to 1,000. Default: 0.

    Raises:
        InvalidOption: An option is invalid.
        NotSupported: grpcio is not installed.
    """
    return _made("interceptor", _Interceptor, "grpc", options)


def aio_interceptor(**options: Unpack[CallOptions]) -> Any:
    """Make an interceptor for ``grpc.aio.server``: as :func:`interceptor`, also for servicers that are not coroutines.

    Args:
        options: Those of :func:`interceptor`.

    Raises:
        InvalidOption: An option is invalid.
        NotSupported: grpcio is not installed.
    """
    return _made("aio_interceptor", _AioInterceptor, "grpc.aio", options)


def _made(maker: str, kind: type[_Wrapping], module: str, options: CallOptions) -> Any:
    web = Web.read(options, owner=f"{maker}()", kinds=CallOptions)
    grpc = _extras.load("grpc", "modelguard.frameworks.grpc")
    base = importlib.import_module(module).ServerInterceptor
    return type("ModelGuardInterceptor", (kind, base), {})(grpc, web)


class _Wrapping:
    def __init__(self, grpc: Any, web: Web) -> None:
        self._grpc = grpc
        self._web = web

    def wrap(self, handler: Any) -> Any:
        """A handler like this one, with a function that is wrapped; None if there is no such method."""
        if handler is None:
            return None
        words = ("unary", "stream")
        kind = f"{words[handler.request_streaming]}_{words[handler.response_streaming]}"
        make = getattr(self._grpc, f"{kind}_rpc_method_handler")
        function = self._wrapped(getattr(handler, kind), streaming=handler.response_streaming)
        return make(function, handler.request_deserializer, handler.response_serializer)

    def _wrapped(self, function: Any, *, streaming: bool) -> Any:
        def serve(request: Any, context: Any) -> Any:
            with self._serving(context, self._abort) as scope, scope:
                return function(request, context)

        def serve_stream(request: Any, context: Any) -> Iterator[Any]:
            with self._serving(context, self._end_stream) as scope:
                with scope:
                    parts = iter(function(request, context))
                try:
                    while True:
                        with scope:
                            try:
                                part = next(parts)
                            except StopIteration:
                                return
                        yield part
                finally:
                    if isinstance(parts, Generator):
                        with scope:  # its blocks end here
                            parts.close()

        return serve_stream if streaming else serve

    @contextmanager
    def _serving(self, context: Any, end: Callable[[Any, Exception], object]) -> Iterator[OnBehalf]:
        request = self._request(context)
        if context.add_callback(request.disconnect) is False:  # it has ended; None: not told
            request.disconnect()
        try:
            with self._web.serving(request, context, _header(context)) as scope:
                yield scope
        except (ModelGuardError, ExceptionGroup) as error:
            end(context, error)

    def _request(self, context: Any) -> WebRequest:
        bounds = (self._web.limit, context.time_remaining())
        return WebRequest(min((bound for bound in bounds if bound is not None and bound < _NO_DEADLINE), default=None))

    def _abort(self, context: Any, error: Exception) -> None:
        context.abort(*self._status(context, error))

    def _end_stream(self, context: Any, error: Exception) -> None:
        """Have a stream end with a status code. An asynchronous server may be writing a part: abort() would fail."""
        code, details = self._status(context, error)
        context.set_code(code)
        context.set_details(details)

    def _status(self, context: Any, error: Exception) -> tuple[Any, str]:
        """The status code for an error and its details; when to try again is in the context."""
        answer = self._web.answer_or_raise(error)
        if (seconds := answer.headers.get("retry-after")) is not None:
            read = getattr(context, "trailing_metadata", tuple)  # not there in threads of an asynchronous server
            context.set_trailing_metadata((*(read() or ()), ("grpc-retry-pushback-ms", f"{seconds}000")))
        return getattr(self._grpc.StatusCode, _CODES[answer.status]), answer.detail


class _Interceptor(_Wrapping):
    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        return self.wrap(continuation(details))


class _AioInterceptor(_Wrapping):
    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        return self.wrap(await continuation(details))

    def _wrapped(self, function: Any, *, streaming: bool) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            async with self._aserving(context) as scope:
                with scope:
                    return await function(request, context)

        async def serve_generator(request: Any, context: Any) -> AsyncIterator[Any]:
            async with aclosing(function(request, context)) as parts, self._aserving(context) as scope:
                while True:
                    with scope:
                        try:
                            part = await anext(parts)
                        except StopAsyncIteration:
                            return
                    yield part

        if inspect.isasyncgenfunction(function):
            return serve_generator
        if inspect.iscoroutinefunction(function):  # a streaming one writes to its context
            return serve
        return super()._wrapped(function, streaming=streaming)  # gRPC calls it in a thread

    @asynccontextmanager
    async def _aserving(self, context: Any) -> AsyncIterator[OnBehalf]:
        try:
            with self._web.serving(self._request(context), context, _header(context)) as scope:
                yield scope
        except (ModelGuardError, ExceptionGroup) as error:
            await context.abort(*self._status(context, error))


def _header(context: Any) -> Header:
    return lambda name: dict(context.invocation_metadata()).get(name.lower())
