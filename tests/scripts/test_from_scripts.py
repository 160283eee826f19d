"""Launch scripts of the guide's kind, in several hands' ways of writing them, as an eccon.toml."""

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eccon import config, launch
from eccon.paths import ClusterPaths
from eccon.scripts.lexer import ScriptError
from eccon.scripts.reader import Command, read
from eccon.scripts.topology import toml

PATHS = ClusterPaths(Path("/state"), Path("/state"))

PD = r"""#!/bin/bash
# The language model.
MODEL="${1:-Qwen3-VL-8B-Instruct}"; HTTP="${2:-19100}"
: "${PULL_PORT:=19500}"
NPUS="${NPUS:-0,1,2,3,4,5,6,7}"
export RBLN_DEVICES="$NPUS"
exec vllm serve "$MODEL" --port "$HTTP" \
    --mm-processor-kwargs '{"max_pixels": 802816}' \
    --ec-transfer-config "{\"ec_connector\": \"RblnECNixlConnector\", \"ec_role\": \"ec_consumer\",
        \"ec_connector_extra_config\": {\"pull_host\": \"0.0.0.0\", \"pull_port\": $PULL_PORT}}"
"""

ENCODERS = r"""#!/bin/bash
MODEL=${1:-Qwen3-VL-8B-Instruct}
FIRST_PORT=${FIRST_PORT:-19101}
FIRST_NPU=${FIRST_NPU:-8}
N=${N:-8}
if [ -n "$NPU_LIST" ]; then
    IFS=',' read -ra NPUS <<< "$NPU_LIST"
    N="${#NPUS[@]}"
else
    NPUS=()
    for k in $(seq 0 $((N - 1))); do NPUS+=($((FIRST_NPU + k))); done
fi
start_one() {
    local which=$1
    local npu=${NPUS[$which]}
    echo "encoder $which on $npu (port $((FIRST_PORT + which)))"
    RBLN_DEVICES=$npu vllm serve "$MODEL" --port "$((FIRST_PORT + which))" \
        --mm-processor-kwargs '{"max_pixels": 802816}' --ec-transfer-config "{
            \"ec_connector\": \"RblnECNixlConnector\",
            \"ec_role\": \"ec_producer\",
            \"ec_connector_extra_config\": {
                \"llm_host\": \"${LLM_HOST:-127.0.0.1}\",
                \"llm_pull_port\": ${PULL_PORT:-19500}
            }
        }" > "enc-$which.log" 2>&1 &
}
for k in $(seq 0 $((N - 1))); do
    start_one "$k"
done
trap 'kill $(jobs -p)' INT TERM
wait
"""

PROXY = """\
python client_ec_disaggregated.py --host 0.0.0.0 --port 19000 \\
  --encode-servers-urls "http://127.0.0.1:19101,http://127.0.0.1:19102" \\
  --decode-servers-urls "http://127.0.0.1:19100"
"""


def write(directory: Path, **scripts: str) -> None:
    for name, text in scripts.items():
        (directory / f"{name}.sh").write_text(text)
    model = directory / "Qwen3-VL-8B-Instruct"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")


def commands(directory: Path, environment: dict[str, str] | None = None) -> list[Command]:
    return [c for f in sorted(directory.glob("*.sh")) for c in read(f, environment or {})[0]]


def topology(directory: Path, environment: dict[str, str] | None = None) -> tuple[config.Topology, list[str]]:
    found = toml(commands(directory, environment), name="read")
    return config.parse(found.text, directory / "eccon.toml"), list(found.notes)


def flags(argv: tuple[str, ...]) -> list[Any]:
    words = list(argv[argv.index("serve") :])
    return [json.loads(w) if w.startswith("{") else w for w in words]


def test_with_the_guides_profile_it_starts_what_the_scripts_start(tmp_path: Path) -> None:
    write(tmp_path, pd=PD, encoders=ENCODERS)
    started = [c for c in commands(tmp_path) if "serve" in c.argv]
    text = toml(started, name="read").text.replace("# profile", "profile")
    t = config.parse(text, tmp_path / "eccon.toml")
    specs = [launch.encoder(t, PATHS, slot) for slot in launch.slots(t)] + [launch.pd(t, PATHS)]
    assert len(started) == 9
    assert [(flags(s.argv), s.env) for s in specs] == [(flags(c.argv), c.env) for c in started]


