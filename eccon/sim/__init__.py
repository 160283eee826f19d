"""A stand-in for `vllm serve` with vllm-rbln 0.12's `RblnECNixlConnector`: flags, wire, failures.

`python -m eccon.sim serve MODEL …` starts an API server and, as its child, `VLLM::EngineCore`. The encoder
decodes an image and puts what it saw into a tensor in its own memory; the PD hears of it over the
connector's ZMQ messages, fetches the bytes by address, and says in its answer what they say. It never opens
an image itself. It does as vLLM 0.30.0, or as `ECCON_SIM_VLLM` says (`release`). Speed is set by other
`ECCON_SIM_*` (`tunables`), faults by `ECCON_SIM_FAULT` (`faults`). It imports nothing else of eccon.

Known differences from the real thing, each with its reason:

- No model. A text answer repeats the prompt's last words; log-probabilities are a function of the token's
  text; the number of text tokens is a guess by length. The contract is about shapes and media, not about
  language.
- A PD does not open images, so it does not refuse a broken one (the real API server does, with 400), counts
  an image's tokens only once its tensor is there, and does not notice that encoder and PD were given
  different `max_pixels`. That keeps it from answering out of its own request.
- The name of an item (`mm_hash`) is a SHA-256 over the same things as vLLM's BLAKE3, so the digits differ.
- Schedulers are a blend: on both sides items outlive their requests as in vLLM's own scheduler (which is
  how a stale address can be used at all); items of waiting requests are pulled as well, one prefill a step,
  as in vllm-rbln's. `ECCON_SIM_CACHE_TOKENS=0` gives vllm-rbln's cache: nothing outlives its request.
- An encoder's step is one request; vLLM on CPU may batch several.
- NIXL is a TCP connection to the encoder's engine, one for each pull. Its address, a key and the registered
  regions are in `agent_metadata`, whose real content is opaque. Re-registering an agent does not break a
  pull in flight.
- The connector's worker half runs in EngineCore, as on RBLN and in the lab; vLLM on CPU has a `VLLM::Worker`
  between unless told otherwise, with its own log prefix. There is no `resource_tracker` process either.
- Line numbers in log lines are ours. Start-up lines are the milestones, not all of them; the banner's
  drawing, Triton's and transformers' warnings are left out, and the ten-second throughput line as well.
- Validation errors of a message that fits no schema name one problem, where pydantic lists all
  alternatives. Status, type, and for top-level fields message and param are the same.
- Video is decoded only when Pillow can (GIF, WebP): its first frame counts. Audio is refused as by a model
  without.
- `/v1/completions`, `/v1/responses`, `/v1/messages`, `/tokenize`, `/docs` and `/openapi.json` are not
  there.
- `/metrics` has the families that mean something here: about forty of 88.
- Remote media are limited to 64 MiB; vLLM has no limit.
- It binds with SO_REUSEPORT, so that twins on a port can be shown; vLLM 0.30 does so with several API
  servers only (`--api-server-count`), and with one refuses a port that is taken.
- Exit codes are vLLM's; the seconds that Python and its libraries take to end are not waited for after
  SIGTERM.
- `--ec-transfer-config` takes `RblnECNixlConnector` with one role; a module path is accepted and not
  loaded.
"""
