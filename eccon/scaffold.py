"""Writes an `eccon.toml`: the guide's topology with every key explained, or the demo's on the stand-in."""

import random
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

__all__ = ["DEMO_MODEL", "demo", "free_ports", "guide", "write"]

DEMO_MODEL = "Qwen3-VL-demo"
SIM_MODEL = Path(__file__).parent / "sim" / "model"

GUIDE = """\
# An eccon cluster. `eccon config check` reads this file, `eccon up` starts it.
# A key that is left out has the value shown in its comment. `eccon config schema` describes every key.

name = "{name}"                  # the cluster; its state lies below ~/.local/state/eccon/NAME

[model]
path = "{model}"  # compiled model directory, as written it goes to `vllm serve`
max_pixels = 802816              # largest image, for PD and encoders alike
# served_name = ""               # another name for clients
# hub = false                    # true: path is a hub name, not a directory
# api_key_file = ""              # file with the key that PD and encoders ask for; they get it as VLLM_API_KEY

[launcher]
# kind = "vllm"                  # "sim": the stand-in that comes with eccon
vllm = "vllm"                    # the vllm command, e.g. "/opt/rbln/bin/vllm"
# profile = "safe"               # "guide": exactly the vendor guide's flags, nothing more

[connector]
# kind = "RblnECNixlConnector"
# host = "127.0.0.1"             # where the PD listens for the encoders
port = 19500
# module_path = ""               # where a connector outside vLLM is loaded from
# extra = {{}}                     # more of ec_connector_extra_config, for both sides
# pd_extra = {{}}                  # … for the PD, as {{ max_concurrent_pulls = 64 }}
# encoder_extra = {{}}             # … for the encoders, as {{ producer_cache_ttl_s = 600 }}
# transfer = {{}}                  # more of --ec-transfer-config itself
# shared_storage_path = ""       # ECExampleConnector's directory; "": one in the state directory
# guard = "auto"                 # the PD survives an encoder's crash; "on", "off", or where it was proven
# guard_wait_s = 3.0             # how long the guarded PD lets a request wait for its items

[devices]
kind = "rbln"                    # "cuda", or "none" on a CPU

[pd]                             # prefill + decode
# host = "127.0.0.1"
port = 19100
devices = [0, 1, 2, 3, 4, 5, 6, 7]
# args = []                      # more arguments of `vllm serve`
# env = {{}}
# vllm = ""                      # another vllm command than the launcher's, of the same version
# cpus = ""                      # pin it: "0-31"; each vLLM takes half of the CPUs that it sees
# external = false               # true: started by others at `url`; watched and used, never signalled
# url = ""

[encoders]
count = 8
# host = "127.0.0.1"
port = 19101                     # the first one's; the others follow
devices = [8, 9, 10, 11, 12, 13, 14, 15]  # one each; more than `count` are spares for `eccon add`
# args = []
# env = {{}}
# vllm = ""
# cpus = []                      # of each in order: ["32-35", "36-39"]

# [[encoders.override]]          # what is different for one encoder
# index = 3                      # encoder-3; also: device, port, host, args, env, vllm, connector_extra,
# host = "10.0.0.9"              # external and url

[proxy]
host = "0.0.0.0"
port = 19000
# api_key_file = ""              # file with the keys, one a line, that clients must send one of
# args = []                      # more arguments of eccon-proxy
# env = {{}}

# [proxy.settings]               # any setting of eccon-proxy
# policy = "least_inflight"

[supervisor]
# start_timeout_s = 1800         # a PD takes minutes to load
# stop_grace_s = 15              # between TERM and KILL
# drain_timeout_s = 20           # how long a restarted encoder's items are waited for
# backoff_s = 1                  # before the second start; doubles up to backoff_max_s
# backoff_max_s = 60
# backoff_reset_s = 300          # a life this long makes the next death the first
# failures = 5                   # deaths in a row until `failed`
# restart_stalled_s = 120        # restart an encoder that is stalled so long; left out: only you do
# probe_interval_s = 1
# probe_timeout_s = 2
# log_bytes = 16777216           # a log file's size before it is rotated
# log_files = 4
# limits = {{}}                  # of every process: files, core_bytes, locked_bytes, memory_bytes, processes

[compile]                        # what `eccon compile` makes model.path with
# source = "Qwen/Qwen3-VL-8B-Instruct"
# devices = 8                    # left out: as many as pd.devices
# visual_devices = 1
# max_seq_len = 32768
# batch_size = 8                 # requests at a time
# decoder_batch_sizes = []       # shapes of a decoding step, as [1, 2, 4, 8]; []: batch_size alone
# visual_max_seq_len = 5440      # shape of the visual encoder, in patches of 16 x 16; or a list of them
# extra = {{}}                     # more options of optimum-rbln
# visual_extra = {{}}

# [env]                          # for every process
# HF_HOME = "/data/hf"
"""

DEMO = """\
# eccon's demo: one PD, {count} encoders and the proxy, on the stand-in for `vllm serve`.
# Every process and every socket is real; the model is not.

name = "{name}"

[model]
path = "{model}"

[launcher]
kind = "sim"

[devices]
kind = "none"

[connector]
port = {connector}

[pd]
port = {pd}

[encoders]
count = {count}
port = {encoder}

[proxy]
host = "127.0.0.1"
port = {proxy}

[supervisor]
stop_grace_s = 5
drain_timeout_s = 10
"""


def guide(directory: Path, *, name: str, model: str) -> Path:
    """Writes `directory/eccon.toml` with the vendor guide's topology: eight encoders, a PD on eight NPUs.

    Raises:
        FileExistsError: the file is there already; it is left as it is.
    """
    return write(directory, GUIDE.format(name=name, model=model))


def demo(directory: Path, *, name: str = "demo", encoders: int = 4, ports: Sequence[int] = ()) -> Path:
    """Writes the demo's `eccon.toml` and its model directory below `directory`.

    Args:
        ports: of proxy, PD, connector and first encoder; the guide's when empty.

    Raises:
        FileExistsError: the file is there already; it is left as it is.
    """
    proxy, pd, connector, encoder = ports or (19000, 19100, 19500, 19101)
    path = write(
        directory,
        DEMO.format(
            name=name,
            model=DEMO_MODEL,
            count=encoders,
            proxy=proxy,
            pd=pd,
            connector=connector,
            encoder=encoder,
        ),
    )
    shutil.copytree(SIM_MODEL, directory / DEMO_MODEL, dirs_exist_ok=True)
    return path


def write(directory: Path, text: str) -> Path:
    """Writes `directory/eccon.toml`.

    Raises:
        FileExistsError: it is there already; it is left as it is.
    """
    path = directory / "eccon.toml"
    with path.open("x", encoding="utf-8") as f:
        f.write(text)
    return path


def free_ports(encoders: int) -> tuple[int, int, int, int]:
    """Free loopback ports for proxy, PD, connector and `encoders` consecutive ones, the first of them last.

    Free at the time of asking: nothing holds them until the processes start. Tried in random order, so that
    two that ask at the same time hardly get the same; below the ephemeral ports, because vLLM binds its port
    long before it listens on it, and the system may give an ephemeral one away meanwhile.
    """
    for base in random.sample(range(10000, 32000, 23), 900):
        held: list[socket.socket] = []
        try:
            for port in range(base, base + 3 + encoders):
                s = socket.socket()
                held.append(s)
                s.bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for s in held:
                s.close()
        return base, base + 1, base + 2, base + 3
    msg = f"no {encoders + 3} free ports in a row between 10000 and 32000"
    raise OSError(msg)
