"""Parquet files as pyarrow writes them, with the rows that pyarrow reads.

    python make_parquet.py

Writes goldens/parquet/: plain.parquet (no compression), snappy.parquet and zstd.parquet (pages of the second version, small
pages and row groups), all with the rows of rows.json; masks.parquet, long lists of one value.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).parent / "goldens" / "parquet"
ROWS = 9


def table():
    """Rows with nulls, empty values and values that repeat."""
    at = range(ROWS)
    words = ["red", "green", None, "blue", "", "a text of more than twelve bytes: ä"]
    texts = [words[i % 6] for i in at]
    turns = [[{"role": r, "content": f"{r} {i}"} for r in ("user", "assistant")] for i in at]
    pick = pa.struct({"a": pa.int64(), "b": pa.bool_()})
    return pa.table({
        "text": pa.array(texts, pa.string()),
        "word": pa.array([words[i % 2] for i in at], pa.string()),
        "list": pa.array([None if i % 5 == 4 else [words[(i + k) % 6] for k in range(i % 3)] for i in at], pa.list_(pa.string())),
        "messages": pa.array(turns, pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))),
        "struct": pa.array([None if i % 4 == 3 else {"a": i, "b": i % 2 == 0} for i in at], pick),
        "int8": pa.array([-i for i in at], pa.int8()),
        "int64": pa.array([None if i == 1 else -(2**40) * i for i in at], pa.int64()),
        "uint64": pa.array([2**63 + i for i in at], pa.uint64()),
        "float": pa.array([i / 8 for i in at], pa.float32()),
        "double": pa.array([None if i == 2 else i / 3 for i in at], pa.float64()),
        "map": pa.array([[(f"k{i}", i)] if i % 2 else None for i in at], pa.map_(pa.string(), pa.int32())),
    })


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    rows = table()
    pq.write_table(rows, OUT / "plain.parquet", compression="none", store_schema=False)
    pq.write_table(rows, OUT / "snappy.parquet", compression="snappy", row_group_size=4, store_schema=False)
    pq.write_table(rows, OUT / "zstd.parquet", compression="zstd", data_page_version="2.0", row_group_size=5,
                   data_page_size=32, use_dictionary=["word"], column_encoding={"text": "DELTA_BYTE_ARRAY", "int64": "DELTA_BINARY_PACKED"},
                   store_schema=False)
    masks = pa.table({"mask": pa.array([[1] * 8192] * 120, pa.list_(pa.int8()))})
    pq.write_table(masks, OUT / "masks.parquet", store_schema=False)
    read = [pq.read_table(OUT / f"{name}.parquet").to_pylist() for name in ("plain", "snappy", "zstd")]
    assert read[0] == read[1] == read[2] == rows.to_pylist()
    out = [{k: dict(v) if k == "map" and v is not None else v for k, v in row.items()} for row in read[0]]
    (OUT / "rows.json").write_text(json.dumps(out, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