def test_variables_are_the_callers(tmp_path: Path) -> None:
    write(tmp_path, pd=PD, encoders=ENCODERS, proxy=PROXY)
    t, notes = topology(tmp_path, {"N": "2", "FIRST_NPU": "20", "PULL_PORT": "19600", "NPUS": "0,1"})
    assert (t.encoders.count, t.encoders.devices, t.connector.port, t.pd.devices) == (
        2,
        [20, 21],
        19600,
        [0, 1],
    )
    assert (t.proxy.host, t.proxy.port, notes) == ("0.0.0.0", 19000, [])
    t, notes = topology(tmp_path, {"NPU_LIST": "9,11,13", "LLM_HOST": "10.0.0.1"})
    assert (t.encoders.count, t.encoders.devices, t.connector.host) == (3, [9, 11, 13], "10.0.0.1")
    assert notes == [
        "the proxy's encoders and those started differ in ports [19103]; those started are taken"
    ]


def transfer_config(role: str, **extra: object) -> str:
    return json.dumps(
        {"ec_connector": "RblnECNixlConnector", "ec_role": f"ec_{role}", "ec_connector_extra_config": extra}
    )


LOOPS = {
    "seq": "for i in $(seq 0 2); do {body} done",
    "braces": "for i in {{0..2}}; do\n{body}\ndone",
    "words": "for i in 0 1 2\ndo {body} done",
    "c": "for ((i=0; i<3; i++)); do {body} done",
    "while": "i=0; while [ $i -lt 3 ]; do {body} i=$((i+1)); done",
    "until": "let_go=0; i=0; until (( i >= 3 )); do {body} (( i++ )); done",
    "array": 'A=(0 1 2)\nfor i in "${{A[@]}}"; do {body} done',
}


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_of_every_kind(tmp_path: Path, loop: str) -> None:
    model, transfer = "Qwen3-VL-8B-Instruct", "--ec-transfer-config"
    encoder = transfer_config("producer", llm_pull_port=19500)
    body = (
        f"RBLN_DEVICES=$((8 + i)) nohup vllm serve {model} --port $((19101 + i)) {transfer} '{encoder}' &\n"
    )
    pd = (
        "until curl -sf http://127.0.0.1:1/health > /dev/null; do sleep 2; done\n"
        f"RBLN_VISIBLE_DEVICES=0,1 vllm serve {model} --port=19100 "
        f"{transfer}='{transfer_config('consumer', pull_port=19500)}' &\n"
    )
    write(tmp_path, all=pd + LOOPS[loop].replace("{{", "{").replace("}}", "}").replace("{body}", body))
    t, notes = topology(tmp_path)
    assert (t.encoders.count, t.encoders.port, t.encoders.devices) == (3, 19101, [8, 9, 10])
    assert (t.pd.port, t.pd.devices) == (19100, [0, 1])
    assert [n.partition(":")[0] for n in notes] == ["no proxy was found", "no max_pixels is set"]


def test_what_one_encoder_differs_in_is_an_override(tmp_path: Path) -> None:
    serve = "vllm serve Qwen3-VL-8B-Instruct --mm-processor-kwargs '{\"max_pixels\": 100}' --seed 3"

    def line(start: str, flags: str, transfer: str) -> str:
        return f"{start} {serve} {flags} --ec-transfer-config '{transfer}' &\n"

    text = "export HF_HOME=/data\n"
    text += line("RBLN_DEVICES=0", "--port 8100", transfer_config("consumer", pull_port=5, ack_queue_max=9))
    text += line("A=1 RBLN_DEVICES=1", "--port 8101", transfer_config("producer", llm_pull_port=5))
    text += line(
        "RBLN_DEVICES=5",
        "--port 8200 --enforce-eager",
        transfer_config("producer", llm_pull_port=5, ack_host="h"),
    )
    write(tmp_path, all=text)
    t, _ = topology(tmp_path)
    assert t.env == {"HF_HOME": "/data"}
    assert t.connector.pd_extra == {"ack_queue_max": 9}
    assert t.pd.args == ["--seed", "3"]
    zero, one = t.encoders.overridden(0), t.encoders.overridden(1)
    assert (zero.env, zero.args) == ({"A": "1"}, ["--seed", "3"])
    assert (one.port, one.connector_extra) == (8200, {"ack_host": "h"})
    assert one.args == ["--seed", "3", "--enforce-eager"]
    assert t.encoders.devices == [1, 5]


