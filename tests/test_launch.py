"""Topology to command lines: the guide's, flag by flag, and exactly the named differences."""

import json
import logging
import logging.config
from pathlib import Path

import msgspec
import pytest

from eccon import config, launch, scaffold
from eccon.launch import versions, vllm
from eccon.paths import ClusterPaths

PATHS = ClusterPaths(Path("/state"), Path("/state"))


@pytest.fixture
def guide(tmp_path: Path) -> config.Topology:
    model = tmp_path / "Qwen3-VL-8B-Instruct"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return config.load(scaffold.guide(tmp_path, name="guide", model=model.name))


def with_profile(topology: config.Topology, profile: str) -> config.Topology:
    launcher = msgspec.convert({"profile": profile}, config.Launcher)
    return msgspec.structs.replace(topology, launcher=launcher)


def flags(argv: tuple[str, ...]) -> dict[str, object]:
    words = list(argv[3:])
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    return {k: json.loads(v) if v.startswith("{") else v for k, v in pairs.items()}


def test_with_the_guides_profile_it_is_the_guide(guide: config.Topology) -> None:
    topology = with_profile(guide, "guide")
    pd = launch.pd(topology, PATHS)
    assert pd.argv == (
        *("vllm", "serve", "Qwen3-VL-8B-Instruct", "--port", "19100"),
        *("--mm-processor-kwargs", '{"max_pixels": 802816}', "--ec-transfer-config"),
        (
            '{"ec_connector": "RblnECNixlConnector", "ec_role": "ec_consumer",'
            ' "ec_connector_extra_config": {"pull_host": "0.0.0.0", "pull_port": 19500}}'
        ),
    )
    assert pd.env == {"RBLN_DEVICES": "0,1,2,3,4,5,6,7"}
    for i, slot in enumerate(launch.slots(topology)):
        spec = launch.encoder(topology, PATHS, slot)
        assert spec.name == f"encoder-{i}"
        assert spec.env == {"RBLN_DEVICES": str(8 + i)}
        assert flags(spec.argv) == {
            "--port": str(19101 + i),
            "--mm-processor-kwargs": {"max_pixels": 802816},
            "--ec-transfer-config": {
                "ec_connector": "RblnECNixlConnector",
                "ec_role": "ec_producer",
                "ec_connector_extra_config": {"llm_host": "127.0.0.1", "llm_pull_port": 19500},
            },
        }


def test_the_safe_profile_differs_by_named_things_only(guide: config.Topology) -> None:
    plain, safe = with_profile(guide, "guide"), with_profile(guide, "safe")
    for make, extra in (
        (launch.pd, {"max_concurrent_pulls": vllm.PULLS, "pull_host": "127.0.0.1"}),
        (
            lambda t, p: launch.encoder(t, p, launch.slots(t)[3]),
            {"producer_cache_ttl_s": vllm.TTL_S, "producer_cache_capacity": vllm.CAPACITY},
        ),
    ):
        before, after = make(plain, PATHS), make(safe, PATHS)
        wanted = flags(before.argv) | {"--host": "127.0.0.1"}
        transfer = wanted["--ec-transfer-config"]
        assert isinstance(transfer, dict)
        transfer["ec_connector_extra_config"] |= extra
        assert flags(after.argv) == wanted
        assert after.env == before.env | {"VLLM_LOGGING_CONFIG_PATH": "/state/vllm-logging.json"}


def test_the_proxy_gets_every_encoder(guide: config.Topology) -> None:
    spec = launch.proxy(guide, PATHS, ["http://127.0.0.1:19101", "http://127.0.0.1:19102"])
    assert spec.argv[1:] == (
        *("-m", "eccon_proxy", "--host", "0.0.0.0", "--port", "19000"),
        *("--encode-servers-urls", "http://127.0.0.1:19101,http://127.0.0.1:19102"),
        *("--decode-servers-urls", "http://127.0.0.1:19100", "--connector", "RblnECNixlConnector"),
        *("--pd-items", str(vllm.PULLS), "--staged-items", "192", "--staged-age", "225"),
        *("--admin", "unix:/state/admin.sock"),
    )
    assert spec.url == "http://127.0.0.1:19000"


def test_another_encoder_gets_the_lowest_index_spare_device_and_free_port(guide: config.Topology) -> None:
    nine = msgspec.structs.replace(
        guide, encoders=msgspec.structs.replace(guide.encoders, devices=[*range(8, 17)])
    )
    used = launch.slots(nine)
    assert launch.next_slot(nine, used, lambda _: True) == launch.EncoderSlot(8, 19109, 16)
    without_two = [s for s in used if s.index != 2]
    assert launch.next_slot(nine, without_two, lambda _: True) == launch.EncoderSlot(2, 19103, 10)
    assert launch.next_slot(nine, used, lambda port: port != 19109).port == 19110
    with pytest.raises(launch.NoRoomError, match="no free device"):
        launch.next_slot(guide, used, lambda _: True)


@pytest.mark.parametrize(
    ("version", "name", "unset"),
    [
        (None, "RBLN_DEVICES", ("RBLN_VISIBLE_DEVICES",)),
        ("0.11.2", "RBLN_DEVICES", ("RBLN_VISIBLE_DEVICES",)),
        ("0.12.0", "RBLN_VISIBLE_DEVICES", ("RBLN_DEVICES",)),
        ("1.0.0", "RBLN_VISIBLE_DEVICES", ("RBLN_DEVICES",)),
    ],
)
def test_exactly_one_device_variable_by_the_launchers_version(
    guide: config.Topology, tmp_path: Path, version: str | None, name: str, unset: tuple[str, ...]
) -> None:
    command = tmp_path / "venv" / "bin" / "vllm"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    if version:
        (site / f"vllm_rbln-{version}.dist-info").mkdir()
    assert versions.installed(str(command), "vllm-rbln") == version
    topology = msgspec.structs.replace(guide, launcher=config.Launcher(vllm=str(command)))
    assert versions.device_variables(topology) == (name, unset)


def test_the_logging_configuration_shows_connector_events_to_the_microsecond(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("vllm", "vllm_rbln", "uvicorn", "uvicorn.error", "uvicorn.access", vllm.EC_LOGGER)
    before = {n: (logging.getLogger(n).handlers, logging.getLogger(n).level) for n in names}
    try:
        logging.config.dictConfig(json.loads(json.dumps(launch.logging_config())))
        logging.getLogger(f"{vllm.EC_LOGGER}.ec_connector").debug("pull complete for mm_hash=x")
        logging.getLogger("vllm_rbln.worker").debug("not this")
        logging.getLogger("uvicorn.error").info("Application startup complete.")
    finally:
        for name, (handlers, level) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.level, logger.propagate = handlers, level, True
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    stamp, level_name, *_ = lines[0].split()
    assert len(stamp.partition(".")[2]) == 6
    assert level_name == "DEBUG"
    assert "Application startup complete." in lines[1]
