#!/usr/bin/env python3
"""Looks like `vllm serve` to a supervisor: two processes, a health endpoint, a model; misbehaves on request.

FAKE (environment): words, each one a vice. FAKE_ENCODER and FAKE_PD: the same for one role only.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    """`server.py serve MODEL --port N …`; `server.py engine` is the child."""
    if sys.argv[1] == "engine":
        engine()
    model = sys.argv[2]
    port = int(sys.argv[sys.argv.index("--port") + 1])
    role = "PD" if "ec_consumer" in " ".join(sys.argv) else "ENCODER"
    vices = (os.environ.get("FAKE", "") + " " + os.environ.get(f"FAKE_{role}", "")).split()
    print("vLLM API server version 0.30.0", flush=True)
    for vice in vices:
        word, _, value = vice.partition("=")
        if word == "exit":
            time.sleep(0.05)
            print("about to exit", flush=True)
            sys.exit(int(value))
        elif word == "crash":
            os.kill(os.getpid(), signal.SIGABRT)
        elif word == "slow":
            time.sleep(float(value))
        elif word == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word == "orphans":
            # Double fork, own session: what a careless daemonisation leaves behind.
            subprocess.Popen(["setsid", "-f", "sleep", "1000"])
        elif word == "flood":
            threading.Thread(target=flood, args=(float(value),), daemon=True).start()
        elif word == "talk":
            threading.Thread(target=talk, daemon=True).start()
        elif word == "short":
            threading.Timer(float(value), os._exit, (3,)).start()
    child = subprocess.Popen([sys.executable, __file__, "engine", *vices], start_new_session="apart" in vices)
    serve(port, "wrong" if "stranger" in vices else model, child)


def flood(seconds: float) -> None:
    """50,000 lines of 200 bytes a second, if that can be, once the model's directory has a file `go`."""
    while not (Path(sys.argv[2]) / "go").exists():
        time.sleep(0.05)
    line = b"f" * 199 + b"\n"
    begun = time.monotonic()
    written = 0
    while (now := time.monotonic() - begun) < seconds:
        os.write(1, line * 500)
        written += 500
        time.sleep(max(0.0, written / 50_000 - now))
    print(f"flooded {written} lines in {time.monotonic() - begun:.3f} s", flush=True)


def talk() -> None:
    """A thousand lines of 100 bytes a second, for ever."""
    for n in range(10**9):
        os.write(1, b"t%08d" % n + b"." * 90 + b"\n")
        time.sleep(0.001)


def engine() -> None:
    """Ends soon after its parent's TERM reached it too; ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("Initializing a V1 LLM engine (v0.30.0)", flush=True)
    while True:
        time.sleep(3600)


def serve(port: int, model: str, child: "subprocess.Popen[bytes]") -> None:
    """Until TERM."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = {"data": [{"id": model, "root": model}]} if "models" in self.path else {}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True

    def leave(*_: object) -> None:
        child.terminate()
        threading.Thread(target=server.shutdown).start()

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, leave)

    def follow() -> None:
        child.wait()
        server.shutdown()

    threading.Thread(target=follow, daemon=True).start()
    print("Application startup complete.", flush=True)
    server.serve_forever(poll_interval=0.05)
    child.wait()


if __name__ == "__main__":
    main()
