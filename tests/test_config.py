"""eccon.toml: what is accepted, and that every fault says file, line, key, value and reason."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from eccon import config, configschema, launch, origin, scaffold, strict
from eccon.clashes import remarks
from eccon.paths import ClusterPaths

MODEL = '[model]\npath = "Qwen"\n[devices]\nkind = "none"\n'


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "config.json").write_text("{}")
    return tmp_path


def fault(directory: Path, text: str) -> str:
    with pytest.raises(config.ConfigError) as e:
        config.parse(text, directory / "eccon.toml")
    return str(e.value).replace(f"{directory}/", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pd]\nprot = 3\n", "eccon.toml:6: pd.prot = 3: unknown key; did you mean port?"),
        ("[pd]\nport = 70000\n", "eccon.toml:6: pd.port = 70000: expected a whole number <= 65535"),
        ("[pd]\nport = 0\n", "eccon.toml:6: pd.port = 0: expected a whole number >= 1"),
        ('[pd]\nport = "abc"\n', 'eccon.toml:6: pd.port = "abc": expected a whole number, got a string'),
        ("[encoders]\ncount = 0\n", "eccon.toml:6: encoders.count = 0: expected a whole number >= 1"),
        (
            "[encoders]\ncount = true\n",
            "eccon.toml:6: encoders.count = true: expected a whole number, got bool",
        ),
        (
            "[encoders]\ncount = 3\n[pd]\nport = 19102\n",
            "eccon.toml:8: pd.port = 19102: lies among the encoders' ports 19101-19103; give each its own",
        ),
        ("[pd]\nport = 19500\n", "eccon.toml: connector.port = 19500: is pd.port too; give each its own"),
        ("[pd]\nport = 019101\n", "eccon.toml:6:9: not TOML: Expected newline or end of document"),
        ("[sleep]\n", "eccon.toml:5: sleep = {}: unknown key"),
        ("[pd]\nargs = [1]\n", "eccon.toml:6: pd.args = [1]: expected a string, got a whole number"),
        (
            '[launcher]\nkind = "simm"\n',
            'eccon.toml:6: launcher.kind = "simm": expected one of vllm, sim; did you mean sim?',
        ),
        ("[pd]\nport = nan\n", "eccon.toml:6: pd.port = nan: expected a whole number, got a number"),
        (
            "[supervisor]\nstop_grace_s = inf\n",
            "eccon.toml:6: supervisor.stop_grace_s = inf: expected a number <= 1",
        ),
        ("[env]\nA = 'x'\nB = 1\n", "eccon.toml:7: env.B = 1: expected a string, got a whole number"),
        ("[pd]\nenv = { A = true }\n", "eccon.toml:6: pd.env.A = true: expected a string, got bool"),
        ('[env]\n"A=B" = "x"\n', 'eccon.toml:6: env.A=B = "x": this cannot be the name of one'),
        ('[env]\nA = "\\u0000"\n', 'eccon.toml:6: env.A = "\\u0000": holds a NUL, which no'),
        ('[pd]\nargs = ["a", "b\\u0000"]\n', 'eccon.toml:6: pd.args = ["a","b\\u0000"]: holds a NUL'),
    ],
)
def test_a_fault_names_line_key_value_and_reason(directory: Path, text: str, message: str) -> None:
    assert fault(directory, MODEL + text).startswith(message)


def test_every_clash_is_named_at_once(directory: Path) -> None:
    text = '[model]\npath = "gone"\n[pd]\ndevices = [1, 1]\n[encoders]\ncount = 2\ndevices = [1]\n'
    lines = fault(directory, text).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        'model.path = "gone"',
        "encoders.devices = [1]",
        "pd.devices = [1,1]",
        "encoders.devices = [1]",
    ]
    assert "no such directory" in lines[0]


def test_an_empty_file_says_how_to_get_a_good_one(directory: Path) -> None:
    assert "eccon init" in fault(directory, "")


def test_a_name_cannot_leave_the_state_directory(directory: Path) -> None:
    assert "name" in fault(directory, 'name = "../x"\n' + MODEL)


def test_bom_and_crlf_are_read(directory: Path) -> None:
    path = directory / "eccon.toml"
    path.write_bytes(b"\xef\xbb\xbf" + MODEL.replace("\n", "\r\n").encode())
    assert config.load(path).model.path == "Qwen"


def test_not_utf8_names_the_line(directory: Path) -> None:
    path = directory / "eccon.toml"
    path.write_bytes(b"# fine\nname = '\xff'\n")
    with pytest.raises(config.ConfigError, match=r"eccon\.toml:2: is not UTF-8"):
        config.load(path)


def test_a_model_path_is_never_a_shell_word(directory: Path) -> None:
    strange = directory / "my $HOME;rm -rf x"
    strange.mkdir()
    (strange / "config.json").write_text("{}")
    text = MODEL.replace('"Qwen"', f'"{strange.name}"')
    assert config.parse(text, directory / "eccon.toml").model.path == strange.name


def test_file_comes_from_option_then_environment_then_here(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.delenv("ECCON_CONFIG", raising=False)
    with pytest.raises(config.ConfigError, match="eccon init"):
        config.find()
    for name in ("eccon.toml", "env.toml", "given.toml"):
        (directory / name).write_text(MODEL)
    assert config.find().name == "eccon.toml"
    monkeypatch.setenv("ECCON_CONFIG", "env.toml")
    assert config.find().name == "env.toml"
    assert config.find("given.toml").name == "given.toml"


def test_what_init_writes_is_good_and_is_the_guides_topology(directory: Path) -> None:
    path = scaffold.guide(directory, name="guide", model="Qwen")
    t = config.load(path)
    assert (t.proxy.host, t.proxy.port, t.pd.port, t.connector.port, t.encoders.port) == (
        *("0.0.0.0", 19000),
        *(19100, 19500, 19101),
    )
    assert t.pd.devices == [*range(8)]
    assert t.encoders.devices == [*range(8, 16)]
    with pytest.raises(FileExistsError):
        scaffold.guide(directory, name="guide", model="Qwen")


def test_every_commented_key_of_the_template_is_the_default(directory: Path) -> None:
    path = scaffold.guide(directory, name="guide", model="Qwen")
    as_written = config.load(path)
    text = path.read_text()
    every = "\n".join(
        line[2:] if line.startswith("# ") and "=" in line.split("#")[1] else line
        for line in text.splitlines()
        if not line.startswith(
            (
                "# An",
                "# A key",
                "# served",
                "# HF",
                "# restart_stalled",
                "# [",
                "# index",
                '# host = "10',
                "# policy",
                "# devices",
            )
        )
    )
    assert config.parse(every, path) == as_written


def test_every_fault_is_named_at_once(directory: Path) -> None:
    text = (
        "[pd]\nprot = 1\nport = 'x'\n[encoders]\ncount = 0\n[[encoders.override]]\nindex = 0\n"
        "[[encoders.override]]\nindx = 1\n"
    )
    assert fault(directory, MODEL + text).splitlines() == [
        "eccon.toml:6: pd.prot = 1: unknown key; did you mean port?",
        'eccon.toml:7: pd.port = "x": expected a whole number, got a string',
        "eccon.toml:9: encoders.count = 0: expected a whole number >= 1",
        "eccon.toml:13: encoders.override[1].indx = 1: unknown key; did you mean index?",
        "eccon.toml:12: encoders.override[1].index: is required",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[connector]\nextra = { producer_cach_ttl_s = 3 }\n",
            "eccon.toml:6: connector.extra.producer_cach_ttl_s = 3: RblnECNixlConnector would ignore it; did",
        ),
        (
            "[connector]\nkind = 'Mine'\n",
            'eccon.toml:6: connector.kind = "Mine": is not known here (RblnECNixlConnector, ECExample',
        ),
        (
            "[proxy.settings]\npolcy = 'x'\n",
            'eccon.toml:6: proxy.settings.polcy = "x": unknown key; did you mean policy?',
        ),
        (
            "[proxy.settings]\npolicy = 'fair'\n",
            'eccon.toml:6: proxy.settings.policy = "fair": expected one of ',
        ),
        ("[proxy.settings]\nport = 3\n", "eccon.toml:6: proxy.settings.port = 3: follows from other keys"),
        ("[proxy.settings]\nadmin_key = 's'\n", "eccon.toml:6: proxy.settings.admin_key: is a secret: use"),
        (
            "[proxy.settings]\nidentity = 'off'\n",
            'eccon.toml:6: proxy.settings.identity = "off": --identity off with RblnECNixlConnector needs',
        ),
        (
            "[pd]\nargs = ['--api-key', 'x']\n",
            'eccon.toml:6: pd.args = "--api-key": a command line is seen by everybody on the host',
        ),
        ("[encoders]\nargs = ['--port=3']\n", 'eccon.toml:6: encoders.args = "--port": set its port here'),
        (
            "[[encoders.override]]\nindex = 0\nport = 19000\n",
            "eccon.toml:7: encoders.override[0].port = 19000: is proxy.port too; give each its own",
        ),
        (
            "[encoders]\ncount = 3\n[[encoders.override]]\nindex = 0\nport = 19103\n",
            "eccon.toml:9: encoders.override[0].port = 19103: is encoder-2's too; give each its own",
        ),
        ("[pd]\nexternal = true\n", "eccon.toml:6: pd.external = true: needs a url"),
        ("[pd]\nurl = 'http://x'\n", 'eccon.toml:6: pd.url = "http://x": is of use only with external'),
        ("[pd]\nurl = 'x:3'\n", 'eccon.toml:6: pd.url = "x:3": expected a URL, as http://10.0.0.5:19100'),
        (
            "[proxy]\napi_key_file = 'no'\n",
            'eccon.toml:6: proxy.api_key_file = "no": cannot be read: No such',
        ),
        ("path = 'x'\n", 'eccon.toml:5: devices.path = "x": unknown key; known here: kind'),
        (
            "[encoders]\noverride = [{ index = 0 }, { index = 0 }]\n",
            "eccon.toml:6: encoders.override[1].index",
        ),
        ("pd = 3\n", "eccon.toml:5: devices.pd = 3: unknown key"),
    ],
)
def test_clashes_name_line_key_value_and_reason(directory: Path, text: str, message: str) -> None:
    assert fault(directory, MODEL + text).startswith(message)


def test_the_proxys_files_are_looked_for_where_it_will_run(directory: Path) -> None:
    path = directory / "eccon.toml"
    path.write_text(MODEL + "[proxy.settings]\nssl_certfile = 'own.pem'\nupstream_ca = 'ca'\n")
    (directory / "own.pem").touch()
    with pytest.raises(config.ConfigError, match="no such file"):
        config.load(path)
    (directory / "ca").mkdir()
    assert config.load(path).proxy.settings["ssl_certfile"] == "own.pem"


def test_an_override_of_an_encoder_that_is_not_there_yet_is_remarked(directory: Path) -> None:
    text = (
        MODEL + "[encoders]\ncount = 2\n[[encoders.override]]\nindex = 1\n[[encoders.override]]\nindex = 7\n"
    )
    (directory / "eccon.toml").write_text(text)
    said = config.read(directory / "eccon.toml")
    (remark,) = remarks(config.check(said), said)
    assert remark.replace(f"{directory}/", "") == (
        "eccon.toml:10: encoders.override[1].index = 7: encoders.count is 2: "
        "it waits for `eccon add` to come to encoder-7"
    )
    command = [sys.executable, "-m", "eccon", "config", "check"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"note: {remark}", f"{directory / 'eccon.toml'}: good"]


def test_a_table_must_be_one(directory: Path) -> None:
    assert fault(directory, "pd = 3\n" + MODEL) == "eccon.toml:1: pd = 3: expected a table of keys"


def test_a_device_is_one_process_even_when_overridden(directory: Path) -> None:
    text = (
        "[model]\npath = 'Qwen'\n[pd]\ndevices = [0]\n[encoders]\ncount = 2\ndevices = [1, 2]\n"
        "[[encoders.override]]\nindex = 1\ndevice = "
    )
    assert fault(directory, text + "1\n").startswith(
        "eccon.toml:10: encoders.override[0].device = 1: device 1"
    )
    assert config.parse(text + "2\n", directory / "eccon.toml").encoders.overridden(1).device == 2


def test_text_in_several_lines_does_not_move_the_lines_after_it(directory: Path) -> None:
    text = 'name = """\n[pd]\nprot = 3"""\n' + MODEL + "[pd]\nprot = 4\n"
    assert "eccon.toml:9: pd.prot = 4" in fault(directory, text)


def environment(root: Path, **versions: str) -> Path:
    """A virtual environment's command, and its packages' metadata."""
    (root / "bin").mkdir(parents=True)
    command = root / "bin" / "vllm"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    for name, version in versions.items():
        (root / "lib" / "python3.12" / "site-packages" / f"{name}-{version}.dist-info").mkdir(parents=True)
    return command


def test_encoders_of_another_version_than_the_pds_are_refused(directory: Path) -> None:
    environment(directory / "new", vllm_rbln="0.12.0", vllm="0.30.0")
    environment(directory / "old", vllm_rbln="0.11.2", vllm="0.24.0")
    text = MODEL + "[launcher]\nvllm = 'new/bin/vllm'\n"
    config.parse(text, directory / "eccon.toml")
    assert fault(directory, text + "[encoders]\nvllm = 'old/bin/vllm'\n") == (
        'eccon.toml:8: encoders.vllm = "old/bin/vllm": encoder-0 runs vllm-rbln 0.11.2, pd runs 0.12.0; '
        "they must be the same"
    )


def test_variables_stand_in_place_of_the_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECCON__PD__PORT", "19200")
    monkeypatch.setenv("ECCON__MODEL__SERVED_NAME", "123")
    monkeypatch.setenv("ECCON__ENV__HF_HOME", "/data")
    monkeypatch.setenv("ECCON__PD__ARGS", '["--seed", "1"]')
    t = config.parse(MODEL, directory / "eccon.toml")
    assert (t.pd.port, t.model.served_name, t.env, t.pd.args) == (
        *(19200, "123", {"HF_HOME": "/data"}),
        ["--seed", "1"],
    )
    monkeypatch.setenv("ECCON__PD__PORT", "many")
    assert (
        fault(directory, MODEL) == 'ECCON__PD__PORT: pd.port = "many": expected a whole number, got a string'
    )
    monkeypatch.setenv("ECCON__PD__PROT", "1")
    assert fault(directory, MODEL) == "ECCON__PD__PROT: pd.prot: unknown key; did you mean port?"


def test_what_is_shown_says_where_it_comes_from(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECCON__PD__PORT", "19200")
    path = directory / "eccon.toml"
    path.write_text(
        MODEL + "[env]\nHF_TOKEN = 'hidden'\n[[encoders.override]]\nindex = 0\nenv = { A = '1' }\n"
        "[proxy.settings]\nqueue = 3\n"
    )
    text = config.read(path)
    topology = config.check(text)
    lines = [re.sub(r" +#", " #", line) for line in origin.lines(topology, text)]
    assert {
        f'path = "Qwen" # {path}:2',
        "port = 19200 # ECCON__PD__PORT",
        "port = 19101 # default",
        f'HF_TOKEN = "***" # {path}:6',
        f"queue = 3 # {path}:11",
        "# restart_stalled_s is not set # default",
    } <= set(lines)
    monkeypatch.delenv("ECCON__PD__PORT")
    path.write_text("\n".join(lines))
    again = config.load(path)
    assert msgspec.structs.replace(again, env=topology.env) == topology


def schema_faults(schema: dict[str, Any], kind: type[msgspec.Struct], name: str) -> Iterator[str]:
    known = schema["properties"]
    for field, hint in strict.fields(kind).items():
        if field not in known:
            yield f"{name}.{field} is not in the schema"
        inner = get_args(hint)[0] if get_origin(hint) is list else hint
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from schema_faults(configschema.schema()["$defs"][inner.__name__], inner, inner.__name__)


def test_the_schema_says_what_the_check_knows() -> None:
    schema = configschema.schema()
    assert schema["required"] == ["model"]
    assert schema["additionalProperties"] is False
    assert list(schema_faults(schema, config.ClusterFile, "")) == []
    settings = schema["$defs"]["Proxy"]["properties"]["settings"]
    assert settings["properties"]["policy"]["enum"]
    assert "admin_key" not in settings["properties"]
    assert "port" not in settings["properties"]
    assert schema["$defs"]["Connector"]["properties"]["host"]["description"].startswith("Where the PD")
    json.dumps(schema)


def test_config_commands(directory: Path) -> None:
    (directory / "eccon.toml").write_text(MODEL + "[env]\nHF_TOKEN = 'hidden'\n")

    def run(*argv: str) -> str:
        command = [sys.executable, "-m", "eccon", "config", *argv]
        env = {k: v for k, v in os.environ.items() if not k.startswith("ECCON")}
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=True)
        return done.stdout

    assert json.loads(run("schema"))["title"] == "eccon.toml"
    rows = {row["key"]: row for row in json.loads(run("show", "--json"))}
    assert rows["env.HF_TOKEN"]["value"] == "***"
    assert rows["pd.port"] == {"key": "pd.port", "value": 19100, "origin": "default"}
    commands = json.loads(run("show", "--commands", "--json"))
    assert [c["name"] for c in commands] == ["pd", "encoder-0", "proxy"]
    assert "hidden" not in run("show", "--commands")


VALUES = [
    "3",
    "-1",
    "true",
    '"x"',
    "[]",
    "{}",
    "[{}]",
    "[[1]]",
    "1.5",
    "1979-05-27",
    "inf",
    "nan",
    '""',
    "0x10",
]
LINES = [
    "[[pd]]",
    "[pd]",
    "[encoders.override]",
    "[a.b]",
    '"q" = 2',
    "pd.port = 3",
    "env = 3",
    "override = [1]",
]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_written_is_read_or_refused_with_its_line(directory: Path, seed: int) -> None:
    draw = random.Random(seed)
    text = scaffold.guide(directory, name="g", model="Qwen").read_text()
    plain = re.sub(r"(?m)^# (?=[\w.]+ = |\[)", "", text).splitlines()
    said: list[str] = []
    for _ in range(100):
        lines = plain.copy()
        for _ in range(draw.randint(1, 3)):
            i = draw.randrange(len(lines))
            key = lines[i].partition("=")[0]
            kind = draw.random()
            if "=" in lines[i] and kind < 0.6:
                lines[i] = f"{key}= {draw.choice(VALUES)}"
            elif kind < 0.8:
                lines[i] = "".join(draw.choices("[]{}\"'=#.,ab1 \\", k=8))
            else:
                lines.insert(i, draw.choice(LINES))
        try:
            topology = config.parse("\n".join(lines), directory / "eccon.toml")
            launch.everything(topology, ClusterPaths(directory, directory))
        except config.ConfigError as e:
            said += str(e).splitlines()
    assert len(said) > 50
    assert [line for line in said if not line.startswith(str(directory))] == []


def test_a_time_ends(directory: Path) -> None:
    text = MODEL + "[supervisor]\nstop_grace_s = inf\n"
    assert fault(directory, text).startswith("eccon.toml:6: supervisor.stop_grace_s = ")


def test_a_cluster_is_found_by_its_name_though_its_file_is_broken(directory: Path) -> None:
    path = directory / "eccon.toml"
    path.write_text('name = "mine"\n[model\nname = "not"\n')
    assert config.cluster_name(path) == "mine"
    path.write_text('[model\nname = "not"\n')
    assert config.cluster_name(path) == "eccon"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(config.ConfigError, match="is not UTF-8"):
        config.cluster_name(path)
