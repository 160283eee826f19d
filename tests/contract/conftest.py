"""`--target sim` (default) or `--target lab`, and the cluster that most tests share."""

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import zmq

from tests.connector.guarded import GuardedLab, GuardedSim
from tests.contract.client import png
from tests.contract.cluster import Cluster
from tests.contract.starts import Starts
from tests.contract.target import LabTarget, SimTarget, Target

_BEGAN = time.monotonic()
TARGETS: dict[str, type[Target]] = {"sim": SimTarget, "lab": LabTarget}
VENDORS_WAYS: dict[str, set[str] | None] = {
    # Its deaths: tests/connector/test_faults.py has what becomes of them. And what leads to them: that an
    # encoder pushes to nobody, and keeps what was acknowledged until it takes in another; its own lines.
    "test_stall.py": {
        "test_junk_where_an_agent_should_be_kills",
        "test_an_item_that_nobody_encoded_stalls_everybody_and_kills",
        "test_metrics_are_frozen_in_a_stall",
        "test_a_held_item_is_not_pushed_to_a_new_pd",
    },
    "test_deaths.py": {
        "test_the_wrong_image_without_any_error",
        "test_an_item_of_an_encoder_that_died_after_the_flush_kills",
        "test_items_grow_too_old_once_another_is_taken_in",
        "test_an_evicted_item_kills",
        "test_an_encoder_killed_after_its_push_takes_the_pd_along",
        "test_more_items_than_may_be_pulled_at_once_kill",
        "test_a_stopped_encoder_blocks_the_pull_and_then_kills",
    },
    "test_processes.py": {
        "test_an_encoder_may_start_before_its_pd",
        "test_milestones_in_order",
    },
    "test_only_sim.py": None,
    "test_only_sim_release.py": None,
    "test_only_lab.py": None,
    # Its own log lines, its silence on what is held, its answers without a word on delivery.
    "test_chat.py": {"test_an_encoder_answers_nothing"},
    "test_items.py": {
        "test_the_lines_of_one_item_in_order",
        "test_a_line_says_when_to_the_microsecond_and_where",
        "test_a_new_uuid_is_encoded_and_pushed_again_and_a_held_one_is_not",
        "test_the_same_uuid_on_other_bytes_is_the_first_picture",
        "test_without_uuid_the_bytes_are_the_name",
        "test_the_messages_of_an_encoder",
        "test_the_65th_message_without_a_pd_blocks",
        "test_trusted_kwargs_are_in_the_name",
        "test_an_encoder_without_processor_cache_hashes_no_content",
    },
}
"""What the guard is there to change; by file, None for all of it."""
LAST = ("test_stall.py", "test_deaths.py", "test_processes.py")
"""In this order: they kill servers, and what one of them leaves behind the next can use."""
GUARDED: dict[str, type[Target]] = {"sim": GuardedSim, "lab": GuardedLab}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known only where this directory is named on the command line; elsewhere the default holds."""
    parser.addoption(
        "--target", default="sim", choices=sorted(TARGETS), help="what the contract is tested on"
    )
    parser.addoption(
        "--product", action="store_true", help="with --target lab: the whole product on it as well"
    )
    parser.addoption(
        "--within",
        type=float,
        metavar="SECONDS",
        help="begin no test after so long; the summary names those that were left out",
    )
    parser.addoption(
        "--guard", default="off", choices=("on", "off"), help="with the guarded connector, or the vendor's"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test names its target."""
    if "target" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--target", "sim")
        metafunc.parametrize("target", [chosen], indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Real servers take their time; and what only one target can do is not asked of the other."""
    on_lab = config.getoption("--target", "sim") == "lab"
    foreign = {"test_only_sim.py", "test_only_sim_release.py"} if on_lab else {"test_only_lab.py"}
    if not config.getoption("--product", False):
        foreign.add("test_only_lab.py")
    left_out = [item for item in items if item.path.name in foreign]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if config.getoption("--guard", "off") == "on":
        items[:] = [item for item in items if not _is_vendors_way(item)]
    items.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)
    if on_lab:
        for item in items:
            item.add_marker(pytest.mark.timeout(1200))


def _is_vendors_way(item: pytest.Item) -> bool:
    ways = VENDORS_WAYS.get(item.path.name, set())
    return ways is None or item.name.partition("[")[0] in ways


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Real servers start slowly on a machine that is busy with other things: that is no fault of theirs."""
    within = item.config.getoption("--within", None)
    if within is not None and time.monotonic() - _BEGAN > within:
        pytest.skip(f"out of time: begun later than {within:g} s")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """What the contract is tested on."""
    targets = GUARDED if request.config.getoption("--guard", "off") == "on" else TARGETS
    made = targets[request.param](tmp_path_factory.mktemp(request.param))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def shared(target: Target) -> Cluster:
    """Not for tests: `cluster` is."""
    return Cluster(target)


@pytest.fixture(scope="session")
def wanted(request: pytest.FixtureRequest) -> frozenset[str]:
    """Fixtures of all tests to come: what starts slowly may be started ahead, while others wait."""
    return frozenset(name for item in request.session.items for name in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def starts(target: Target) -> Iterator[Starts]:
    """Begun; nobody waited."""
    holder: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    yield Starts.begin(target, holder.bind_to_random_port("tcp://127.0.0.1"))
    holder.close()


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """A cluster in which everybody is alive and well."""
    shared.repair()
    return shared


@pytest.fixture
def pictures() -> Iterator[str]:
    """A web server on loopback: /NAME.png is a picture, everything else 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = png(96, 64, (10, 20, 30)) if self.path.endswith(".png") else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
