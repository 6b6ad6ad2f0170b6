"""Blocks that differ from their list: a changed last or first block, a list that goes on.

    a a a a b          SD3: the last block drops a stream, that of FLUX a dead `getitem`
    a a a b b b        HunyuanDiT: the second half takes skips; SD3.5: three structures
    a a x a a          one block in the middle is another

A span next to a list belongs to it when it carries on the list's streams and does at least
half of the same matrix products.
"""

from __future__ import annotations

from difflib import SequenceMatcher

from torch import fx

from stepfx.patterns.block_list import BlockList, Stream
from stepfx.patterns.operations import ADDS, LAYOUT, is_matmul, name_of
from stepfx.patterns.program import Program, Span, is_tensor, shape_of, value_of

# Operations that take tensors apart and join them, value for value.
REARRANGES = LAYOUT | {"cat", "chunk", "concat", "split", "stack", "unbind"}


def extend_behind(
    program: Program, blocks: BlockList, limit: int, may_end_early: bool = False
) -> BlockList:
    """Add the block behind the list if it is one of them cut short or changed.

    The operations behind the list are aligned with its last block; nothing at `limit` or
    behind it is taken. A block that ends early ends with an add to its one stream: weak
    evidence of where the blocks are cut.
    """
    template, start = blocks.spans[-1], blocks.span.stop
    window = Span(start, min(start + _reach(len(template)), limit))
    aligned = align(program, template, window)
    offsets = [_offset(program, blocks, stream) for stream in blocks.streams]
    if may_end_early and len(offsets) == 1 and offsets[0] not in aligned:
        offsets = [_last_add(program, blocks, aligned)]
    made = [aligned[offset] for offset in offsets if offset in aligned]
    if not made or not _is_similar(program, template, aligned):
        return blocks
    span = Span(start, max(made) + 1)
    incoming = {stream.outputs[-1] for stream in blocks.streams}
    if incoming.isdisjoint(program.live_in(span)):
        return blocks
    streams = tuple(
        Stream(
            (*stream.inputs, stream.outputs[-1]),
            (
                *stream.outputs,
                program.nodes[aligned[offset]] if offset in aligned else None,
            ),
        )
        for stream, offset in zip(blocks.streams, offsets, strict=True)
    )
    return BlockList(program, (*blocks.spans, span), streams)


def extend_before(program: Program, blocks: BlockList, floor: int) -> BlockList:
    """Add the block before the list if it is one of them begun otherwise.

    The first block may unpack what all share, or lack what there is not yet to reuse.
    Nothing before `floor` is taken.
    """
    if len(blocks) < 2:
        return blocks
    template, stop = blocks.spans[1], blocks.span.start
    window = Span(max(floor, stop - _reach(len(template))), stop)
    aligned = align(program, template, window)
    if not aligned or not _is_similar(program, template, aligned):
        return blocks
    inputs, outputs = [], []
    for stream in blocks.streams:
        made = program.at(stream.entry)
        offset = program.at(stream.inputs[1]) - blocks.spans[0].start  # type: ignore[arg-type]
        if made not in window or aligned.get(offset) != made:
            return blocks
        outputs.append(stream.entry)
        inputs.append(
            _read_at(program, template, aligned, stream.inputs[1])
            or _taken_up(program, template, aligned, stream.inputs[1])
        )
    start = _narrowest(program, window, min(aligned.values()), inputs)
    if start is None:
        return blocks
    aligned = {offset: position for offset, position in aligned.items() if position >= start}
    if not _is_similar(program, template, aligned):
        return blocks
    streams = tuple(
        Stream((entry, *stream.inputs), (out, *stream.outputs))
        for entry, out, stream in zip(inputs, outputs, blocks.streams, strict=True)
    )
    return BlockList(program, (Span(start, stop), *blocks.spans), streams)


