"""A small gpt-oss whose experts are in MXFP4, as it is released.

Makes, below mxfp4/, config.json, model.safetensors and golden.json: tokens, and the logits in f64 of the model as
transformers dequantises it.

    pip install torch transformers && python mxfp4.py
"""

import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

TOKENS = [7, 3, 11, 29, 5, 5, 17]
CONFIG = GptOssConfig(vocab_size=37, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
                      head_dim=8, num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2, sliding_window=4,
                      initializer_range=0.3, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
                      rope_parameters=dict(rope_type="yarn", rope_theta=100.0, factor=4.0, truncate=False,
                                           original_max_position_embeddings=16))


def main():
    folder = pathlib.Path(__file__).parent / "mxfp4"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    CONFIG._experts_implementation = CONFIG._attn_implementation = "eager"
    model = GptOssForCausalLM(CONFIG).eval()
    stored = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(torch.bfloat16))
            stored[name] = parameter.to(torch.bfloat16).contiguous()
            continue
        experts, inputs, outputs = parameter.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 127, (experts, outputs, inputs // 32), dtype=torch.uint8)
        parameter.copy_(convert_moe_packed_tensors(blocks, scales))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors")
    keys = CONFIG.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }
    (folder / "config.json").write_text(json.dumps(keys, indent=2, sort_keys=True) + "\n")
    with torch.no_grad():
        logits = model.to(torch.float64)(input_ids=torch.tensor([TOKENS])).logits.flatten().tolist()
    golden = {"tokens": TOKENS, "logits": [round(logit, 7) for logit in logits]}
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
