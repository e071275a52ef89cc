"""Tiny random models of every family with their logits, loss, gradients, evaluation and greedy text.

    python make_families.py [VARIANT ...]

Writes goldens/families/VARIANT/{config.json, config.v4.json, generation_config.json, model*.safetensors,
golden.safetensors, golden.json}; README.md says what is in them. Eager attention, f32, no padding:
each document is one call. Letters: T tokens of a document, V vocabulary.
"""

import copy
import json
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

from common import GOLDENS, IGNORE, VERSIONS, Encoder, loss_sum, mean_loss, randomize, read_rows, relative, write_json

V = 128
LENGTHS = [40, 23, 6]
PROMPTS = ["the mill by the river ", "17 + 25 = ", "a ferry crosses at dawn, it carries goats and salt; at noon ",
           "rain.", "sort 9 4 7 1 -> ", "question: who took the last loaf?"]
EVALS = ["eval_text", "eval_messages", "eval_prompt_completion"]

# A token that stands in the documents of the variants that take it for padding.
PAD = 46

# Shared by every family. Attention is wider than the hidden states (4 heads x 16 against 32).
BASE = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-3, initializer_range=0.02,
            use_cache=True, attention_dropout=0.0)
WIDE = BASE | dict(head_dim=16)
LLAMA = WIDE | dict(model_type="llama", hidden_act="silu", tie_word_embeddings=False, attention_bias=False,
                    mlp_bias=False, pretraining_tp=1, rope_theta=100.0)
GEMMA = WIDE | dict(tie_word_embeddings=True, attention_bias=False, hidden_activation="gelu_pytorch_tanh",
                    query_pre_attn_scalar=24, rms_norm_eps=2e-3)
GEMMA3 = GEMMA | dict(model_type="gemma3_text", num_hidden_layers=3, sliding_window=8, sliding_window_pattern=2,
                      rope_theta=2000.0, rope_local_base_freq=50.0, attn_logit_softcapping=None,
                      final_logit_softcapping=None)
PHI3 = BASE | dict(model_type="phi3", num_attention_heads=2, num_key_value_heads=1, hidden_act="silu",
                   tie_word_embeddings=False, attention_bias=False, resid_pdrop=0.0, embd_pdrop=0.0,
                   original_max_position_embeddings=128, rope_theta=100.0)
SILU = WIDE | dict(hidden_act="silu", attention_bias=False, rope_theta=100.0)
GEMMA4 = BASE | dict(model_type="gemma4_text", num_hidden_layers=4, hidden_size=24, intermediate_size=20, head_dim=8, global_head_dim=16, sliding_window=8,
                     tie_word_embeddings=True, attention_bias=False, hidden_activation="gelu_pytorch_tanh",
                     rms_norm_eps=2e-3, final_logit_softcapping=6.0, enable_moe_block=False,
                     layer_types=["sliding_attention", "full_attention"] * 2, rope_parameters=dict(
                         sliding_attention=dict(rope_type="default", rope_theta=50.0),
                         full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=2000.0)))
GEMMA4_SMALL = dict(num_kv_shared_layers=2, hidden_size_per_layer_input=4, vocab_size_per_layer_input=V, use_double_wide_mlp=True)
GEMMA3N = BASE | dict(model_type="gemma3n_text", num_hidden_layers=5, hidden_size=24, intermediate_size=[20] * 5, head_dim=8, sliding_window=8,
                      tie_word_embeddings=True, attention_bias=False, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=2e-3,
                      final_logit_softcapping=6.0, layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
                      num_kv_shared_layers=2, hidden_size_per_layer_input=4, vocab_size_per_layer_input=V, altup_num_inputs=3,
                      altup_active_idx=0, altup_coef_clip=120.0, altup_correct_scale=True, laurel_rank=4,
                      activation_sparsity_pattern=[0.7, 0.5, 0.0, 0.3, 0.0], rope_theta=2000.0, rope_local_base_freq=50.0)
PIXTRAL = dict(model_type="pixtral", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8,
               image_size=16, patch_size=8)
QWEN_VISION_IDS = dict(image_token_id=124, video_token_id=125, vision_start_token_id=126, vision_end_token_id=127)
# Without a head size of its own.
NARROW = {key: value for key, value in SILU.items() if key != "head_dim"}
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
# Small models: two heads of 8 elements.
SMALL = {key: value for key, value in NARROW.items() if key != "rms_norm_eps"} | dict(
    hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1)
SMALL_RMS = SMALL | dict(rms_norm_eps=1e-3)
COHERE = SMALL | dict(layer_norm_eps=1e-2, tie_word_embeddings=True, logit_scale=0.4)
STABLELM = SMALL | dict(model_type="stablelm", layer_norm_eps=1e-2, tie_word_embeddings=False, partial_rotary_factor=0.5, qk_layernorm=False,
                        hidden_dropout=0.0)
HYBRID = SMALL_RMS | dict(
    head_dim=8, partial_rotary_factor=0.5, num_hidden_layers=3, full_attention_interval=3, linear_conv_kernel_dim=4,
    linear_key_head_dim=4, linear_value_head_dim=6, linear_num_key_heads=2, linear_num_value_heads=4)

# Small models with experts.
EXPERTS = SMALL_RMS | dict(num_experts_per_tok=2, output_router_logits=False, tie_word_embeddings=False)
QWEN_EXPERTS = EXPERTS | dict(num_experts=5, moe_intermediate_size=12, decoder_sparse_step=1, mlp_only_layers=[],
                              use_sliding_window=False, sliding_window=None, max_window_layers=2)
# Small models with latent attention.
LATENT = SMALL_RMS | dict(num_key_value_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4)
DEEPSEEK = LATENT | dict(num_experts_per_tok=2, output_router_logits=False, tie_word_embeddings=False, n_routed_experts=6, n_shared_experts=2,
                         moe_intermediate_size=12, first_k_dense_replace=1, num_nextn_predict_layers=0)
DEEPSEEK_V2 = DEEPSEEK | dict(model_type="deepseek_v2", norm_topk_prob=False)
DEEPSEEK_V3 = DEEPSEEK | dict(model_type="deepseek_v3", n_group=3, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.5,
                              rope_interleave=True)

