"""A plain layered layout of an acyclic graph, for where graphviz is not installed.

In three steps (Sugiyama, Tagawa and Toda 1981): layers by longest path, order within a
layer by the median of the neighbours, positions by moving towards them. An edge that spans
several layers goes through a point in each, so that it does not cross boxes.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import networkx as nx

Node = Hashable
Point = tuple[float, float]

SWEEPS = 12


@dataclass(frozen=True)
class Layout:
    """Centres of nodes, points along edges (ends included) and the size, in pixels."""

    centres: dict[Node, Point]
    routes: dict[tuple[Node, Node], list[Point]]
    width: float
    height: float


def layered(
    graph: nx.DiGraph, widths: Mapping[Node, float], height: float, gap: Point
) -> Layout:
    """Lay `graph` out from top to bottom; boxes are `height` high, `gap` lies between them."""
    layer_of = _layers(graph)
    full, chains = _with_bends(graph, layer_of)
    rows: list[list[Node]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    for node, layer in layer_of.items():
        rows[layer].append(node)
    size = {node: widths.get(node, 2.0) for node in full}
    _order(rows, full)
    x = _positions(rows, full, size, gap[0])
    left = min((x[n] - size[n] / 2 for n in x), default=0.0)
    pitch = height + gap[1]
    place = {
        node: (x[node] - left, layer * pitch + height / 2)
        for layer, row in enumerate(rows)
        for node in row
    }
    routes = {}
    for edge, chain in chains.items():
        points = [place[node] for node in chain]
        (x0, y0), (x1, y1) = points[0], points[-1]
        routes[edge] = [(x0, y0 + height / 2), *points[1:-1], (x1, y1 - height / 2)]
    return Layout(
        {node: place[node] for node in graph},
        routes,
        max((x[n] + size[n] / 2 for n in x), default=0.0) - left,
        len(rows) * pitch - gap[1],
    )


def _layers(graph: nx.DiGraph) -> dict[Node, int]:
    """Return the longest path from a source; sources stand right above what they feed."""
    layer: dict[Node, int] = {}
    for node in nx.topological_sort(graph):
        layer[node] = 1 + max((layer[p] for p in graph.predecessors(node)), default=-1)
    for node in graph:
        if not graph.in_degree(node) and graph.out_degree(node):
            layer[node] = min(layer[s] for s in graph.successors(node)) - 1
    lowest = min(layer.values(), default=0)
    return {node: number - lowest for node, number in layer.items()}


def _with_bends(
    graph: nx.DiGraph, layer_of: dict[Node, int]
) -> tuple[nx.DiGraph, dict[tuple[Node, Node], list[Node]]]:
    """Put a bend into each layer that an edge crosses; return the chains of the edges."""
    full = nx.DiGraph()
    full.add_nodes_from(graph)
    chains = {}
    for a, b in graph.edges:
        chain: list[Node] = [a]
        for layer in range(layer_of[a] + 1, layer_of[b]):
            # Edges of one value share their bends.
            bend = ("bend", a, layer)
            layer_of[bend] = layer
            chain.append(bend)
        chain.append(b)
        nx.add_path(full, chain)
        chains[a, b] = chain
    return full, chains


def _order(rows: list[list[Node]], graph: nx.DiGraph) -> None:
    """Sort each row by the median place of its neighbours, down and up in turn."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            _sort_row(row, rows, graph, down)


def _sort_row(row: list[Node], rows: list[list[Node]], graph: nx.DiGraph, down: bool) -> None:
    place = {node: i for other in rows for i, node in enumerate(other)}
    near = graph.predecessors if down else graph.successors
    wish = {
        node: statistics.median(places) if (places := [place[n] for n in near(node)]) else i
        for i, node in enumerate(row)
    }
    row.sort(key=lambda node: wish[node])


def _positions(
    rows: list[list[Node]], graph: nx.DiGraph, size: Mapping[Node, float], gap: float
) -> dict[Node, float]:
    """Return the x of each node: as near to the mean of its neighbours as the row allows."""
    x: dict[Node, float] = {}
    for row in rows:
        at = 0.0
        for node in row:
            x[node] = at + size[node] / 2
            at += size[node] + gap
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        near = graph.predecessors if down else graph.successors
        for row in rows if down else reversed(rows):
            wish = [
                statistics.fmean(xs) if (xs := [x[n] for n in near(node)]) else x[node]
                for node in row
            ]
            _place_row(row, wish, x, size, gap)
    return x


def _place_row(
    row: list[Node],
    wish: list[float],
    x: dict[Node, float],
    size: Mapping[Node, float],
    gap: float,
) -> None:
    """Give each node its wish where there is room; nodes that collide share the loss.

    Collided nodes move as one group around the mean of their wishes (pool adjacent
    violators, the least squares solution for a fixed order).
    """
    offset, offsets = 0.0, []
    for i, node in enumerate(row):
        if i:
            offset += (size[row[i - 1]] + size[node]) / 2 + gap
        offsets.append(offset)
    groups: list[tuple[float, int]] = []  # (mean of wishes without offsets, members)
    for wanted, own in zip(wish, offsets, strict=True):
        mean, count = wanted - own, 1
        while groups and groups[-1][0] > mean:
            other, members = groups.pop()
            mean = (other * members + mean * count) / (members + count)
            count += members
        groups.append((mean, count))
    means = [mean for mean, count in groups for _ in range(count)]
    for node, mean, own in zip(row, means, offsets, strict=True):
        x[node] = mean + own
