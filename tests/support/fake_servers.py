"""An HTTP server in this process that can be taken away, hung, and made to answer nonsense."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit


class Answer(Exception):  # noqa: N818 - a reply, good or bad
    """Ends a request with a status and a body."""

    def __init__(self, status, body=b"", headers=()):
        super().__init__(status)
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = headers


class VanishError(Exception):
    """Ends a request by closing its connection: the process behind it has died."""


class FakeServer:
    """Routes requests to methods: `GET /is_paused` is `get_is_paused(query, body)`, which returns the answer.

    Attributes:
        seen: Every request in order, `METHOD path?query`, with its body.
        replies: What a path answers instead of what it does: `Answer`, or bytes that are sent as they are.
        loses: Returns for the next request whether its connection is lost: "asked" before the server has done
            anything, "answered" after it has done what it was asked for, "" not.
    """

    port = 0

    def __init__(self, token=None):
        self.token = token
        self.seen = []
        self.replies = {}
        self.loses = lambda: ""
        self.lock = threading.RLock()
        self.request = threading.local()
        self._open = threading.Event()
        self._open.set()
        self._server = None
        self._thread = None
        self.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        server = _Listener(("127.0.0.1", self.port), _Handler)
        server.fake = self
        self._server, self.port = server, server.server_address[1]
        self._thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self):
        self._open.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(10)
            self._server = None

    def stop_soon(self):
        """Stop from within a request."""
        server, self._server = self._server, None
        threading.Thread(target=server.shutdown, daemon=True).start()
        server.socket.close()

    @contextlib.contextmanager
    def gone(self):
        self.stop()
        yield
        self.start()

    @contextlib.contextmanager
    def hung(self):
        self._open.clear()
        yield
        self._open.set()

    def paths(self):
        return [path for path, _ in self.seen]

    def routed(self, method, target, body):
        self._open.wait(30)
        url = urlsplit(target)
        with self.lock:
            self.seen.append((f"{method} {target}", body))
        reply = self.replies.get(url.path)
        if isinstance(reply, Answer):
            raise reply
        if callable(reply):
            return reply()
        route = getattr(self, f"{method.lower()}_{url.path.strip('/').replace('/', '_')}", None)
        if route is None:
            raise Answer(404, {"detail": "Not Found"})
        return route(dict(parse_qsl(url.query)), body)

    def routed_if_kept(self, method, target, body):
        lost = self.loses()
        answer = self.routed(method, target, body) if lost != "asked" else None
        if lost:
            raise VanishError
        return answer

    def authorize(self, given):
        if self.token is not None and given != f"Bearer {self.token}":
            raise Answer(401, {"error": "Unauthorized"})


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32

    def handle_error(self, request, client_address):
        """Say nothing: clients that give up are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 30

    def do_GET(self):
        self._answer("GET")

    def do_POST(self):
        self._answer("POST")

    def _answer(self, method):
        fake = self.server.fake
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            fake.authorize(self.headers.get("Authorization"))
            fake.request.headers = self.headers
            given = fake.routed_if_kept(method, self.path, json.loads(raw) if raw else None)
        except VanishError:
            self.close_connection = True
            return
        except Answer as answer:
            self._send(answer.status, answer.body, answer.headers)
            return
        self._send(200, given if isinstance(given, bytes) else json.dumps(given).encode())

    def _send(self, status, body, headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""