def extend_across_glue(
    program: Program, blocks: BlockList, floor: int, limit: int
) -> BlockList:
    """Add equal blocks that stand alone before and behind the list, with glue between.

    Two blocks make a repeat; one that glue parts from them does not. Nothing before `floor`
    or at `limit` and behind is taken.
    """
    size = len(blocks.spans[-1])
    for start in range(blocks.span.stop, min(blocks.span.stop + size // 2, limit - size + 1)):
        joined = _join(program, blocks, single) if (single := _like(blocks, start)) else None
        if joined is not None:
            return extend_across_glue(program, joined, floor, limit)
    for stop in range(
        blocks.span.start, max(blocks.span.start - size // 2, floor + size - 1), -1
    ):
        single = _like(blocks, stop - size)
        joined = _join(program, single, blocks) if single else None
        if joined is not None:
            return extend_across_glue(program, joined, floor, limit)
    return blocks


def _like(blocks: BlockList, start: int) -> BlockList | None:
    """Return the block at `start`, labelled as the last of `blocks`, as a list of one."""
    program, last = blocks.program, blocks.spans[-1]
    span = Span(start, start + len(last))
    labels = program.labels
    if (labels[span.start : span.stop] != labels[last.start : last.stop]).any():
        return None
    aligned = {offset: start + offset for offset in range(len(last))}
    streams = []
    for stream in blocks.streams:
        value, made = stream.inputs[-1], stream.outputs[-1]
        entry = _read_at(program, last, aligned, value)
        if entry is None or made is None or program.at(made) not in last:
            return None
        streams.append(
            Stream((entry,), (program.nodes[start + program.at(made) - last.start],))
        )
    return BlockList(program, (span,), tuple(streams))


def merge_lists(program: Program, lists: list[BlockList]) -> list[BlockList]:
    """Join lists of which one goes on with the streams of the other in similar blocks."""
    merged: list[BlockList] = []
    for blocks in sorted(lists, key=lambda b: b.span.start):
        for i, before in enumerate(merged):
            joined = _join(program, before, blocks)
            if joined is not None:
                merged[i] = joined
                break
        else:
            merged.append(blocks)
    return merged


def _join(program: Program, a: BlockList, b: BlockList) -> BlockList | None:
    """Return `a` and `b` as one list, or None if `b` does not carry on what `a` began."""
    gap = b.span.start - a.span.stop
    longest = max(len(a.spans[-1]), len(b.spans[0]))
    if gap < 0 or gap >= longest // 2 or len(a.streams) != len(b.streams):
        return None
    continued = _continued(program, a, b)
    if continued is None or not are_similar(program, a.spans, b.spans[0]):
        return None
    streams = tuple(
        Stream((*x.inputs, *b.streams[i].inputs), (*x.outputs, *b.streams[i].outputs))
        for x, i in zip(a.streams, continued, strict=True)
    )
    return BlockList(program, (*a.spans, *b.spans), streams)


def _continued(program: Program, a: BlockList, b: BlockList) -> list[int] | None:
    """Return, for each stream of `a`, the stream of `b` that carries it on."""
    glue = Span(a.span.stop, b.span.start)
    left = set(range(len(b.streams)))
    continued: list[int] = []
    for stream in a.streams:
        value = stream.outputs[-1]
        found = [i for i in sorted(left) if b.streams[i].entry is value]
        found = found or [
            i for i in sorted(left) if _comes_from(program, b.streams[i].entry, value, glue)
        ]
        if not found:
            return None
        left.remove(found[0])
        continued.append(found[0])
    return continued


def _comes_from(program: Program, node: fx.Node, source: fx.Node | None, within: Span) -> bool:
    """Tell whether glue makes `node` of `source` and leaves shape and dtype as they are."""
    if source is None or not _same_form(node, source):
        return False
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        if current is source:
            return True
        if program.at(current) in within:
            fresh = [n for n in current.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue += fresh
    return False


def are_similar(program: Program, known: tuple[Span, ...], span: Span) -> bool:
    """Tell whether half of the matrix products of the larger span are in the other too."""
    templates = {program.labels[s.start : s.stop].tobytes(): s for s in known}
    return any(
        _is_similar(program, a, align(program, a, b))
        for template in templates.values()
        for a, b in [sorted((template, span), key=len, reverse=True)]
    )


def align(program: Program, template: Span, window: Span) -> dict[int, int]:
    """Map offsets of `template` to positions in `window` with the same label, in order."""
    labels = program.labels
    matcher = SequenceMatcher(
        None,
        labels[template.start : template.stop].tolist(),
        labels[window.start : window.stop].tolist(),
        autojunk=False,
    )
    return {
        match.a + i: window.start + match.b + i
        for match in matcher.get_matching_blocks()
        for i in range(match.size)
    }


def _is_similar(program: Program, template: Span, aligned: dict[int, int]) -> bool:
    products = [i for i, node in enumerate(program.span_nodes(template)) if is_matmul(node)]
    return 2 * sum(offset in aligned for offset in products) >= len(products)


def _reach(period: int) -> int:
    """How far from the list a changed block is looked for."""
    return period + period // 4 + 4


def _offset(program: Program, blocks: BlockList, stream: Stream) -> int:
    made = stream.outputs[-1]
    return -1 if made is None else program.at(made) - blocks.spans[-1].start


def _last_add(program: Program, blocks: BlockList, aligned: dict[int, int]) -> int:
    """Return the last aligned offset that adds to the one stream: a block may end early."""
    value = blocks.streams[0].outputs[-1]
    adds = [
        offset
        for offset, position in aligned.items()
        if (node := program.nodes[position]).target in ADDS and _same_form(node, value)
    ]
    return max(adds, default=-1)


def _read_at(
    program: Program, template: Span, aligned: dict[int, int], value: fx.Node | None
) -> fx.Node | None:
    """Return what the aligned block reads where `template` reads `value`."""
    for offset, position in sorted(aligned.items()):
        edges = program.edges[template.start + offset]
        for mine, theirs in zip(edges, program.edges[position], strict=True):
            if mine is value:
                return theirs
    return None


def _taken_up(
    program: Program, template: Span, aligned: dict[int, int], value: fx.Node | None
) -> fx.Node | None:
    """Return what stands in the aligned block for the stream `value`, taken apart and joined.

    A block may split what enters it and join the parts, where the first is given parts.
    """
    known = {value}
    for offset, node in enumerate(program.span_nodes(template)):
        if name_of(node) not in REARRANGES or known.isdisjoint(node.all_input_nodes):
            continue
        known.add(node)
        if offset in aligned and _same_form(node, value):
            return program.nodes[aligned[offset]]
    return None


def _same_form(node: fx.Node, other: fx.Node | None) -> bool:
    if other is None or not is_tensor(value_of(node)) or shape_of(node) != shape_of(other):
        return False
    return bool(value_of(node).dtype == value_of(other).dtype)


def _narrowest(
    program: Program, window: Span, first: int, inputs: list[fx.Node | None]
) -> int | None:
    """Return where before `first` to cut: the fewest values live, the entries among them."""
    entries = [program.at(node) for node in inputs if node is not None]
    if len(entries) < len(inputs):
        return None
    least = max(window.start, *(position + 1 for position in entries))
    last = max(least, first)
    cuts = [(sum(program.last_use[least:cut] >= cut), -cut) for cut in range(least, last + 1)]
    return -min(cuts)[1]
