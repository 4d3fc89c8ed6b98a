"""The page in a real browser: its script runs, draws, and answers the mouse."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.report.page import page
from megatron_fp4.report.reading import read
from testing.builders.metrics import operand, start, whole_run, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,900",
)  # fmt: skip

# Runs after the page's own script and writes what it finds into the page.
PROBE = """<script>
const all = (selector) => [...document.querySelectorAll(selector)];
const found = {};
try {
  const canvases = all("canvas.cells");
  found.failures = all(".failure").map((one) => one.textContent);
  found.headings = all("h2").map((one) => one.textContent);
  found.curves = all(".curve[d^=M]").length;
  found.bars = all(".bar").length;
  found.images = all("img").length;
  found.notes = all(".quiet").map((one) => one.textContent);
  found.options = all("select").map((list) => [...list.options].map((one) => one.textContent));
  found.differs = all(".differs").map((one) => one.textContent);
  found.lines = all("pre span").map((one) => one.textContent);
  found.warnings = all(".warnings li").length;
  found.wide = document.documentElement.scrollWidth > innerWidth;
  const at = (canvas, across, down) => {
    const box = canvas.getBoundingClientRect();
    return { clientX: box.left + across * box.width, clientY: box.top + down * box.height };
  };
  const colour = (canvas, across, down) => [...canvas.getContext("2d").getImageData(
    across * canvas.width, down * canvas.height, 1, 1).data];
  found.colours = PLACES.map(([across, down]) => canvases.map((one) => colour(one, across, down)));
  found.tips = PLACES.map(([across, down]) => canvases.map((one) => {
    one.dispatchEvent(new PointerEvent("pointermove", at(one, across, down)));
    return document.getElementById("tip").textContent;
  }));
  if (canvases.length) {
    canvases[0].dispatchEvent(new MouseEvent("click", at(canvases[0], ...PLACES[0])));
    found.chosen = all("select").at(-1).selectedOptions[0]?.textContent;
    found.marks = all(".mark").length;
    found.readouts = all(".readout").slice(4).map((one) => one.textContent);
    const metric = all("select")[1];
    metric.value = "gain";
    metric.dispatchEvent(new Event("change"));
    found.after = all("select")[1].selectedOptions[0]?.textContent;
    const kind = all("select")[2];
    kind.value = kind.options[1]?.value;
    kind.dispatchEvent(new Event("change"));
    const last = all("canvas.cells")[0];
    last.dispatchEvent(new PointerEvent("pointermove", at(last, 0.99, 0.99)));
    found.filtered = document.getElementById("tip").textContent;
    found.legend = all(".legend text").map((one) => one.textContent);
  }
} catch (error) {
  found.error = String(error);
}
document.body.append(Object.assign(document.createElement("pre"),
  { id: "probe", textContent: JSON.stringify(found) }));
