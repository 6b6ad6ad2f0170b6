"""One spelling: tuple items and in-place arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from stepfx.dynamo_flags import with_flags
from stepfx.passes.canonicalize import Canonicalize
from stepfx.testing import capture, check_no_match, check_pass, run_pass


def test_in_place_add_on_a_tensor_of_its_own() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h += x.sin()
        return h.exp()

    check_pass(
        Canonicalize(),
        function,
        (torch.ones(2, 2),),
        before="""
            %0: f32[2, 2] = input
            %1: f32[2, 2] = mul(%0, 2)
            %2: f32[2, 2] = %0.sin()
            %3: f32[2, 2] = iadd(%1, %2)
            %4: f32[2, 2] = %3.exp()
            return (%4,)
        """,
        after="""
            %0: f32[2, 2] = input
            %1: f32[2, 2] = mul(%0, 2)
            %2: f32[2, 2] = %0.sin()
            %3: f32[2, 2] = add(%1, %2)
            %4: f32[2, 2] = %3.exp()
            return (%4,)
        """,
        rewrites=1,
    )


def test_a_chain_of_in_place_adds() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        for _ in range(3):
            h += h.sin()
        return h

    check_pass(
        Canonicalize(),
        function,
        (torch.ones(2),),
        before="""
            %0: f32[2] = input
            %1: f32[2] = mul(%0, 2)
            %2: f32[2] = %1.sin()
            %3: f32[2] = iadd(%1, %2)
            %4: f32[2] = %3.sin()
            %5: f32[2] = iadd(%3, %4)
            %6: f32[2] = %5.sin()
            %7: f32[2] = iadd(%5, %6)
            return (%7,)
        """,
        after="""
            %0: f32[2] = input
            %1: f32[2] = mul(%0, 2)
            %2: f32[2] = %1.sin()
            %3: f32[2] = add(%1, %2)
            %4: f32[2] = %3.sin()
            %5: f32[2] = add(%3, %4)
            %6: f32[2] = %5.sin()
            %7: f32[2] = add(%5, %6)
            return (%7,)
        """,
        rewrites=3,
    )


def test_a_write_that_the_written_name_must_see() -> None:
    # `h` is read under the name it had before `mul_`: the method's result is unused.
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        y = h.sin()
        h.mul_(x)
        h.add_(y)
        return h.cos()

    check_pass(
        Canonicalize(),
        function,
        (torch.full((2, 2), 3.0),),
        before="""
            %0: f32[2, 2] = input
            %1: f32[2, 2] = mul(%0, 2)
            %2: f32[2, 2] = %1.sin()
            %3: f32[2, 2] = %1.mul_(%0)
            %4: f32[2, 2] = %1.add_(%2)
            %5: f32[2, 2] = %1.cos()
            return (%5,)
        """,
        after="""
            %0: f32[2, 2] = input
            %1: f32[2, 2] = mul(%0, 2)
            %2: f32[2, 2] = %1.sin()
            %3: f32[2, 2] = %1.mul(%0)
            %4: f32[2, 2] = %3.add(%2)
            %5: f32[2, 2] = %4.cos()
            return (%5,)
        """,
        rewrites=2,
    )


def test_a_write_to_a_view_that_is_taken_again() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        first, again = h[:1], h[:1]
        first += 1
        return first + again.sin() + h[1:]

    x = torch.ones(2)
    gm = capture(function, (x,))
    expected = gm(x)[0]
    assert run_pass(Canonicalize(), gm)[0] == 0  # `h` is read later, as a whole
    assert torch.equal(gm(x)[0], expected)


def test_a_write_to_the_callers_tensor_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x.sin()

    check_no_match(Canonicalize(), function, (torch.ones(2),))


def test_a_write_that_a_view_must_see_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        view = h[:1]
        h += 1
        return view + h

    check_no_match(Canonicalize(), function, (torch.ones(2),))


def test_a_write_through_a_view_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h[:1] += 1
        return h

    x = torch.ones(2)
    gm = capture(function, (x,))
    expected = gm(x)[0]
    run_pass(Canonicalize(), gm)
    assert torch.equal(gm(x)[0], expected)


def test_a_write_that_casts_stays() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x * 2
        h += y  # bfloat16 += float32 stays bfloat16; an add would not
        return h

    check_no_match(Canonicalize(), function, (torch.ones(2).bfloat16(), torch.ones(2)))


def test_items_follow_their_tuple() -> None:
    def function(x: torch.Tensor) -> Any:
        parts = torch.split(x, 1)
        y = x.sin()
        return parts[0] + y[:1], y

    gm = capture(function, (torch.ones(2, 2),))
    items = [n for n in gm.graph.nodes if "getitem" in n.name]
    last = next(n for n in gm.graph.nodes if n.name == "y")
    last.append(items[0])  # as a model would that takes the items late
    expected = gm(torch.ones(2, 2))
    assert run_pass(Canonicalize(), gm)[0] >= 1
    order = [n.name for n in gm.graph.nodes]
    assert order.index(items[0].name) < order.index("y")
    assert torch.equal(gm(torch.ones(2, 2))[0], expected[0])


def test_checks_of_sizes_that_depend_on_data_are_dropped() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        kept = x[x > 0]
        torch._check(kept.shape[0] >= 2)
        return kept.sin()

    le = "Runtime assertion failed for expression u0 <= 4 on node 'le'"
    ge = "Runtime assertion failed for expression u0 >= 2 on node 'ge'"
    with with_flags():
        check_pass(
            Canonicalize(),
            function,
            (torch.tensor([1.0, -1.0, 2.0, 3.0]),),
            before=f"""
                %0: f32[4] = input
                %1: bool[4] = gt(%0, 0)
                %2: f32[u0] = getitem(%0, %1)
                %3 = sym_size.int(%2, 0)
                %4 = le(%3, 4)
                %5 = _assert_scalar.default(%4, {le})
                %6 = ge(%3, 2)
                %7 = _assert_scalar.default(%6, {ge})
                %8: f32[u0] = %2.sin()
                return (%8,)
            """,
            after="""
                %0: f32[4] = input
                %1: bool[4] = gt(%0, 0)
                %2: f32[u0] = getitem(%0, %1)
                %3: f32[u0] = %2.sin()
                return (%3,)
            """,
            rewrites=2,
        )


def test_a_check_of_a_number_that_was_read_stays() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        length = n.item()
        torch._check(length >= 2)
        return x * length

    with with_flags():
        check_no_match(Canonicalize(), function, (torch.ones(4), torch.tensor(3)))
