"""The fault list: what a client, an encoder or an operator does that ends a PD, or gives a wrong answer.

Each is a function of a world. It sends through the front and says what the right answer would have been;
whether anybody died is seen afterwards.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

from lab.world import Room, World, picture
from tests.contract.client import ask, fresh, part, png, text
from tests.contract.target import Server, until

__all__ = ["FAULTS", "Fault"]


_PLAIN = Room()
ANSWERED = '"POST /v1/chat/completions HTTP/1.1" 200'
"""In a server's log."""
DOWN_S = 10.0
"""How long nobody starts a PD that is down."""
WAITS_S = 1.0
"""How long an image has waited when its encoder is struck. A proxy may take one that pauses for so long for a
slow one."""
KEPT_S = 2.0
"""How long an encoder keeps an item, where it keeps it briefly."""


@dataclass(frozen=True)
class Fault:
    """`what` is the row's title."""

    name: str
    what: str
    act: Callable[[World], None]
    room: Room = _PLAIN


def _typed(world: World, content: object, **more: Any) -> None:
    """A request of whatever kind, and somebody else's text beside it."""
    world.beside(lambda: world.ask([content, text()], **more))


def part_without_type(world: World) -> None:
    """vLLM knows it by its key."""
    url = picture()
    _typed(world, {"image_url": url}, expected=world.truth(url))


def input_image(world: World) -> None:
    """The Responses API's part, which the chat API takes too."""
    url = picture()
    _typed(world, {"type": "input_image", "image_url": url, "detail": "auto"}, expected=world.truth(url))


def processor_kwargs(world: World) -> None:
    """They are in the item's name: who drops them on the way to the encoder names another item."""
    _typed(world, part(None, picture(1024, 768)), mm_processor_kwargs={"max_pixels": 200_704})


def media_io_kwargs(world: World) -> None:
    """So are these."""
    _typed(world, part(None, picture()), media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}})


@contextmanager
def _changing_picture() -> Iterator[str]:
    """A URL under which every download finds another picture."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = png(224, 224)
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/camera.png"
        finally:
            server.shutdown()
            thread.join()


def changing_url(world: World) -> None:
    """A camera's still: encoder and PD download it separately."""
    with _changing_picture() as url:
        _typed(world, part(None, url))


def uuid_used_twice(world: World) -> None:
    """A client that numbers its pictures anew in every request."""
    u = fresh()
    for _ in range(4):
        url = picture()
        world.ask([part(u, url), text()], expected=world.truth(url))


def chat_goes_on(world: World) -> None:
    """A chat returns to its first picture after others, one of which has its place in the encoder's memory.

    Two of 768 tokens fill either side's cache here. So the PD has let go of the first after three others;
    its encoder, which saw one of them, still has it, and does not push it again.
    """
    first = picture(1024, 768)
    expected = world.truth(first)
    world.ask([part(None, first), text()], expected=expected)
    for _ in range(3):
        world.ask([part(None, picture(1024, 768)), text()])
    for _ in range(2):
        world.ask([part(None, first), text()], expected=expected)


def by_uuid_only(world: World) -> None:
    """The same chat, whose client leaves the bytes out the second time: "use your cache"."""
    u, first = fresh(), picture(1024, 768)
    expected = world.truth(first)
    world.ask([part(u, first), text()], expected=expected)
    for _ in range(3):
        world.ask([part(None, picture(1024, 768)), text()])
    for _ in range(2):
        world.ask([{"type": "image_url", "image_url": None, "uuid": u}, text()], expected=expected)


def pd_restarted(world: World) -> None:
    """Encoders do not push again what they still hold."""
    url = picture()
    expected = world.truth(url)
    for _ in world.encoders:
        world.ask([part(None, url), text()], expected=expected)
    world.restart_pd()
    world.beside(lambda: world.ask([part(None, url), text()], expected=expected))


def pd_is_down(world: World) -> None:
    """140 pictures, four at a time, while there is no PD: a queue of 64 before each encoder, and they fill.

    After ten seconds a PD is started, and when it is ready one picture more is sent.
    """
    world.pd.destroy()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for encoder in world.encoders:
                world.encoder_answers(encoder)
            over.wait(0.5)

    with ThreadPoolExecutor(5) as pool:
        looking = pool.submit(look)
        try:
            asked = [pool.submit(world.ask, [part(None, picture(64, 64)), text()]) for _ in range(140)]
            wait(asked, DOWN_S)
            world.restart_pd()
            wait(asked)
        finally:
            over.set()
            looking.result()
    world.beside(lambda: world.ask([part(None, picture()), text()]))


