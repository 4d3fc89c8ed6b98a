"""Searches the design space of FP4 training: formats, scales, roundings, transforms, estimators.

    python -m tools.sweep run products [--number 2400] [--minutes 50]
    python -m tools.sweep run digits
    python -m tools.sweep run products scale=e8m0,ue5m3 block=16,32 --results mine.jsonl
    python -m tools.sweep try digits scale=e4m3 block=16 rule=nearest backward_rule=nearest
    python -m tools.sweep cost tetrajet --device blackwell
    python -m tools.sweep show

docs/design-space.md describes it, and has its results.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron_fp4.description import titled
from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.costs_text import text
from megatron_fp4.estimate.overhead import DEVICES, setting_of
from megatron_fp4.estimate.plans import recipe_named
from megatron_fp4.plan.command import add_sharding, check_sizes_of_flags, sizes_on_rank
from tools import pages, rows, runs
from tools.stamp import stamp
from tools.sweep import axes, factorial, llama, page, results, running, tensors, words
from tools.sweep.axes import Combination
from tools.sweep.building import recipe_of
from tools.sweep.pareto import INPUTS, OUTPUTS, TOKENS, draw, to_confirm
from tools.sweep.promotion import (
    WITHOUT_TRAINING,
    check_before,
    check_complete,
    check_directed,
    check_sampled,
    level_of,
    promoted,
    stars_of,
    to_evaluate,
)
from tools.sweep.results import BF16
from tools.sweep.sampling import directed, sample
from tools.sweep.stages import STAGES

RESULTS = Path("benchmarks/results/sweep.jsonl")
WORK = Path("runs/sweep")
UNFINISHED = 75  # the exit status when combinations are left: EX_TEMPFAIL of sysexits.h
INTERRUPTED = 128 + signal.SIGINT
NUMBER, SEED = 2400, 1  # of the sample
SIZES = {"tokens": "--tokens", "in_features": "--inputs", "out_features": "--outputs"}


def run(args: argparse.Namespace) -> int:
    """Evaluates combinations by a stage: a sample by the first, promoted ones by the others. With
    axis=value,value instead the product of these values, by any stage."""
    began = time.monotonic()
    for name in ("number", "processes"):
        _check_positive(args, name)
    if args.minutes is not None and not args.minutes > 0:
        raise ConfigError(f"--minutes is {args.minutes:g}: give more than 0")
    stars = _directed(args) if args.values else _promoted(args)
    with rows.alone(args.results):
        recorded = recorded_for(args)
        tasks = [running.Task(args.stage, each, star, recorded) for each, star in stars.items()]
        deadline = None if args.minutes is None else began + 60 * args.minutes
        try:
            left = running.run(tasks, args.results, stamp(args.commit), args.processes, deadline)
            status = UNFINISHED if left else 0
        except KeyboardInterrupt:
            status = INTERRUPTED
    print(_told(tasks, args.results) + (": the same command goes on" if status else ""))
    return status


def _promoted(args: argparse.Namespace) -> dict[Combination, str]:
    """What the stage is to evaluate, with stars: the sample, or what the stages before promote."""
    level, found = level_of(args.stage), results.read(args.results)
    sampled = sample(args.number, args.seed)
    check_sampled(found, sampled, args.results)
    check_before(level, found, sampled)
    return to_evaluate(level, found, sampled)


def _directed(args: argparse.Namespace) -> dict[Combination, str]:
    """The product of the values that the words give, and BF16 if the stage trains a model."""
    check_directed(results.read(args.results), args.results)
    if (args.number, args.seed) != (NUMBER, SEED):
        raise ConfigError("--number and --seed are of a sample: leave them out, or axis=value")
    found, reasons = directed(chosen(args.values))
    _check_of_stage(found, args.stage)
    if reasons:
        every = len(reasons) + len(found)
        told = f"left out {len(reasons)} of {every}, whose values contradict each other"
        print(f"sweep: {told}; the first: {reasons[0]}")
    trained = not STAGES[args.stage].recorded
    return found | ({each: each.key for each in BF16.values()} if trained else {})


def _check_of_stage(combinations: Iterable[Combination], stage: str) -> None:
    """Raises ConfigError if a combination has a value of the training around a recipe, and the
    stage does not depend on it."""
    if stage in WITHOUT_TRAINING:
        for each in combinations:
            axes.check_of_recipe(each, f"stage {stage}")


def _told(tasks: list[running.Task], path: Path) -> str:
    """The last line that `run` prints: how many tasks have results in the file, and how many of
    these failed."""
    hashes = {task.hash for task in tasks}
    own = [row for row in results.read(path) if row["hash"] in hashes]
    failed = sum(row["status"] == running.FAILED for row in own)
    what = f"{len(own)} of {len(tasks)} have results of {tasks[0].stage}"
    return f"sweep: {what}, of which {failed} failed"


def _check_positive(args: argparse.Namespace, name: str) -> None:
    if (value := getattr(args, name)) < 1:
        raise ConfigError(f"--{name} is {value}: give 1 or more")


def attempt(args: argparse.Namespace) -> int:
    """Evaluates one combination, given as axis=value, and keeps no result. Prints what it scores
    less than BF16 of the same seeds."""
    combination = combination_of(args.values)
    axes.check(combination)
    _check_of_stage([combination], args.stage)
    torch.set_num_threads(1)  # as in the processes of a run: the tensors are small
    stage, recorded = STAGES[args.stage], recorded_for(args)
    if combination.quantized:
        print(recipe_of(combination))
    tasks = [running.Task(args.stage, combination, combination.key, recorded)]
    plain = BF16[combination.optimizer]
    if not stage.recorded:
        tasks.append(running.Task(args.stage, plain, plain.key, recorded))
    found = [running.evaluate(task) for task in tasks]
    print(json.dumps({key: found[0][key] for key in ("status", "seeds", "seconds")}, indent=2))
    if not stage.recorded and combination == plain:
        print("score: 0, since this is what others are compared with")
    for score in results.scores(found, args.stage).values():
        print(f"score: {score:+.5f}{'' if stage.recorded else ' (the loss less that of BF16)'}")
    return 0


def combination_of(words: list[str]) -> Combination:
    """The combination with these values on its axes, and the first value on all others.

    words: each "axis=value". Raises ConfigError for a word of another form, an axis that does not
    exist, and a value that the axis does not have.
    """
    return axes.with_values(chosen(words))


def recorded_for(args: argparse.Namespace) -> Path | None:
    """The file of the recorded tensors, which is made if it is not there yet; None for a stage that
    reads none. Raises ValueError if it is damaged."""
    if not STAGES[args.stage].recorded:
        return None
    path = tensors.record(args.work.resolve())
    tensors.read(path)
    return path


def cost(args: argparse.Namespace) -> int:
    """Prints what a recipe takes in one linear on a GPU, by technique and GEMM; and what those of
    its phases and of its layers take."""
    first, *others = args.values
    if "=" in first:
        combination = combination_of(args.values)
        axes.check_of_recipe(combination, "the cost")
        recipe = recipe_of(combination)
    else:
        recipe = recipe_named(first, **chosen(others))
    sharding, tokens, inputs, outputs = sizes_on_rank(args, SIZES)
    gpu = DEVICES[args.device]
    setting = setting_of(gpu, inputs, outputs, tokens, sharding)
    for each in recipe.parts:
        check_sizes_of_flags(each, args.tokens, inputs, outputs, SIZES)
    for title, each in titled(recipe):
        print(title + text(each, setting, gpu), end="")
    return 0


def chosen(words: list[str]) -> dict[str, str]:
    """The words "name=value" by name. Raises ConfigError for another word, or a repeated name."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word} is not name=value")
        if name in found:
            raise ConfigError(f"{name} is given twice: give it once")
        found[name] = value
    return found


