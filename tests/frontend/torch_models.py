"""Hugging Face architectures from small configurations, with inputs; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
Built = tuple[nn.Module, Inputs]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 90,
         "max_position_embeddings": 64}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "use_cache": False}


def _tokens(low: int = 3, count: int = 11) -> torch.Tensor:
    return torch.randint(low, 90, (2, count))


def _text(model: nn.Module) -> Built:
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, 8:] = 0
    return model, {"input_ids": _tokens(), "attention_mask": mask}


def _prompt(model: nn.Module) -> Built:
    return model, {"input_ids": _tokens()}


def _image(model: nn.Module, size: int = 32) -> Built:
    return model, {"pixel_values": torch.randn(1, 3, size, size)}


def bert() -> Built:
    from transformers import BertConfig, BertModel

    return _text(BertModel(BertConfig(**SMALL)))


def roberta() -> Built:
    from transformers import RobertaConfig, RobertaModel

    return _text(RobertaModel(RobertaConfig(**SMALL)))


def distilbert() -> Built:
    from transformers import DistilBertConfig, DistilBertModel

    return _text(DistilBertModel(DistilBertConfig(vocab_size=90, dim=32, n_layers=2, n_heads=4, hidden_dim=48)))


def albert() -> Built:
    from transformers import AlbertConfig, AlbertModel

    return _text(AlbertModel(AlbertConfig(**SMALL, embedding_size=16)))


def electra() -> Built:
    from transformers import ElectraConfig, ElectraModel

    return _text(ElectraModel(ElectraConfig(**SMALL, embedding_size=16)))


def deberta() -> Built:
    from transformers import DebertaV2Config, DebertaV2Model

    return _text(
        DebertaV2Model(
            DebertaV2Config(**SMALL, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"])
        )
    )


def modernbert() -> Built:
    from transformers import ModernBertConfig, ModernBertModel

    return _text(ModernBertModel(ModernBertConfig(**SMALL, pad_token_id=0, attn_implementation="sdpa")))


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _prompt(
        GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False))
    )


def gpt_neox() -> Built:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return _prompt(GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, use_cache=False)))


def opt() -> Built:
    from transformers import OPTConfig, OPTForCausalLM

    return _text(
        OPTForCausalLM(
            OPTConfig(
                vocab_size=90,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=48,
                max_position_embeddings=64,
                use_cache=False,
                word_embed_proj_dim=32,
            )
        )
    )


def bloom() -> Built:
    from transformers import BloomConfig, BloomForCausalLM

    return _text(BloomForCausalLM(BloomConfig(vocab_size=90, hidden_size=32, n_layer=2, n_head=4, use_cache=False)))


def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _prompt(LlamaForCausalLM(LlamaConfig(**DECODER)))


def mistral() -> Built:
    from transformers import MistralConfig, MistralForCausalLM

    return _prompt(MistralForCausalLM(MistralConfig(**DECODER, sliding_window=6)))


def qwen2() -> Built:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _prompt(Qwen2ForCausalLM(Qwen2Config(**DECODER)))


def qwen3() -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _prompt(Qwen3ForCausalLM(Qwen3Config(**DECODER, head_dim=8)))


def gemma() -> Built:
    from transformers import GemmaConfig, GemmaForCausalLM

    return _prompt(GemmaForCausalLM(GemmaConfig(**DECODER, head_dim=8)))


def phi() -> Built:
    from transformers import PhiConfig, PhiForCausalLM

    return _prompt(PhiForCausalLM(PhiConfig(**DECODER)))


def mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    return _prompt(MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)))


def mamba() -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    return _prompt(
        MambaForCausalLM(MambaConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2, state_size=4, use_cache=False))
    )


def t5() -> Built:
    from transformers import T5Config, T5Model

    model = T5Model(T5Config(vocab_size=90, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, use_cache=False))
    return model, {"input_ids": _tokens(), "decoder_input_ids": _tokens(count=7)}


def bart() -> Built:
    from transformers import BartConfig, BartModel

    model = BartModel(
        BartConfig(
            vocab_size=90,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            use_cache=False,
        )
    )
    return model, {"input_ids": _tokens(), "decoder_input_ids": _tokens(count=7)}


def vit() -> Built:
    from transformers import ViTConfig, ViTModel

    return _image(
        ViTModel(
            ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=32,
                patch_size=8,
            )
        )
    )


def deit() -> Built:
    from transformers import DeiTConfig, DeiTModel

    return _image(
        DeiTModel(
            DeiTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=32,
                patch_size=8,
            )
        )
    )


def dinov2() -> Built:
    from transformers import Dinov2Config, Dinov2Model

    return _image(
        Dinov2Model(
            Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
        )
    )


def swin() -> Built:
    from transformers import SwinConfig, SwinModel

    return _image(
        SwinModel(SwinConfig(image_size=32, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 4], window_size=4))
    )


def convnext() -> Built:
    from transformers import ConvNextConfig, ConvNextModel

    return _image(ConvNextModel(ConvNextConfig(hidden_sizes=[8, 12, 16, 24], depths=[1, 1, 2, 1])))


def segformer() -> Built:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return _image(
        SegformerForSemanticSegmentation(
            SegformerConfig(
                hidden_sizes=[8, 12, 16, 24],
                depths=[1, 1, 1, 1],
                decoder_hidden_size=16,
                num_attention_heads=[1, 2, 4, 4],
            )
        ),
        64,
    )


def resnet() -> Built:
    from transformers import ResNetConfig, ResNetModel

    return _image(ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])))


def clip() -> Built:
    from transformers import CLIPConfig, CLIPModel

    part = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    text = {**part, "vocab_size": 90, "max_position_embeddings": 64, "eos_token_id": 2}
    vision = {**part, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return model, {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, 32, 32)}


def detr() -> Built:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    model = DetrForObjectDetection(
        DetrConfig(
            backbone_config=backbone,
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_queries=5,
        )
    )
    return _image(model, 64)


def whisper_encoder() -> Built:
    from transformers import WhisperConfig, WhisperModel

    model = WhisperModel(
        WhisperConfig(
            vocab_size=90,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=16,
            max_source_positions=20,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )
    return model.get_encoder(), {"input_features": torch.randn(1, 16, 40)}


def wav2vec2() -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    model = Wav2Vec2Model(
        Wav2Vec2Config(
            **{k: v for k, v in SMALL.items() if k != "max_position_embeddings"},
            conv_dim=[8, 8],
            conv_stride=[5, 2],
            conv_kernel=[10, 3],
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
        )
    )
    return model, {"input_values": torch.randn(1, 400)}


QUICK: Mapping[str, Callable[[], Built]] = {"bert": bert, "llama": llama, "vit": vit}
OTHERS: Mapping[str, Callable[[], Built]] = {
    f.__name__: f
    for f in (
        *(roberta, distilbert, albert, electra, deberta, modernbert, gpt2, gpt_neox, opt, bloom, mistral, qwen2, qwen3),
        *(gemma, phi, mixtral, mamba, t5, bart, deit, dinov2, swin, convnext, segformer, resnet, clip, detr),
        *(whisper_encoder, wav2vec2),
    )
}
ALL = {**QUICK, **OTHERS}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    module, inputs = ALL[name]()
    return module.eval(), inputs
