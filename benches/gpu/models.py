"""The models that are measured, in our words and the peer's."""

LLAMA_8B = {"family": "llama", "preset": "llama-7b", "hidden": 4096, "intermediate": 14336,
            "heads": 32, "kv_heads": 8, "vocabulary": 128256, "length": 2048, "layers": 32}
LLAMA_3B = {**LLAMA_8B, "preset": "llama-1b", "hidden": 3072, "intermediate": 8192, "heads": 24,
            "layers": 28}
BERT = {"family": "bert", "preset": "bert-large", "hidden": 1024, "intermediate": 4096, "heads": 16,
        "kv_heads": 16, "vocabulary": 30522, "length": 128, "layers": 24}
TOY = {"hidden": 64, "intermediate": 128, "heads": 4, "vocabulary": 512, "length": 32, "layers": 3}
TOY_LLAMA = {**LLAMA_8B, **TOY, "kv_heads": 2}
TOY_BERT = {**BERT, **TOY, "kv_heads": 4}


def llama(flags, model=LLAMA_8B):
    """A model of Llama's layers, the tokens of a step, and the sequences of a micro-batch."""
    return (TOY_LLAMA | {"preset": model["preset"]}, 256, 2) if flags.quick else (model, 65536, 4)


def small_vocabulary(model):
    """A large table of tokens is mostly drawn and updated, which says nothing of the layers."""
    return {**model, "vocabulary": min(model["vocabulary"], 8192)}


def bert(flags):
    """BERT-Large, the tokens of a step, and the sequences of a micro-batch."""
    return (TOY_BERT, 256, 4) if flags.quick else (BERT, 256 * 128, 64)