def llama_matrix(args: argparse.Namespace) -> int:
    """Writes the matrix of benchmarks/study that trains what the stages before have promoted."""
    return _write_matrix(args, llama.matrix(promoted_to_llama(results.read(args.results))))


def promoted_to_llama(found: list[rows.Row]) -> dict[Combination, str]:
    """The combinations that go on to the last stage, with their stars.

    found: the rows of the stages before. Raises ConfigError if a stage of them has no result for
    some combination that was promoted to it. For stages of the first level this is not known,
    since the size of their sample is not recorded: what they have is taken for all.
    """
    check_before(level_of(llama.NAME), found, {})
    return promoted(found, level_of(llama.NAME))


def _write_matrix(args: argparse.Namespace, written: str) -> int:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(written)
    print(f"sweep: python -m benchmarks.study run {args.out}")
    return 0


def matrix_of_best(args: argparse.Namespace) -> int:
    """Writes the matrix of benchmarks/study that trains the best of the last stage with fresh
    seeds."""
    path = study_of(args)
    if path is None:
        raise ConfigError(f"{args.results} has no runs of the last stage: give --study with theirs")
    found, study = results.read(args.results), llama.read(path)
    check_complete(llama.NAME, llama.recipes(promoted_to_llama(found)), llama.trained(study))
    every = page.points_of(found + llama.rows(study, stars_of(found)), llama.NAME)
    return _write_matrix(args, llama.matrix_of_best(to_confirm(every)))


