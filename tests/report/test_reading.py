"""metrics.jsonl is read as it was written, whatever ended the run."""

import json
import math
import random
from pathlib import Path

import pytest

from megatron_fp4.errors import ConfigError
from megatron_fp4.report.layers import place
from megatron_fp4.report.page import page
from megatron_fp4.report.reading import Run, read
from testing.builders.metrics import operand, start, whole_run, write


def step(number: int, loss: float | None = 3.0, **others: object) -> dict[str, object]:
    return {"kind": "step", "step": number, "loss": loss, **others}


def losses(run: Run) -> dict[int, float | None]:
    return {number: values["loss"] for number, values in run.steps.items()}


def values(run: Run, group: str, metric: str) -> dict[tuple[str, int], float]:
    """By layer and step; the last of the file wins, as in a dictionary."""
    points, names = run.maps[group, metric], list(run.layers)
    read = zip(points.layers, points.steps, points.values, strict=True)
    return {(names[layer], number): value for layer, number, value in read}


def test_a_folder_and_its_file_are_the_same_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [start(), step(1)])
    by_folder, by_file = read(folder), read(folder / "metrics.jsonl")
    assert by_folder.name == str(folder) and by_folder.steps == by_file.steps


def test_every_kind_is_read(tmp_path: Path) -> None:
    records = list(whole_run(layers=2, points=10))
    run = read(write(tmp_path, records))
    one = next(record for record in records if record["kind"] == "step")
    assert run.steps[100] == {
        "loss": one["loss"],
        "grad_norm": one["grad_norm"],
        "learning_rate": one["learning_rate"],
        "tokens_per_second": one["tokens"] / one["seconds"],
    }
    assert list(run.evaluations) == [1000] and len(run.steps) == 10
    for record in records:
        if record["kind"] == "operand":
            group = f"{record['gemm']}.{record['operand']}"
            found = values(run, group, "zeros")[record["layer"], record["step"]]
            assert found == record["metrics"]["zeros"]
            scales = run.histograms[group, "scales"][run.layers[record["layer"]], record["step"]]
            assert scales.first == record["metrics"]["scales"]["first"] and scales.width == 1
            assert list(scales.counts) == record["metrics"]["scales"]["counts"]
    assert set(run.maps) >= {("weight", "r_quantized"), ("gradient", "underflow")}
    assert run.histograms["weight", "confidences"][0, 100].width == 0.1
    [warning] = run.warnings.values()
    assert warning["metric"] == "zeros" and warning["line"] == records[-1]["line"]
    assert run.unreadable == 0


def test_a_line_that_is_cut_off_is_skipped(tmp_path: Path) -> None:
    whole = json.dumps(step(2))
    for length in range(1, len(whole)):
        run = read(write(tmp_path, [start(), step(1)], end=whole[:length]))
        assert list(run.steps) == [1] and run.unreadable == 0
    # Negative control: the last character is what makes it a line.
    assert list(read(write(tmp_path, [start(), step(1)], end=whole)).steps) == [1, 2]


def test_a_resumed_run_goes_on_after_a_line_that_is_cut_off(tmp_path: Path) -> None:
    resumed = json.dumps(start(step=1)) + "\n" + json.dumps(step(2)) + "\n"
    for broken in ('{"kind": "step", "st', '{"kind": "step", "st\n'):
        run = read(write(tmp_path, [start(), step(1)], end=broken + resumed))
        assert [one["step"] for one in run.starts] == [0, 1] and list(run.steps) == [1, 2]
        assert run.unreadable == broken.count("\n")  # what stands on a line of its own


def test_unknown_kinds_and_keys_are_skipped(tmp_path: Path) -> None:
    records = [start(new=1), {"kind": "cache"}, {"other": 1}, step(1, new=[1]), {"kind": ["x"]}]
    run = read(write(tmp_path, records))
    assert losses(run) == {1: 3.0} and run.unreadable == 0


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        '{"kind": "step"}',
        '{"kind": "step", "step": "1"}',
        '{"kind": "step", "step": true}',
        '{"kind": "step", "step": 1180591620717411303424, "loss": 3.0}',
        '{"kind": "step", "step": -1, "loss": 3.0}',
        '{"kind": "operand", "step": 1, "layer": "a", "gemm": "fprop", "operand": "w"}',
        '{"kind": "weight", "step": 1, "layer": "a", "metrics": [1]}',
        '{"kind": "weight", "step": 1' + "0" * 30 + ', "layer": "a", "metrics": {"r": 1}}',
        "\0\0\0\0",
        "[" * 100_000,
    ],
    ids=lambda line: line[:40],
)
def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, line: str) -> None:
    end = f"{line}\n{json.dumps(step(2))}\n"
    run = read(write(tmp_path, [start(), step(1)], end=end))
    assert losses(run) == {1: 3.0, 2: 3.0} and run.unreadable == 1


