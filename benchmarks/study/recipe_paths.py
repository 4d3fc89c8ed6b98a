"""Paths of the studies' recipe files, relative to the checkout. Matrices name the files so."""


def candidate(name: str) -> str:
    """The path of a candidate for a recipe of this project."""
    return f"benchmarks/study/candidates/{name}.yaml"


def ablation(name: str) -> str:
    """The path of a recipe without one of its parts, or with a part more."""
    return f"benchmarks/study/ablations/{name}.yaml"
