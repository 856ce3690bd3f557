"""Uses a context manager as the decorator of any kind of function: plain, coroutine, generator,
asynchronous generator.

A coroutine is inside the context from its start to its end. A generator is inside it while it runs,
once for every item, and outside while its caller has the item.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

Function = TypeVar("Function", bound=Callable[..., Any])
Context = AbstractContextManager[Any]


def decorated(context: Context, function: Function) -> Function:
    """Returns a function that runs `function` inside `context`, entered again at each call."""
    if inspect.isasyncgenfunction(function):
        wrapper = _async_generator(context, function)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(context, function)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(context, function)
    else:
        wrapper = _plain(context, function)
    return cast(Function, functools.wraps(function)(wrapper))


def _plain(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # dynamo cannot enter a context manager made outside the graph
            return function(*args, **kwargs)
        with context:
            return function(*args, **kwargs)

    return inside


def _coroutine(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    async def inside(*args: Any, **kwargs: Any) -> Any:
        with context:
            return await function(*args, **kwargs)

    return inside


def _generator(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        running = function(*args, **kwargs)
        resume, value = running.send, None
        while True:
            try:
                with context:
                    item = resume(value)
            except StopIteration as stop:
                return stop.value
            try:
                resume, value = running.send, (yield item)
            except GeneratorExit:
                with context:
                    running.close()
                raise
            except BaseException as error:
                resume, value = running.throw, error

    return inside


def _async_generator(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    async def inside(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        running = function(*args, **kwargs)
        resume, value = running.asend, None
        while True:
            try:
                with context:
                    item = await resume(value)
            except StopAsyncIteration:
                return
            try:
                resume, value = running.asend, (yield item)
            except GeneratorExit:
                with context:
                    await running.aclose()
                raise
            except BaseException as error:
                resume, value = running.athrow, error

    return inside
