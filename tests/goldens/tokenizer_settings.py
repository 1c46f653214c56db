"""What transformers makes of a text when tokenizer_config.json has settings that tokenizer.json does not have.

Writes tokenizer_settings.json: a directory of text/, the tokenizer_config.json to put there, and the tokens.

    python3 -m pip install transformers==5.24.0
    python3 tests/goldens/tokenizer_settings.py
"""

import json
import pathlib
import shutil
import tempfile

from transformers import AutoTokenizer

HERE = pathlib.Path(__file__).parent
TEXT = "Où EST la Mémoire? 模型 <new> x<|im_start|>y"
BERT = {"tokenizer_class": "BertTokenizer"}
SPECIALS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
GPT2 = {"tokenizer_class": "GPT2Tokenizer", **SPECIALS}
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def token(content, **more):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": False, **more}


CASES = [
    ("wordpiece", BERT | {"do_lower_case": False}),
    ("wordpiece", BERT | {"do_lower_case": True}),
    ("wordpiece", BERT | {"do_lower_case": True, "strip_accents": False}),
    ("wordpiece", BERT | {"do_lower_case": False, "strip_accents": True}),
    ("wordpiece", BERT | {"tokenize_chinese_chars": False}),
    ("wordpiece", {"tokenizer_class": "DistilBertTokenizerFast", "do_lower_case": False}),
    ("wordpiece", PLAIN | {"do_lower_case": False}),
    ("bpe", GPT2),
    ("bpe", GPT2 | {"add_prefix_space": True}),
    ("bpe", PLAIN | {"add_prefix_space": True}),
    ("bpe", PLAIN | SPECIALS | {"added_tokens_decoder": {"384": token("<new>")}}),
    ("bpe", PLAIN | SPECIALS | {"added_tokens_decoder": {"384": token("<new>", lstrip=True, rstrip=True)}}),
    ("bpe", PLAIN | SPECIALS | {"extra_special_tokens": ["<new>", "<other>"]}),
    ("bpe", PLAIN | SPECIALS | {"additional_special_tokens": ["<new>"]}),
    ("bpe", PLAIN | SPECIALS | {"pad_token": "<new>"}),
    ("bpe", PLAIN | SPECIALS | {"pad_token": "<pad>", "extra_special_tokens": {"new_token": "<new>"}}),
    ("bpe", PLAIN | SPECIALS | {"split_special_tokens": True}),
    ("llama", LLAMA | {"add_prefix_space": False}),
    ("llama", LLAMA | {"add_prefix_space": True}),
    ("llama", LLAMA | {"add_bos_token": True, "add_eos_token": True}),
    ("llama", LLAMA | {"add_bos_token": False}),
    ("bpe", PLAIN | SPECIALS | {"add_bos_token": True}),
    ("bpe", PLAIN | SPECIALS | {"add_eos_token": True}),
]


def main():
    cases = []
    for directory, config in CASES:
        with tempfile.TemporaryDirectory() as folder:
            for file in ("tokenizer.json", "config.json"):
                shutil.copy(HERE / "text" / directory / file, folder)
            (pathlib.Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = AutoTokenizer.from_pretrained(folder)
            cases.append({"directory": directory, "config": config, "text": TEXT,
                          "input_ids": tokenizer(TEXT)["input_ids"]})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "tokenizer_settings.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
