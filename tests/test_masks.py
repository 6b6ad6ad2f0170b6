"""Named step masks against the published ones and against cache-dit's generator."""

from __future__ import annotations

import pytest

from stepfx.masks import MASK_NAMES, step_mask

# Masks that cache-dit 1.5 makes, by number of steps: slow, medium, fast, ultra.
PUBLISHED = {
    4: ["1101"] * 4,
    6: ["111001"] * 4,
    8: ["11111011", "11110101", "11101001", "11001001"],
    9: ["111110111", "111110101", "111101001", "111001001"],
    12: ["111101101111", "111101101001", "111010010011", "110100100011"],
    15: ["111101101101101", "111101101001001", "111010010010001", "110100100010001"],
    16: ["1111111101110011", "1111110110001001", "1111100000000001", "1100000000000001"],
    20: [
        "11111111011100111001",
        "11111101100011000101",
        "11111101000000000001",
        "11110000000000000001",
    ],
    25: [
        "1111111101110011100110011",
        "1111110110001100011000111",
        "1111110100010000100000101",
        "1111001000001000000100001",
    ],
    28: [
        "1111111101110011100110010001",
        "1111110110001100011000110001",
        "1111110100010000100000100001",
        "1111001000001000000100000001",
    ],
    30: [
        "111111111111011100111001100101",
        "111111111011000110001100011001",
        "111111111010001000010000010001",
        "111111001000001000000100000001",
    ],
    50: [
        "11111111111111111111110011111000111110001110001101",
        "11111111111111110011100000111000001110000011100001",
        "11111111111001100000110000000110000000001100000001",
        "11111110001100000000011000000000001100000000000001",
    ],
}


@pytest.mark.parametrize("steps", PUBLISHED)
def test_published_masks(steps: int) -> None:
    assert [step_mask(name, steps) for name in MASK_NAMES] == PUBLISHED[steps]


@pytest.mark.parametrize(
    ("steps", "counts"),
    [(40, (27, 22, 18, 12)), (100, (None, 56, 38, 27))],
)
def test_published_counts(steps: int, counts: tuple[int | None, ...]) -> None:
    for name, count in zip(MASK_NAMES, counts, strict=True):
        if count is not None:
            assert step_mask(name, steps).count("1") == count


@pytest.mark.parametrize("name", MASK_NAMES)
def test_masks_of_cache_dit(name: str) -> None:
    cache_dit = pytest.importorskip("cache_dit")
    for steps in (4, 6, *range(8, 101)):
        theirs = cache_dit.steps_mask(total_steps=steps, mask_policy=name)
        assert step_mask(name, steps) == "".join(map(str, theirs)), steps


@pytest.mark.parametrize("name", MASK_NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
def test_steps_that_cache_dit_has_no_mask_for(name: str, steps: int) -> None:
    mask = step_mask(name, steps)
    assert len(mask) == steps
    assert mask[0] == mask[-1] == "1"
