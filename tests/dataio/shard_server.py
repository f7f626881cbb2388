"""A local HTTP server of a directory that can lose connections and send wrong bytes."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


class Server(http.server.ThreadingHTTPServer):
    """Serves `directory`; `faults` maps a file's name to faults still to come: "drop" or "flip" for one delivery each.

    `delivered` counts the bodies that were sent, by file name.
    """

    daemon_threads = True

    def __init__(self, directory: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.directory = directory
        self.faults: dict[str, list[str]] = {}
        self.delivered: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        path = self.server.directory / name
        if not path.is_file():
            self.send_error(404)
            return
        body = bytearray(path.read_bytes())
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else ""
        if fault == "flip":
            body[len(body) // 2] ^= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.server.delivered[name] += 1
        if fault == "drop":
            self.wfile.write(body[: len(body) // 2])
            self.connection.close()
            return
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """Serve `directory` on a free port of this machine."""
    server = Server(directory)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
