"""The command line of `vllm serve`: the flags that deployments use, read the way vLLM reads them.

A flag may be written with `-` or `_`, a JSON flag also as `--flag.key value`. An unknown flag is an error, as
with vLLM; a known one that has no meaning here is read and left alone.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from eccon.sim.release import release

__all__ = ["CONNECTOR", "GUARDED", "FlagError", "Serve", "Transfer", "parse"]

CONNECTOR = "RblnECNixlConnector"
GUARDED = "EcconGuardConnector"
TRUST = "--trust-request-mm-kwargs"


class FlagError(Exception):
    """The command line cannot be used; the message is complete."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """`--ec-transfer-config`. Keys of `extra` that the connector does not know are ignored, as it does."""

    ec_connector: str | None = None
    ec_role: str | None = None
    ec_connector_extra_config: dict[str, Any] = {}
    ec_connector_module_path: str | None = None
    engine_id: str | None = None


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """What `vllm serve` was told."""

    model: str
    served_names: tuple[str, ...]
    host: str | None
    port: int
    role: str
    """ "producer", "consumer", or "none": a plain server that does it all."""
    extra: dict[str, Any]
    """The connector's extra configuration."""
    guarded: bool
    """Whether it is the guarded connector."""
    mm_processor_kwargs: dict[str, Any]
    limit_mm: dict[str, int]
    max_model_len: int | None
    max_num_seqs: int | None
    api_keys: tuple[str, ...]
    request_id_headers: bool
    server_load: bool
    processor_cache_gb: float
    access_log: bool
    uvicorn_log_level: str
    trusts_requests: bool
    """Whether requests may bring `mm_processor_kwargs` and `media_io_kwargs`."""
    non_default: dict[str, Any]
    """Flags as given, for the banner's `non-default args`."""


# Flags with one value (or several) that change nothing here.
_VALUED = """
    --allowed-local-media-path --block-size --chat-template --chat-template-content-format --config
    --cpu-offload-gb --data-parallel-size --device --disable-log-stats-interval --download-dir --dtype
    --encoder-cache-size --generation-config --gpu-memory-utilization --guided-decoding-backend
    --hf-overrides --hf-token --interleave-mm-strings --kv-cache-dtype --kv-cache-memory-bytes
    --kv-transfer-config --load-format --log-config-file --logits-processors
    --long-prefill-token-threshold --max-log-len --max-logprobs --max-num-batched-tokens
    --max-num-partial-prefills --media-io-kwargs --mm-encoder-attn-backend --mm-encoder-tp-mode
    --mm-processor-cache-type --model-impl --num-gpu-blocks-override --optimization-level -O
    --override-generation-config --pipeline-parallel-size -pp --quantization -q --reasoning-parser
    --revision --root-path --runner --scheduling-policy --seed --ssl-ca-certs --ssl-certfile
    --ssl-keyfile --swap-space --tensor-parallel-size -tp --tokenizer --tokenizer-mode
    --tokenizer-revision --tool-call-parser --additional-config --compilation-config
    --speculative-config --shutdown-timeout --task --convert --prefix-caching-hash-algo
    --limit-concurrency --sse-keep-alive-interval
""".split()  # noqa: SIM905  a list to be read
_SWITCHES = """
    --async-scheduling --disable-fastapi-docs --disable-frontend-multiprocessing --disable-log-requests
    --disable-log-stats --enable-auto-tool-choice --enable-chunked-prefill --enable-expert-parallel
    --enable-log-outputs --enable-log-requests --enable-lora --enable-mm-embeds --enable-prefix-caching
    --enable-prompt-tokens-details --enable-sleep-mode --enable-tokenizer-info-endpoint --enforce-eager
    --language-model-only --mm-encoder-only --no-async-scheduling --no-enable-chunked-prefill
    --no-enable-prefix-caching --skip-mm-profiling --skip-tokenizer-init --trust-remote-code
    --use-tqdm-on-load --no-use-tqdm-on-load
""".split()  # noqa: SIM905  a list to be read
_JSON = ("--mm-processor-kwargs", "--ec-transfer-config", "--limit-mm-per-prompt")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        msg = f"{self.format_usage()}vllm serve: error: {message}"
        raise FlagError(msg)


