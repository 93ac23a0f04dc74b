"""The sums of a profile; that events have a program's names is seen by running the script."""

from benchmarks import step_profile

ROWS = [("decoder.unit_rms", 0.002, 4e9), ("products.product, products", 0.005, 1e9), ("decoder.unit_rms", 0.001, 2e9)]


def test_a_function_has_the_sum_of_its_kernels_and_the_longest_stands_first():
    lines = step_profile.table("a step", ROWS).splitlines()
    assert lines[0] == "a step; its kernels add up to 0.008 s"
    assert [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[-2:]] == [
        ["products.product, products", "5.0", "62.5%", "1.0"],
        ["decoder.unit_rms", "3.0", "37.5%", "6.0"],
    ]
