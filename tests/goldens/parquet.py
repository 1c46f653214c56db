"""Writes records.jsonl and, with the same records, records.parquet: plain and nested columns, as `datasets` writes them.

    python3 -m pip install pyarrow==26.0.1
    python3 tests/goldens/parquet.py
"""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

RECORDS = [
    {"id": 1, "messages": [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]},
    {"id": 2, "messages": [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "1,80 m"}]},
    {"id": 3, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi!"}]},
    {"id": 4, "tools": [{"type": "function", "function": {"name": "sum", "about": "Adds."}}],
     "messages": [{"role": "user", "content": "1 + 2?"},
                  {"role": "assistant", "content": "", "tool_calls": [{"name": "sum", "arguments": {"y": 1, "x": 2.5}}]}]},
]

folder = Path(__file__).parent / "records"
folder.mkdir(exist_ok=True)
(folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
for compression in ("snappy", "zstd"):
    # The columns of a table are those of its first record.
    table = pyarrow.Table.from_pylist([{"tools": None, **record} for record in RECORDS])
    pyarrow.parquet.write_table(table, folder / f"{compression}.parquet", compression=compression)
