"""Architectures of transformers, and networks of the kinds that torchvision has, in sizes that are small and odd.

Nothing is downloaded. Widths are such that kernels are joined, tiled and moved over by windows as in the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.models.convolutional import NETWORKS

Built = tuple[nn.Module, dict[str, Any]]
Make = Callable[[], Built]

# in the words that most configurations use
WIDE = {"hidden_size": 136, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 300,
        "vocab_size": 517, "max_position_embeddings": 128}  # fmt: skip
GROUPED = {**WIDE, "num_key_value_heads": 2}
OLD = {"vocab_size": 517, "n_embd": 136, "n_layer": 2, "n_head": 4, "n_positions": 128}
BOTH_SIDES = {"vocab_size": 517, "d_model": 136, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 300, "decoder_ffn_dim": 300,
              "max_position_embeddings": 128}  # fmt: skip
LOOKS = {"hidden_size": 136, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 300,
         "image_size": 56, "patch_size": 8}  # fmt: skip
SPEAKS = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 200,
          "vocab_size": 40, "conv_dim": [32, 32, 48], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3],
          "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3}  # fmt: skip
STAGES = {"embedding_size": 16, "hidden_sizes": [24, 40, 56, 72], "depths": [1, 2, 1, 1]}


def _tokens(count: int = 37, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 500, (batch, count))


def _text() -> dict[str, Any]:
    mask = torch.ones(2, 37, dtype=torch.int64)
    mask[1, 29:] = 0
    return {"input_ids": _tokens(batch=2), "attention_mask": mask}


def _prompt() -> dict[str, Any]:
    return {"input_ids": _tokens(), "use_cache": False}


def _both() -> dict[str, Any]:
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens(9), "use_cache": False}


def _image(height: int = 56, width: int = 56) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(1, 3, height, width)}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(1, 3217)}


Given = Callable[[], dict[str, Any]]
# by the names of the classes before `Model` or `For...`, and of the configuration before `Config`
TABLE: Mapping[str, tuple[str, str, dict[str, Any], Given]] = {
    # encoders of text
    "bert": ("BertModel", "Bert", WIDE, _text),
    "roberta": ("RobertaForMaskedLM", "Roberta", WIDE, _text),
    "distilbert": ("DistilBertModel", "DistilBert",
                   {"vocab_size": 517, "dim": 136, "n_layers": 2, "n_heads": 4, "hidden_dim": 300}, _text),
    "albert": ("AlbertModel", "Albert", {**WIDE, "embedding_size": 48}, _text),
    "electra": ("ElectraModel", "Electra", {**WIDE, "embedding_size": 48}, _text),
    "deberta": ("DebertaV2Model", "DebertaV2", {**WIDE, "relative_attention": True, "position_buckets": 8,
                                                "pos_att_type": ["p2c", "c2p"]}, _text),
    "modernbert": ("ModernBertModel", "ModernBert", {**WIDE, "pad_token_id": 0, "attn_implementation": "sdpa"}, _text),
    "camembert": ("CamembertModel", "Camembert", WIDE, _text),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", "XLMRoberta", WIDE, _text),
    "mpnet": ("MPNetModel", "MPNet", WIDE, _text),
    "mobilebert": ("MobileBertModel", "MobileBert", {**WIDE, "embedding_size": 32, "intra_bottleneck_size": 32}, _text),
    "squeezebert": ("SqueezeBertModel", "SqueezeBert", {**WIDE, "embedding_size": 136}, _text),
    "funnel": ("FunnelModel", "Funnel", {"vocab_size": 517, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 120,
                                         "block_sizes": [1, 1], "num_decoder_layers": 1}, _text),
    "roformer": ("RoFormerModel", "RoFormer", {**WIDE, "embedding_size": 136}, _text),
    "megatron-bert": ("MegatronBertModel", "MegatronBert", WIDE, _text),
    "convbert": ("ConvBertModel", "ConvBert", {**WIDE, "embedding_size": 136, "head_ratio": 2}, _text),
    "layoutlm": ("LayoutLMModel", "LayoutLM", WIDE, _text),
    # decoders
    "gpt2": ("GPT2LMHeadModel", "GPT2", OLD, _prompt),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoX", WIDE, _prompt),
    "gptj": ("GPTJForCausalLM", "GPTJ", {**OLD, "rotary_dim": 16}, _prompt),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", "GPTBigCode", OLD, _prompt),
    "opt": ("OPTForCausalLM", "OPT", {**WIDE, "ffn_dim": 300, "word_embed_proj_dim": 136}, _prompt),
    "bloom": ("BloomForCausalLM", "Bloom", {"vocab_size": 517, "hidden_size": 136, "n_layer": 2, "n_head": 4}, _prompt),
    "falcon": ("FalconForCausalLM", "Falcon", {**WIDE, "new_decoder_architecture": False}, _prompt),
    "llama": ("LlamaForCausalLM", "Llama", GROUPED, _prompt),
    "mistral": ("MistralForCausalLM", "Mistral", {**GROUPED, "sliding_window": 16}, _prompt),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2", GROUPED, _prompt),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3", {**GROUPED, "head_dim": 40}, _prompt),
    "gemma": ("GemmaForCausalLM", "Gemma", {**GROUPED, "head_dim": 40}, _prompt),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2", {**GROUPED, "head_dim": 40, "sliding_window": 16}, _prompt),
    "phi": ("PhiForCausalLM", "Phi", {**GROUPED, "hidden_size": 160}, _prompt),
    "phi3": ("Phi3ForCausalLM", "Phi3", {**GROUPED, "pad_token_id": 0}, _prompt),
    "stablelm": ("StableLmForCausalLM", "StableLm", GROUPED, _prompt),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2", GROUPED, _prompt),
    "olmo": ("OlmoForCausalLM", "Olmo", GROUPED, _prompt),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2", GROUPED, _prompt),
    "cohere": ("CohereForCausalLM", "Cohere", GROUPED, _prompt),
    "granite": ("GraniteForCausalLM", "Granite", GROUPED, _prompt),
    "glm": ("GlmForCausalLM", "Glm", {**GROUPED, "head_dim": 34, "pad_token_id": 0}, _prompt),
    "mixtral": ("MixtralForCausalLM", "Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
                _prompt),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2Moe", {**GROUPED, "moe_intermediate_size": 72, "num_experts": 4,
                  "num_experts_per_tok": 2, "shared_expert_intermediate_size": 120}, _prompt),
    "mamba": ("MambaForCausalLM", "Mamba",
              {"vocab_size": 517, "hidden_size": 72, "num_hidden_layers": 2, "state_size": 8}, _prompt),
    "xglm": ("XGLMForCausalLM", "XGLM", {"vocab_size": 517, "d_model": 136, "ffn_dim": 300, "num_layers": 2,
                                         "attention_heads": 4, "max_position_embeddings": 128}, _prompt),
    # both
    "t5": ("T5Model", "T5", {"vocab_size": 517, "d_model": 136, "d_kv": 34, "d_ff": 300, "num_layers": 2,
                             "num_heads": 4}, _both),
    "mt5": ("MT5Model", "MT5", {"vocab_size": 517, "d_model": 136, "d_kv": 34, "d_ff": 300, "num_layers": 2,
                                "num_heads": 4}, _both),
    "bart": ("BartModel", "Bart", BOTH_SIDES, _both),
    "mbart": ("MBartModel", "MBart", BOTH_SIDES, _both),
    "marian": ("MarianModel", "Marian", {**BOTH_SIDES, "pad_token_id": 0}, _both),
    "pegasus": ("PegasusModel", "Pegasus", BOTH_SIDES, _both),
    "blenderbot": ("BlenderbotModel", "Blenderbot", BOTH_SIDES, _both),
    # images
    "vit": ("ViTForImageClassification", "ViT", LOOKS, _image()),
    "deit": ("DeiTModel", "DeiT", LOOKS, _image()),
    "beit": ("BeitModel", "Beit", LOOKS, _image()),
    "dinov2": ("Dinov2Model", "Dinov2", {**LOOKS, "image_size": 56}, _image()),
    "vit-mae": ("ViTMSNModel", "ViTMSN", LOOKS, _image()),
    "yolos": ("YolosForObjectDetection", "Yolos", {**LOOKS, "image_size": [56, 72], "num_detection_tokens": 10},
              _image(56, 72)),
    "swin": ("SwinModel", "Swin", {"image_size": 56, "patch_size": 2, "embed_dim": 24, "depths": [2, 2],
                                   "num_heads": [2, 4], "window_size": 7}, _image()),
    "swinv2": ("Swinv2Model", "Swinv2", {"image_size": 56, "patch_size": 2, "embed_dim": 24, "depths": [2, 2],
                                         "num_heads": [2, 4], "window_size": 7}, _image()),
    "convnext": ("ConvNextModel", "ConvNext", {"hidden_sizes": [24, 40, 56, 72], "depths": [1, 1, 2, 1]},
                 _image(97, 65)),
    "convnextv2": ("ConvNextV2Model", "ConvNextV2", {"hidden_sizes": [24, 40, 56, 72], "depths": [1, 1, 2, 1]},
                   _image(97, 65)),
    "resnet": ("ResNetForImageClassification", "ResNet", STAGES, _image(97, 65)),
    "regnet": ("RegNetModel", "RegNet", {**STAGES, "groups_width": 8}, _image(97, 65)),
    "mobilenet-v1": ("MobileNetV1Model", "MobileNetV1", {"depth_multiplier": 0.5}, _image(97, 65)),
    "mobilenet-v2": ("MobileNetV2Model", "MobileNetV2", {"depth_multiplier": 0.5}, _image(97, 65)),
    "mobilevit": ("MobileViTModel", "MobileViT", {"image_size": 64, "hidden_sizes": [48, 64, 80],
                  "neck_hidden_sizes": [16, 24, 32, 48, 64, 80, 96]}, _image(64, 64)),
    "levit": ("LevitModel", "Levit", {"image_size": 64, "hidden_sizes": [48, 64, 96], "num_attention_heads": [2, 4, 4],
              "depths": [1, 1, 1], "key_dim": [16, 16, 16]}, _image(64, 64)),
    "poolformer": ("PoolFormerModel", "PoolFormer", {"hidden_sizes": [24, 40, 56, 72], "depths": [1, 1, 1, 1]},
                   _image(97, 65)),
    "pvt": ("PvtModel", "Pvt", {"image_size": 64, "hidden_sizes": [24, 40, 64, 96], "depths": [1, 1, 1, 1],
                                "num_attention_heads": [1, 2, 4, 4]}, _image(64, 64)),
    "segformer": ("SegformerForSemanticSegmentation", "Segformer", {"depths": [1, 1, 1, 1]}, _image(256, 256)),
    "segformer-odd": ("SegformerForSemanticSegmentation", "Segformer",
                      {"hidden_sizes": [24, 40, 64, 96], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
                       "decoder_hidden_size": 72}, _image(161, 97)),
    "glpn": ("GLPNForDepthEstimation", "GLPN",
             {"hidden_sizes": [24, 40, 64, 96], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
              "decoder_hidden_size": 24}, _image(64, 96)),
    # sound
    "wav2vec2": ("Wav2Vec2Model", "Wav2Vec2", SPEAKS, _sound),
    "hubert": ("HubertModel", "Hubert", SPEAKS, _sound),
    "ast": ("ASTModel", "AST", {"hidden_size": 136, "num_hidden_layers": 2, "num_attention_heads": 4,
                                "intermediate_size": 300, "max_length": 100, "num_mel_bins": 40},
            lambda: {"input_values": torch.randn(1, 100, 40)}),
}  # fmt: skip


def _from_table(row: tuple[str, str, dict[str, Any], Given]) -> Make:
    def make() -> Built:
        import transformers

        model, config, settings, given = row
        made = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**settings))
        return made, given()

    return make


class Cached(nn.Module):
    """A decoder that takes the keys and values of what came before and gives them with the next."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, *past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        found = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return found.logits, *(t for layer in cache.layers for t in (layer.keys, layer.values))


