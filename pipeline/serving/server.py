"""``embed-corpus serve``: from a folder to a listening server, and from SIGTERM to exit code 0.

The port is taken before the model is loaded, and listened to when all is ready. On SIGTERM or Ctrl-C no connection is
accepted any more, what is in flight is answered within the grace, and all processes are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.serving.settings import ServeSettings

if TYPE_CHECKING:
    import uvicorn


def serve(output: str | None, settings: ServeSettings) -> None:
    """Serve until a signal comes; returns when all is drained.

    Args:
        output: the folder given as ``--output`` to a run; None serves ``settings.model`` alone.
        settings: see there.

    Raises:
        ConfigError: no run there, a port that is taken, a setting or model that cannot be had.
    """
    try:
        import uvloop
    except ImportError as error:
        raise ConfigError(
            f"serve needs a package that is not installed ({error.name}); pip install 'embed-corpus[serve]'"
        ) from None
    listener = bind(settings.host, settings.port)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(output, settings, listener))


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet.

    Raises:
        ConfigError: the address is unknown, taken or not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}; expected an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port {port}: cannot listen on {host} ({error.strerror}); choose another port") from None
    return listener


async def _serve(output: str | None, settings: ServeSettings, listener: socket.socket) -> None:
    import uvicorn

    from pipeline.serving.access_log import AccessLog
    from pipeline.serving.app import build_app
    from pipeline.serving.engine import Engine
    from pipeline.serving.search_client import SearchClient
    from pipeline.serving.service import Service
    from pipeline.serving.spans import begin_tracing

    stopped = _stop_on_signals()
    log = AccessLog(requests=settings.access_log)
    spans = begin_tracing(settings.service_name, os.environ)
    if spans.warning:
        log.event("tracing", "warning", message=spans.warning)
    loading = asyncio.create_task(Engine.start(output, settings))
    await _first(loading, stopped)
    if not loading.done():
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return
    engine = loading.result()
    search = None
    if output is not None:
        search = SearchClient(
            output,
            engine.info.fingerprint,
            poll_s=settings.index_poll_s,
            cache_bytes=settings.index_cache_bytes,
            max_waiting=settings.max_concurrent_requests,
            ring_device=engine.info.device if settings.enable_gpu_ipc else None,
            say=log.event,
        )
        await search.start()
    service = Service(engine, settings, search=search, log=log, spans=spans)
    await service.start()
    try:
        server = _server(
            uvicorn.Config(
                build_app(service),
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                limit_concurrency=settings.max_connections,
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
            )
        )
        running = asyncio.create_task(server.serve([listener]))
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        if not running.done():
            address = _address(listener)
            log.event("ready", url=address, model=engine.info.model, lane=engine.info.lane, dim=engine.info.dim)
            print(f"serving {engine.info.model} on {address}", file=sys.stderr, flush=True)
        await _first(running, stopped)
        log.event("draining", grace_s=settings.drain_timeout_s)
        server.should_exit = True
        await running
        await engine.drain(1)
    finally:
        await service.stop()


async def _first(*either: asyncio.Future[Any]) -> None:
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)


def _server(config: uvicorn.Config) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # they are ours; uvicorn would raise them again in the end, and that would be our exit code

    return Server(config)


def _stop_on_signals() -> asyncio.Future[None]:
    """Done when the first signal comes; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if stopped.done():
            os._exit(1)
        stopped.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopped


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
