"""A hub with one repository, `tests/tiny`, whose files are those of a folder: `hub_server.py FOLDER` prints its address."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub(folder: Path) -> ThreadingHTTPServer:
    """The server, on a port that is free; it is not started."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is logged."""

        def answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/tests/tiny/revision/"):
                files = [{"rfilename": file.name, "size": file.stat().st_size, "lfs": lfs(file)} for file in folder.iterdir()]
                self.answer(200, json.dumps({"sha": COMMIT, "siblings": files}).encode())
                return
            file = folder / path.rpartition("/")[2]
            if not path.startswith(f"/tests/tiny/resolve/{COMMIT}/") or not file.is_file():
                self.answer(404, b"{}")
                return
            content = file.read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
            if asked is None:
                self.answer(200, content, etag=lfs(file)["sha256"])
                return
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            self.answer(206, content[first : last + 1], content_range=f"bytes {first}-{last}/{len(content)}")

        do_HEAD = do_GET

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that ends a download is no error."""

    return Server(("127.0.0.1", 0), Handler)


def lfs(file: Path) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}


if __name__ == "__main__":
    server = hub(Path(sys.argv[1]))
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
