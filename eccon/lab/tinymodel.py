"""Writes a Qwen3-VL checkpoint of about a million random weights. A script for the lab's own Python.

`python tinymodel.py DIRECTORY` makes weights, configuration, tokenizer with chat template, and processor
configuration that transformers and vLLM load, then loads it and answers one question about a picture. The
numbers come from a fixed seed: two labs have the same model. It is shaped as the real family (grouped
queries, interleaved M-RoPE, deepstack, 16-pixel patches merged 2 × 2), only small.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

PATCH = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
CONTEXT = 32768
END, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL = (
    *(PAD, "<|im_start|>", END),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
CHAT_TEMPLATE = """\
{%- macro part(p) -%}
{%- if 'image' in p or 'image_url' in p or p.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'video' in p or p.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in p -%}{{ p.text }}
{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.content is string -%}{{- m.content -}}
{%- else -%}{%- for p in m.content -%}{{- part(p) -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the family's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL),
        model_max_length=CONTEXT,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def configuration(words: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """The family's shape at the smallest sizes that its code takes."""

    def number(token: str) -> int:
        return int(words.convert_tokens_to_ids(token))

    width = 128
    language = {
        "vocab_size": -(-len(words) // 64) * 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": number(PAD),
        "eos_token_id": number(END),
        "rope_theta": 5e6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],  # half of head_dim together
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": PATCH["patch_size"],
        "temporal_patch_size": PATCH["temporal_patch_size"],
        "spatial_merge_size": PATCH["merge_size"],
        "out_hidden_size": width,
        "num_position_embeddings": 48 * 48,
        "deepstack_visual_indexes": [0, 1],
        "hidden_act": "gelu_pytorch_tanh",
    }
    made = Qwen3VLConfig(
        text_config=language,
        vision_config=vision,
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    made.architectures = ["Qwen3VLForConditionalGeneration"]
    return made


def network(config: Qwen3VLConfig, words: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Random weights, wide enough that other pixels give another answer.

    Rows of tokens that are not printable ASCII are zero. The output layer is the same matrix, so they are
    hardly ever the likeliest: an answer is readable characters, one a token, and runs to its limit.
    """
    torch.manual_seed(3)
    made = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    printable = {i for c in range(0x20, 0x7F) for i in words.encode(chr(c), add_special_tokens=False)}
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.05)
        rows = made.get_input_embeddings().weight
        rows[[i for i in range(len(rows)) if i not in printable]] = 0
    # What vLLM samples by where a request does not say: the likeliest token, so equals are answered alike.
    made.generation_config.do_sample, made.generation_config.top_k = True, 1
    made.generation_config.eos_token_id = [config.text_config.eos_token_id, config.text_config.bos_token_id]
    made.generation_config.pad_token_id = config.text_config.bos_token_id
    return made


def processors() -> dict[str, dict[str, Any]]:
    """File name to content: sizes in pixels as the family's own checkpoints have them."""
    common = {
        **PATCH,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    image = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}
    video = {"shortest_edge": 64 * 64, "longest_edge": 24 * 1024 * 1024}
    return {
        "preprocessor_config.json": {
            **common,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": image,
        },
        "video_preprocessor_config.json": {
            **common,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": video,
        },
        "chat_template.json": {"chat_template": CHAT_TEMPLATE},
    }


def write(directory: Path) -> None:
    """All files of the checkpoint."""
    words = tokenizer()
    words.save_pretrained(directory)
    stated = json.loads((directory / "tokenizer_config.json").read_text())
    stated |= {"tokenizer_class": "Qwen2TokenizerFast", "processor_class": "Qwen3VLProcessor"}
    network(configuration(words), words).save_pretrained(directory)
    for name, content in {**processors(), "tokenizer_config.json": stated}.items():
        (directory / name).write_text(json.dumps(content, indent=1))


def check(directory: Path) -> str:
    """Loads it as anybody would and asks about a picture.

    Returns:
        A line that says how large it is.
    """
    processor = AutoProcessor.from_pretrained(directory)
    model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    picture = {"type": "image", "image": Image.new("RGB", (320, 256), (200, 30, 30))}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}]
    asked = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    tokens = int((asked["input_ids"] == model.config.image_token_id).sum())
    expected = (320 // 32) * (256 // 32)
    if tokens != expected:
        msg = f"a picture of 320 x 256 takes {tokens} tokens, not {expected}"
        raise SystemExit(msg)
    answer = model.generate(**asked, max_new_tokens=4, do_sample=False)
    if answer.shape[1] != asked["input_ids"].shape[1] + 4:
        raise SystemExit("it does not answer")
    return f"{sum(p.numel() for p in model.parameters()):,} weights"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write(target)
    print(check(target))