def _parser() -> _Parser:
    p = _Parser(
        prog="vllm serve", usage="vllm serve [model_tag] [options]", allow_abbrev=False, add_help=True
    )
    p.add_argument("model_tag", nargs="?")
    p.add_argument("--model")
    p.add_argument("--served-model-name", nargs="+")
    p.add_argument("--host")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--uds")
    p.add_argument("--max-model-len")
    p.add_argument("--max-num-seqs", type=int)
    p.add_argument("--api-key", nargs="*")
    p.add_argument("--mm-processor-cache-gb", type=float, default=4.0)
    p.add_argument("--enable-request-id-headers", action="store_true")
    p.add_argument("--enable-server-load-tracking", action="store_true")
    p.add_argument("--disable-uvicorn-access-log", action="store_true")
    p.add_argument(
        "--uvicorn-log-level",
        default="info",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    for flag in _JSON:
        p.add_argument(flag, type=str)
    for flag in _VALUED:
        p.add_argument(flag, nargs="+")
    for flag in _SWITCHES:
        p.add_argument(flag, action="store_true")
    if not release().trusts_requests:
        p.add_argument(TRUST, action="store_true")
    return p


def _normal(argv: Sequence[str]) -> list[str]:
    """`--a_b=c` as `--a-b=c`, and `--flag.key value` gathered into one JSON value."""
    out: list[str] = []
    dotted: dict[str, dict[str, Any]] = {}
    items = iter(argv)
    for item in items:
        if not item.startswith("--"):
            out.append(item)
            continue
        name, eq, value = item.partition("=")
        head, dot, path = name.partition(".")
        head = head.replace("_", "-")
        if not dot:
            out.append(head + eq + value)
            continue
        text = value if eq else next(items, "")
        target = dotted.setdefault(head, {})
        *parents, last = path.split(".")
        for key in parents:
            target = target.setdefault(key, {})
        try:
            target[last] = json.loads(text)
        except ValueError:
            target[last] = text
    for head, values in dotted.items():
        out += [head, json.dumps(values)]
    return out


def _json(text: str | None, flag: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        msg = f"vllm serve: error: argument {flag}: Value {text} cannot be converted to <function loads>."
        raise FlagError(msg)
    return value


def _transfer(text: str | None) -> tuple[str, dict[str, Any], bool]:
    if text is None:
        return "none", {}, False
    try:
        t = msgspec.convert(_json(text, "--ec-transfer-config"), Transfer)
    except msgspec.ValidationError as e:
        msg = f"vllm serve: error: argument --ec-transfer-config: {e}"
        raise FlagError(msg) from e
    roles = {"ec_producer": "producer", "ec_consumer": "consumer"}
    if t.ec_connector is None:
        msg = "ValueError: Please specify ec_connector when ec_role is set"
        raise FlagError(msg)
    if t.ec_role not in roles:
        msg = f"ValueError: Unsupported ec_role: {t.ec_role}. Supported roles are ec_producer and ec_consumer"
        raise FlagError(msg)
    if t.ec_connector not in {CONNECTOR, GUARDED}:
        msg = f"ValueError: Unsupported connector type: {t.ec_connector} (the stand-in has {CONNECTOR} only)"
        raise FlagError(msg)
    return roles[t.ec_role], t.ec_connector_extra_config, t.ec_connector == GUARDED


def parse(argv: Sequence[str]) -> Serve:
    """Read the flags after `serve`.

    Raises:
        FlagError: vLLM would refuse them too, or they ask for something that only vLLM itself has.
    """
    args = _parser().parse_args(_normal(argv))
    model = args.model_tag or args.model
    if not model:
        msg = "vllm serve: error: the following arguments are required: model_tag"
        raise FlagError(msg)
    if args.uds:
        msg = "vllm serve: error: --uds: the stand-in listens on TCP only"
        raise FlagError(msg)
    role, extra, guarded = _transfer(args.ec_transfer_config)
    limits = _json(args.limit_mm_per_prompt, "--limit-mm-per-prompt")
    given = {k: v for k, v in vars(args).items() if v not in (None, False)}
    shown = {k: "***" if k in {"api_key", "hf_token"} else v for k, v in given.items()}
    return Serve(
        model=model,
        served_names=tuple(args.served_model_name or [model]),
        host=args.host,
        port=args.port,
        role=role,
        extra=extra,
        guarded=guarded,
        mm_processor_kwargs=_json(args.mm_processor_kwargs, "--mm-processor-kwargs"),
        limit_mm={k: int(v["count"] if isinstance(v, dict) else v) for k, v in limits.items()},
        max_model_len=_length(args.max_model_len),
        max_num_seqs=args.max_num_seqs,
        api_keys=tuple(k for k in args.api_key or [] if k),
        request_id_headers=args.enable_request_id_headers,
        server_load=args.enable_server_load_tracking,
        processor_cache_gb=args.mm_processor_cache_gb,
        access_log=not args.disable_uvicorn_access_log,
        uvicorn_log_level=args.uvicorn_log_level,
        trusts_requests=release().trusts_requests or args.trust_request_mm_kwargs,
        non_default=shown,
    )


def _length(text: str | None) -> int | None:
    """`--max-model-len`: a number, or with a suffix (32k = 32000, 32K = 32768)."""
    if text is None or text in {"auto", "-1"}:
        return None
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}.get(text[-1:], 1)
    try:
        return int(float(text[:-1] if factor > 1 else text) * factor)
    except ValueError as e:
        msg = f"vllm serve: error: argument --max-model-len: invalid value: {text!r}"
        raise FlagError(msg) from e