def test_the_same_command_and_script_count_once(tmp_path: Path) -> None:
    write(tmp_path, a_pd=PD, b_loop=ENCODERS, c_both=PD.replace("exec ", "") + ENCODERS)
    found = toml(commands(tmp_path), name="t")
    assert "count = 8" in found.text
    assert "override" not in found.text
    again = [n for n in found.notes if "it counts once" in n]
    assert len(again) == 9
    assert again[0] == "c_both.sh:7: port 19100 again, the same as a_pd.sh:7: it counts once"


def test_differences_that_break_silently_are_told(tmp_path: Path) -> None:
    write(tmp_path, pd=PD.replace("802816", "400000"), encoders=ENCODERS.replace("Qwen3", "./Qwen3"))
    _, notes = topology(tmp_path, {"N": "1", "LLM_HOST": "h"})
    assert notes[0].startswith("max_pixels differs: 400000 (pd.sh:7), 802816 (encoders.sh:17)")
    assert notes[1].startswith("model differs: Qwen3-VL-8B-Instruct (pd.sh:7), ./Qwen3-VL-8B-Instruct (")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "no `vllm serve` of the PD"),
        (PD, "no `vllm serve` of an encoder"),
        (PD + "\n" + PD.replace("19100", "19200") + ENCODERS, "2 PDs are started"),
        (PD + "\n" + PD.replace("802816", "401408") + ENCODERS, "two different servers on port 19100"),
        (PD.replace("19100", "$PORTS") + ENCODERS, r"all.sh:7: --port is '': no port"),
        ('echo "never\nclosed', 'line 1: the quote " is never closed'),
        ("for i in 1; do echo", "expected 'done'"),
    ],
)
def test_what_cannot_be_one_cluster_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, all=text)
    with pytest.raises(ScriptError, match=message):
        topology(tmp_path)


def test_nothing_is_run(tmp_path: Path) -> None:
    write(
        tmp_path, evil="A=$(touch here)\n`touch there`\ntouch \"$PWD/$A\"\neval 'touch eval'\n. ./evil.sh\n"
    )
    found, guessed = read(tmp_path / "evil.sh", {})
    assert guessed == {"touch here", "touch there"}
    assert {c.argv[0] for c in found} == {"touch", "eval"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Qwen3-VL-8B-Instruct", "evil.sh"]


def test_a_loop_without_end_ends(tmp_path: Path) -> None:
    write(tmp_path, loop="while true; do sleep 1; done\ni=0; while [ $i -lt 1 ]; do :; done\necho end\n")
    assert read(tmp_path / "loop.sh", {})[0][-1].argv == ("echo", "end")


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path, pd=PD, encoders=ENCODERS, proxy=PROXY)

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "eccon", *argv]
        env = {k: v for k, v in os.environ.items() if not k.startswith("ECCON")} | {"N": "2"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    done = run("init", "--from-scripts", ".")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/eccon.toml\n")
    assert run("config", "check").returncode == 0
    again = run("init", "--from-scripts", "pd.sh", "--from-scripts", "encoders.sh")
    assert (again.returncode, "left as it is" in again.stderr) == (2, True)
    assert run("init", "--from-scripts", "proxy.sh", "there").returncode == 2
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_written_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    write(tmp_path)
    for _ in range(100):
        text = draw.choice([PD, ENCODERS, PROXY])
        for _ in range(draw.randint(1, 4)):
            i = draw.randrange(len(text))
            noise = "".join(draw.choices("(){}[]\"'`$;|&<>\\\n #=azdo0", k=draw.randint(0, 4)))
            text = text[:i] + noise + text[i + draw.randint(0, 6) :]
        (tmp_path / "x.sh").write_text(text)
        with contextlib.suppress(ScriptError):
            toml(commands(tmp_path), name="x")
