"""Topology to command lines: the guide's, flag by flag, and exactly the named differences."""

import json
import logging
import logging.config
import os
from pathlib import Path

import msgspec
import pytest

from eccon import config, launch, scaffold
from eccon.launch import connectors, guard, versions, vllm
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
        (launch.pd, {"max_concurrent_pulls": connectors.PULLS, "pull_host": "127.0.0.1"}),
        (
            lambda t, p: launch.encoder(t, p, launch.slots(t)[3]),
            {"producer_cache_ttl_s": connectors.TTL_S, "producer_cache_capacity": connectors.CAPACITY},
        ),
    ):
        before, after = make(plain, PATHS), make(safe, PATHS)
        wanted = flags(before.argv) | {"--host": "127.0.0.1"}
        transfer = wanted["--ec-transfer-config"]
        assert isinstance(transfer, dict)
        transfer["ec_connector_extra_config"] |= extra
        transfer["ec_connector_module_path"] = connectors.RBLN_MODULE
        assert flags(after.argv) == wanted
        assert after.env == before.env | {"VLLM_LOGGING_CONFIG_PATH": "/state/vllm-logging.json"}


def test_the_proxy_gets_every_encoder(guide: config.Topology) -> None:
    spec = launch.proxy(guide, PATHS, ["http://127.0.0.1:19101", "http://127.0.0.1:19102"])
    assert spec.argv[1:] == (
        *("-m", "eccon_proxy", "--host", "0.0.0.0", "--port", "19000"),
        *("--encode-servers-urls", "http://127.0.0.1:19101,http://127.0.0.1:19102"),
        *("--decode-servers-urls", "http://127.0.0.1:19100", "--connector", "RblnECNixlConnector"),
        *("--pd-items", str(connectors.PULLS), "--staged-items", "192", "--staged-age", "225"),
        *("--admin", "unix:/state/admin.sock"),
    )
    assert spec.url == "http://127.0.0.1:19000"


def test_with_the_guides_profile_the_proxy_has_the_guides_flags(guide: config.Topology) -> None:
    spec = launch.proxy(with_profile(guide, "guide"), PATHS, ["http://127.0.0.1:19101"])
    assert spec.argv[3:] == (
        *("--host", "0.0.0.0", "--port", "19000", "--encode-servers-urls", "http://127.0.0.1:19101"),
        *("--decode-servers-urls", "http://127.0.0.1:19100"),
        # Beyond the guide: which connector's rules hold, and where the supervisor asks.
        *("--connector", "RblnECNixlConnector", "--admin", "unix:/state/admin.sock"),
    )
    assert spec.env == {}


def change(topology: config.Topology, text: str) -> config.Topology:
    return config.parse(topology.path.read_text() + text, topology.path)


def test_the_proxy_is_told_what_the_connector_really_got(guide: config.Topology) -> None:
    text = guide.path.read_text().replace(
        "[connector]", "[connector]\npd_extra.max_concurrent_pulls = 40\nextra.producer_cache_ttl_s = 100\n"
    )
    own = "\n[[encoders.override]]\nindex = 2\nconnector_extra = { producer_cache_capacity = 100 }\n"
    spec = launch.proxy(config.parse(text + own, guide.path), PATHS, [])
    words = list(spec.argv)
    got = {w: words[words.index(w) + 1] for w in ("--pd-items", "--staged-items", "--staged-age")}
    assert got == {"--pd-items": "40", "--staged-items": "75", "--staged-age": "75"}


def test_settings_of_the_proxy_become_its_flags(guide: config.Topology) -> None:
    text = (
        "[proxy.settings]\npolicy = 'least_inflight'\nqueue = 7\nencode_timeout = 90.5\n"
        "inline_media = true\nencode_kinds = ['image_url', 'input_image']\nstaged_items = 9\n"
    )
    argv = launch.proxy(change(guide, text), PATHS, []).argv
    assert [*argv[argv.index("--staged-items") :]][:2] == ["--staged-items", "9"]
    assert argv[argv.index("--policy") : -2] == (
        *("--policy", "least_inflight", "--queue", "7", "--encode-timeout", "90.5", "--inline-media"),
        *("--encode-kinds", "image_url,input_image"),
    )