# Each: the config as transformers 4 wrote it. Options of this script:
#   weights   take the weights of that variant;  stored  type on disk;  shards  split the file
#   tokenizer the tokenizer directory
#   ablate    values that must change the logits: proof that the option of the golden matters
#   same      the option changes nothing for documents of this length
#   room      most tokens of a prompt with its answer
#   published the `model_type` of the published files, if transformers has it under another name
#   joined    the experts of a layer are in one tensor, as published; transformers writes them one by one
GRANITE_HYBRID = SMALL_RMS | dict(
    model_type="granitemoehybrid", rms_norm_eps=3e-2, num_local_experts=0, shared_intermediate_size=20, attention_bias=True, embedding_multiplier=3.0,
    residual_multiplier=0.6, attention_multiplier=0.4, logits_scaling=2.5, layer_types=["full_attention"] * 2, mamba_n_heads=4, time_step_limit=[0.0, 1.0])
VARIANTS = {
    "llama": dict(config=LLAMA, tokenizer="small_bos"),
    "llama_rope_llama3": dict(weights="llama", config=LLAMA | dict(rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
    "llama_rope_linear": dict(weights="llama", config=LLAMA | dict(rope_scaling=dict(type="linear", factor=2.5))),
    "llama_rope_yarn": dict(weights="llama", config=LLAMA | dict(rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=1.0))),
    "llama_rope_yarn_mscale": dict(weights="llama", config=LLAMA | dict(rope_scaling=YARN | dict(
        mscale=1.0, mscale_all_dim=0.5, beta_fast=3.0, beta_slow=0.5, truncate=False))),
    "llama_rope_yarn_attention_factor": dict(weights="llama", config=LLAMA | dict(rope_scaling=YARN | dict(attention_factor=0.8))),
    "llama_attention_bias": dict(stored="bf16", config=LLAMA | dict(attention_bias=True)),
    "llama_mlp_bias": dict(stored="f16", config=LLAMA | dict(mlp_bias=True)),
    "llama_tied": dict(stored="bf16", config=BASE | dict(
        model_type="llama", hidden_size=36, num_attention_heads=3, num_key_value_heads=1, hidden_act="silu",
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, pretraining_tp=1, rope_theta=1000.0)),
    "mistral": dict(shards="40KB", ablate=dict(sliding_window=1000), config=WIDE | dict(
        model_type="mistral", hidden_act="silu", tie_word_embeddings=False, sliding_window=8, rope_theta=100.0)),
    "qwen2": dict(stored="bf16", config=BASE | dict(
        model_type="qwen2", hidden_size=48, hidden_act="silu", tie_word_embeddings=True, use_sliding_window=False,
        sliding_window=8, max_window_layers=1, rope_theta=1000.0)),
    "qwen2_window": dict(stored="bf16", ablate=dict(sliding_window=1000), config=BASE | dict(
        model_type="qwen2", num_hidden_layers=3, hidden_act="silu", tie_word_embeddings=False, use_sliding_window=True,
        sliding_window=8, max_window_layers=1, rope_theta=1000.0)),
    "qwen3": dict(config=WIDE | dict(
        model_type="qwen3", hidden_act="silu", tie_word_embeddings=True, attention_bias=False, use_sliding_window=False,
        sliding_window=None, max_window_layers=2, rope_theta=1000.0)),
    "gemma2": dict(stored="bf16", ablate=dict(
        sliding_window=1000, attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=16), config=GEMMA | dict(
        model_type="gemma2", num_hidden_layers=3, sliding_window=8, attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0, rope_theta=100.0)),
    "gemma3_text": dict(stored="bf16", ablate=dict(sliding_window=1000, query_pre_attn_scalar=16), config=GEMMA3),
    "gemma3_text_rope_linear": dict(stored="bf16", weights="gemma3_text", config=GEMMA3 | dict(
        rope_scaling=dict(rope_type="linear", factor=8.0))),
    "phi3": dict(ablate=dict(sliding_window=1000), config=PHI3 | dict(sliding_window=12, rope_scaling=None)),
    "phi3_partial": dict(weights="phi3", config=PHI3 | dict(sliding_window=None, rope_scaling=None, partial_rotary_factor=0.75)),
    "llama_rope_dynamic": dict(weights="llama", same=True, config=LLAMA | dict(rope_scaling=dict(type="dynamic", factor=4.0))),
    # One document is longer than the original context.
    "phi3_longrope": dict(weights="phi3", room=32, config=PHI3 | dict(
        sliding_window=None, partial_rotary_factor=0.75, original_max_position_embeddings=32, rope_scaling=dict(
            type="longrope", short_factor=[1.0, 1.1, 1.3, 1.5, 2.0, 2.5], long_factor=[1.0, 1.5, 2.0, 4.0, 8.0, 16.0]))),
    "gemma": dict(stored="bf16", config=WIDE | dict(
        model_type="gemma", tie_word_embeddings=True, attention_bias=False, hidden_act="gelu", rms_norm_eps=2e-3,
        rope_theta=100.0)),
    "granite": dict(ablate=dict(embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=0.25, logits_scaling=1.0),
                    config=SILU | dict(model_type="granite", tie_word_embeddings=True, mlp_bias=True, attention_bias=True,
                                       embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.4,
                                       logits_scaling=2.5, rms_norm_eps=3e-2)),
    "smollm3": dict(ablate=dict(no_rope_layers=[1, 1, 1]), config=SILU | dict(
        model_type="smollm3", num_hidden_layers=3, tie_word_embeddings=True, mlp_bias=False, no_rope_layer_interval=2,
        no_rope_layers=[1, 0, 1], use_sliding_window=False, sliding_window=None)),
    "smollm3_window": dict(weights="smollm3", config=SILU | dict(
        model_type="smollm3", num_hidden_layers=3, tie_word_embeddings=True, mlp_bias=False, no_rope_layer_interval=2,
        no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=6)),
    "olmo2": dict(config=NARROW | dict(model_type="olmo2", tie_word_embeddings=False)),
    "olmo3": dict(stored="bf16", ablate=dict(sliding_window=1000), config=NARROW | dict(
        model_type="olmo3", num_hidden_layers=4, tie_word_embeddings=False, sliding_window=6, rope_scaling=YARN | dict(
            beta_fast=4.0, beta_slow=1.0, attention_factor=1.2))),
    "seed_oss": dict(stored="bf16", config=SILU | dict(
        model_type="seed_oss", tie_word_embeddings=False, attention_bias=True, attention_out_bias=False, mlp_bias=False,
        attention_dropout=0.1, residual_dropout=0.1)),
    "exaone4": dict(stored="bf16", ablate=dict(sliding_window=1000), config=SILU | dict(
        model_type="exaone4", num_hidden_layers=3, tie_word_embeddings=False, sliding_window=6, sliding_window_pattern=2)),
    "exaone4_full": dict(stored="bf16", weights="exaone4", config=SILU | dict(
        model_type="exaone4", num_hidden_layers=3, tie_word_embeddings=False, sliding_window=None,
        layer_types=["full_attention"] * 3)),
    "hunyuan_v1_dense": dict(config=SILU | dict(model_type="hunyuan_v1_dense", tie_word_embeddings=True, rope_scaling=dict(
        type="dynamic", alpha=20.0, factor=1.0))),
    "ernie4_5": dict(config=SILU | dict(model_type="ernie4_5", tie_word_embeddings=True, use_bias=True)),
    "glm4": dict(stored="bf16", config=SILU | dict(model_type="glm4", tie_word_embeddings=False, attention_bias=True)),
    "ministral3": dict(config=SILU | dict(model_type="ministral3", tie_word_embeddings=False, sliding_window=None, rope_parameters=YARN | dict(
        type="yarn", rope_theta=100.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5,
        original_max_position_embeddings=8))),
    # Multimodal: text only, but the files have the other parts too.
    "gemma3": dict(stored="bf16", config=dict(
        model_type="gemma3", tie_word_embeddings=True, text_config=GEMMA3, mm_tokens_per_image=4, image_token_index=127, vision_config=dict(
            model_type="siglip_vision_model", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            image_size=16, patch_size=8))),
    "mistral3": dict(config=dict(
        model_type="mistral3", tie_word_embeddings=False, image_token_index=127, spatial_merge_size=1,
        text_config=SILU | dict(model_type="mistral", tie_word_embeddings=False, sliding_window=None), vision_config=PIXTRAL)),
    "qwen2_5_vl": dict(stored="bf16", config=QWEN_VISION_IDS | dict(
        model_type="qwen2_5_vl", tie_word_embeddings=True, text_config=BASE | dict(
            model_type="qwen2_5_vl_text", hidden_act="silu", tie_word_embeddings=True, rope_theta=1000.0, use_sliding_window=False,
            rope_scaling=dict(type="mrope", mrope_section=[1, 1, 2])), vision_config=dict(
            model_type="qwen2_5_vl", depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=4, out_hidden_size=32,
            fullatt_block_indexes=[0]))),
    "qwen3_vl": dict(stored="bf16", config=QWEN_VISION_IDS | dict(
        model_type="qwen3_vl", tie_word_embeddings=False, text_config=SILU | dict(
            model_type="qwen3_vl_text", rope_scaling=dict(rope_type="default", mrope_interleaved=True, mrope_section=[4, 2, 2])),
        vision_config=dict(
            model_type="qwen3_vl", depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=4, out_hidden_size=32,
            num_position_embeddings=4, deepstack_visual_indexes=[]))),
    # LayerNorm, an MLP without a gate, halves that read the same input.
    "cohere": dict(ablate=dict(logit_scale=1.0), config=COHERE | dict(model_type="cohere", use_qk_norm=False)),
    "cohere_qk_norm": dict(stored="bf16", ablate=dict(logit_scale=1.0), config=COHERE | dict(
        model_type="cohere", use_qk_norm=True, attention_bias=True)),
    "cohere2": dict(stored="bf16", ablate=dict(sliding_window=1000, logit_scale=1.0), config=COHERE | dict(
        model_type="cohere2", num_hidden_layers=3, sliding_window=6, sliding_window_pattern=2)),
    "starcoder2": dict(ablate=dict(sliding_window=1000), config=SMALL | dict(
        model_type="starcoder2", tie_word_embeddings=True, use_bias=True, sliding_window=8, norm_epsilon=1e-2,
        hidden_act="gelu_pytorch_tanh", residual_dropout=0.0, embedding_dropout=0.0)),
    "nemotron": dict(stored="bf16", config=SMALL | dict(
        model_type="nemotron", hidden_act="relu2", tie_word_embeddings=False, attention_bias=True, mlp_bias=True, norm_eps=1e-2,
        partial_rotary_factor=0.5)),
    "stablelm": dict(stored="bf16", config=STABLELM | dict(use_qkv_bias=True, use_parallel_residual=False)),
    "stablelm_parallel": dict(stored="bf16", config=STABLELM | dict(use_qkv_bias=False, use_parallel_residual=True)),
    "olmo": dict(config=SMALL | dict(model_type="olmo", tie_word_embeddings=False, clip_qkv=None)),
    # Optional biases.
    "olmo2_bias": dict(stored="bf16", config=SMALL_RMS | dict(model_type="olmo2", tie_word_embeddings=False, attention_bias=True)),
    "olmo3_bias": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="olmo3", tie_word_embeddings=True, attention_bias=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"])),
    "smollm3_bias": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="smollm3", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, no_rope_layers=[1, 1], use_sliding_window=False,
        sliding_window=None)),
    "gemma_bias": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="gemma", head_dim=8, tie_word_embeddings=True, attention_bias=True, hidden_act="gelu")),
    "gemma2_bias": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="gemma2", head_dim=8, tie_word_embeddings=False, attention_bias=True, hidden_activation="gelu_pytorch_tanh", sliding_window=8,
        query_pre_attn_scalar=8, attn_logit_softcapping=None, final_logit_softcapping=None)),
    "hunyuan_bias": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="hunyuan_v1_dense", head_dim=8, tie_word_embeddings=True, attention_bias=True)),
    "seed_oss_bias": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="seed_oss", head_dim=8, tie_word_embeddings=True, attention_bias=True, attention_out_bias=True, mlp_bias=True,
        residual_dropout=0.0)),
    "glm4_rotary": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="glm4", head_dim=8, tie_word_embeddings=False, attention_bias=False, partial_rotary_factor=0.75)),
    # As the 31B checkpoint; as E2B and E4B; and E2B with its other parts. The ids of images are not ids of text here: they have
    # other per-layer inputs.
    "gemma4_text": dict(ablate=dict(sliding_window=1000), config=GEMMA4 | dict(
        attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0)),
    "gemma4_text_shared": dict(ablate=dict(sliding_window=1000), config=GEMMA4 | GEMMA4_SMALL),
    "gemma4": dict(stored="bf16", config=dict(
        model_type="gemma4", tie_word_embeddings=True, text_config=GEMMA4 | GEMMA4_SMALL, audio_config=None, image_token_id=200,
        video_token_id=201, audio_token_id=202, vision_config=dict(
            model_type="gemma4_vision", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=8, position_embedding_size=4, patch_size=4))),
    # Gated DeltaNet: value heads that share key heads, documents longer than its convolution and shorter.
    "qwen3_5_text": dict(stored="bf16", config=HYBRID | dict(
        model_type="qwen3_5_text", tie_word_embeddings=True)),
    "qwen3_5": dict(stored="bf16", config=QWEN_VISION_IDS | dict(
        model_type="qwen3_5", tie_word_embeddings=False, text_config=HYBRID | dict(
            model_type="qwen3_5_text", num_hidden_layers=2, full_attention_interval=2, linear_num_value_heads=2,
            mtp_num_hidden_layers=1, attn_output_gate=True, attention_bias=True),
        vision_config=dict(
            model_type="qwen3_5_vision", depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=4, out_hidden_size=16,
            num_position_embeddings=4))),
    "qwen3_next": dict(stored="bf16", config=HYBRID | dict(
        model_type="qwen3_next", num_hidden_layers=2, full_attention_interval=2, tie_word_embeddings=False, num_experts=0,
        mlp_only_layers=[], decoder_sparse_step=1)),
    "qwen3_moe": dict(stored="bf16", config=QWEN_EXPERTS | dict(
        model_type="qwen3_moe", head_dim=8, norm_topk_prob=True, num_hidden_layers=3, mlp_only_layers=[1]),
        ablate=dict(norm_topk_prob=False, num_experts_per_tok=1)),
    "qwen3_moe_sparse_step": dict(stored="bf16", config=QWEN_EXPERTS | dict(
        model_type="qwen3_moe", head_dim=8, norm_topk_prob=False, decoder_sparse_step=2, num_experts_per_tok=1)),
    "qwen2_moe": dict(stored="bf16", config=QWEN_EXPERTS | dict(
        model_type="qwen2_moe", norm_topk_prob=False, shared_expert_intermediate_size=20, qkv_bias=True)),
    "olmoe": dict(stored="bf16", config=EXPERTS | dict(model_type="olmoe", num_experts=6, norm_topk_prob=False,
                                                       clip_qkv=None)),
    "mixtral": dict(stored="bf16", config=EXPERTS | dict(
        model_type="mixtral", num_local_experts=4, sliding_window=8, router_jitter_noise=0.0)),
    "glm4_moe": dict(stored="bf16", config=EXPERTS | dict(
        model_type="glm4_moe", head_dim=8, n_routed_experts=6, n_shared_experts=2, moe_intermediate_size=12, n_group=3,
        topk_group=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.5, use_qk_norm=True,
        partial_rotary_factor=0.5, num_nextn_predict_layers=0), ablate=dict(routed_scaling_factor=1.0, topk_group=1)),
    "qwen3_next_experts": dict(stored="bf16", config=HYBRID | dict(
        num_hidden_layers=2, full_attention_interval=2, model_type="qwen3_next", tie_word_embeddings=False, num_experts=5,
        num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=12, shared_expert_intermediate_size=20,
        mlp_only_layers=[], decoder_sparse_step=1)),
    # Files with the experts of a layer in one tensor. The limit of the gate is low, so that it cuts values off.
    "gpt_oss": dict(stored="bf16", ablate=dict(swiglu_limit=7.0, swiglu_alpha=1.0, sliding_window=1000, num_experts_per_tok=1), config=EXPERTS | dict(
        model_type="gpt_oss", head_dim=8, num_hidden_layers=3, num_local_experts=5, sliding_window=8, attention_bias=True, swiglu_limit=0.3,
        swiglu_alpha=1.702, rope_scaling=YARN | dict(beta_fast=4.0, beta_slow=1.0, truncate=False))),
    "gpt_oss_plain": dict(config=EXPERTS | dict(
        model_type="gpt_oss", head_dim=8, num_local_experts=3, sliding_window=8, attention_bias=False,
        layer_types=["full_attention"] * 2, rope_parameters=dict(rope_type="default", rope_theta=100.0), tie_word_embeddings=True)),
    "granitemoe": dict(stored="bf16", ablate=dict(embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=0.25, logits_scaling=1.0),
                       config=EXPERTS | dict(
        model_type="granitemoe", num_local_experts=5, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.4,
        logits_scaling=2.5, tie_word_embeddings=False, rms_norm_eps=3e-2)),
    "qwen3_5_moe_text": dict(stored="bf16", config=HYBRID | dict(
        num_hidden_layers=2, full_attention_interval=2, model_type="qwen3_5_moe_text", tie_word_embeddings=False, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=20)),
    "qwen3_5_moe": dict(stored="bf16", joined=True, config=QWEN_VISION_IDS | dict(
        model_type="qwen3_5_moe", tie_word_embeddings=False, text_config=HYBRID | dict(
            model_type="qwen3_5_moe_text", num_hidden_layers=2, full_attention_interval=2, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=12, shared_expert_intermediate_size=12),
        vision_config=dict(
            model_type="qwen3_5_moe_vision", depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=4, out_hidden_size=16,
            num_position_embeddings=4))),
    "qwen3_vl_moe": dict(stored="bf16", config=QWEN_VISION_IDS | dict(
        model_type="qwen3_vl_moe", tie_word_embeddings=False, text_config=QWEN_EXPERTS | dict(
            model_type="qwen3_vl_moe_text", head_dim=16, norm_topk_prob=True,
            rope_scaling=dict(rope_type="default", mrope_interleaved=True, mrope_section=[4, 2, 2])),
        vision_config=dict(
            model_type="qwen3_vl_moe_vision", depth=1, hidden_size=8, intermediate_size=8, num_heads=1, patch_size=4, out_hidden_size=16,
            num_position_embeddings=4, deepstack_visual_indexes=[]))),
    # Latent attention. The heads of v are smaller than those of q and k, wider, or as wide.
    "deepseek_v2": dict(stored="bf16", ablate=dict(routed_scaling_factor=1.0, num_experts_per_tok=1), config=DEEPSEEK_V2 | dict(
        q_lora_rank=None, v_head_dim=6, topk_method="greedy", n_group=None, topk_group=None, routed_scaling_factor=1.5,
        attention_bias=False, mlp_bias=False)),
    "deepseek_v2_groups": dict(ablate=dict(topk_group=1, routed_scaling_factor=1.0), config=DEEPSEEK_V2 | dict(
        q_lora_rank=10, v_head_dim=14, topk_method="group_limited_greedy", n_group=3, topk_group=2, routed_scaling_factor=1.7,
        attention_bias=True, mlp_bias=True, rope_scaling=YARN | dict(mscale=0.707, mscale_all_dim=0.707, beta_fast=3.0, beta_slow=0.5))),
    "deepseek_v3": dict(stored="bf16", ablate=dict(topk_group=1, routed_scaling_factor=1.0, rope_interleave=False), config=DEEPSEEK_V3 | dict(
        q_lora_rank=10, v_head_dim=6, attention_bias=True, rope_scaling=YARN | dict(
            mscale=1.0, mscale_all_dim=1.0, beta_fast=3.0, beta_slow=0.5))),
    "deepseek_v3_halves": dict(stored="bf16", ablate=dict(rope_interleave=True, norm_topk_prob=True), config=DEEPSEEK_V3 | dict(
        q_lora_rank=None, v_head_dim=12, attention_bias=False, rope_interleave=False, norm_topk_prob=False, first_k_dense_replace=0,
        rope_scaling=None)),
    "glm4_moe_lite": dict(stored="bf16", ablate=dict(routed_scaling_factor=1.0, mlp_layer_types=["dense"] * 3), config=DEEPSEEK_V3 | dict(
        model_type="glm4_moe_lite", num_hidden_layers=3, q_lora_rank=10, v_head_dim=12, n_group=1, topk_group=1, attention_bias=False,
        mlp_layer_types=["dense", "sparse", "dense"], rope_scaling=None)),
    "minicpm3": dict(stored="bf16", ablate=dict(scale_emb=1, scale_depth=1.0, dim_model_base=16), config=LATENT | dict(
        model_type="minicpm3", q_lora_rank=10, v_head_dim=8, tie_word_embeddings=False, attention_bias=True, scale_emb=3, scale_depth=1.4, rms_norm_eps=3e-2,
        dim_model_base=8)),
    "youtu": dict(stored="bf16", config=LATENT | dict(
        model_type="youtu", q_lora_rank=None, v_head_dim=8, tie_word_embeddings=False, attention_bias=False, rope_interleave=True)),
    # Several streams, another one than the first is computed; sizes of MLPs, shared keys and sparse gates by layer.
    "gemma3n_text": dict(stored="bf16", ablate=dict(sliding_window=1000, final_logit_softcapping=30.0, activation_sparsity_pattern=[0.0] * 5),
                         config=GEMMA3N),
    "gemma3n_text_active": dict(config=GEMMA3N | dict(
        num_hidden_layers=2, num_kv_shared_layers=0, altup_num_inputs=2, altup_active_idx=1, attention_bias=True,
        intermediate_size=[20, 12], activation_sparsity_pattern=[0.0, 0.8], layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False, vocab_size_per_layer_input=100), ablate=dict(altup_active_idx=0)),
    # Small differences from other families. A padding token that stands in the documents: lookups give its row no gradient.
    "arcee": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="arcee", hidden_act="relu2", tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=10,
        rope_scaling=YARN | dict(beta_fast=4.0, beta_slow=1.0))),
    "cwm": dict(stored="bf16", ablate=dict(sliding_window=1000), config=SMALL_RMS | dict(
        model_type="cwm", num_hidden_layers=3, head_dim=8, tie_word_embeddings=False, sliding_window=6, rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
    "glm": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="glm", head_dim=8, tie_word_embeddings=False, attention_bias=True, partial_rotary_factor=0.5, pad_token_id=PAD)),
    "helium": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="helium", head_dim=8, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "hyperclovax": dict(stored="bf16", ablate=dict(embedding_multiplier=1.0, attention_multiplier=0.25, logits_scaling=1.0),
                        config=SMALL_RMS | dict(
        model_type="hyperclovax", tie_word_embeddings=False, embedding_multiplier=3.0, residual_multiplier=1.0, attention_multiplier=0.4,
        logits_scaling=0.4, use_post_norm=True, rms_norm_eps=3e-2)),
    "hyperclovax_before": dict(stored="bf16", ablate=dict(residual_multiplier=1.0), config=SMALL_RMS | dict(
        model_type="hyperclovax", head_dim=8, tie_word_embeddings=True, embedding_multiplier=2.0, residual_multiplier=0.6,
        attention_multiplier=None, logits_scaling=0.5, use_post_norm=False, attention_bias=True, mlp_bias=True)),
    "internlm3": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="internlm3", num_key_value_heads=2, head_dim=10, tie_word_embeddings=False, attention_bias=True, mlp_bias=True,
        rope_scaling=dict(rope_type="dynamic", factor=6.0))),
    "iquestcoder": dict(stored="bf16", config=SMALL_RMS | dict(
        model_type="iquestcoder", head_dim=10, tie_word_embeddings=False)),
    "jais2": dict(stored="bf16", config=SMALL | dict(
        model_type="jais2", layer_norm_eps=1e-2, hidden_act="relu2", tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "ministral": dict(stored="bf16", ablate=dict(sliding_window=1000), config=SMALL_RMS | dict(
        model_type="ministral", head_dim=10, tie_word_embeddings=False, sliding_window=6,
        layer_types=["full_attention", "sliding_attention"])),
    "vaultgemma": dict(stored="bf16", ablate=dict(sliding_window=1000, query_pre_attn_scalar=16), config=SMALL_RMS | dict(
        model_type="vaultgemma", head_dim=8, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", sliding_window=8,
        query_pre_attn_scalar=24, attn_logit_softcapping=3.0, final_logit_softcapping=5.0, pad_token_id=PAD)),
    # A tied model whose last norm has no parameters: nothing is left of the head.
    "olmo_tied": dict(stored="bf16", config=SMALL | dict(model_type="olmo", tie_word_embeddings=True, clip_qkv=None, attention_bias=True)),
    # The first layer has gated attention, whose queries have twice the rows.
    "qwen3_5_attention_first": dict(stored="bf16", config=HYBRID | dict(
        model_type="qwen3_5_text", num_hidden_layers=2, tie_word_embeddings=True, layer_types=["full_attention", "linear_attention"])),
    # Without `head_dim`.
    "qwen3_moe_narrow": dict(stored="bf16", config=QWEN_EXPERTS | dict(model_type="qwen3_moe", norm_topk_prob=True)),
    # transformers has the type inside kimi_k25 only, and its language model there is DeepSeek-V3: the config of the files says `kimi_k2`.
    "kimi_k2": dict(stored="bf16", published="kimi_k2", ablate=dict(routed_scaling_factor=1.0), config=DEEPSEEK_V3 | dict(
        q_lora_rank=12, v_head_dim=8, attention_bias=False, routed_scaling_factor=2.827, n_group=1, topk_group=1, rope_scaling=dict(
            type="yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0))),
    "dots1": dict(stored="bf16", ablate=dict(routed_scaling_factor=1.0, sliding_window=1000), config=EXPERTS | dict(
        model_type="dots1", num_hidden_layers=3, n_routed_experts=6, n_shared_experts=2, moe_intermediate_size=12, first_k_dense_replace=1,
        n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, attention_bias=True, sliding_window=6, max_window_layers=2)),
    "solar_open": dict(stored="bf16", ablate=dict(norm_topk_prob=True), config={
        key: value for key, value in EXPERTS.items() if key != "intermediate_size"} | dict(
        model_type="solar_open", head_dim=10, n_routed_experts=5, n_shared_experts=1, moe_intermediate_size=12, n_group=1, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.5, attention_bias=True, rope_scaling=YARN)),
    "hunyuan_v1_moe": dict(stored="bf16", config={key: value for key, value in EXPERTS.items() if key != "num_experts_per_tok"} | dict(
        model_type="hunyuan_v1_moe", head_dim=10, num_experts=5, moe_topk=2, attention_bias=True, rope_scaling=dict(
            type="dynamic", alpha=1000.0, factor=1.0))),
    "minimax_m2": dict(stored="bf16", ablate=dict(num_experts_per_tok=1), config=EXPERTS | dict(
        model_type="minimax_m2", head_dim=12, rotary_dim=6, num_local_experts=5, num_experts_per_tok=3)),
    "mellum": dict(stored="bf16", ablate=dict(sliding_window=1000), config={
        key: value for key, value in EXPERTS.items() if key != "rope_theta"} | dict(
        model_type="mellum", num_hidden_layers=3, head_dim=8, num_experts=5, moe_intermediate_size=12, norm_topk_prob=True, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters=dict(full_attention=YARN | dict(rope_theta=2000.0), sliding_attention=dict(rope_type="default", rope_theta=50.0)))),
    "granitemoeshared": dict(stored="bf16", ablate=dict(residual_multiplier=1.0), config=EXPERTS | dict(
        model_type="granitemoeshared", num_local_experts=5, shared_intermediate_size=20, embedding_multiplier=3.0, residual_multiplier=0.6,
        attention_multiplier=0.4, logits_scaling=2.5, attention_bias=True, rms_norm_eps=3e-2)),
    "granite_swa": dict(stored="bf16", ablate=dict(sliding_window=1000, layer_rope_theta=[100.0] * 4, attention_multiplier=0.25), config=SMALL_RMS | dict(
        model_type="granite_swa", rms_norm_eps=3e-2, num_hidden_layers=4, tie_word_embeddings=True, mlp_bias=True, attention_bias=True, sliding_window=6,
        layer_rope_theta=[0.0, 30.0, 2000.0, 30.0], embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.4, logits_scaling=2.5)),
    "ernie4_5_moe": dict(stored="bf16", ablate=dict(moe_k=1), config=SMALL_RMS | dict(
        model_type="ernie4_5_moe", num_hidden_layers=3, tie_word_embeddings=True, use_bias=False, moe_num_experts=5, moe_k=2, moe_intermediate_size=12,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1)),
    "flex_olmo": dict(stored="bf16", ablate=dict(norm_topk_prob=True), config=EXPERTS | dict(
        model_type="flex_olmo", num_experts=5, norm_topk_prob=False)),
    "nanochat": dict(stored="bf16", ablate=dict(final_logit_softcapping=None, hidden_act="silu"), config=SMALL | dict(
        model_type="nanochat", tie_word_embeddings=False, attention_bias=True, hidden_act="relu2", rms_norm_eps=3e-2, final_logit_softcapping=4.0)),
    "lfm2": dict(stored="bf16", config=SMALL | dict(
        model_type="lfm2", norm_eps=3e-2, num_hidden_layers=3, num_key_value_heads=1, tie_word_embeddings=True, full_attn_idxs=[1], conv_L_cache=3,
        conv_bias=False, intermediate_size=36, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.1, block_multiple_of=8)),
    "lfm2_wide": dict(config=SMALL | dict(
        model_type="lfm2", norm_eps=3e-2, num_hidden_layers=3, tie_word_embeddings=False, layer_types=["full_attention", "conv", "conv"], conv_L_cache=5,
        conv_bias=False, block_auto_adjust_ff_dim=False, head_dim=16)),
    "lfm2_bias": dict(stored="f16", config=SMALL | dict(
        model_type="lfm2", norm_eps=3e-2, num_hidden_layers=3, tie_word_embeddings=True, layer_types=["conv", "full_attention", "conv"], conv_L_cache=4,
        conv_bias=True, block_auto_adjust_ff_dim=False)),
    # No experts, and attention in all layers. Without positions a bias of k has no gradient.
    "granitemoehybrid": dict(stored="bf16", ablate=dict(residual_multiplier=1.0, attention_multiplier=0.25), config=GRANITE_HYBRID | dict(
        position_embedding_type="rope", tie_word_embeddings=True)),
    "granitemoehybrid_nope": dict(config=GRANITE_HYBRID | dict(
        position_embedding_type=None, attention_bias=False, tie_word_embeddings=False)),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
                 "phi3": "Phi3ForCausalLM", "gemma": "GemmaForCausalLM", "granite": "GraniteForCausalLM",
                 "smollm3": "SmolLM3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM",
                 "seed_oss": "SeedOssForCausalLM", "exaone4": "Exaone4ForCausalLM",
                 "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
                 "glm4": "Glm4ForCausalLM", "ministral3": "Ministral3ForCausalLM",
                 "gemma3": "Gemma3ForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration",
                 "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
                 "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_next": "Qwen3NextForCausalLM",
                 "gemma3n_text": "Gemma3nForCausalLM", "gemma3n": "Gemma3nForConditionalGeneration",
                 "gemma4_text": "Gemma4ForCausalLM", "gemma4": "Gemma4ForConditionalGeneration",
                 "cohere": "CohereForCausalLM", "cohere2": "Cohere2ForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
                 "nemotron": "NemotronForCausalLM", "stablelm": "StableLmForCausalLM", "olmo": "OlmoForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
                 "mixtral": "MixtralForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "gpt_oss": "GptOssForCausalLM",
                 "granitemoe": "GraniteMoeForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
                 "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration", "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
                 "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
                 "glm4_moe_lite": "Glm4MoeLiteForCausalLM", "minicpm3": "MiniCPM3ForCausalLM", "youtu": "YoutuForCausalLM",
                 "arcee": "ArceeForCausalLM", "cwm": "CwmForCausalLM", "glm": "GlmForCausalLM", "helium": "HeliumForCausalLM",
                 "hyperclovax": "HyperCLOVAXForCausalLM", "internlm3": "InternLM3ForCausalLM", "iquestcoder": "IQuestCoderForCausalLM",
                 "jais2": "Jais2ForCausalLM", "ministral": "MinistralForCausalLM", "vaultgemma": "VaultGemmaForCausalLM",
                 "dots1": "Dots1ForCausalLM", "solar_open": "SolarOpenForCausalLM", "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
                 "minimax_m2": "MiniMaxM2ForCausalLM", "mellum": "MellumForCausalLM",
                 "granitemoeshared": "GraniteMoeSharedForCausalLM", "granite_swa": "GraniteSWAForCausalLM",
                 "ernie4_5_moe": "Ernie4_5_MoeForCausalLM", "flex_olmo": "FlexOlmoForCausalLM", "nanochat": "NanoChatForCausalLM",
                 "lfm2": "Lfm2ForCausalLM", "granitemoehybrid": "GraniteMoeHybridForCausalLM"}


def config_v4(config, stored, encoder):
    """`config` as transformers 4.4x wrote it to disk."""
    config = copy.deepcopy(config)
    if "text_config" in config:
        config["text_config"]["torch_dtype"] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[stored]
    head = dict(architectures=[ARCHITECTURES[config["model_type"]]])
    tail = dict(bos_token_id=encoder.tokenizer.token_to_id("<s>"), eos_token_id=encoder.eos,
                pad_token_id=config.get("pad_token_id", encoder.eos),
                torch_dtype={"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[stored],
                transformers_version="4.47.1")
    return head | copy.deepcopy(config) | tail


def auto(config):
    return transformers.AutoModelForImageTextToText if "text_config" in config else transformers.AutoModelForCausalLM


def load(directory, config_file="config.json", dtype=torch.float32, **changes):
    raw = json.loads((directory / config_file).read_text()) | changes
    raw["model_type"] = {"kimi_k2": "deepseek_v3"}.get(raw["model_type"], raw["model_type"])
    config = transformers.AutoConfig.for_model(**raw)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = auto(raw).from_pretrained(
        directory, config=config, dtype=dtype, attn_implementation="eager", experts_implementation="eager", local_files_only=True)
    return model.eval()


def join_experts(path):
    """Writes the experts of each layer to one tensor: gate and up [E, 2I, D], down [E, D, I]."""
    separate, joined = load_file(path), {}
    for name in sorted(separate):
        before, found, after = name.partition(".experts.0.")
        if ".experts." not in name:
            joined[name] = separate[name]
        elif found and after in ["gate_proj.weight", "down_proj.weight"]:
            count = sum(other.startswith(f"{before}.experts.") and other.endswith(f".{after}") for other in separate)
            parts = ["gate_proj", "up_proj"] if after == "gate_proj.weight" else ["down_proj"]
            to = "gate_up_proj" if len(parts) == 2 else "down_proj"
            joined[f"{before}.experts.{to}"] = torch.stack([
                torch.cat([separate[f"{before}.experts.{expert}.{part}.weight"] for part in parts]) for expert in range(count)])
    save_file(joined, path, metadata={"format": "pt"})


def documents(seed):
    """Random tokens and labels; some positions, also whole stretches, are not trained."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for length in LENGTHS:
        ids = torch.randint(4, V, (length,), generator=generator)
        labels = ids.clone()
        labels[torch.rand(length, generator=generator) < 0.25] = IGNORE
        labels[: length // 4] = IGNORE
        labels[-1] = ids[-1]
        out.append((ids, labels))
    return out


def measure(model, docs):
    """Logits of each document [T, V], the mean loss and every parameter's gradient."""
    trained = sum(int((labels[1:] != IGNORE).sum()) for _, labels in docs)
    model.zero_grad(set_to_none=True)
    logits = [model(ids[None], use_cache=False).logits[0] for ids, _ in docs]
    loss = sum(loss_sum(each, labels) for each, (_, labels) in zip(logits, docs)) / trained
    loss.backward()
    gradients = {name.replace("model.language_model.", "model."): p.grad.clone() for name, p in model.named_parameters()
                 if not name.endswith("e_score_correction_bias") and not name.startswith(("model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision."))}
    return [each.detach() for each in logits], loss.detach(), gradients, trained


def in_files(gradients, model_type):
    """The gradients under the names of single experts: transformers joins the experts of a layer in memory, and in the files of some families."""
    mixtral = model_type in ["mixtral", "minimax_m2"]
    gate, up, down = ["w1", "w3", "w2"] if mixtral else ["gate_proj", "up_proj", "down_proj"]
    named = {}
    for key, gradient in gradients.items():
        if mixtral:
            key = key.replace(".mlp.", ".block_sparse_moe.")
        if model_type in ["granitemoe", "granitemoeshared"]:
            key = key.replace(".router.weight", ".router.layer.weight")
        module, _, last = key.rpartition(".")
        if not module.endswith(".experts"):
            named[key] = gradient
            continue
        kind = "bias" if last.endswith("_bias") else "weight"
        for expert, part in enumerate(gradient):
            if model_type == "gpt_oss":
                # Inputs are rows; the columns of gate and up alternate.
                part = part.T if kind == "weight" else part
                halves = part[::2], part[1::2]
            else:
                halves = part.chunk(2)
            parts = zip([gate, up], halves) if last.startswith("gate_up_proj") else [(down, part)]
            named |= {f"{module}.{expert}.{name}.{kind}": each.contiguous() for name, each in parts}
    return named


def greedy(model, encoder, prompts, use_cache=True):
    out = []
    for prompt in prompts:
        ids = encoder.ids(prompt, True)
        got = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                             max_new_tokens=16, do_sample=False, use_cache=use_cache, output_logits=True, return_dict_in_generate=True)
        new = got.sequences[0, len(ids):].tolist()
        top = torch.stack(got.logits)[:, 0].topk(2).values
        out.append(dict(prompt=prompt, ids=ids, new_ids=new, text=encoder.tokenizer.decode(new, skip_special_tokens=True),
                        smallest_margin=float((top[:, 0] - top[:, 1]).min())))
    return out


def make(index, name, spec):
    directory = GOLDENS / "families" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    stored, tokenizer = spec.get("stored", "f32"), spec.get("tokenizer", "small")
    encoder = Encoder(GOLDENS / "tokenizers" / tokenizer)
    v4 = config_v4(spec["config"], stored, encoder)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(v4))
    model = auto(v4).from_config(config, attn_implementation="eager", dtype=torch.float32)
    weights = spec.get("weights")
    if weights:
        model.load_state_dict(load(GOLDENS / "families" / weights).state_dict())
    else:
        randomize(model, seed=1000 + index)
    model.config.dtype = DTYPES[stored]
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, pad_token_id=encoder.eos, eos_token_id=[encoder.tokenizer.token_to_id("<|im_end|>"), encoder.eos])
    model.to(DTYPES[stored]).save_pretrained(directory, max_shard_size=spec.get("shards", "5GB"))
    if spec.get("joined"):
        join_experts(directory / "model.safetensors")
    write_json(directory / "config.v4.json", v4)

    encoder.as_loaded(GOLDENS / "tokenizers" / tokenizer, directory)
    model = load(directory)
    assert model.dtype == torch.float32
    docs = documents(seed=2000 + index)
    logits, loss, gradients, trained = measure(model, docs)
    from_v4 = measure(load(directory, "config.v4.json"), docs)
    assert all(torch.equal(a, b) for a, b in zip(logits, from_v4[0])), "both config forms must mean the same"
    exact = measure(load(directory, dtype=torch.float64), docs)
    noise = dict(logits=max(relative(a, b) for a, b in zip(logits, exact[0])), loss=relative(loss, exact[1]),
                 gradients=max(relative(gradients[k], exact[2][k]) for k in gradients))
    assert max(noise.values()) < 2e-5, noise
    for key, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4, (key, gradient.abs().max())
    eps = {key: 1e-6 for key in ["rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps"] if key in v4}
    for key, value in (eps | spec.get("ablate", {})).items():
        changed = measure(load(directory, **{key: value}), docs)[0]
        assert max(relative(a, b) for a, b in zip(changed, logits)) > 1e-3, f"{key} must matter"
    if weights:
        without = measure(load(GOLDENS / "families" / weights), docs)[0]
        difference = relative(without[0], logits[0])
        assert difference == 0 if spec.get("same") else difference > 1e-2, "the option must matter"

    tensors = {"loss": loss.reshape(1)}
    for i, (ids, labels) in enumerate(docs):
        tensors |= {f"input_ids.{i}": ids, f"labels.{i}": labels, f"logits.{i}": logits[i].contiguous()}
    tensors |= {f"grad.{key}": value for key, value in in_files(gradients, v4["model_type"]).items()}
    save_file(tensors, directory / "golden.safetensors")
    evals = {}
    for each in EVALS:
        rows = [encoder.row(row) for row in read_rows(GOLDENS / "data" / f"{each}.jsonl")]
        mean, tokens = mean_loss(model, rows)
        evals[each] = dict(loss=mean, tokens=tokens)
    # Near ties are no test of the mathematics: keep three prompts whose every choice is clear.
    room = spec.get("room", 1000)
    prompts = [prompt for prompt in PROMPTS if len(encoder.ids(prompt, True)) + 16 <= room]
    generated = [each for each in greedy(model, encoder, prompts) if each["smallest_margin"] > 3e-3][:3]
    assert len(generated) == (3 if len(prompts) >= 3 else len(prompts))
    write_json(directory / "golden.json", dict(
        tokenizer=tokenizer, weights_from=weights, stored=stored, documents=len(docs), loss=float(loss), trained_tokens=trained,
        eval=evals, generate=generated, f32_against_f64=noise, versions=VERSIONS))
    for file in ["config.json", "config.v4.json"] if "published" in spec else []:
        write_json(directory / file, json.loads((directory / file).read_text()) | dict(model_type=spec["published"]))
    if weights:
        for file in directory.glob("model*.safetensors*"):
            file.unlink()
    print(name, f"loss {loss:.4f}", {k: f"{v:.1e}" for k, v in noise.items()}, [g["text"] for g in generated])


def main():
    chosen = sys.argv[1:] or list(VARIANTS)
    for index, (name, spec) in enumerate(VARIANTS.items()):
        if name in chosen:
            make(index, name, spec)


if __name__ == "__main__":
    main()
