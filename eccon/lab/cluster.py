"""How vLLM is run in a lab: variables, flags, and the `eccon.toml` with them."""

import json
from collections.abc import Sequence

from eccon.lab.place import MODEL, Place
from eccon.lab.standins import NIXL_DELAY

__all__ = ["ENCODERS", "FLAGS", "MODULE_PATH", "ONE_ENGINE", "PORTS", "config", "environment"]

ENCODERS = 2
"""As many as two cores bear beside a PD."""
PORTS = (20000, 20100, 20500, 20101)
"""Of proxy, PD, connector and first encoder."""
MODULE_PATH = "vllm_rbln.distributed.ec_transfer.ec_connector.rbln_ec_nixl_connector"
"""Where vLLM finds RblnECNixlConnector: its plugin, which would register it, wants an NPU."""
ONE_ENGINE = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""The worker runs in EngineCore, as with vllm-rbln. vLLM on CPU would give it a process of its own, for the
sake of OpenMP, which has one thread here: a start would take 52 s of CPU in place of 35, and the server
1.5 GB in place of 1.0 (measured with vLLM 0.32). The short name `uni` is not heeded there."""
FLAGS = (
    *ONE_ENGINE,
    *("--enforce-eager", "--dtype", "float16", "--max-model-len", "4096", "--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", "512", "--limit-mm-per-prompt", '{"image":8,"video":0}'),
)
"""Of PD and encoders: no compilation, and what fits into a gigabyte of KV space."""


def environment(place: Place) -> dict[str, str]:
    """Variables of every vLLM of the lab: CPU, no plugin, no network, one thread each, NIXL without a GPU."""
    return {
        "VLLM_PLUGINS": "",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,shm,self",
        NIXL_DELAY: "1000",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(place.root / "hf"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(place.root / "vllm-cache"),
    }


def config(place: Place, *, name: str = "lab", encoders: int = ENCODERS, ports: Sequence[int] = PORTS) -> str:
    """`eccon.toml` of a PD and encoders on this lab.

    Args:
        ports: of proxy, PD, connector and first encoder.
    """
    proxy, pd, connector, encoder = ports
    args = json.dumps(list(FLAGS))
    variables = "\n".join(f"{key} = {json.dumps(value)}" for key, value in environment(place).items())
    return f"""\
# eccon's lab: real vllm serve, real connector, real NIXL, on CPUs, with a model of a million random weights.
# Written by eccon; `eccon lab` says what of it is real.

name = "{name}"

[model]
path = {json.dumps(str(place.model))}
served_name = "{MODEL}"

[launcher]
vllm = {json.dumps(str(place.vllm))}

[devices]
kind = "none"

[connector]
kind = "RblnECNixlConnector"  # or vLLM's own, over a shared directory: "ECExampleConnector"
port = {connector}

[pd]
port = {pd}
args = {args}

[encoders]
count = {encoders}
port = {encoder}
args = {args}

[proxy]
host = "127.0.0.1"
port = {proxy}

[env]
{variables}
"""
