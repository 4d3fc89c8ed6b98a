"""The start table's line about W's operands that are held over a step (--fp4-weight-cache)."""

import pytest

from megatron_fp4.mcore.model.start_lines import held_weights

AGAIN = "are quantized again for each microbatch"


@pytest.mark.parametrize(
    ("keeps", "of_none", "of_all"),
    [
        (None, f"weights {AGAIN}", f"weights for dgrad {AGAIN}"),
        ("remade", f"weights {AGAIN}, and again in its", f"weights for dgrad {AGAIN}"),
        ("packed", "weights are quantized once a step and kept packed: 3", "weights for dgrad are"),
        ("fprop", "weights are quantized once a step for fprop", f"weights for dgrad {AGAIN}"),
    ],
)
def test_weights_that_come_as_codes_are_quantized_for_dgrad_alone(
    keeps: str | None, of_none: str, of_all: str
) -> None:
    plain, every, some = (
        held_weights(keeps, 3 * 2**20, x) for x in ({False}, {True}, {False, True})
    )
    assert plain.startswith(of_none) and every.startswith(of_all)
    assert some == f"{plain}; where W comes as codes, for dgrad alone"
    assert held_weights(keeps, 3 * 2**20, set()) == plain  # a stage without linears
