"""The orders of torch.distributed.pipelining's generators, for a grid of sizes.

    pip install torch && python actors/tests/goldens/pipelines.py > actors/tests/goldens/pipelines.csv

Each table begins with a line "# kind devices chunks micro-batches"; its rows are those of the CSV
files that PyTorch writes, without empty places and without the reduction of gradients. PyTorch's
table for 1F1B numbers the forward passes of the last stage from 1; they are counted from 0 here.
"""

from types import SimpleNamespace

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)


def table(kind, devices, chunks, micro_batches, orders):
    print("#", kind, devices, chunks, micro_batches)
    for device in range(devices):
        forward, row = {}, []
        for action in orders[device]:
            if action is None or action.computation_type.value not in "FB":
                continue
            stage, what, micro_batch = action[0], action.computation_type.value, action[2]
            if what == "F":
                micro_batch = forward.get(stage, 0)
                forward[stage] = micro_batch + 1
            row.append(f"{stage}{what}{micro_batch}")
        print(",".join(row))


for devices in (1, 2, 3, 4, 8):
    for micro_batches in (1, 2, 4, 6, 8, 12):
        stage = SimpleNamespace(_num_stages=devices, _n_microbatches=micro_batches)
        orders = ScheduleGPipe._get_pipeline_order(stage)
        table("gpipe", devices, 1, micro_batches, orders)
        if micro_batches >= devices:
            orders = Schedule1F1B._get_pipeline_order(stage)
            table("1f1b", devices, 1, micro_batches, orders)
        rounds = max(1, micro_batches // devices)
        for chunks in (1, 2, 3):
            if micro_batches % rounds:
                continue
            ranks = SimpleNamespace(
                pp_group_size=devices,
                n_local_stages=chunks,
                microbatches_per_round=micro_batches // rounds,
                _n_microbatches=micro_batches,
            )
            operations = ScheduleInterleaved1F1B._calculate_single_rank_operations
            orders = {device: operations(ranks, device) for device in range(devices)}
            table("interleaved", devices, chunks, micro_batches, orders)
