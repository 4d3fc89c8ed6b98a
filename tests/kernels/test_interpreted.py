"""The kernels in Triton's interpreter, on a CPU, against the reference."""

from tests.kernels.interpreter import differences


def test_codes_and_scales_are_the_reference_s() -> None:
    assert differences() == [""]


def test_carriers_are_ml_dtypes() -> None:
    assert differences(module="carriers") == [""]


def test_codes_with_float32_scales_are_the_reference_s() -> None:
    assert differences(module="rows") == [""]


def test_codes_with_scales_in_small_floats_are_the_reference_s() -> None:
    assert differences(module="blocks") == [""]


def test_the_estimator_s_factor_is_the_reference_s() -> None:
    assert differences(module="estimator") == [""]


def test_outliers_are_the_reference_s() -> None:
    assert differences(module="outliers") == [""]
