"""All parts, in the order of what they tell."""

from ..budget import Part
from . import (against, check, copies, goldens, kernels, machine, memory, product, race, sanitizer,
               shapes)

# Name, what it tells, least and most seconds on an H100 with 16 cores. The first parts end by
# themselves. Their least is what they take when no kernel is compiled yet, and what they leave goes
# to the parts after them, which measure more rounds in more time.
PARTS = [
    Part("machine", "the machine, its libraries and rates, the first start", 75, 150, machine.run),
    Part("check", "every kernel against the CPU's", 75, 150, check.run),
    Part("goldens", "models against PyTorch's, features against the CPU", 60, 240, goldens.run),
    Part("sanitizer", "compute-sanitizer on what failed until here", 20, 120, sanitizer.run),
    Part("llama", "layers of Llama-3-8B beside PyTorch", 120, 300, against.llama),
    Part("bert", "BERT-Large beside PyTorch", 75, 240, against.bert),
    Part("race", "the paper's race: BERT-Large in 16 GiB and in 4 GiB", 75, 300, race.run),
    Part("copies", "what copies cost: slots, resident, without copies", 60, 240, copies.run),
    Part("kernels", "the time of each kernel", 30, 120, kernels.run),
    Part("streaming", "a loop in PyTorch that uploads each layer", 60, 300, against.streaming),
    Part("memory", "the driver's count of device memory, beside the plan", 45, 120, memory.run),
    Part("product", "a large product, ten seconds without a pause", 25, 60, product.run),
    Part("llama8b", "as many of the 8B's layers as the host holds", 120, 560, shapes.llama8b),
    Part("llama3b", "Llama-3.2-3B's shape", 90, 560, shapes.llama3b),
    Part("llama8b_clip", "the same with clip_norm, 128k tokens", 120, 560, shapes.llama8b_clip),
    Part("largest", "the deepest model that the host holds", 180, 560, shapes.largest),
]
# Several parts by one name.
GROUPS = {"peers": ["llama", "bert", "race", "streaming"]}
