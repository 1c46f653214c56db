"""Two AdamW steps of sequences that are longer than a chunk of 128 positions, whole, in f64 and f32.

Makes, below chunked/, a directory a case, as families.py makes its own, without logits. The last chunks are short.
Without a window, sequences of a batch have unequal lengths, and transformers pads them. With experts, the smallest
distance between the k-th and the (k + 1)-th logit of any row is at least GAP: the first seed for which this is so is
taken.

    pip install torch transformers && python chunked.py [CASE...]
"""

import itertools
import json
import pathlib
import sys

import torch
import transformers
from transformers import (
    AutoModelForCausalLM, Cohere2Config, CohereConfig, Ernie4_5Config, Gemma2Config, Gemma3TextConfig, Gemma4TextConfig, Glm4Config, GlmConfig, GPT2Config,
    GPTNeoXConfig, GptOssConfig, GraniteConfig, HeliumConfig, LlamaConfig, Ministral3Config, MinistralConfig, MistralConfig, MixtralConfig,
    Olmo2Config, Olmo3Config, OlmoeConfig, OPTConfig, Phi3Config, Qwen2Config, Qwen2MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config,
    Qwen3MoeConfig, Qwen3NextConfig, SeedOssConfig, SmolLM3Config, Starcoder2Config,
)

import families

families.STEPS, families.BATCH = 2, 3
LENGTHS = [300, 129, 57, 256, 300, 128]
GAP = 3e-5
SIZES = dict(vocab_size=families.VOCABULARY, hidden_size=24, intermediate_size=20, initializer_range=0.2,
             attention_dropout=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=None, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=300)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64)
EQUAL = {**SIZES, "num_key_value_heads": 2}  # as many heads of keys as of queries
MOE = {key: size for key, size in SIZES.items() if key != "intermediate_size"}
CASES = {
    "gpt2": GPT2Config(vocab_size=families.VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=300,
                       initializer_range=0.2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
                       eos_token_id=None),
    "opt": OPTConfig(vocab_size=families.VOCABULARY, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
                     ffn_dim=28, init_std=0.2, max_position_embeddings=300, dropout=0.0, bos_token_id=None,
                     eos_token_id=None),
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=YARN),
    # Frequencies follow the longest sequence of a batch.
    "llama-dynamic": LlamaConfig(**{**SIZES, "max_position_embeddings": 100}, rope_parameters=dict(
        rope_type="dynamic", rope_theta=100.0, factor=3.5)),
    "phi3": Phi3Config(**SIZES, rope_parameters=dict(
        rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.1, 1.3, 1.8, 2.0, 2.5],
        long_factor=[1.2, 2.0, 3.5, 5.0, 8.0, 9.0], original_max_position_embeddings=140)),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=70,
                         max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=14, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, sliding_window=150),
    "gemma3_text": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=12, query_pre_attn_scalar=12, sliding_window=33,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}),
    "qwen2_moe": Qwen2MoeConfig(**MOE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14,
                                intermediate_size=30, shared_expert_intermediate_size=22),
    "gpt_oss": GptOssConfig(**MOE, head_dim=12, num_local_experts=4, num_experts_per_tok=2, intermediate_size=14,
                            sliding_window=40, swiglu_limit=0.8, rope_parameters=dict(
                                **YARN, beta_fast=8.0, beta_slow=1.0, truncate=False)),
    "gemma2": Gemma2Config(**SIZES, head_dim=12, query_pre_attn_scalar=10, sliding_window=150, attn_logit_softcapping=2.0,
                           final_logit_softcapping=6.0),
    "cohere2": Cohere2Config(**SIZES, logit_scale=0.7, sliding_window=40, layer_types=["sliding_attention", "full_attention"]),
    "cohere": CohereConfig(**SIZES, logit_scale=0.3, attention_bias=True),
    "glm": GlmConfig(**SIZES, head_dim=16, attention_bias=False, partial_rotary_factor=0.375),
    "glm4": Glm4Config(**SIZES, head_dim=12),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=families.VOCABULARY, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=28,
        initializer_range=0.2, max_position_embeddings=300, bos_token_id=None, eos_token_id=None,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5)),
    "granite": GraniteConfig(**SIZES, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.35,
                             logits_scaling=1.75),
    "ministral": MinistralConfig(**SIZES, head_dim=12, sliding_window=130, layer_types=["sliding_attention", "full_attention"]),
    "ministral3": Ministral3Config(**SIZES, head_dim=12, rope_parameters=dict(
        rope_type="yarn", rope_theta=500.0, factor=5.0, original_max_position_embeddings=60, beta_fast=8.0, beta_slow=1.0,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "olmo2": Olmo2Config(**EQUAL),
    "olmo3": Olmo3Config(**EQUAL, sliding_window=45, layer_types=["sliding_attention", "full_attention"], rope_parameters={
        "full_attention": dict(**YARN, attention_factor=1.2),
        "sliding_attention": dict(rope_type="default", rope_theta=5000.0)}),
    "olmoe": OlmoeConfig(**EQUAL, num_experts=5, num_experts_per_tok=2, clip_qkv=None),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=14,
                                norm_topk_prob=True),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=128),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=12, residual_dropout=0.0),
    "ernie4_5": Ernie4_5Config(**SIZES, head_dim=12),
    "helium": HeliumConfig(**SIZES, head_dim=12),
    "gemma4_text": Gemma4TextConfig(
        **SIZES, head_dim=8, global_head_dim=12, num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=40,
        hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"], final_logit_softcapping=6.0),
    "gemma4_text-inputs": Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 5, "initializer_range": 0.1}, rms_norm_eps=0.01, head_dim=8, global_head_dim=12, sliding_window=40, hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=families.VOCABULARY, num_kv_shared_layers=3, use_double_wide_mlp=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        final_logit_softcapping=6.0),
    # The last block's states pass chunks behind attention, too.
    "qwen3_5_text": Qwen3_5TextConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=16, rms_norm_eps=0.02, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=6, linear_value_head_dim=5, linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
        **MOE, head_dim=16, rms_norm_eps=0.02, linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=7,
        linear_value_head_dim=6, layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=14, shared_expert_intermediate_size=10),
    "qwen3_next": Qwen3NextConfig(
        **SIZES, head_dim=16, rms_norm_eps=0.02, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
        linear_value_head_dim=5, layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=14, shared_expert_intermediate_size=10),
}
WINDOWED = {"cohere2", "gemma2", "qwen2", "mistral", "gemma3_text", "gpt_oss", "ministral", "olmo3", "starcoder2", "gemma4_text", "gemma4_text-inputs"}
families.CAUSAL |= CASES.keys()


