"""An environment on a machine of its own: scores completions over HTTP. Nothing but Python's own library.

python examples/grpo/environment.py --host 0.0.0.0 --port 7861

curl http://env:7861/score -H 'Content-Type: application/json' -d '{"completions": ["aeiou"]}'     # {"rewards": [1.0]}
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAX_BYTES = 16 << 20


def score(text: str) -> float:
    """Share of the characters that are vowels, 0 to 1: any model can learn that."""
    return sum(character in "aeiou" for character in text.lower()) / max(len(text), 1)


class Environment(BaseHTTPRequestHandler):
    """Answers ``POST /score`` with one reward per completion, and ``GET /health``."""

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        if self.path != "/score" or not 0 < length <= MAX_BYTES:
            self._answer(404, {"error": f"expected POST /score with 1 to {MAX_BYTES} bytes"})
            return
        try:
            completions = json.loads(self.rfile.read(length))["completions"]
            rewards = [score(text) for text in completions]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._answer(400, {"error": f'expected {{"completions": [text, ...]}}: {error!r}'})
            return
        self._answer(200, {"rewards": rewards})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """No line per request."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=7861, help="default: %(default)s")
    options = parser.parse_args()
    with ThreadingHTTPServer((options.host, options.port), Environment) as server:
        print(f"scoring at http://{options.host}:{server.server_address[1]}/score", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