def _decoder(name: str, config: Mapping[str, Any], count: int, before: int, batch: int = 1) -> Make:
    """`count` words behind `before`: a prompt, or a step."""

    def make() -> Built:
        import transformers

        made = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
        keys = config.get("num_key_value_heads", config["num_attention_heads"])
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        layers = 2 * config["num_hidden_layers"] if before else 0
        past = {f"past{i}": torch.randn(batch, keys, before, width) for i in range(layers)}
        return Cached(made), {"input_ids": _tokens(count, batch), **past}

    return make


QWEN = {"vocab_size": 800, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2}  # fmt: skip
DEEP = {"vocab_size": 517, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "attn_implementation": "eager"}  # fmt: skip
DECODERS: dict[str, Make] = {
    "qwen2, 12 words": _decoder("Qwen2", QWEN, 12, 0),
    "qwen2, 2 x 100 words": _decoder("Qwen2", QWEN, 100, 0, 2),
    "qwen2, a step": _decoder("Qwen2", QWEN, 1, 12),
    "llama, 64 words": _decoder("Llama", DEEP, 64, 0),
    "llama, a step": _decoder("Llama", GROUPED, 1, 37),
    "mistral, 19 words": _decoder("Mistral", {**GROUPED, "sliding_window": 16}, 19, 0),
    "gemma, a step": _decoder("Gemma", {**GROUPED, "head_dim": 40}, 1, 23),
    "phi3, a step": _decoder("Phi3", {**GROUPED, "pad_token_id": 0}, 1, 23),
    "stablelm, 2 x a step": _decoder("StableLm", GROUPED, 1, 29, 2),
}


