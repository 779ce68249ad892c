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

import asyncio
import importlib
import inspect
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from modelguard import _extras, _units
from modelguard.errors import ModelGuardError
from modelguard.frameworks._answers import Answer, WebOptions
from modelguard.serving.deadlines import WebRequest, on_behalf_of

__all__ = ["aio_interceptor", "interceptor"]

#: Status codes, by the status that a web service answers.
_CODES = {
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_PUSHBACK = "grpc-retry-pushback-ms"
#: gRPC gives a call without a deadline one in the far future. More seconds than these are none: a year.
_NO_DEADLINE = 365 * 86_400.0


def interceptor(
    *,
    deadline: _units.Duration | None = None,
    detail: bool = False,
    fair_by: str | Callable[[Any], Hashable] | None = None,
    priority: Callable[[Any], int] | None = None,
) -> Any:
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
    options = WebOptions(deadline=deadline, detail=detail, fair_by=fair_by, priority=priority)
    grpc = _extras.load("grpc", "modelguard.frameworks.grpc")
    return type("ModelGuardInterceptor", (_Interceptor, grpc.ServerInterceptor), {})(grpc, options)


def aio_interceptor(
    *,
    deadline: _units.Duration | None = None,
    detail: bool = False,
    fair_by: str | Callable[[Any], Hashable] | None = None,
    priority: Callable[[Any], int] | None = None,
) -> Any:
    """Make an interceptor for ``grpc.aio.server``: as :func:`interceptor`, also for servicers that are not coroutines.

    Args:
        deadline: As there.
        detail: As there.
        fair_by: As there.
        priority: As there.

    Raises:
        InvalidOption: An option is invalid.
        NotSupported: grpcio is not installed.
    """
    options = WebOptions(deadline=deadline, detail=detail, fair_by=fair_by, priority=priority)
    grpc = _extras.load("grpc", "modelguard.frameworks.grpc")
    aio = importlib.import_module("grpc.aio")
    return type("AioModelGuardInterceptor", (_AioInterceptor, aio.ServerInterceptor), {})(grpc, options)


class _Call:
    def __init__(self, options: WebOptions, context: Any) -> None:
        own = options.timeout(None)
        bounds = [bound for bound in (own, context.time_remaining()) if isinstance(bound, float | int)]
        self._options = options
        self._context = context
        self._request = WebRequest(min((bound for bound in bounds if bound < _NO_DEADLINE), default=None))
        self.cancel = self._request.disconnect
        self.end = self._request.answered

    def scope(self) -> AbstractContextManager[None]:
        header = None
        if isinstance(self._options.fair_by, str):
            header = dict(self._context.invocation_metadata()).get(self._options.fair_by.lower())
        return on_behalf_of(self._request, *self._options.identify(self._context, header))


class _Wrapping:
    def __init__(self, grpc: Any, options: WebOptions) -> None:
        self._grpc = grpc
        self._options = options

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
        return self._wrapped_stream(function) if streaming else self._wrapped_unary(function)

    def _wrapped_unary(self, function: Any) -> Any:
        def serve(request: Any, context: Any) -> Any:
            call = self._begin(context)
            try:
                with call.scope():
                    return function(request, context)
            except (ModelGuardError, ExceptionGroup) as error:
                self._abort(context, error)
                raise
            finally:
                call.end()

        return serve

    def _wrapped_stream(self, function: Any) -> Any:
        def serve(request: Any, context: Any) -> Iterator[Any]:
            call = self._begin(context)
            try:
                with call.scope():
                    parts = iter(function(request, context))
                while True:
                    with call.scope():
                        try:
                            part = next(parts)
                        except StopIteration:
                            return
                    yield part
            except (ModelGuardError, ExceptionGroup) as error:
                self._end_stream(context, error)
            finally:
                call.end()

        return serve

    def _begin(self, context: Any) -> _Call:
        call = _Call(self._options, context)
        if not context.add_callback(call.cancel):  # it has ended already
            call.cancel()
        return call

    def _abort(self, context: Any, error: Exception) -> None:
        """End an RPC with a status code; returns if the error is not one for clients.

        Raises:
            Exception: As gRPC does in ``abort()``.
        """
        answer = self._options.answer(error)
        if answer is not None:
            _set_pushback(context, answer)
            context.abort(self._code(answer), answer.detail)

    def _end_stream(self, context: Any, error: Exception) -> None:
        """Have a stream end with a status code. An asynchronous server may be writing a part: abort() would fail then.

        Raises:
            Exception: The error, if it is not one for clients.
        """
        answer = self._options.answer(error)
        if answer is None:
            raise error
        _set_pushback(context, answer)
        context.set_code(self._code(answer))
        context.set_details(answer.detail)

    def _code(self, answer: Answer) -> Any:
        return getattr(self._grpc.StatusCode, _CODES[answer.status])


class _Interceptor(_Wrapping):
    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        return self.wrap(continuation(details))


class _AioInterceptor(_Wrapping):
    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        return self.wrap(await continuation(details))

    def _wrapped(self, function: Any, *, streaming: bool) -> Any:
        if inspect.isasyncgenfunction(function):
            return self._wrapped_async_generator(function)
        if inspect.iscoroutinefunction(function):  # a streaming one writes to its context
            return self._wrapped_coroutine(function)
        return super()._wrapped(function, streaming=streaming)  # gRPC calls it in a thread

    def _wrapped_coroutine(self, function: Any) -> Any:
        async def serve(request: Any, context: Any) -> Any:
            call = _Call(self._options, context)
            try:
                with call.scope():
                    return await function(request, context)
            except asyncio.CancelledError:
                call.cancel()  # for calls that run in threads
                raise
            except (ModelGuardError, ExceptionGroup) as error:
                await self._abort_async(context, error)
                raise
            finally:
                call.end()

        return serve

    def _wrapped_async_generator(self, function: Any) -> Any:
        async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
            call = _Call(self._options, context)
            parts = function(request, context)
            try:
                while True:
                    with call.scope():
                        try:
                            part = await anext(parts)
                        except StopAsyncIteration:
                            return
                    yield part
            except asyncio.CancelledError:
                call.cancel()
                raise
            except (ModelGuardError, ExceptionGroup) as error:
                await self._abort_async(context, error)
                raise
            finally:
                call.end()
                await parts.aclose()

        return serve

    async def _abort_async(self, context: Any, error: Exception) -> None:
        answer = self._options.answer(error)
        if answer is not None:
            _set_pushback(context, answer)
            await context.abort(self._code(answer), answer.detail)


def _set_pushback(context: Any, answer: Answer) -> None:
    for name, value in answer.headers:
        if name == "retry-after":
            read = getattr(context, "trailing_metadata", tuple)  # not there in threads of an asynchronous server
            context.set_trailing_metadata((*(read() or ()), (_PUSHBACK, str(int(value) * 1000))))
