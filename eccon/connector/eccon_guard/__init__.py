"""A guard around vllm-rbln's RblnECNixlConnector: one lost item fails one request, not the engine.

Runs inside `vllm serve`, on both sides. Proven with vLLM 0.30.0 and vllm-rbln 0.12.0 on a CPU host, with the
vendor's NPU allocator stood in; the level `wrap` on a PD with vllm-rbln's scheduler over vLLM's CPU runner.
Not run: the vendor's model runner and worker, NPU memory from a second thread, its scheduler on an encoder,
its prefix caching, `n > 1`, LoRA, priorities.

settings   the extra configuration's `guard_*` keys
check      which level is possible here: gate, wrap, hooks, vendor
connector  what vLLM loads; `scheduling` and the two workers behind it
scheduling the engine's side: gate, safety net, proof of delivery
consumer   the PD's worker: finished tensors only, no NIXL call on the engine's thread
puller     the PD's thread: agents, pulls, CRC, acknowledgements (`pull` is one of them, `store` what it made)
producer   the encoder's worker: publish, publish again, wait for the acknowledgement
link       the encoder's thread: the way to the PD, and whether it is open
channel    notes from worker to scheduler (`notes`), two processes or one
events     what is told to the outside
"""

__all__ = ["VERSION"]

VERSION = 1
