"""Networks of transformers, tiny and with random weights, for the tests about parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.parameter_modules import Builder, Built, Call, image, sequence, tokens

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
ROWS = {"hidden_size": 16, "intermediate_size": 32, **LAYERS}
TINY = {"vocab_size": 50, "max_position_embeddings": 32, **ROWS}
VISION = {"image_size": 32, "patch_size": 8, **ROWS}
DISTIL = {"vocab_size": 50, "dim": 16, "n_heads": 2, "hidden_dim": 32}
DISTIL["max_position_embeddings"] = 32
SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
CODERS = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in SIDES.items()}
CODERS["d_model"] = 16
SQUEEZED = ("q", "k", "v", "post_attention", "intermediate", "output")
# The sizes of networks whose configurations have names of their own.
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
XGLM = {"vocab_size": 50, "d_model": 16, "ffn_dim": 32, "num_layers": 1, "attention_heads": 2}
OPT = {**LAYERS, "vocab_size": 50, "hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 16}
NEO = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
BLOOM = {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2}
SWIN = {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
SEGFORMER = {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "image_size": 64}
SPEECH = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SPEECH |= {"num_attention_heads": 2, "mask_time_prob": 0.0, "layerdrop": 0.0}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
CONVOLUTIONS |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
CONVOLUTIONS["num_conv_pos_embedding_groups"] = 2
PERCEIVER = {"num_latents": 4, "d_latents": 16, "d_model": 8, "num_blocks": 1}
PERCEIVER |= {"num_self_attends_per_block": 1, "num_self_attention_heads": 2}
PERCEIVER["num_cross_attention_heads"] = 2
PATCHES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4}
PATCHES |= {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
PATCHES |= {"prediction_length": 4, "do_mask_input": False}
WHISPER = {**CODERS, "vocab_size": 50, "num_mel_bins": 8, "max_source_positions": 10}
WHISPER |= {"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}


def networks() -> Iterator[tuple[str, Builder]]:
    import transformers as hf

    def text(config: str, model: str, pick: str = "last_hidden_state", **options: Any) -> Builder:
        def build() -> Built:
            made = getattr(hf, config)(**options)
            net = getattr(hf, model)(made)
            if not hasattr(made, "use_cache"):
                return Call(net, ("input_ids",), pick), (tokens(),)
            # Without a mask transformers looks for packed sequences, which no older exporter knows.
            given = (tokens(), torch.ones(2, 7, dtype=torch.int64))
            return Call(net, ("input_ids", "attention_mask"), pick, use_cache=False), given

        return build

    def picture(
        config: str, model: str, pick: str = "last_hidden_state", **options: Any
    ) -> Builder:
        size = options.get("image_size", 32)

        def build() -> Built:
            net = getattr(hf, model)(getattr(hf, config)(**options))
            return Call(net, ("pixel_values",), pick), (image(size),)

        return build

    bert = {**TINY, "pad_token_id": 0}
    rope = {**TINY, "num_key_value_heads": 1, "head_dim": 8}
    yield "bert", text("BertConfig", "BertForSequenceClassification", "logits", **bert)
    yield "roberta", text("RobertaConfig", "RobertaModel", **{**bert, "pad_token_id": 1})
    classified = "DistilBertForSequenceClassification"
    yield "distilbert", text("DistilBertConfig", classified, "logits", **DISTIL, n_layers=2)
    sines = {"n_layers": 1, "sinusoidal_pos_embds": True}
    yield "distilbert_sinusoidal", text("DistilBertConfig", "DistilBertModel", **DISTIL, **sines)
    yield "albert", text("AlbertConfig", "AlbertModel", embedding_size=8, **bert)
    yield "electra", text("ElectraConfig", "ElectraModel", embedding_size=8, **bert)
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    yield "deberta_v2", text("DebertaV2Config", "DebertaV2Model", **relative, **bert)
    yield "mpnet", text("MPNetConfig", "MPNetModel", **{**bert, "pad_token_id": 1})
    groups = {"embedding_size": 16, **{f"{name}_groups": 1 for name in SQUEEZED}}
    yield "squeezebert", text("SqueezeBertConfig", "SqueezeBertModel", **groups, **bert)
    yield "fnet", text("FNetConfig", "FNetModel", **bert)
    yield "convbert", text("ConvBertConfig", "ConvBertModel", embedding_size=8, **bert)
    yield "modernbert", text("ModernBertConfig", "ModernBertModel", pad_token_id=0, **TINY)
    yield "gpt2", text("GPT2Config", "GPT2LMHeadModel", "logits", **GPT2)
    attention = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32}
    yield "gpt_neo", text("GPTNeoConfig", "GPTNeoModel", **NEO, **attention)
    yield "gpt_neox", text("GPTNeoXConfig", "GPTNeoXModel", **TINY)
    padded = {"max_position_embeddings": 32, "pad_token_id": 1}
    yield "opt", text("OPTConfig", "OPTModel", **OPT, **padded)
    yield "bloom", text("BloomConfig", "BloomModel", **BLOOM)
    yield "llama", text("LlamaConfig", "LlamaForCausalLM", "logits", **rope)
    yield "qwen2", text("Qwen2Config", "Qwen2Model", **rope)
    yield "qwen3", text("Qwen3Config", "Qwen3Model", **rope)
    yield "mistral", text("MistralConfig", "MistralModel", **rope)
    yield "gemma", text("GemmaConfig", "GemmaModel", **rope)
    yield "gemma2", text("Gemma2Config", "Gemma2Model", **rope)
    yield "phi", text("PhiConfig", "PhiModel", **TINY)
    yield "olmo2", text("Olmo2Config", "Olmo2Model", **TINY)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    yield "mixtral", text("MixtralConfig", "MixtralModel", **experts, **rope)
    yield "t5_encoder", text("T5Config", "T5EncoderModel", **T5)
    yield "xglm", text("XGLMConfig", "XGLMModel", **XGLM, max_position_embeddings=32)
    yield "clip_text", text("CLIPTextConfig", "CLIPTextModel", **{**TINY, "eos_token_id": 2})
    clip = ("CLIPVisionConfig", "CLIPVisionModel", "pooler_output")
    yield "clip_vision", picture(*clip, **VISION)
    yield "clip", lambda: _clip(hf)
    yield "hf_vit", picture("ViTConfig", "ViTForImageClassification", "logits", **VISION)
    yield "hf_deit", picture("DeiTConfig", "DeiTForImageClassification", "logits", **VISION)
    yield "dinov2", picture("Dinov2Config", "Dinov2Model", **VISION)
    registers = ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel")
    yield "dinov2_registers", picture(*registers, **VISION)
    yield "siglip", picture("SiglipVisionConfig", "SiglipVisionModel", "pooler_output", **VISION)
    yield "vit_mae", lambda: _mae(hf)
    yield "hf_swin", picture("SwinConfig", "SwinModel", image_size=32, **SWIN)
    classified, heads = "SegformerForImageClassification", {"num_attention_heads": [1, 1, 2, 2]}
    yield "segformer", picture("SegformerConfig", classified, "logits", **SEGFORMER, **heads)
    yield "perceiver", lambda: _perceiver(hf)
    yield "whisper_encoder", lambda: _whisper(hf)
    yield "whisper", lambda: _whisper_whole(hf)
    yield "wav2vec2", lambda: _speech(hf, "Wav2Vec2")
    yield "hubert", lambda: _speech(hf, "Hubert")
    yield "detr", lambda: _detr(hf)
    yield "time_series_patches", lambda: _patches(hf)


def _clip(hf: Any) -> Built:
    one = {"num_hidden_layers": 1}
    text = {**TINY, **one, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**VISION, **one}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return Call(hf.CLIPModel(config), ("input_ids", "pixel_values"), "logits_per_image"), (
        tokens(),
        image(32),
    )


def _mae(hf: Any) -> Built:
    net = hf.ViTMAEModel(hf.ViTMAEConfig(**VISION))
    net.embeddings.initialize_weights()  # its table of sines
    return Call(net, ("pixel_values",), "last_hidden_state"), (image(32),)


def _perceiver(hf: Any) -> Built:
    net = hf.PerceiverModel(hf.PerceiverConfig(**PERCEIVER))
    return Call(net, ("inputs",), "last_hidden_state"), (sequence(),)


def _whisper(hf: Any) -> Built:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    net = Call(
        WhisperEncoder(hf.WhisperConfig(**WHISPER)),
        ("input_features",),
        "last_hidden_state",
    )
    return net, (torch.randn(2, 8, 20),)


def _whisper_whole(hf: Any) -> Built:
    names = ("input_features", "decoder_input_ids", "decoder_attention_mask")
    net = Call(
        hf.WhisperModel(hf.WhisperConfig(**WHISPER)),
        names,
        "last_hidden_state",
        use_cache=False,
    )
    return net, (torch.randn(2, 8, 20), tokens(), torch.ones(2, 7, dtype=torch.int64))


def _speech(hf: Any, name: str) -> Built:
    config = getattr(hf, f"{name}Config")(**SPEECH, **CONVOLUTIONS)
    net = getattr(hf, f"{name}Model")(config)
    return Call(net, ("input_values",), "last_hidden_state"), (torch.randn(2, 400),)


def _detr(hf: Any) -> Built:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}
    backbone = hf.ResNetConfig(**sizes, out_indices=[2], layer_type="basic")
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    config = hf.DetrConfig(**own, backbone_config=backbone, **CODERS, num_queries=5)
    return Call(hf.DetrForObjectDetection(config), ("pixel_values",), "logits"), (image(64),)


def _patches(hf: Any) -> Built:
    net = hf.PatchTSTForPrediction(hf.PatchTSTConfig(**PATCHES))
    return Call(net, ("past_values",), "prediction_outputs"), (torch.randn(2, 16, 2),)
