"""A chat completion's answer, whole and streamed, key for key as vLLM 0.30 writes it."""

import hashlib
import json
import time
from typing import Any

from eccon.sim.chat import Chat
from eccon.sim.ipc import Output

__all__ = ["Collected", "Streamed"]

FINGERPRINT = "vllm-0.30.0-cfce8280"
DONE = b"data: [DONE]\n\n"


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _logprob(text: str, rank: int) -> dict[str, Any]:
    # Not a model's, but like a model's a function of what it says, so that equal answers have equal figures.
    digest = hashlib.sha256(f"{rank}:{text}".encode()).digest()
    token = text if rank == 0 else text[::-1] + "·" * rank
    value = -(digest[0] + 1) / 256 - rank
    return {"token": token, "logprob": round(value, 6), "bytes": list(token.encode())}


def _logprobs(chat: Chat, words: list[str]) -> dict[str, Any] | None:
    if chat.top_logprobs is None:
        return None
    tops = range(chat.top_logprobs)
    return {"content": [_logprob(w, 0) | {"top_logprobs": [_logprob(w, r) for r in tops]} for w in words]}


class Collected:
    """The whole answer, once every choice has ended."""

    def __init__(self, chat: Chat, answer_id: str) -> None:
        self._chat = chat
        self._id = answer_id
        self._words: list[list[str]] = [[] for _ in range(chat.n)]
        self._reasons: list[str | None] = [None] * chat.n
        self._tokens = [0] * chat.n
        self._prompt = 0
        self._told: dict[str, str] | None = None

    def take(self, output: Output) -> None:
        """One more token of a choice."""
        if output.tokens:
            self._words[output.index].append(output.text)
        self._reasons[output.index] = output.finish_reason
        self._tokens[output.index] = output.tokens
        self._prompt = output.prompt_tokens
        self._told = output.told

    def body(self) -> bytes:
        """As JSON."""
        choices = [self._choice(i) for i in range(self._chat.n)]
        usage = _usage(self._prompt, sum(self._tokens))
        answer = {
            "id": self._id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._chat.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage | {"prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": {"ec_guard": self._told} if self._told else None,
            "metrics": None,
        }
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()

    def _choice(self, index: int) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": "".join(self._words[index]),
            "refusal": None,
            "annotations": None,
        }
        return {
            "index": index,
            "message": message | {"audio": None, "function_call": None, "reasoning": None},
            "logprobs": _logprobs(self._chat, self._words[index]),
            "finish_reason": self._reasons[index],
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }


class Streamed:
    """The events of one stream. The role comes with the first token, not before; an encoder has no tokens."""

    def __init__(self, chat: Chat, answer_id: str) -> None:
        self._chat = chat
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": chat.model,
        }
        self._begun = False
        self._tokens = [0] * chat.n
        self._prompt = 0

    def events(self, output: Output) -> bytes:
        """What one token makes: the first one also each choice's role."""
        self._prompt = output.prompt_tokens
        out = self.begin()
        if not output.tokens:
            return out
        self._tokens[output.index] = output.tokens
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": {"content": output.text},
            "logprobs": _logprobs(self._chat, [output.text]),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = None
        chunk = self._base | {"choices": [choice | {"token_ids": None}]}
        if output.finish_reason is not None and not self._chat.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return out + self._event(self._running_usage(chunk, output.tokens))

    def begin(self) -> bytes:
        """Each choice's role, once."""
        if self._begun:
            return b""
        self._begun = True
        return b"".join(self._role(i) for i in range(self._chat.n))

    def _role(self, index: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._running_usage(self._base | {"choices": [choice]}, 0)
        return self._event(chunk | {"prompt_token_ids": None, "prompt_text": None})

    def _running_usage(self, chunk: dict[str, Any], completion: int) -> dict[str, Any]:
        if self._chat.continuous_usage:
            chunk["usage"] = _usage(self._prompt, completion) | {"completion_tokens_details": None}
        return chunk

    def _event(self, chunk: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def end(self) -> bytes:
        """Usage where it was asked for, then the end."""
        if not self._chat.include_usage:
            return DONE
        chunk = self._base | {"choices": [], "usage": _usage(self._prompt, sum(self._tokens))}
        return self._event(chunk | {"system_fingerprint": FINGERPRINT}) + DONE
