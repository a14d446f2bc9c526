"""The stand-in for a file server: byte ranges of files below a directory. `python bed_origin.py DIR PORT READY SENT`

For each answer it appends a line to the file SENT: how many bytes of the file it has sent.
"""

import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROOT, PORT, READY = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SENT = open(sys.argv[4], "a", buffering=1)  # noqa: SIM115 - open until the end


class Ranges(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        first, end = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        with open(f"{ROOT}{self.path}", "rb") as file:
            length = min(end + 1, os.fstat(file.fileno()).st_size) - first
            self.send_response(206)
            self.send_header("Content-Length", str(max(length, 0)))
            self.end_headers()
            self.wfile.flush()
            if length > 0:
                self._send(file, first, length)

    def _send(self, file, first, length):
        try:
            self.connection.sendfile(file, first, length)
        finally:  # a host that is killed has got a part
            SENT.write(f"{max(file.tell() - first, 0)}\n")

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request, address):
        """Say nothing: hosts are killed."""


server = Server(("", PORT), Ranges)
open(READY, "w").close()
server.serve_forever()
