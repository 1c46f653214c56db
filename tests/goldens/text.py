"""What transformers makes of texts, pairs, chats and prompts, with three kinds of tokenizers.

Makes, below text/, from stream.txt there: a directory a tokenizer (tokenizer.json, tokenizer_config.json and
chat_template.jinja, and a tiny random model that fits it, as transformers writes them), and cases.json: the
lines of a data file and the tokens and labels they become.

    pip install torch transformers jinja2 && python text.py
"""

import json
import pathlib
import shutil
from collections import Counter

import torch
from tokenizers import (
    AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers,
)
from transformers import (
    AutoTokenizer, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.chat_template_utils import render_jinja_template

HERE = pathlib.Path(__file__).parent / "text"
STREAM = (HERE / "stream.txt").read_text()
POSITIONS, IGNORED = 128, -100

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TAGGED = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '<<' + messages[0]['content'] | trim + '>>\\n' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- 'Assistant: ' }}
        {%- generation %}
        {{- message['content'] + eos_token }}
        {%- endgeneration %}
        {%- if not loop.last %}
            {{- '\\n' }}
        {%- endif %}
    {%- else %}
        {{- message['role'] | capitalize + ': ' + message['content'] + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant: ' }}
{%- endif %}
"""


def bpe():
    """As GPT-2's: bytes, no token of its own about the text; ChatML without tags."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator([STREAM], trainers.BpeTrainer(
        vocab_size=384, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[0], bos_token=specials[0], pad_token=specials[0],
        additional_special_tokens=specials[1:], model_max_length=POSITIONS, chat_template=CHATML)
    config = GPT2Config(vocab_size=len(wrapped), n_embd=32, n_layer=2, n_head=2, n_inner=24,
                        n_positions=POSITIONS, bos_token_id=wrapped.bos_token_id,
                        eos_token_id=wrapped.eos_token_id)
    return wrapped, GPT2LMHeadModel(config)


def wordpiece():
    """As BERT's, with truncation and padding in the file, which whoever calls it must not heed."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(STREAM)))
    letters, pieces = Counter(), Counter()
    for word, times in sorted(words.items()):  # the library's trainer does not make the same twice
        letters.update(word * times)
        for at in range(1, len(word)):
            pieces.update({word[:at]: times * at, "##" + word[at:]: times * (len(word) - at)})
        pieces[word] += times * len(word)
    letters = sorted(letter for letter, _ in letters.most_common(60))
    tokens = specials + letters + ["##" + letter for letter in letters if letter.isalnum()]
    tokens += [piece for piece, _ in pieces.most_common()
               if piece not in tokens and not set(piece) - {"#", *letters}]
    tokenizer = Tokenizer(models.WordPiece(
        vocab={token: at for at, token in enumerate(tokens[:384])}, unk_token="[UNK]",
        max_input_chars_per_word=100))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", model_max_length=POSITIONS)
    wrapped.backend_tokenizer.enable_truncation(max_length=16)
    wrapped.backend_tokenizer.enable_padding(length=16, pad_id=wrapped.pad_token_id, pad_token="[PAD]")
    config = BertConfig(vocab_size=len(wrapped), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=24, max_position_embeddings=POSITIONS,
                        id2label={0: "ham", 1: "spam"}, label2id={"ham": 0, "spam": 1})
    return wrapped, BertForMaskedLM(config)


def llama():
    """As Llama 2's: spaces as ▁, bytes for what is not in the vocabulary, <s> ahead; a chat with tags."""
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    ascii = STREAM.encode("ascii", "ignore").decode()
    tokenizer.train_from_iterator(ascii.split("\n"), trainers.BpeTrainer(vocab_size=190, show_progress=False))
    learned = json.loads(tokenizer.to_str())["model"]
    tokens = specials + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += sorted(learned["vocab"], key=learned["vocab"].get)
    tokenizer = Tokenizer(models.BPE(
        vocab={token: at for at, token in enumerate(tokens)},
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        model_max_length=POSITIONS, chat_template=TAGGED)
    config = LlamaConfig(vocab_size=len(wrapped), hidden_size=32, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=POSITIONS,
                         tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    return wrapped, LlamaForCausalLM(config)


def message(role, content):
    return {"role": role, "content": content}


LONG = STREAM[:900]
TEXTS = [
    ("plain", "The device meets one layer at a time.", None),
    ("accents", "Où est la mémoire? Ça croît: naïve, Zürich, señor, cafe\u0301, ﬁn.", None),
    ("emoji", "🦀 a crab, a family 👨\u200d👩\u200d👧, a flag 🇧🇪 and a thumb 👍🏽", None),
    ("chinese, japanese, korean", "模型在主机上, モデル, 모델 and so on", None),
    ("spaces around", "   two  spaces, and a tab\tbetween   ", None),
    ("lines", "\n\nfirst\n    second, further in\r\n\n\nlast\n", None),
    ("specials written out", "one<|endoftext|>two</s>three[SEP]four <s> five", None),
    ("unlikely ones", "\u00a0nbsp \u200b zero \u0000 nul \ufffd \ue000 ᚠ İstanbul ß ǅ", None),
    ("one letter", "a ", None),
    ("cut", LONG, 40),
    ("cut within a character", "🦀模型🦀模型🦀模型🦀模型🦀模型🦀模型🦀模型🦀模型", 18),
    ("cut that cuts nothing", "Short enough.", 64),
]
LABELLED = [
    ("a number", {"text": "See you at noon.", "label": 0}, None),
    ("a name", {"text": "Win a FREE prize now!!! 💰", "label": "spam"}, None),
    ("another name", {"text": "  Déjà vu,  naïve 模型\n", "label": "ham"}, None),
    ("longer than the file's truncation", {"text": LONG[:220], "label": 1}, None),
    ("cut", {"text": LONG, "label": "ham"}, 30),
    ("pair", {"text": "What is the bound?", "text_pair": "One layer, twice.", "label": "ham"}, None),
    ("pair, longer than the file's truncation",
     {"text": LONG[:120], "text_pair": LONG[200:300], "label": 1}, None),
    ("pair, the first cut", {"text": LONG, "text_pair": "Is it spam?", "label": 1}, 32),
    ("pair, the second cut", {"text": "Is it spam?", "text_pair": LONG, "label": "spam"}, 33),
    ("pair, both cut, odd", {"text": LONG, "text_pair": LONG[300:], "label": 0}, 40),
    ("pair, both cut, even", {"text": LONG[:200], "text_pair": LONG[300:], "label": 0}, 41),
    ("pair, cut to little", {"text": "one two three four", "text_pair": "five six seven", "label": 0}, 8),
]
ASK, ANSWER = message("user", "What is the bound?"), message("assistant", "One layer, twice.")
CHATS = [
    ("one turn", [ASK, ANSWER], None),
    ("system", [message("system", "You are helpful."), ASK, ANSWER], None),
    ("turns", [ASK, ANSWER, message("user", "And the batch? 模型"),
               message("assistant", "What it needs: 🦀"), message("user", "Ça va!"),
               message("assistant", "oui")], None),
    ("system and turns", [message("system", "  Be short.\n"), message("user", "a\nb"),
                          message("assistant", "c\n\nd"), message("user", " e "),
                          message("assistant", " f ")], None),
    ("spaces ahead of the answer", [ASK, message("assistant", "    let mut loss = 0.0;\n")], None),
    ("lines ahead of the answer", [ASK, message("assistant", "\n\nOne.")], None),
    ("emoji ahead of the answer", [ASK, message("assistant", "🦀")], None),
    ("an answer without words", [ASK, message("assistant", ""), ASK, ANSWER], None),
    ("an answer first", [ANSWER, ASK, message("assistant", "The same.")], None),
    ("a question last", [ASK, ANSWER, message("user", "Is it so?")], None),
    ("an answer that quotes", [message("user", "Say Assistant: <|im_start|>assistant"),
                               message("assistant", "What is the bound?")], None),
    ("cut in the answer", [ASK, message("assistant", LONG)], 48),
    ("cut in the question", [ASK, ANSWER, message("user", LONG)], 72),
]
PROMPTS = [
    ("plain", "The device meets", " one layer at a time.", None),
    ("lines", "Question: what is the bound?\nAnswer:\n", "One layer,\ntwice.", None),
    ("within a word", "Every gradi", "ent has one accumulator.", None),
    ("within spaces", "{\n  ", "  let weights = 1;\n}\n", None),
    ("space at the end of the prompt", "Win a free ", "prize now", None),
    ("unicode", "模型在主机上, ", "🦀 naïve 模型", None),
    ("no prompt", "", "One layer.", None),
    ("no prompt, a line first", "", "\nOne layer.", None),
    ("ends itself", "Say it:", " done<|endoftext|>", None),
    ("ends itself, with </s>", "Say it:", " done</s>", None),
    ("cut in the completion", "Tell me all.\n", LONG, 24),
    ("cut at the end", "a b c d e f g h", " i j k l m n o p q r s t u v w x y z", 24),
]


def overlapping(offsets, spans):
    return [any(start < end and start < last and first < end for first, last in spans)
            for start, end in offsets]


def labelled(ids, chosen):
    return [token if keep else IGNORED for token, keep in zip(ids, chosen, strict=True)]


def limits(cut):
    return {"truncation": True, "max_length": cut} if cut else {}


def case(directory, name, kind, line, cut, ids, labels, types=None):
    assert len(ids) <= (cut or POSITIONS), (directory, kind, name, len(ids))
    return {"directory": directory, "name": name, "kind": kind, "line": line, "positions": cut or POSITIONS,
            "too_long": "cut" if cut else "error", "input_ids": ids, "token_type_ids": types,
            "labels": labels}


def texts(directory, tokenizer):
    for name, text, cut in TEXTS:
        made = tokenizer(text, return_token_type_ids=True, **limits(cut))
        ids, masked = made["input_ids"], directory == "wordpiece"
        yield case(directory, name, "text", {"text": text}, cut, ids, None if masked else ids,
                   made["token_type_ids"] if masked else None)


def classes(directory, tokenizer, label2id):
    for name, line, cut in LABELLED:
        made = tokenizer(line["text"], line.get("text_pair"), return_token_type_ids=True, **limits(cut))
        yield case(directory, name, "pair" if "text_pair" in line else "label", line, cut, made["input_ids"],
                   [label2id.get(line["label"], line["label"])], made["token_type_ids"])


def chats(directory, tokenizer):
    for name, messages, cut in CHATS:
        # Not apply_chat_template: it refuses to render no messages, which is what precedes a first answer.
        render = lambda until, ahead, tagged=False: render_jinja_template(
            [messages[:until]], chat_template=tokenizer.chat_template, add_generation_prompt=ahead,
            return_assistant_tokens_mask=tagged, **tokenizer.special_tokens_map)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        made = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, **limits(cut))
        offsets, spans = made["offset_mapping"], []
        truth = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=directory == "llama", **limits(cut))
        ids = truth["input_ids"]
        assert ids == made["input_ids"]
        for at, said in enumerate(messages):
            if said["role"] == "assistant" and directory == "bpe":
                ahead, through = render(at, True)[0][0], render(at + 1, False)[0][0]
                assert through.startswith(ahead) and whole.startswith(through)
                spans.append((len(ahead), len(through)))
        if directory == "llama":
            spans = render(len(messages), False, True)[1][0]
        chosen = overlapping(offsets, spans)
        assert directory == "bpe" or chosen == [mask == 1 for mask in truth["assistant_masks"]]
        assert any(chosen) and not all(chosen)
        yield case(directory, name, "chat", {"messages": messages}, cut, ids, labelled(ids, chosen))


def prompts(directory, tokenizer):
    for name, prompt, completion, cut in PROMPTS:
        made = tokenizer(prompt + completion, return_offsets_mapping=True)
        ids, span = made["input_ids"], (len(prompt), len(prompt + completion))
        labels = labelled(ids, overlapping(made["offset_mapping"], [span]))
        if ids[-1] != tokenizer.eos_token_id:
            ids, labels = ids + [tokenizer.eos_token_id], labels + [tokenizer.eos_token_id]
        line = {"prompt": prompt, "completion": completion}
        yield case(directory, name, "prompt", line, cut, ids[:cut], labels[:cut])


def main():
    cases = []
    for number, make in enumerate((bpe, wordpiece, llama)):
        directory = make.__name__
        folder = HERE / directory
        shutil.rmtree(folder, ignore_errors=True)
        torch.manual_seed(number)
        made, model = make()
        assert model.config.vocab_size == len(made)
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        made.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        saved = json.loads((folder / "tokenizer.json").read_text())
        assert len(tokenizer) == len(made) and json.loads(tokenizer.backend_tokenizer.to_str()) == saved
        cases += texts(directory, tokenizer)
        if directory == "wordpiece":
            cases += classes(directory, tokenizer, model.config.label2id)
            continue
        cases += chats(directory, tokenizer)
        cases += prompts(directory, tokenizer)
        cases.append({"directory": directory, "name": "stream", "kind": "stream", "file": "stream.txt",
                      "positions": 32, "input_ids": tokenizer(STREAM)["input_ids"]})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "cases.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