def test_each_process_is_pinned_to_its_cpus(guide: config.Topology) -> None:
    """Unpinned, nine vLLMs take half of all CPUs each."""
    text = guide.path.read_text().replace("[pd]", '[pd]\ncpus = "0-3,8"', 1)
    text = text.replace("[encoders]", '[encoders]\ncpus = ["10-11", "12"]', 1)
    text += "[[encoders.override]]\nindex = 1\ncpus = '20'\n"
    topology = config.parse(text, guide.path)
    encoders = [launch.encoder(topology, PATHS, slot).cpus for slot in launch.slots(topology)]
    assert launch.pd(topology, PATHS).cpus == (0, 1, 2, 3, 8)
    assert encoders[:3] == [(10, 11), (20,), ()]
    with pytest.raises(config.ConfigError, match="cpus"):
        config.parse(text.replace("0-3,8", "0..3"), guide.path)


def test_one_encoder_may_differ(guide: config.Topology) -> None:
    text = (
        "[[encoders.override]]\nindex = 3\ndevice = 21\nport = 19203\nhost = '10.0.0.9'\n"
        "args = ['--seed', '4']\nenv = { A = '2' }\nconnector_extra = { ack_host = '10.0.0.9' }\n"
    )
    base = guide.path.read_text().replace("[encoders]", "[encoders]\nenv = { A = '1', B = '1' }")
    topology = config.parse(base + text, guide.path)
    two, three = (launch.encoder(topology, PATHS, launch.slots(topology)[i]) for i in (2, 3))
    assert (three.device, three.port, three.url) == ("21", 19203, "http://10.0.0.9:19203")
    assert three.argv[-2:] == ("--seed", "4")
    assert three.env["A"] == "2"
    assert three.env["B"] == two.env["A"] == "1"
    transfer = json.loads(three.argv[three.argv.index("--ec-transfer-config") + 1])
    assert transfer["ec_connector_extra_config"]["ack_host"] == "10.0.0.9"
    assert "ack_host" not in " ".join(two.argv)


def test_what_others_start_has_an_address_only(guide: config.Topology) -> None:
    base = guide.path.read_text().replace("[pd] ", "[pd]\nexternal = true\nurl = 'http://10.0.0.5:8100/' #")
    topology = config.parse(
        base + "[[encoders.override]]\nindex = 1\nexternal = true\nurl = 'http://10.0.0.6:8101'\n", guide.path
    )
    pd, one = launch.pd(topology, PATHS), launch.encoder(topology, PATHS, launch.slots(topology)[1])
    assert (pd.external, pd.argv, pd.ports, pd.url) == (True, (), (), "http://10.0.0.5:8100")
    assert (one.host, one.port, one.external) == ("10.0.0.6", 8101, True)
    argv = launch.proxy(topology, PATHS, [one.url]).argv
    assert argv[argv.index("--decode-servers-urls") + 1] == "http://10.0.0.5:8100"


def transfers(topology: config.Topology) -> list[dict[str, object]]:
    specs = [launch.pd(topology, PATHS), launch.encoder(topology, PATHS, launch.slots(topology)[1])]
    return [json.loads(s.argv[s.argv.index("--ec-transfer-config") + 1]) for s in specs]


def with_connector(guide: config.Topology, text: str) -> config.Topology:
    return config.parse(guide.path.read_text().replace("[connector]", "[connector]\n" + text), guide.path)


def test_every_connector_gets_what_it_needs(guide: config.Topology) -> None:
    pd, encoder = transfers(with_connector(guide, "kind = 'ECExampleConnector'"))
    path = {"shared_storage_path": "/state/ec-cache"}
    assert pd == {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": path,
    }
    assert encoder == pd | {"ec_role": "ec_producer"}

    topology = with_connector(guide, "kind = 'ECCPUConnector'\nextra = { ec_cpu_bytes = 1000 }")
    pd, encoder = transfers(topology)
    assert pd["ec_connector_extra_config"] == {"ec_cpu_bytes": 1000, "ec_enable_nixl": True}
    spec = launch.encoder(topology, PATHS, launch.slots(topology)[1])
    assert spec.env["VLLM_EC_SIDE_CHANNEL_PORT"] == "19501"
    assert spec.ports == (19102, 19501)

    topology = with_connector(guide, "kind = 'ECMooncakeConnector'\ntransfer = { ec_buffer_size = 1000 }")
    for side in transfers(topology):
        assert (side["ec_ip"], side["ec_port"], side["ec_buffer_size"]) == ("127.0.0.1", 19500, 1000)
    assert launch.pd(topology, PATHS).ports == (19100, 19500)

    topology = with_connector(guide, "kind = 'Mine'\nmodule_path = 'a.b'\nextra = { x = 1 }")
    assert transfers(topology)[0] == {
        "ec_connector": "Mine",
        "ec_role": "ec_consumer",
        "ec_connector_module_path": "a.b",
        "ec_connector_extra_config": {"x": 1},
    }
    assert "--staged-items" not in launch.proxy(topology, PATHS, []).argv


