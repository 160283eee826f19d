"""eccon.toml: what is accepted, and that every fault says file, line, key, value and reason."""

from pathlib import Path

import pytest

from eccon import config, scaffold

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
        if not line.startswith(("# An", "# A key", "# served", "# HF", "# restart_stalled"))
    ).replace("# [env]", "[env]")
    assert config.parse(every, path) == as_written