def junk(world: World) -> None:
    """One message of somebody who finds the port: framed as an encoder's, empty of sense."""
    tensor = {"base_addr": 4096, "nbytes": 64, "device_id": 0, "shape": [1, 32], "dtype_str": "torch.float16"}
    name = fresh()
    message = {"engine_id": "x", "mm_hash": name, "agent_metadata": b"junk", "tensor": tensor}
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{world.pull_port}")
        push.send(msgspec.msgpack.encode(message))
        until(lambda: name in world.pd.log(), 30, "the PD does not hear it")
        _typed(world, part(None, picture()))


def two_pds(world: World) -> None:
    """Eight pictures, one after another; each encoder pushes to one of the PDs."""
    for _ in range(8):
        world.ask([part(None, picture()), text()])


def encoder_hangs(world: World) -> None:
    """One of two stops while idle; four users send two pictures each."""
    victim = world.encoders[0]
    victim.signal(signal.SIGSTOP, everyone=True)
    try:
        with ThreadPoolExecutor(4) as pool:
            contents = [[part(None, picture()), part(None, picture()), text()] for _ in range(4)]
            world.beside(lambda: [*pool.map(world.ask, contents)])
    finally:
        victim.signal(signal.SIGCONT, everyone=True)


def _between_push_and_pull(world: World, act: Callable[[Server], None]) -> None:
    """A small and a large picture in one request: `act` on the encoder that has answered before the other."""
    before = [e.log().count(ANSWERED) for e in world.encoders]

    def pushed() -> list[Server]:
        pairs = zip(world.encoders, before, strict=True)
        return [e for e, n in pairs if e.log().count(ANSWERED) > n]

    struck = threading.Event()

    def strike() -> None:
        try:
            until(lambda: bool(pushed()), 60, "no encoder answers")
            act(pushed()[0])
        finally:
            struck.set()

    striker = threading.Thread(target=strike)
    striker.start()
    pair = [part(None, picture(64, 64)), part(None, picture(2000, 2000)), text()]
    world.beside(lambda: world.ask(pair), struck)
    striker.join()


def encoder_killed(world: World) -> None:
    """A crash at the worst moment."""
    _between_push_and_pull(world, lambda encoder: encoder.destroy())


def encoder_stopped(world: World) -> None:
    """A hang at the worst moment."""
    stopped: list[Server] = []

    def stop(encoder: Server) -> None:
        stopped.append(encoder)
        encoder.signal(signal.SIGSTOP, everyone=True)

    try:
        _between_push_and_pull(world, stop)
    finally:
        for encoder in stopped:
            encoder.signal(signal.SIGCONT, everyone=True)


def _while_it_waits(world: World, act: Callable[[Server], None]) -> None:
    """Of two pictures one waits for the other, whose encoder pauses; `act` on the one that has answered.

    The PD takes no step of its own meanwhile: nobody else sends anything before.
    """
    quick, slow = world.encoders
    answered = quick.log().count(ANSWERED)
    slow.signal(signal.SIGSTOP, everyone=True)
    struck = threading.Event()

    def strike() -> None:
        try:
            until(lambda: quick.log().count(ANSWERED) > answered, 60, "no encoder answers")
            time.sleep(WAITS_S)
            act(quick)
        finally:
            slow.signal(signal.SIGCONT, everyone=True)
            struck.set()

    striker = threading.Thread(target=strike)
    striker.start()
    pair = [part(None, picture(64, 64)), part(None, picture(64, 64)), text()]
    world.beside(lambda: world.ask(pair), struck)
    striker.join()


def killed_while_waiting(world: World) -> None:
    """A crash a moment after the push, before the request can go to the PD."""
    _while_it_waits(world, lambda encoder: encoder.destroy())


def stopped_while_waiting(world: World) -> None:
    """A hang then."""
    encoder = world.encoders[0]
    try:
        _while_it_waits(world, lambda quick: quick.signal(signal.SIGSTOP, everyone=True))
    finally:
        encoder.signal(signal.SIGCONT, everyone=True)


