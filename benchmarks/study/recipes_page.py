"""The tables and the picture of the pages that compare recipes, from committed results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.study import comparison, tables
from benchmarks.study.claims_table import claims_table
from benchmarks.study.comparison import Comparison
from benchmarks.study.entries import BF16, recipe_of
from benchmarks.study.equal_time import equal_time_table
from benchmarks.study.errors import StudyError
from benchmarks.study.gap_words import gap_and_seeds, label, loss_cells, perplexity, seeds_of
from benchmarks.study.gaps import Cell
from benchmarks.study.pictures import Series, draw_over_tokens, held_out_gaps, mean
from benchmarks.study.recipe_facts import LINEARS, STEPS, Bits, bits, linear_of, step_of
from benchmarks.study.recipe_facts import words as words_of
from benchmarks.study.repeated_text import repeated_table
from benchmarks.study.sizes import SIZES
from benchmarks.study.small_models import small_table
from megatron_fp4 import Recipe
from tools import pages
from tools.pages import table

README, RECIPES = "README.md", "docs/recipes.md"
CLAIMS, OWN = "docs/paper-claims.md", "docs/notes/tetrajet-fp8.md"
PICTURE = "docs/images/recipe-gaps.svg"
# Recipes of the picture; those that the tables have besides would crowd it.
PICTURED = ["fp8", "tetrajet-fp8", "four-over-six", "mxfp4-rht-sr", "tetrajet", "mxfp4"]
NOT_MEASURED = "not measured"


def pages_of(found: Comparison) -> dict[str, dict[str, str]]:
    """The tables of each page as Markdown text: {page: {name: table}}.

    page: its path from the checkout. name: as in the page's comment line `<!-- NAME -->`, after
    which the table is written.
    """
    about = [*tables.about(found.rows, found.planned), *tables.failures(found.failed), ""]
    made = {
        README: {"recipes: head": head(found)},
        RECIPES: {
            "recipes: losses": [*about, *loss_table(found, [BF16, *found.registered], "../")],
            "recipes: words": words_table(found.registered, "../"),
            "recipes: equal time": equal_time_table(found),
            "recipes: repeated text": repeated_table(found),
            "recipes: small models": small_table(),
        },
        CLAIMS: {"recipes: claims": claims_table(found.rows, found.cells[0])},
        OWN: {
            "recipes: losses of candidates": loss_table(found, found.candidates, "../../"),
            "recipes: words of candidates": words_table(found.candidates, "../../"),
        },
    }
    return {
        page: {name: "\n".join(lines) for name, lines in sections.items()}
        for page, sections in made.items()
    }


def head(found: Comparison) -> list[str]:
    """The first rows and columns of the first table, for the README: the recipes with results."""
    heads = ["recipe", "seeds", _minus(found.cells[0]), "perplexity ratio", "step, times BF16"]
    body = [
        [_linked(name, ""), *loss_cells(own)[:3], speed(name, "")[0]]
        for name in found.registered
        if (own := found.gap(name)) is not None
    ]
    return table(heads, body)


def loss_table(found: Comparison, names: list[str], up: str) -> list[str]:
    """What the recipes cost in loss, how fast they are, and their bits. up: see `speed`."""
    later = _later_cells(found, names)
    heads = ["recipe", "seeds", _minus(found.cells[0]), "perplexity ratio", "mean is"]
    heads += [*_heads_of(later), "step, times BF16", "tokens/s", "peak, GiB"]
    heads += ["X saved", "W held", "W sent"]
    body = []
    for name in names:
        line = [_linked(name, up), *loss_cells(None if name == BF16 else found.gap(name))]
        if name == BF16:
            line = [f"`{BF16}`", "", "0", "1", ""]
        line += _in_cells(found, name, later)
        body.append([*line, *speed(name, up), *_bits(recipe_of(name))])
    return table(heads, body)


def _later_cells(found: Comparison, names: list[str]) -> list[Cell]:
    """The cells after the first one in which any of these recipes has a gap."""
    quantized = [name for name in names if name != BF16]
    return [c for c in found.cells[1:] if any(found.gap(name, c) for name in quantized)]


def _minus(cell: Cell) -> str:
    """The head of a column of gaps."""
    return f"loss minus BF16's, {label(cell)}"


def _heads_of(cells: list[Cell]) -> list[str]:
    """The heads of the columns of `_in_cells`."""
    return [head for c in cells for head in (_minus(c), f"perplexity ratio, {c.size}")]


def _in_cells(found: Comparison, name: str, cells: list[Cell]) -> list[str]:
    """The columns of losses in the row of the recipe `name`: for each size its loss minus BF16's
    with the seeds, and its perplexity over BF16's."""
    if name == BF16:
        return ["0", "1"] * len(cells)
    gaps = [found.gap(name, cell) for cell in cells]
    return [w for g in gaps for w in (gap_and_seeds(g), "" if g is None else perplexity(g))]