def _both_inputs() -> dict[str, Any]:
    return {"input_ids": _tokens(), "pixel_values": torch.randn(1, 3, 56, 56)}


def clip() -> Built:
    from transformers import CLIPConfig, CLIPModel

    part = {k: LOOKS[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    text = {**part, "vocab_size": 517, "max_position_embeddings": 64, "eos_token_id": 2}
    config = CLIPConfig(text_config=text, vision_config={**part, "image_size": 56, "patch_size": 8}, projection_dim=48)
    return CLIPModel(config), _both_inputs()


def detr() -> Built:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    sides = {k: v for k, v in BOTH_SIDES.items() if k not in ("vocab_size", "max_position_embeddings")}
    backbone = ResNetConfig(**STAGES, out_features=["stage4"])
    return DetrForObjectDetection(DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        num_queries=11, **sides,
    )), {"pixel_values": torch.randn(1, 3, 96, 128)}  # fmt: skip


def whisper() -> Built:
    from transformers import WhisperConfig, WhisperModel

    sides = {k: v for k, v in BOTH_SIDES.items() if k != "max_position_embeddings"}
    model = WhisperModel(WhisperConfig(
        **sides, num_mel_bins=40, max_source_positions=50, max_target_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    ))  # fmt: skip
    features = torch.randn(1, 40, 100)
    return model, {"input_features": features, "decoder_input_ids": _tokens(5), "use_cache": False}


ARCHITECTURES: dict[str, Make] = {
    **{name: _from_table(row) for name, row in TABLE.items()},
    **DECODERS, "clip": clip, "detr": detr, "whisper": whisper, **NETWORKS,
}  # fmt: skip


def build(name: str) -> Built:
    torch.manual_seed(0)
    module, inputs = ARCHITECTURES[name]()
    return module.eval(), inputs
