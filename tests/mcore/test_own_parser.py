"""A user's script that parses its arguments by itself: refused with a recipe, else as Megatron."""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.training import arguments

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import flags
from megatron_fp4.mcore.loop import compat, plugin
from testing.builders import fp4_arguments
from testing.worlds.launch import TINY
from testing.worlds.own_megatron import ON_A_CPU, run
from tests.mcore.test_own_megatron import ON_CPU, SIZES, error_of

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--own-scale", type=float)
    return parser


def of_megatrons_parser() -> argparse.Namespace:
    """Arguments of a parser that a script makes, which does not know this package's flags."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    args = arguments.add_megatron_arguments(parser).parse_args(TINY)
    args.rank = 0  # as Megatron needs it to validate them
    return args


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """Megatron's `parse_args` as the plugin leaves it, for a command line."""

    def parsed(*words: str, provider: Provider | None = None) -> argparse.Namespace:
        monkeypatch.setattr("sys.argv", ["script.py", *TINY, *words])
        return compat._knowing_recipes(arguments.parse_args)(provider)

    return parsed


def validated(args: argparse.Namespace) -> plugin.Plugin:
    """The plugin after a script has had Megatron validate its arguments."""
    own = plugin.Plugin(ours=False)
    assert own.validating(lambda args, defaults: args)(args) is args
    return own


@pytest.mark.parametrize("provider", [None, own_flags])
@pytest.mark.parametrize("words", ["", "--fp4-recipe off", "--save runs/a", "--verify-integrity"])
def test_without_a_recipe_it_is_as_an_unchecked_launch(
    words: str, provider: Provider | None, parse: Callable[..., argparse.Namespace]
) -> None:
    args = parse(*words.split(), provider=provider)
    own = validated(args)
    assert own.args is args and own.run is None
    assert args.fp4_recipe is None and args.fp4_recipe_content is None
    assert args.verify_integrity == ("--verify-integrity" in words) and not args.fp4_load_anyway
    assert args.fp4_metrics_interval == 0 and not args.fp4_verify_integrity
    # Negative control: as they are parsed, the plugin cannot begin with them.
    with pytest.raises(TypeError, match="not 'NoneType'"):
        plugin.Plugin(ours=False)._begin(parse("--save", "runs/a", provider=provider))


def test_megatrons_default_recipe_is_none() -> None:
    args = of_megatrons_parser()
    assert args.fp4_recipe == "nvfp4"
    with pytest.raises(AttributeError, match="fp4_recipe_option"):  # Negative control.
        plugin.Plugin(ours=False)._begin(args)
    assert validated(args).run is None and args.fp4_recipe is None


def test_arguments_that_were_not_validated_are_settled_too(
    monkeypatch: pytest.MonkeyPatch, parse: Callable[..., argparse.Namespace]
) -> None:
    args = parse()
    monkeypatch.setattr(plugin.training, "get_args", lambda: args)
    own = plugin.Plugin(ours=False)
    assert own.getting_model(lambda provider: provider())(lambda: "a model") == "a model"
    assert own.args is args and args.fp4_recipe_content is None
    recipe = parse("--fp4-recipe", "tetrajet")
    monkeypatch.setattr(plugin.training, "get_args", lambda: recipe)
    with pytest.raises(ConfigError, match="^--fp4-recipe would do nothing"):
        plugin.Plugin(ours=False).getting_model(lambda provider: provider())(lambda: "a model")


@pytest.mark.parametrize("provider", [None, own_flags])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--fp4-recipe tetrajet", "--fp4-recipe"),
        ("--fp4-recipe tetrajet --fp4-seed 3", "--fp4-recipe and --fp4-seed"),
        ("--fp4-recipe nvfp4", "--fp4-recipe"),
        ("--fp4-grad-comm fp8", "--fp4-grad-comm"),
        ("--fp4-module-recipe *=bf16", "--fp4-module-recipe"),
    ],
)
def test_a_flag_of_this_package_is_refused(
    words: str, named: str, provider: Provider | None, parse: Callable[..., argparse.Namespace]
) -> None:
    args = parse(*words.split(), provider=provider)
    with pytest.raises(ConfigError) as raised:
        validated(args)
    message = str(raised.value)
    assert message.startswith(f"{named} would do nothing") and "\n" not in message
    assert "parse_and_validate_args" in message
    # Negative control: parse_and_validate_args has settled what it hands to Megatron.
    settled = fp4_arguments.parse("--fp4-grad-comm", "fp8")
    assert validated(settled).args is None


def test_the_flags_are_added_once() -> None:
    parser = argparse.ArgumentParser()
    assert not flags.are_in(parser)
    assert flags.are_in(flags.add_flags(parser))


def test_it_trains_and_saves_as_without_the_plugin(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2")
    own = run("own_parser.py", 1, *SIZES, *ON_CPU, "--own-scale", "1", *save)
    alone = run("own_parser.py", 1, *SIZES, *ON_CPU, "--own-scale", "1", by=ON_A_CPU)
    assert own.status == alone.status == 0, (own.output + alone.output)[-4000:]
    assert len(own.losses) == 4 and own.losses == alone.losses


@pytest.mark.slow
def test_it_resumes_as_without_the_plugin(tmp_path: Path) -> None:
    launch = functools.partial(run, "own_parser.py", 1, *SIZES, *ON_CPU)
    saved = launch("--save", str(tmp_path), "--save-interval", "2")
    load = ("--load", str(tmp_path), "--ckpt-step", "2")
    own, alone = launch(*load), launch(*load, by=ON_A_CPU)
    assert own.status == alone.status == 0, (own.output + alone.output)[-4000:]
    assert len(own.losses) == 2 and own.losses == alone.losses
    assert own.losses[0] == saved.losses[2]


@pytest.mark.slow
def test_a_recipe_stops_it_in_one_line() -> None:
    refused = run("own_parser.py", 1, *SIZES, *ON_CPU, "--fp4-recipe", "tetrajet")
    assert "--fp4-recipe would do nothing: the script parses its arguments" in error_of(refused)
