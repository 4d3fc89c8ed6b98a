"""The page has what was read, escapes it, and loads nothing."""

import base64
import json
import math
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.errors import ConfigError
from megatron_fp4.report import command
from megatron_fp4.report.embedding import MOST_HISTOGRAMS, MOST_STEPS, embedded, thinned
from megatron_fp4.report.reading import read
from testing.builders.metrics import operand, start, whole_run, write

ROOT = Path(__file__).parents[2]


class Elements(HTMLParser):
    """The elements of a page: (name, attributes), and the text of scripts, in their order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += data
        if self.found and self.found[-1][0] == "title":
            self.title += data


def page_of(*runs: Path) -> Elements:
    output = command.run([*map(str, runs), "--output", str(runs[0] / "page.html")])
    return Elements(output.read_text())


def data_of(*runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page_of(*runs).scripts[0])
    return found


def floats(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def float32(value: float) -> float:
    [rounded] = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def cells(data: dict[str, Any], run: int, group: str, metric: str) -> dict[tuple[str, int], float]:
    """The values of a map that are there, by layer and step."""
    maps = data["runs"][run]["maps"]
    [one] = [one for one in maps if (one["group"], one["metric"]) == (group, metric)]
    values = iter(floats(one["values"]))
    places = [(data["layers"][row], step) for row in one["layers"] for step in one["steps"]]
    return {key: value for key in places if not math.isnan(value := next(values))}


def test_the_page_has_every_number_of_the_file(tmp_path: Path) -> None:
    records = list(whole_run(layers=11, points=12))
    data = data_of(write(tmp_path, records))
    assert data["layers"][:2] == [
        "decoder.layers.0.self_attention.linear_qkv",
        "decoder.layers.0.self_attention.linear_proj",
    ]
    assert data["layers"][-1] == "decoder.layers.10.mlp.linear_fc1"
    written: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for record in records:
        if record["kind"] in ("operand", "weight", "gradient"):
            group = record["kind"]
            if group == "operand":
                group = f"{record['gemm']}.{record['operand']}"
            for metric, value in record["metrics"].items():
                if not isinstance(value, dict):
                    place = record["layer"], record["step"]
                    written.setdefault((group, metric), {})[place] = float32(value)
    assert len(written) == 6 * 5 + 5 + 2 == len(data["runs"][0]["maps"])
    for (group, metric), values in written.items():
        assert cells(data, 0, group, metric) == values
    steps = [record for record in records if record["kind"] == "step"]
    for name in ("step", "loss", "grad_norm", "learning_rate"):
        assert data["runs"][0]["steps"][name] == [record[name] for record in steps]
    assert data["runs"][0]["warnings"][0]["line"] == records[-1]["line"]
    assert data["runs"][0]["starts"][0]["lines"] == records[0]["lines"]


def test_histograms_of_the_page_are_those_of_the_file(tmp_path: Path) -> None:
    records = [
        operand(100, "a", scales={"first": -12, "counts": [3, 8]}),
        operand(200, "a", scales={"first": -14, "counts": [1, 0, 2, 9, 4]}),
        operand(200, "b", scales={"first": 5, "counts": [7]}),
    ]
    [found] = data_of(write(tmp_path, records))["runs"][0]["histograms"]
    assert found["steps"] == [100, 200] and found["width"] == 1
    a, b = found["layers"]["0"], found["layers"]["1"]
    assert (a["first"], a["bins"]) == (-14, 5)
    assert floats(a["counts"]) == [0, 0, 3, 8, 0, 1, 0, 2, 9, 4]
    assert b["bins"] == 1 and math.isnan(floats(b["counts"])[0]) and floats(b["counts"])[1] == 7


def test_missing_values_and_repeated_steps(tmp_path: Path) -> None:
    records = [
        operand(1, "a", zeros=0.1), operand(2, "a", zeros=0.2), operand(3, "b", zeros=None),
        start(step=1), operand(2, "a", zeros=0.5), operand(3, "b", zeros=0.7),
        operand(1, "b", zeros=1e300), {"kind": "step", "step": 1, "loss": None},
    ]  # fmt: skip
    data = data_of(write(tmp_path, records))
    assert cells(data, 0, "fprop.w", "zeros") == {
        ("a", 1): float32(0.1),
        ("a", 2): 0.5,
        ("b", 1): math.inf,  # beyond float32: the page draws it as missing
        ("b", 3): float32(0.7),
    }
    assert data["runs"][0]["steps"]["loss"] == [None]


def test_many_steps_are_thinned_and_the_page_knows(tmp_path: Path) -> None:
    count = MOST_STEPS + 100
    records = [
        operand(step, "a", zeros=step, scales={"first": 0, "counts": [step]})
        for step in range(1, count + 1)
    ]
    data = embedded([read(write(tmp_path, records))])
    [one] = data["runs"][0]["maps"]
    assert len(one["steps"]) == MOST_STEPS and one["all"] == count
    assert floats(one["values"]) == one["steps"] and one["steps"][-1] == count
    [histograms] = data["runs"][0]["histograms"]
    assert len(histograms["steps"]) == MOST_HISTOGRAMS and histograms["all"] == count
    assert floats(histograms["layers"][0]["counts"]) == histograms["steps"]
    assert thinned(range(7), 3) == [0, 3, 6] and thinned(range(3), 3) == [0, 1, 2]


def test_two_runs_share_the_order_of_layers(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [operand(1, name, zeros=0.1) for name in ("x.2.w", "x.10.w")])
    b = write(tmp_path / "b", [operand(5, name, zeros=0.2) for name in ("x.11.w", "x.2.w")])
    data = data_of(a, b)
    assert data["layers"] == ["x.2.w", "x.10.w", "x.11.w"]
    assert cells(data, 0, "fprop.w", "zeros") == dict.fromkeys(
        [("x.2.w", 1), ("x.10.w", 1)], float32(0.1)
    )
    assert cells(data, 1, "fprop.w", "zeros") == dict.fromkeys(
        [("x.2.w", 5), ("x.11.w", 5)], float32(0.2)
    )
    assert [run["name"] for run in data["runs"]] == [str(a), str(b)]


def test_what_a_resumed_run_changed_is_told(tmp_path: Path) -> None:
    second = start(step=50, lr=0.002, data_path=["x", "y"])
    del second["environment"]["device"]
    [run] = data_of(write(tmp_path, [start(), second]))["runs"]
    assert [one["changes"] for one in run["starts"]] == [
        [],
        [
            "device: NVIDIA H200 → (not set)",
            'data_path: (not set) → ["x", "y"]',
            "lr: 0.001 → 0.002",
        ],
    ]


def test_a_run_without_a_recipe_is_beside_one_with_a_recipe(tmp_path: Path) -> None:
    steps = [{"kind": "step", "step": number, "loss": 3.0 / number} for number in (1, 2)]
    plain = [start(recipe=None), *steps, {"kind": "evaluation", "step": 2, "loss": 2.0}]
    a, b = write(tmp_path / "a", plain), write(tmp_path / "b", whole_run(layers=1, points=2))
    for data in (data_of(a), data_of(a, b)):
        run = data["runs"][0]
        assert run["starts"][0]["recipe"] == "" and run["maps"] == run["histograms"] == []
        assert run["steps"]["loss"] == [3.0, 1.5] and run["evaluations"]["loss"] == [2.0]
    assert data["runs"][1]["starts"][0]["recipe"] == "tetrajet" and data["runs"][1]["maps"]


HOSTILE = "</script><script>document.title = 'broken'</script><img src=x onerror=alert(1)>&amp;"


def test_text_of_files_cannot_end_the_script(tmp_path: Path) -> None:
    record = start(recipe=HOSTILE)
    record["arguments"][HOSTILE] = HOSTILE
    record["lines"] = [HOSTILE, "\u2028 \ud800 $title ${data}"]
    record["environment"][HOSTILE] = HOSTILE
    warning = {"kind": "warning", "step": 1, "layer": HOSTILE, "line": HOSTILE}
    folder = write(tmp_path / "<b>&lt;$style", [record, operand(1, HOSTILE, zeros=1.0), warning])
    page = page_of(folder)
    assert [tag for tag, _ in page.found].count("script") == 2
    assert "img" not in [tag for tag, _ in page.found]
    assert page.title.strip() == str(folder)
    data = json.loads(page.scripts[0])
    assert data["layers"] == [HOSTILE] and data["runs"][0]["starts"][0]["lines"] == record["lines"]
    assert data["runs"][0]["warnings"][0]["line"] == HOSTILE
    # Negative control: as plain JSON the name ends the script element.
    whole = (folder / "page.html").read_text()
    broken = Elements(whole.replace("\\u003c", "<"))
    assert [tag for tag, _ in broken.found].count("script") > 2


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, whole_run(layers=2, points=3))
    page = page_of(folder)
    text = (folder / "page.html").read_text()
    assert set(re.findall(r"https?://[^\"\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not [attrs for _, attrs in page.found if {"src", "href"} & attrs.keys()]
    assert "@import" not in text and set(re.findall(r"url\(.", text)) == {"url(#"}
    policies = [attrs["content"] for _, attrs in page.found if "http-equiv" in attrs]
    assert policies and str(policies[0]).startswith("default-src 'none'")


def test_the_command_writes_beside_the_metrics(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [start()])
    assert command.run([str(a)]) == a / "report.html"
    assert command.run([str(a / "metrics.jsonl"), str(a)]) == a / "report.html"
    assert "report.html" in {path.name for path in a.iterdir()}
    with pytest.raises(ConfigError, match=r"not writable: Is a directory; give another --output"):
        command.run([str(a), "--output", str(tmp_path)])
    with pytest.raises(ConfigError, match="has the metrics of a run: give another file"):
        command.run([str(a), "--output", str(a / "metrics.jsonl")])
    with pytest.raises(ConfigError, match=r"other/metrics.jsonl|other: no such file"):
        command.run([str(a), str(tmp_path / "other")])


def test_an_error_is_one_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    done = subprocess.run(
        [sys.executable, "-m", "tools.report", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"megatron-fp4: error: {tmp_path}/metrics.jsonl is empty; "
        "give the metrics.jsonl of a run that has logged a step\n"
    )
