"""Architectures of transformers that write text, from small configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
          "vocab_size": 90, "max_position_embeddings": 64}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
PLAIN = {**_SIZES, **_TOKENS}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
WHOLE = {**PLAIN, "num_key_value_heads": 4}
OLDER = {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_TOKENS}
FEW = {"vocab_size": 90, "hidden_size": 32, **_TOKENS}
BOTH = {"vocab_size": 90, "d_model": 32, "pad_token_id": 0, "eos_token_id": None}

# class of the model, class of its configuration, and what that is given
MOST_USED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", OLDER),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN),
    "opt": ("OPTForCausalLM", "OPTConfig", {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {**FEW, "n_layer": 2, "n_head": 4}),
    "phi": ("PhiForCausalLM", "PhiConfig", PLAIN),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**FEW, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**OLDER, "rotary_dim": 4}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", WHOLE),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", WHOLE),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", OLDER),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**OLDER, "n_ctx": 64, "rotary_dim": 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {**BOTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig",
             {**BOTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "bos_token_id": 1,
              "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None}),
}  # fmt: skip
ALL = {**MOST_USED, **OTHERS}


def build(name: str, **given: Any) -> Any:
    """A model of an architecture; `given` overrules its configuration."""
    import transformers

    model, config, sizes = ALL[name]
    torch.manual_seed(0)
    made: Callable[[Any], Any] = getattr(transformers, model)
    return made(getattr(transformers, config)(**{**sizes, **given})).eval()


def prompt(rows: int = 2, length: int = 7, words: int = 90) -> dict[str, torch.Tensor]:
    """Tokens with their mask; the first row is shorter."""
    tokens = torch.randint(3, words, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, : 2 * (rows > 1)] = 0
    return {"input_ids": tokens, "attention_mask": mask}