def test_keys_reach_children_by_environment_never_by_argv(
    guide: config.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    (guide.directory / "key").write_text("s3cret\n")
    text = guide.path.read_text().replace("[model]", "[model]\napi_key_file = 'key'")
    topology = config.parse(text.replace("[proxy]", "[proxy]\napi_key_file = 'key'"), guide.path)
    pd, encoder = launch.pd(topology, PATHS), launch.encoder(topology, PATHS, launch.slots(topology)[0])
    proxy = launch.proxy(topology, PATHS, [])
    assert pd.env["VLLM_API_KEY"] == encoder.env["VLLM_API_KEY"] == "s3cret"
    assert proxy.env["ECCON_PROXY_UPSTREAM_API_KEY"] == "s3cret"
    assert proxy.argv[proxy.argv.index("--api-key-file") + 1] == str(guide.directory / "key")
    assert not any("s3cret" in word for s in (pd, encoder, proxy) for word in s.argv)
    monkeypatch.setenv("VLLM_API_KEY", "inherited")
    assert launch.proxy(guide, PATHS, []).env["ECCON_PROXY_UPSTREAM_API_KEY"] == "inherited"


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


@pytest.mark.parametrize(
    ("version", "file"),
    [("0.30.0+cpu", "vllm-logging.json"), ("0.32.0+cpu", "vllm-logging-named.json")],
)
def test_a_release_that_leaves_its_name_to_the_format_gets_such_a_format(
    guide: config.Topology, tmp_path: Path, version: str, file: str
) -> None:
    command = tmp_path / "venv" / "bin" / "vllm"
    (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / f"vllm-{version}.dist-info").mkdir(
        parents=True
    )
    command.parent.mkdir()
    command.write_text("")
    command.chmod(0o755)
    topology = msgspec.structs.replace(guide, launcher=config.Launcher(vllm=str(command)))
    assert launch.pd(topology, PATHS).env["VLLM_LOGGING_CONFIG_PATH"] == f"/state/{file}"


@pytest.mark.parametrize(
    ("version", "names_records", "refuses"),
    [(None, False, False), ("0.30.0", False, False), ("0.32.0", True, True), ("0.33.1", True, True)],
)
def test_a_release_that_was_not_tried_is_like_the_last_one_before_it(
    version: str | None, names_records: bool, refuses: bool
) -> None:
    known = versions.vllm(version)
    assert (known.names_records, bool(known.trusting)) == (names_records, refuses)


@pytest.mark.parametrize("named", [False, True])
def test_the_logging_configuration_shows_connector_events_to_the_microsecond(
    capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    names = ("vllm", "vllm_rbln", "uvicorn", "uvicorn.error", "uvicorn.access", vllm.EC_LOGGER)
    before = {n: (logging.getLogger(n).handlers, logging.getLogger(n).level) for n in names}
    try:
        logging.config.dictConfig(json.loads(json.dumps(launch.logging_config(named=named))))
        logging.getLogger(f"{vllm.EC_LOGGER}.ec_connector").debug("pull complete for mm_hash=x")
        logging.getLogger("vllm_rbln.worker").debug("not this")
        logging.getLogger("uvicorn.error").info("Application startup complete.")
    finally:
        for name, (handlers, level) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.level, logger.propagate = handlers, level, True
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    # vLLM's records know their process; what else is logged there is not lost.
    assert all(line.startswith(f"(vLLM pid={os.getpid()}) ") == named for line in lines)
    stamp, level_name, *_ = lines[0].partition(") ")[2].split() if named else lines[0].split()
    assert len(stamp.partition(".")[2]) == 6
    assert level_name == "DEBUG"
    assert "Application startup complete." in lines[1]


def guarded(topology: config.Topology, guard: str, **more: object) -> config.Topology:
    connector = msgspec.convert({"guard": guard, **more}, config.Connector)
    return msgspec.structs.replace(with_profile(topology, "safe"), connector=connector)


def test_a_guarded_process_is_told_where_the_guard_is(guide: config.Topology) -> None:
    topology = guarded(guide, "on", guard_wait_s=5)
    for spec, name in (
        (launch.pd(topology, PATHS), "pd"),
        (launch.encoder(topology, PATHS, launch.slots(topology)[3]), "encoder-3"),
    ):
        transfer = flags(spec.argv)["--ec-transfer-config"]
        assert isinstance(transfer, dict)
        assert transfer["ec_connector"] == "EcconGuardConnector"
        assert transfer["ec_connector_module_path"] == "eccon_guard.connector"
        extra = transfer["ec_connector_extra_config"]
        assert {k: v for k, v in extra.items() if k.startswith("guard")} == {
            "guard": "on",
            "guard_wait_s": 5.0,
            "guard_staged_ttl_s": connectors.TTL_S,
            "guard_name": name,
            "guard_events": "/state/guard.sock",
            "guard_directory": "/state/guard",
        }
        first = spec.env["PYTHONPATH"].split(":")[0]
        assert (Path(first) / "eccon_guard" / "connector.py").is_file()
        assert [p.name for p in Path(first).iterdir() if p.name not in {"__init__.py", "__pycache__"}] == [
            "eccon_guard"
        ]


@pytest.mark.parametrize(
    ("settings", "args", "again"),
    [
        ({}, (), True),
        ({"identity": "content", "unsafe_identity": True}, (), False),
        ({"identity": "content", "guard": "on"}, (), True),
        ({"identity": "off", "guard": "on", "unsafe_identity": True}, (), False),
        ({"identity": "content"}, ("--guard", "on"), True),
        ({"guard": "on"}, ("--identity=content",), True),
        ({}, ("--identity=content", "--unsafe-identity"), False),
    ],
)
def test_behind_the_guard_what_is_held_goes_to_a_new_pd(
    guide: config.Topology, settings: dict[str, config.Scalar], args: tuple[str, ...], again: bool
) -> None:
    proxy = msgspec.structs.replace(guide.proxy, settings=settings, args=args)
    assert launch.sends_held_again(msgspec.structs.replace(guide, proxy=proxy)) == again


def test_the_guard_leaves_what_was_on_pythonpath(
    guide: config.Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    topology = guarded(guide, "on")
    assert launch.pd(topology, PATHS).env["PYTHONPATH"].endswith(":/inherited")
    topology = msgspec.structs.replace(topology, env={"PYTHONPATH": "/of-all"})
    assert launch.pd(topology, PATHS).env["PYTHONPATH"].endswith(":/of-all")


@pytest.mark.parametrize(
    ("vllm", "rbln", "wanted"),
    [
        ("0.30.0+cpu", "0.12.0", "auto"),
        ("0.30.0", "0.12.0", "auto"),
        ("0.30.1", "0.12.0", "off"),
        ("0.30.0", "0.11.2", "off"),
        ("0.30.0", "", "off"),
    ],
)
def test_auto_guards_the_proven_versions_only(
    guide: config.Topology, tmp_path: Path, vllm: str, rbln: str, wanted: str
) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").write_text("#!/bin/sh\n")
    (tmp_path / "bin/vllm").chmod(0o755)
    for name, version in (("vllm", vllm), ("vllm_rbln", rbln)):
        if version:
            (site / f"{name}-{version}.dist-info").mkdir(parents=True)
    command = str(tmp_path / "bin/vllm")
    assert guard.mode(guarded(guide, "auto"), command) == wanted
    assert guard.mode(guarded(guide, "off"), command) == "off"
    assert guard.mode(with_profile(guide, "guide"), command) == "off"
    assert guard.mode(guarded(guide, "on", kind="ECExampleConnector"), command) == "off"


def test_the_stand_in_is_guarded_when_asked_only(guide: config.Topology) -> None:
    sim = msgspec.convert({"kind": "sim"}, config.Launcher)
    assert guard.mode(msgspec.structs.replace(guarded(guide, "auto"), launcher=sim), "vllm") == "off"
    assert guard.mode(msgspec.structs.replace(guarded(guide, "on"), launcher=sim), "vllm") == "on"