class Gap:
    """The smallest gap between a row's last chosen expert and the next, over the rows that are no padding."""

    def __init__(self, model):
        self.least, self.mask = float("inf"), None
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self.route)
            if getattr(module, "rope_type", None) == "dynamic":
                module.register_forward_pre_hook(self.forget)

    def enter(self, _, inputs, named):
        mask = named.get("attention_mask")
        self.mask = torch.ones(named["input_ids"].numel()) if mask is None else mask.flatten()

    def route(self, router, _, outputs):
        ordered = outputs[0].detach()[self.mask > 0].sort(dim=-1, descending=True).values
        self.least = min(self.least, float((ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min()))

    def forget(self, module, _):  # what dynamic frequencies remember of earlier forwards
        module.max_seq_len_cached, module.inv_freq = module.original_max_seq_len, module.original_inv_freq


def sequences(case, seed):
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for index, length in enumerate(LENGTHS):
        # A padded query whose window has no token is NaN in transformers.
        length = LENGTHS[index // families.BATCH * families.BATCH] if case in WINDOWED else length
        ids = torch.randint(2, families.VOCABULARY, (length,), generator=generator).tolist()
        # Labels behind the last position of a chunk and behind the first one are among them.
        labels = [-100 if at % 5 == 3 else token for at, token in enumerate(ids)]
        lines.append({"input_ids": ids, "labels": labels})
    return lines


def make(case, seed, folder):
    """The golden numbers of a case, or none if an expert is chosen by a hair."""
    torch.manual_seed(seed)
    config = CASES[case]
    config._experts_implementation = "eager"  # the default computes in no f64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases begin as ones and zeros, which would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        families.move_scalars(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    lines = sequences(case, seed)
    (folder / "data.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    golden = {"batch": families.BATCH, "clip_norm": None, "steps": families.STEPS, "learning_rate": families.RATE,
              "weight_decay": families.DECAY, "transformers": transformers.__version__}
    for dtype in (torch.float64, torch.float32):
        experts = dict(experts_implementation="eager") if "num_experts_per_tok" in config.to_dict() else {}
        again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **experts).to(dtype)
        again.train()
        gap = Gap(again)
        golden[str(dtype).removeprefix("torch.")] = found = families.train(case, again, lines)
        del found["logits"]
        if gap.least < GAP:
            return None
    return golden


def main():
    for case in sys.argv[1:] or CASES:
        folder = pathlib.Path(__file__).parent / "chunked" / case
        folder.mkdir(parents=True, exist_ok=True)
        golden = next(filter(None, (make(case, seed, folder) for seed in itertools.count())))
        (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