def too_many_items(world: World) -> None:
    """Six users with three pictures each, where the PD pulls three items a step."""
    contents = [[*(part(None, picture()) for _ in range(3)), text()] for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        world.beside(lambda: [*pool.map(world.ask, contents)])


def encoder_full(world: World) -> None:
    """Four users with two pictures each, where an encoder keeps two items."""
    contents = [[part(None, picture()), part(None, picture(2000, 2000)), text()] for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        world.beside(lambda: [*pool.map(world.ask, contents)])


def item_waits(world: World) -> None:
    """Of two pictures one waits for the other, whose encoder pauses; its own encoder goes on working."""
    quick, slow = world.encoders
    answered = quick.log().count(ANSWERED)
    slow.signal(signal.SIGSTOP, everyone=True)

    def pause() -> None:
        try:
            until(lambda: quick.log().count(ANSWERED) > answered, 60, "no encoder answers")
            time.sleep(KEPT_S + 1)
            # What is too old goes when another is taken in.
            assert ask(quick, [part(fresh())], max_tokens=1).status == 200
        finally:
            slow.signal(signal.SIGCONT, everyone=True)

    pausing = threading.Thread(target=pause)
    pausing.start()
    pair = [part(None, picture(64, 64)), part(None, picture(64, 64)), text()]
    world.beside(lambda: world.ask(pair))
    pausing.join()


def one_picture(world: World) -> None:
    """Nothing is wrong with it; what is wrong is how the servers were started."""
    _typed(world, part(None, picture(1024, 768)))


_FEW_PULLS = Room(pd={"max_concurrent_pulls": 3}, flags=("--pd-items", "3"))
_FEW_KEPT = Room(encoder={"producer_cache_capacity": 2}, flags=("--staged-items", "2"))
_BRIEFLY_KEPT = Room(encoder={"producer_cache_ttl_s": KEPT_S}, flags=("--staged-age", str(KEPT_S * 0.75)))
_OTHER_PATH = Room(detour="/.")
_UNCACHED = Room(encoder_serve=("--mm-processor-cache-gb", "0"))
_TWO_PDS = Room(pds=2)

FAULTS = (
    # What a client sends.
    Fault("part-without-type", "an image part without `type`", part_without_type),
    Fault("input-image", "an `input_image` part", input_image),
    Fault("processor-kwargs", "`mm_processor_kwargs` in the request", processor_kwargs),
    Fault("media-io-kwargs", "`media_io_kwargs` in the request", media_io_kwargs),
    Fault("changing-url", "an image URL whose content changes", changing_url),
    Fault("uuid-used-twice", "a client's uuid on four different images", uuid_used_twice),
    Fault("chat-goes-on", "an image sent again after three others", chat_goes_on),
    Fault("by-uuid-only", "an image sent again by its uuid only", by_uuid_only),
    # What there is too much of.
    Fault("too-many-items", "more items at once than the PD pulls in a step", too_many_items, _FEW_PULLS),
    Fault("encoder-full", "more items at once than an encoder keeps", encoder_full, _FEW_KEPT),
    Fault(
        "item-waits", "an image waits for another longer than its encoder keeps it", item_waits, _BRIEFLY_KEPT
    ),
    # Who goes away.
    Fault("pd-restarted", "an image sent again after the PD was restarted", pd_restarted),
    Fault("pd-is-down", "140 images while the PD is down", pd_is_down),
    Fault("encoder-hangs", "an idle encoder stops answering", encoder_hangs),
    Fault("encoder-stopped", "an encoder hangs after its push", encoder_stopped),
    Fault("stopped-while-waiting", "an encoder hangs a second after its push", stopped_while_waiting),
    Fault("encoder-killed", "an encoder is killed after its push", encoder_killed),
    Fault("killed-while-waiting", "an encoder is killed a second after its push", killed_while_waiting),
    # How servers are started.
    Fault("model-path", "encoders name the model by another path", one_picture, _OTHER_PATH),
    Fault("no-processor-cache", "encoders without a processor cache", one_picture, _UNCACHED),
    Fault("two-pds", "two PDs, an encoder each", two_pds, _TWO_PDS),
    Fault("junk", "junk in an encoder's framing on the PD's pull port", junk),
)
