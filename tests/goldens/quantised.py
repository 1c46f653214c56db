"""Weights that bitsandbytes quantises: NF4 with double quantisation (QLoRA), and int8 by row (LLM.int8()).

Writes quantised/golden.json beside itself: for each case what its input is made from, and the codes, scales and
decoded values as bytes in hexadecimal (little-endian), or their SHA-256 where there are many.

bitsandbytes has several versions of its rule. These are its kernels in PyTorch, which decide like those for CUDA:

- Its library for the CPU looks 8-bit codes up in a table of 65,536 entries, which is not the nearest code
  everywhere. Here they are those of the kernels in PyTorch.
- Its kernels in PyTorch divide a short last block by its absmax, where those for CUDA multiply by the reciprocal
  as in whole blocks. Here short blocks are filled up with zeros, so that all are whole.
- The mean of the absmax depends on the order of PyTorch's sum. Here it is the sum in f64, rounded.

The script says where the library decides otherwise.

    pip install torch bitsandbytes && python quantised.py
"""

import hashlib
import json
import pathlib

import bitsandbytes
import numpy as np
import torch
from bitsandbytes import functional

BLOCK, GROUP = 64, 256
OPS = torch.ops.bitsandbytes
IN_PYTORCH = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
MAP = functional.create_dynamic_map()

# Bits of values that are written into inputs.
TINY, LARGEST, NEGATIVE_ZERO = 0x000116C2, 0x7F7FFFFF, 0x80000000


def in_pytorch(op, *arguments):
    """Calls the version of an operation that is written in PyTorch."""
    return op.default.redispatch(IN_PYTORCH, *arguments)


def bits_of(value):
    return int(np.float32(value).view(np.uint32))


def make_input(rows, columns, seed, bf16=False, zeros=(), put=()):
    """Uniform noise, of another size in each block. `zeros`: blocks that are 0; `put`: places and bits."""
    state, values = (seed * 0x9E3779B97F4A7C15 ^ 0x12345678) % 2**64, []
    for _ in range(rows * columns):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        values.append(state >> 40)
    values = np.array(values, np.float32) / np.float32(2**23) - np.float32(1)
    blocks = np.arange(rows * columns) // BLOCK
    values *= ((1 + blocks * 37 % 101) / 128).astype(np.float32)
    if bf16:
        values = torch.from_numpy(values).bfloat16().float().numpy()
    values[np.isin(blocks, zeros)] = 0
    for at, bits in put:
        values.view(np.uint32)[at] = bits
    return torch.from_numpy(values)


def filled_up(values, multiple):
    return torch.nn.functional.pad(values, (0, -len(values) % multiple))


def quantised_nf4(values):
    """Codes, their scales and the decoded values of a vector, and what the library decides otherwise."""
    n, x = len(values), filled_up(values, BLOCK)
    codes, absmax = in_pytorch(OPS.quantize_4bit, x, BLOCK, "nf4", torch.uint8)
    blocks = len(absmax)
    offset = absmax.double().mean().float()
    centred = absmax - offset
    absmax_codes, groups = in_pytorch(OPS.quantize_blockwise, filled_up(centred, GROUP), MAP, GROUP)
    absmax_codes = absmax_codes[:blocks].contiguous()

    of_absmax = functional.QuantState(groups, code=MAP, blocksize=GROUP, dtype=torch.float32)
    state = functional.QuantState(absmax_codes, x.shape, None, BLOCK, "nf4", torch.float32, offset, of_absmax)
    decoded = functional.dequantize_4bit(codes, state).reshape(-1)
    scales = in_pytorch(OPS.dequantize_blockwise, absmax_codes, groups, MAP, GROUP, torch.float32) + offset
    again = in_pytorch(OPS.dequantize_4bit, codes, scales, BLOCK, "nf4", x.shape, torch.float32)
    assert torch.equal(decoded.view(torch.int32), again.reshape(-1).view(torch.int32)), "one rule to decode"

    whole, of_library = functional.quantize_4bit(x, compress_statistics=True, quant_type="nf4")
    assert torch.equal(whole, codes)
    others = int((of_library.absmax != absmax_codes).sum())
    differs = f"{others} of {blocks} other scales; same mean: {of_library.offset == offset}"
    found = dict(codes=codes[: (n + 1) // 2], absmax_codes=absmax_codes, groups=groups, offset=offset)
    return found | dict(decoded=decoded[:n]), differs


def quantised_int8(x):
    """Codes, scales and decoded values of a matrix."""
    codes, absmax, _ = OPS.int8_vectorwise_quant.default(x, 0.0)
    scales = absmax / 127
    decoded = codes.float() * scales[:, None]
    theirs = functional.int8_vectorwise_dequant(codes, absmax)
    off = (decoded.view(torch.int32) - theirs.view(torch.int32)).abs().max()
    assert off <= 2, "code times scale is their code times absmax times 1/127"
    return dict(codes=codes, scales=scales, decoded=decoded)


def nf4(rows, columns, **how):
    found, differs = quantised_nf4(make_input(rows, columns, **how))
    print(f"nf4 {rows} x {columns}: the CPU library has {differs}")
    return dict(rows=rows, columns=columns, **how) | written(found)


def int8(rows, columns, **how):
    found = quantised_int8(make_input(rows, columns, **how).reshape(rows, columns))
    return dict(rows=rows, columns=columns, **how) | written(found)


def written(tensors):
    """Bytes in hexadecimal, or what begins with # and is their SHA-256."""
    texts = {}
    for name, tensor in tensors.items():
        data = tensor.contiguous().numpy().tobytes()
        texts[name] = data.hex() if len(data) <= 700 else "#" + hashlib.sha256(data).hexdigest()
    return texts


def main():
    halves = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, -126.5]
    golden = dict(
        bitsandbytes=bitsandbytes.__version__,
        torch=torch.__version__,
        nf4_map=functional.get_4bit_type("nf4", device="cpu").numpy().tobytes().hex(),
        dynamic_map=MAP.numpy().tobytes().hex(),
        nf4=[
            nf4(5, 33, seed=1),
            nf4(3, 64, seed=2, zeros=[1]),
            nf4(2, 65, seed=3, zeros=[0], put=[(0, TINY), (5, NEGATIVE_ZERO), (129, bits_of(-0.5))]),
            nf4(2, 8, seed=4, zeros=[0]),
            nf4(4, 48, seed=5, bf16=True),
            nf4(96, 176, seed=6),
            nf4(300, 131, seed=7, bf16=True, zeros=[5, 600]),
        ],
        int8=[
            int8(7, 31, seed=1),
            int8(2, 9, seed=2, put=[(9 + at, bits_of(value)) for at, value in enumerate(halves)]),
            int8(3, 16, seed=3, put=[(17, LARGEST), (40, bits_of(1e-30))]),
            int8(60, 100, seed=4, bf16=True),
        ],
    )
    path = pathlib.Path(__file__).resolve().parent / "quantised/golden.json"
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