</script></body>"""


def shown(
    text: str, folder: Path, places: tuple[tuple[float, float], ...] = ((0.5, 0.5),)
) -> dict[str, Any]:
    """What the probe finds in the page `text`. places: of heat maps, as shares of their size."""
    file = folder / "probed.html"
    probe = PROBE.replace("PLACES", json.dumps(places))
    file.write_text(text.replace("</body>", probe), errors="xmlcharrefreplace")
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom",
         file.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert match, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    assert "error" not in found, found["error"]
    return found


def test_a_run_is_drawn(tmp_path: Path) -> None:
    run = read(write(tmp_path, whole_run(layers=4, points=20)))
    text = page([run])
    found = shown(text, tmp_path)
    assert found["failures"] == [] and not found["wide"]
    assert found["headings"] == [
        "Training", "Layers", "Histograms", "Warnings", "Start table", "Environment", "Arguments",
    ]  # fmt: skip
    assert found["curves"] == 5  # training, held-out, norm, rate, tokens/s
    assert found["bars"] == 6 * 18 + 10 and found["warnings"] == 1
    assert found["colours"][0][0][3] == 255  # painted
    assert found["marks"] == 2 and found["after"].startswith("gain")
    kinds = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    assert found["options"][2] == ["all", *(f"decoder.layers.*.{kind}" for kind in kinds)]
    assert "wgrad.x" in found["options"][0] and "weights" in found["options"][0]
    assert found["filtered"].startswith("decoder.layers.3.self_attention.linear_qkv\nstep 2000: ")
    assert found["tips"][0][0].startswith("decoder.layers.2.self_attention.linear_qkv\n")
    # Negative control: a script that fails says so, and what it has not reached is not drawn.
    broken = shown(text.replace("function heatMap(", "function heatMop("), tmp_path)
    assert "heatMap is not defined" in broken["failures"][0] and broken["bars"] == 0


def test_a_cell_has_the_place_and_the_colour_of_its_value(tmp_path: Path) -> None:
    """Eleven layers and five steps: value layer + step / 10. Rows are from layer 0 down."""
    steps = (100, 200, 300, 400, 500)
    records = [
        operand(step, f"decoder.layers.{layer}.mlp", zeros=layer + step / 1000, gain=1.0,
                scales={"first": -layer, "counts": [1, 2]})
        for step in steps for layer in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)
    ]  # fmt: skip
    places = ((0.3, 2.5 / 11), (0.01, 0.5 / 11), (0.99, 10.5 / 11))
    found = shown(page([read(write(tmp_path, records))]), tmp_path, places)
    assert found["failures"] == []
    assert [tip for [tip] in found["tips"]] == [
        "decoder.layers.2.mlp\nstep 200: 2.2",
        "decoder.layers.0.mlp\nstep 100: 0.1",
        "decoder.layers.10.mlp\nstep 500: 10.5",
    ]
    [_, [lowest], [highest]] = found["colours"]
    assert (lowest, highest) == ([44, 20, 92, 255], [252, 226, 110, 255])  # .1 to 10.5: of heatmaps
    assert found["chosen"] == "decoder.layers.2.mlp"
    assert found["readouts"] == ["step 200"]
    assert found["legend"] == ["0.5", "1", "1.5"]  # of the one value 1


def test_two_runs_share_colours_and_steps(tmp_path: Path) -> None:
    a = [start(lr=1), *(operand(step, "x.0.w", zeros=step / 100) for step in (10, 20, 30, 40))]
    b = [start(lr=2), *(operand(step, "x.0.w", zeros=0.2) for step in (10, 20))]
    runs = [read(write(tmp_path / name, records)) for name, records in (("a", a), ("b", b))]
    found = shown(page(runs), tmp_path, ((0.3, 0.5), (0.9, 0.5)))
    assert found["failures"] == [] and not found["wide"]
    (left, right), (later, missing) = found["colours"]
    assert left == right  # .2 at step 20 in both
    assert later == [252, 226, 110, 255] and missing[3] == 0
    assert found["tips"] == [
        ["x.0.w\nA, step 20: 0.2\nB, step 20: 0.2"] * 2,
        ["x.0.w\nA, step 40: 0.4\nB: no value"] * 2,
    ]
    assert found["differs"] == ["lr12"]  # the rows of tables and lines that differ


def test_what_is_missing_is_a_sentence(tmp_path: Path) -> None:
    found = shown(page([read(write(tmp_path, [{"kind": "evaluation", "step": 1}]))]), tmp_path)
    assert found["failures"] == [] and found["curves"] == 0
    for part in ("metrics of layers", "histograms", "start table", "environment", "arguments"):
        assert f"The run has logged no {part}." in found["notes"]
    assert found["notes"].count("The run has logged none.") == 4
    assert "There are no warnings." in found["notes"]


def test_a_run_without_a_recipe_is_drawn_alone_and_beside_another(tmp_path: Path) -> None:
    steps = [{"kind": "step", "step": number, "loss": 3.0} for number in (100, 200)]
    plain = read(write(tmp_path / "a", [start(recipe=None), *steps]))
    found = shown(page([plain]), tmp_path)
    assert found["failures"] == [] and found["curves"] == 1 and found["bars"] == 0
    assert found["notes"][0].startswith("no recipe · ")
    other = read(write(tmp_path / "b", whole_run(layers=1, points=2)))
    found = shown(page([plain, other]), tmp_path)
    # B has four curves, and lines in the histograms of six operands and QuantConf.
    assert found["failures"] == [] and found["curves"] == 1 + 4 + 7 and found["bars"] == 0
    assert [note.split(" · ")[0] for note in found["notes"][:2]] == ["no recipe", "recipe tetrajet"]
    assert any("Run A has no such metric." in note for note in found["notes"])


def test_text_of_files_is_shown_and_not_run(tmp_path: Path) -> None:
    hostile = "</script><script>document.body.remove()</script><img src=x onerror=alert(1)>"
    record = start(recipe=hostile)
    record["arguments"][hostile] = hostile
    record["lines"] = [hostile]
    warning = {"kind": "warning", "step": 1, "layer": hostile, "line": hostile}
    records = [record, operand(1, hostile, hostile, zeros=1.0), warning]
    found = shown(page([read(write(tmp_path / "<b>", records))]), tmp_path)
    assert found["failures"] == [] and found["images"] == 0 and found["warnings"] == 1
    assert found["lines"][0] == hostile and [hostile] in found["options"]
    assert found["tips"][0][0].startswith(hostile)
