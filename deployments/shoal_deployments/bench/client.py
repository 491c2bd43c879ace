"""A client that costs next to nothing: a process of its own that reads streams and keeps times.

It is run as a script and imports only the standard library. Nothing is parsed before the last
stream has ended. Its protocol is that of ``shoal.bench.worker``:

    {"address": "host:port", "model": "m", "prompts": [[1, 2]], "new_tokens": 64,
     "delay_s": 0.5}
    @{"seconds": 3.9, "streams": [{"status": 200, "tokens": 64, "first_s": 0.1, "pause_s": 0.02,
                                   "end": ""}]}
"""

import itertools
import json
import selectors
import socket
import sys
import time

DEADLINE_S = 600.0
_END_BYTES = 400
"""Of a stream that is incomplete, what is shown of its end."""


class Stream:
    """One connection: its request, what came, and when."""

    def __init__(self, address: str, model: str, prompt: object, new_tokens: int) -> None:
        body = json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        self.request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self.socket = socket.create_connection(host_and_port(address), DEADLINE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()
        self.begin = 0.0
        self.times: list[float] = []
        """Of every piece from the first event on."""

    def send(self) -> None:
        """Send the request."""
        self.begin = time.perf_counter()
        self.socket.sendall(self.request)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        piece = self.socket.recv(65536)
        now = time.perf_counter()
        self.received += piece
        if piece and (self.times or b"data: " in self.received):
            self.times.append(now)
        return bool(piece)

    def result(self) -> dict[str, object]:
        """What this stream was like."""
        head, _, body = bytes(self.received).partition(b"\r\n\r\n")
        is_stream = b"\r\ntransfer-encoding: chunked" in head.lower()
        tokens = num_tokens(body) if is_stream else 0
        pauses = [later - sooner for sooner, later in itertools.pairwise(self.times)]
        return {
            "status": int(head.split(b" ", 2)[1]) if head else None,
            "tokens": tokens,
            "first_s": self.times[0] - self.begin if self.times else None,
            "pause_s": max(pauses, default=0.0),
            "end": "" if tokens else body[-_END_BYTES:].decode(errors="replace"),
        }


def host_and_port(address: str) -> tuple[str, int]:
    """What a socket takes of ``host:port``, where a host of IPv6 stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def num_tokens(body: bytes) -> int:
    """Tokens that the last event but one of a stream counts; 0 where the stream is incomplete."""
    lines = b"".join(_chunks(body)).split(b"\n")
    data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    if data[-1:] != [b"[DONE]"]:
        return 0
    return int(json.loads(data[-2])["usage"]["completion_tokens"])


def _chunks(body: bytes) -> list[bytes]:
    """The pieces of a body in HTTP's chunked coding."""
    chunks = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(rest[:length])
        body = rest[length + 2 :] if length else b""
    return chunks


def run(streams: list[Stream]) -> float:
    """Send all requests at once and read to the end of all; the seconds that took."""
    selector = selectors.DefaultSelector()
    begin = time.perf_counter()
    for stream in streams:
        stream.send()
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    while selector.get_map():
        ready = selector.select(DEADLINE_S)
        if not ready:
            raise TimeoutError(f"nothing came within {DEADLINE_S:g} seconds")
        for key, _ in ready:
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.data.socket.close()
    return time.perf_counter() - begin


def main() -> None:
    """Answer until the input ends."""
    say("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        streams = [
            Stream(asked["address"], asked["model"], prompt, asked["new_tokens"])
            for prompt in asked["prompts"]
        ]
        time.sleep(asked["delay_s"])
        seconds = run(streams)
        say({"seconds": seconds, "streams": [stream.result() for stream in streams]})


def say(answer: object) -> None:
    """Tell the driver."""
    sys.stdout.write(f"@{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