def study_of(args: argparse.Namespace) -> Path | None:
    """The file with the runs of the last stage, stage `llama`, which benchmarks/study trains.

    It is the file of --study. Without that flag it is the committed study if --results is the
    committed file too, and otherwise None: the committed runs were promoted by those results alone.
    """
    study: Path | None = args.study
    committed = args.results.resolve() == RESULTS.resolve()
    return llama.RESULTS if study is None and committed else study


def all_rows(path: Path, study: Path | None) -> list[rows.Row]:
    """The rows of all stages of a sweep.

    path: the result file, with the stages that this program runs. study: the file with the runs of
    the last stage; None if there are none.
    """
    found = results.read(path)
    return found + llama.rows(llama.read(study) if study else [], stars_of(found))


def show(args: argparse.Namespace) -> int:
    """Prints the tables of the results, or writes them between the markers of a page."""
    text = None if args.page is None else args.page.read_text()
    study = study_of(args)
    every = all_rows(args.results, study)
    found = page.section(every, study)
    if text is None:
        print(found)
    else:
        written = pages.into(text, "sweep", found)
        args.page.write_text(pages.into(written, "axes", "\n".join(page.axes_table())))
    if args.picture is not None:
        own = page.compared(every)
        if (stage := page.last_stage(own)) is None:
            raise ConfigError(f"{args.results} has no scores to draw: run a stage to its end")
        draw(page.points_of(own, stage), f"score of {stage}", args.picture)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(required=True)
    for name, function in (("run", run), ("try", attempt)):
        command = commands.add_parser(name, help=" ".join((function.__doc__ or "").split()))
        command.set_defaults(function=function)
        command.add_argument("stage", choices=list(STAGES))
        command.add_argument("--work", type=Path, default=WORK, help="text and recorded tensors")
    add = commands.choices["run"].add_argument
    add("--results", type=Path, default=RESULTS, help="the result file (JSON lines)")
    design = len(factorial.combinations()) + len(words.combinations())
    sampled = f"combinations of the sample (%(default)s); {design} of two designs are added"
    add("--number", type=int, default=NUMBER, help=sampled)
    add("--seed", type=int, default=SEED, help="of the sample")
    add("--processes", type=int, default=os.cpu_count(), help="at a time (%(default)s)")
    add("--minutes", type=float, help="end after so long; the next call goes on")
    add("--commit", help="where the tree has no git of its own")
    for name, told in (("run", "axis=value,value"), ("try", "axis=value")):
        commands.choices[name].add_argument("values", nargs="*", help=told)
    for name, function, path in (
        (llama.NAME, llama_matrix, "sweep.yaml"), ("best", matrix_of_best, "sweep-best.yaml"),
    ):  # fmt: skip
        matrix = commands.add_parser(name, help=" ".join((function.__doc__ or "").split()))
        matrix.set_defaults(function=function)
        matrix.add_argument("--out", type=Path, default=WORK / path, help="the matrix")
    tables = commands.add_parser("show", help=(show.__doc__ or "").strip())
    tables.set_defaults(function=show)
    for name in (llama.NAME, "best", "show"):
        add = commands.choices[name].add_argument
        add("--results", type=Path, default=RESULTS, help="the result file")
    for name in ("best", "show"):
        add = commands.choices[name].add_argument
        add("--study", type=Path, help=f"results of the last stage ({llama.RESULTS} for {RESULTS})")
    tables.add_argument("--page", type=Path, help="docs/design-space.md, or another")
    tables.add_argument("--picture", type=Path, help="draw scores over times, as SVG")
    costs = commands.add_parser("cost", help=(cost.__doc__ or "").strip())
    costs.set_defaults(function=cost)
    costs.add_argument("values", nargs="+", help="a recipe and its options, or axis=value")
    costs.add_argument("--device", choices=list(DEVICES), default="hopper", help="(%(default)s)")
    for name, size in (("inputs", INPUTS), ("outputs", OUTPUTS), ("tokens", TOKENS)):
        costs.add_argument(f"--{name}", type=int, default=size, help="over all ranks (%(default)s)")
    add_sharding(costs)
    return parser


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The parsed command line. Words "axis=value" may stand on either side of options, which
    argparse alone does not allow after a positional argument."""
    parser = _parser()
    args, others = parser.parse_known_args(arguments)
    values = [word for word in others if "=" in word and not word.startswith("-")]
    if others and (values != others or "values" not in args):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if values:
        args.values = [*args.values, *values]
    return args


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line `arguments` (None: sys.argv); returns the exit status: 0, 2 after an
    error in the arguments, UNFINISHED if combinations are left, INTERRUPTED after an interrupt."""
    args = _parsed(arguments)
    try:
        status = int(args.function(args))
        sys.stdout.flush()
        return status
    except (ConfigError, ValueError, runs.RunFailed, running.SweepError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"sweep: {error.filename}: {error.strerror}: give another file", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as an interrupt does
    sys.exit(main())
