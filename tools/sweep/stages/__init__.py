"""The stages of a sweep, by what they cost; each promotes combinations to the next."""

from tools.sweep.stages import diffusion, digits, draws, products, regression
from tools.sweep.stages.stage import Stage

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        products.STAGE,
        draws.STAGE,
        regression.STAGE,
        digits.STAGE,
        diffusion.STAGE,
    )
}
