"""The whole product on the lab: daemon, proxy, commands and console over real vLLM, by either connector.

Six more real servers to start: only with `--target lab --product`.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eccon import scaffold
from eccon.lab.cluster import config
from eccon.lab.place import Place, default
from tests.contract.target import Target
from tests.e2e.cluster import Cluster, until
from tests.e2e.test_console import console, row

WAY = re.compile(r"^image (\d)  (encoder-\d) +encode +[\d.]+ ms(?:  transfer +([\d.]+) ms)?", re.MULTILINE)
START_S = 800.0


class LabCluster(Cluster):
    """The lab's own `eccon.toml`, in a directory and on ports of its own."""

    def __init__(self, directory: Path, connector: str) -> None:
        self.directory = directory
        self.ports = scaffold.free_ports(2)
        text = config(Place(default()), name="t", ports=self.ports)
        self.config = directory / "eccon.toml"
        self.config.write_text(text.replace('\nkind = "RblnECNixlConnector"', f'\nkind = "{connector}"'))
        self.mark = f"ECCON_STATE_DIR={directory}"
        self.env = {**os.environ, "ECCON_STATE_DIR": str(directory), "HOME": str(directory)}


@contextmanager
def up(connector: str) -> Iterator[LabCluster]:
    """A ready cluster; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        c = LabCluster(Path(name), connector)
        try:
            c.eccon("up", timeout=START_S)
            yield c
        finally:
            c.eccon("down", code=None, timeout=120)
            try:
                until(lambda: not c.processes(), "no process of the cluster is left", 30)
            finally:
                for p in c.processes():
                    p.kill()


@pytest.mark.parametrize("connector", ["RblnECNixlConnector", "ECExampleConnector"])
def test_eight_images_through_the_whole_product(target: Target, connector: str) -> None:
    """The connector is one line of `eccon.toml`. Streamed or not, the model says the same of them."""
    with up(connector) as c:
        streamed = c.eccon("send", "--samples", "--max-tokens", "40", timeout=120)
        whole = c.eccon("send", "--samples", "--max-tokens", "40", "--no-stream", timeout=120)
        assert streamed.stdout.strip() == whole.stdout.strip() != ""
        for said in (streamed, whole):
            ways = WAY.findall(said.stderr)
            assert [int(w[0]) for w in ways] == [*range(1, 9)], said.stderr
            assert {w[1] for w in ways} == {"encoder-0", "encoder-1"}
            if connector == "RblnECNixlConnector":
                assert all(w[2] for w in ways), said.stderr
        assert {p["state"] for p in c.state()["processes"]} == {"ready"}
        if connector != "RblnECNixlConnector":
            return
        with console(c) as t:
            t.until(lambda: all(row(t, name) for name in ("pd", "encoder-0", "encoder-1")), 30)
            known = {x["id"] for x in c.state()["traces"]}
            t.press("p")
            t.until("est prompt")
            t.press("\r")
            until(
                lambda: any(
                    x["id"] not in known and x.get("items") and x.get("status") == 200
                    for x in c.state()["traces"]
                ),
                "the prompt sent by key is answered",
                120,
            )