def test_a_rate_that_is_not_finite_is_not_known(tmp_path: Path) -> None:
    run = read(write(tmp_path, [start(), step(1, tokens=8192, seconds=1e-320)]))
    assert run.steps[1]["tokens_per_second"] is None
    page([run])  # takes finite numbers only


def test_of_repeated_steps_the_last_wins(tmp_path: Path) -> None:
    first = [step(1), step(2, 2.0), operand(2, "a", zeros=0.2), operand(2, "b", zeros=0.3)]
    again = [step(2, 2.5), operand(2, "a", zeros=0.25), step(3, 1.0)]
    warning = {"kind": "warning", "step": 2, "layer": "a", "operand": "fprop.w", "metric": "zeros"}
    run = read(
        write(
            tmp_path,
            [
                start(),
                *first,
                {**warning, "line": "old"},
                start(step=1, lr=2e-3),
                *again,
                {**warning, "line": "new"},
            ],
        )
    )
    assert losses(run) == {1: 3.0, 2: 2.5, 3: 1.0}
    assert values(run, "fprop.w", "zeros") == {("a", 2): 0.25, ("b", 2): 0.3}
    assert [one["line"] for one in run.warnings.values()] == ["new"]
    assert [one["arguments"]["lr"] for one in run.starts] == ["0.001", "0.002"]


def test_null_nan_and_infinity_are_missing_values(tmp_path: Path) -> None:
    records = [step(1, None), operand(1, "a", zeros=None, gain=1.0), step(4, seconds=0, tokens=1)]
    end = (
        '{"kind": "step", "step": 2, "loss": NaN, "grad_norm": -Infinity}\n'
        '{"kind": "step", "step": 3, "loss": 1e999, "seconds": null, "tokens": 5}\n'
        '{"kind": "gradient", "step": 1, "layer": "a", "metrics": {"norm": NaN}}\n'
    )
    run = read(write(tmp_path, records, end))
    assert losses(run) == {1: None, 4: 3.0, 2: None, 3: None}
    assert run.steps[2]["grad_norm"] is None and run.unreadable == 0
    assert all(one["tokens_per_second"] is None for one in run.steps.values())
    assert math.isnan(values(run, "fprop.w", "zeros")["a", 1])
    assert math.isnan(values(run, "gradient", "norm")["a", 1])


def test_histograms_with_missing_or_absurd_numbers(tmp_path: Path) -> None:
    scales = [
        {"first": -3, "counts": [1, None, 2]},
        {"first": 10**9, "counts": [1]},
        {"first": 0, "width": 0, "counts": [1]},
        {"first": None, "counts": [1]},
        {"first": 0, "counts": 3},
    ]
    records = [operand(number, "a", scales=one) for number, one in enumerate(scales)]
    found = read(write(tmp_path, records)).histograms["fprop.w", "scales"]
    assert {key: list(one.counts) for key, one in found.items()} == {(0, 0): [1, 0, 2]}


def test_what_is_no_run_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run: no such file or folder; give the folder"):
        read(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"run/metrics.jsonl: no such file"):
        read(tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"metrics.jsonl is empty"):
        read(tmp_path / "run")
    for other in (b"hello\n", b"\x89PNG\r\n\0\xff", b'{"kind": "ste'):
        (tmp_path / "run/metrics.jsonl").write_bytes(other)
        with pytest.raises(ConfigError, match=r"has no line of a run's metrics") as raised:
            read(tmp_path / "run")
        assert "\n" not in str(raised.value)


def test_layers_are_in_the_order_of_the_model() -> None:
    ordered = [
        "embedding.word_embeddings",
        *(
            f"decoder.layers.{layer}.{linear}"
            for layer in range(12)
            for linear in (
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
            )
        ),
        "mtp.layers.0.transformer_layer.mlp.linear_fc1",
        "output_layer",
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=place) == ordered
    assert sorted(shuffled) != ordered  # as text 10 is before 2, and proj before qkv
    experts = [f"decoder.layers.1.mlp.experts.local_experts.{i}.linear_fc1" for i in range(11)]
    assert sorted(reversed(experts), key=place) == experts
    # A number beside a word, an empty name, and a digit that is no number can be compared too.
    assert len(sorted(["a.1", "a.b", "", "a.²", "1"], key=place)) == 5