def words_table(names: list[str], up: str) -> list[str]:
    """What each recipe quantizes. up: see `speed`."""
    body = [[_linked(name, up), *words_of(recipe_of(name))] for name in names]
    return table(["recipe", "fprop", "dgrad", "wgrad", "besides"], body)


def speed(name: str, up: str) -> list[str]:
    """Three cells of a recipe's row: the speed of a training step relative to BF16's, with a link
    to its result file, the tokens per second, and the peak memory in GiB.

    Where no step was measured, the first cell has the range of the speeds of single linears, or
    says that nothing was measured, and the others are empty. up: the relative path from the page to
    the root of the repository, such as "../", for the link.
    """
    results = f"{up}benchmarks/results"
    if (step := step_of(name, recipe_of(name))) is not None:
        phases = " by phases" if step.by_phases else ""
        return [
            f"[{step.ratio:.2f}]({results}/{STEPS}.json){phases}",
            f"{step.tokens:,.0f}",
            f"{step.peak:.1f}",
        ]
    if (linear := linear_of(name)) is not None:
        return [f"a linear: [{linear[0]:.2f} to {linear[1]:.2f}]({results}/{LINEARS}.json)", "", ""]
    return [NOT_MEASURED, "", ""]


def over_tokens(found: Comparison, cell: Cell) -> dict[str, Series]:
    """The gap to BF16 over the tokens in millions, in a cell, of each recipe of PICTURED with
    results: means over the seeds. Keys have the name and the number of seeds."""
    made = {}
    for name in PICTURED:
        if (own := found.gap(name, cell)) is not None:
            tokens = SIZES[cell.size].tokens / 1e6
            series = mean(held_out_gaps(found.rows, cell, name))
            made[f"{name} ({seeds_of(own)})"] = [(step * tokens, value) for step, value in series]
    return made


def panels(found: Comparison) -> dict[str, dict[str, Series]]:
    """What the picture of the page draws: `over_tokens` of each cell, by its label."""
    return {label(cell): over_tokens(found, cell) for cell in found.cells}


def write(root: Path) -> None:
    """Writes the tables between the marker lines of the pages of the checkout `root`, and draws its
    picture. Raises StudyError if it has no such page, or a page has no such lines."""
    found = comparison.read()
    for name, sections in pages_of(found).items():
        path = root / name
        try:
            path.write_text(into(path.read_text(), sections))
        except (OSError, ValueError) as error:
            raise StudyError(f"{path}: {error}") from error
    draw_over_tokens(panels(found), root / PICTURE)


def into(page: str, sections: dict[str, str]) -> str:
    """The text `page` with each table in place of what is between its marker lines. Raises
    ValueError if the page has no such lines."""
    for name, section in sections.items():
        page = pages.into(page, name, section)
    return page


def _linked(name: str, up: str) -> str:
    """A recipe's name, with a link to the file of a candidate."""
    return f"[`{Path(name).stem}`]({up}{name})" if name.endswith(".yaml") else f"`{name}`"


def _bits(recipe: Recipe) -> list[str]:
    """[X saved, W held, W sent]; those of phases and layers follow in parentheses."""
    found = [bits(each) for each in recipe.parts]

    def shown(values: list[float]) -> str:
        own, *late = dict.fromkeys(f"{value:.2f}".rstrip("0").rstrip(".") for value in values)
        return own + (f" ({', '.join(late)})" if late else "")

    return [shown([getattr(each, field) for each in found]) for field in Bits.__annotations__]
