"""Times tools/preprocess.py against tools/preprocess_data.py of Megatron-LM, on this machine.

    python -m benchmarks.preprocess --megatron CHECKOUT --out result.json

Both tokenize the sources of Python's standard library, as JSON lines, in alternating rounds, and
the files that they write are compared. Rates leave out the start of the processes, which is timed
in each round with a corpus of one line. CHECKOUT is one of Megatron-LM; without it this package's
tool alone is timed. Rates by the clock need a machine that runs nothing else.
"""

import argparse
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_fp4.mcore.data import prepare_data
from megatron_fp4.mcore.data.text import library_documents
from testing.builders.corpus import hugging_face_tokenizer, write_lines
from tools import pages
from tools.stamp import stamp, write

ROOT = Path(__file__).parents[1]
COPIES, VOCABULARY, ROUNDS, WORKERS = 4, 8192, 3, (1, 2)
OURS, THEIRS = "tools/preprocess.py", "Megatron-LM's tools/preprocess_data.py"


def command(tool: str, text: Path, kind: str, model: Path, output: Path, workers: int) -> list[str]:
    """The command line of a tool, a path of OURS or of THEIRS in a checkout."""
    words: list[object] = [sys.executable, tool]
    flags = ["--tokenizer-type", kind, "--tokenizer-model", model, "--workers", workers]
    if tool.startswith(str(ROOT)):
        words += [text, "--output", output, *flags]
    else:
        output.mkdir()
        prefix = output / "train"
        words += ["--input", text, "--output-prefix", prefix, "--append-eod", *flags]
    return [str(word) for word in words]


def timed(words: list[str]) -> tuple[float, float]:
    """The seconds of a command by the clock, and of all its processes on a core."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, sum(
        getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime")
    )


def digests(output: Path) -> list[str]:
    """The SHA-256 of the dataset in a folder."""
    files = [output / f"train_text_document.{end}" for end in ("bin", "idx")]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def rates(folder: Path, tools: dict[str, str], kind: str, model: Path) -> list[dict[str, Any]]:
    """A row for each tool and number of workers: documents and megabytes of text a second."""
    documents = [document.text for document in library_documents()] * COPIES
    text = write_lines(folder / "text.jsonl", documents)
    line = write_lines(folder / "line.jsonl", ["one line"])
    taken: dict[tuple[str, int, Path], list[tuple[float, float]]] = {}
    made = set()
    for number in range(ROUNDS):
        for workers in WORKERS:
            for name, tool in tools.items():
                for path in (line, text):
                    output = folder / f"{kind}-{number}-{workers}-{name[:5]}-{path.stem}"
                    words = command(tool, path, kind, model, output, workers)
                    taken.setdefault((name, workers, path), []).append(timed(words))
                made.add(tuple(digests(output)))
    size = sum(len(document.encode()) for document in documents) / 1e6
    rows = []
    for workers in WORKERS:
        for name in tools:
            # By the clock the fastest round counts: other programs can only slow a run down. The
            # load of the machine is in the result.
            clock, core = (
                choose(pair[at] for pair in taken[name, workers, text])
                - choose(pair[at] for pair in taken[name, workers, line])
                for at, choose in ((0, min), (1, statistics.median))
            )
            rows.append(
                {
                    "tool": name,
                    "tokenizer": kind,
                    "workers": workers,
                    "documents_per_second": round(len(documents) / clock, 1),
                    "mb_per_second": round(size / clock, 2),
                    "mb_per_core_second": round(size / core, 2),
                    "seconds": [round(pair[0], 2) for pair in taken[name, workers, text]],
                    "start_seconds": [round(pair[0], 2) for pair in taken[name, workers, line]],
                    "same_files": len(made) == 1,
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table of the rows."""
    head = ["tokenizer", "tool", "workers", "documents/s", "MB/s", "MB per second of a core"]
    body = []
    for row in rows:
        cells = [row["tokenizer"], f"`{row['tool']}`", str(row["workers"])]
        cells.append(f"{row['documents_per_second']:.0f}")
        cells += [f"{row[key]:.2f}" for key in ("mb_per_second", "mb_per_core_second")]
        body.append(cells)
    return pages.table(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/preprocess.json")
    given = parser.parse_args()
    tools = {OURS: str(ROOT / OURS)}
    if given.megatron is not None:
        tools[THEIRS] = str(given.megatron / "tools" / "preprocess_data.py")
    texts = [document.text for document in library_documents()]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sp.model").write_bytes(prepare_data.train_tokenizer(texts, VOCABULARY))
        models = {
            "SentencePieceTokenizer": folder / "sp.model",
            "HuggingFaceTokenizer": hugging_face_tokenizer(
                folder / "hf", vocab_size=VOCABULARY, text=texts
            ),
        }
        for kind, model in models.items():
            rows += rates(folder, tools, kind, model)
    load = [round(it, 1) for it in os.getloadavg()]  # of the last 1, 5 and 15 minutes
    result = {
        **stamp(),
        "cores": os.cpu_count(),
        "load": load,
        "rounds": ROUNDS,
        "vocabulary": VOCABULARY,
        "rows": rows,
    }
    result["table"] = table(rows)
    write(given.out, result)


if __name__ == "__main__":
    main()
